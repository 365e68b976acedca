"""Make a dataset's manifest: list its shards and index their blocks. Used by nodes and commands.

The door: `indexing` opens a dataset, `viewing` a view of it, and `journal` keeps both for later
runs. `projection`, `folders` and `shared_schema` say what is known of shards; `slow` shows
progress. `run` and `batches` have the types of what callers pass.
"""
