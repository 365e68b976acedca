"""The process that reads shards from object stores into the arenas of a node."""
