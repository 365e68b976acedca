"""The null counts of a dataset, one number for each field node of its schema."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Int64 = NDArray[np.int64]

NEVER = -2
"""The schemas of all shards rule out nulls."""
UNKNOWN = -1
"""No null was found, but not everything was examined."""


class NullCounts(Struct, frozen=True, eq=False):
    """Null counts of the N field nodes of a schema, in depth-first order as in Arrow IPC. The
    arrays are read-only.

    Shapes:  counts: int64[N]: the minimum number of nulls, or UNKNOWN, or NEVER. shards: int64[N]:
             the first shard with nulls, -1 where none is known.
    """

    counts: Int64
    shards: Int64

    @classmethod
    def of(cls, by_shard: Iterable[Sequence[int]]) -> Self | None:
        """Merge the counts of each shard, in order; None if no shard has counts. A shard without
        counts may have nulls anywhere.
        """
        counts, shards = np.empty(0, np.int64), np.empty(0, np.int64)
        silent = False
        for shard, found in enumerate(by_shard):
            silent = silent or not found
            told = np.array(found, np.int64)
            if not len(told):
                continue
            if not len(counts):
                counts, shards = np.full(len(told), NEVER), np.full(len(told), -1)
            shards = np.where((shards < 0) & (told > 0), shard, shards)
            counts = merged(counts, told)
        if silent:
            counts = merged(counts, np.full(len(counts), UNKNOWN))
        return cls(_fixed(counts), _fixed(shards)) if len(counts) else None

    def without(self, nodes: Sequence[int]) -> Self:
        """Return the counts with no known null in these field nodes."""
        counts, shards = self.counts.copy(), self.shards.copy()
        counts[list(nodes)] = np.minimum(counts[list(nodes)], 0)
        shards[list(nodes)] = -1
        return type(self)(_fixed(counts), _fixed(shards))

    def to_bytes(self) -> bytes:
        """Serialise the counts for a manifest."""
        return np.concatenate([self.counts, self.shards]).astype("<i8").tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> Self | None:
        """Invert `to_bytes`; None for empty bytes.

        Raises:  ValueError: the content is invalid.
        """
        numbers = np.frombuffer(content, "<i8")
        if len(numbers) % 2:
            raise ValueError(f"null counts of {len(numbers)} numbers")
        counts, shards = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
        return cls(_fixed(counts), _fixed(shards)) if len(counts) else None


def merged(one: Int64, other: Int64) -> Int64:
    """Combine the counts of two parts of a dataset, or of two nullable nodes: their sum, else
    UNKNOWN if one is, else 0, else NEVER.
    """
    some = np.maximum(one, 0) + np.maximum(other, 0)
    unknown = (one == UNKNOWN) | (other == UNKNOWN)
    none = np.where(unknown, UNKNOWN, np.maximum(one, other))
    return np.where(some > 0, some, none)


def _fixed(values: NDArray[np.int64]) -> Int64:
    found = np.array(values, np.int64)
    found.flags.writeable = False
    return found
