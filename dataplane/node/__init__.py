"""The node process: it fetches, caches, decodes and assembles, as the scheduler decides."""
