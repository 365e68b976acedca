"""The order of one epoch of a job, for code that delivers, explains or traces it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from dataplane.model.config import JobSpec
from dataplane.model.errors import ConfigError
from dataplane.model.records import MixHistory, ShareChange, TakenMidway, Tombstone, View
from dataplane.plan.manifest import Manifest
from dataplane.plan.mixed_order import NEVER, MixedOrder, SourceOrder
from dataplane.plan.mixture import EpochPlan, Mixed, plan_of
from dataplane.plan.order import (
    MidwayOrder,
    Order,
    PassRead,
    SampleOrder,
    TombstonedOrder,
    TracedOrder,
)
from dataplane.plan.permute import Words
from dataplane.plan.shards import starts_of
from dataplane.plan.texts import Bools, Int64
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
    if not is_reduced(spec, manifests, epoch):
        return _order(spec, manifests, epoch)
    return ReducedOrder(_order(*_first_epoch(spec, manifests, epoch)), manifests)


def is_reduced(spec: JobSpec, manifests: Sequence[Manifest], epoch: int) -> bool:
    """Return whether this is the first epoch of a stage, and reads only what earlier stages have
    left of a dataset.
    """
    return epoch == spec.first_epoch and any(manifest.left is not None for manifest in manifests)


def _first_epoch(
    spec: JobSpec, manifests: Sequence[Manifest], epoch: int
) -> tuple[JobSpec, list[Manifest], int]:
    """Return the spec, the manifests and the epoch that give the ordinary order over what is left.
    For a mixture, this is epoch 0, which begins with the first pass over each source, so that one
    pass has all that is left of the source; a source with nothing left gets share 0.
    """
    parts = [
        manifest if manifest.left is None else manifest.left.manifest for manifest in manifests
    ]
    if spec.mixture is None:
        return spec, parts, epoch
    history = spec.mixture.history
    has_some = [manifest.left is None or not manifest.left.is_nothing for manifest in manifests]
    past = sum(change.epoch < epoch for change in history.changes)
    changes = [
        replace(
            change,
            epoch=max(change.epoch - epoch, 0),
            position=change.position if change.epoch >= epoch else 0,
            shares=tuple(map(operator.mul, change.shares, has_some)),
        )
        for change in history.changes[max(past - 1, 0) :]
    ]
    mixture = spec.mixture.with_history(replace(history, changes=tuple(changes)))
    reduced = replace(spec, mixture=mixture)
    return _as_long_as_possible(reduced, parts), parts, 0


def _as_long_as_possible(spec: JobSpec, manifests: Sequence[Manifest]) -> JobSpec:
    """Return the spec without its length if its sources do not have so many samples left for the
    first epoch, which then ends as without a length.
    """
    try:
        _plan_of(spec, manifests, 0)
    except ConfigError as error:
        if error.nouns.get("field") != "length" or spec.mixture is None:
            raise
        return replace(spec, mixture=replace(spec.mixture, length=0))
    return spec


def _order(spec: JobSpec, manifests: Sequence[Manifest], epoch: int) -> TracedOrder:
    if spec.mixture is None:
        return order_of(spec, manifests[0], epoch)
    plan = _plan_of(spec, manifests, epoch)
    sources = [
        SourceOrder(manifest.block_rows, source.window, source.ramp, _is_balanced(source.view))
        for manifest, source in zip(manifests, spec.mixture.sources, strict=True)
    ]
    return MixedOrder(plan, sources, spec.seed, spec.shuffle, spec.lanes)


class ReducedOrder:
    """The order of an epoch that reads only what earlier stages have left. `order` is an ordinary
    order over the blocks that are left; this class translates its blocks and rows to those of the
    whole datasets.
    """

    def __init__(self, order: TracedOrder, manifests: Sequence[Manifest]) -> None:
        self.order = order
        first = starts_of([manifest.block_count for manifest in manifests]).tolist()
        kept, starts, samples, offset = [], [], [], 0
        for begin, manifest in zip(first, manifests, strict=False):
            left = manifest.left
            if left is None:
                kept.append(begin + np.arange(manifest.block_count))
                starts.append(np.full(manifest.block_count, -1))
                continue
            kept.append(begin + left.kept)
            starts.append(np.where(left.starts < 0, -1, left.starts + offset))
            samples.append(left.samples)
            offset += len(left.samples)
        self._first, self._lefts = first, [manifest.left for manifest in manifests]
        self._kept, self._starts = np.concatenate(kept), np.concatenate(starts)
        self._samples = np.concatenate(samples)

    @property
    def sample_count(self) -> int:
        """The number of positions."""
        return self.order.sample_count

    def locate(self, positions: Int64) -> tuple[Int64, Int64]:
        """Implement `SampleOrder.locate`."""
        blocks, rows = self.order.locate(positions)
        starts = self._starts[blocks]
        partial = np.flatnonzero(starts >= 0)
        if len(partial):
            rows = rows.copy()
            rows[partial] = self._samples[starts[partial] + rows[partial]]
        return self._kept[blocks], rows

    def block_span(self, blocks: Int64) -> tuple[Int64, Int64]:
        """Implement `SampleOrder.block_span`: NEVER for blocks of which nothing is left."""
        numbers, is_left = self._numbers(blocks)
        first, last = np.full(len(numbers), NEVER), np.full(len(numbers), NEVER)
        if is_left.any():
            first[is_left], last[is_left] = self.order.block_span(numbers[is_left])
        return first, last

    def positions_of(self, block: int, row: int) -> Int64:
        """Implement `TracedOrder.positions_of`."""
        (number,), (is_left,) = self._numbers(np.array([block]))
        if is_left and self._starts[number] >= 0:
            source = int(np.searchsorted(self._first, block, side="right")) - 1
            left = self._lefts[source]
            assert left is not None
            samples = left.of(int(left.kept.searchsorted(block - self._first[source])))
            assert samples is not None
            at = int(samples.searchsorted(row))
            is_left, row = at < len(samples) and samples[at] == row, at
        if not is_left:
            return np.empty(0, np.int64)
        return self.order.positions_of(int(number), row)

    def pack_keys(self, positions: Int64, blocks: Int64) -> Words:
        """Implement `TracedOrder.pack_keys`."""
        return self.order.pack_keys(positions, self._numbers(blocks)[0])

    def keys_of_packs(self, block: int) -> list[int]:
        """Implement `TracedOrder.keys_of_packs`."""
        (number,), (is_left,) = self._numbers(np.array([block]))
        return self.order.keys_of_packs(int(number)) if is_left else []

    def read_before(self, cursor: int) -> list[list[PassRead]]:
        """Implement `TracedOrder.read_before`, with numbers of the blocks that are left."""
        return self.order.read_before(cursor)

    def _numbers(self, blocks: Int64) -> tuple[Int64, Bools]:
        """Return the number of each block among the blocks that are left, and whether the block is
        one of them.
        """
        numbers = np.minimum(self._kept.searchsorted(blocks), len(self._kept) - 1)
        return numbers, self._kept[numbers] == blocks


def _is_balanced(view: View) -> bool:
    return view.pack is not None and view.pack.balanced


def sample_count_of(spec: JobSpec, manifests: Sequence[Manifest], epoch: int) -> int:
    """Return how many samples an epoch of the job has.

    Raises:  ConfigError: as `plan_of`.
    """
    if is_reduced(spec, manifests, epoch):
        spec, manifests, epoch = _first_epoch(spec, manifests, epoch)
    if spec.mixture is None:
        return manifests[0].sample_count
    return _plan_of(spec, manifests, epoch).sample_count


def with_mix(spec: JobSpec, mix: MixHistory | None) -> JobSpec:
    """Return the spec with these weights; None keeps the spec's own weights."""
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
    spec: JobSpec,
    manifests: Sequence[Manifest],
    epoch: int,
    tombstones: Sequence[Tombstone],
    midway: Sequence[TakenMidway] = (),
) -> SampleOrder:
    """Return the order of an epoch of a job from which rows were removed, some of them `midway`.

    Raises:  ConfigError: as `job_order`; these rows cannot be removed.
    """
    order, gone = job_order(spec, manifests, epoch), set(tombstones)
    parts: list[tuple[int, SampleOrder]] = []
    for position in sorted({0, *(taken.position for taken in midway if taken.epoch == epoch)}):
        here = (epoch, position)
        gone.update(*(taken.rows for taken in midway if (taken.epoch, taken.position) <= here))
        of_part: SampleOrder = order
        if gone:
            of_part = TombstonedOrder(order, Substitutes(spec, manifests, sorted(gone)))
        parts.append((position, of_part))
    return parts[0][1] if len(parts) == 1 else MidwayOrder(parts)


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
