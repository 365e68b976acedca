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
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.arena.allocator import Allocator
from dataplane.rpc import messages
from dataplane.rpc.membership import HeldBlocks
from dataplane.scheduler import events
from dataplane.scheduler.asks import Asks, Borrowed
from dataplane.scheduler.autoscaler import Autoscaler, Utilization
from dataplane.scheduler.blocks import BlockTable
from dataplane.scheduler.dataset import stage_times
from dataplane.scheduler.disk import DiskTier
from dataplane.scheduler.elsewhere import Elsewhere
from dataplane.scheduler.excerpts import Excerpts
from dataplane.scheduler.holdings import Holdings, WaitingTasks
from dataplane.scheduler.keeping import Keeping
from dataplane.scheduler.planning import Passes, Planning
from dataplane.scheduler.records import (
    CachedBlock,
    Excerpt,
    Loan,
    Moment,
    SlabPhase,
    SlabTask,
    StreamState,
)
from dataplane.scheduler.slab_tasks import Deliveries, SlabTasks
from dataplane.scheduler.stalls import Stalls
from dataplane.scheduler.streams import SharedSlabs, StreamTable

_STARTS_MAX = 64
"""The most loads that are started for a task at once: each takes some of the event loop's time."""


class Reuse:
    """Measures reuse: the bytes of blocks that readers needed and found in memory, since another
    reader or epoch had caused the read. A remote block counts once for each reader that needs it,
    except the reader that causes the read. So all useful reads plus `found_bytes` add up to the
    stored size of everything that readers needed.
    """

    def __init__(self, streams: StreamTable) -> None:
        self._streams = streams
        self._seen: dict[tuple[int, int], npt.NDArray[np.bool_]] = {}
        """For each reader, the blocks from which its slabs have taken rows."""
        self.found_bytes = 0

    def gathered(self, task: SlabTask, now: float) -> None:
        """Note that the rows of this task are about to be gathered from its blocks."""
        reader, blocks = task.stream.reader, task.plan.blocks
        seen = self._seen.get(reader)
        if seen is None:
            seen = self._seen[reader] = np.zeros(int(task.datasets.starts[-1]), np.bool_)
        first = blocks[~seen[blocks]]
        if not len(first):
            return
        seen[first] = True
        for dataset, some in task.datasets.parts(first):
            marks = dataset.marks
            remote = some[marks.is_remote[some]]
            again = remote[marks.used[remote] >= marks.fetched[remote]]
            found = int(dataset.stored[again].sum())
            self.found_bytes += found
            dataset.account.memory_bytes += found
            marks.used[remote] = now

    def closed(self, stream: StreamState) -> None:
        """Forget a reader whose last stream was closed."""
        if all(other.reader != stream.reader for other in self._streams):
            self._seen.pop(stream.reader, None)


class Scheduler:
    """Decides how a node uses its memory, fetches and workers. `decide` is the only entry point."""

    def __init__(
        self,
        arena_bytes: int,
        fetch_count: int,
        workers: Autoscaler,
        stall_timeout_s: float,
        cache_bytes: int = 0,
    ) -> None:
        self._workers = workers
        self._time = Moment()
        self._effects: list[events.Effect] = []
        allocator = self._allocator = Allocator(arena_bytes)
        self._streams = StreamTable()
        self._shared = SharedSlabs(allocator, self._streams, self._time)
        waiting = WaitingTasks(self._time, Holdings(arena_bytes))
        tier = self._tier = DiskTier(cache_bytes, arena_bytes, self._shared.readings)
        self._blocks = BlockTable(
            allocator, fetch_count, self._shared, waiting, tier, self._do, self._time
        )
        self._borrowed = Borrowed(self._blocks)
        asks = self._asks = Asks(self._blocks, waiting, self._borrowed, self._do, self._time)
        self._keeping = Keeping(tier, self._blocks, asks, self._borrowed, self._do, self._time)
        self._excerpts = Excerpts(self._blocks, allocator, waiting, self._do)
        self._passes = Passes(self._blocks, self._excerpts, self._streams, self._do)
        self._elsewhere, self._reuse = Elsewhere(workers, self._time), Reuse(self._streams)
        self._stalls = Stalls(self._blocks, self._shared, self._elsewhere, stall_timeout_s)
        self._tasks = SlabTasks(
            self._blocks, self._shared, waiting, self._excerpts, self._elsewhere, self._do,
            self._time,
        )  # fmt: skip
        self._deliveries = Deliveries(self._tasks)
        self._planning = Planning(self._streams, self._tasks, self._passes, self._do)
        self._slab_ids = itertools.count(1)
        self._head: SlabTask | None = None
        self._emptied_for: SlabTask | None = None
        self._is_emptied_again = False
        """Whether the arena was emptied for that task once more, and no rows were copied since."""
        self.is_settled = True
        """Whether no event came since the last search for work."""
        self._on = self._decisions()

    def _decisions(self) -> dict[type, Callable[[Any], None]]:
        """Return the function that decides about each kind of event."""
        return {
            events.DeliveryOpened: self._deliveries.opened,
            events.DeliveryClosed: self._close_delivery,
            events.BlocksInherited: self._blocks.inherit,
            events.StreamStarted: self._open_stream,
            events.StreamAdopted: self._adopt_stream,
            events.NextOrderKnown: self._streams.expect_next,
            events.StreamClosed: self._close_stream,
            events.StreamRefused: self._refuse_stream,
            events.Requested: self._request,
            events.Released: self._deliveries.released,
            events.HolderGone: self._deliveries.holder_gone,
            events.Planned: self._planning.planned,
            events.BlockDecoded: self._blocks.decoded,
            events.RowsExtracted: self._copied,
            events.SlabAssembled: self._tasks.assembled,
            events.MakersKnown: self._makers_known,
            events.NeighbourAsked: self._asks.asked,
            events.SendingEnded: lambda event: self._asks.sent(event.number),
            events.Ticked: self._tick,
            events.Settled: self._settle,
            events.BlockFetched: self._keeping.fetched,
            events.DatasetForgotten: self._keeping.forget_dataset,
            events.DiskFound: self._keeping.found,
            events.DiskScanned: self._keeping.scanned,
            events.DiskMissed: self._keeping.missed,
            events.KeepingEnded: self._keeping.ended,
        }

    def decide(self, event: events.Event, now: float) -> list[events.Effect]:
        """Return the effects of this event, to be carried out in this order."""
        self._time.now = now
        self._effects = []
        self.is_settled = isinstance(event, events.Settled)
        self._on[type(event)](event)
        self._absorb()
        return self._effects

    def block(self, key: int) -> CachedBlock | Excerpt:
        """Return the block or excerpt with this key, which an effect has named."""
        return self._excerpts.find(key) or self._blocks.block(key)

    @property
    def is_short(self) -> bool:
        """Whether slabs should be made by other nodes, since there are too few workers."""
        return self._elsewhere.is_short

    @property
    def found_bytes(self) -> int:
        """The bytes of blocks that streams needed and found in memory."""
        return self._reuse.found_bytes

    @property
    def evictions(self) -> tuple[int, int]:
        """How many blocks have made way for others, and how many of them will be read again."""
        return self._blocks.evicted_count, self._blocks.evicted_open_count

    @property
    def kept_slab_bytes(self) -> int:
        """The memory of finished slabs that are kept for other consumers."""
        return self._shared.kept_bytes

    @property
    def excerpt_bytes(self) -> int:
        """The memory for excerpts."""
        return self._excerpts.pool_bytes

    def steps_ahead(self, stream_id: int) -> int:
        """Return how many batches of a stream are ready, one after the other; 0 for an unknown
        one.
        """
        stream, count = self._streams.find(stream_id), 0
        for task in () if stream is None else stream.tasks:
            if task.phase is not SlabPhase.READY:
                break
            count += len(task.plan.batches)
        return count

    def waiting(self, stream_id: int) -> tuple[float, str] | None:
        """Return for how long a stream's oldest request has waited, and for which stage; None if no
        request waits.
        """
        stream = self._streams.find(stream_id)
        return None if stream is None else self._stalls.waiting(stream, self._time.now)

    @property
    def held(self) -> HeldBlocks:
        """How full memory and disk are."""
        memory, tier = self._allocator, self._tier
        used_bytes = memory.size_bytes - memory.free_bytes
        on_disk = tier.used_bytes, tier.limit_bytes, len(tier)
        return HeldBlocks(used_bytes, memory.size_bytes, *on_disk)

    def _do(self, effect: events.Effect) -> None:
        self._effects.append(effect)

    def _absorb(self) -> None:
        """Report changed blocks to the tasks that wait for them."""
        for changed in self._blocks.take_changes():
            self._tasks.block_changed(changed)
            self._asks.block_changed(changed)

    def _close_delivery(self, event: events.DeliveryClosed) -> None:
        self._deliveries.closed(event)
        self._elsewhere.known(events.MakersKnown(event.delivery_id, ()))

    def _makers_known(self, event: events.MakersKnown) -> None:
        if event.delivery_id in self._deliveries.by_id:
            self._elsewhere.known(event)

    # -- streams ---------------------------------------------------------------------------------

    def _open_stream(self, event: events.StreamStarted) -> None:
        stream = StreamState(
            event.stream_id,
            self._deliveries.get(event.delivery_id),
            event.walk,
            event.holder,
            event.walk.position,
            event.datasets,
            after=self._streams.find(event.after),
        )
        self._streams.add(stream)

    def _adopt_stream(self, event: events.StreamAdopted) -> None:
        if (stream := self._streams.find(event.stream_id)) is not None:
            stream.after = None

    def _close_stream(self, event: events.StreamClosed) -> None:
        stream = self._streams.find(event.stream_id)
        if stream is None:
            return
        self._streams.remove(stream)
        for task in stream.tasks:
            self._tasks.drop(task)
        stream.tasks.clear()
        self._reuse.closed(stream)

    def _refuse_stream(self, event: events.StreamRefused) -> None:
        stream = self._streams.find(event.stream_id)
        while stream is not None and stream.requests:
            request_id, _ = stream.requests.popleft()
            self._do(events.Send(stream.stream_id, request_id, event.error))

    def _request(self, event: events.Requested) -> None:
        if (stream := self._streams.find(event.stream_id)) is not None:
            stream.requests.append((event.request_id, self._time.now))
            self._deliver(stream)
            if not stream.requests:
                stream.delivery.was_in_time()
            elif stream.tasks or not stream.planned_all:
                self._was_late(stream)

    def _was_late(self, stream: StreamState) -> None:
        """Make more slabs ahead, since a trainer waits: see Delivery.was_late."""
        are_free = not self._tasks.have_enough(self._workers.count) or self._elsewhere.is_short
        stream.delivery.was_late(self._deliveries.ahead_max, are_free=are_free)

    # -- time ------------------------------------------------------------------------------------

    def _tick(self, event: events.Ticked) -> None:
        self._blocks.fetches.ticked(self._time.now, is_awaited=self._streams.is_awaited)
        self._asks.look()
        self._keeping.look()
        look = Utilization(event.busy, event.bytes_per_s, self._streams.is_awaited)
        before, self._workers = self._workers.count, self._workers.after(look)
        self._elsewhere.look(look, self._workers)
        for given_up in self._elsewhere.given_up():
            self._do(given_up)
        if (count := self._workers.count) != before:
            self._do(events.Note("workers", {"count": count, "before": before}))
            self._do(events.ResizePool(count))
        for stream in self._streams:
            if stream.requests and stream.tasks:
                self._was_late(stream)
            for effect in self._stalls.of_stream(stream, event.at_work, self._time.now):
                self._do(effect)

    # -- what comes next -------------------------------------------------------------------------

    def _settle(self, _event: events.Settled) -> None:
        for stream in self._streams:
            self._deliver(stream)  # first: a stream may make more once a slab is handed over
        lacking = self._assemble_ready()
        head = next((task for task in lacking if self._tasks.may_have_slot(task)), None)
        if (head is None or head is not self._emptied_for) and self._passes.look(head):
            self._absorb()
            self.is_settled = False
        self._become_head(head)
        is_urgent = head is not None and self._is_urgent(head)
        reading = self._streams.to_read_now(lacking)
        loading = True
        if head is not None and head in reading:
            loading = self._load(head, greedy=is_urgent)
        if loading or not is_urgent:
            self._asks.load()
            self._absorb()
        elif self._blocks.room.is_full:
            self._asks.refuse_unread()
        for task in reading:
            # If the arena was emptied for the head, the head must get the room.
            loading = loading and self._emptied_for is None
            loading = loading and self._passes.is_near(task)
            loading = loading and (task is head or self._load(task, greedy=False))
        if head is not None and head.missing and self.is_settled and not self._under_way:
            self._unstick(head)
        self._asks.refuse_idle_of_runs()
        # Search for work again if a task has its blocks by now: blocks that need neither a fetch
        # nor decoding are ready at once, and no event follows.
        self.is_settled &= all(task.missing for task in lacking)
        for stream in self._streams:
            self._deliver(stream)
            self._planning.plan_more(stream)
        self._blocks.fetches.settled(self._time.now, is_awaited=self._streams.is_awaited)

    def _assemble_ready(self) -> list[SlabTask]:
        """Assemble tasks that have their blocks and a slot. Return the tasks that lack blocks, in
        order.
        """
        lacking, full = list[SlabTask](), set[int]()
        for task in self._streams.waiting_tasks():
            slab = self._shared.find(task)
            if slab is not None and slab.made is None:
                continue
            if task.missing and slab is None:
                lacking.append(task)
            elif task.oversize or task.stream.stream_id not in full:
                if self._tasks.assemble(task, slab, self._workers.count):
                    self.is_settled &= task.phase is not SlabPhase.WAITING  # else: try again
                    is_gathered = slab is None and not self._elsewhere.is_elsewhere(task)
                    if is_gathered and task.phase is SlabPhase.ASSEMBLING:
                        self._reuse.gathered(task, self._time.now)
                elif not task.oversize:
                    # Later tasks of the stream get no slot either, except oversize ones: the zone
                    # is separate.
                    full.add(task.stream.stream_id)
                self._absorb()
        return lacking

    def _become_head(self, task: SlabTask | None) -> None:
        if task is not self._emptied_for:
            self._empty_for(None)
        former, self._head = self._head, task
        if former is not None and former is not task and former.phase is SlabPhase.WAITING:
            self._tasks.unpin(former)
        if task is not None:
            self._tasks.pin(task)

    def _empty_for(self, head: SlabTask | None) -> None:
        self._emptied_for, self._is_emptied_again = head, False
        self._blocks.is_short = head is not None

    def _is_urgent(self, head: SlabTask) -> bool:
        """Whether blocks of later tasks may be evicted for the head. Not while its trainer has
        other slabs to read: the memory of these is free soon.
        """
        is_next = head.is_awaited or not head.rank[0] or head is self._emptied_for
        return is_next or self._excerpts.is_open or not self._under_way

    @property
    def _under_way(self) -> int:
        """Return the number of actions whose end an event will report."""
        under_way = self._blocks.in_flight_count + self._tasks.assembling_count
        return under_way + self._excerpts.copying_count + self._borrowed.count

    def _load(self, task: SlabTask, *, greedy: bool) -> bool:
        """Start loading the missing blocks. Return False if one of them found no room, or if so
        many were started that the rest must wait for the next event.
        """
        away, most = self._shared.away(task), self._blocks.in_flight_count + _STARTS_MAX
        for number in sorted(task.idle):
            if self._blocks.in_flight_count >= most:
                return False
            dataset, index = task.datasets.find(number)
            is_started = self._blocks.start(dataset, index, greedy=greedy, away=away)
            self._absorb()
            if not is_started:
                if greedy and self._passes.copy_rows_for(task):
                    self._absorb()
                    self.is_settled = False
                return False
            task.idle.discard(number)
        return True

    def _copied(self, event: events.RowsExtracted) -> None:
        self._is_emptied_again = False
        if self._head is not None and self._head.phase is SlabPhase.WAITING:
            self._tasks.unpin(self._head)  # blocks of which it now has excerpts need no pin
        for failure in self._excerpts.copied(event):
            self._tasks.fail(failure.task, failure.error)

    def _unstick(self, head: SlabTask) -> None:
        """Make room for a head that lacks blocks while no block is loading: the arena is
        fragmented, or too small.
        """
        self._tasks.unpin(head)
        if self._emptied_for is not head:
            self._empty_for(head)
            self._excerpts.close()
            self._blocks.drop_unpinned()
        elif self._passes.open_for(head):
            pass  # from now on, the head's blocks are loaded in several passes
        elif self._excerpts.is_open and not self._is_emptied_again:
            # Evict once more: a fetched block may lie where there is no room beside it to decode
            # it.
            self._is_emptied_again = True
            self._blocks.drop_unpinned()
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
        task.delivery.has_lent = True
        slab = messages.Slab(
            stream.stream_id,
            slab_id,
            task.slot,
            task.plan.batches,
            task.assembled.layout,
            copy_out=task.oversize or task.delivery.is_held_up,
            times=stage_times(task.stamps.stages(now), accounts, self._workers.count, now),
            bytes_used=task.assembled.bytes_used,
            replaced=task.assembled.replaced,
        )
        self._do(events.Send(stream.stream_id, request_id, slab))
