"""How much hosts read from storage, in the first epoch and in later ones: a prediction."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dataplane.config import JobSpec, NodeConfig
    from dataplane.plan.cluster import Cluster
    from dataplane.plan.manifest import Manifest
    from dataplane.plan.order import Order
    from dataplane.scheduler.dataset import Ints
    from dataplane.scheduler.predicted import Guests, Prediction

_EPOCHS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class ReadsOfEpoch:
    """`hit_rate` is the part of the needed blocks that a host finds in its memory or in that of
    its neighbours; `origin_bytes` is what all hosts together read from storage, and `disk_bytes`
    what they read from their disks.
    """

    hit_rate: float
    origin_bytes: int
    disk_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ReadsOfHosts:
    """The first epoch and the following ones. `is_sampled`: estimated from a part of the blocks.
    `is_too_small`: the open windows do not fit, and what is read more than once is left out.
    """

    epochs: tuple[ReadsOfEpoch, ...]
    is_sampled: bool
    is_too_small: bool


@dataclasses.dataclass(frozen=True, slots=True)
class PredictedReads:
    """With this much memory and disk for blocks on each host. With neighbours, the memory and the
    disks of all hosts are one cache: None for a single host.
    """

    arena_bytes: int
    alone: ReadsOfHosts
    with_neighbours: ReadsOfHosts | None
    cache_bytes: int = 0


def predicted_reads(
    manifest: Manifest, spec: JobSpec, cluster: Cluster, config: NodeConfig, epoch: int
) -> PredictedReads | None:
    """The reads from this epoch on, which begins with nothing in memory and on disk; None for local
    files, which are mapped into memory, and for jobs with a map=, whose blocks have other sizes.

    Raises:  ConfigError: invalid numbers for an order.
    """
    from dataplane.arena.slots import plan_slots
    from dataplane.node.dataset import can_pack, dataset_of
    from dataplane.node.slab_sizes import slab_sizes
    from dataplane.plan.order import Order
    from dataplane.scheduler.passes import PLANS_AHEAD
    from dataplane.scheduler.planning import PLANS_TOGETHER
    from dataplane.scheduler.predicted import predicted

    if spec.view.map:
        return None
    arena_bytes = config.block_arena_bytes
    dataset = dataset_of(
        1, manifest, spec, packed=can_pack(manifest, spec, arena_bytes), arena_bytes=arena_bytes
    )
    remote = np.flatnonzero(dataset.blocks.marks.is_remote)
    if not len(remote):
        return None
    shape = (spec.seed, spec.shuffle, spec.lanes, spec.window)
    orders = [
        Order(manifest.block_rows, *shape, epoch + each, spec.ramp) for each in range(_EPOCHS + 1)
    ]
    sizes = slab_sizes(dataset, spec, cluster.dp_size, config.slab_bytes)
    layout = plan_slots(config.delivery_bytes_per_rank, sizes.slot_bytes)
    ahead = (PLANS_AHEAD + layout.ahead_slots) * sizes.batches * spec.global_batch
    hosts, slab_rows = cluster.host_count, sizes.batches * spec.global_batch
    # Blocks of as many slabs are fetched, and decoded, as are planned together.
    under_way = 2 * PLANS_TOGETHER * slab_rows * manifest.block_count // manifest.sample_count
    under_way = min(under_way, 2 * config.fetch_count)
    own = [remote[_is_read(order, cluster, remote)] for order in orders]
    of_reads, disk = (ahead, under_way), config.cache_bytes
    alone = predicted(dataset.blocks, orders, own, arena_bytes, *of_reads, disk)
    together = None
    if hosts > 1:
        whole = [remote] * len(orders)
        of_hosts = hosts * arena_bytes, *of_reads, hosts * disk
        lent = functools.partial(_guests, cluster, orders)
        together = predicted(dataset.blocks, orders, whole, *of_hosts, lent)
    with_neighbours = None if together is None else _reads(together, 1)
    return PredictedReads(arena_bytes, _reads(alone, hosts), with_neighbours, disk)


def _guests(cluster: Cluster, orders: Sequence[Order], epoch: int, blocks: Ints) -> Guests:
    """Each host owns as many blocks as any other, wherever they are read."""
    from dataplane.scheduler.predicted import Guests

    order, hosts = orders[epoch], cluster.host_count
    counts, is_local = np.zeros(len(blocks), np.int64), np.zeros(len(blocks), np.bool_)
    for host in range(hosts):
        is_read = cluster.reads(host, *order.block_lanes(blocks), order.lanes)
        is_owner = blocks % hosts == host
        counts += is_read & ~is_owner
        is_local |= is_read & is_owner
    return Guests(counts, is_local)


def _is_read(
    order: Order, cluster: Cluster, blocks: Ints
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which blocks the first host reads; the others read as many."""
    return cluster.reads(0, *order.block_lanes(blocks), order.lanes)


def _reads(found: Prediction, hosts: int) -> ReadsOfHosts:
    epochs = tuple(
        ReadsOfEpoch(round(each.hit_rate, 4), each.bytes_read * hosts, each.disk_bytes * hosts)
        for each in found.epochs
    )
    return ReadsOfHosts(epochs, found.is_sampled, found.is_too_small)
