"""A dataset's manifest: its shards and their blocks. Nodes and commands use it."""
