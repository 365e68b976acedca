"""Cuts one stream's slice into the plans that become slabs. Pure.

Invariants:
1. The plans of a walk, one after the other, cover the steps of its slice exactly once.
2. The length of a plan is estimated from the slabs made so far. A wrong estimate costs time but
   changes no batch.
3. The first plan is one batch, and later plans grow, so that the first batch is early. A walk that
   is planned ahead of its consumer does not need this, unless it is aligned.
4. The plans of an aligned walk end at the same steps of the epoch for every consumer, whatever was
   made so far, so that consumers a few batches apart need the same slabs.
5. A walk of a given number of steps begins with one plan of all of them, and ends with the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from dataplane.model.changes import NO_GAPS, EpochSteps, Gaps, TakenDocument
from dataplane.model.config import JobSpec
from dataplane.model.errors import ConfigError
from dataplane.model.records import Stream
from dataplane.plan.order import MidwayOrder, SampleOrder, TombstonedOrder
from dataplane.plan.packs import DrawsPacks, drawn_rows
from dataplane.plan.slices import Slice
from dataplane.plan.windows import distinct
from dataplane.rpc.messages import Batch
from dataplane.rpc.tasks import Collation, Render
from dataplane.transforms.image_steps import steps_of

Ints = npt.NDArray[np.int64]
_NO_BLOCKS, _NO_ROWS = np.empty(0, np.int64), np.empty((0, 2), np.int32)
_PIECE_S, _PIECE_COLUMN_S = 0.005, 0.0001
"""The least worker time for which a piece of a slab is worth a further worker, and what each column
adds to it. A further worker costs a message, and must map the blocks; a column takes some time
however few rows a piece has.
"""
_BUSY_PIECE_S = 0.02
"""The same if every worker has a piece already. Between two pieces a worker waits a millisecond for
the node: with pieces of 2 ms, 16 workers were idle for a sixth of the time.
"""
_WHOLE_S = 0.02
"""The most worker time for the batches of a slab that one worker makes alone, unless the slab is
one batch."""


class SlabSizes(Struct):
    """The estimated number of batches in a slab, the maximum for very small batches, and the slot
    size for their bytes and row index. `batch_bytes` is the approximate size of a batch, 0 if
    unknown. `is_divisible`: several workers may make a slab together, each some of its rows.
    `row_s` is a worker's time for a row, as far as known. `column_count` is the approximate number
    of columns.
    """

    batches: int
    batches_max: int
    slot_bytes: int
    batch_bytes: int = 0
    is_divisible: bool = False
    row_s: float = 0.0
    column_count: int = 0
    _batch_bytes: float = 0.0
    _spread_bytes: float = 0.0
    _batch_s: float = 0.0

    def fitted(self, batch_count: int, bytes_used: int, slab_bytes: int, *, cut: bool) -> None:
        """Adapt the length of later plans to a slab in which this many batches filled this many
        bytes. A slab that is `cut` had more batches, and costs one more message.
        """
        if not cut and 2 * batch_count < self.batches:
            return  # the first slabs of a walk are short on purpose
        found = bytes_used / batch_count
        if self._batch_bytes:
            away = found - self._batch_bytes
            self._batch_bytes += away / 4
            self._spread_bytes += (abs(away) - self._spread_bytes) / 4
        else:
            self._batch_bytes = found
        fitting = int(slab_bytes / max(self._batch_bytes + 2 * self._spread_bytes, 1.0))
        self.batches = max(1, min(fitting, self.batches_max, self._whole_max))

    def took(self, batches: Sequence[Batch], worker_s: float) -> None:
        """Adapt the number of pieces of later slabs to the time that workers took for these
        batches.
        """
        rows = sum(batch.rows for batch in batches)
        if not rows:
            return
        self.row_s += (worker_s / rows - self.row_s) / (4 if self._batch_s else 1)
        batch_s = worker_s / len(batches)
        self._batch_s += (batch_s - self._batch_s) / (4 if self._batch_s else 1)

    def shorten(self) -> None:
        """Shorten later slabs that one worker makes alone as far as possible."""
        self.batches = min(self.batches, self._whole_max)

    def pieces(self, rows: int, worker_count: int, *, are_busy: bool = False) -> int:
        """Return the number of pieces in which this many workers should make a slab with these
        rows. `are_busy`: each worker has a piece of another slab, so larger pieces cost no time.
        """
        if not self.is_divisible:
            return 1
        least_s = _BUSY_PIECE_S if are_busy else _PIECE_S
        piece_s = least_s + self.column_count * _PIECE_COLUMN_S
        return max(min(int(rows * self.row_s / piece_s), rows, worker_count), 1)

    @property
    def is_timed(self) -> bool:
        """Whether a worker's time for a batch is known. A `collate` may take seconds, so slabs
        stay one batch long until then: a long one would keep its worker from other jobs.
        """
        return self._batch_s > 0

    @property
    def _whole_max(self) -> int:
        """Return the most batches of a slab that cannot be divided: if slabs are short, other
        workers can make the next ones meanwhile.
        """
        if self.is_divisible or not self._batch_s:
            return self.batches_max
        return max(int(_WHOLE_S / self._batch_s), 1)


class BlockPacks(NamedTuple):
    """The packs that a plan takes from one block: the keys with which they are drawn, if they are
    shuffled, and the documents that were removed from the block.
    """

    keys: tuple[int, ...] = ()
    taken_out: tuple[TakenDocument, ...] = ()


NO_PACKS = BlockPacks()


class Plan(Struct, frozen=True):
    """The plan of one slab: the rows of each block, batch after batch. A plan of a light walk has
    neither blocks nor rows. If rows are packs, `packs` has the packs of each block, and
    plan/packs.py explains how rows name packs; otherwise `packs` is empty.

    Shapes:  blocks: rising.   row_index: int32[rows, 2]: (index into `blocks`, row of the block).
    """

    batches: tuple[Batch, ...]
    blocks: npt.NDArray[np.int64]
    row_index: npt.NDArray[np.int32]
    first_position: int
    packs: tuple[BlockPacks, ...] = ()

    @property
    def row_count(self) -> int:
        """How many rows the slab has."""
        return sum(batch.rows for batch in self.batches)

    def rows_of(self, block: int) -> npt.NDArray[np.int32]:
        """Return the rows that the slab needs of one of its blocks.

        Shapes:  result: int32[n], rising.
        """
        at = int(self.blocks.searchsorted(block))
        rows = self.row_index[self.row_index[:, 0] == at, 1]
        return distinct(rows.astype(np.int64))[0].astype(np.int32)

    def packs_of(self, block: int) -> BlockPacks:
        """Return the packs of one of the slab's blocks."""
        return self.packs[int(self.blocks.searchsorted(block))] if self.packs else NO_PACKS

    @property
    def packs_told(self) -> dict[str, Any]:
        """Return the packs as fields of an Assemble task."""
        keys, taken_out = ([each[at] for each in self.packs] for at in range(2))
        return {**_flat("pack_keys", "pack_key_counts", keys),
                **_flat("taken_out", "taken_out_counts", taken_out)}  # fmt: skip

    def rows_by_block(self) -> npt.NDArray[np.int64]:
        """Return the number of rows that the slab needs of each of its blocks, repeated rows
        included.

        Shapes:  result: int64[blocks].
        """
        return np.bincount(self.row_index[:, 0], minlength=len(self.blocks))

    def split(self, batch_count: int) -> tuple[Plan, Plan]:
        """Split off the first batches."""
        rows = sum(batch.rows for batch in self.batches[:batch_count])
        return (
            self._part(self.batches[:batch_count], self.row_index[:rows]),
            self._part(self.batches[batch_count:], self.row_index[rows:]),
        )

    def _part(self, batches: tuple[Batch, ...], rows: npt.NDArray[np.int32]) -> Plan:
        used, index = distinct(rows[:, 0].astype(np.int64))
        own = rows.copy()
        own[:, 0] = index
        packs = tuple(self.packs[at] for at in used) if self.packs else ()
        return Plan(batches, self.blocks[used], own, self.first_position, packs)


class Walk:
    """The plans of one stream, one after the other. A light walk says only which steps a slab has,
    and not which rows, since another node makes it. A walk has `count` steps, or all that are left.

    Raises:  ConfigError: the slice does not have `count` steps.
    """

    def __init__(
        self,
        spec: JobSpec,
        order: SampleOrder,
        stream: Stream,
        sizes: SlabSizes,
        *,
        is_ahead: bool = False,
        is_aligned: bool = False,
        is_light: bool = False,
        count: int | None = None,
        gaps: Gaps = NO_GAPS,
    ) -> None:
        self.is_light = is_light
        self.order = order
        self.stream = stream
        images = spec.transforms
        self.render = Render(images, spec.seed, stream.epoch) if images else None
        self.collate = _collate(spec, stream) if spec.view.collate else None
        self._draws_packs = spec.view.pack is not None and spec.shuffle
        replaces = self.render is not None and self.render.replaces
        replaces |= self.collate is not None and spec.bad_max > 0
        self._tells_rows = spec.view.pack is not None or replaces
        self.crops = any(steps_of(image).is_cut for image in images)
        self.gaps = gaps
        self.steps = EpochSteps.of(
            spec, order.sample_count, stream.epoch, cursor=stream.cursor, dp_size=stream.dp_size,
            gaps=gaps, mix=stream.mix,
        )  # fmt: skip
        self._slice = Slice(self.steps, stream.dp_rank)
        self.sizes = sizes
        self._next_step = stream.first_step
        self.is_aligned = is_aligned
        self._batch_count = sizes.batches if is_ahead and not is_aligned else 1
        self._end_step = self.step_count
        if count is not None:
            self._slice.check_steps(stream.first_step, count, stream.step_stride)
            self._batch_count = count
            self._end_step = stream.first_step + count * stream.step_stride
        self.global_batch = spec.global_batch

    @property
    def is_planned(self) -> bool:
        """Whether all plans were made."""
        return self._next_step >= self._end_step

    @property
    def step_count(self) -> int:
        """Number of steps of the whole slice."""
        return self.steps.count

    @property
    def position(self) -> int:
        """Where the next plan starts in the epoch."""
        return self.steps.begin(self._next_step)

    def position_of(self, plan: Plan) -> int:
        """Return where a plan of this walk starts in the epoch."""
        return self.steps.begin(plan.batches[0].step)

    def took(self, batches: Sequence[Batch], worker_s: float) -> None:
        """Note the time of the node's own workers for these batches; see SlabSizes.took."""
        self.sizes.took(batches, worker_s)
        if not self.is_aligned:
            self.sizes.shorten()

    def fitted(self, batch_count: int, bytes_used: int, slab_bytes: int, *, cut: bool) -> None:
        """Adapt the slab size; see SlabSizes.fitted. A walk that is aligned keeps its first slab
        size.
        """
        if not self.is_aligned:
            self.sizes.fitted(batch_count, bytes_used, slab_bytes, cut=cut)

    def next_plans(self, count: int) -> list[Plan]:
        """Return up to `count` plans; fewer at the end of the epoch."""
        plans: list[Plan] = []
        while len(plans) < count and not self.is_planned:
            plans.append(self._next_plan())
        return plans

    def _next_plan(self) -> Plan:
        stride = self.stream.step_stride
        left = -(-(self._end_step - self._next_step) // stride)
        count = min(self._batch_count, left)
        if self.is_aligned:
            ordinal = self.gaps.live(self.position) // (self.global_batch * stride)
            count = min(count, self.sizes.batches - ordinal % self.sizes.batches)
        count = self._unchanged(count)
        if self.collate is None or self.is_aligned or self.is_light or self.sizes.is_timed:
            self._batch_count = min(self._batch_count * 2, self.sizes.batches)
        return self._plan(count)

    def _order_at(self, step: int) -> SampleOrder:
        order = self.order
        return order.at(self.steps.begin(step)) if isinstance(order, MidwayOrder) else order

    def _unchanged(self, count: int) -> int:
        """Return how many of this many steps from the next one on have one order."""
        if not isinstance(self.order, MidwayOrder):
            return count
        first, stride = self._next_step, self.stream.step_stride
        own = self._order_at(first)
        return next(
            (at for at in range(count) if self._order_at(first + at * stride) is not own), count
        )

    def _plan(self, count: int) -> Plan:
        first, stride = self._next_step, self.stream.step_stride
        steps = self._slice.positions_of_steps(first, count, stride)
        try:
            used, row_index, packs = self._rows_at(steps.positions, self._order_at(first))
        except ConfigError:
            # Plan fewer batches: here, one source is drawn more often than a row index can express.
            if count == 1:
                raise
            return self._plan(count // 2)
        numbers = range(first, first + count * stride, stride)
        plan = Plan(
            batches=tuple(map(Batch, numbers, steps.rows.tolist(), steps.valid.tolist())),
            blocks=used,
            row_index=row_index,
            first_position=self.position,
            packs=packs,
        )
        self._next_step += count * stride
        return plan

    def _rows_at(
        self, positions: Ints, order: SampleOrder
    ) -> tuple[Ints, npt.NDArray[np.int32], tuple[BlockPacks, ...]]:
        """Return the blocks, the row index and the packs of a plan of these positions."""
        if self.is_light:
            return _NO_BLOCKS, _NO_ROWS, ()
        blocks, rows = order.locate(positions)
        used, index = distinct(blocks)
        packs: tuple[BlockPacks, ...] = ()
        if self._draws_packs:
            drawn = drawn_rows(cast(DrawsPacks, order), positions, blocks, rows, index)
            rows, packs = drawn.rows, tuple(map(BlockPacks, drawn.keys))
        if self._tells_rows and isinstance(order, TombstonedOrder):
            packs = self._without(order.taken_out(used), packs)
        row_index = np.empty((len(blocks), 2), np.int32)
        row_index[:, 0], row_index[:, 1] = index, rows
        return used, row_index, packs

    def _without(
        self, taken_out: Sequence[tuple[TakenDocument, ...]], packs: tuple[BlockPacks, ...]
    ) -> tuple[BlockPacks, ...]:
        """Return these packs without the documents that were removed from each block."""
        if not any(taken_out):
            return packs
        packs = packs or (NO_PACKS,) * len(taken_out)
        return tuple(BlockPacks(one.keys, gone) for one, gone in zip(packs, taken_out, strict=True))


def _flat(name: str, counts: str, of_blocks: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """Flatten some values of each block into one field, and their number per block into another;
    return no fields if no block has any.
    """
    if not any(of_blocks):
        return {}
    return {name: tuple(chain.from_iterable(of_blocks)), counts: tuple(map(len, of_blocks))}


def _collate(spec: JobSpec, stream: Stream) -> Collation:
    return Collation(
        spec.view.collate,
        spec.seed,
        stream.epoch,
        stream.cursor,
        spec.global_batch,
        stream.dp_rank,
        "" if spec.mixture is None else spec.mixture.source_column,
    )
