"""The process that decodes blocks and fills slabs: its work, its start, and its possible ends.

The door: `worker` is the process, `process` and `forking` start it, `death` says how it can end,
and what it may take. `indexing` indexes shards there. `columns`, `row_layout`, `block_mapping`,
`stacking`, `functions` and `kernel` say what a decoded block looks like, and what may be done with
it; `salvaging`, which of its rows are bad.
"""
