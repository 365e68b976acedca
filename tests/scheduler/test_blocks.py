"""The order in which the block table evicts."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
from block_tables import TableParts
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import force_setattr, replace
from scheduler_scenes import epoch_of_one, far_too_small, simulate

from dataplane.arena.allocator import GRANULE_BYTES
from dataplane.arena.slots import Slots, plan_slots
from dataplane.model.config import JobSpec
from dataplane.model.errors import BudgetTooSmall
from dataplane.model.records import Region, Stream
from dataplane.plan.order import Order
from dataplane.rpc import tasks
from dataplane.rpc.messages import Batch
from dataplane.scheduler import next_use, room
from dataplane.scheduler.autoscaler import Autoscaler
from dataplane.scheduler.dataset import DatasetBlocks, DatasetLookup, DecodedParts, Marks
from dataplane.scheduler.elsewhere import Elsewhere
from dataplane.scheduler.events import (
    BlockDecoded,
    BlockFetched,
    BlocksInherited,
    DecodeBlock,
    Fetch,
    ForgetBlock,
)
from dataplane.scheduler.excerpts import Excerpts
from dataplane.scheduler.holdings import Holdings
from dataplane.scheduler.planning import Passes
from dataplane.scheduler.records import (
    Delivery,
    Group,
    SharedSlab,
    SlabPhase,
    SlabTask,
    StreamState,
)
from dataplane.scheduler.slab_tasks import SlabTasks
from dataplane.scheduler.walk import Plan, SlabSizes, Walk

COUNT = 12
ROWS = np.full(COUNT, 2, np.int64)
IN_ORDER = JobSpec("f", shuffle=False, global_batch=2)


class Table:
    """A block table over one dataset, whose blocks take a page each; one reader in order."""

    def __init__(
        self,
        pages: int,
        *,
        position: int = 0,
        is_remote: bool = True,
        spec: JobSpec = IN_ORDER,
        decoded_bytes: int = 0,
    ) -> None:
        raw = np.full(COUNT, GRANULE_BYTES if is_remote else 0, np.int64)
        marks = Marks.of(raw, np.full(COUNT, decoded_bytes), np.full(COUNT, is_remote))
        self.dataset = DatasetBlocks(1, "d", marks, raw, ROWS, url=str)
        parts = TableParts(pages * GRANULE_BYTES, 4)
        self.allocator, self.shared, self.effects = parts.allocator, parts.shared, parts.effects
        self.blocks, do, moment = parts.blocks, parts.effects.append, parts.moment
        excerpts = Excerpts(self.blocks, self.allocator, parts.waiting, do)
        elsewhere = Elsewhere(Autoscaler(1, 1, 1), moment)
        self.tasks = SlabTasks(
            self.blocks, self.shared, parts.waiting, excerpts, elsewhere, do, moment
        )
        self.group = Group("g", is_declared=True)
        delivery = Delivery(1, Slots(plan_slots(0, 4096)), DatasetLookup(self.dataset), None)
        order = Order(ROWS, 0, spec.shuffle, spec.lanes, spec.window, 0)
        walk = Walk(spec, order, Stream(0, 0, 0, 1), SlabSizes(1, 1, 0))
        self.stream = StreamState(1, delivery, walk, 1, position)
        parts.streams.add(self.stream)

    def load(self, index: int, *, greedy: bool = False) -> bool:
        is_started = self.blocks.start(self.dataset, index, greedy=greedy)
        if is_started and self.effects and isinstance(self.effects[-1], Fetch):
            self.blocks.fetched(BlockFetched(self.effects[-1].key))
        return is_started

    def keep_slab(self, number: int = 1) -> SharedSlab:
        slab = SharedSlab(self.group, (0, number, 1, 1), number, Region(0, 1))
        at = self.allocator.allocate(1)
        assert at is not None
        self.shared.begin(slab, Region(at, 1))
        slab.made = tasks.Assembled(1, bytes_needed=0, bytes_used=1)
        return slab

    @property
    def resident(self) -> list[int]:
        return np.flatnonzero(self.dataset.marks.keys).tolist()


def test_what_is_no_longer_needed_goes_first_then_kept_slabs_then_what_is_needed_last() -> None:
    table = Table(4, position=4)  # blocks 0 and 1 are behind it
    for index in (1, 7, 5):
        assert table.load(index)
    table.keep_slab()
    assert table.load(2)
    assert table.resident == [2, 5, 7]
    assert len(table.shared.spare()) == 1
    assert table.load(3)
    assert table.resident == [2, 3, 5, 7]
    assert not table.shared.spare()
    assert table.load(4)
    assert table.resident == [2, 3, 4, 5]


def test_what_nobody_waits_for_evicts_only_what_is_needed_later_than_it() -> None:
    table = Table(2)
    assert table.load(3)
    assert table.load(5)
    assert not table.load(8)
    assert table.resident == [3, 5]
    assert table.load(8, greedy=True)
    assert table.resident == [3, 8]
    assert table.load(4)
    assert table.resident == [3, 4]


def _fetch(table: Table, index: int) -> int:
    """Begin to read it ahead; its key."""
    assert table.blocks.start(table.dataset, index, greedy=False)
    fetch = table.effects[-1]
    assert isinstance(fetch, Fetch)
    return fetch.key


def test_what_tasks_need_later_makes_way_for_a_block_only_if_the_store_is_idle() -> None:
    table = Table(4)
    for index in (3, 9, 10, 11):
        assert table.load(index)
    table.blocks.holdings.want(table.dataset, np.array([3, 9, 10, 11]))
    for name in ("is_asked", "is_tight"):
        setattr(table.blocks.holdings, name, True)
        assert not table.load(5)
        setattr(table.blocks.holdings, name, False)
    first = _fetch(table, 5)
    assert table.resident == [3, 9, 10]
    _fetch(table, 6)
    assert table.resident == [3, 9]
    assert not table.load(7), "two are on their way"
    table.blocks.fetched(BlockFetched(first))
    _fetch(table, 7)
    assert table.resident == [3, 5], "9 was needed last"
    assert not table.load(8), "none is needed later"


def test_what_lies_apart_from_the_room_that_is_found_stays() -> None:
    table = _four_apart()
    assert table.load(3, greedy=True)
    assert table.resident == [3, 5, 11], "only two of these lie side by side"


def test_what_lies_apart_goes_too_if_each_search_would_look_at_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "_SPARED_MAX", 2)
    table = _four_apart()
    assert table.load(3, greedy=True)
    assert table.resident == [3, 5]


def _four_apart() -> Table:
    """Four blocks fill the arena: that needed last, that needed first, and two more."""
    table = Table(4)
    for index in (11, 5, 9, 10):
        assert table.load(index)
    table.dataset.marks.raw[3] = 2 * GRANULE_BYTES
    return table


def test_a_block_is_given_the_room_that_others_needed_not_what_the_index_says() -> None:
    table = Table(12, decoded_bytes=6 * GRANULE_BYTES)
    given = []
    for index, actual in ((3, 2 * GRANULE_BYTES), (4, 2 * GRANULE_BYTES), (3, 0)):
        assert table.load(index)
        decode = table.effects[-1]
        assert isinstance(decode, DecodeBlock)
        given.append(decode.into.length)
        result = tasks.Decoded(actual or given[-1], stored=True)
        table.blocks.decoded(BlockDecoded(decode.key, result, 0.0))
        block = table.blocks.find(table.dataset, 3)
        assert block is not None
        if index == 4:
            table.blocks.evict(block)
    assert given == [6 * GRANULE_BYTES, 2 * GRANULE_BYTES + 64, 2 * GRANULE_BYTES]


def test_a_block_that_found_no_room_finds_it_once_a_later_one_is_unpinned() -> None:
    table = Table(2)
    assert table.load(3)
    assert table.load(9)
    pinned = np.array([9])
    table.blocks.pin(table.dataset, pinned)
    assert not table.load(8)
    assert not table.load(8)
    table.blocks.unpin(table.dataset, pinned)
    assert not table.load(10)
    assert table.load(8)
    assert table.resident == [3, 8]


def test_a_block_that_found_no_room_finds_it_once_a_later_one_is_loaded() -> None:
    table = Table(2)
    assert table.load(3)
    assert table.blocks.start(table.dataset, 9, greedy=False)
    fetch = table.effects[-1]
    assert isinstance(fetch, Fetch)
    assert not table.load(8)
    table.blocks.fetched(BlockFetched(fetch.key))
    assert table.load(8)
    assert table.resident == [3, 8]


def test_a_block_that_found_no_room_finds_it_once_the_reader_has_moved_on() -> None:
    table = Table(2)
    assert table.load(3)
    assert table.load(5)
    assert not table.load(6)
    table.stream.planned_to = 8  # blocks 0 to 3 are behind it
    assert table.load(10)  # it is now as far away as 6 was
    assert table.resident == [5, 10]


def test_pinned_blocks_stay_and_a_block_that_finds_no_room_evicts_nothing() -> None:
    table = Table(3)
    for index in (2, 6, 9):
        assert table.load(index)
    table.blocks.pin(table.dataset, np.array([9]))
    wide = replace(table.dataset.marks, raw=table.dataset.marks.raw * 3)
    force_setattr(table.dataset, "marks", wide)
    before = len(table.effects)
    assert not table.load(0, greedy=True)
    assert table.effects[before:] == []
    assert table.resident == [2, 6, 9]


def test_too_many_mapped_blocks_forget_the_one_that_is_needed_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(next_use, "_DIRECT_BLOCKS_MAX", 3)
    table = Table(1, is_remote=False)
    for index in (1, 8, 4):
        assert table.load(index)
    assert table.effects == []
    assert table.load(2)
    assert table.resident == [1, 2, 4]
    assert [type(effect) for effect in table.effects] == [ForgetBlock]
    table.blocks.pin(table.dataset, np.array([1, 2, 4]))
    assert table.load(0)  # however many there are, a block that is waited for gets room
    assert table.resident == [0, 1, 2, 4]


def test_a_slab_is_kept_in_memory_that_no_block_needs_and_in_place_of_less_needed_slabs() -> None:
    table = Table(4, position=4)  # blocks 0 and 1 are behind it
    for index in (1, 7, 5):
        assert table.load(index)
    table.keep_slab()
    (kept,) = table.shared.spare()
    assert table.blocks.room.of_slab(GRANULE_BYTES, [])
    assert table.resident == [5, 7]
    assert table.blocks.room.of_slab(GRANULE_BYTES, []) is None
    assert table.blocks.room.of_slab(2 * GRANULE_BYTES, [kept]) is None
    assert table.shared.spare() == [kept]
    assert table.blocks.room.of_slab(GRANULE_BYTES, [kept])
    assert table.resident == [5, 7]
    assert table.shared.spare() == []


def test_kept_slabs_make_way_for_a_block_even_if_no_block_could() -> None:
    table = Table(2)
    for number in (1, 2):
        table.keep_slab(number)
    assert table.load(3)
    assert [slab.number for slab in table.shared.spare()] == [2]


@pytest.mark.parametrize("is_remote", [True, False])
def test_a_block_that_is_larger_than_its_index_says_is_decoded_again_unless_no_arena_holds_it(
    is_remote: bool,
) -> None:
    arena_bytes = 3 * GRANULE_BYTES
    for size, is_refused in ((arena_bytes, False), (arena_bytes + 1, True)):
        table = Table(3, is_remote=is_remote, decoded_bytes=1)
        assert table.load(3)
        assert table.blocks.start(table.dataset, 3, greedy=True)
        decode = table.effects[-1]
        assert isinstance(decode, DecodeBlock)
        table.blocks.take_changes()
        table.blocks.decoded(BlockDecoded(decode.key, tasks.Decoded(size, stored=False), 0.0))
        if not is_remote and not is_refused:  # at once, since there is room
            again = table.effects[-1]
            assert isinstance(again, DecodeBlock)
            assert (again.key, again.into.length) == (decode.key, size)
            assert not table.blocks.take_changes()
            assert table.blocks.in_flight_count == 1
            continue
        (change,) = table.blocks.take_changes()
        assert (change.error is not None) == is_refused
        if isinstance(change.error, BudgetTooSmall):
            assert change.error.needed == size + GRANULE_BYTES * is_remote
            assert change.error.budget == arena_bytes
        assert table.dataset.marks.decoded[3] == size
        assert table.blocks.in_flight_count == 0
        assert table.allocator.free_bytes == arena_bytes - GRANULE_BYTES * (
            is_remote and not is_refused
        )


def test_an_heir_has_what_is_in_memory_of_equal_blocks_under_new_keys() -> None:
    table = Table(4, is_remote=False, decoded_bytes=GRANULE_BYTES)
    former, marks = table.dataset, table.dataset.marks
    for index in (1, 2, 5):
        assert table.blocks.start(former, index, greedy=False)
        decode = table.effects[-1]
        assert isinstance(decode, DecodeBlock)
        done = tasks.Decoded(GRANULE_BYTES // 2, stored=True)
        table.blocks.decoded(BlockDecoded(decode.key, done, 0.0))
    table.blocks.pin(former, np.array([5]))  # it is in use
    keys, free = set(marks.keys.tolist()), table.allocator.free_bytes
    heir = replace(
        former, dataset_id=2, marks=Marks.of(marks.raw, marks.decoded.copy(), marks.raw > 0)
    )
    blocks = np.array([0, 3, 4])
    table.blocks.inherit(BlocksInherited(heir, former, blocks, np.array([1, 5, 2])))
    assert np.flatnonzero(heir.marks.keys).tolist() == [0, 4]
    assert keys.isdisjoint(heir.marks.keys[[0, 4]].tolist())
    assert table.resident == [5]
    assert heir.marks.is_exact[blocks].all()
    assert table.allocator.free_bytes == free
    table.blocks.unpin(former, np.array([5]))
    table.blocks.forget_dataset(former)
    table.blocks.forget_dataset(heir)
    assert table.allocator.free_bytes == table.allocator.size_bytes


def _planned(table: Table, *counts: int) -> list[SlabTask]:
    """The tasks of a plan whose batches need so many blocks each."""
    blocks = np.arange(sum(counts), dtype=np.int64)
    index = np.zeros((len(blocks), 2), np.int32)
    index[:, 0] = blocks
    batches = tuple(Batch(step, rows, rows) for step, rows in enumerate(counts))
    table.tasks.add(table.stream, Plan(batches, blocks, index, 0))
    return list(table.stream.tasks)


def test_a_plan_is_split_if_its_blocks_take_more_than_nine_tenths_of_the_arena() -> None:
    assert [len(task.plan.batches) for task in _planned(Table(10), 4, 5)] == [2]
    assert [len(task.plan.batches) for task in _planned(Table(10), 5, 5)] == [1, 1]
    assert [len(task.plan.batches) for task in _planned(Table(4), 1, 1, 1, 1)] == [2, 2]
    assert [len(task.plan.batches) for task in _planned(Table(4), 1, 1, 2, 2)] == [2, 1, 1]


def test_a_batch_may_need_the_whole_arena_and_no_more() -> None:
    (task,) = _planned(Table(4), 4)
    assert task.phase is SlabPhase.WAITING
    (task,) = _planned(Table(4), 5)
    assert task.phase is SlabPhase.FAILED
    assert isinstance(task.error, BudgetTooSmall)
    assert (task.error.needed, task.error.budget) == (5 * GRANULE_BYTES, 4 * GRANULE_BYTES)


def test_a_task_is_halved_as_long_as_it_has_two_batches() -> None:
    table = Table(12)
    (task,) = _planned(table, 1, 1, 1)
    assert table.tasks.halve(task)
    assert [len(each.plan.batches) for each in table.stream.tasks] == [1, 2]
    assert not table.tasks.halve(task)
    assert table.tasks.halve(table.stream.tasks[1])
    assert [each.plan.batches[0].step for each in table.stream.tasks] == [0, 1, 2]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=COUNT))
def test_a_task_needs_its_decoded_blocks_and_the_largest_that_is_still_raw(
    sizes: list[tuple[int, int]],
) -> None:
    table = Table(12)
    (task,) = _planned(table, len(sizes))
    for block, (raw, decoded) in enumerate(sizes):
        table.dataset.marks.raw[block], table.dataset.marks.decoded[block] = raw, decoded
    on_the_way = [raw for raw, decoded in sizes if decoded]
    kept = sum(decoded or raw for raw, decoded in sizes)
    assert task.memory_needed == kept + max(on_the_way, default=0)


INDEXED = 1 << 20


def _dataset(indexed: list[int]) -> DatasetBlocks:
    sizes = np.array(indexed, np.int64)
    marks = Marks.of(sizes.copy(), sizes, np.ones(len(sizes), np.bool_))
    return DatasetBlocks(1, "d", marks, sizes, sizes, url=str)


def test_until_a_block_was_decoded_the_index_is_believed() -> None:
    dataset = _dataset([1000, 0, 2000])
    assert dataset.decoded(np.arange(3)).tolist() == [1000, 0, 2000]
    assert [dataset.decoded_bytes(block) for block in range(3)] == [1000, 0, 2000]


def test_a_decoded_block_is_known_exactly_and_others_become_as_large_a_part() -> None:
    dataset = _dataset([10_000, 0, 20_000, 30_000])
    dataset.was_decoded(2, 8000)
    assert dataset.decoded_bytes(2) == 8000
    assert 4000 <= dataset.decoded_bytes(0) <= 4100
    assert dataset.decoded_bytes(1) == 0
    dataset.was_decoded(0, 9000)
    assert dataset.decoded_bytes(2) == 8000
    assert dataset.decoded_bytes(3) >= 27_000


def test_one_block_larger_than_indexed_does_not_make_others_seem_larger() -> None:
    dataset = _dataset([1000, 1000])
    dataset.was_decoded(0, 1 << 40)
    assert dataset.decoded_bytes(0) == 1 << 40
    assert dataset.decoded_bytes(1) == 1000


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 21)), min_size=1))
def test_many_are_expected_as_each_is(blocks: list[tuple[int, int]]) -> None:
    dataset = _dataset([indexed for indexed, _ in blocks])
    for block, (indexed, decoded) in enumerate(blocks):
        if indexed and block % 2:
            dataset.was_decoded(block, decoded)
        together = dataset.decoded(np.arange(len(blocks))).tolist()
        assert together == [dataset.decoded_bytes(one) for one in range(len(blocks))]


@given(st.floats(0.01, 0.9), st.floats(1e-6, 0.09))
def test_few_blocks_are_larger_than_expected_however_they_grow(first: float, spread: float) -> None:
    """The worst case: each is larger than any before."""
    parts, too_small = DecodedParts(), 0
    for part in np.linspace(first, first + spread, 5000).tolist():
        decoded = int(part * INDEXED)
        too_small += decoded > parts.expected(INDEXED)
        parts.seen(INDEXED, decoded)
    most = 2 + math.log(max(spread * INDEXED / 64, 1)) / math.log(9 / 8)
    assert too_small <= most


@pytest.mark.parametrize("seed", [1, 2, 5])
def test_blocks_are_read_far_less_often_than_once_a_batch(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = simulate(lambda: far_too_small(random.Random(seed), monkeypatch), epoch_of_one)
    (consumer,) = run.consumers
    assert consumer.ended
    once_a_batch = sum(len({block for block, _ in samples}) for _, _, samples in consumer._steps)
    told = [note for note in run.notes if "smaller than the open windows" in note.event]
    assert run.outside.extracted
    assert len(told) == 1
    assert run.outside.loads < once_a_batch * 2 / 3


def test_excerpts_stay_while_readers_of_other_datasets_use_them() -> None:
    """The readers of the dataset that they were made for have gone."""
    first, second, read = object(), object(), [object()]
    excerpts = SimpleNamespace(is_open=True, awaited=lambda: (second,) if read else (), closed=0)

    def close() -> None:
        excerpts.closed += 1

    excerpts.close = close
    streams = SimpleNamespace(of_dataset=lambda dataset: dataset is second and bool(read))
    passes = Passes(SimpleNamespace(), excerpts, streams, lambda _: None)  # type: ignore[arg-type]
    passes._opened_for = (first,)  # type: ignore[assignment]
    for _ in range(3):
        assert not passes.look(None)
    assert not excerpts.closed
    read.clear()
    assert not passes.look(None)
    assert excerpts.closed == 1


def _lost(losses: int, read_between: int) -> bool:
    """Whether excerpts are needed after a block of 60 bytes was lost so often, with so many bytes
    read in between, in an arena of 100.
    """
    holdings, block = Holdings(100), SimpleNamespace(kept_bytes=60)
    for _ in range(losses):
        holdings.loaded_bytes += read_between
        holdings.lose(block)  # type: ignore[arg-type]
    return holdings.needs_excerpts


def test_a_job_that_loses_little_of_what_it_reads_makes_no_excerpts() -> None:
    assert not _lost(losses=1, read_between=0)
    assert _lost(losses=2, read_between=0)
    assert _lost(losses=3, read_between=100)
    assert not _lost(losses=1000, read_between=240)


def test_streams_of_one_consumer_over_one_order_are_one_reader() -> None:
    table = Table(4)

    def begin(number: int, holder: int, step: int) -> int:
        at, order = Stream(0, 0, 0, 1, first_step=step), table.stream.walk.order
        walk = Walk(IN_ORDER, order, at, SlabSizes(1, 1, 0), count=1)
        stream = StreamState(number, table.stream.delivery, walk, holder, walk.position)
        table.shared.streams.add(stream)
        return walk.position

    begin(2, table.stream.holder, 3)
    behind, before = begin(3, 7, 2), begin(4, 7, 1)
    positions = [reading.position for reading in table.shared.readings(table.dataset)]
    assert positions == [0, before]
    assert before < behind
