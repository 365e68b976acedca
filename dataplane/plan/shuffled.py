"""The reads of a shuffle over a dataset or a mixture, and its cost for each host, for any number of
hosts.

All numbers are estimates from mean sizes, so this is fast for any dataset, except the reads of a
dataset whose plan is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from dataplane.config import JobSpec
from dataplane.mixture import SourceSpec
from dataplane.plan.cluster import Cluster
from dataplane.plan.defaults import BlockSizes
from dataplane.plan.mixture import ROUND_STEPS

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
