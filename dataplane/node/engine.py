"""Plans -> blocks -> slabs -> trainers: what is loaded, made and handed over next.

One thread, no waiting: everything here is called by the event loop, and every end of a fetch, a
decoding or an assembly leads to one `pump`.

Invariants:
1. A stream's slabs are handed over in the order of its walk, one a request.
2. Only the first work that lacks blocks and could have a slot (the head) keeps blocks pinned while
   it waits for others, and takes memory from whatever is not pinned; every other work pins all of
   its blocks at once, and then ends without needing memory. So no two works can wait for each
   other's memory, and no work that waits for its trainer takes memory from one that does not.
3. A stream that waits gets a slot: slabs that nobody asked for yet are made again later.
4. A slab has one consumer, who may write into it: two streams that walk alike get equal slabs,
   each its own, from blocks that were loaded once; of a group, copies of what was made once.
5. Consumers may hold slabs for ever: where they hold too many together, the next are theirs only to
   copy (`copy_out`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from dataplane.arena.memfd import Arena
from dataplane.errors import BudgetTooSmall, DataplaneError
from dataplane.node.block import Spare
from dataplane.node.blocks import BlockTable
from dataplane.node.dataset import Dataset
from dataplane.node.fetch import Fetcher
from dataplane.node.pool import WorkerPool
from dataplane.node.shared import SharedSlabs
from dataplane.node.stall import stall_error
from dataplane.node.walk import Plan, Walk
from dataplane.node.work import Delivery, Loan, Phase, Send, SharedSlab, StreamState, Work
from dataplane.node.works import Works
from dataplane.plan.order import Order
from dataplane.rpc import messages
from dataplane.trace import Trace

# Works planned beyond the slabs in the making: their blocks are fetched meanwhile.
_PLANS_AHEAD = 16
_PLANS_TOGETHER = 8


class Engine:
    """The data path of a node."""

    def __init__(
        self,
        arena: Arena,
        fetcher: Fetcher,
        pool: WorkerPool,
        fetch_count: int,
        trace: Trace,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arena = arena
        self._fetcher = fetcher
        self._pool = pool
        self._trace = trace
        self._clock = clock
        self._streams: dict[int, StreamState] = {}
        self.blocks = BlockTable(arena, fetcher, pool, fetch_count, self)
        self._shared = SharedSlabs(self.blocks, self._streams.values, self._soon, trace)
        self._works = Works(arena, self.blocks, pool, self._soon, self._shared)
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="dataplane-plan")
        self._numbers = itertools.count(1)
        self._head: Work | None = None
        self._emptied_for: Work | None = None
        self._pump_is_due = False

    def close(self) -> None:
        """Make nothing more."""
        self._planner.shutdown(wait=False, cancel_futures=True)

    # -- streams ---------------------------------------------------------------------------------

    def open_stream(
        self,
        delivery: Delivery,
        walk: Walk,
        send: Send,
        holder: object,
        after: StreamState | None = None,
    ) -> StreamState:
        """A consumer starts to walk; `holder` will have its slabs. Until `after` is closed it comes
        last: what it would have is made of what that one leaves.
        """
        stream = StreamState(
            next(self._numbers), delivery, walk, send, holder, walk.position, after=after
        )
        self._streams[stream.stream_id] = stream
        delivery.streams.append(stream)
        self._plan_more(stream)
        return stream

    def request(self, stream: StreamState, request_id: int) -> None:
        """The consumer wants its next slab."""
        stream.requests.append((request_id, self._clock()))
        self._deliver(stream)
        self._soon()

    def release(self, delivery: Delivery, slab_ids: Sequence[int]) -> None:
        """Nobody at that trainer holds these slabs any more; unknown ones were released before."""
        for slab_id in slab_ids:
            loan = delivery.lent.pop(slab_id, None)
            if loan is not None:
                self._works.drop(loan.work)
        self._soon()

    def release_all(self, delivery: Delivery, holder: object) -> None:
        """A holder is gone: whatever it had is free."""
        self.release(delivery, [i for i, loan in delivery.lent.items() if loan.holder is holder])

    def close_stream(self, stream: StreamState) -> None:
        """The consumer is gone, or has enough. May be called twice."""
        if stream.closed:
            return
        stream.closed = True
        del self._streams[stream.stream_id]
        stream.delivery.streams.remove(stream)
        for work in stream.works:
            self._works.drop(work)
        stream.works.clear()
        self._soon()

    @property
    def is_awaited(self) -> bool:
        """Whether a trainer has asked for a slab that is not ready."""
        return any(stream.requests for stream in self._streams.values())

    def close_delivery(self, delivery: Delivery) -> None:
        """Nobody here uses this arena any more."""
        self._works.close_delivery(delivery)

    def check_deadlines(self, stall_timeout_s: float, node_id: str) -> None:
        """Answer requests that have waited too long with what they wait for."""
        for stream in list(self._streams.values()):
            while stream.requests and self._clock() - stream.requests[0][1] > stall_timeout_s:
                request_id, since = stream.requests.popleft()
                waited_s = self._clock() - since
                error = stall_error(stream, waited_s, node_id, self._fetcher, self._shared)
                stream.send(request_id, error)

    # -- planning --------------------------------------------------------------------------------

    def _plan_more(self, stream: StreamState) -> None:
        room = _PLANS_AHEAD + stream.delivery.slots.layout.ahead_slots - len(stream.works)
        if stream.planning or stream.planned_all or stream.closed:
            return
        # Several at a time, since each call wakes two threads; the first ones alone, to be early.
        count = min(max(len(stream.works), 1), _PLANS_TOGETHER)
        if room < count:
            return
        stream.planning = True
        future = self._planner.submit(stream.walk.next_plans, count)
        loop = asyncio.get_running_loop()
        future.add_done_callback(
            lambda done: (
                None
                if done.cancelled() or loop.is_closed()
                else loop.call_soon_threadsafe(self._on_planned, stream, count, done)
            )
        )

    def _on_planned(self, stream: StreamState, count: int, done: Future[list[Plan]]) -> None:
        stream.planning = False
        if stream.closed:
            return
        error = done.exception()
        if error is not None:
            self._trace.failed("plan", error=error)
            stream.planned_all = True
            stream.error = (
                error
                if isinstance(error, DataplaneError)
                else DataplaneError(f"planning failed: {type(error).__name__}: {error}")
            )
        else:
            plans = done.result()
            stream.planned_all = len(plans) < count
            for plan in plans:
                self._works.add(stream, plan)
            stream.planned_to = stream.walk.position
            if stream.planned_all:
                self._tell_planned(stream)
        self._plan_more(stream)
        self._soon()

    def when_planned(self, stream: StreamState, call: Callable[[], None]) -> None:
        """Have it called, once, when the last work of a stream is planned; at once if it is."""
        stream.when_planned = call
        if stream.planned_all:
            self._tell_planned(stream)

    def _tell_planned(self, stream: StreamState) -> None:
        call, stream.when_planned = stream.when_planned, None
        if call is not None and stream.error is None:
            call()

    # -- blocks ----------------------------------------------------------------------------------

    def walks(self, dataset: Dataset) -> Sequence[tuple[Order, int]]:
        """As blocks.Listener."""
        return [
            (stream.walk.order, self._shared.position(stream))
            for stream in self._streams.values()
            if stream.delivery.dataset is dataset
        ]

    def crops(self, dataset: Dataset) -> bool:
        """As blocks.Listener."""
        return any(
            stream.delivery.dataset is dataset and stream.walk.crops
            for stream in self._streams.values()
        )

    def block_ready(self, dataset: Dataset, index: int) -> None:
        """As blocks.Listener."""
        self._works.block_ready(dataset, index)
        self._soon()

    def block_gone(self, dataset: Dataset, index: int) -> None:
        """As blocks.Listener."""
        self._works.block_gone(dataset, index)
        self._soon()

    def block_failed(self, dataset: Dataset, index: int, error: DataplaneError) -> None:
        """As blocks.Listener."""
        self._works.block_failed(dataset, index, error)

    def spare(self) -> Sequence[SharedSlab]:
        """As blocks.Listener."""
        return self._shared.spare()

    def evict_spare(self, spare: Spare) -> None:
        """As blocks.Listener."""
        assert isinstance(spare, SharedSlab)
        self._shared.evict(spare)

    # -- the pump --------------------------------------------------------------------------------

    def _soon(self) -> None:
        if not self._pump_is_due:
            self._pump_is_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_is_due = False
        lacking, full = [], set()
        for work in self._in_order():
            is_full = work.stream.stream_id in full
            if is_full and not work.missing:
                continue
            slab = self._shared.find(work)
            if slab is not None and slab.made is None:
                continue
            if work.missing and slab is None:
                lacking.append(work)
            elif not is_full and not self._works.assemble(work, slab):
                # Whatever comes after it in its stream has no slot either; the zone is another.
                full |= set() if work.oversize else {work.stream.stream_id}
        head = next((work for work in lacking if self._works.may_have_slot(work)), None)
        self._become_head(head)
        loading = head is None or self._load(head, greedy=True)
        for work in lacking:
            # A head for which the arena was emptied must find it empty.
            loading = loading and self._emptied_for is None
            loading = loading and (work is head or self._load(work, greedy=False))
        idle = not self.blocks.in_flight_count and not self._works.assembling_count
        if head is not None and head.missing and idle:
            self._unstick(head)
        for stream in list(self._streams.values()):
            self._deliver(stream)
            self._plan_more(stream)

    def _in_order(self) -> list[Work]:
        """Works without a slab: those that are needed first come first."""
        ranked = [
            (depth, work.number, work)
            for stream in self._streams.values()
            for depth, work in enumerate(stream.works, _works_before(stream))
            if work.phase is Phase.WAITING
        ]
        return [work for _, _, work in sorted(ranked, key=lambda rank: rank[:2])]

    def _become_head(self, work: Work | None) -> None:
        if work is not self._emptied_for:
            self._emptied_for = None
        if self._head is not None and self._head is not work:
            if self._head.phase is Phase.WAITING:
                self._works.unpin(self._head)
            self._head = None
        if work is not None:
            self._head = work
            self._works.pin(work)

    def _load(self, work: Work, *, greedy: bool) -> bool:
        """Start what is missing: False when there was no room for something."""
        for index in sorted(work.idle):
            try:
                if not self.blocks.start(work.dataset, index, greedy=greedy):
                    return False
                work.idle.discard(index)
            except BudgetTooSmall as error:
                self._works.fail(work, error)
                return False
        return True

    def _unstick(self, head: Work) -> None:
        """Nothing is on its way and the head still lacks blocks: gaps, or too small a budget."""
        if self._emptied_for is not head:
            self._emptied_for = head
            self._works.unpin(head)
            self._head = None
            self.blocks.drop_unpinned()
        elif self._works.halve(head):
            self._emptied_for = None
        else:
            self._works.fail_for_memory(head)
        self._soon()

    # -- slabs -----------------------------------------------------------------------------------

    def _deliver(self, stream: StreamState) -> None:
        while stream.requests:
            if not stream.works:
                if stream.planning or not stream.planned_all:
                    return
                request_id, _ = stream.requests.popleft()
                stream.send(request_id, stream.error or messages.EndOfStream(stream.stream_id))
                continue
            work = stream.works[0]
            if work.phase is Phase.FAILED:
                assert work.error is not None
                stream.send(stream.requests.popleft()[0], work.error)
                return
            if work.phase is not Phase.READY:
                return
            self._lend(stream, work)

    def _lend(self, stream: StreamState, work: Work) -> None:
        assert work.assembled is not None
        assert work.slot is not None
        slab_id = next(self._numbers)
        stream.works.popleft()
        now = time.monotonic()
        times = work.dataset.account.told(work.stamps.stages(now), self._pool.worker_count, now)
        work.delivery.lent[slab_id] = Loan(work, stream.holder)
        stream.send(
            stream.requests.popleft()[0],
            messages.Slab(
                stream.stream_id,
                slab_id,
                work.slot,
                work.plan.batches,
                work.assembled.layout,
                copy_out=work.oversize or work.delivery.is_held_up,
                times=times,
            ),
        )


def _works_before(stream: StreamState) -> int:
    """How many its consumer takes before the first of it."""
    return len(stream.after.works) if stream.after is not None else 0
