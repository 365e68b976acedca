"""Eviction takes the block that the plan needs last, and finds it without a full scan."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from block_tables import mapped_blocks
from caches import fewest, kept_share, least_recent, open_bytes_max
from driven_epochs import FILE_BYTES, PAGE, DrivenEpochs
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.model.config import JobSpec
from dataplane.plan.order import Order
from dataplane.scheduler.next_use import NEVER, NextUse, WalkPosition, _Resident
from dataplane.scheduler.records import BlockPhase, CachedBlock

COUNTS = st.lists(st.integers(1, 5), min_size=1, max_size=8)


def _order(rows: list[int], seed: int, lanes: int, window: int) -> Order:
    return Order(np.array(rows, np.int64), seed, True, lanes, window, 0)


class Memory:
    """Blocks in memory, and their readers."""

    def __init__(self, rows: list[int], readings: list[WalkPosition]) -> None:
        self.dataset = mapped_blocks([1] * len(rows))
        self.readings = readings
        self.uses = NextUse(lambda _dataset: self.readings)
        self.held: dict[int, CachedBlock] = {}
        self._touches = itertools.count(1)

    def touch(self, index: int, *, is_guest: bool = False) -> None:
        if index not in self.held:
            block = CachedBlock(self.dataset, index, next(self._touches), BlockPhase.READY)
            if is_guest:
                block.guest_of = self.uses.orders_now(block)
            self.held[index] = block
            self.uses.add(block)
        self.dataset.marks.touched[index] = next(self._touches)

    def evict(self, index: int) -> None:
        self.uses.remove(self.held.pop(index))

    def farthest(self) -> list[tuple[int, int]]:
        return [(block.index, use) for block, use in self.uses.farthest()]

    def exact(self, index: int) -> int:
        """The next use computed only from lanes and windows, by checking every reader."""
        soonest = NEVER
        for _, order, position, *_ in self.readings:
            first, last = (int(each[0]) for each in order.block_span(np.array([index])))
            soonest = min(soonest, NEVER if last < position else max(first - position, 0))
        return soonest


@given(COUNTS, st.integers(0, 99), st.integers(1, 3), st.sampled_from([1, 4, 100]), st.data())
def test_the_next_use_is_never_later_than_the_plan_says(
    rows: list[int], seed: int, lanes: int, window: int, data: st.DataObject
) -> None:
    orders = [_order(rows, seed, lanes, window), _order(rows, seed + 1, 1, 1)]
    total = sum(rows)
    readings = [
        WalkPosition(i, order, data.draw(st.integers(0, total))) for i, order in enumerate(orders)
    ]
    memory = Memory(rows, readings)
    for block in range(len(rows)):
        found = memory.uses.use_of(memory.dataset, block)
        assert found == memory.exact(block)
        truth = NEVER
        for _, order, position, *_ in readings:
            blocks, _ = order.locate(np.arange(position, total))
            ahead = np.flatnonzero(blocks == block)
            truth = min(truth, int(ahead[0]) if len(ahead) else NEVER)
        assert found <= truth
        if found == NEVER:
            assert truth == NEVER


def _check_farthest(memory: Memory) -> None:
    found = memory.farthest()
    evictable = [block.index for block in memory.held.values() if block.is_evictable]
    assert sorted(index for index, _ in found) == sorted(evictable)
    assert all(use == memory.exact(index) for index, use in found)
    uses = [use for _, use in found]
    for at, use in enumerate(uses):
        following = uses[at + 1 :]
        assert use == NEVER or NEVER not in following
        assert 2 * use >= max(following, default=0)


@settings(max_examples=80)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=30), st.data())
def test_whatever_happens_the_farthest_goes_first(rows: list[int], data: st.DataObject) -> None:
    total = sum(rows)
    orders = [_order(rows, seed, *shape) for seed, shape in ((1, (1, 9)), (2, (2, 4)))]
    draw: Callable[[Any], Any] = data.draw
    memory = Memory(rows, [])
    numbers = itertools.count()
    for _ in range(draw(st.integers(1, 25))):
        act = draw(
            st.sampled_from(["touch", "touch", "evict", "open", "close", "on", "pin", "back"])
        )
        which = draw(st.integers(0, 10**6))
        if act == "touch":
            memory.touch(which % len(rows))
        elif act == "evict" and memory.held:
            memory.evict(sorted(memory.held)[which % len(memory.held)])
        elif act == "open":
            order, position = orders[which % 2], which % (total + 1)
            is_open = draw(st.booleans())
            reading = WalkPosition(next(numbers), order, position if is_open else -position)
            memory.readings.append(reading._replace(is_open=is_open))
        elif act == "pin":
            memory.dataset.marks.pins[which % len(rows)] ^= 1
        elif memory.readings:
            at = which % len(memory.readings)
            reading = memory.readings[at]
            if act == "close":
                del memory.readings[at]
            elif act == "on":
                position = min(reading.position + which % 7, total)
                memory.readings[at] = reading._replace(position=position)
            else:
                memory.readings[at] = reading._replace(position=reading.position - which % 7)
        _check_farthest(memory)


@given(st.lists(st.integers(0, 9), max_size=40), st.data())
def test_the_least_recently_used_open_window_is_dropped_first(
    touches: list[int], data: st.DataObject
) -> None:
    rows = [2] * 10
    memory = Memory(rows, [WalkPosition(1, _order(rows, 1, 1, 100), 3)])
    for index in touches:
        memory.touch(index)
        if data.draw(st.booleans()):
            found = memory.farthest()
            oldest = min(memory.held, key=lambda i: int(memory.dataset.marks.touched[i]))
            assert found[0] == (oldest, 0)
            if data.draw(st.booleans()):
                memory.evict(oldest)


def test_a_block_that_the_next_epoch_reads_late_goes_before_one_that_it_reads_early() -> None:
    now, later = (Order(np.ones(200, np.int64), 1, True, 1, 1, epoch) for epoch in (0, 1))
    memory = Memory([1] * 200, [WalkPosition(1, now, 150)])
    read = now.locate(np.arange(100))[0].tolist()
    ahead = int(now.locate(np.array([180]))[0][0])
    for index in [*read, ahead]:
        memory.touch(index)
    assert {use for _, use in memory.farthest()} == {NEVER, 30}
    memory.readings.append(WalkPosition(-1, later, -50, is_open=False))
    first, _ = later.block_span(np.array(read))
    uses = dict(zip(read, (first + 50).tolist(), strict=True)) | {ahead: 30}
    assert memory.farthest() == sorted(uses.items(), key=lambda each: -each[1])
    is_spare = memory.uses.is_spare
    assert [use for _, use in memory.farthest() if not is_spare(memory.dataset, use)] == [30]
    placed = memory.farthest()
    memory.readings = [WalkPosition(2, later, -50)]  # the stream of the next epoch is open
    assert [each for each in memory.farthest() if each[0] != ahead] == placed[:-1]


@given(
    st.sets(st.integers(0, 299), min_size=1, max_size=12),
    st.lists(st.lists(st.integers(0, 120), min_size=3, max_size=3), min_size=1, max_size=6),
)
def test_readers_that_overtake_each_other_keep_the_order_of_eviction(
    blocks: set[int], moves: list[list[int]]
) -> None:
    order = Order(np.ones(300, np.int64), 1, False, 1, 1, 0)
    memory = Memory([1] * 300, [WalkPosition(number, order, 0) for number in range(3)])
    for index in blocks:
        memory.touch(index)
    for move in moves:
        memory.readings = [
            reading._replace(position=reading.position + ahead)
            for reading, ahead in zip(memory.readings, move, strict=True)
        ]
        _check_farthest(memory)


def test_what_was_only_looked_at_is_still_there() -> None:
    rows = [2] * 20
    memory = Memory(rows, [WalkPosition(1, _order(rows, 1, 1, 4), 11)])
    for index in range(20):
        memory.touch(index)
    whole = memory.farthest()
    for count in range(20):
        farthest = memory.uses.farthest()
        assert [(b.index, u) for b, u in itertools.islice(farthest, count)] == whole[:count]
        farthest.close()
    assert memory.farthest() == whole


class CountingOrder:
    """An order that counts how many blocks it was asked about."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self.sample_count = order.sample_count
        self.asked = 0

    def block_span(self, blocks: Any) -> Any:
        self.asked += len(blocks)
        return self._order.block_span(blocks)


def test_adding_or_evicting_a_block_does_not_examine_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placed, place = [], _Resident.place
    monkeypatch.setattr(_Resident, "place", lambda at, key: (placed.append(key), place(at, key)))
    rows = [4] * 2000
    order: Any = CountingOrder(_order(rows, 3, 1, 40))
    memory = Memory(rows, [WalkPosition(rank, order, rank) for rank in range(8)])
    for index in range(1000):
        memory.touch(index)
    memory.farthest()
    before = order.asked
    placed.clear()
    for index in range(1000, 1100):
        memory.readings = [each._replace(position=each.position + 8) for each in memory.readings]
        farthest = memory.uses.farthest()
        victim, _ = next(farthest)
        farthest.close()
        memory.evict(victim.index)
        memory.touch(index)
    assert order.asked - before == 100
    assert len(placed) < 3000


def _misses(uses: list[int], room: int, victim: Callable[[int, list[int]], int]) -> int:
    held: list[int] = []
    missed = 0
    for at, block in enumerate(uses):
        if block in held:
            held.remove(block)
        else:
            missed += 1
            if len(held) == room:
                held.remove(victim(at, held))
        held.append(block)  # the one touched last is last
    return missed


def _fewest(uses: tuple[int, ...], room: int) -> int:
    """By trying everything."""

    @cache
    def best(at: int, held: frozenset[int]) -> int:
        if at == len(uses):
            return 0
        if uses[at] in held:
            return best(at + 1, held)
        if len(held) < room:
            return 1 + best(at + 1, held | {uses[at]})
        return 1 + min(best(at + 1, held - {gone} | {uses[at]}) for gone in held)

    return best(0, frozenset())


@given(st.integers(0, 99), st.sampled_from([1, 4, 8]), st.integers(1, 3), st.integers(1, 3))
def test_reading_an_epoch_misses_no_more_than_lru_and_no_less_than_the_best(
    seed: int, window: int, lanes: int, room: int
) -> None:
    rows = [2, 1, 3, 2, 1]
    order = _order(rows, seed, lanes, window)
    blocks = order.locate(np.arange(sum(rows)))[0].tolist()
    memory = Memory(rows, [WalkPosition(1, order, 0)])

    def planned(at: int, held: list[int]) -> int:
        memory.readings = [WalkPosition(1, order, at)]
        for index in [*memory.held]:
            if index not in held:
                memory.evict(index)
        for index in held:
            memory.touch(index)
        return memory.farthest()[0][0]

    lru = _misses(blocks, room, lambda _, held: held[0])
    # The node knows windows, not rows: between the best and what guessing gives.
    assert _fewest(tuple(blocks), room) <= _misses(blocks, room, planned) <= lru


@pytest.mark.parametrize("is_open", [True, False])
def test_a_block_of_a_neighbour_is_only_kept_for_the_epoch_it_was_fetched_for(
    is_open: bool,
) -> None:
    """Also if the stream of the next epoch is open already, as that of a rank that has ended."""
    now, later = (Order(np.ones(200, np.int64), 1, True, 1, 1, epoch) for epoch in (0, 1))
    soon, sooner = (int(now.locate(np.array([at]))[0][0]) for at in (60, 55))
    memory = Memory([1] * 200, [WalkPosition(1, now, 50)])
    memory.readings.append(WalkPosition(2, later, -150, is_open=is_open))
    for index, is_guest in ((soon, True), (sooner, False)):
        memory.touch(index, is_guest=is_guest)
    assert memory.farthest() == [(soon, 10), (sooner, 5)]
    memory.readings[0] = WalkPosition(1, now, 61)
    memory.readings[1] = memory.readings[1]._replace(position=-139)
    (first,), _ = later.block_span(np.array([sooner]))
    assert memory.farthest() == [(soon, NEVER), (sooner, 139 + first)]


def test_a_block_of_a_neighbour_that_is_read_ahead_stays_for_the_next_epoch() -> None:
    now, later = (Order(np.ones(200, np.int64), 1, True, 1, 1, epoch) for epoch in (0, 1))
    (index,), _ = later.locate(np.array([3]))
    (read,), _ = now.block_span(np.array([index]))
    memory = Memory([1] * 200, [WalkPosition(1, now, read + 1), WalkPosition(2, later, -9)])
    memory.touch(index, is_guest=True)
    assert memory.farthest() == [(index, 12)]
    memory.readings = [WalkPosition(2, later, 2)]
    assert memory.farthest() == [(index, 1)]
    memory.readings = [WalkPosition(2, later, 4)]
    assert memory.farthest() == [(index, NEVER)]


def test_a_block_of_a_neighbour_that_two_open_streams_read_stays_until_both_have() -> None:
    orders = [_order([1] * 200, seed, 1, 1) for seed in (1, 2)]
    firsts = [order.block_span(np.arange(200))[0].tolist() for order in orders]
    index = next(i for i in range(200) if 20 < firsts[0][i] < 80 and firsts[1][i] > 100)
    first, second = (each[index] for each in firsts)
    memory = Memory([1] * 200, [WalkPosition(i, order, 0) for i, order in enumerate(orders)])
    memory.touch(index, is_guest=True)
    assert memory.farthest() == [(index, first)]
    memory.readings = [reading._replace(position=first + 1) for reading in memory.readings]
    assert memory.farthest() == [(index, second - first - 1)]
    memory.readings = [reading._replace(position=second + 1) for reading in memory.readings]
    assert memory.farthest() == [(index, NEVER)]


READ_AHEAD = 22
"""Slabs whose blocks are loaded before they are needed, which LRU does not do."""


def job(lanes: int, window: int, seed: int = 1) -> JobSpec:
    return JobSpec("f", seed=seed, shuffle=True, lanes=lanes, window=window, global_batch=4)


@cache
def three_epochs(blocks: int, part: int, lanes: int, window: int) -> DrivenEpochs:
    return DrivenEpochs(blocks, blocks // part, job(lanes, window), rows=8, epochs=3)


@pytest.mark.parametrize("part", [2, 4])
@pytest.mark.parametrize(("lanes", "window"), [(1, 1), (6, 24)])
def test_later_epochs_load_no_more_than_the_best_possible(
    part: int, lanes: int, window: int
) -> None:
    blocks = 240
    room = blocks // part
    run = three_epochs(blocks, part, lanes, window)
    assert sorted(run.loads[:blocks]) == list(range(blocks))
    best, usual = (each(run.slabs, room) - blocks for each in (fewest, least_recent))
    later = len(run.loads) - blocks
    assert later <= 1.05 * best
    assert usual / later > 0.95 * usual / best > 1.1


@settings(max_examples=15, deadline=None)
@given(
    st.integers(2, 40), st.integers(1, 40), st.integers(1, 6), st.integers(1, 3),
    st.sampled_from([1, 3, 9, 1000]), st.integers(0, 99),
)  # fmt: skip
def test_it_never_loads_much_more_than_lru(
    blocks: int, room: int, rows: int, lanes: int, window: int, seed: int
) -> None:
    run = DrivenEpochs(blocks, 4 + room, job(lanes, window, seed), rows=rows, epochs=3)
    assert len(run.loads) <= least_recent(run.slabs, 4 + room) + READ_AHEAD


@pytest.mark.parametrize(
    ("part", "lanes", "window"), [(2, 1, 1), (2, 6, 24), (4, 6, 24), (10, 1, 1), (2, 24, 64)]
)
def test_a_scheduler_loads_about_the_least_that_a_plan_tells(
    part: int, lanes: int, window: int
) -> None:
    blocks, epochs = 240, 3
    run = three_epochs(blocks, part, lanes, window)
    later = len(run.loads) - blocks
    assert later >= 0.98 * (epochs - 1) * (blocks - most_kept(run, blocks // part))
    if window * lanes < blocks:  # open windows take little of the memory
        assert later <= 1.05 * (epochs - 1) * (blocks - most_kept(run, blocks // part))


def most_kept(run: DrivenEpochs, room: int, disk: int = 0) -> float:
    """How many blocks stay from one epoch to the next, at most."""
    blocks = len(run.dataset.marks.raw)
    open_bytes = open_bytes_max(run.order(1), np.arange(blocks), run.dataset.marks.raw)
    whole = (blocks * FILE_BYTES, blocks * PAGE)
    _, share = kept_share(whole, room * PAGE, open_bytes, disk * FILE_BYTES)
    return share * blocks


@pytest.mark.parametrize(("part", "disk_part", "lanes", "window"), [(8, 4, 6, 24), (8, 2, 1, 1)])
def test_later_epochs_load_few_blocks_with_a_disk(
    part: int, disk_part: int, lanes: int, window: int
) -> None:
    blocks, epochs = 240, 4
    room, disk = blocks // part, blocks // disk_part
    run = DrivenEpochs(blocks, room, job(lanes, window), rows=8, epochs=epochs, disk=disk)
    later = len(run.loads) - blocks
    assert later >= 0.98 * (epochs - 1) * (blocks - most_kept(run, room, disk))
    # Never more than the disk alone would need, and nearer to the best of both than LRU.
    assert later <= 1.02 * (epochs - 1) * (blocks - disk)
    best, usual = (each(run.slabs, room + disk) - blocks for each in (fewest, least_recent))
    assert later - best < (usual - best) / 2


def test_a_disk_with_room_for_everything_is_read_alone() -> None:
    run = DrivenEpochs(60, 20, job(2, 24), rows=8, epochs=3, disk=60)
    assert sorted(run.loads) == list(range(60))
    assert run.disk_loads


@pytest.mark.parametrize(("lanes", "rows", "window"), [(6, 8, 24), (1, 8, 480), (24, 8, 8)])
def test_a_scheduler_reads_blocks_once_if_what_is_open_at_most_fits(
    lanes: int, rows: int, window: int
) -> None:
    blocks = 240
    order = Order(np.full(blocks, rows), 1, True, lanes, window, 0)
    spans = list(zip(*(each.tolist() for each in order.block_span(np.arange(blocks))), strict=True))
    most = max(
        sum(first <= at <= last for first, last in spans) for at in range(order.sample_count)
    )

    def run(room: int) -> DrivenEpochs:
        return DrivenEpochs(blocks, room, job(lanes, window), rows=rows, epochs=1)

    fitting = run(most + 2)
    assert open_bytes_max(order, np.arange(blocks), fitting.dataset.marks.raw) == most * PAGE
    assert len(fitting.loads) <= 1.02 * blocks  # a block of the next epoch may be among them
    assert len(run(round(0.8 * most)).loads) > 1.1 * blocks
