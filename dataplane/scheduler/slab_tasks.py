"""The life of a slab task: from a plan to a filled slot, until the slot is released.

    WAITING ──blocks and a slot──> ASSEMBLING ──> READY ──released──> GONE
       │  └──a shared slab and a slot──┘  └─ outgrown: WAITING again, for the zone
       └────────── FAILED <────────────┘

Invariants:
1. During assembly, a task pins those of its blocks of which it has no excerpts, or holds the shared
   slab that is copied into its slot. The task needs no more memory, so it always finishes.
2. A slot is free again when its stream no longer needs the slab, or its trainer has released it.
3. If a task is cut, the task with its other batches comes directly after it in the stream.
4. The first task of a stream with a request gets a slot as soon as one is free or holds a slab that
   was not requested: a slab made too early never blocks one that is needed now.
5. While workers have enough to do, a slab that one of them makes alone gets a slot only if it is
   the first of its stream: the memory of further slots may never have been used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from dataplane.arena.slab_layout import in_slot, row_index_bytes
from dataplane.arena.slots import Slots
from dataplane.model.errors import DataplaneError, NeighbourGone
from dataplane.model.records import Region
from dataplane.rpc import tasks
from dataplane.scheduler import budgets
from dataplane.scheduler.blocks import BlockTable
from dataplane.scheduler.dataset import Ints, Stamps
from dataplane.scheduler.elsewhere import Elsewhere
from dataplane.scheduler.events import (
    AssembleSlab,
    CopyKept,
    DeliveryClosed,
    DeliveryOpened,
    DropDelivery,
    Effect,
    HolderGone,
    MakeElsewhere,
    Note,
    Released,
    SlabAssembled,
)
from dataplane.scheduler.excerpts import Excerpts
from dataplane.scheduler.holdings import WaitingTasks
from dataplane.scheduler.records import (
    NONE,
    BlockChange,
    Delivery,
    Group,
    Moment,
    SharedSlab,
    SlabPhase,
    SlabTask,
    StreamState,
)
from dataplane.scheduler.streams import SharedSlabs
from dataplane.scheduler.walk import Plan

_MEMORY_SHARE = 0.9
_EXCERPTS_SHARE = 0.25
_PIECES_A_WORKER = 2
"""How many pieces of slabs keep a worker busy: one that it makes, and one that waits."""


class SlabTasks:
    """Every slab task of the node. `do` emits an effect."""

    def __init__(
        self,
        blocks: BlockTable,
        shared: SharedSlabs,
        waiting: WaitingTasks,
        excerpts: Excerpts,
        elsewhere: Elsewhere,
        do: Callable[[Effect], None],
        time: Moment,
    ) -> None:
        self._blocks = blocks
        self._shared = shared
        self._elsewhere = elsewhere
        self._do = do
        self._time = time
        self._waiting, self._excerpts = waiting, excerpts
        self._assembling: dict[int, SlabTask] = {}
        self.piece_count = 0
        """The number of pieces of all slabs that the node's own workers assemble now."""
        self._numbers = itertools.count(1)

    @property
    def assembling_count(self) -> int:
        """Slabs that workers are writing; an event will report the end of each."""
        return len(self._assembling)

    # -- blocks come and go ----------------------------------------------------------------------

    def block_changed(self, changed: BlockChange) -> None:
        """Update the tasks that wait for this block."""
        self._waiting.block_changed(changed, self.fail)

    def pin(self, task: SlabTask) -> None:
        """Pin the blocks of a task that are ready and of which it has no excerpt."""
        blocks, before = task.whole_blocks, task.pinned
        task.pinned = blocks[task.datasets.keys(blocks) != 0]
        for dataset, some in task.datasets.parts(task.pinned):
            self._blocks.pin(dataset, some)
        self._unpin(task, before)

    def unpin(self, task: SlabTask) -> None:
        """Unpin the blocks of a task."""
        before, task.pinned = task.pinned, NONE
        self._unpin(task, before)

    def _unpin(self, task: SlabTask, blocks: Ints) -> None:
        for dataset, some in task.datasets.parts(blocks):
            self._blocks.unpin(dataset, some)

    # -- beginning and end -----------------------------------------------------------------------

    def add(self, stream: StreamState, plan: Plan) -> None:
        """Add a slab task at the end of a stream."""
        task = self._new(stream, plan)
        stream.tasks.append(task)
        stream.advanced_at = self._time.now
        self._wait(task)
        if self._elsewhere.has_workers:  # the node's own workers may have to make the slab
            self._fit(task)

    def _wait(self, task: SlabTask) -> None:
        """Let the task wait for its blocks, unless another node makes it."""
        self._elsewhere.choose(task)
        if not self._elsewhere.is_elsewhere(task):
            self._waiting.add(task)

    def fail(self, task: SlabTask, error: DataplaneError) -> None:
        """Answer requests for this slab with the error."""
        self.unpin(task)
        self._elsewhere.leave(task)
        self._waiting.remove(task)
        self._excerpts.release(task)
        task.error, task.phase = error, SlabPhase.FAILED

    def drop(self, task: SlabTask) -> None:
        """Give up a task that its consumer no longer waits for, or no longer holds."""
        was, task.phase = task.phase, SlabPhase.GONE
        if was is SlabPhase.ASSEMBLING:
            return  # `assembled` frees its slot and pins
        self.unpin(task)
        self._elsewhere.leave(task)
        self._waiting.remove(task)
        self._excerpts.release(task)
        self._free_slot(task)

    def close_delivery(self, delivery: Delivery) -> None:
        """Drop the arena of a closed delivery once no worker writes into it."""
        for loan in delivery.lent.values():
            self.drop(loan.task)
        delivery.lent.clear()
        if delivery.group is not None:
            self._leave(delivery.group)
        delivery.closing = True
        self._close_if_idle(delivery)

    def _leave(self, group: Group) -> None:
        """Remove a delivery from its group; drop the group's slabs with the last one."""
        group.users -= 1
        if group.users:
            return
        self._shared.close(group)
        if group.copied_count:
            self._do(Note("shared", {"made": group.made_count, "copied": group.copied_count}))

    def _close_if_idle(self, delivery: Delivery) -> None:
        if delivery.closing and not delivery.assembling_count:
            self._do(DropDelivery(delivery.delivery_id))

    def _new(self, stream: StreamState, plan: Plan) -> SlabTask:
        return SlabTask(stream, plan, next(self._numbers), Stamps(self._time.now))

    def _free_slot(self, task: SlabTask) -> None:
        if task.slot is not None:
            task.delivery.slots.give_back(task.slot)
            task.slot = None

    # -- cutting ---------------------------------------------------------------------------------

    def halve(self, task: SlabTask) -> bool:
        """Turn the second half of a waiting task into another task; return False if it has only one
        batch.
        """
        count = len(task.plan.batches)
        if count > 1:
            self._cut(task, count // 2)
        return count > 1

    def _fit(self, task: SlabTask) -> None:
        """Split a task whose blocks do not fit into the arena together, or, if blocks are read in
        several passes, whose excerpts take too much.
        """
        arena_bytes, is_one = self._blocks.arena_bytes, len(task.plan.batches) == 1
        if task.memory_needed <= arena_bytes * _MEMORY_SHARE:
            return
        if is_one and task.memory_needed <= arena_bytes:
            return
        if is_one or self._blocks.holdings.needs_excerpts:
            need = self._excerpts.need_of(task)
            if is_one and need + task.largest_cost > arena_bytes:
                self.fail_for_memory(task)
                return
            self._blocks.holdings.needs_excerpts = True
            if is_one or need <= arena_bytes * _EXCERPTS_SHARE:
                return
        rest = self._cut(task, len(task.plan.batches) // 2)
        self._fit(task)
        self._fit(rest)

    def _cut(self, task: SlabTask, batch_count: int) -> SlabTask:
        """Leave the first batches to `task`; the rest becomes the task after it."""
        first, rest = task.plan.split(batch_count)
        after, is_waiting = self._new(task.stream, rest), task.phase is SlabPhase.WAITING
        if is_waiting:
            self.unpin(task)
            self._waiting.remove(task)
        task.plan = first
        self._elsewhere.cut(task, after)
        self._excerpts.share(task, after)
        if is_waiting:
            self._wait(task)
        self._wait(after)
        task.stream.tasks.insert(task.stream.tasks.index(task) + 1, after)
        return after

    def fail_for_memory(self, task: SlabTask) -> None:
        """Fail a task for which the block arena is too small."""
        need, budget = self._excerpts.need_of(task), self._blocks.arena_bytes
        error = budgets.batch_larger_than_arena(need, task.largest_cost, task.memory_needed, budget)
        self.fail(task, error)

    def _fail_for_size(self, task: SlabTask, need: int, budget: int) -> None:
        step = task.plan.batches[0].step
        self.fail(task, budgets.batch_too_large(step, need, budget))

    # -- assembling ------------------------------------------------------------------------------

    def assemble(self, task: SlabTask, shared: SharedSlab | None, worker_count: int) -> bool:
        """Copy a task's slab, or have this many workers assemble it from its ready blocks; return
        False if no slot is free.
        """
        is_elsewhere = self._elsewhere.is_elsewhere(task)
        if is_elsewhere and not self._elsewhere.may_begin(task):
            return False
        if is_elsewhere and not self._elsewhere.is_elsewhere(task):
            self._waiting.add(task)  # no other node can make it now
            return True
        is_own = shared is None and not is_elsewhere
        if is_own and self._is_too_early(task, worker_count):
            return False
        slot = self._slot_for(task)
        if slot is None:
            return False
        delivery = task.delivery
        slab, row_index = in_slot(slot, task.plan.row_count)
        if slab.length <= 0:
            delivery.slots.give_back(slot)
            if not self.halve(task):
                self._fail_for_size(task, slot.length - slab.length, slot.length)
            return True
        task.slot, task.phase = slot, SlabPhase.ASSEMBLING
        task.stamps.slotted = self._time.now
        effect: AssembleSlab | CopyKept | MakeElsewhere
        if is_elsewhere:
            effect = self._elsewhere.order(task, slab)
        elif shared is None:
            effect = self._gather(task, slab, row_index, worker_count)
        else:
            effect = self._copy(task, slab, shared)
        self._waiting.remove(task)
        task.pieces = effect.pieces if isinstance(effect, AssembleSlab) else 0
        self.piece_count += task.pieces
        self._assembling[task.number] = task
        delivery.assembling_count += 1
        self._do(effect)
        return True

    def have_enough(self, worker_count: int) -> bool:
        """Whether further pieces would only wait, with this many workers."""
        return self.piece_count >= _PIECES_A_WORKER * worker_count

    def _is_too_early(self, task: SlabTask, worker_count: int) -> bool:
        """Whether the slab would only wait in a slot: see invariant 5."""
        if task is task.stream.tasks[0] or not self.have_enough(worker_count):
            return False
        return task.stream.walk.sizes.pieces(task.plan.row_count, worker_count, are_busy=True) == 1

    def _gather(
        self, task: SlabTask, slab: Region, row_index: Region, worker_count: int
    ) -> AssembleSlab:
        self.pin(task)
        kept = self._shared.wanted(task, slab.length)
        if kept is not None:
            going = self._shared.make_way(kept)
            rooms, length = self._blocks.room, kept.region.length
            room = None if going is None else rooms.of_slab(length, going)
            if room is not None:
                self._shared.begin(kept, room)
                task.shared = kept
        are_busy = self.piece_count >= worker_count and not task.is_awaited
        return AssembleSlab(
            task.number,
            task.delivery.delivery_id,
            task.first_block,
            task.plan,
            tuple(task.keys.tolist()),
            row_index,
            slab,
            task.stream.walk.render,
            task.stream.walk.collate,
            None if task.shared is None else task.shared.region,
            task.stream.walk.sizes.pieces(task.plan.row_count, worker_count, are_busy=are_busy),
        )

    def _copy(self, task: SlabTask, slab: Region, shared: SharedSlab) -> CopyKept:
        assert shared.made is not None
        self.unpin(task)
        self._shared.begin_copy(shared)
        task.stamps.slotted_for_copy(shared.made_at, task.stamps.slotted)
        task.shared = shared
        return CopyKept(
            task.number,
            task.delivery.delivery_id,
            task.first_block,
            shared.region,
            Region(slab.offset, shared.region.length),
        )

    def may_have_slot(self, task: SlabTask) -> bool:
        """Whether the task could be assembled now, if it had its blocks."""
        slots = task.delivery.slots
        is_free = slots.zone_is_free if task.oversize else slots.free_count > 0
        if not is_free and (not task.is_awaited or self._spare(task) is None):
            return False
        stream = task.stream
        made_count = stream.made_count
        if stream.is_ahead and stream.after is not None:
            made_count += stream.after.made_count
        elif stream.tasks[0] is task:
            return True
        sharing = sum(not each.is_ahead for each in task.delivery.streams)
        return made_count < max(1, task.delivery.ahead // max(sharing, 1))

    def _slot_for(self, task: SlabTask) -> Region | None:
        if not self.may_have_slot(task):
            return None
        slots = task.delivery.slots
        take = slots.take_zone if task.oversize else slots.take
        slot = take()
        if slot is None:
            self._make_again_later(self._spare(task))
            slot = take()
        return slot

    def _spare(self, task: SlabTask) -> SlabTask | None:
        """Return a finished slab, neither held nor requested, in a slot that this task
        could use.
        """
        for stream in task.delivery.streams:
            for other in reversed(stream.tasks):
                if (
                    other.phase is SlabPhase.READY
                    and other.oversize == task.oversize
                    and not other.is_awaited
                ):
                    return other
        return None

    def _make_again_later(self, task: SlabTask | None) -> None:
        if task is not None:
            self._free_slot(task)
            task.assembled, task.phase = None, SlabPhase.WAITING
            self._wait(task)

    def assembled(self, event: SlabAssembled) -> None:
        """Handle a slab that a worker has made or copied, or the failure."""
        task, result = self._assembling.pop(event.number), event.result
        self.piece_count -= task.pieces
        task.stamps.started, task.stamps.made = event.started, self._time.now
        task.delivery.assembling_count -= 1
        is_to_be_made = self._elsewhere.ended(task, event)
        self.unpin(task)
        shared, task.shared = task.shared, None
        if isinstance(result, tasks.Assembled) and result.batch_count and event.worker_s:
            task.stream.walk.took(task.plan.batches[: result.batch_count], event.worker_s)
        if shared is not None:
            result = self._shared.ended(shared, result, is_kept=event.is_kept)
        if isinstance(result, tasks.Assembled):
            task.datasets.datasets[0].account.disk_us += result.disk
        if task.phase is SlabPhase.GONE:
            self._elsewhere.leave(task)
            self._free_slot(task)
            self._excerpts.release(task)
        elif is_to_be_made:
            if isinstance(result, NeighbourGone) and result.working:
                task.stream.advanced_at = self._time.now
            self._free_slot(task)
            task.phase = SlabPhase.WAITING
            self._wait(task)
        elif isinstance(result, DataplaneError):
            self._free_slot(task)
            self.fail(task, result)
        else:
            assert isinstance(result, tasks.Assembled)
            task.stream.advanced_at = self._time.now
            self._keep(task, result)
        self._close_if_idle(task.delivery)

    def _keep(self, task: SlabTask, result: tasks.Assembled) -> None:
        if not result.batch_count:
            self._outgrown(task, result.bytes_needed)
            return
        is_cut = result.batch_count < len(task.plan.batches)
        assert task.slot is not None
        slab, _ = in_slot(task.slot, task.plan.row_count)
        task.stream.walk.fitted(result.batch_count, result.bytes_used, slab.length, cut=is_cut)
        if is_cut:
            self._cut(task, result.batch_count)
        self._elsewhere.leave(task)
        self._excerpts.release(task)
        task.assembled, task.phase = result, SlabPhase.READY

    def _outgrown(self, task: SlabTask, bytes_needed: int) -> None:
        """Handle a single batch that does not fit into a slot: it is sent alone, through
        the zone.
        """
        self._free_slot(task)
        zone = task.delivery.slots.layout.zone_bytes
        need = bytes_needed + row_index_bytes(task.plan.batches[0].rows)
        if need > zone:
            self._fail_for_size(task, need, zone)
            return
        if len(task.plan.batches) > 1:
            self._cut(task, 1)
        task.oversize, task.phase = True, SlabPhase.WAITING
        self._wait(task)


# -- deliveries --------------------------------------------------------------------------------
#
# The delivery arenas of a node, and the slabs in them that trainers hold.


class Deliveries:
    """Every open delivery, by number."""

    def __init__(self, tasks: SlabTasks) -> None:
        self._tasks = tasks
        self.by_id: dict[int, Delivery] = {}
        self.groups: dict[object, Group] = {}

    def get(self, delivery_id: int) -> Delivery:
        """Return an open delivery."""
        return self.by_id[delivery_id]

    @property
    def ahead_max(self) -> int:
        """The most slabs that are made ahead for a delivery."""
        return max(delivery.ahead for delivery in self.by_id.values())

    def opened(self, event: DeliveryOpened) -> None:
        """Add a delivery, perhaps the first of its group."""
        group = None
        if event.group is not None:
            group = self.groups.get(event.group)
            if group is None or group.is_closed:
                group = self.groups[event.group] = Group(event.group, event.is_declared)
            group.users += 1
        self.by_id[event.delivery_id] = Delivery(
            event.delivery_id, Slots(event.layout), event.datasets, group
        )

    def closed(self, event: DeliveryClosed) -> None:
        """Close a delivery; closing it again changes nothing."""
        delivery = self.by_id.pop(event.delivery_id, None)
        if delivery is None:
            return
        self._tasks.close_delivery(delivery)
        if delivery.group is not None and delivery.group.is_closed:
            self.groups.pop(delivery.group.name, None)

    def released(self, event: Released) -> None:
        """Free these slabs, which their holder has released."""
        delivery = self.by_id.get(event.delivery_id)
        if delivery is not None:
            self._take_back(delivery, event.slab_ids)

    def holder_gone(self, event: HolderGone) -> None:
        """Free all slabs of a holder that is gone."""
        delivery = self.by_id.get(event.delivery_id)
        if delivery is not None:
            lent = delivery.lent.items()
            self._take_back(delivery, [i for i, loan in lent if loan.holder == event.holder])

    def _take_back(self, delivery: Delivery, slab_ids: Sequence[int]) -> None:
        for slab_id in slab_ids:
            loan = delivery.lent.pop(slab_id, None)
            if loan is not None:
                self._tasks.drop(loan.task)
