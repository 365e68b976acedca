"""Make a dataset's manifest: list its shards and index their blocks. Used by nodes and commands.

The door: `indexing` opens a dataset and shows the progress of slow work, `viewing` opens a view of
a dataset and gives advice about its folders, and `journal` caches manifests and shard indexes for
later runs.
"""
