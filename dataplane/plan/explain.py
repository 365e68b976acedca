"""Compute what `dataplane plan` shows: what an order costs a cluster, and how well it shuffles.

The numbers follow from lanes, windows and mean sizes of blocks, so computing them is fast for any
dataset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataplane.model.changes import EpochSteps
from dataplane.model.config import JobSpec
from dataplane.model.records import End
from dataplane.plan.cluster import Cluster
from dataplane.plan.counting import SLOTS_MAX
from dataplane.plan.defaults import BlockSizes, Shuffle
from dataplane.plan.manifest import Manifest
from dataplane.plan.mixed_order import MixedOrder
from dataplane.plan.mixture import EpochPlan, Shares
from dataplane.plan.order import Order
from dataplane.plan.orders import job_order, mixed_of
from dataplane.plan.quality import quality, unshuffled_quality
from dataplane.plan.shuffled import (
    HostFigures,
    ShuffledSource,
    figures_by_host_count,
    hosts_per_block,
    open_bytes,
    source_of_mixture,
)
from dataplane.plan.slices import Slice
from dataplane.plan.windows import WINDOW_CACHE_BYTES, Windows

_DROP_SHARE_MAX = 0.01


@dataclass(frozen=True, slots=True)
class Explanation:
    """The cost of one epoch, and the quality of its shuffle. Times are not estimated.

    `hosts_per_block` is how many hosts read a block, on average. `quality` is the entropy of a
    batch's labels if the dataset is sorted by 100 labels, relative to a perfect shuffle, and holds
    for all epochs but the first. `quality_of_epoch_0` is lower if the ramp covers much of the
    dataset: the first windows of a lane have `ramp_windows` samples, and from position `ramp_end`
    of epoch 0 on, all lanes have full windows.
    """

    step_count: int
    samples_dropped: int
    samples_padded: int
    lanes: int
    window: int
    lanes_per_rank: int
    host_count: int
    open_window_bytes_per_host: int
    hosts_per_block: float
    bytes_read_per_host: int
    quality: float
    quality_of_epoch_0: float
    ramp_windows: tuple[int, ...]
    ramp_end: int
    by_host_count: tuple[HostFigures, ...]
    warnings: tuple[str, ...]


def explain(spec: JobSpec, whole: ShuffledSource, order: Order, cluster: Cluster) -> Explanation:
    """Explain an epoch of a job over the dataset `whole`, which has this order.

    Raises:  ConfigError: invalid combination of batch and ranks.
    """
    samples, global_batch, end = order.sample_count, spec.global_batch, spec.end
    step_count = Slice(EpochSteps.of(spec, samples, dp_size=cluster.dp_size)).step_count
    lanes_per_host = cluster.lanes_per_host(order.lanes)
    ramp = spec.ramp if order.shuffle else 0
    windows = _ramp_windows(order, ramp)
    hosts = hosts_per_block([whole], order.lanes, cluster)
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
        open_window_bytes_per_host=open_bytes([whole], lanes_per_host),
        hosts_per_block=hosts,
        bytes_read_per_host=round(whole.stored_bytes * hosts / cluster.host_count),
        quality=_quality(whole.sizes, order, 0, global_batch),
        quality_of_epoch_0=_quality(whole.sizes, order, ramp, global_batch),
        ramp_windows=windows,
        ramp_end=min(order.lanes * sum(windows), samples),
        by_host_count=figures_by_host_count([whole], order.lanes, cluster),
        warnings=tuple(_warnings(order, lanes_per_host, dropped)),
    )


def _quality(sizes: BlockSizes, order: Order, ramp: int, global_batch: int) -> float:
    if not order.shuffle:
        return unshuffled_quality(sizes, global_batch)
    return quality(sizes, Shuffle(order.lanes, order.window, ramp), global_batch)


def _ramp_windows(order: Order, ramp: int) -> tuple[int, ...]:
    """Return the sizes of the windows before the first full one, in the first lane of epoch 0.
    Other lanes have as many such windows or fewer.
    """
    windows = Windows(order.seed, 0, order.lanes, order.window, ramp, order.sample_count)
    found: list[int] = []
    stop = 0
    while ramp and stop < order.window:
        start, stop = windows.bounds_of(0, stop)
        found.append(stop - start)
    return tuple(found)


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


# -- explain mixture ---------------------------------------------------------------------------
#
# Compute the part of each source in an epoch of a mixture, for `dataplane plan`. The counts come
# from the plan that also determines the order of samples, so they are exact.

# In its first four passes over a text, a model learns about as much as from new text of the same
# total length, and much less in later passes (Muennighoff et al., Scaling Data-Constrained Language
# Models, 2023).
PASSES_MAX = 4
_OFF_MAX = 0.01


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """One source's part of an epoch. Both shares are shares of samples. `asked_share` is the share
    that the weights ask for, averaged over the epoch if they change in it. `passes` is how often
    the epoch reads the source. If the epoch reads all samples that it is allowed to,
    `exhausted_position` is the position after the last one, and `exhausted_step` its step;
    otherwise both are None.
    """

    name: str
    available: int
    asked_share: float
    share: float
    samples: int
    passes: float
    exhausted_position: int | None
    exhausted_step: int | None
    window: int
    open_window_bytes_per_host: int


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """New shares of an epoch's sources, from this position on, in this step."""

    position: int
    step: int
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MixtureExplanation:
    """The contents of one epoch of a mixture, and the memory for its open windows. Times are not
    estimated.
    """

    sample_count: int
    step_count: int
    samples_dropped: int
    samples_padded: int
    lanes: int
    lanes_per_rank: int
    host_count: int
    round_samples: int
    open_window_bytes_per_host: int
    sources: tuple[SourcePlan, ...]
    changes: tuple[PlannedChange, ...]
    by_host_count: tuple[HostFigures, ...]
    warnings: tuple[str, ...]


def explain_mixture(
    spec: JobSpec, manifests: Sequence[Manifest], cluster: Cluster, epoch: int
) -> MixtureExplanation:
    """Explain an epoch of a job over a mixture of these datasets.

    Raises:  ConfigError: the epoch cannot be planned, or batch and ranks cannot be combined.
    """
    order = job_order(spec, manifests, epoch)
    assert isinstance(order, MixedOrder)
    count, batch = order.plan.sample_count, spec.global_batch
    mix = None if spec.mixture is None else spec.mixture.history
    own = Slice(EpochSteps.of(spec, count, epoch, dp_size=cluster.dp_size, mix=mix))
    steps = own.step_count
    covered = steps * batch
    mixed = mixed_of(spec, [manifest.sample_count for manifest in manifests])
    asked = _asked(spec, order.plan)
    sources, read = _sources(spec, manifests, cluster, order, mixed.limits.tolist(), asked)
    return MixtureExplanation(
        sample_count=count,
        step_count=steps,
        samples_dropped=count - covered if spec.end is End.DROP else 0,
        samples_padded=covered - count if spec.end is End.PAD else 0,
        lanes=spec.lanes,
        lanes_per_rank=cluster.lanes_per_rank(spec.lanes),
        host_count=cluster.host_count,
        round_samples=mixed.round_steps * mixed.lanes * mixed.batch,
        open_window_bytes_per_host=sum(source.open_window_bytes_per_host for source in sources),
        sources=sources,
        changes=tuple(
            PlannedChange(at, at // batch, tuple(share / sum(shares) for share in shares))
            for at, shares in asked
            if at
        ),
        by_host_count=figures_by_host_count(read, spec.lanes, cluster),
        warnings=tuple(_mixture_warnings(sources)),
    )


def _asked(spec: JobSpec, plan: EpochPlan) -> list[tuple[int, Shares]]:
    """Return the shares that the job's weights ask for in an epoch, with the position from which
    each applies.
    """
    mixture = spec.mixture
    assert mixture is not None
    before = [change.shares for change in mixture.changes if change.epoch < plan.epoch]
    first = before[-1] if before else mixture.shares
    changed = [(at, shares) for at, shares in plan.changed if at < plan.sample_count]
    return changed if changed and not changed[0][0] else [(0, first), *changed]


def _mean_shares(asked: Sequence[tuple[int, Shares]], sample_count: int) -> Sequence[float]:
    """Average shares over an epoch. Shapes:  result: one a source."""
    starts = np.array([at for at, _ in asked])
    parts = np.diff(starts, append=sample_count) / sample_count
    shares = np.array([shares for _, shares in asked], np.float64)
    found: list[float] = (parts @ (shares / shares.sum(axis=1, keepdims=True))).tolist()
    return found


def _sources(
    spec: JobSpec,
    manifests: Sequence[Manifest],
    cluster: Cluster,
    order: MixedOrder,
    limits: Sequence[int],
    asked: Sequence[tuple[int, Shares]],
) -> tuple[tuple[SourcePlan, ...], list[ShuffledSource]]:
    """Return each source's part of the epoch, and estimates of reads for sources that have a part.
    `limits` are the most samples that an epoch may have of each source.
    """
    mixture, plan = spec.mixture, order.plan
    assert mixture is not None
    found, read, mean = [], [], _mean_shares(asked, plan.sample_count)
    lanes = cluster.lanes_per_host(spec.lanes)
    for at, (source, manifest) in enumerate(zip(mixture.sources, manifests, strict=True)):
        samples = int(plan.counts[at])
        share, passes = samples / plan.sample_count, samples / manifest.sample_count
        sizes = BlockSizes.of(manifest.block_rows, manifest.block_decoded)
        read_bytes = round(passes * int(manifest.block_length.sum(dtype=np.int64)))
        reads = source_of_mixture(spec, source, sizes, share, read_bytes)
        if samples:
            read.append(reads)
        is_exhausted = limits[at] < SLOTS_MAX and limits[at] - samples < mixture.batch
        last = _last_position(order, at) if is_exhausted and samples else None
        found.append(
            SourcePlan(
                name=source.name,
                available=manifest.sample_count,
                asked_share=mean[at],
                share=share,
                samples=samples,
                passes=passes,
                exhausted_position=None if last is None else last + 1,
                exhausted_step=None if last is None else last // spec.global_batch,
                window=source.window,
                open_window_bytes_per_host=open_bytes([reads], lanes) if samples else 0,
            )
        )
    return tuple(found), read


def _last_position(order: MixedOrder, source: int) -> int:
    """Return the position of a source's last sample, searching the last round that has any."""
    plan = order.plan
    in_round = [
        (segment.round_steps * segment.shares[source] // sum(segment.shares) + 8)
        * segment.lanes
        * segment.batch
        for segment in plan.segments
    ]
    count, base = int(plan.counts[source]), int(plan.base[source])
    samples = np.arange(count - min(max(in_round, default=1), count), count) + base
    return int(order.positions_of_samples(source, samples).max())


def _mixture_warnings(sources: Sequence[SourcePlan]) -> list[str]:
    said = []
    for source in sources:
        if source.passes > PASSES_MAX:
            said.append(
                f"source {source.name!r} is read {source.passes:.1f} times in this epoch: its"
                f" {source.available:,} samples are {source.share:.1%} of it. Models learn little"
                f" from more than {PASSES_MAX} passes: lower its weight, limit it with max_passes,"
                " or choose a shorter length"
            )
        if abs(source.share - source.asked_share) > _OFF_MAX:
            said.append(
                f"source {source.name!r} has {source.share:.1%} of the samples instead of"
                f" {source.asked_share:.1%}: "
                + (
                    f"it is exhausted at step {source.exhausted_step}, and the epoch goes on"
                    if source.exhausted_step is not None and source.share < source.asked_share
                    else "other sources are exhausted before the epoch ends"
                )
            )
    return said
