"""The data connections between nodes: how a block gets from one node's arena into another's.

The door: `asking` requests blocks and slabs, and `lender` is the process that sends them; both use
`wire` and `line_tls`.
"""
