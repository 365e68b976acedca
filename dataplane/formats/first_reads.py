"""The byte ranges of a shard that indexing reads first."""

from __future__ import annotations

from dataplane.model.records import Region

PROBE_BYTES = 64 << 10
"""The size of a read if only a few bytes are needed."""


def of_arrow(size_bytes: int) -> tuple[Region, ...]:
    """Return the start of the shard, and its end in case it is a file."""
    if size_bytes <= 2 * PROBE_BYTES:
        return (Region(0, size_bytes),)
    return Region(0, PROBE_BYTES), Region(size_bytes - PROBE_BYTES, PROBE_BYTES)


def of_parquet(size_bytes: int) -> tuple[Region, ...]:
    """Return the end of the shard, where most footers fit."""
    length = min(size_bytes, PROBE_BYTES)
    return (Region(size_bytes - length, length),)
