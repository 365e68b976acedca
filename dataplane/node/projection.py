"""The bytes of a block that are needed by a job that does not read all columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from dataplane.model import Region
from dataplane.plan.column_places import ColumnPlaces
from dataplane.worker.columns import Ints

HOLE_BYTES_MIN = 256 << 10
"""Skipping a gap costs one more request; smaller gaps are cheaper to read."""

# Old writers left the dictionary's header out of a column's size, so readers read up to 100 bytes
# more (PARQUET-816).
_SLACK_BYTES = 128
# Arrow aligns its buffers; what is read stays aligned if holes are whole multiples of that.
_ALIGNED_BYTES = 64


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """The holes of K blocks, in the order of the blocks and of their bytes.

    Shapes:  first: int64[K + 1], the holes of block k are first[k] to first[k + 1].
             start, stop: int64[holes], bytes in the block.   skipped: int64[K], bytes.
             decoded: int64[K], bytes of the wanted columns, an estimate.
    """

    first: Ints
    start: Ints
    stop: Ints
    skipped: Ints
    decoded: Ints

    @classmethod
    def of(
        cls,
        places: ColumnPlaces,
        block_length: Ints,
        block_decoded: Ints,
        wanted: Sequence[bool],
    ) -> Self:
        """The bytes to leave out if only the `wanted` columns are read: none for a block whose
        column places are unknown or overlap.
        """
        order = np.argsort(places.offset, axis=1, kind="stable")
        offset = np.take_along_axis(places.offset, order, 1)
        stop = offset + np.take_along_axis(places.length, order, 1)
        is_clear = (offset[:, 1:] >= stop[:, :-1]).all(axis=1) & (stop[:, -1] > 0)
        # Bytes between two columns belong to the first of them.
        ends = np.concatenate([offset[:, 1:], block_length[:, None]], axis=1)
        is_spare = ~np.asarray(wanted, np.bool_)[order] & is_clear[:, None]
        edge = np.zeros((len(offset), 1), np.bool_)
        after_spare = np.concatenate([edge, is_spare[:, :-1]], axis=1)
        before_spare = np.concatenate([is_spare[:, 1:], edge], axis=1)
        block, at = np.nonzero(is_spare & ~after_spare)
        last = np.nonzero(is_spare & ~before_spare)[1]
        start, end = offset[block, at] + _SLACK_BYTES, ends[block, last]
        start += (end - start) % _ALIGNED_BYTES
        is_hole = end - start >= HOLE_BYTES_MIN
        block, start, end = block[is_hole], start[is_hole], end[is_hole]
        skipped = np.zeros(len(block_length), np.int64)
        np.add.at(skipped, block, end - start)
        first = np.searchsorted(block, np.arange(len(block_length) + 1))
        is_known = places.length.any(axis=1)
        size = places.decoded[:, np.asarray(wanted, np.bool_)].sum(axis=1)
        size = np.where(is_known, np.minimum(size, block_decoded), block_decoded)
        return cls(first, start, end, skipped, size)

    def pieces(self, block: int, place: Region) -> tuple[Region, ...]:
        """The pieces of a block to read in the shard; empty if that is all of it."""
        holes = range(int(self.first[block]), int(self.first[block + 1]))
        starts = [0, *(int(self.stop[hole]) for hole in holes)]
        stops = [*(int(self.start[hole]) for hole in holes), place.length]
        if not holes:
            return ()
        found = zip(starts, stops, strict=True)
        return tuple(Region(place.offset + at, end - at) for at, end in found if end > at)
