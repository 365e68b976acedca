"""The life of a slab in the making: from a plan to a filled slot, and to nothing again.

    WAITING ──blocks and a slot──> ASSEMBLING ──> READY ──released──> GONE
       │  └──a shared slab and a slot──┘  └─ outgrown: WAITING again, for the zone
       └────────── FAILED <────────────┘

Invariants:
1. A work that is assembled pins all of its blocks, or the shared slab that is copied into its slot;
   it needs no more memory, so it ends.
2. A slot is free again when its stream no longer waits for its slab, or its trainer released it.
3. A work that is cut is followed at once, in its stream, by the work with its other batches.
4. `missing` is exactly the blocks of a waiting work that are not ready; one that nobody is loading
   is `idle` too.
5. The first work of a stream that asks gets a slot as soon as one is free, or holds a slab that
   nobody has asked for: what was made too early never stands in the way of what is needed now.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from dataplane.arena.memfd import Arena
from dataplane.errors import BudgetTooSmall, DataplaneError
from dataplane.model import Region
from dataplane.node import budgets
from dataplane.node.account import Stamps
from dataplane.node.blocks import BLOCK_ARENA_ID, BlockTable
from dataplane.node.dataset import Dataset
from dataplane.node.death import Place
from dataplane.node.pool import WorkerPool
from dataplane.node.pool_worker import Job
from dataplane.node.shared import SharedSlabs
from dataplane.node.walk import Plan, row_index_bytes
from dataplane.node.work import NONE, Delivery, Phase, SharedSlab, StreamState, Work
from dataplane.rpc import tasks

COPY_URGENCY = -1
ASSEMBLE_URGENCY = 0
_MEMORY_SHARE = 0.9


class Works:
    """Every work of the node. `changed` is called when the engine should look again."""

    def __init__(
        self,
        arena: Arena,
        blocks: BlockTable,
        pool: WorkerPool,
        changed: Callable[[], None],
        shared: SharedSlabs,
    ) -> None:
        self._arena = arena
        self._blocks = blocks
        self._pool = pool
        self._changed = changed
        self._shared = shared
        self._waiting: defaultdict[int, set[Work]] = defaultdict(set)
        self._numbers = itertools.count(1)
        self.assembling_count = 0

    # -- blocks come and go ----------------------------------------------------------------------

    def block_ready(self, dataset: Dataset, index: int) -> None:
        """Rows can be gathered from this block now."""
        for work in self._waiting.get(dataset.dataset_id, ()):
            if index in work.missing:
                work.missing.discard(index)
                work.idle.discard(index)
                self._stamp(work)

    def block_gone(self, dataset: Dataset, index: int) -> None:
        """It must be loaded again, or go on to be loaded."""
        for work in self._waiting.get(dataset.dataset_id, ()):
            if work.needs(index):
                work.missing.add(index)
                work.idle.add(index)

    def block_failed(self, dataset: Dataset, index: int, error: DataplaneError) -> None:
        """It cannot be loaded: whoever waits for it fails."""
        for work in list(self._waiting.get(dataset.dataset_id, ())):
            if work.needs(index):
                self.fail(work, error)

    def _watch(self, work: Work) -> None:
        dataset, blocks = work.dataset, work.plan.blocks
        self._waiting[dataset.dataset_id].add(work)
        work.blocks = None
        work.missing = set(blocks[dataset.marks.keys[blocks] == 0].tolist())
        work.idle = set(work.missing)
        self._stamp(work)

    def _stamp(self, work: Work) -> None:
        if not work.missing:
            work.stamps.gathered_from = time.monotonic()
            fetched = work.dataset.marks.fetched[work.plan.blocks]
            work.stamps.fetched = float(fetched.max(initial=0.0))

    def _unwatch(self, work: Work) -> None:
        waiting = self._waiting.get(work.dataset.dataset_id)
        if waiting is not None:
            waiting.discard(work)
            if not waiting:
                del self._waiting[work.dataset.dataset_id]
        work.missing.clear()
        work.idle.clear()

    def pin(self, work: Work) -> None:
        """Keep those blocks of a work that are ready."""
        dataset, blocks, before = work.dataset, work.plan.blocks, work.pinned
        work.pinned = blocks[dataset.marks.keys[blocks] != 0]
        self._blocks.pin(dataset, work.pinned)
        if len(before):
            self._blocks.unpin(dataset, before)

    def unpin(self, work: Work) -> None:
        """Let them go."""
        before, work.pinned = work.pinned, NONE
        if len(before):
            self._blocks.unpin(work.dataset, before)

    # -- beginning and end -----------------------------------------------------------------------

    def add(self, stream: StreamState, plan: Plan) -> None:
        """A stream will want this slab, after those that it wants already."""
        work = self._new(stream, plan)
        stream.works.append(work)
        self._fit(work)

    def fail(self, work: Work, error: DataplaneError) -> None:
        """Whoever asks for this slab gets the error."""
        self.unpin(work)
        self._unwatch(work)
        work.error, work.phase = error, Phase.FAILED
        self._changed()

    def drop(self, work: Work) -> None:
        """Give up a work that its consumer no longer waits for, or no longer holds."""
        was, work.phase = work.phase, Phase.GONE
        if was is Phase.ASSEMBLING:
            return  # its slot and pins are free when the worker has answered
        self.unpin(work)
        self._unwatch(work)
        self._free_slot(work)

    def close_delivery(self, delivery: Delivery) -> None:
        """Nobody here uses this arena any more; it goes when no worker writes into it."""
        for loan in delivery.lent.values():
            self.drop(loan.work)
        delivery.lent.clear()
        if delivery.group is not None and not delivery.closing:
            self._shared.leave(delivery.group)
        delivery.closing = True
        self._close_if_idle(delivery)

    def _close_if_idle(self, delivery: Delivery) -> None:
        if delivery.closing and not delivery.assembling_count:
            self._pool.detach_arena(delivery.arena_id)
            delivery.arena.close()

    def _new(self, stream: StreamState, plan: Plan) -> Work:
        work = Work(stream, plan, next(self._numbers), Stamps(time.monotonic()))
        self._watch(work)
        return work

    def _free_slot(self, work: Work) -> None:
        if work.slot is not None:
            work.delivery.slots.give_back(work.slot)
            work.slot = None

    # -- cutting ---------------------------------------------------------------------------------

    def halve(self, work: Work) -> bool:
        """Make the second half of a waiting work another work; False if it is one batch."""
        count = len(work.plan.batches)
        if count > 1:
            self._cut(work, count // 2)
        return count > 1

    def _fit(self, work: Work) -> None:
        """Split a work whose blocks the arena could not hold together."""
        if work.phase is not Phase.WAITING:
            return
        need = work.memory_needed
        if need <= self._blocks.arena_bytes * _MEMORY_SHARE:
            return
        if len(work.plan.batches) > 1:
            rest = self._cut(work, len(work.plan.batches) // 2)
            self._fit(work)
            self._fit(rest)
        elif need > self._blocks.arena_bytes:
            self.fail_for_memory(work)

    def _cut(self, work: Work, batch_count: int) -> Work:
        """Leave the first batches to `work`; the rest becomes the work after it."""
        first, rest = work.plan.split(batch_count)
        if work.phase is Phase.WAITING:
            self.unpin(work)
            self._unwatch(work)
            work.plan = first
            self._watch(work)
        else:
            work.plan = first
        after = self._new(work.stream, rest)
        work.stream.works.insert(work.stream.works.index(work) + 1, after)
        return after

    def fail_for_memory(self, work: Work) -> None:
        """The block arena cannot hold what one work needs."""
        need, budget = work.memory_needed, self._blocks.arena_bytes
        self.fail(work, budgets.batch_of_too_many_blocks(len(work.plan.blocks), need, budget))

    def _fail_for_size(self, work: Work, need: int, budget: int) -> None:
        step = work.plan.batches[0].step
        self.fail(work, budgets.batch_too_large(step, need, budget))

    # -- assembling ------------------------------------------------------------------------------

    def assemble(self, work: Work, shared: SharedSlab | None) -> bool:
        """Have a work's slab copied, or made of its ready blocks: False if no slot is free."""
        slot = self._slot_for(work)
        if slot is None:
            return False
        delivery, index_bytes = work.delivery, row_index_bytes(len(work.plan.row_index))
        try:
            delivery.arena.reserve(slot.offset + slot.length)
        except BudgetTooSmall as error:
            delivery.slots.give_back(slot)
            self.fail(work, error)
            return True
        if index_bytes >= slot.length:
            delivery.slots.give_back(slot)
            self._fail_for_size(work, index_bytes, slot.length)
            return True
        slab = Region(slot.offset, slot.length - index_bytes)
        work.slot, work.phase = slot, Phase.ASSEMBLING
        work.stamps.slotted = time.monotonic()
        body = self._gather(work, slab) if shared is None else self._copy(work, slab, shared)
        self._unwatch(work)
        self.assembling_count += 1
        delivery.assembling_count += 1
        job = Job(
            body=body,
            dataset=work.dataset.message,
            arenas=((BLOCK_ARENA_ID, self._arena.fd), (delivery.arena_id, delivery.arena.fd)),
            source=self._blocks.source,
            report=lambda result: self._on_assembled(work, job, result),
            place=lambda: _first_place(work),
            place_of=self._blocks.place,
        )
        self._pool.submit(job, ASSEMBLE_URGENCY if shared is None else COPY_URGENCY)
        return True

    def _gather(self, work: Work, slab: Region) -> tasks.Assemble:
        delivery, rows = work.delivery, len(work.plan.row_index)
        row_index = Region(slab.offset + slab.length, rows * 8)
        into = np.frombuffer(delivery.arena.view(row_index.offset, row_index.length), np.int32)
        into[:] = work.plan.row_index.reshape(-1)
        self.pin(work)
        work.shared = self._shared.begin(work, slab.length)
        return tasks.Assemble(
            work.dataset.dataset_id,
            tuple(work.dataset.marks.keys[work.plan.blocks].tolist()),
            row_index,
            work.plan.batches,
            delivery.arena_id,
            slab,
            work.stream.walk.render,
            keep=None if work.shared is None else work.shared.region,
        )

    def _copy(self, work: Work, slab: Region, shared: SharedSlab) -> tasks.CopySlab:
        assert shared.made is not None
        self.unpin(work)
        self._shared.begin_copy(shared)
        work.stamps.slotted_for_copy(shared.made_at, work.stamps.slotted)
        work.shared = shared
        return tasks.CopySlab(
            shared.region, work.delivery.arena_id, Region(slab.offset, shared.region.length)
        )

    def may_have_slot(self, work: Work) -> bool:
        """Whether the work could be assembled now, if it had its blocks."""
        slots = work.delivery.slots
        is_free = slots.zone_is_free if work.oversize else slots.free_count > 0
        if not is_free and (not _is_awaited(work) or self._spare(work) is None):
            return False
        stream = work.stream
        made_count = stream.made_count
        if stream.is_ahead and stream.after is not None:
            made_count += stream.after.made_count
        elif stream.works[0] is work:
            return True
        sharing = sum(not each.is_ahead for each in work.delivery.streams)
        return made_count < max(1, slots.layout.ahead_slots // max(sharing, 1))

    def _slot_for(self, work: Work) -> Region | None:
        if not self.may_have_slot(work):
            return None
        slots = work.delivery.slots
        take = slots.take_zone if work.oversize else slots.take
        slot = take()
        if slot is None:
            self._make_again_later(self._spare(work))
            slot = take()
        return slot

    def _spare(self, work: Work) -> Work | None:
        """A finished slab that nobody holds or waits for, in a slot that this work could use."""
        for stream in work.delivery.streams:
            for other in reversed(stream.works):
                if (
                    other.phase is Phase.READY
                    and other.oversize == work.oversize
                    and not _is_awaited(other)
                ):
                    return other
        return None

    def _make_again_later(self, work: Work | None) -> None:
        if work is not None:
            self._free_slot(work)
            work.assembled, work.phase = None, Phase.WAITING
            self._watch(work)

    def _on_assembled(self, work: Work, job: Job, result: tasks.ResultBody) -> None:
        work.stamps.started, work.stamps.made = job.started, time.monotonic()
        self.assembling_count -= 1
        work.delivery.assembling_count -= 1
        self.unpin(work)
        shared, work.shared = work.shared, None
        if shared is not None:
            result = self._shared.ended(shared, result)
        if work.phase is Phase.GONE:
            self._free_slot(work)
        elif isinstance(result, DataplaneError):
            self._free_slot(work)
            self.fail(work, result)
        else:
            assert isinstance(result, tasks.Assembled)
            work.dataset.account.disk_us += result.disk
            self._keep(work, result)
        self._close_if_idle(work.delivery)
        self._changed()

    def _keep(self, work: Work, result: tasks.Assembled) -> None:
        if not result.batch_count:
            self._outgrown(work, result.bytes_needed)
            return
        is_cut = result.batch_count < len(work.plan.batches)
        assert work.slot is not None
        room = work.slot.length - row_index_bytes(len(work.plan.row_index))
        work.stream.walk.fitted(result.batch_count, result.bytes_used, room, cut=is_cut)
        if is_cut:
            self._cut(work, result.batch_count)
        work.assembled, work.phase = result, Phase.READY

    def _outgrown(self, work: Work, bytes_needed: int) -> None:
        """Not even one batch fits into a slot: it goes through the zone, alone."""
        self._free_slot(work)
        zone = work.delivery.slots.layout.zone_bytes
        need = bytes_needed + row_index_bytes(work.plan.batches[0].rows)
        if need > zone:
            self._fail_for_size(work, need, zone)
            return
        if len(work.plan.batches) > 1:
            self._cut(work, 1)
        work.oversize, work.phase = True, Phase.WAITING
        self._watch(work)


def _first_place(work: Work) -> Place:
    blocks = work.plan.blocks
    return work.dataset.place(int(blocks[0])) if len(blocks) else Place("a batch without rows")


def _is_awaited(work: Work) -> bool:
    """Whether it is the very next slab of a consumer that has asked."""
    return bool(work.stream.requests) and work.stream.works[0] is work
