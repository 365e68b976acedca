"""Choose the bytes of a block that a job needs if it does not read all columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from dataplane.model.records import Region
from dataplane.plan.columns import ColumnPlaces, PlacesPart
from dataplane.plan.shards import starts_of
from dataplane.scheduler.dataset import GAP_BYTES_MIN, BlockPlaces
from dataplane.worker.columns import Ints

EDGE_BYTES_MIN = 64 << 10
"""The smallest hole at the start or the end of a block. Skipping these bytes costs no request, but
decoding a part of a block takes 0.1 ms longer than decoding all of it: as long as reading this many
bytes takes."""

# Old writers left the dictionary's header out of a column's size, so readers read up to 100 bytes
# more (PARQUET-816).
_SLACK_BYTES = 128
# Arrow aligns its buffers to this many bytes. They stay aligned if the size of each hole is a
# multiple of it.
_BUFFER_STEP = 64


class Projection(Struct, frozen=True, eq=False):
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
        """Compute the bytes to leave out if only the `wanted` columns are read: none for a block
        whose column places are unknown or overlap.

        Raises:  ConfigError: columns do not lie in these blocks.
        """
        is_wanted = np.asarray(wanted, np.bool_)
        skipped, decoded = np.zeros(len(block_length), np.int64), block_decoded.copy()
        blocks, starts, stops = ([np.empty(0, np.int64)] for _ in range(3))
        for part in places.parts():
            rows = slice(part.first, part.first + len(part.offset))
            length = block_length[rows]
            part.check(length)
            block, start, stop = _holes(part, length, is_wanted)
            np.add.at(skipped[rows], block, stop - start)
            blocks.append(part.first + block)
            starts.append(start)
            stops.append(stop)
            size = np.minimum(part.decoded[:, is_wanted].sum(axis=1), decoded[rows])
            decoded[rows] = np.where(part.length.any(axis=1), size, decoded[rows])
        bounds = np.arange(len(block_length) + 1)
        first = np.searchsorted(np.concatenate(blocks), bounds)
        return cls(first, np.concatenate(starts), np.concatenate(stops), skipped, decoded)

    def of_blocks(self, kept: Ints) -> Self:
        """Return the projection of these blocks only.

        Shapes:  kept: int64[k], rising.
        """
        counts, is_kept = np.diff(self.first), np.zeros(len(self.skipped), np.bool_)
        is_kept[kept] = True
        holes = np.repeat(is_kept, counts)
        return type(self)(
            starts_of(counts[kept]), self.start[holes], self.stop[holes], self.skipped[kept],
            self.decoded[kept],
        )  # fmt: skip

    def places(
        self, block_shard: npt.NDArray[np.int32], block_offset: Ints, block_length: Ints
    ) -> BlockPlaces:
        """Return where the needed bytes of each block lie."""
        offset, length = block_offset.copy(), block_length.copy()
        count, size = np.diff(self.first), self.skipped.copy()
        block = np.repeat(np.arange(len(length)), count)
        ahead, behind = self.start == 0, self.stop == length[block]
        for is_edge in (ahead, behind & ~ahead):
            at, skipped = block[is_edge], (self.stop - self.start)[is_edge]
            # No block occurs twice here: a block has at most one hole at each edge.
            length[at] -= skipped
            count[at] -= 1
            size[at] -= skipped
        offset[block[ahead]] += self.stop[ahead]
        return BlockPlaces(block_shard, offset, length, count, size)

    def pieces(self, block: int, place: Region) -> tuple[Region, ...]:
        """Return the pieces of a block to read in the shard; empty if the whole block is read."""
        holes = range(int(self.first[block]), int(self.first[block + 1]))
        starts = [0, *(int(self.stop[hole]) for hole in holes)]
        stops = [*(int(self.start[hole]) for hole in holes), place.length]
        if not holes:
            return ()
        found = zip(starts, stops, strict=True)
        return tuple(Region(place.offset + at, end - at) for at, end in found if end > at)


def _holes(
    part: PlacesPart, block_length: Ints, is_wanted: npt.NDArray[np.bool_]
) -> tuple[Ints, Ints, Ints]:
    """Return, for each hole, its block in this part, and its start and stop in the block."""
    offset, length = part.offset, part.length
    if (offset[:, 1:] < offset[:, :-1]).any():
        order = np.argsort(offset, axis=1, kind="stable")
        offset, length = (np.take_along_axis(each, order, 1) for each in (offset, length))
        is_spare = ~is_wanted[order]
    else:
        is_spare = np.broadcast_to(~is_wanted, offset.shape)
    stop = offset + length
    is_clear = (offset[:, 1:] >= stop[:, :-1]).all(axis=1) & (stop[:, -1] > 0)
    is_spare = is_spare & is_clear[:, None]
    # Bytes between two columns count as part of the first of the two.
    ends = np.concatenate([offset[:, 1:], block_length[:, None]], axis=1)
    edge = np.zeros((len(offset), 1), np.bool_)
    after_spare = np.concatenate([edge, is_spare[:, :-1]], axis=1)
    before_spare = np.concatenate([is_spare[:, 1:], edge], axis=1)
    block, at = np.nonzero(is_spare & ~after_spare)
    last = np.nonzero(is_spare & ~before_spare)[1]
    # A hole starts `_SLACK_BYTES` late, for the column before it. A hole at the start of a block
    # has no column before it, and starts at once, unless it contains all columns.
    is_first = (at == 0) & (last < offset.shape[1] - 1)
    start, end = offset[block, at] + np.where(is_first, 0, _SLACK_BYTES), ends[block, last]
    is_ahead = start == 0
    start += np.where(is_ahead, 0, (end - start) % _BUFFER_STEP)
    is_edge = is_ahead | (end == block_length[block])
    is_hole = end - start >= np.where(is_edge, EDGE_BYTES_MIN, GAP_BYTES_MIN)
    return block[is_hole], start[is_hole], end[is_hole]
