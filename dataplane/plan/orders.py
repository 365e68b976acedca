"""The order of one epoch of a job, for code that delivers, explains or traces it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from msgspec.structs import replace

from dataplane.model.changes import Tombstone
from dataplane.model.config import JobSpec
from dataplane.model.records import MixHistory, ShareChange, View
from dataplane.plan.manifest import Manifest
from dataplane.plan.mixed_order import MixedOrder, SourceOrder
from dataplane.plan.mixture import EpochPlan, Mixed, plan_of
from dataplane.plan.order import Order, SampleOrder, TombstonedOrder, TracedOrder
from dataplane.plan.tombstones import Substitutes

_PLANS_MAX = 64


def order_of(spec: JobSpec, manifest: Manifest, epoch: int) -> Order:
    """Return the order of an epoch of the job with this spec.

    Raises:  ConfigError: as `Order`.
    """
    return Order(
        manifest.block_rows,
        spec.seed,
        spec.shuffle,
        spec.lanes,
        spec.window,
        epoch,
        spec.ramp,
        balanced=_is_balanced(spec.view),
    )


def job_order(spec: JobSpec, manifests: Sequence[Manifest], epoch: int) -> TracedOrder:
    """Return the order of an epoch of a job over one dataset, or over a mixture of several. Blocks
    of a mixture are numbered dataset after dataset.

    Raises:  ConfigError: as `Order`, and as `plan_of`.
    """
    if spec.mixture is None:
        return order_of(spec, manifests[0], epoch)
    plan = _plan_of(spec, manifests, epoch)
    sources = [
        SourceOrder(manifest.block_rows, source.window, source.ramp, _is_balanced(source.view))
        for manifest, source in zip(manifests, spec.mixture.sources, strict=True)
    ]
    return MixedOrder(plan, sources, spec.seed, spec.shuffle, spec.lanes)


def _is_balanced(view: View) -> bool:
    return view.pack is not None and view.pack.balanced


def sample_count_of(spec: JobSpec, manifests: Sequence[Manifest], epoch: int) -> int:
    """Return how many samples an epoch of the job has.

    Raises:  ConfigError: as `plan_of`.
    """
    if spec.mixture is None:
        return manifests[0].sample_count
    return _plan_of(spec, manifests, epoch).sample_count


def with_mix(spec: JobSpec, mix: MixHistory | None) -> JobSpec:
    """Return the spec with these weights; None keeps its own."""
    if spec.mixture is None or mix is None:
        return spec
    return replace(spec, mixture=spec.mixture.with_history(mix))


def _plan_of(spec: JobSpec, manifests: Sequence[Manifest], epoch: int) -> EpochPlan:
    assert spec.mixture is not None
    mixed = mixed_of(spec, [manifest.sample_count for manifest in manifests])
    return _planned(mixed, epoch, spec.mixture.changes)


@functools.lru_cache(_PLANS_MAX)
def _planned(mixed: Mixed, epoch: int, changes: tuple[ShareChange, ...]) -> EpochPlan:
    return plan_of(mixed, epoch, changes)


def delivered_order(
    spec: JobSpec, manifests: Sequence[Manifest], epoch: int, tombstones: Sequence[Tombstone]
) -> SampleOrder:
    """Return the order of an epoch of a job from which rows were removed.

    Raises:  ConfigError: as `job_order`; these rows cannot be removed.
    """
    order = job_order(spec, manifests, epoch)
    if not tombstones:
        return order
    return TombstonedOrder(order, Substitutes(spec, manifests, tombstones))


def mixed_of(spec: JobSpec, counts: Sequence[int]) -> Mixed:
    """Return the facts from which epochs of a job over a mixture are planned, given the number of
    samples of each source.
    """
    mixture = spec.mixture
    assert mixture is not None
    return Mixed(
        tuple(counts),
        mixture.shares,
        tuple(source.passes_max for source in mixture.sources),
        spec.lanes if mixture.batch == 1 else 1,
        mixture.exhausted,
        mixture.length,
        mixture.batch,
    )
