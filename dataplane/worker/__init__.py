"""The process that decodes blocks and fills slabs: its work, its start, and its possible ends."""
