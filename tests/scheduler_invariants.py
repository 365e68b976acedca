"""The numbered invariants of the scheduler's modules, checked from the inside after every event.

It runs some hundred times per history, so it makes one pass over everything. Invariants that are
visible in events and effects are checked in scheduler_traffic.py.
"""

from __future__ import annotations

from collections import Counter

from scheduler_makers import has_maker, is_elsewhere
from scheduler_shares import (
    PLANNED_AHEAD,
    count_of_slots,
    is_ahead,
    planned_together,
    share_of_slots,
)
from scheduler_times import Times
from scheduler_world import PAGE, World

from dataplane.scheduler.records import BlockPhase, SlabPhase, SlabTask, StreamState
from dataplane.scheduler.scheduler import Scheduler
from dataplane.scheduler.streams import _key

_Pins = dict[int, Counter[int]]
_Used = dict[int, list[int]]


class Invariants:
    """The invariants of one scheduler, over all datasets that it has seen."""

    def __init__(self, scheduler: Scheduler, worlds: list[World], times: Times) -> None:
        self._scheduler = scheduler
        self._times = times
        self._worlds = worlds
        self._needs: dict[int, tuple[object, list[int]]] = {}
        self._ready: set[int] = set()
        self._emptied: tuple[SlabTask | None, int] = None, 0
        assert scheduler.is_settled

    def check(self) -> None:
        """Raises:  AssertionError: names the invariant."""
        keys = {w.dataset_id: w.blocks.marks.keys.tolist() for w in self._worlds}
        self._check_blocks(keys)
        pins: _Pins = {w.dataset_id: Counter() for w in self._worlds}
        used: _Used = {delivery_id: [] for delivery_id in self._scheduler._deliveries.by_id}
        self._check_assembling(pins, used)
        self._check_tasks(keys, pins, used)
        self._check_excerpts(pins)
        for block in self._scheduler._borrowed._borrowed.values():
            pins[block.dataset.dataset_id][block.index] += block.lent
        self._check_slots(used)
        self._check_emptied()
        for world in self._worlds:
            found, expected = world.blocks.marks.pins.tolist(), pins[world.dataset_id]
            assert found == [expected[i] for i in range(len(found))], "scheduler 2: pins"

    def _blocks_of(self, task: SlabTask) -> list[int]:
        found = self._needs.get(id(task.plan))
        if found is None or found[0] is not task.plan:
            found = self._needs[id(task.plan)] = task.plan, task.plan.blocks.tolist()
        return found[1]

    def _whole_blocks_of(self, task: SlabTask) -> list[int]:
        return [block for block in self._blocks_of(task) if block not in task.excerpts]

    def _check_excerpts(self, pins: _Pins) -> None:
        """excerpts 1, 2 and 4: each is in memory once, within the pool, as long as a task needs it,
        and blocks are pinned while rows of them are copied.
        """
        excerpts, tasks = self._scheduler._excerpts, self._scheduler._tasks
        users: Counter[int] = Counter()
        waiting = {task for some in tasks._waiting._waiting.values() for task in some}
        for task in excerpts._holders:
            assert task.excerpts, "excerpts 1"
            assert task in waiting or task.number in tasks._assembling, "excerpts 1"
            users.update(excerpt.key for excerpt in task.excerpts.values())
            for number, excerpt in task.excerpts.items():
                assert task.datasets.find(number) == (excerpt.dataset, excerpt.index)
        holding = [task for task in waiting if task.excerpts]
        assert set(holding) <= set(excerpts._holders), "excerpts 1"
        assert users.keys() == excerpts._by_key.keys(), "excerpts 1"
        taken = 0
        owned = [excerpt.decoded for excerpt in excerpts._by_key.values()]
        for copying in excerpts._copying.values():
            pins[copying.block.dataset.dataset_id][copying.block.index] += 1
            owned += [part.excerpt.decoded for part in copying.parts]
        end = excerpts._pool_at
        for offset, length in sorted((each.offset, each.length) for each in owned):
            assert offset >= end, "excerpts 2: two owners"
            pages = -(-max(length, 1) // PAGE) * PAGE
            end, taken = offset + pages, taken + pages
        if excerpts._pool is None:
            assert not owned, "excerpts 2"
            return
        assert taken + excerpts._pool.free_bytes == excerpts.pool_bytes, "excerpts 2"
        for key, excerpt in excerpts._by_key.items():
            assert excerpt.users == users[key], "excerpts 1"

    def _check_blocks(self, keys: dict[int, list[int]]) -> None:
        """blocks 1, 2, 4, shared 2, 3: each part of the arena has one owner, and each block is in
        it once, under its own key, which can be looked up once the block is ready.
        """
        table, shared = self._scheduler._blocks, self._scheduler._shared
        owned = [(slab.region.offset, slab.region.length) for slab in shared._slabs.values()]
        assert sum(length for _, length in owned) == shared._bytes, "shared 2"
        excerpts = self._scheduler._excerpts
        owned += [(excerpts._pool_at, excerpts.pool_bytes)] * excerpts.is_open
        assert shared._bytes <= table.arena_bytes // 2, "shared 2"
        ready = dict.fromkeys(keys, 0)
        fetching = decoding = raw_bytes = 0
        assert len(table._blocks) == len(table._by_key), "blocks 4"
        for key, block in table._by_key.items():
            dataset_id, phase = block.dataset.dataset_id, block.phase
            assert block.key == key, "blocks 4"
            assert table._blocks[dataset_id, block.index] is block, "blocks 4"
            orders = table._orders
            order = orders.uses if block.regions else orders._direct
            assert orders._uses_of[key] is order, "next_use: blocks in memory, and those without"
            is_ready = phase is BlockPhase.READY
            assert keys[dataset_id][block.index] == (key if is_ready else 0), "blocks 4"
            assert is_ready or block.restart_indexes is None, "blocks 5"
            decoding += phase is BlockPhase.DECODING
            ready[dataset_id] += is_ready
            raw, decoded, restart_indexes = block.raw, block.decoded, block.restart_indexes
            if phase is BlockPhase.FETCHING:
                into = raw or decoded
                assert into is not None, "blocks 2"
                raw_bytes += into.length
                fetching += 1
            owned += [
                (r.offset, r.length) for r in (raw, decoded, restart_indexes) if r is not None
            ]
        assert fetching == table._fetching, "blocks 1"
        assert raw_bytes == table.fetches._bytes, "blocks 1"
        assert decoding == table._decoding, "blocks 1"
        for dataset_id, found in keys.items():
            assert len(found) - found.count(0) == ready[dataset_id], "blocks 4"
        owned += [(r.offset, r.length) for r in table._lent_raw.values()]
        end = taken = 0
        for offset, length in sorted(owned):
            assert offset >= end, "blocks 2: two owners"
            pages = -(-max(length, 1) // PAGE) * PAGE
            end, taken = offset + pages, taken + pages
        assert taken + table._allocator.free_bytes == table._allocator.size_bytes, "blocks 2"

    def _check_assembling(self, pins: _Pins, used: _Used) -> None:
        """slab_tasks 1, shared 1 and 3: what workers write has its blocks, or its shared slab."""
        making: dict[object, int] = {}
        readers: Counter[int] = Counter()
        kept = self._scheduler._shared._slabs
        for task in self._scheduler._tasks._assembling.values():
            assert task.slot is not None, "slab_tasks 2"
            if task.phase is SlabPhase.GONE and task.delivery.delivery_id in used:
                used[task.delivery.delivery_id].append(task.slot.offset)
            pinned = task.pinned.tolist()
            self._count_pins(pins, task)
            slab = task.shared
            is_copy = slab is not None and slab.made is not None
            needs_none = is_copy or is_elsewhere(self._scheduler, task)
            expected = [] if needs_none else self._whole_blocks_of(task)
            assert pinned == expected, "slab_tasks 1"
            if slab is None:
                continue
            assert kept.get((slab.group, slab.key)) is slab, "shared 3"
            if is_copy:
                readers[slab.number] += 1
            else:
                making[slab.group, slab.key] = making.get((slab.group, slab.key), 0) + 1
        for name, slab in kept.items():
            assert slab.readers == readers[slab.number], "shared 3"
            assert slab.made is not None or making.get(name) == 1, "shared 1"

    def _check_emptied(self) -> None:
        """scheduler 2: the arena is emptied for what one task needs, and for nothing less."""
        head = self._scheduler._emptied_for
        assert self._scheduler._blocks.is_short == (head is not None), "blocks 5"
        batch_count = 0 if head is None else len(head.plan.batches)
        former, former_count = self._emptied
        self._emptied = head, batch_count
        if head is not None and head is not former:
            assert not any(block.is_evictable for block in self._scheduler._blocks._by_key.values())
            assert not self._scheduler._shared.spare()
        if head is not None:
            assert head is not former or batch_count == former_count, "scheduler 2: it was cut"
            if self._scheduler.is_settled:
                assert head is self._scheduler._head, "scheduler 2: emptied for another task"
                assert head.missing, "scheduler 2: emptied for a task that has its blocks"

    def _count_pins(self, pins: _Pins, task: SlabTask) -> None:
        for dataset, blocks in task.datasets.parts(task.pinned):
            pins[dataset.dataset_id].update(blocks.tolist())

    def _check_tasks(self, keys: dict[int, list[int]], pins: _Pins, used: _Used) -> None:
        """slab_tasks 3 and 4, scheduler 1 and 2: tasks are in order, a task lacks exactly the
        blocks that are not ready, and of the waiting tasks only the head has pins.
        """
        scheduler, waiting_count, ready_now = self._scheduler, 0, set[int]()
        for delivery in scheduler._deliveries.by_id.values():
            assert all(s is scheduler._streams.find(s.stream_id) for s in delivery.streams)
        for stream in scheduler._streams._streams.values():
            datasets, stride = stream.delivery.datasets, stream.walk.stream.step_stride
            ready = [key for each in datasets.datasets for key in keys[each.dataset_id]]
            slots, step = used[stream.delivery.delivery_id], None
            for task in stream.tasks:
                mine = not is_elsewhere(scheduler, task)
                self._times.task(task, needs_blocks=mine)
                batches = task.plan.batches
                assert step in {None, batches[0].step}, "slab_tasks 3: a batch is missing"
                step = batches[-1].step + stride
                if task.slot is not None:
                    slots.append(task.slot.offset)
                has_slot = task.phase in {SlabPhase.ASSEMBLING, SlabPhase.READY}
                assert has_slot == (task.slot is not None), "slab_tasks 2"
                assert not task.oversize or len(batches) == 1, "an oversize slab of several batches"
                if task.phase is SlabPhase.READY:
                    ready_now.add(task.number)
                elif task.number in self._ready:
                    self._check_made_again(task)
                if task.phase is not SlabPhase.WAITING:
                    assert not task.missing, "slab_tasks 4"
                    assert not task.idle, "slab_tasks 4"
                if task.phase is SlabPhase.WAITING and mine:
                    needed = datasets.parts(task.plan.blocks)
                    waiting_count += len(needed)
                    lacking = {block for block in self._whole_blocks_of(task) if not ready[block]}
                    assert task.missing == lacking, "waiting 1"
                    assert task.idle <= task.missing, "waiting 1"
                    for dataset, _ in needed:
                        waiting = scheduler._tasks._waiting._waiting[dataset.dataset_id]
                        assert task in waiting, "waiting 1"
                    if len(task.pinned):
                        assert task is scheduler._head, "scheduler 2"
                        self._count_pins(pins, task)
                elif task.phase is SlabPhase.FAILED:
                    assert not len(task.pinned), "slab_tasks 1: pins of what has failed"
            if scheduler.is_settled:
                self._check_ahead(stream)
                if stream.requests and stream.tasks:
                    self._check_first(stream)
        self._ready = ready_now
        found = sum(map(len, scheduler._tasks._waiting._waiting.values()))
        assert found == waiting_count, "waiting 1: what is gone still waits"

    def _check_made_again(self, task: SlabTask) -> None:
        """scheduler 3: a slab loses its slot only to one that a consumer waits for. One that turned
        out to be too long for the slot was cut in two, and gets it next.
        """
        assert task.phase is SlabPhase.WAITING
        if not self._scheduler.is_settled:
            return
        firsts = [each.tasks[0] for each in task.delivery.streams if each.requests and each.tasks]
        assert any(each.phase is SlabPhase.ASSEMBLING for each in firsts), "scheduler 3"

    def _check_ahead(self, stream: StreamState) -> None:
        """Every stream is planned ahead, and free slots go to the streams that may have them."""
        tasks = stream.tasks
        if not stream.planning and not stream.planned_all:
            together = planned_together(len(tasks))
            assert len(tasks) + together > PLANNED_AHEAD + stream.delivery.ahead
        if not stream.delivery.slots.free_count:
            return
        for task in tasks:
            if task.phase is SlabPhase.WAITING and not task.oversize:
                if is_elsewhere(self._scheduler, task) and not has_maker(self._scheduler, task):
                    return  # nobody can make it now
                slab = self._scheduler._shared.find(task)
                if (slab is None and not task.missing) or (
                    slab is not None and slab.made is not None
                ):
                    is_first = task is tasks[0] and not is_ahead(stream)
                    has_all = count_of_slots(stream) >= share_of_slots(stream)
                    workers = self._scheduler._workers.count
                    is_busy = self._scheduler._tasks.have_enough(workers)
                    assert has_all or is_busy, "slab_tasks 5: a slot is free"
                    assert not is_first, "slab_tasks 5: a slot is free"
                    return

    def _check_first(self, stream: StreamState) -> None:
        """scheduler 1 and 3, slab_tasks 5: a requested slab is made as soon as possible."""
        task = stream.tasks[0]
        assert task.phase not in {SlabPhase.READY, SlabPhase.FAILED}, "scheduler 1"
        if task.phase is not SlabPhase.WAITING or task.missing or is_ahead(stream):
            return
        if is_elsewhere(self._scheduler, task) and not has_maker(self._scheduler, task):
            return
        group, shared = stream.delivery.group, self._scheduler._shared
        slab = shared._slabs.get((group, _key(task))) if group is not None else None
        if slab is not None and slab.made is None and not task.oversize:
            return
        slots = stream.delivery.slots
        is_free = slots.zone_is_free if task.oversize else slots.free_count
        assert not is_free, "slab_tasks 5: a slot is free"
        for other in stream.delivery.streams:
            asked = 1 if other.requests else 0
            for each in list(other.tasks)[asked:]:
                is_spare = each.phase is SlabPhase.READY and each.oversize == task.oversize
                assert not is_spare, "scheduler 3: a slab that nobody asked for has a slot"

    def _check_slots(self, used: _Used) -> None:
        """slab_tasks 2: a slot is free, or one slab has it."""
        for delivery_id, delivery in self._scheduler._deliveries.by_id.items():
            slots, mine = delivery.slots, used[delivery_id]
            for loan in delivery.lent.values():
                assert loan.task.slot is not None, "slab_tasks 2"
                mine.append(loan.task.slot.offset)
            assert len(set(mine)) == len(mine), "slab_tasks 2: two slabs in one slot"
            count = slots.layout.slot_count - slots.free_count + (not slots.zone_is_free)
            assert count == len(mine), "slab_tasks 2: a slot that nobody has"

    def check_end(self) -> None:
        """Check that nothing is left when all is closed.

        Raises:  AssertionError: something is.
        """
        scheduler, blocks = self._scheduler, self._scheduler._blocks
        assert blocks._allocator.free_bytes == blocks._allocator.size_bytes
        assert not blocks._blocks
        assert not blocks._by_key
        assert not blocks._orders._uses_of
        assert not blocks._again._counts
        assert not blocks._orders.uses._residents
        assert not blocks._orders._direct._residents
        assert not blocks.in_flight_count
        assert not scheduler._tasks._waiting._waiting
        assert not scheduler._excerpts.is_open
        assert not scheduler._excerpts.copying_count
        assert not scheduler._tasks.assembling_count
        assert not scheduler._deliveries.by_id
        assert not scheduler._deliveries.groups
