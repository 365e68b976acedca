"""The node process: fetch, cache, decode and assemble, as the scheduler decides.

The door: `server` runs a node, and `neighbours` opens its port for other nodes. Commands compute
with `dataset`, `datasets`, `delivery` and `job_columns` what a job would read, count packs with
`counts`, and check the folder of `stored` blocks.
"""
