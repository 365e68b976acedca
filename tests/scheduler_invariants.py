"""The numbered invariants of the scheduler, checked from the inside after every event."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np

from dataplane.arena.allocator import rounded
from dataplane.scheduler.block import BlockPhase
from dataplane.scheduler.records import SlabPhase, SlabTask
from dataplane.scheduler.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Raises:  AssertionError: names the invariant."""
    _check_memory(scheduler)
    _check_blocks(scheduler)
    _check_tasks(scheduler)
    _check_pins(scheduler)
    _check_slots(scheduler)


def _all_tasks(scheduler: Scheduler) -> list[SlabTask]:
    """Whatever is planned, made or lent, and what workers write although nobody wants it."""
    planned = [task for stream in scheduler._streams for task in stream.tasks]
    lent = [loan.task for d in scheduler._deliveries.values() for loan in d.lent.values()]
    gone = [t for t in scheduler._tasks._assembling.values() if t.phase is SlabPhase.GONE]
    return [*planned, *lent, *gone]


def _check_memory(scheduler: Scheduler) -> None:
    """blocks 2, shared 2 and 3: each part of the arena has one owner, and all of them are known."""
    shared, blocks = scheduler._shared, scheduler._blocks
    kept = [slab.region for slab in shared._slabs.values()]
    assert sum(region.length for region in kept) == shared._bytes, "shared 2"
    assert shared._bytes <= blocks.arena_bytes // 2, "shared 2"
    owned = sorted((r.offset, r.length) for b in blocks._blocks.values() for r in b.regions)
    owned = sorted([*owned, *((r.offset, r.length) for r in kept)])
    for (first, length), (following, _) in itertools.pairwise(owned):
        assert first + rounded(length) <= following, "blocks 2: two owners"
    taken = sum(rounded(length) for _, length in owned)
    assert taken + blocks._allocator.free_bytes == blocks._allocator.size_bytes, "blocks 2"


def _check_blocks(scheduler: Scheduler) -> None:
    """blocks 1 and 4: each block once, by a key of its own, which is known where it is ready."""
    table = scheduler._blocks
    assert len(table._blocks) == len(table._by_key), "blocks 4"
    phases = Counter(block.phase for block in table._blocks.values())
    assert phases[BlockPhase.FETCHING] == table._fetching, "blocks 1"
    assert phases[BlockPhase.DECODING] == table._decoding, "blocks 1"
    ready: Counter[int] = Counter()
    for key, block in table._by_key.items():
        assert block.key == key, "blocks 4"
        assert table._blocks[block.dataset.dataset_id, block.index] is block, "blocks 4"
        is_ready = block.phase is BlockPhase.READY
        assert block.dataset.marks.keys[block.index] == (key if is_ready else 0), "blocks 4"
        ready[id(block.dataset)] += is_ready
    for dataset in {id(b.dataset): b.dataset for b in table._by_key.values()}.values():
        assert np.count_nonzero(dataset.marks.keys) == ready[id(dataset)], "blocks 4"


def _check_tasks(scheduler: Scheduler) -> None:
    """slab_tasks 4 and scheduler 1: what a waiting task lacks is exactly what is not ready."""
    for stream in scheduler._streams:
        for task in stream.tasks:
            if task.phase is SlabPhase.WAITING:
                blocks = task.plan.blocks
                lacking = set(blocks[task.dataset.marks.keys[blocks] == 0].tolist())
                assert task.missing == lacking, "slab_tasks 4"
                assert task.idle <= task.missing, "slab_tasks 4"
                assert task in scheduler._tasks._waiting[task.dataset.dataset_id], "slab_tasks 4"
        first = [task.plan.first_position for task in stream.tasks]
        assert first == sorted(first), "scheduler 1"
        if scheduler.is_settled and stream.requests and stream.tasks:
            assert stream.tasks[0].phase is not SlabPhase.READY, "scheduler 1"


def _check_pins(scheduler: Scheduler) -> None:
    """scheduler 2, slab_tasks 1: pins are those of the head and of what is assembled, no others."""
    waiting = [t for t in _all_tasks(scheduler) if t.phase is SlabPhase.WAITING and len(t.pinned)]
    assert len(waiting) <= 1, "scheduler 2"
    assert all(task is scheduler._head for task in waiting), "scheduler 2"
    pins: dict[int, Counter[int]] = {}
    for task in [*waiting, *scheduler._tasks._assembling.values()]:
        pins.setdefault(id(task.dataset), Counter()).update(task.pinned.tolist())
    datasets = {id(s.delivery.dataset): s.delivery.dataset for s in scheduler._streams}
    for name, dataset in datasets.items():
        expected = pins.get(name, Counter())
        found = dataset.marks.pins
        assert found.sum() == sum(expected.values()), "scheduler 2"
        assert all(found[block] == count for block, count in expected.items()), "scheduler 2"


def _check_slots(scheduler: Scheduler) -> None:
    """slab_tasks 2: a slot is free, or one slab has it."""
    for delivery in scheduler._deliveries.values():
        mine = {id(t): t for t in _all_tasks(scheduler) if t.delivery is delivery}
        slots = [task.slot.offset for task in mine.values() if task.slot is not None]
        assert len(set(slots)) == len(slots), "slab_tasks 2: two slabs in one slot"
        has_zone = not delivery.slots.zone_is_free
        used = delivery.slots.layout.slot_count - delivery.slots.free_count + has_zone
        assert used == len(slots), "slab_tasks 2: a slot that nobody has"
