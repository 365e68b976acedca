"""Compute what `dataplane plan` shows of a mixture: the part of each source in an epoch.

Counts come from the plan that streams are made from, so they are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataplane.changes import EpochSteps
from dataplane.config import JobSpec
from dataplane.model import End
from dataplane.plan.cluster import Cluster
from dataplane.plan.counting import SLOTS_MAX
from dataplane.plan.defaults import BlockSizes
from dataplane.plan.manifest import Manifest
from dataplane.plan.mixed_order import MixedOrder
from dataplane.plan.mixture import EpochPlan, Shares
from dataplane.plan.orders import job_order, mixed_of
from dataplane.plan.shuffled import (
    HostFigures,
    ShuffledSource,
    figures_by_host_count,
    open_bytes,
    source_of_mixture,
)
from dataplane.plan.slices import Slice

# A model learns about as much from the first four passes over a text as from as many new texts, and
# much less from later ones (Muennighoff et al., Scaling Data-Constrained Language Models, 2023).
PASSES_MAX = 4
_OFF_MAX = 0.01


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """One source's part of an epoch. Both shares are of samples; `asked_share` is the share that
    the weights ask for, averaged over the epoch if they change in it. `passes` is how often the
    epoch reads the source. If the epoch reads all samples that it may, `exhausted_position` is the
    position after the last one, and `exhausted_step` its step; otherwise both are None.
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
    """The contents of one epoch of a mixture, and the cost of its open windows. Times are not
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
    mixed = mixed_of(spec, [each.sample_count for each in manifests])
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
        open_window_bytes_per_host=sum(one.open_window_bytes_per_host for one in sources),
        sources=sources,
        changes=tuple(
            PlannedChange(at, at // batch, tuple(share / sum(shares) for share in shares))
            for at, shares in asked
            if at
        ),
        by_host_count=figures_by_host_count(read, spec.lanes, cluster),
        warnings=tuple(_warnings(sources)),
    )


def _asked(spec: JobSpec, plan: EpochPlan) -> list[tuple[int, Shares]]:
    """Return the shares that the weights of the job ask for in an epoch, each from a
    position on.
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
    """Return each source's part of the epoch, and the reads of sources that have a part. `limits`:
    the most samples that an epoch may have of each source.
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
    """Return the last position of a source: somewhere in the last round that has it."""
    plan = order.plan
    in_round = [
        (each.round_steps * each.shares[source] // sum(each.shares) + 8) * each.lanes * each.batch
        for each in plan.segments
    ]
    count, base = int(plan.counts[source]), int(plan.base[source])
    samples = np.arange(count - min(max(in_round, default=1), count), count) + base
    return int(order.positions_of_samples(source, samples).max())


def _warnings(sources: Sequence[SourcePlan]) -> list[str]:
    said = []
    for one in sources:
        if one.passes > PASSES_MAX:
            said.append(
                f"source {one.name!r} is read {one.passes:.1f} times in this epoch: its"
                f" {one.available:,} samples are {one.share:.1%} of it. Models learn little from"
                f" more than {PASSES_MAX} passes: lower its weight, limit it with max_passes, or"
                " choose a shorter length"
            )
        if abs(one.share - one.asked_share) > _OFF_MAX:
            said.append(
                f"source {one.name!r} has {one.share:.1%} of the samples, and not"
                f" {one.asked_share:.1%}: "
                + (
                    f"it is exhausted at step {one.exhausted_step}, and the epoch goes on"
                    if one.exhausted_step is not None and one.share < one.asked_share
                    else "other sources are exhausted before the epoch ends"
                )
            )
    return said
