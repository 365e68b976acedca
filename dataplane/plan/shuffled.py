"""The reads of a shuffle over a dataset or a mixture, and its cost for each host, for any number of
hosts.

All numbers are estimates from mean sizes, so this is fast for any dataset, except the reads of a
dataset whose plan is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from dataplane.config import JobSpec
from dataplane.mixture import SourceSpec
from dataplane.plan.cluster import Cluster
from dataplane.plan.defaults import (
    GIB,
    OPEN_BYTES_MIN,
    PERMUTATION_BYTES,
    BlockSizes,
    Shuffle,
    mixed_lanes,
    shuffle_of,
    source_window,
)
from dataplane.plan.mixture import ROUND_STEPS
from dataplane.plan.quality import quality

_HOST_COUNTS = tuple(1 << power for power in range(11))


class ShuffledSource(Struct, frozen=True):
    """A dataset, or a named source of a mixture. A lane's samples come from the next `window` of
    its samples, and a global batch that has any of them has about `draws`. An epoch reads
    `stored_bytes` of it if no block is read twice, and all its blocks take `kept_bytes` of memory.
    """

    sizes: BlockSizes
    window: int
    draws: int
    stored_bytes: int
    kept_bytes: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class HostFigures:
    """The costs of one host in a cluster of this many, each with the given number of ranks.
    `reads_times_share` is 1 if no block is read by two hosts. Open windows are an estimate from
    mean sizes; so are a mixture's reads.
    """

    host_count: int
    dp_size: int
    lanes_per_rank: int
    open_window_bytes_per_host: int
    bytes_read_per_host: int
    reads_times_share: float


def draws_of(share: float, global_batch: int, consecutive: int) -> int:
    """Estimate how many samples of a source a batch has, where `consecutive` samples are of one
    source, and the source has this share of all.
    """
    return max(1, consecutive, round(share * global_batch))


def mixed_window(window: int, share: float, consecutive: int, round_steps: int) -> int:
    """Return the effective `window` of a source with this window and share: within a round, the
    samples of a lane stand in any order, unless consecutive ones are of one source.
    """
    return window if consecutive > 1 else window + round(share * round_steps)


def source_of_mixture(
    spec: JobSpec,
    source: SourceSpec,
    sizes: BlockSizes,
    share: float,
    read_bytes: int,
    kept_bytes: int = 0,
) -> ShuffledSource:
    """Return a source of a job's mixture that has this share of the samples, and of which an epoch
    reads this many bytes.
    """
    assert spec.mixture is not None
    consecutive = spec.mixture.batch
    window = mixed_window(source.window, share, consecutive, ROUND_STEPS)
    draws = draws_of(share, spec.global_batch, consecutive)
    return ShuffledSource(sizes, window, draws, read_bytes, kept_bytes, source.name)


def hosts_per_block(sources: Sequence[ShuffledSource], lanes: int, cluster: Cluster) -> float:
    """How many hosts read a block, on average over all bytes."""
    stored = sum(one.stored_bytes for one in sources)
    if not stored or lanes == 1:
        return cluster.hosts_per_block(lanes, 1)
    on_border = sum(one.stored_bytes * min(lanes / one.sizes.blocks, 1.0) for one in sources)
    return cluster.hosts_per_block(lanes, lanes * stored / on_border)


def open_bytes(sources: Sequence[ShuffledSource], lanes_open: int) -> int:
    """Return the memory that the open windows of this many lanes take."""
    return lanes_open * sum(one.sizes.open_window_bytes(one.window) for one in sources)


def figures_by_host_count(
    sources: Sequence[ShuffledSource],
    lanes: int,
    cluster: Cluster,
    read_bytes: Callable[[Cluster], float] | None = None,
) -> tuple[HostFigures, ...]:
    """Return the figures for 1 to 1,024 hosts like those of this cluster. `read_bytes` returns the
    counted reads of all hosts of a cluster, if they were counted.
    """
    found, stored = [], sum(one.stored_bytes for one in sources)
    for hosts in _HOST_COUNTS:
        each = Cluster(hosts * cluster.ranks_per_host, cluster.ranks_per_host)
        if read_bytes is None or not stored:
            times = hosts_per_block(sources, lanes, each)
        else:
            times = read_bytes(each) / stored
        found.append(
            HostFigures(
                hosts,
                each.dp_size,
                each.lanes_per_rank(lanes),
                open_bytes(sources, each.lanes_per_host(lanes)),
                round(stored * times / hosts),
                times,
            )
        )
    return tuple(found)


# -- shuffled job ------------------------------------------------------------------------------
#
# Judge a shuffled job's lanes and windows: whether batches mix well, whether open windows fit into
# memory, and whether hosts read more than their share.
#
# All numbers are estimates from mean sizes, so this is fast for any dataset.

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
