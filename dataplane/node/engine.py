"""Carry out the scheduler's decisions: plans, fetches, tasks of workers, memory, answers.

The engine decides nothing itself. Everything here runs on the event loop and never waits. The end
of each plan, fetch, decoding or assembly becomes an event for the scheduler.

Invariants:
1. Events are handled one after the other: the effects of an event are carried out, in order, before
   the next event is passed to the scheduler.
2. Memory is allocated by the process that writes into it: fetchers, workers, and this module for
   its own writes. If the machine refuses memory, the task that needs it fails with that error.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from dataplane.arena.memfd import Arena
from dataplane.arena.slab_layout import NUMBER_BYTES
from dataplane.base.trace import Trace
from dataplane.model.errors import BudgetTooSmall, ClosedError, DataplaneError, NeighbourGone
from dataplane.model.records import Region
from dataplane.node.dataset import Dataset, EpochDatasets, heritage
from dataplane.node.delivery import (
    Called,
    DeliveryArena,
    ReplacedRows,
    Send,
    ServedStream,
    stall_error,
    working,
)
from dataplane.node.effects import (
    BlockSources,
    Delegating,
    KeptBlocks,
    LentBlocks,
    OtherBlocks,
)
from dataplane.node.fetch import BlockRead, Connect, Fetcher
from dataplane.node.neighbours import KnownNeighbours
from dataplane.node.pool import WorkerPool
from dataplane.node.pool_worker import PoolTask
from dataplane.plan.order import SampleOrder
from dataplane.rpc import tasks
from dataplane.rpc.fetches import HeldDecoded, NeighbourGave, Outcome, PartlyGiven
from dataplane.scheduler import events
from dataplane.scheduler.dataset import BlockName, DatasetLookup
from dataplane.scheduler.events import Planned, PlanSteps
from dataplane.scheduler.scheduler import Scheduler
from dataplane.scheduler.walk import Plan, Walk
from dataplane.store.faults import UNREACHABLE

# -- plans ----------------------------------------------------------------------------------------


class Planner:
    """Makes the plans of streams, in one thread. Call `plan` from the event loop; `report` is
    called there, too.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dataplane-plan")

    def plan(self, effect: PlanSteps, report: Callable[[Planned], None]) -> None:
        """Take the next plans of a walk."""
        future = self._thread.submit(effect.walk.next_plans, effect.count)
        loop = asyncio.get_running_loop()
        future.add_done_callback(
            lambda done: (
                None
                if done.cancelled() or loop.is_closed()
                else loop.call_soon_threadsafe(self._report, effect.stream_id, done, report)
            )
        )

    def _report(
        self, stream_id: int, done: Future[list[Plan]], report: Callable[[Planned], None]
    ) -> None:
        error = done.exception()
        if error is None:
            report(Planned(stream_id, done.result()))
            return
        self._trace.failed("plan", error=error)
        if not isinstance(error, DataplaneError):
            error = DataplaneError(f"planning failed: {type(error).__name__}: {error}")
        report(Planned(stream_id, error=error))

    def close(self) -> None:
        """Make no more plans."""
        self._thread.shutdown(wait=False, cancel_futures=True)


# -- the engine ------------------------------------------------------------------------------------

_INHERITED_AT_ONCE = 256
_COPY_URGENCY, _ASSEMBLE_URGENCY, _DECODE_URGENCY = -1, 0, 1


class _Ended(NamedTuple):
    """The end of a worker's task, the time when it began, and its duration."""

    result: tasks.ResultBody
    started: float
    took_s: float


class Engine:
    """The data path of a node."""

    def __init__(
        self,
        scheduler: Scheduler,
        arena: Arena,
        fetcher: Fetcher,
        pool: WorkerPool,
        trace: Trace,
        node_id: str = "",
        clock: Callable[[], float] = time.monotonic,
        neighbours: KnownNeighbours | None = None,
        connect: Connect | None = None,
    ) -> None:
        self.scheduler = scheduler
        """The scheduler. Others may read its counts; only the engine passes events to it."""
        self._arena, self._fetcher, self._pool = arena, fetcher, pool
        self._trace, self._node_id, self._clock = trace, node_id, clock
        self._planner = Planner(trace)
        neighbours = neighbours or KnownNeighbours()
        self.lent, self._kept = LentBlocks(neighbours, self._tell), KeptBlocks(fetcher, self._tell)
        self.replaced, self._others = ReplacedRows(trace), OtherBlocks(connect)
        self.delegating = Delegating(fetcher.origin, neighbours, self._tell, self.replaced.checked)
        self._datasets: dict[int, Dataset] = {}
        self._epochs = EpochDatasets(self._datasets, self.forget_dataset)
        self._reader_counts: Counter[int] = Counter()  # deliveries that read each dataset
        self._deliveries: dict[int, DeliveryArena] = {}
        self._streams: dict[int, ServedStream] = {}
        self._sources = BlockSources(scheduler.block, lambda number: self._datasets[number])
        self.numbers, self._stream_ids = itertools.count(1), itertools.count(1)
        """`numbers` yields unique names for arenas and for holders of slabs."""
        self._events: deque[events.Event] = deque()
        self._reads: list[BlockRead] = []
        """The blocks of the read request that is being collected."""
        self._holder = (0, 0)
        """The key of a block that did not fit into its room, and the worker that has decoded it."""
        self._is_deciding = False
        self._is_due = False
        self._carry_out: dict[type, Callable[[Any], None]] = {
            events.PlanSteps: lambda effect: self._planner.plan(effect, self._tell),
            events.Fetch: self._fetch,
            events.DecodeBlock: self._decode,
            events.ClearRestartIndexes: self._clear_restart_indexes,
            events.AssembleSlab: self._assemble,
            events.MakeElsewhere: self.delegating.make,
            events.GiveUpSlab: self.delegating.give_up,
            events.ExtractRows: self._extract,
            events.CopyKept: self._copy,
            events.Send: self._send,
            events.Advanced: self._send_progress,
            events.Stalled: self._send_stalled,
            events.AllPlanned: self._all_planned,
            events.ForgetBlock: self._forget_block,
            events.DropDelivery: self._drop_delivery,
            events.ResizePool: lambda effect: self._pool.resize(effect.count),
            events.Note: self._note,
            events.LendBlock: self.lent.lend,
            events.OnlyDecoded: self.lent.say_decoded,
            events.RefuseAsk: self.lent.say_no,
            events.KeepBlock: self._kept.keep,
            events.ScanDisk: self._kept.scan,
        }

    def close(self) -> None:
        """Stop all work."""
        self._planner.close()

    # -- events ----------------------------------------------------------------------------------

    def open_delivery(self, delivery: DeliveryArena) -> None:
        """Allow slabs to be made in this arena."""
        self._datasets |= {dataset.dataset_id: dataset for dataset in delivery.datasets}
        self._reader_counts.update(dataset.dataset_id for dataset in delivery.datasets)
        self._deliveries[delivery.delivery_id] = delivery
        number, layout, group = delivery.delivery_id, delivery.layout, delivery.group
        datasets = DatasetLookup(*(dataset.blocks for dataset in delivery.datasets))
        self._tell(events.DeliveryOpened(number, layout, datasets, group, delivery.is_declared))
        self.delegating.open(delivery)

    def close_delivery(self, delivery: DeliveryArena) -> None:
        """Close an arena that has no users left, when no worker writes into it any more."""
        self._tell(events.DeliveryClosed(delivery.delivery_id))
        self._pool.forget_slabs(delivery.datasets[0].dataset_id, delivery.delivery_id)

    def open_datasets(self) -> Iterator[tuple[str, Dataset]]:
        """Yield (job id, dataset) for each dataset of the jobs whose slabs this node makes, for
        trainers or for other nodes.
        """
        for delivery in self._deliveries.values():
            if delivery.job_id:
                for dataset in delivery.datasets:
                    yield delivery.job_id, dataset

    def scan_disk(self) -> None:
        """List the blocks on the disk; call this once, when the fetchers start."""
        self._kept.scan(events.ScanDisk())

    def forget_dataset(self, dataset: Dataset) -> None:
        """Drop the blocks of a dataset without readers as soon as they are not in use."""
        self._tell(events.DatasetForgotten(dataset.blocks))
        self._pool.forget_dataset(dataset.dataset_id)

    async def inherit(self, heir: Dataset, former: Dataset) -> None:
        """Forget the former dataset. The heir takes over its blocks in memory, if the heir has
        equal blocks.
        """
        formers = heritage(heir, former)
        if formers is not None:
            known = np.flatnonzero(former.blocks.marks.is_exact[formers])
            for at in range(0, len(known), _INHERITED_AT_ONCE):
                some = known[at : at + _INHERITED_AT_ONCE]
                inherited = events.BlocksInherited(heir.blocks, former.blocks, some, formers[some])
                self._tell(inherited)
                await asyncio.sleep(0)
        self.forget_dataset(former)

    def open_stream(
        self,
        delivery: DeliveryArena,
        walk: Walk,
        send: Send,
        holder: int,
        after: ServedStream | None = None,
        on_begun: Callable[[ServedStream], None] | None = None,
    ) -> ServedStream:
        """Open a consumer's stream, whose slabs `holder` will hold. Until the stream `after` is
        closed, the new stream gets only resources that `after` leaves. `on_begun` is called once,
        after the first slab was sent.
        """
        maps = dict.fromkeys(dataset.message.view.map for dataset in delivery.datasets)
        number, named = next(self._stream_ids), ", ".join(filter(None, maps))
        stream = ServedStream(number, walk, send, on_begun=on_begun, maps=named)
        self._streams[stream.stream_id] = stream
        before = None if after is None else after.stream_id
        epoch, place = walk.stream.epoch, delivery.delivery_id
        own = self._epochs.of_stream(number, epoch, delivery.datasets)
        self._tell(events.StreamStarted(number, place, walk, holder, before, own))
        return stream

    def adopt_stream(self, stream: ServedStream, send: Send) -> None:
        """Hand a stream that was opened ahead to its consumer, whose requests `send` answers from
        now on.
        """
        stream.send = send
        self._tell(events.StreamAdopted(stream.stream_id))

    def expect_next(self, stream: ServedStream, order: SampleOrder) -> None:
        """Keep blocks for the order that a stream's consumer should read next."""
        if not (stream.is_closed or self._epochs.is_read(stream.stream_id)):
            self._tell(events.NextOrderKnown(stream.stream_id, order))

    def close_stream(self, stream: ServedStream) -> None:
        """Close a stream whose consumer is gone or needs no more slabs. May be called twice."""
        if not stream.is_closed:
            stream.is_closed = True
            self._tell(events.StreamClosed(stream.stream_id))
            self._epochs.close(stream.stream_id)

    def refuse_stream(self, stream: ServedStream, error: DataplaneError) -> None:
        """Answer the consumer's requests with this error."""
        self._tell(events.StreamRefused(stream.stream_id, error))

    def when_planned(self, stream: ServedStream, call: Callable[[], None]) -> None:
        """Run `call` once, when the last step of the stream is planned, or now if it already is."""
        stream.on_planned = call
        stream.tell_planned()

    def request(self, stream: ServedStream, request_id: int) -> None:
        """Note that the consumer wants its next slab."""
        self._tell(events.Requested(stream.stream_id, request_id))

    def release(self, delivery: DeliveryArena, slab_ids: Sequence[int]) -> None:
        """Free these slabs, which the trainer has released; unknown ones were released before."""
        self._tell(events.Released(delivery.delivery_id, slab_ids))

    def release_all(self, delivery: DeliveryArena, holder: int) -> None:
        """Free all slabs of a holder that is gone."""
        self._tell(events.HolderGone(delivery.delivery_id, holder))

    def tick(self) -> None:
        """Report to the scheduler that time has passed; call this about twice a second."""
        self._fetcher.tick()
        busy, bytes_per_s = self._pool.tick()
        self._tell(events.Ticked(busy, bytes_per_s, self._pool.at_work))

    # -- deciding --------------------------------------------------------------------------------

    def _tell(self, event: events.Event) -> None:
        self._events.append(event)
        if self._is_deciding:
            return
        self._is_deciding = True
        try:
            while self._events:
                self._decide(self._events.popleft())
        finally:
            self._is_deciding = False
        if not (self.scheduler.is_settled or self._is_due):
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        self._is_due = False
        self._tell(events.Settled())

    def _decide(self, event: events.Event) -> None:
        for effect in self.scheduler.decide(event, self._clock()):
            self._carry_out[type(effect)](effect)
        self._start_reads()
        if isinstance(event, events.StreamClosed):
            self._streams.pop(event.stream_id, None)

    # -- plans -----------------------------------------------------------------------------------

    def _all_planned(self, effect: events.AllPlanned) -> None:
        stream = self._streams[effect.stream_id]
        stream.is_planned, stream.has_failed = True, effect.has_failed
        stream.tell_planned()

    # -- blocks ----------------------------------------------------------------------------------

    def _fetch(self, effect: events.Fetch) -> None:
        into, key, name = effect.into, effect.key, BlockName(effect.dataset_id, effect.block)
        dataset = self._datasets[effect.dataset_id]
        jobs = (job_id for job_id, other in self.open_datasets() if other is dataset)
        neighbour, kept = (
            self.lent.source_of(dataset, effect, jobs),
            self._kept.asked(dataset, effect),
        )
        if neighbour is None and effect.is_decoded:
            self._start_reads()
            self._on_fetched(key, name, NeighbourGone(f"block {effect.block} has another owner"))
            return
        raw = dataset.raw_block(effect.block, into)
        copied_to = None if dataset.is_decoded(effect.block) else self._arena
        report = partial(self._on_fetched, key, name)
        of, size = (dataset.digest, effect.block, kept), self._arena.size_bytes
        read = BlockRead(key, raw, into, report, copied_to, neighbour, *of)
        if not (effect.is_joined and self._reads and read.may_follow(self._reads, size)):
            self._start_reads()
        self._reads.append(read)

    def _start_reads(self) -> None:
        reads, self._reads = self._reads, []
        if reads:
            self._fetcher.fetch(reads)

    def _on_fetched(self, key: int, name: BlockName, outcome: Outcome) -> None:
        of = self.lent.fetched(name, outcome), self._kept.has_read(name)
        if isinstance(outcome, HeldDecoded):
            self._tell(events.BlockFetched(key, decoded_bytes=outcome.length))
            return
        assert not isinstance(outcome, PartlyGiven), "an end of several blocks"
        given, error = (
            (outcome.length, None) if isinstance(outcome, NeighbourGave) else (0, outcome)
        )
        is_away = isinstance(error, (*UNREACHABLE, NeighbourGone))
        dataset = self._datasets.get(name.dataset_id)
        is_lost = dataset is not None and self._others.may_replace(dataset, error)
        self._tell(events.BlockFetched(key, error, is_away, 0, *of, given, is_lost))

    def _decode(self, effect: events.DecodeBlock, bad: tasks.BadBlock | None = None) -> None:
        dataset, key = self._datasets.get(effect.dataset_id), effect.key
        if dataset is None:  # the dataset was closed while another block was read
            self._tell(events.BlockDecoded(key, ClosedError("its dataset was closed"), 0.0))
            return
        raw, arenas = self._fetcher.for_worker(key, dataset.raw_block(effect.block, effect.raw))
        task = PoolTask(
            body=tasks.Decode(dataset.dataset_id, raw, effect.into, bad),
            dataset=dataset.message,
            arenas=((tasks.BLOCK_ARENA, self._arena.fd), *arenas),
            report=lambda result: self._on_decoded(effect, dataset, task, result),
            place=partial(dataset.place, effect.block),
        )
        if bad is None and effect.lost is not None:
            self._on_decoded(effect, dataset, task, effect.lost)
            return
        holder, self._holder = self._holder, (0, 0)
        if holder[0] == key:
            task.worker = holder[1]
        self._pool.submit(task, _DECODE_URGENCY)

    def _on_decoded(
        self, effect: events.DecodeBlock, dataset: Dataset, task: PoolTask, result: tasks.ResultBody
    ) -> None:
        key, again = effect.key, partial(self._on_decoded, effect, dataset, task)
        if self._others.read(dataset, effect, result, partial(self._decode, effect), again):
            return
        if isinstance(result, tasks.Decoded):
            if result.stored:
                self._fetcher.let_go(key)
            else:
                self._holder = key, task.worker
        self._tell(events.BlockDecoded(key, result, task.began))
        self._holder = (0, 0)

    def _clear_restart_indexes(self, effect: events.ClearRestartIndexes) -> None:
        region = effect.region
        try:
            self._arena.reserve(region.offset, region.length)
        except BudgetTooSmall:
            self._sources.leave_out_restart_indexes(effect.key)
            return
        np.frombuffer(self._arena.view(region.offset, region.length), np.uint8)[:] = 0

    def _forget_block(self, effect: events.ForgetBlock) -> None:
        self._pool.forget_block(effect.key)
        self._fetcher.let_go(effect.key)
        self._sources.forget(effect.key)

    def _extract(self, effect: events.ExtractRows) -> None:
        number, key, block = effect.number, effect.key, self.scheduler.block(effect.key)
        dataset, source = self._datasets[block.dataset.dataset_id], self._sources.source(key)
        try:
            for excerpt in effect.excerpts:
                self._arena.reserve(excerpt.into.offset, NUMBER_BYTES * len(excerpt.rows))
        except BudgetTooSmall as error:
            self._tell(events.RowsExtracted(number, error, 0.0))
            return
        for excerpt in effect.excerpts:
            into = self._arena.view(excerpt.into.offset, NUMBER_BYTES * len(excerpt.rows))
            np.frombuffer(into, np.int32)[:] = excerpt.rows
        places = tuple(
            tasks.ExcerptPlace(excerpt.into, len(excerpt.rows), *excerpt.packs)
            for excerpt in effect.excerpts
        )
        task = PoolTask(
            body=tasks.Extract(dataset.dataset_id, key, places),
            dataset=dataset.message,
            arenas=((tasks.BLOCK_ARENA, self._arena.fd),),
            source=lambda _: source,
            report=lambda result: self._tell(events.RowsExtracted(number, result, task.began)),
            place=partial(dataset.place, block.index),
        )
        self._pool.submit(task, _ASSEMBLE_URGENCY)

    # -- slabs -----------------------------------------------------------------------------------

    def _assemble(self, effect: events.AssembleSlab) -> None:
        delivery = self._deliveries[effect.delivery_id]
        arena, index, keep = delivery.arena, effect.row_index, effect.keep
        if keep is not None:
            try:
                self._arena.reserve(keep.offset, keep.length)
            except BudgetTooSmall:
                keep = None
        try:
            arena.reserve(index.offset, index.length)
        except BudgetTooSmall as error:
            self._tell(events.SlabAssembled(effect.number, error, 0.0, is_kept=False))
            return
        into = np.frombuffer(arena.view(index.offset, index.length), np.int32)
        into[:] = effect.plan.row_index.reshape(-1)
        delivery.count_sources(effect.plan)
        body = tasks.Assemble(
            delivery.datasets[0].dataset_id, effect.keys, index, effect.plan.batches,
            effect.delivery_id, effect.slab, effect.render, keep=keep,
            **effect.plan.packs_told, sources=delivery.sources_of(effect.plan.blocks),
            names_sources=delivery.names_sources,
            collate=delivery.collate(effect.collate),
        )  # fmt: skip
        rows, count, ends = effect.plan.row_count, effect.pieces, dict[int, _Ended]()

        def ended(piece: int, end: _Ended) -> None:
            ends[piece] = end
            if len(ends) == count:  # pass on in order: the first piece's error is reported
                self._assembled(effect, [ends[at] for at in range(count)], keep)

        for at in range(count):
            first, end = rows * at // count, rows * (at + 1) // count
            part = replace(body, keep=None, first_row=first, row_count=end - first)
            some = body if count == 1 else part
            self._submit(effect, some, _ASSEMBLE_URGENCY, partial(ended, at))

    def _assembled(
        self, effect: events.AssembleSlab, ends: Sequence[_Ended], keep: Region | None
    ) -> None:
        """Handle the end of all pieces of a slab. If there are several, none of them has made the
        copy in `keep`: make it now.
        """
        result, started = _joined(ends), min(end.started for end in ends)
        worker_s = sum(end.took_s for end in ends)
        result = self.replaced.checked(self._deliveries[effect.delivery_id], result)

        def report(*, is_kept: bool) -> None:
            number = effect.number
            assembled = events.SlabAssembled(number, result, started, is_kept, worker_s=worker_s)
            self._tell(assembled)

        used = result.bytes_used if isinstance(result, tasks.Assembled) else 0
        if keep is None or len(ends) == 1 or not 0 < used <= keep.length:
            report(is_kept=keep is not None)
            return
        kept, slab = Region(keep.offset, used), Region(effect.slab.offset, used)
        body = tasks.CopySlab(kept, effect.delivery_id, slab, keep=True)
        self._submit(
            effect, body, _COPY_URGENCY,
            lambda end: report(is_kept=isinstance(end.result, tasks.Done)),
        )  # fmt: skip

    def _copy(self, effect: events.CopyKept) -> None:
        def ended(end: _Ended) -> None:
            self._tell(events.SlabAssembled(effect.number, end.result, end.started))

        body = tasks.CopySlab(effect.kept, effect.delivery_id, effect.slab)
        self._submit(effect, body, _COPY_URGENCY, ended)

    def _submit(
        self,
        effect: events.AssembleSlab | events.CopyKept,
        body: tasks.Assemble | tasks.CopySlab,
        urgency: int,
        ended: Callable[[_Ended], None],
    ) -> None:
        delivery = self._deliveries[effect.delivery_id]

        def report(result: tasks.ResultBody) -> None:
            ended(_Ended(result, task.began, task.own_s(result, time.monotonic())))

        task = PoolTask(
            body=body,
            dataset=delivery.datasets[0].message,
            arenas=(
                (tasks.BLOCK_ARENA, self._arena.fd),
                (delivery.delivery_id, delivery.arena.fd),
            ),
            source=self._sources.source,
            dataset_of=self._sources.message_of,
            report=report,
            place=partial(self._sources.place, effect.first),
            place_of=self._sources.place_of,
        )
        self._pool.submit(task, urgency)

    def _drop_delivery(self, effect: events.DropDelivery) -> None:
        self._pool.detach_arena(effect.delivery_id)
        self.delegating.drop(effect.delivery_id)
        delivery = self._deliveries.pop(effect.delivery_id)
        arena = delivery.arena
        last_view = arena.buffer[:0]
        arena.close()
        # Unmap in a thread: the kernel may have to free a gigabyte.
        asyncio.get_running_loop().run_in_executor(None, last_view.release)
        for dataset in delivery.datasets:  # not all in `_datasets`: there may be thousands
            self._reader_counts[dataset.dataset_id] -= 1
            if not self._reader_counts[dataset.dataset_id]:
                del self._reader_counts[dataset.dataset_id], self._datasets[dataset.dataset_id]

    # -- answers ---------------------------------------------------------------------------------

    def _send(self, effect: events.Send) -> None:
        self._streams[effect.stream_id].answer(effect.request_id, effect.body)

    def _send_progress(self, effect: events.Advanced) -> None:
        stream = self._streams[effect.stream_id]
        stream.send(effect.request_id, working(effect.progress, self._called(stream)))

    def _send_stalled(self, effect: events.Stalled) -> None:
        stream = self._streams[effect.stream_id]
        urls = [self._datasets[name].url(block) for name, block in effect.missing]
        called = self._called(stream)
        error = stall_error(effect, urls, called, self._node_id, self._fetcher.trouble)
        stream.send(effect.request_id, error)

    def _called(self, stream: ServedStream) -> Called:
        collate = stream.walk.collate
        return Called(stream.maps, "" if collate is None else collate.function)

    def _note(self, effect: events.Note) -> None:
        say = self._trace.failed if effect.is_failure else self._trace.noted
        say(effect.event, **effect.facts)


def _joined(ends: Sequence[_Ended]) -> tasks.ResultBody:
    """Combine the results of a slab's pieces, each of which describes the whole slab."""
    made = [end.result for end in ends if isinstance(end.result, tasks.Assembled)]
    if len(made) < len(ends):
        return next(end.result for end in ends if not isinstance(end.result, tasks.Assembled))
    if any(piece.layout != made[0].layout for piece in made):
        return DataplaneError("pieces of one slab have different layouts: please report this bug")
    rows = tuple(row for piece in made for row in piece.replaced)
    return replace(made[0], disk=sum(piece.disk for piece in made), replaced=rows)
