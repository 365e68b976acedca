"""The data connections between nodes: how a block gets from one node's arena into another's."""
