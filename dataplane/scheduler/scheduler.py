"""Plans -> blocks -> slabs -> trainers: decides what to load, make and hand over next. Pure.

Events in, effects out (events.py). The caller reports each event, carries out the returned effects,
and reports `Settled` after all events of one moment.

Invariants:
1. A stream's slabs are handed over in the order of its walk, one per request.
2. Only the first task that lacks blocks and could have a slot (the head) keeps blocks pinned while
   it waits for others, and takes memory from anything that is not pinned. Every other task pins all
   of its blocks at once, and then finishes without needing memory. So no two tasks can wait for
   each other's memory, and no task that waits for its trainer takes memory from one that does not.
3. A waiting stream gets a slot: finished slabs that were not requested yet may lose theirs and are
   made again later.
4. A slab has one consumer, which may write into it. Streams over the same steps get separate, equal
   slabs from blocks that were loaded once; streams of one group get copies of a slab that was made
   once.
5. Consumers may hold slabs forever. If they hold too many together, they must copy the next ones
   and return the slot (`copy_out`).
6. Every PlanSteps, Fetch, DecodeBlock, AssembleSlab and CopyKept is answered by exactly one event,
   and memory that it may write is not reused before that event.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from dataplane.arena.allocator import Allocator
from dataplane.arena.slots import Slots
from dataplane.rpc import messages
from dataplane.scheduler import events
from dataplane.scheduler.account import stage_times
from dataplane.scheduler.autoscaler import Autoscaler, Utilization
from dataplane.scheduler.block import CachedBlock, Excerpt
from dataplane.scheduler.blocks import BlockTable
from dataplane.scheduler.excerpts import Excerpts
from dataplane.scheduler.passes import Passes
from dataplane.scheduler.records import (
    Delivery,
    Group,
    Loan,
    Moment,
    SlabPhase,
    SlabTask,
    StreamState,
)
from dataplane.scheduler.shared import SharedSlabs
from dataplane.scheduler.slab_tasks import SlabTasks
from dataplane.scheduler.stalls import stalled
from dataplane.scheduler.streams import StreamTable
from dataplane.scheduler.waiting import WaitingTasks

_PLANS_TOGETHER = 8


class Scheduler:
    """Decides what a node does with its memory, fetches and workers. `decide` is the only entry
    point.
    """

    def __init__(
        self, arena_bytes: int, fetch_count: int, workers: Autoscaler, stall_timeout_s: float
    ) -> None:
        self._workers = workers
        self._stall_timeout_s = stall_timeout_s
        self._time = Moment()
        self._effects: list[events.Effect] = []
        allocator = Allocator(arena_bytes)
        self._streams = StreamTable()
        self._shared = SharedSlabs(allocator, self._streams, self._time)
        self._blocks = BlockTable(allocator, fetch_count, self._shared, self._do, self._time)
        waiting = WaitingTasks(self._time)
        self._blocks.is_lacked = waiting.is_lacked
        self._excerpts = Excerpts(self._blocks, allocator, waiting, self._do)
        self._passes = Passes(self._blocks, self._excerpts, self._streams, self._do)
        self._tasks = SlabTasks(
            self._blocks, self._shared, waiting, self._excerpts, self._do, self._time
        )
        self._deliveries: dict[int, Delivery] = {}
        self._groups: dict[object, Group] = {}
        self._slab_ids = itertools.count(1)
        self._head: SlabTask | None = None
        self._emptied_for: SlabTask | None = None
        self.is_settled = True
        """Whether no event came since the last search for work."""
        self._on: dict[type, Callable[[Any], None]] = {
            events.DeliveryOpened: self._open_delivery,
            events.DeliveryClosed: self._close_delivery,
            events.DatasetForgotten: lambda event: self._blocks.forget_dataset(event.dataset),
            events.StreamStarted: self._open_stream,
            events.StreamAdopted: self._adopt_stream,
            events.StreamClosed: self._close_stream,
            events.StreamRefused: self._refuse_stream,
            events.Requested: self._request,
            events.Released: self._release,
            events.HolderGone: self._release_all,
            events.Planned: self._planned,
            events.BlockFetched: self._blocks.fetched,
            events.BlockDecoded: self._blocks.decoded,
            events.RowsExtracted: self._copied,
            events.SlabAssembled: self._tasks.assembled,
            events.Ticked: self._tick,
            events.Settled: self._settle,
        }

    def decide(self, event: events.Event, now: float) -> list[events.Effect]:
        """The effects of this event, to be carried out in this order."""
        self._time.now = now
        self._effects = []
        self.is_settled = isinstance(event, events.Settled)
        self._on[type(event)](event)
        self._absorb()
        return self._effects

    def block(self, key: int) -> CachedBlock | Excerpt:
        """The block or excerpt that an effect has named."""
        return self._excerpts.find(key) or self._blocks.block(key)

    def _do(self, effect: events.Effect) -> None:
        self._effects.append(effect)

    def _absorb(self) -> None:
        """Report changed blocks to the tasks that wait for them."""
        for changed in self._blocks.take_changes():
            self._tasks.block_changed(changed)

    # -- deliveries ------------------------------------------------------------------------------

    def _open_delivery(self, event: events.DeliveryOpened) -> None:
        group = None
        if event.group is not None:
            group = self._groups.get(event.group)
            if group is None or group.is_closed:
                group = self._groups[event.group] = Group(event.group, event.is_declared)
            group.users += 1
        self._deliveries[event.delivery_id] = Delivery(
            event.delivery_id, Slots(event.layout), event.datasets, group
        )

    def _close_delivery(self, event: events.DeliveryClosed) -> None:
        delivery = self._deliveries.pop(event.delivery_id, None)
        if delivery is None:
            return
        self._tasks.close_delivery(delivery)
        if delivery.group is not None and delivery.group.is_closed:
            self._groups.pop(delivery.group.name, None)

    def _release(self, event: events.Released) -> None:
        delivery = self._deliveries.get(event.delivery_id)
        if delivery is not None:
            self._take_back(delivery, event.slab_ids)

    def _release_all(self, event: events.HolderGone) -> None:
        delivery = self._deliveries.get(event.delivery_id)
        if delivery is not None:
            lent = delivery.lent.items()
            self._take_back(delivery, [i for i, loan in lent if loan.holder == event.holder])

    def _take_back(self, delivery: Delivery, slab_ids: Sequence[int]) -> None:
        for slab_id in slab_ids:
            loan = delivery.lent.pop(slab_id, None)
            if loan is not None:
                self._tasks.drop(loan.task)

    # -- streams ---------------------------------------------------------------------------------

    def _open_stream(self, event: events.StreamStarted) -> None:
        stream = StreamState(
            event.stream_id,
            self._deliveries[event.delivery_id],
            event.walk,
            event.holder,
            event.walk.position,
            after=self._streams.find(event.after),
        )
        self._streams.add(stream)

    def _adopt_stream(self, event: events.StreamAdopted) -> None:
        stream = self._streams.find(event.stream_id)
        if stream is not None:
            stream.after = None

    def _close_stream(self, event: events.StreamClosed) -> None:
        stream = self._streams.find(event.stream_id)
        if stream is None:
            return
        self._streams.remove(stream)
        for task in stream.tasks:
            self._tasks.drop(task)
        stream.tasks.clear()

    def _refuse_stream(self, event: events.StreamRefused) -> None:
        stream = self._streams.find(event.stream_id)
        while stream is not None and stream.requests:
            request_id, _ = stream.requests.popleft()
            self._do(events.Send(stream.stream_id, request_id, event.error))

    def _request(self, event: events.Requested) -> None:
        stream = self._streams.find(event.stream_id)
        if stream is not None:
            stream.requests.append((event.request_id, self._time.now))
            self._deliver(stream)

    # -- planning --------------------------------------------------------------------------------

    def _plan_more(self, stream: StreamState) -> None:
        room = self._passes.plans_ahead(stream) - len(stream.tasks)
        room += stream.delivery.slots.layout.ahead_slots
        if stream.planning or stream.planned_all:
            return
        # Several plans per call, since each call wakes two threads; the first plans one by one, so
        # that the first batch is early.
        count = min(max(len(stream.tasks), 1), _PLANS_TOGETHER)
        if room >= count:
            stream.planning = count
            self._do(events.PlanSteps(stream.stream_id, stream.walk, count))

    def _planned(self, event: events.Planned) -> None:
        stream = self._streams.find(event.stream_id)
        if stream is None:
            return
        asked, stream.planning = stream.planning, 0
        stream.error = event.error
        stream.planned_all = event.error is not None or len(event.plans) < asked
        for plan in event.plans:
            self._tasks.add(stream, plan)
        stream.planned_to = stream.walk.position
        if stream.planned_all:
            self._do(events.AllPlanned(stream.stream_id, has_failed=event.error is not None))

    # -- time ------------------------------------------------------------------------------------

    def _tick(self, event: events.Ticked) -> None:
        self._blocks.fetches.look(self._time.now, is_awaited=self._streams.is_awaited)
        look = Utilization(event.busy, event.bytes_per_s, self._streams.is_awaited)
        before, self._workers = self._workers, self._workers.after(look)
        if self._workers.count != before.count:
            facts = {"count": self._workers.count, "before": before.count}
            self._do(events.Note("workers", facts))
            self._do(events.ResizePool(self._workers.count))
        for stream in self._streams:
            for effect in stalled(stream, self._shared, self._time.now, self._stall_timeout_s):
                self._do(effect)

    # -- what comes next -------------------------------------------------------------------------

    def _settle(self, _event: events.Settled) -> None:
        for stream in self._streams:
            self._deliver(stream)  # first: a slab that was handed over makes way for the next
        lacking = self._assemble_ready()
        head = next((task for task in lacking if self._tasks.may_have_slot(task)), None)
        is_emptied = head is not None and head is self._emptied_for
        if not is_emptied and self._passes.look(head):
            self._absorb()
            self.is_settled = False
        self._become_head(head)
        loading = head is None or self._load(head, greedy=True)
        for task in lacking:
            # If the arena was emptied for the head, the head must get the room.
            loading = loading and self._emptied_for is None
            loading = loading and self._passes.is_near(task)
            loading = loading and (task is head or self._load(task, greedy=False))
        under_way = self._blocks.in_flight_count + self._tasks.assembling_count
        under_way += self._excerpts.copying_count
        idle = not under_way and self.is_settled
        if head is not None and head.missing and idle:
            self._unstick(head)
        # Blocks that need neither a fetch nor decoding are ready at once, and no event follows.
        self.is_settled &= all(task.missing for task in lacking)
        for stream in self._streams:
            self._deliver(stream)
            self._plan_more(stream)

    def _assemble_ready(self) -> list[SlabTask]:
        """Assemble what has its blocks and a slot. Returns the tasks that lack blocks, in order."""
        lacking, full = list[SlabTask](), set[int]()
        for task in self._in_order():
            slab = self._shared.find(task)
            if slab is not None and slab.made is None:
                continue
            if task.missing and slab is None:
                lacking.append(task)
            elif task.oversize or task.stream.stream_id not in full:
                batches = task.plan.batches
                if not self._tasks.assemble(task, slab) and not task.oversize:
                    # Later tasks of its stream have no slot either; the zone is separate.
                    full.add(task.stream.stream_id)
                self.is_settled &= task.plan.batches is batches  # or it was cut, and is next
                self._absorb()
        return lacking

    def _in_order(self) -> list[SlabTask]:
        """Tasks without a slab, in the order in which they are needed."""
        ranked = [
            (depth, task.number, task)
            for stream in self._streams
            for depth, task in enumerate(stream.tasks, stream.tasks_before)
            if task.phase is SlabPhase.WAITING
        ]
        ranked.sort(key=lambda rank: rank[:2])
        for depth, number, task in ranked:
            task.rank = depth, number
        return [task for _, _, task in ranked]

    def _become_head(self, task: SlabTask | None) -> None:
        if task is not self._emptied_for:
            self._empty_for(None)
        former, self._head = self._head, task
        if former is not None and former is not task and former.phase is SlabPhase.WAITING:
            self._tasks.unpin(former)
        if task is not None:
            self._tasks.pin(task)

    def _empty_for(self, head: SlabTask | None) -> None:
        self._emptied_for = head
        self._blocks.is_short = head is not None

    def _load(self, task: SlabTask, *, greedy: bool) -> bool:
        """Start loading the missing blocks: False if one of them found no room."""
        for number in sorted(task.idle):
            dataset, index = task.datasets.find(number)
            is_started = self._blocks.start(dataset, index, greedy=greedy)
            self._absorb()
            if not is_started:
                if greedy and self._passes.copy_rows_for(task):
                    self._absorb()
                    self.is_settled = False
                return False
            task.idle.discard(number)
        return True

    def _copied(self, event: events.RowsExtracted) -> None:
        if self._head is not None and self._head.phase is SlabPhase.WAITING:
            self._tasks.unpin(self._head)  # it needs no pin of a block that it has an excerpt of
        for failure in self._excerpts.copied(event):
            self._tasks.fail(failure.task, failure.error)

    def _unstick(self, head: SlabTask) -> None:
        """No block is loading and the head still lacks blocks: fragmentation, or too small a
        budget.
        """
        self._tasks.unpin(head)
        if self._emptied_for is not head:
            self._empty_for(head)
            self._excerpts.close()
            self._blocks.drop_unpinned()
        elif self._passes.open_for(head):
            pass  # its blocks are loaded in several passes from now on
        elif self._tasks.halve(head):
            self._empty_for(None)
        else:
            self._tasks.fail_for_memory(head)
        self.is_settled = False

    # -- slabs -----------------------------------------------------------------------------------

    def _deliver(self, stream: StreamState) -> None:
        while stream.requests:
            if not stream.tasks:
                if not stream.planned_all:
                    return
                request_id, _ = stream.requests.popleft()
                end = stream.error or messages.EndOfStream(stream.stream_id)
                self._do(events.Send(stream.stream_id, request_id, end))
                continue
            task = stream.tasks[0]
            if task.phase is SlabPhase.FAILED:
                assert task.error is not None
                request_id, _ = stream.requests.popleft()
                self._do(events.Send(stream.stream_id, request_id, task.error))
                continue
            if task.phase is not SlabPhase.READY:
                return
            self._lend(stream, task)

    def _lend(self, stream: StreamState, task: SlabTask) -> None:
        assert task.assembled is not None
        assert task.slot is not None
        slab_id, now = next(self._slab_ids), self._time.now
        stream.tasks.popleft()
        request_id, _ = stream.requests.popleft()
        accounts = [dataset.account for dataset in task.datasets.datasets]
        task.delivery.lent[slab_id] = Loan(task, stream.holder)
        slab = messages.Slab(
            stream.stream_id,
            slab_id,
            task.slot,
            task.plan.batches,
            task.assembled.layout,
            copy_out=task.oversize or task.delivery.is_held_up,
            times=stage_times(task.stamps.stages(now), accounts, self._workers.count, now),
        )
        self._do(events.Send(stream.stream_id, request_id, slab))
