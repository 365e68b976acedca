"""Limits on which node and fetcher agree."""

READS_MAX = 64
"""Reads that one fetcher has under way at once: each has a thread."""
SLABS_MAX = 64
"""Slabs that one fetcher waits for or receives at once: each has a thread, apart from those of
reads."""
