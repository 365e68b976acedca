"""Judge a shuffled job's lanes and windows: whether batches mix well, whether open windows fit into
memory, and whether hosts read more than their share.

All numbers are estimates from mean sizes, so this is fast for any dataset.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from dataplane.plan.cluster import Cluster
from dataplane.plan.defaults import (
    GIB,
    OPEN_BYTES_MIN,
    PERMUTATION_BYTES,
    Shuffle,
    mixed_lanes,
    shuffle_of,
    source_window,
)
from dataplane.plan.mixture import ROUND_STEPS
from dataplane.plan.quality import quality
from dataplane.plan.shuffled import ShuffledSource, hosts_per_block, mixed_window, open_bytes

# Batches of 25 blocks have this quality; those of 8 have 0.46.
QUALITY_MIN = 0.7
# A host may read so much more than its share.
_READS_MAX, _EXCESS_BYTES_MAX = 1.5, 32 * GIB


class ShuffledJob(Struct, frozen=True):
    """The sources of a job, its lanes, and its cluster. Each host has `arena_bytes` of memory for
    blocks; infinity means unknown.
    """

    sources: tuple[ShuffledSource, ...]
    lanes: int
    cluster: Cluster
    global_batch: int
    arena_bytes: float

    def qualities(self) -> list[float]:
        """Return the quality of each source, as in `dataplane plan`, in all epochs but the
        first.
        """
        return [
            quality(one.sizes, Shuffle(self.lanes, one.window, 0), one.draws)
            for one in self.sources
        ]

    def poor(self, qualities: Sequence[float], least: float = QUALITY_MIN) -> list[ShuffledSource]:
        """Return the sources with a quality below `least`. Small sources are never poor."""
        return [
            one
            for one, found in zip(self.sources, qualities, strict=True)
            if found < least and one.sizes.dataset_bytes >= OPEN_BYTES_MIN
        ]

    @property
    def lanes_per_host(self) -> int:
        return self.cluster.lanes_per_host(self.lanes)

    @property
    def kept_bytes(self) -> float:
        """The memory that the blocks of open windows take on each host."""
        return sum(
            min(
                self.lanes_per_host * block_bytes(one) * (1 + one.window / one.sizes.block_rows),
                one.kept_bytes,
            )
            for one in self.sources
        )

    @property
    def window_bytes(self) -> int:
        """The memory that open windows take on each host: at most the size of the whole dataset."""
        whole = sum(
            one.sizes.dataset_bytes + PERMUTATION_BYTES * one.sizes.samples for one in self.sources
        )
        return min(open_bytes(self.sources, self.lanes_per_host), whole)

    @property
    def fits(self) -> bool:
        return self.kept_bytes <= self.arena_bytes

    @property
    def reads_times_share(self) -> float:
        """How many hosts read a block, on average."""
        return hosts_per_block(self.sources, self.lanes, self.cluster)

    @property
    def share_bytes(self) -> float:
        """The bytes that each host reads in an epoch if no block is read by two."""
        return sum(one.stored_bytes for one in self.sources) / self.cluster.host_count

    @property
    def reads_much(self) -> bool:
        times = self.reads_times_share
        return times > _READS_MAX and (times - 1) * self.share_bytes > _EXCESS_BYTES_MAX

    @property
    def block_count(self) -> int:
        return sum(one.sizes.blocks for one in self.sources)

    @property
    def lanes_of_ranks(self) -> int:
        """A number of lanes near the present one for which each rank stays on its own lanes."""
        ranks = self.cluster.dp_size
        return ranks * max(round(self.lanes / ranks), 1)

    def by_default(self, lanes: int | None = None) -> ShuffledJob:
        """Return the job with the default windows of these lanes, or with default lanes, too."""
        every = [one.sizes for one in self.sources]
        if len(every) == 1:
            shuffle = shuffle_of(every[0], lanes)
            return self._with(shuffle.lanes, [shuffle.window])
        lanes = lanes or mixed_lanes(every)
        return self._with(lanes, [source_window(each, lanes, every) for each in every])

    def with_window(self, lanes: int, window: int) -> ShuffledJob:
        return self._with(lanes, [window] * len(self.sources))

    def with_rounds(self, one: ShuffledSource, window: int) -> int:
        """Return the window that a source effectively has: in a mixture, rounds lengthen
        its own.
        """
        if not one.name or one.draws >= self.global_batch:
            return window
        return mixed_window(window, one.draws / self.global_batch, 1, ROUND_STEPS)

    def _with(self, lanes: int, windows: Sequence[int]) -> ShuffledJob:
        changed = tuple(
            replace(one, window=self.with_rounds(one, window))
            for one, window in zip(self.sources, windows, strict=True)
        )
        return replace(self, sources=changed, lanes=lanes)


def block_bytes(one: ShuffledSource) -> float:
    """The memory that a block of the source takes on average."""
    return one.kept_bytes / one.sizes.blocks
