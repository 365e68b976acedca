"""Make a dataset's manifest: list its shards and index their blocks. Used by nodes and commands.

The door: `indexing` opens a dataset and shows the progress of slow work, `viewing` opens a view of
it and says what is known of its shards, and `journal` keeps both for later runs.
"""
