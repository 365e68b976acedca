"""What a shuffle reads: a dataset, or the sources of a mixture; and what that takes of each host,
for any number of them.

All numbers are estimates from mean sizes, so this is fast for any dataset, but for what hosts read
of a dataset whose plan is known.
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
    """A dataset, or a source of a mixture, which has a name. A lane's samples come from the next
    `window` of its samples, and a global batch has about `draws` of them, if it has any. An epoch
    reads `stored_bytes` of it if no block is read twice, and all its blocks take `kept_bytes` of
    memory.
    """

    sizes: BlockSizes
    window: int
    draws: int
    stored_bytes: int
    kept_bytes: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class HostFigures:
    """What one host takes part in if there are so many of them, each with as many ranks as asked.
    `reads_times_share` is 1 if no block is read by two hosts. Open windows are an estimate from
    mean sizes; so is what hosts read of a mixture.
    """

    host_count: int
    dp_size: int
    lanes_per_rank: int
    open_window_bytes_per_host: int
    bytes_read_per_host: int
    reads_times_share: float


def draws_of(share: float, global_batch: int, consecutive: int) -> int:
    """About how many samples of a source a batch has, where so many consecutive samples are of one
    source, and it has this share of all.
    """
    return max(1, consecutive, round(share * global_batch))


def mixed_window(window: int, share: float, consecutive: int, round_steps: int) -> int:
    """The `window` of a source with this window and share: within a round, the samples of a lane
    stand in any order, unless they are of one source one after the other.
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
    """A source of the mixture of a job, if it has this share of the samples, and an epoch reads so
    many bytes of it.
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
    """The memory that the open windows of so many lanes take."""
    return lanes_open * sum(one.sizes.open_window_bytes(one.window) for one in sources)


def figures_by_host_count(
    sources: Sequence[ShuffledSource],
    lanes: int,
    cluster: Cluster,
    read_bytes: Callable[[Cluster], float] | None = None,
) -> tuple[HostFigures, ...]:
    """For 1 to 1,024 hosts like those of this cluster. `read_bytes`: what all hosts of such a one
    read, if that was counted.
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
