"""The node process: fetch, cache, decode and assemble, as the scheduler decides."""
