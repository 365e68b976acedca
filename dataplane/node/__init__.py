"""The cache node: fetch, cache, decode, assemble."""
