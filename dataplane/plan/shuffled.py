"""Estimate what a shuffle over a dataset or a mixture reads, and what it costs each host, for any
number of hosts.

All numbers are computed from mean sizes, which is fast for any dataset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from dataplane.model.config import JobSpec, SourceSpec
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
    """A dataset, or a named source of a mixture. A lane draws its next samples from the next
    `window` samples of the dataset in that lane. A global batch with samples of the dataset has
    about `draws` of them. An epoch reads `stored_bytes` if no block is read twice, and all blocks
    together take `kept_bytes` of memory.
    """

    sizes: BlockSizes
    window: int
    draws: int
    stored_bytes: int
    kept_bytes: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class HostFigures:
    """The costs of each host in a cluster of `hosts` hosts with the same number of ranks.
    `reads_times_share` is 1 if no block is read by two hosts. Reads and memory are estimates.
    """

    host_count: int
    dp_size: int
    lanes_per_rank: int
    open_window_bytes_per_host: int
    bytes_read_per_host: int
    reads_times_share: float


def draws_of(share: float, global_batch: int, consecutive: int) -> int:
    """Estimate how many samples of a source a batch has, if the source has this share of all
    samples, and `consecutive` samples of a lane come from one source.
    """
    return max(1, consecutive, round(share * global_batch))


def mixed_window(window: int, share: float, consecutive: int, round_steps: int) -> int:
    """Return the effective `window` of a source with this window and share. Rounds lengthen it:
    within a round, the samples of a lane are in any order, unless consecutive ones come from one
    source.
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
    """Return how many hosts read a block, on average over all bytes: at most one a row."""
    stored = sum(source.stored_bytes for source in sources)
    rows = max((source.sizes.usual_rows for source in sources), default=1)
    if not stored or lanes == 1:
        return min(cluster.hosts_per_block(lanes, 1), rows)
    on_border = sum(
        source.stored_bytes * min(lanes / source.sizes.blocks, 1.0) for source in sources
    )
    return min(cluster.hosts_per_block(lanes, lanes * stored / on_border), rows)


def open_bytes(sources: Sequence[ShuffledSource], lanes_open: int) -> int:
    """Return the memory that the open windows of this many lanes take."""
    return lanes_open * sum(source.sizes.open_window_bytes(source.window) for source in sources)


def figures_by_host_count(
    sources: Sequence[ShuffledSource], lanes: int, cluster: Cluster
) -> tuple[HostFigures, ...]:
    """Return the figures for 1 to 1,024 hosts like those of this cluster."""
    figures, stored = [], sum(source.stored_bytes for source in sources)
    for hosts in _HOST_COUNTS:
        some = Cluster(hosts * cluster.ranks_per_host, cluster.ranks_per_host)
        times = hosts_per_block(sources, lanes, some)
        figures.append(
            HostFigures(
                hosts,
                some.dp_size,
                some.lanes_per_rank(lanes),
                open_bytes(sources, some.lanes_per_host(lanes)),
                round(stored * times / hosts),
                times,
            )
        )
    return tuple(figures)


# -- shuffled job ------------------------------------------------------------------------------
#
# Judge a shuffled job's lanes and windows: whether batches mix well, whether open windows fit into
# memory, and whether hosts read more than their share. All numbers are estimates from mean sizes.

# Batches with samples of 25 blocks have this quality; batches of 8 blocks have 0.46.
QUALITY_MIN = 0.7
# Hosts that read less than this multiple of their share, or less than this excess, get no warning.
_READS_MAX, _EXCESS_BYTES_MAX = 1.5, 32 * GIB


class ShuffledJob(Struct, frozen=True):
    """The sources of a job, its lanes, and its cluster. Each host has `arena_bytes` of memory for
    blocks; infinity if that is unknown.
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
            quality(source.sizes, Shuffle(self.lanes, source.window, 0), source.draws)
            for source in self.sources
        ]

    def poor(self, qualities: Sequence[float], least: float = QUALITY_MIN) -> list[ShuffledSource]:
        """Return the sources with a quality below `least`. Small sources are never poor."""
        return [
            source
            for source, known in zip(self.sources, qualities, strict=True)
            if known < least and source.sizes.dataset_bytes >= OPEN_BYTES_MIN
        ]

    @property
    def lanes_per_host(self) -> int:
        return self.cluster.lanes_per_host(self.lanes)

    @property
    def kept_bytes(self) -> float:
        """The memory that the blocks of open windows take on each host."""
        return sum(
            min(
                self.lanes_per_host
                * block_bytes(source)
                * (1 + source.window / source.sizes.block_rows),
                source.kept_bytes,
            )
            for source in self.sources
        )

    @property
    def window_bytes(self) -> int:
        """The memory that open windows take on each host: at most the size of the whole dataset."""
        whole = sum(
            source.sizes.dataset_bytes + PERMUTATION_BYTES * source.sizes.samples
            for source in self.sources
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
        return sum(source.stored_bytes for source in self.sources) / self.cluster.host_count

    @property
    def reads_much(self) -> bool:
        times = self.reads_times_share
        return times > _READS_MAX and (times - 1) * self.share_bytes > _EXCESS_BYTES_MAX

    @property
    def block_count(self) -> int:
        return sum(source.sizes.blocks for source in self.sources)

    @property
    def lanes_of_ranks(self) -> int:
        """The number of lanes closest to the present one for which ranks share no lanes."""
        ranks = self.cluster.dp_size
        return ranks * max(round(self.lanes / ranks), 1)

    def by_default(self, lanes: int | None = None) -> ShuffledJob:
        """Return the job with default windows for these lanes, or for default lanes."""
        sizes = [source.sizes for source in self.sources]
        if len(sizes) == 1:
            shuffle = shuffle_of(sizes[0], lanes)
            return self._with(shuffle.lanes, [shuffle.window])
        lanes = lanes or mixed_lanes(sizes)
        return self._with(lanes, [source_window(size, lanes, sizes) for size in sizes])

    def with_window(self, lanes: int, window: int) -> ShuffledJob:
        return self._with(lanes, [window] * len(self.sources))

    def with_rounds(self, source: ShuffledSource, window: int) -> int:
        """Return the effective window of a source, which rounds lengthen in a mixture."""
        if not source.name or source.draws >= self.global_batch:
            return window
        return mixed_window(window, source.draws / self.global_batch, 1, ROUND_STEPS)

    def _with(self, lanes: int, windows: Sequence[int]) -> ShuffledJob:
        changed = tuple(
            replace(source, window=self.with_rounds(source, window))
            for source, window in zip(self.sources, windows, strict=True)
        )
        return replace(self, sources=changed, lanes=lanes)


def block_bytes(source: ShuffledSource) -> float:
    """Return the memory that a block of the source takes on average."""
    return source.kept_bytes / source.sizes.blocks
