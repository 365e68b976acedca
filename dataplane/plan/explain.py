"""Compute what `dataplane plan` shows: what an order costs a cluster, and how well it shuffles.

The numbers follow from lanes, windows and blocks. Displacement, and blocks and shards in a batch,
are sampled at positions chosen by the keyed hash, so that the result is always the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dataplane.changes import EpochSteps
from dataplane.model import End
from dataplane.plan.block_hosts import BlockHosts
from dataplane.plan.cluster import Cluster
from dataplane.plan.defaults import BlockSizes, Shuffle
from dataplane.plan.manifest import Manifest
from dataplane.plan.order import Order
from dataplane.plan.permute import Domain, key
from dataplane.plan.quality import quality, unshuffled_quality
from dataplane.plan.shuffled import (
    HostFigures,
    ShuffledSource,
    figures_by_host_count,
    open_bytes,
)
from dataplane.plan.slices import Slice
from dataplane.plan.windows import WINDOW_CACHE_BYTES, Windows

# Number of sampled stretches of the order, and their minimum and maximum length. A stretch opens
# windows of as many lanes as it has samples. All stretches together compute at most this many
# permutation entries: about two seconds.
_PROBES = 16
_PROBE_SAMPLES = (1024, 65_536)
_PROBE_ENTRIES = 1 << 25
_DROP_SHARE_MAX = 0.01


@dataclass(frozen=True, slots=True)
class Explanation:
    """The cost of one epoch, and the quality of its shuffle. Times are not estimated.

    `hosts_per_block_*` counts hosts that may need a block (an upper bound: a host whose ranks by
    chance take none of its samples is counted). `displacement` is the mean distance between a
    sample's position and its place in the dataset, divided by the average of a perfect shuffle: 0
    is the dataset's own order, 1 is perfect (and the maximum, even if samples moved further by
    chance). `blocks_per_batch` and `shards_per_batch` count the distinct blocks and shards in a
    global batch; their `_perfect` counterparts are those of a perfect shuffle. If a batch is too
    long, or opens too many long windows, only its first `probed_per_batch` samples are counted.
    `quality` is the entropy of a batch's labels if the dataset is sorted by 100 labels, divided by
    that of a perfect shuffle, at most 1: in all epochs but the first. `quality_of_epoch_0` is lower
    if the ramp covers much of the dataset: the first windows of a lane have `ramp_windows` samples,
    and from position `ramp_end` of epoch 0 on, all lanes have full windows.
    """

    step_count: int
    samples_dropped: int
    samples_padded: int
    lanes: int
    window: int
    lanes_per_rank: int
    host_count: int
    open_window_bytes_per_host: int
    hosts_per_block_mean: float
    hosts_per_block_max: int
    bytes_read_per_host: int
    displacement: float
    probed_per_batch: int
    blocks_per_batch: float
    blocks_per_batch_perfect: float
    shards_per_batch: float
    shards_per_batch_perfect: float
    quality: float
    quality_of_epoch_0: float
    ramp_windows: tuple[int, ...]
    ramp_end: int
    by_host_count: tuple[HostFigures, ...]
    warnings: tuple[str, ...]


def explain(
    manifest: Manifest,
    order: Order,
    cluster: Cluster,
    steps: EpochSteps,
    *,
    ramp: int = 0,
) -> Explanation:
    """Explain an order for these ranks, which make these steps. `ramp` is that of the job, even if
    the order is of a later epoch.

    Raises:  ConfigError: invalid combination of batch and ranks.
    """
    samples, global_batch, end = manifest.sample_count, steps.global_batch, steps.end
    step_count = Slice(steps).step_count
    rows, lengths = manifest.block_rows, manifest.block_length
    readers = BlockHosts.of(order)
    hosts = readers.counts(cluster, rows)
    lanes_per_host = cluster.lanes_per_host(order.lanes)
    sizes = BlockSizes.of(rows, manifest.block_decoded)
    stored = int(lengths.sum(dtype=np.int64))
    whole = (ShuffledSource(sizes, order.window, global_batch, stored),)
    probed = _probe(manifest, order, min(global_batch, samples))
    ramp = ramp if order.shuffle else 0
    windows = _ramp_windows(order, ramp)
    read = readers.read_bytes(cluster, rows, lengths)
    covered = step_count * global_batch
    dropped = samples - covered if end is End.DROP else 0
    return Explanation(
        step_count=step_count,
        samples_dropped=dropped,
        samples_padded=covered - samples if end is End.PAD else 0,
        lanes=order.lanes,
        window=order.window,
        lanes_per_rank=cluster.lanes_per_rank(order.lanes),
        host_count=cluster.host_count,
        open_window_bytes_per_host=open_bytes(whole, lanes_per_host),
        hosts_per_block_mean=float(hosts.mean()),
        hosts_per_block_max=int(hosts.max()),
        bytes_read_per_host=round(read / cluster.host_count),
        displacement=min(probed.displacement, 1.0),
        probed_per_batch=probed.batch,
        blocks_per_batch=probed.blocks,
        blocks_per_batch_perfect=probed.blocks_perfect,
        shards_per_batch=probed.shards,
        shards_per_batch_perfect=probed.shards_perfect,
        quality=_quality(sizes, order, 0, global_batch),
        quality_of_epoch_0=_quality(sizes, order, ramp, global_batch),
        ramp_windows=windows,
        ramp_end=min(order.lanes * sum(windows), samples),
        by_host_count=figures_by_host_count(
            whole, order.lanes, cluster, lambda some: readers.read_bytes(some, rows, lengths)
        ),
        warnings=tuple(_warnings(order, lanes_per_host, dropped)),
    )


def _quality(sizes: BlockSizes, order: Order, ramp: int, global_batch: int) -> float:
    if not order.shuffle:
        return unshuffled_quality(sizes, global_batch)
    return quality(sizes, Shuffle(order.lanes, order.window, ramp), global_batch)


def _ramp_windows(order: Order, ramp: int) -> tuple[int, ...]:
    """Return how many samples the first windows of the first lane have in epoch 0, before the first
    full one. Those of other lanes have as many or fewer.
    """
    windows = Windows(order.seed, 0, order.lanes, order.window, ramp, order.sample_count)
    found: list[int] = []
    stop = 0
    while ramp and stop < order.window:
        start, stop = windows.bounds_of(0, stop)
        found.append(stop - start)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Probed:
    displacement: float
    batch: int
    blocks: float
    blocks_perfect: float
    shards: float
    shards_perfect: float


def _probe(manifest: Manifest, order: Order, batch: int) -> _Probed:
    samples = manifest.sample_count
    shortest, longest = _PROBE_SAMPLES
    length = min(max(batch, shortest), longest, samples)
    if min(order.lanes, length) * order.window > _PROBE_ENTRIES:
        length = max(1, _PROBE_ENTRIES // order.window)
    batch = min(batch, length)
    entries = min(order.lanes, length) * order.window
    count = max(1, min(_PROBES, _PROBE_ENTRIES // entries, samples // length))
    starts = np.cumsum(manifest.block_rows) - manifest.block_rows
    distance, perfect, blocks, shards = 0.0, 0.0, 0, 0
    for probe in range(count):
        begin = key(order.seed, Domain.PROBE, order.epoch, probe) % (samples - length + 1)
        positions = np.arange(begin, begin + length, dtype=np.int64)
        block, row = order.locate(positions)
        sample = starts[block] + row
        distance += float(np.abs(sample - positions).sum())
        # The average distance from position t to a random place in [0, N).
        place = positions / samples
        perfect += float((place**2 + (1 - place) ** 2).sum()) * samples / 2
        blocks += len(np.unique(block[:batch]))
        shards += len(np.unique(manifest.block_shard[block[:batch]]))
    shard_rows = np.bincount(manifest.block_shard, weights=manifest.block_rows)
    return _Probed(
        displacement=distance / perfect,
        batch=batch,
        blocks=blocks / count,
        blocks_perfect=_perfect(manifest.block_rows / samples, batch),
        shards=shards / count,
        shards_perfect=_perfect(shard_rows / samples, batch),
    )


def _perfect(shares: np.ndarray[tuple[int, ...], np.dtype[np.float64]], batch: int) -> float:
    """Return how many distinct groups `batch` independent draws hit, on average."""
    with np.errstate(divide="ignore"):
        return float(-np.expm1(np.log1p(-np.minimum(shares, 1.0)) * batch).sum())


def _warnings(order: Order, lanes_per_host: int, dropped: int) -> list[str]:
    said: list[str] = []
    remembered = lanes_per_host * order.window * (2 if order.window <= 1 << 16 else 4)
    if order.shuffle and remembered > WINDOW_CACHE_BYTES:
        said.append(
            f"the permutations of a host's open windows take {remembered >> 20} MiB, more than the"
            f" {WINDOW_CACHE_BYTES >> 20} MiB that are cached, so they are computed again and "
            "again: choose a shorter window, or fewer lanes"
        )
    if dropped > _DROP_SHARE_MAX * order.sample_count:
        said.append(
            f"dropping the incomplete last batch loses {dropped} of {order.sample_count} samples"
            f" ({dropped / order.sample_count:.1%}) in every epoch: choose a smaller batch, or keep"
            " the last one (drop_last=False)"
        )
    return said
