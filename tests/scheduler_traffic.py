"""Checks the scheduler's invariants on its traffic: events in, effects out."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace
from scheduler_joined import Joined
from scheduler_makers import stage_elsewhere
from scheduler_shares import PLANNED_AHEAD, check_fits, check_makes, planned_together
from scheduler_times import Times

from dataplane.arena.allocator import rounded
from dataplane.model.records import Region
from dataplane.plan.order import SampleOrder
from dataplane.rpc import messages, tasks
from dataplane.scheduler import events
from dataplane.scheduler.dataset import Account, DatasetLookup
from dataplane.scheduler.records import CachedBlock, SlabPhase, SlabTask, StreamState
from dataplane.scheduler.scheduler import Scheduler
from dataplane.scheduler.walk import SlabSizes
from dataplane.transforms.restart_indexes import restart_index_bytes


def number_of(datasets: DatasetLookup, dataset_id: int, block: int) -> int | None:
    """A block's number in orders over these datasets, if it belongs to one of them."""
    for dataset in datasets.datasets:
        if dataset.dataset_id == dataset_id:
            return datasets.number(dataset, block)
    return None


def is_of(task: SlabTask, effect: events.Fetch | events.DecodeBlock) -> bool:
    """Whether a task needs the block that is loaded."""
    number = number_of(task.datasets, effect.dataset_id, effect.block)
    return number is not None and task.needs(number)


NEVER = np.iinfo(np.int64).max


class ExactUses:
    """Of the blocks of one scheduler, none of whose streams can copy a kept slab."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._spans: dict[int, tuple[SampleOrder, list[int], list[int]]] = {}

    def use(
        self, dataset_id: int, block: int, guest_of: Sequence[SampleOrder] | None = None
    ) -> int:
        """How far away the block is needed again, at the soonest: by a stream, or by the one that
        follows it; if a neighbour owns it, by streams of the orders that it was read for. Slabs are
        handed over before anything is evicted.
        """
        soonest = NEVER
        for order, position, first, is_open in self._needs(dataset_id, block):
            if guest_of is None or (is_open and any(order is each for each in guest_of)):
                soonest = min(soonest, max(first - position, 0))
        return soonest

    def orders_now(self, dataset_id: int, block: int) -> list[SampleOrder]:
        """The orders that a neighbour's block is read for."""
        needs = [each for each in self._needs(dataset_id, block) if each[3]]
        now = [order for order, position, _, _ in needs if position >= 0]
        if now or not needs:
            return now
        return [min(needs, key=lambda each: each[2] - each[1])[0]]

    def _needs(self, dataset_id: int, block: int) -> Iterator[tuple[SampleOrder, int, int, bool]]:
        """Each order that needs the block, how far it has been read, where it is needed first, and
        whether a stream is open.
        """
        for stream in self._scheduler._streams._streams.values():
            datasets = stream.delivery.datasets
            number = number_of(datasets, dataset_id, block)
            if number is None:
                continue
            before = stream.after
            away = _left(before) if before is not None and not before.closed else 0
            readings = [(stream.walk.order, stream.position - away, True)]
            if stream.next_order is not None:
                readings.append((stream.next_order, -_left(stream), False))
            for order, position, is_open in readings:
                first, last = self._span(order, int(datasets.starts[-1]))
                if last[number] >= position:
                    yield order, position, first[number], is_open

    def _span(self, order: SampleOrder, block_count: int) -> tuple[list[int], list[int]]:
        found = self._spans.get(id(order))
        if found is None:
            first, last = order.block_span(np.arange(block_count))
            found = self._spans[id(order)] = order, first.tolist(), last.tolist()
        return found[1:]


def _left(stream: StreamState) -> int:
    return max(0, stream.walk.order.sample_count - stream.position)


class Before(Struct, frozen=True):
    """What could be evicted before an event and where it was, what was free, the blocks that were
    sent to neighbours, and those that were kept for them, until others are read. `is_alone`: no
    slab is kept, which would change how far a walk has come while it is decided.
    """

    evictable: dict[int, CachedBlock]
    regions: dict[int, tuple[Region, ...]]
    free: list[tuple[int, int]]
    lent: set[int]
    kept: set[int]
    is_alone: bool
    emptied_for: SlabTask | None


def check_evicted(
    scheduler: Scheduler,
    before: Before,
    gone: Sequence[int],
    effect: events.Fetch | events.DecodeBlock,
    use_of: Callable[[int], int],
    forgotten: set[int],
    *,
    is_first: bool,
) -> None:
    """What went for this block is needed later than it, unless it is the head's; and had only those
    gone that are needed later still, there would be no room. Where it is not urgent, what tasks or
    neighbours wait for stays instead. `use_of` tells how far away a block is needed, by key.
    `is_first`: nothing else was loaded since `before`. Blocks of a forgotten dataset go for nothing.
    """
    gone = [key for key in gone if key not in forgotten]
    mine, is_lent = use_of(effect.key), isinstance(effect, events.Fetch) and effect.is_lent
    going = [use_of(key) for key in gone if not (is_lent and key in before.lent)]
    if scheduler._head is None or not is_of(scheduler._head, effect):
        assert all(each > mine or each == NEVER for each in going), "blocks 3: needed sooner"
    block = scheduler._blocks._by_key.get(effect.key)
    if not is_first or not going or block is None:
        return
    may_be_asked, first = scheduler._blocks.holdings.may_be_asked, min(going)
    later, kept = list[int](), list[int]()
    for key, other in before.evictable.items():
        if key in gone and use_of(key) > first:
            later.append(key)
        elif key not in forgotten and key != effect.key and other.is_evictable:
            is_kept = other.is_wanted or may_be_asked(other) or key in before.kept
            (kept if is_kept else later).extend([key] * (use_of(key) > first))
    needs = [rounded(effect.into.length)]
    if isinstance(effect, events.Fetch) and block.decoded not in {None, effect.into}:
        needs.append(rounded(block.decoded.length))
    assert not _has_room(before, later, needs) or not _has_room(before, [*later, *kept], needs), (
        "blocks 3: another is needed later"
    )


def _has_room(before: Before, keys: Sequence[int], needs: Sequence[int]) -> bool:
    """Whether all of this would have found room in one piece if these blocks had gone."""
    taken = [region for key in keys for region in before.regions[key]]
    free = sorted([*before.free, *((each.offset, rounded(each.length)) for each in taken)])
    extents = list[list[int]]()
    for at, length in free:
        if extents and sum(extents[-1]) == at:
            extents[-1][1] += length
        else:
            extents.append([at, length])
    return any(length >= sum(needs) for _, length in extents)


_WORKERS, _WORKERS_MAX = 2, 4


class Traffic:
    """All effects that have not completed, and the memory lent to them."""

    def __init__(self, scheduler: Scheduler, fetch_count: int, stall_s: float) -> None:
        self._scheduler = scheduler
        self._stall_s = stall_s
        self._workers = _WORKERS
        self._blocks: dict[int, tuple[int, int]] = {}
        self._forgotten: set[int] = set()
        self._nowhere: set[int] = set()
        self._loading: dict[int, tuple[int, int]] = {}
        self._joined = Joined(scheduler, fetch_count)
        self._busy: dict[tuple[str, int], list[Region]] = {}
        self._planning: set[int] = set()
        self.told = np.zeros(4, np.int64)
        """Bytes read, microseconds of disk time, bytes of neighbours and of memory, as reported in
        the times of slabs.
        """
        self.times = Times()
        self._is_settling = False
        self._making: dict[int, int] = {}
        self._sizes: dict[int, SlabSizes] = {}
        self._copying: dict[int, int] = {}
        self._in_use: Counter[int] = Counter()
        self._requests: defaultdict[int, deque[int]] = defaultdict(deque)
        self._layouts: dict[int, events.DeliveryOpened] = {}
        self._lent: dict[int, tuple[int, int, bool]] = {}
        self._closed: set[int] = set()
        self._dropped: set[int] = set()
        self._streams: dict[int, events.StreamStarted] = {}
        self._makes: dict[int, tuple[int, int, Sequence[int]]] = {}
        """The batches, bytes and keys of each slab that is made."""
        self._uses = ExactUses(scheduler)
        self._guests: dict[int, list[SampleOrder]] = {}

    # -- events ----------------------------------------------------------------------------------

    def before(self, event: events.Event, now: float) -> Before | None:
        """Call it before each event, and pass the result to `after`."""
        self.times.before(event, now)
        self._is_settling = isinstance(event, events.Settled)
        match event:
            case events.DeliveryOpened():
                self._layouts[event.delivery_id] = event
            case events.DeliveryClosed():
                self._closed.add(event.delivery_id)
                self._take_back(event.delivery_id)
            case events.StreamStarted():
                self._streams[event.stream_id] = event
                self._sizes[event.stream_id] = replace(event.walk.sizes)
            case events.StreamClosed():
                self._requests.pop(event.stream_id, None)
            case events.Requested():
                self._requests[event.stream_id].append(event.request_id)
            case events.Released():
                for slab_id in event.slab_ids:
                    self._lent.pop(slab_id, None)
            case events.HolderGone():
                self._take_back(event.delivery_id, event.holder)
            case events.Planned():
                self._planning.remove(event.stream_id)
            case events.BlockFetched():
                self._joined.ended(event.key)
                self._end(event.key)
                if event.is_guest:
                    self._guests[event.key] = self._uses.orders_now(*self._blocks[event.key])
            case events.BlockDecoded():
                is_local = len(self._busy["block", event.key]) == 1
                if is_local and isinstance(event.result, tasks.Decoded) and not event.result.stored:
                    self._nowhere.add(event.key)  # nothing of it is anywhere
                self._end(event.key)
            case events.SlabAssembled():
                self._learn(event)
                self._busy.pop(("slab", event.number), None)
                del self._making[event.number]
                _, _, keys = self._makes.pop(event.number, (0, 0, ()))
                self._in_use.subtract(keys)
            case events.RowsExtracted():
                del self._busy["excerpts", event.number]
                self._in_use[self._copying.pop(event.number)] -= 1
            case events.SendingEnded():
                del self._busy["given", event.number]
            case events.Settled():
                return self._snapshot()
        return None

    def _take_back(self, delivery_id: int, holder: int | None = None) -> None:
        self._lent = {
            slab_id: loan
            for slab_id, loan in self._lent.items()
            if loan[0] != delivery_id or holder not in {None, loan[1]}
        }

    def _learn(self, event: events.SlabAssembled) -> None:
        """What a slab tells of the sizes of batches."""
        task, result = self._scheduler._tasks._assembling[event.number], event.result
        walk = task.stream.walk
        is_wanted = task.phase is not SlabPhase.GONE and not walk.is_aligned
        if is_wanted and isinstance(result, tasks.Assembled) and result.batch_count:
            count, slab_bytes, _ = self._makes[event.number]
            is_cut = result.batch_count < count
            self._sizes[task.stream.stream_id].fitted(
                result.batch_count, result.bytes_used, slab_bytes, cut=is_cut
            )

    def _end(self, key: int) -> None:
        del self._loading[key]
        del self._busy["block", key]

    def _snapshot(self) -> Before | None:
        """What blocks 3 needs."""
        emptied_for = self._scheduler._emptied_for
        if self._scheduler._deliveries.groups:
            nothing = Before({}, {}, [], set(), set(), False, emptied_for)
            return None if emptied_for is None else nothing
        blocks = self._scheduler._blocks._by_key
        evictable = {key: block for key, block in blocks.items() if block.is_evictable}
        holdings = self._scheduler._blocks.holdings
        lent, kept = {*holdings._lent}, {*holdings._recent}
        evictable = {key: block for key, block in evictable.items() if block.regions}
        regions = {key: block.regions for key, block in evictable.items()}
        free = self._scheduler._blocks._allocator.free_extents()
        return Before(evictable, regions, free, lent, kept, True, emptied_for)

    # -- effects ---------------------------------------------------------------------------------

    def after(
        self, event: events.Event, before: Before | None, effects: list[events.Effect]
    ) -> None:
        """Check the effects of each event.

        Raises:  AssertionError: names the invariant.
        """
        self._effects(before, effects)
        match event:
            case events.SlabAssembled():
                for stream in self._scheduler._streams:
                    assert stream.walk.sizes == self._sizes[stream.stream_id], "walk 2"
            case events.Planned():
                check_fits(self._scheduler, event, self.times.now)
            case events.Settled():
                check_makes(self._scheduler, effects)
            case events.Requested():
                self._check_answered(event.stream_id)
            case events.Ticked():
                for stream_id, asked in self._requests.items():
                    if self._has_advanced(stream_id):
                        continue
                    waits = [i for i in asked if self.times.waited_s(stream_id, i) > self._stall_s]
                    assert not waits, "a request waits, and nobody is told"

    def _check_answered(self, stream_id: int) -> None:
        stream = self._scheduler._streams.find(stream_id)
        if stream is not None and stream.requests and stream.tasks:
            is_made = stream.tasks[0].phase in {SlabPhase.READY, SlabPhase.FAILED}
            assert not is_made, "what is made is not handed over at once"

    def _plan(self, effect: events.PlanSteps) -> None:
        assert effect.stream_id not in self._planning, "scheduler 6"
        self._planning.add(effect.stream_id)
        stream = self._scheduler._streams._streams[effect.stream_id]
        count = len(stream.tasks)
        assert effect.count == planned_together(count)
        most = self._scheduler._passes.plans_ahead(stream)
        assert most == PLANNED_AHEAD or self._scheduler._excerpts.is_open
        assert count + effect.count <= most + stream.delivery.ahead

    def _effects(self, before: Before | None, effects: list[events.Effect]) -> None:
        gone: list[int] = []
        is_first = True
        for effect in effects:
            self.times.effect(effect, self._lent_by(effect))
            match effect:
                case events.Fetch() | events.DecodeBlock():
                    if before is not None and before.is_alone and gone:
                        self._check_evicted(before, gone, effect, is_first=is_first)
                    if before is not None and before.emptied_for is not None:
                        self._check_emptied(before.emptied_for, effect)
                    gone, is_first = [], False
                    self._load(effect)
                case events.ClearRestartIndexes():
                    assert not gone, "blocks 5: something was evicted for restart indexes"
                    is_short = self._scheduler._emptied_for is not None and not self._is_settling
                    assert not is_short, "blocks 5: restart indexes while one task needs all"
                    self._check_restart_indexes(effect)
                case events.ForgetBlock():
                    self._forget(effect.key)
                    gone.append(effect.key)
                case events.PlanSteps():
                    self._plan(effect)
                case events.Note():
                    gone = []  # for the room of excerpts
                case events.ExtractRows():
                    self._extract(effect)
                case events.AssembleSlab() | events.CopyKept() | events.MakeElsewhere():
                    gone = []
                    self._make(effect)
                case events.LendBlock():
                    self._busy["given", effect.number] = [effect.region]
                case events.Send() | events.Stalled():
                    self._answer(effect)
                case events.Advanced():
                    assert self._requests[effect.stream_id][0] == effect.request_id, "stalls 2"
                case events.DropDelivery():
                    self._drop(effect.delivery_id)
                case events.ResizePool():
                    assert 1 <= effect.count <= _WORKERS_MAX, "autoscaler 1"
                    assert effect.count != self._workers, "autoscaler: as many as there are"
                    self._workers = effect.count

    def _lent_by(self, effect: events.Effect) -> SlabTask | None:
        if not isinstance(effect, events.Send) or not isinstance(effect.body, messages.Slab):
            return None
        delivery = self._scheduler._deliveries.by_id[self._streams[effect.stream_id].delivery_id]
        return delivery.lent[effect.body.slab_id].task

    def _check_restart_indexes(self, effect: events.ClearRestartIndexes) -> None:
        self._check_free(effect.region)
        block = self._scheduler._blocks._by_key.get(effect.key)
        if block is None:
            return  # it went at once
        place = block.decoded or block.raw
        length = place.length if place is not None else int(block.dataset.stored[block.index])
        assert effect.region.length == restart_index_bytes(length)
        assert block.dataset.keeps_restart_indexes
        streams = self._scheduler._streams._streams.values()
        assert any(s.walk.crops and block.dataset in s.delivery.datasets for s in streams)

    def _load(self, effect: events.Fetch | events.DecodeBlock) -> None:
        key, block = effect.key, (effect.dataset_id, effect.block)
        assert block not in self._loading.values(), "blocks 1: loaded twice at once"
        assert self._blocks.setdefault(key, block) == block, "blocks 4: a key used again"
        assert key not in self._forgotten, "blocks 4: a key used again"
        regions = [effect.into]
        self._check_free(effect.into)
        if isinstance(effect, events.Fetch):
            self._joined.check(effect)
        elif effect.raw is not None:
            regions.append(effect.raw)
        self._loading[key] = block
        self._busy["block", key] = regions

    def _check_free(self, region: Region) -> None:
        for busy in self._busy.values():
            for each in busy:
                is_beside = (
                    region.offset + region.length <= each.offset
                    or each.offset + each.length <= region.offset
                )
                assert is_beside, "scheduler 6: memory that is written or read was given away"

    def _forget(self, key: int) -> None:
        assert key not in self._forgotten, "blocks 4: forgotten twice"
        assert key not in self._loading, "scheduler 6: forgotten while it is loaded"
        assert not self._in_use[key], "slab_tasks 1: forgotten while rows are gathered from it"
        self._forgotten.add(key)

    def _make(self, effect: events.AssembleSlab | events.CopyKept | events.MakeElsewhere) -> None:
        assert effect.number not in self._making, "scheduler 6"
        assert effect.delivery_id not in self._closed, "a slab that nobody wants"
        self._making[effect.number] = effect.delivery_id
        if isinstance(effect, events.CopyKept):
            self._busy["slab", effect.number] = [effect.kept]
            return
        if isinstance(effect, events.MakeElsewhere):
            self._makes[effect.number] = effect.steps.count, effect.slab.length, ()
            return
        self._makes[effect.number] = len(effect.plan.batches), effect.slab.length, effect.keys
        self._in_use.update(effect.keys)
        if effect.keep is not None:
            self._check_free(effect.keep)
            self._busy["slab", effect.number] = [effect.keep]

    def _extract(self, effect: events.ExtractRows) -> None:
        for excerpt in effect.excerpts:
            self._check_free(excerpt.into)
        self._busy["excerpts", effect.number] = [each.into for each in effect.excerpts]
        self._copying[effect.number] = effect.key
        self._in_use[effect.key] += 1

    def _answer(self, effect: events.Send | events.Stalled) -> None:
        asked = self._requests[effect.stream_id]
        assert asked, "scheduler 1: an answer that nobody waits for"
        assert asked.popleft() == effect.request_id, "scheduler 1: not the request that is next"
        if isinstance(effect, events.Stalled):
            assert effect.waited_s > self._stall_s
            self._check_stage(effect)
            return
        if not isinstance(effect.body, messages.Slab):
            return
        slab, opened = effect.body, self._streams[effect.stream_id]
        layout = self._layouts[opened.delivery_id].layout
        is_zone = slab.region.offset == layout.slot_bytes * layout.slot_count
        self._lent[slab.slab_id] = opened.delivery_id, opened.holder, is_zone
        held = sum(d == opened.delivery_id and not z for d, _, z in self._lent.values())
        is_held_up = held > layout.held_slots
        assert slab.copy_out == (is_zone or is_held_up), "scheduler 5"
        times = slab.times
        stages = (times.fetch, times.decode, times.room, times.queue, times.assemble, times.ready)
        assert min(stages) >= 0, "account: a stage that took less than no time"
        self.told += [times.read_bytes, times.disk, times.neighbour_bytes, times.memory_bytes]

    def _has_advanced(self, stream_id: int) -> bool:
        """Whether something was done for a stream within the stall timeout."""
        stream = self._scheduler._streams._streams.get(stream_id)
        if stream is None:
            return False
        accounts = [each.account for each in stream.delivery.datasets.datasets]
        latest = max(stream.advanced_at, *(account.advanced_at for account in accounts))
        return self.times.now - latest <= self._stall_s

    def _check_stage(self, effect: events.Stalled) -> None:
        """A rank that waits too long gets an error that says what its next slab waits for."""
        stream = self._scheduler._streams._streams[effect.stream_id]
        task = stream.tasks[0] if stream.tasks else None
        slab = None if task is None else self._scheduler._shared.find(task)
        elsewhere = None if task is None else stage_elsewhere(self._scheduler, task)
        if elsewhere is not None:
            assert effect.progress.stage.startswith(elsewhere)
            assert not effect.missing
            return
        if task is None:
            expected = "plan"
        elif task.phase is not SlabPhase.WAITING:
            expected = task.phase.name.lower()
        elif slab is not None and slab.made is None:
            expected = "being made for another job of its group"
        elif slab is None and task.missing:
            expected = "waiting for blocks"
        else:
            expected = "waiting for room in the delivery arena"
        assert effect.progress.stage == expected
        assert bool(effect.missing) == (expected == "waiting for blocks")

    def _drop(self, delivery_id: int) -> None:
        assert delivery_id not in self._dropped, "a delivery is dropped twice"
        assert delivery_id in self._closed, "a delivery is dropped that is in use"
        assert delivery_id not in self._making.values(), "scheduler 6: a worker writes into it"
        self._dropped.add(delivery_id)

    def check_end(self, pending_count: int) -> None:
        """Check the end, when all is closed and all requested work has ended.

        Raises:  AssertionError: names the invariant.
        """
        left = (self._copying, self._planning, self._loading, self._making, self._busy)
        assert not pending_count, "scheduler 6"
        assert not any(left), "scheduler 6"
        assert self._dropped == set(self._layouts), "a delivery was never dropped"
        ready = set(self._blocks) - self._forgotten - self._nowhere
        assert not ready, "blocks of a forgotten dataset are still there"

    def _check_emptied(self, head: SlabTask, effect: events.Fetch | events.DecodeBlock) -> None:
        """scheduler 2: an arena that was emptied for the head is filled only for the head."""
        if self._scheduler._emptied_for is head:
            assert is_of(head, effect), "scheduler 2: it was emptied for another task"

    def _check_evicted(
        self,
        before: Before,
        gone: list[int],
        effect: events.Fetch | events.DecodeBlock,
        *,
        is_first: bool,
    ) -> None:
        names = {key: (b.dataset.dataset_id, b.index) for key, b in before.evictable.items()}
        names |= {**self._blocks, effect.key: (effect.dataset_id, effect.block)}

        def use_of(key: int) -> int:
            return self._uses.use(*names[key], self._guests.get(key))

        went = [key for key in gone if key in self._blocks]
        check_evicted(
            self._scheduler, before, went, effect, use_of, self._forgotten, is_first=is_first
        )


def untold(account: Account) -> npt.NDArray[np.int64]:
    """What was done and not told yet, as `Traffic.told`."""
    read, given, found = account.read_bytes, account.neighbour_bytes, account.memory_bytes
    return np.array([read, account.disk_us, given, found])
