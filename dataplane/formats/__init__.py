"""Shard formats: bytes to Arrow, one format per file."""
