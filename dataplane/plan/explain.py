"""Computes what `dataplane plan` shows: what an order costs a cluster, and how well it shuffles.

The numbers follow from lanes, windows and blocks. Only the shuffle's quality is sampled, at
positions chosen by the keyed hash, so that the result is always the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dataplane.errors import ConfigError
from dataplane.model import End
from dataplane.plan.defaults import BlockSizes
from dataplane.plan.manifest import Manifest
from dataplane.plan.order import Order
from dataplane.plan.permute import Domain, key
from dataplane.plan.slices import Slice
from dataplane.plan.windows import WINDOW_CACHE_BYTES, Int64

# Number of sampled stretches of the order, and their minimum and maximum length. A stretch opens
# windows of as many lanes as it has samples. All stretches together compute at most this many
# permutation entries: about two seconds.
_PROBES = 16
_PROBE_SAMPLES = (1024, 65_536)
_PROBE_ENTRIES = 1 << 25
_DROP_SHARE_MAX = 0.01


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one epoch costs, and how well it is shuffled. Times are not estimated.

    `hosts_per_block_*` counts hosts that may need a block (an upper bound: a host whose ranks by
    chance take none of its samples is counted). `displacement` is the mean distance between a
    sample's position and its place in the dataset, divided by the average of a perfect shuffle: 0
    is the dataset's own order, 1 is perfect (and the maximum, even if samples moved further by
    chance). `blocks_per_batch` and `shards_per_batch` count the distinct blocks and shards in a
    global batch; their `_perfect` counterparts are those of a perfect shuffle. If a batch is too
    long, or opens too many long windows, only its first `probed_per_batch` samples are counted.
    `quality` is the product of displacement and the share of blocks, each at most 1.
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
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cluster:
    """The data-parallel ranks, host after host: rank r is on host r // ranks_per_host."""

    dp_size: int = 1
    ranks_per_host: int = 1

    def __post_init__(self) -> None:
        if self.ranks_per_host < 1 or self.dp_size < 1:
            raise ConfigError(
                f"dp_size {self.dp_size} and ranks_per_host {self.ranks_per_host}: both count"
                " from 1",
                field="dp_size" if self.dp_size < 1 else "ranks_per_host",
            )

    @property
    def host_count(self) -> int:
        return -(-self.dp_size // self.ranks_per_host)


def explain(
    manifest: Manifest, order: Order, cluster: Cluster, global_batch: int, end: End = End.RAGGED
) -> Explanation:
    """Explain an order for these ranks.

    Raises:  ConfigError: invalid combination of batch and ranks.
    """
    samples = manifest.sample_count
    steps = Slice(samples, 0, global_batch, end, 0, cluster.dp_size).step_count
    hosts = _hosts_per_block(manifest, order, cluster)
    # Lanes l and ranks r meet where l and r are equal modulo this number.
    meeting = math.gcd(order.lanes, cluster.dp_size)
    lanes_per_rank = order.lanes // meeting
    lanes_per_host = lanes_per_rank * min(meeting, cluster.ranks_per_host)
    sizes = BlockSizes.of(manifest.block_rows, manifest.block_decoded)
    quality = _probe(manifest, order, min(global_batch, samples))
    displacement = min(quality.displacement, 1.0)
    read = float(np.dot(hosts.astype(np.float64), manifest.block_length.astype(np.float64)))
    covered = steps * global_batch
    dropped, padded = max(samples - covered, 0), max(covered - samples, 0)
    return Explanation(
        step_count=steps,
        samples_dropped=dropped,
        samples_padded=padded if end is End.PAD else 0,
        lanes=order.lanes,
        window=order.window,
        lanes_per_rank=lanes_per_rank,
        host_count=cluster.host_count,
        open_window_bytes_per_host=lanes_per_host * sizes.open_window_bytes(order.window),
        hosts_per_block_mean=float(hosts.mean()),
        hosts_per_block_max=int(hosts.max()),
        bytes_read_per_host=round(read / cluster.host_count),
        displacement=displacement,
        probed_per_batch=quality.batch,
        blocks_per_batch=quality.blocks,
        blocks_per_batch_perfect=quality.blocks_perfect,
        shards_per_batch=quality.shards,
        shards_per_batch_perfect=quality.shards_perfect,
        quality=displacement * min(quality.blocks / quality.blocks_perfect, 1.0),
        warnings=tuple(_warnings(order, cluster, sizes, lanes_per_host, dropped)),
    )


def _hosts_per_block(manifest: Manifest, order: Order, cluster: Cluster) -> Int64:
    """How many hosts may need each block.

    Shapes:  result: int64[K].
    """
    first, last = order.block_lanes(np.arange(manifest.block_count))
    meeting = math.gcd(order.lanes, cluster.dp_size)
    spanned = np.minimum(last - first, meeting - 1)
    distinct, number = np.unique(first % meeting * meeting + spanned, return_inverse=True)
    found = [_hosts_of(name // meeting, name % meeting, cluster, meeting) for name in distinct]
    return np.minimum(np.array(found, np.int64)[number], manifest.block_rows)


def _hosts_of(first: int, more: int, cluster: Cluster, meeting: int) -> int:
    """Hosts with a rank r so that (r - first) % meeting <= more."""
    if meeting <= cluster.ranks_per_host or more == meeting - 1:
        full = cluster.dp_size // cluster.ranks_per_host
    else:
        full = 0
    start = np.arange(full, cluster.host_count) * cluster.ranks_per_host
    stop = np.minimum(start + cluster.ranks_per_host, cluster.dp_size)
    behind = (start - first) % meeting
    # The host's first such rank is its first rank, or comes when the remainder wraps to 0.
    reached = (behind <= more) | (start + meeting - behind < stop)
    return full + int(reached.sum())


@dataclass(frozen=True, slots=True)
class _Quality:
    displacement: float
    batch: int
    blocks: float
    blocks_perfect: float
    shards: float
    shards_perfect: float


def _probe(manifest: Manifest, order: Order, batch: int) -> _Quality:
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
        distance += float(np.abs(starts[block] + row - positions).sum())
        # The average distance from position t to a random place in [0, N).
        place = positions / samples
        perfect += float((place**2 + (1 - place) ** 2).sum()) * samples / 2
        blocks += len(np.unique(block[:batch]))
        shards += len(np.unique(manifest.block_shard[block[:batch]]))
    shard_rows = np.bincount(manifest.block_shard, weights=manifest.block_rows)
    return _Quality(
        displacement=distance / perfect,
        batch=batch,
        blocks=blocks / count,
        blocks_perfect=_perfect(manifest.block_rows / samples, batch),
        shards=shards / count,
        shards_perfect=_perfect(shard_rows / samples, batch),
    )


def _perfect(shares: np.ndarray[tuple[int, ...], np.dtype[np.float64]], batch: int) -> float:
    """How many distinct groups `batch` independent draws hit, on average."""
    with np.errstate(divide="ignore"):
        return float(-np.expm1(np.log1p(-np.minimum(shares, 1.0)) * batch).sum())


def _warnings(
    order: Order, cluster: Cluster, sizes: BlockSizes, lanes_per_host: int, dropped: int
) -> list[str]:
    said: list[str] = []
    lanes, dp_size = order.lanes, cluster.dp_size
    if dp_size > lanes:
        said.append(
            f"dp_size {dp_size} is larger than the {lanes} lanes, so ranks share lanes and several"
            f" hosts read the same blocks: choose a multiple of {dp_size} lanes for disjoint reads"
        )
    elif lanes % dp_size:
        said.append(
            f"{lanes} lanes are not a multiple of dp_size {dp_size}, so ranks share lanes and "
            "several"
            f" hosts read the same blocks: choose a multiple of {dp_size} lanes"
        )
    if order.shuffle and order.window < min(sizes.block_rows, -(-order.sample_count // lanes)):
        said.append(
            f"a window of {order.window} samples is smaller than a block of {sizes.block_rows}, "
            "so samples that are neighbours in the dataset stay close: choose a longer window, "
            "or fewer lanes"
        )
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
