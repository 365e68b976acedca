"""Make a dataset's manifest: list its shards and index their blocks. Used by nodes and commands."""
