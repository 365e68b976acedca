"""Predict how much hosts read from storage in the first epoch and in later ones, and whether their
memory holds all open windows at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dataplane.config import JobSpec, NodeConfig
    from dataplane.node.dataset import Dataset
    from dataplane.plan.cluster import Cluster
    from dataplane.plan.manifest import Manifest
    from dataplane.plan.order import Order
    from dataplane.plan.shuffled import ShuffledJob
    from dataplane.scheduler.dataset import Ints
    from dataplane.scheduler.predicted import EpochReads, Guests

_EPOCHS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class ReadsOfEpoch:
    """The reads of one epoch. `hit_rate` is the share of needed blocks that a host finds in its own
    memory or a neighbour's. `origin_bytes` is what all hosts together read from storage,
    `disk_bytes` what they read from their disks.
    """

    hit_rate: float
    origin_bytes: int
    disk_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ReadsOfHosts:
    """The reads of the first epoch, counted over all blocks, and of the following ones.
    `is_sampled`: the latter are estimated from some of the blocks, or from the host that reads
    most. `is_too_small`: the open windows do not fit, and repeated reads are left out.
    """

    epochs: tuple[ReadsOfEpoch, ...]
    is_sampled: bool
    is_too_small: bool


@dataclasses.dataclass(frozen=True, slots=True)
class PredictedReads:
    """Predicted reads with this much memory and disk for blocks on each host. With neighbours, the
    memory and disks of all hosts form one cache: None for a single host. `open_bytes_max` is the
    largest size of open windows at any time, on the host that reads most.
    """

    arena_bytes: int
    alone: ReadsOfHosts
    with_neighbours: ReadsOfHosts | None
    cache_bytes: int
    open_bytes_max: int


def reads_and_advice(
    manifest: Manifest, spec: JobSpec, cluster: Cluster, config: NodeConfig, epoch: int
) -> tuple[PredictedReads | None, tuple[str, ...]]:
    """Predict the reads from this epoch on, starting with empty memory and disk. None for local
    files, which are mapped into memory, and for jobs with a map=, whose blocks have other sizes.
    Also return the advice about the shuffle: the loader's own, and what only a plan shows.

    Raises:  ConfigError: invalid numbers for an order.
    """
    from dataplane.node.dataset import can_pack, dataset_of

    arena_bytes = config.block_arena_bytes
    if spec.view.map:
        return None, _advice(spec, _job(manifest, spec, cluster))
    packed = can_pack(manifest, spec, arena_bytes)
    dataset = dataset_of(1, manifest, spec, packed=packed, arena_bytes=arena_bytes)
    job = _job(manifest, spec, cluster, dataset.kept_bytes, arena_bytes)
    said = _advice(spec, job)
    remote = np.flatnonzero(dataset.blocks.marks.is_remote)
    if not len(remote):
        return None, said
    does_not_fit = spec.shuffle and not job.fits
    found = _predicted(dataset, remote, spec, cluster, config, epoch, is_too_small=does_not_fit)
    peak = "" if does_not_fit else _peak(found.open_bytes_max, arena_bytes)
    return found, (*said, *filter(None, (peak,)))


def _job(
    manifest: Manifest,
    spec: JobSpec,
    cluster: Cluster,
    kept_bytes: int = 0,
    arena_bytes: float = math.inf,
) -> ShuffledJob:
    """`kept_bytes`: what the decoded dataset takes in memory, 0 if it is not known."""
    from dataplane.plan.defaults import BlockSizes
    from dataplane.plan.shuffled import ShuffledJob, ShuffledSource

    sizes = BlockSizes.of(manifest.block_rows, manifest.block_decoded)
    stored = int(manifest.block_length.sum(dtype=np.int64))
    whole = ShuffledSource(sizes, spec.window, spec.global_batch, stored, kept_bytes)
    return ShuffledJob((whole,), spec.lanes, cluster, spec.global_batch, arena_bytes)


def _advice(spec: JobSpec, job: ShuffledJob) -> tuple[str, ...]:
    from dataplane.plan.advice import advice

    return tuple(filter(None, [advice(job) if spec.shuffle else ""]))


def _peak(open_bytes: int, arena_bytes: int) -> str:
    """Return a warning if open windows do not fit at their largest, which happens where block sizes
    differ much; "" if they fit.
    """
    from dataplane.commands import output
    from dataplane.plan.remedies import ROOM
    from dataplane.units import raise_to

    if open_bytes <= arena_bytes:
        return ""
    need, arena = map(output.approximate_bytes, (open_bytes, arena_bytes))
    return (
        f"at times, this job keeps {need} of blocks open on a host, and its block arena has {arena}"
        ", so some blocks are read again in an epoch (a loader only warns if the average does not "
        f"fit): {raise_to('block_arena_bytes', round(open_bytes * ROOM))}"
    )


def _predicted(
    dataset: Dataset,
    remote: Ints,
    spec: JobSpec,
    cluster: Cluster,
    config: NodeConfig,
    epoch: int,
    *,
    is_too_small: bool,
) -> PredictedReads:
    """Predict the reads. `is_too_small`: open windows do not fit even on average.

    Shapes:  remote: int64[n], the blocks that are fetched, rising.
    """
    from dataplane.plan.block_hosts import BlockHosts
    from dataplane.plan.order import Order
    from dataplane.scheduler.predicted import open_bytes_max, predicted

    rows, blocks, hosts = dataset.manifest.block_rows, dataset.blocks, cluster.host_count
    shape = (spec.seed, spec.shuffle, spec.lanes, spec.window)
    orders = [Order(rows, *shape, epoch + each, spec.ramp) for each in range(_EPOCHS + 1)]
    sizes = np.zeros(len(rows), np.int64)
    sizes[remote] = blocks.all_read_bytes(remote)
    own, read, host = [], [], None
    for order in orders:
        readers = BlockHosts.of(order)
        host = readers.busiest_host(cluster, sizes) if host is None else host
        own.append(remote[readers.are_read(cluster, host)[remote]])
        read.append(readers.read_bytes(cluster, rows, sizes))
    most = max(map(functools.partial(open_bytes_max, blocks), orders[:-1], own[:-1]))
    is_too_small |= most > config.block_arena_bytes
    limits = _limits(dataset, spec, cluster, config)
    alone = predicted(blocks, orders, own, config.block_arena_bytes, *limits, config.cache_bytes)
    epochs = tuple(
        _reads(each, total / max(each.bytes_needed, 1))
        for each, total in zip(alone.epochs, read[:-1], strict=True)
    )
    found = ReadsOfHosts(epochs, alone.is_sampled or hosts > 1, is_too_small)
    together = None
    if hosts > 1:
        whole = [remote] * len(orders)
        of_hosts = hosts * config.block_arena_bytes, *limits, hosts * config.cache_bytes
        lent = functools.partial(_guests, cluster, orders)
        pooled = predicted(blocks, orders, whole, *of_hosts, lent)
        epochs = tuple(_reads(each, 1.0) for each in pooled.epochs)
        together = ReadsOfHosts(epochs, pooled.is_sampled, is_too_small)
    return PredictedReads(config.block_arena_bytes, found, together, config.cache_bytes, most)


def _limits(
    dataset: Dataset, spec: JobSpec, cluster: Cluster, config: NodeConfig
) -> tuple[int, int]:
    """Return how many positions ahead a node reads, and how many blocks it fetches or decodes at
    once.
    """
    from dataplane.node.delivery import layout_of
    from dataplane.node.slab_sizes import slab_sizes
    from dataplane.scheduler.planning import PLANS_AHEAD, PLANS_TOGETHER

    manifest = dataset.manifest
    sizes = slab_sizes(dataset, spec, cluster.dp_size, config.slab_bytes)
    layout = layout_of(config, sizes.slot_bytes)
    slab_rows = sizes.batches * spec.global_batch
    # Blocks of as many slabs are fetched, and decoded, as are planned together.
    under_way = 2 * PLANS_TOGETHER * slab_rows * manifest.block_count // manifest.sample_count
    ahead = (PLANS_AHEAD + layout.slot_count) * slab_rows
    return ahead, min(under_way, 2 * config.fetch_count)


def _guests(cluster: Cluster, orders: Sequence[Order], epoch: int, blocks: Ints) -> Guests:
    """Count the blocks that hosts lend: all hosts own equally many, wherever they
    are read.
    """
    from dataplane.scheduler.predicted import Guests

    order, hosts = orders[epoch], cluster.host_count
    counts, is_local = np.zeros(len(blocks), np.int64), np.zeros(len(blocks), np.bool_)
    for host in range(hosts):
        is_read = cluster.reads(host, *order.block_lanes(blocks), order.lanes)
        is_owner = blocks % hosts == host
        counts += is_read & ~is_owner
        is_local |= is_read & is_owner
    return Guests(counts, is_local)


def _reads(found: EpochReads, times: float) -> ReadsOfEpoch:
    """Return the reads of all hosts, which are `times` the predicted ones."""
    read, on_disk = round(found.bytes_read * times), round(found.disk_bytes * times)
    return ReadsOfEpoch(round(found.hit_rate, 4), read, on_disk)
