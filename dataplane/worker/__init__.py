"""The process that decodes blocks and fills slabs, how it is started, and how it may end."""
