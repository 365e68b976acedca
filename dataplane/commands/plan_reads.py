"""The reads that `dataplane plan` predicts: from storage in the first epoch and in later ones,
whether memory holds the open windows, and the costs with more or fewer hosts.

The prediction for later epochs assumes the eviction of scheduler/next_use.py (Belady's rule over
the plan): at the end of an epoch, all memory that open windows leave holds blocks that the next
epoch needs first. tests/hosts.py compares it with what real nodes read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dataplane.commands import output

if TYPE_CHECKING:
    from dataplane.model.config import JobSpec, NodeConfig
    from dataplane.node.dataset import Dataset
    from dataplane.plan.cluster import Cluster
    from dataplane.plan.manifest import Manifest
    from dataplane.plan.order import Order
    from dataplane.plan.shuffled import HostFigures, ShuffledJob
    from dataplane.scheduler.dataset import Ints

# The largest size of open windows is computed from at most this many blocks.
_OPEN_BLOCKS_MAX = 1 << 18
# Copies of other nodes' blocks that are read ahead take at most this part of the memory.
_AHEAD_PARTS = 3
# Measured (2026-11): memory and descriptors of a node's process, descriptors of its lender, and a
# coordinator with 1,000 nodes of ten ranks each beside an empty one.
_NODE_BYTES, _NODE_FILES, _LENDER_FILES, _FILES_EACH = 100_000_000, 24, 7, 2
_COORDINATOR_BYTES, _COORDINATOR_FILES = 62_000_000, 24
_MEMBER_BYTES, _MEMBER_PROCESSORS, _RANKS_MEASURED = 14_000, 0.6 / 10_000, 10
# Footers take this part of the block arena, or _FOOTER_BYTES_MIN.
_FOOTER_PARTS, _FOOTER_BYTES_MIN = 16, 64 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class ReadsOfEpoch:
    """The reads of one epoch. `hit_rate` is the share of needed bytes that hosts find in their own
    memory or get from other nodes. `origin_bytes` is what all hosts together read from storage,
    `disk_bytes` what they read from their disks.
    """

    hit_rate: float
    origin_bytes: int
    disk_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ReadsOfHosts:
    """The reads of the first epoch, counted over all blocks, and the minimum for later ones.
    `is_too_small` means that the open windows do not fit, so that more is read than shown.
    """

    epochs: tuple[ReadsOfEpoch, ReadsOfEpoch]
    is_too_small: bool


@dataclasses.dataclass(frozen=True, slots=True)
class PredictedReads:
    """The reads with this much memory and disk for blocks on each host. `with_neighbours`: the
    memory and disks of all hosts form one cache; None for a single host. `open_bytes_max` is the
    largest size of open windows at any time, on the first host.
    """

    arena_bytes: int
    alone: ReadsOfHosts
    with_neighbours: ReadsOfHosts | None
    cache_bytes: int
    open_bytes_max: int


def reads_and_advice(
    manifest: Manifest, spec: JobSpec, cluster: Cluster, config: NodeConfig, order: Order
) -> tuple[PredictedReads | None, tuple[str, ...]]:
    """Return the reads if this order is that of the first epoch, and the advice about the shuffle:
    the loader's own, and what only a plan shows. The reads are None for local files, which are
    mapped into memory, and for jobs with a map=, whose blocks have other sizes.
    """
    from dataplane.node.dataset import can_pack, dataset_of
    from dataplane.plan.advice import advice

    arena_bytes = config.block_arena_bytes
    if spec.view.map:
        job = _job(manifest, spec, cluster)
        return None, tuple(filter(None, [advice(job) if spec.shuffle else ""]))
    packed = can_pack(manifest, spec, arena_bytes)
    dataset = dataset_of(1, manifest, spec, packed=packed, arena_bytes=arena_bytes)
    job = _job(manifest, spec, cluster, dataset.kept_bytes, arena_bytes)
    warnings = [advice(job) if spec.shuffle else ""]
    remote = np.flatnonzero(dataset.blocks.marks.is_remote)
    reads = None
    if len(remote):
        does_not_fit = spec.shuffle and not job.fits
        reads = _reads(dataset, spec, remote, order, cluster, config, is_too_small=does_not_fit)
        warnings.append("" if does_not_fit else _peak(reads.open_bytes_max, arena_bytes))
    return reads, tuple(filter(None, warnings))


def _job(
    manifest: Manifest,
    spec: JobSpec,
    cluster: Cluster,
    kept_bytes: int = 0,
    arena_bytes: float = math.inf,
) -> ShuffledJob:
    """Return the job. `kept_bytes` is the decoded size of the dataset in memory, 0 if unknown."""
    from dataplane.plan.defaults import BlockSizes
    from dataplane.plan.shuffled import ShuffledJob, ShuffledSource

    sizes = BlockSizes.of(manifest.block_rows, manifest.block_decoded)
    stored = int(manifest.block_length.sum(dtype=np.int64))
    whole = ShuffledSource(sizes, spec.window, spec.global_batch, stored, kept_bytes)
    return ShuffledJob((whole,), spec.lanes, cluster, spec.global_batch, arena_bytes)


def _peak(open_bytes: int, arena_bytes: int) -> str:
    """Return a warning if open windows do not fit when they are largest, which happens if block
    sizes differ much; "" if they fit.
    """
    from dataplane.base.units import raise_to
    from dataplane.plan.advice import ROOM

    if open_bytes <= arena_bytes:
        return ""
    need, arena = map(output.approximate_bytes, (open_bytes, arena_bytes))
    return (
        f"at times, this job keeps {need} of blocks open on a host, and its block arena has {arena}"
        ", so some blocks are read again in an epoch (a loader warns only if the average does not "
        f"fit): {raise_to('block_arena_bytes', round(open_bytes * ROOM))}"
    )


def _reads(
    dataset: Dataset,
    spec: JobSpec,
    remote: Ints,
    order: Order,
    cluster: Cluster,
    config: NodeConfig,
    *,
    is_too_small: bool,
) -> PredictedReads:
    """Compute the reads. `is_too_small` means that not even the average of open windows fits into
    the arena.

    Shapes:  remote: int64[n], the blocks that are fetched, in ascending order.
    """
    from dataplane.plan.shuffled import BlockHosts

    blocks, rows, hosts = dataset.blocks, dataset.manifest.block_rows, cluster.host_count
    sizes, kept = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    sizes[remote], kept[remote] = blocks.all_read_bytes(remote), blocks.kept(remote)
    readers = BlockHosts.of(order)
    first = remote[readers.are_read(cluster, 0)[remote]]
    open_bytes = open_bytes_max(order, first, kept)
    is_too_small |= open_bytes > config.block_arena_bytes
    whole = (int(sizes.sum()), int(kept.sum()))
    total = readers.read_bytes(cluster, rows, sizes)
    arena, cache = config.block_arena_bytes, config.cache_bytes
    share = total / hosts / max(whole[0], 1)
    ahead, busy_bytes = _in_progress(dataset, spec, cluster, config)
    room = max(arena - busy_bytes, 0)
    alone = _epochs(total, share, kept_share(whole, room, open_bytes, cache))
    together = None
    if hosts > 1:
        # Pool the memory and disks of all hosts, less the copies of lent blocks that are open or
        # read ahead. Nodes read less ahead if copies take much of the memory.
        lent = share * whole[1] * (hosts - 1)
        read_ahead = min(lent * ahead, hosts * arena / _AHEAD_PARTS)
        copies = round(min((hosts - 1) * open_bytes + read_ahead, lent))
        pooled = kept_share(whole, hosts * arena - copies, open_bytes, hosts * cache)
        together = ReadsOfHosts(_epochs(whole[0], 1.0, pooled), is_too_small)
    return PredictedReads(arena, ReadsOfHosts(alone, is_too_small), together, cache, open_bytes)


def _in_progress(
    dataset: Dataset, spec: JobSpec, cluster: Cluster, config: NodeConfig
) -> tuple[float, int]:
    """Return which part of an epoch a node reads ahead, and how many bytes of raw blocks it fetches
    or decodes at once.
    """
    from dataplane.node.delivery import layout_of, slab_sizes
    from dataplane.scheduler.planning import PLANS_AHEAD, PLANS_TOGETHER

    manifest, marks = dataset.manifest, dataset.blocks.marks
    sizes = slab_sizes(dataset, spec, cluster.dp_size, config.slab_bytes)
    slots = layout_of(config, sizes.slot_bytes).slot_count
    slab_part = sizes.batches * spec.global_batch / manifest.sample_count
    # Count the raw blocks of all slabs that are planned together twice: while some are decoded, as
    # many others are fetched.
    count = min(2 * PLANS_TOGETHER * slab_part * manifest.block_count, 2 * config.fetch_count)
    is_decoded = marks.decoded > 0
    mean_bytes = float(marks.raw[is_decoded].mean()) if is_decoded.any() else 0.0
    return min((PLANS_AHEAD + slots) * slab_part, 1.0), int(count * mean_bytes)


def open_bytes_max(order: Order, blocks: Ints, kept: Ints) -> int:
    """Return the largest total size of those blocks whose windows are open at the same time.

    Shapes:  blocks: int64[n].   kept: int64[all blocks], bytes in memory.
    """
    step = -(-len(blocks) // _OPEN_BLOCKS_MAX)
    some = blocks[:: max(step, 1)]
    first, last = order.block_span(some)
    # At equal positions, blocks that end come before blocks that begin.
    by_time = np.argsort(np.concatenate([last + 1, first]), kind="stable")
    sizes = np.concatenate([-kept[some], kept[some]])
    return step * int(np.cumsum(sizes[by_time]).max(initial=0))


def kept_share(
    whole: tuple[int, int], memory: int, open_bytes: int, cache: int
) -> tuple[float, float]:
    """Return which part of the dataset stays in memory, and which in memory or on disk, from one
    epoch to the next. `whole` is the size of the dataset, stored and in memory.

    At the end of an epoch, all of the memory may hold blocks that the next one needs first, unless
    open windows take more than half of it.
    """
    stored, in_memory = (max(size, 1) for size in whole)
    kept = max(min(memory, 2 * (memory - open_bytes)), 0) / in_memory
    return kept, kept + cache / stored


def _epochs(
    total: float, share: float, kept: tuple[float, float]
) -> tuple[ReadsOfEpoch, ReadsOfEpoch]:
    """Return the reads of the first epoch and of later ones. Each host reads a `share` of the
    dataset in an epoch, `total` bytes in all; in the next epoch, it needs the same share of those
    bytes again.
    """
    hit, with_disk = (min(part / max(share, 1e-12), share) for part in kept)
    later = ReadsOfEpoch(
        round(hit, 4), round(total * (1 - with_disk)), round(total * (with_disk - hit))
    )
    return ReadsOfEpoch(0.0, round(total)), later


def show_host_counts(figures: Sequence[HostFigures], *, are_reads_counted: bool) -> None:
    """Print the costs of each host, for 1 to 1,024 hosts. Open windows are estimated from mean
    sizes; so are reads, unless `are_reads_counted` over all blocks.
    """
    size = output.approximate_bytes
    output.stdout().print()
    reads = "reads" if are_reads_counted else "reads, about"
    headings = (
        *("hosts", "ranks", "lanes a rank", "open windows, about"),
        *(reads, "times its share"),
    )
    rows = [
        (
            f"{figure.host_count:,}",
            f"{figure.dp_size:,}",
            f"{figure.lanes_per_rank:,}",
            size(figure.open_window_bytes_per_host),
            size(figure.bytes_read_per_host),
            f"{figure.reads_times_share:.2f}",
        )
        for figure in figures
    ]
    output.write_table(headings, rows, "what each host takes, for so many hosts")


@dataclasses.dataclass(frozen=True, slots=True)
class FleetFigures:
    """The size of a service of `host_count` nodes with a coordinator. Memory is what the settings
    allow a host at most. A host reads `store_bytes_alone` in its first epoch; with neighbours only
    `store_bytes`, and it receives and sends `neighbour_bytes` each.
    """

    host_count: int
    memory_bytes: int
    descriptors: int
    store_bytes_alone: int
    store_bytes: int
    neighbour_bytes: int
    coordinator_processors: float
    coordinator_memory_bytes: int
    coordinator_descriptors: int


def fleet(figures: Sequence[HostFigures], config: NodeConfig) -> list[FleetFigures]:
    """Return the size of a service for each of these numbers of hosts.

    Source:  docs/operations.md, Memory, and the measurements named above.
    """
    arena, workers = config.block_arena_bytes, config.worker_count_most
    sizes = []
    for figure in figures:
        hosts, alone = figure.host_count, figure.bytes_read_per_host
        ranks = figure.dp_size // hosts
        share = round(alone / max(figure.reads_times_share, 1.0))
        memory = arena + max(arena // _FOOTER_PARTS, _FOOTER_BYTES_MIN) + _NODE_BYTES
        memory += ranks * config.delivery_bytes_per_rank + workers * config.worker_memory_bytes
        files = _NODE_FILES + _FILES_EACH * (ranks + workers) + config.fetch_count
        # On average, neighbours read as much from a node as it reads from others.
        files += _LENDER_FILES + config.fetch_count if hosts > 1 else 0
        members = hosts * max(ranks, _RANKS_MEASURED)
        sizes.append(
            FleetFigures(
                hosts, memory, files, alone, share, alone - share,
                round(members * _MEMBER_PROCESSORS, 4),
                _COORDINATOR_BYTES + members * _MEMBER_BYTES, _COORDINATOR_FILES + hosts,
            )
        )  # fmt: skip
    return sizes


def show_fleet(sizes: Sequence[FleetFigures], *, are_neighbours: bool) -> None:
    """Print what hosts and coordinator need. `are_neighbours`: a data port is set."""
    size = output.approximate_bytes
    headings = (
        *("hosts", "memory, at most", "files, about", "from the store alone", "with neighbours"),
        *("from and to neighbours", "coordinator: processors", "memory", "files"),
    )
    rows = [
        (
            f"{row.host_count:,}",
            size(row.memory_bytes),
            f"{row.descriptors:,}",
            size(row.store_bytes_alone),
            size(row.store_bytes),
            size(row.neighbour_bytes),
            f"{row.coordinator_processors:.2f}",
            size(row.coordinator_memory_bytes),
            f"{row.coordinator_descriptors:,}",
        )
        for row in sizes
    ]
    output.stdout().print()
    output.write_table(headings, rows, "each host, reads in its first epoch, and the coordinator")
    output.stdout().print(
        "memory: the node's settings (`dataplane config show` prints them); files, processors and "
        "the coordinator's memory: measured"
        + ("" if are_neighbours else "; neighbours need data_listen, which is not set"),
        soft_wrap=True,
    )


def show_reads(reads: PredictedReads) -> None:
    """Print the reads of the first epoch and of later ones, alone and with other nodes' memory."""
    size = output.approximate_bytes
    rows = []
    for way, hosts in (("alone", reads.alone), ("with neighbours", reads.with_neighbours)):
        for name, epoch in zip(("first", "later"), hosts.epochs if hosts else (), strict=False):
            is_least = name == "later" or reads.alone.is_too_small
            disk = size(epoch.disk_bytes) if reads.cache_bytes else None
            least = "at least " if is_least and epoch.origin_bytes else ""
            rows.append(
                (way, name, f"{epoch.hit_rate:.1%}", disk, f"{least}{size(epoch.origin_bytes)}")
            )
    output.stdout().print()
    room = size(reads.arena_bytes)
    room += f" of memory and {size(reads.cache_bytes)} of disk" if reads.cache_bytes else ""
    title = (
        f"what all hosts read from storage, each with {room} for blocks (open windows take "
        f"{size(reads.open_bytes_max)} at most)"
    )
    output.write_table(("hosts", "epoch", "blocks in memory", "from disk", "reads"), rows, title)
