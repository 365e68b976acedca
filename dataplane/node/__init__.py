"""The node process: fetch, cache, decode and assemble, as the scheduler decides.

The door: `server` runs a node, and opens its port for other nodes and its folder on disk. Commands
compute with `dataset` and `delivery` what a job would read.
"""
