"""Choose the blocks of a shard that are read in one request. Pure.

A request takes as much processor time as three quarters of a MiB of its bytes, and one round trip.
So small blocks that lie next to each other, and are wanted at the same time, are read together.

Invariants:
1. The blocks of a request lie in one shard, in the order of their bytes, and are neighbours in the
   dataset.
2. A request of several blocks has at most JOINED_BYTES_MAX, gaps included. Gaps between blocks are
   too short to be skipped within a block, either.
3. Finding each next block takes constant time.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from msgspec import Struct

JOINED_BYTES_MAX = 2 << 20
GAP_BYTES_MIN = 256 << 10
"""Skipping a gap costs one more request; smaller gaps are cheaper to read."""


class BlockPlaces(Struct, frozen=True, eq=False):
    """The places of the needed bytes of each block, from the first to the last one. `holes` are
    unread parts in between; each needs one more request. None: there are no holes.

    Shapes:  shard: int32[blocks].   offset, length: int64[blocks], bytes in the shard.
             hole_count, hole_bytes: int64[blocks].
    """

    shard: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    hole_count: npt.NDArray[np.int64] | None = None
    hole_bytes: npt.NDArray[np.int64] | None = None

    def read_bytes(self, block: int) -> int:
        """Return how many bytes of a block are read."""
        return self.length.item(block) - _number_of(self.hole_bytes, block)

    def all_read_bytes(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return `read_bytes` of each of these blocks."""
        length = self.length[blocks]
        return length if self.hole_bytes is None else length - self.hole_bytes[blocks]

    def read_count(self, block: int) -> int:
        """Return how many requests a block takes alone, if none is too long."""
        return 1 + _number_of(self.hole_count, block)

    def following(self, block: int) -> Iterator[int]:
        """Yield the next blocks that may be read in one request with all before them."""
        shard, size = self.shard.item(block), self.read_bytes(block)
        end = self.offset.item(block) + self.length.item(block)
        for after in range(block + 1, len(self.shard)):
            start = self.offset.item(after)
            gap = start - end
            size += gap + self.read_bytes(after)
            end = start + self.length.item(after)
            if self.shard.item(after) != shard or size > JOINED_BYTES_MAX:
                return
            if not 0 <= gap < GAP_BYTES_MIN:
                return
            yield after


def _number_of(values: npt.NDArray[np.int64] | None, block: int) -> int:
    return 0 if values is None else values.item(block)
