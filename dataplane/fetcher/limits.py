"""What node and fetcher agree on."""

READS_MAX = 64
"""Reads that one fetcher has under way at once: each has a thread."""
