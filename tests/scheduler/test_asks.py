"""A node's answers to neighbours that ask for blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from block_tables import TableParts
from hypothesis import given
from hypothesis import strategies as st
from other_orders import Backwards, Concatenated
from scheduler_cluster import Cluster, Shape

from dataplane.arena.allocator import GRANULE_BYTES
from dataplane.arena.slots import Slots, plan_slots
from dataplane.model.config import JobSpec
from dataplane.model.errors import ShardNotFound, StoreDenied, StoreError
from dataplane.model.records import Region, Stream
from dataplane.plan.order import Order
from dataplane.rpc import tasks
from dataplane.scheduler.asks import PATIENCE_S, Asks, Borrowed
from dataplane.scheduler.dataset import BlockName, BlockPlaces, DatasetBlocks, DatasetLookup, Marks
from dataplane.scheduler.events import (
    BlockDecoded,
    BlockFetched,
    DecodeBlock,
    Effect,
    Fetch,
    ForgetBlock,
    LendBlock,
    NeighbourAsked,
    OnlyDecoded,
    RefuseAsk,
)
from dataplane.scheduler.holdings import LENT_PARTS, LOADING_PARTS, Holdings
from dataplane.scheduler.next_use import NEVER, NextUse, WalkPosition
from dataplane.scheduler.records import BlockPhase, CachedBlock, Delivery, StreamState
from dataplane.scheduler.walk import SlabSizes, Walk

COUNT, PREAMBLE_BYTES = 8, 96
BLOCK_BYTES = GRANULE_BYTES - PREAMBLE_BYTES
ROWS = np.full(COUNT, 2, np.int64)
WHOLE = Region(0, BLOCK_BYTES)
SPEC = JobSpec("f", shuffle=False, global_batch=2)


class Owner:
    """A node with room for some blocks of a page each, which reads them in order."""

    def __init__(self, pages: int, *, fetches: int = 1, decoded_bytes: int = 0) -> None:
        lengths = np.full(COUNT, BLOCK_BYTES, np.int64)
        raw = lengths + PREAMBLE_BYTES
        marks = Marks.of(raw, np.full(COUNT, decoded_bytes), np.ones(COUNT, np.bool_))
        apart = np.arange(COUNT) * (64 << 20)
        places = BlockPlaces(np.arange(COUNT, dtype=np.int32), apart, lengths)
        self.dataset = DatasetBlocks(1, "d", marks, lengths, ROWS, url=str, places=places)
        parts = TableParts(pages * GRANULE_BYTES, fetches)
        self.allocator, self.time, self.effects = parts.allocator, parts.moment, parts.effects
        self.blocks = parts.blocks
        self.borrowed = Borrowed(self.blocks)
        self.asks = Asks(self.blocks, parts.waiting, self.borrowed, self.effects.append, self.time)
        delivery = Delivery(1, Slots(plan_slots(0, 4096)), DatasetLookup(self.dataset), None)
        order = Order(ROWS, 0, shuffle=False, lanes=1, window=1, epoch=0)
        walk = Walk(SPEC, order, Stream(0, 0, 0, 1), SlabSizes(1, 1, 0))
        parts.streams.add(StreamState(1, delivery, walk, 1, 0))
        self._count = 0

    def ask(self, block: int, part: Region = WHOLE, *, decoded: bool = False, of_run: bool = False):
        """Ask, and let the owner begin what it can. Returns the number."""
        self._count += 1
        self.asks.asked(NeighbourAsked(self._count, self.dataset, block, part, decoded, of_run))
        self.asks.load()
        self.asks.refuse_idle_of_runs()
        self.absorb()
        return self._count

    def absorb(self) -> None:
        for changed in self.blocks.take_changes():
            self.asks.block_changed(changed)

    def fetched(self, error: StoreError | None = None) -> Fetch:
        """The last read has ended."""
        fetch = next(each for each in reversed(self.effects) if isinstance(each, Fetch))
        is_lost = isinstance(error, ShardNotFound)
        self.blocks.fetched(BlockFetched(fetch.key, error, is_lost=is_lost))
        self.absorb()
        return fetch

    def load(self, index: int) -> None:
        assert self.blocks.start(self.dataset, index, greedy=True)
        self.fetched()

    def answers(self) -> list[Effect]:
        return [e for e in self.effects if isinstance(e, LendBlock | OnlyDecoded | RefuseAsk)]


def test_a_block_that_is_not_there_is_read_from_the_store_and_lent_without_its_preamble():
    owner = Owner(4)
    first, second = owner.ask(3), owner.ask(3, Region(100, 50))
    (fetch,) = [each for each in owner.effects if isinstance(each, Fetch)]
    assert fetch.is_lent
    assert owner.answers() == []
    at = owner.fetched().into.offset + PREAMBLE_BYTES
    assert owner.answers() == [
        LendBlock(first, Region(at, BLOCK_BYTES)),
        LendBlock(second, Region(at + 100, 50)),
    ]
    block = owner.blocks.find(owner.dataset, 3)
    assert block is not None
    owner.asks.sent(first)
    assert not block.is_evictable
    owner.asks.sent(second)
    assert block.is_evictable
    assert owner.borrowed.count == 0


def test_a_block_whose_shard_is_gone_is_not_lent():
    owner = Owner(4, decoded_bytes=GRANULE_BYTES)
    waiting = owner.ask(3)
    owner.fetched(ShardNotFound("it is gone", shard="file:///3"))
    assert owner.answers() == [RefuseAsk(waiting)]
    assert owner.blocks.start(owner.dataset, 3, greedy=True)
    *_, decode = owner.effects
    assert isinstance(decode, DecodeBlock)
    assert (decode.raw, str(decode.lost)) == (None, "it is gone")
    again = owner.ask(3)
    assert owner.answers()[1:] == [RefuseAsk(again)]


def test_what_is_no_part_of_the_block_is_refused():
    owner = Owner(4)
    owner.load(1)
    for part in (Region(0, BLOCK_BYTES + 1), Region(BLOCK_BYTES, 1), Region(1 << 63, 1 << 63)):
        number = owner.ask(1, part)
        assert owner.answers()[-1] == RefuseAsk(number)


def test_nothing_that_the_owner_needs_goes_for_a_neighbour():
    owner = Owner(2)
    owner.load(0)
    owner.load(7)  # needed later than the block that is asked for
    number = owner.ask(3)
    assert owner.answers() == [RefuseAsk(number)]
    assert not any(isinstance(each, ForgetBlock) for each in owner.effects)


def test_an_ask_waits_for_a_read_to_begin_but_not_for_ever():
    owner = Owner(8)
    numbers = [owner.ask(block) for block in range(COUNT)]
    begun = sum(isinstance(each, Fetch) for each in owner.effects)
    assert 0 < begun < COUNT
    owner.time.now += PATIENCE_S
    owner.asks.look()
    assert owner.answers() == []
    owner.time.now += 0.1
    owner.asks.look()
    assert owner.answers() == [RefuseAsk(number) for number in numbers[begun:]]


def test_a_read_that_fails_is_refused_to_all_who_wait():
    owner = Owner(4)
    numbers = [owner.ask(2), owner.ask(2)]
    owner.fetched(StoreDenied("no"))
    assert owner.answers() == [RefuseAsk(number) for number in numbers]


def test_what_is_asked_for_in_a_run_waits_for_a_read_and_not_for_its_beginning():
    owner = Owner(4, fetches=1)
    reading = owner.ask(1, of_run=True)
    assert owner.answers() == []
    owner.blocks.fetches.may_begin = lambda: False
    alone = owner.ask(2)
    refused = owner.ask(2, of_run=True), owner.ask(3, of_run=True)
    assert owner.answers() == [RefuseAsk(number) for number in refused]
    owner.fetched()
    assert isinstance(owner.answers()[-1], LendBlock)
    assert owner.answers()[-1].number == reading
    owner.time.now = 2 * PATIENCE_S
    owner.asks.look()
    assert owner.answers()[-1] == RefuseAsk(alone)
    assert owner.asks._count == 0
    assert not owner.asks._of_runs


def test_what_is_being_read_for_runs_is_not_looked_at_again_and_again():
    owner = Owner(4, fetches=8)
    numbers = [owner.ask(block, of_run=True) for block in range(3)]
    looked_at = list[int]()
    owner.blocks.find = lambda _, index: looked_at.append(index)
    owner.asks.refuse_idle_of_runs()
    assert (looked_at, owner.answers()) == ([], [])
    del owner.blocks.find
    for fetch in [each for each in owner.effects if isinstance(each, Fetch)]:
        owner.blocks.fetched(BlockFetched(fetch.key))
    owner.absorb()
    assert [each.number for each in owner.answers()] == numbers
    assert not owner.asks._of_runs


def test_a_read_for_a_run_that_must_begin_again_is_a_refusal():
    owner = Owner(4)
    number = owner.ask(1, of_run=True)
    fetch = next(each for each in owner.effects if isinstance(each, Fetch))
    owner.blocks.fetched(BlockFetched(fetch.key, is_away=True))
    owner.absorb()
    owner.asks.refuse_idle_of_runs()
    assert owner.answers() == [RefuseAsk(number)]
    assert owner.asks._count == 0


def test_nobody_gets_blocks_of_a_dataset_that_is_no_longer_read():
    owner = Owner(4)
    waiting = owner.ask(2)
    owner.asks.forget_dataset(owner.dataset)
    assert owner.answers() == [RefuseAsk(waiting)]
    owner.fetched()
    assert owner.blocks.find(owner.dataset, 2) is None
    later = owner.ask(2)
    assert owner.answers()[-1] == RefuseAsk(later)


def test_a_block_that_is_only_decoded_is_lent_decoded_if_that_is_asked_for():
    owner = Owner(8, decoded_bytes=9000)
    early = owner.ask(1)
    owner.fetched()
    assert owner.blocks.start(owner.dataset, 1, greedy=True)
    (decode,) = [each for each in owner.effects if isinstance(each, DecodeBlock)]
    free = owner.allocator.free_bytes
    owner.blocks.decoded(BlockDecoded(decode.key, tasks.Decoded(8200, stored=True), 0.0))
    owner.absorb()
    assert owner.allocator.free_bytes == free, "raw bytes that are being sent were freed"
    owner.asks.sent(early)
    assert owner.allocator.free_bytes == free + GRANULE_BYTES
    number = owner.ask(1)
    assert owner.answers()[-1] == OnlyDecoded(number, 8200)
    number = owner.ask(1, Region(8000, 200), decoded=True)
    assert owner.answers()[-1] == LendBlock(number, Region(decode.into.offset + 8000, 200))
    owner.asks.sent(number)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_decoded_block_is_never_made_for_a_neighbour(*, is_there: bool):
    owner = Owner(8, decoded_bytes=9000)
    if is_there:
        owner.load(1)
    number = owner.ask(1, decoded=True)
    assert owner.answers() == [RefuseAsk(number)]


SMALL = Shape(
    blocks=256, block_rows=125, window=256, batch=64, arena_bytes=2 << 20, slab_bytes=1 << 15,
    slots_bytes=1 << 19, epochs=1,
)  # fmt: skip
LARGER = Shape(
    blocks=512, block_rows=125, window=256, batch=128, arena_bytes=4 << 20, slab_bytes=1 << 17,
    slots_bytes=1 << 21, lanes=4, epochs=1,
)  # fmt: skip
SCARCE = Shape(
    nodes=2, ranks=1, lanes=1, window=2048, batch=32, blocks=32, shard_blocks=8, block_rows=64,
    row_bytes=4096, arena_bytes=4 << 20, slab_bytes=1 << 19, epochs=1,
)  # fmt: skip


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(SMALL, id="each block is needed by one node"),
        pytest.param(replace(SMALL, lanes=1), id="each block is needed by all nodes"),
        pytest.param(replace(LARGER, arena_bytes=8 << 20), id="two nodes need it, half fits"),
    ],
)
def test_memory_for_a_part_is_enough_to_read_each_block_once(shape: Shape) -> None:
    cluster = Cluster(shape)
    assert (
        shape.nodes * shape.arena_bytes <= shape.blocks * shape.block_rows * shape.row_bytes / 1.9
    )
    assert {block for _, block in cluster.reads} == set(range(shape.blocks))
    assert cluster.epoch_reads(0) <= 1.025, "in the mean over seeds it is 1.01"
    assert cluster.longest_s[0] < 0.2


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(SCARCE, id="the open windows are larger than an arena"),
        pytest.param(
            replace(SCARCE, nodes=4, lanes=0, batch=64, arena_bytes=2 << 20), id="in order"
        ),
    ],
)
def test_no_rank_waits_for_room_in_the_memory_of_another_node(shape: Shape) -> None:
    """The ranks go on together: what one node waits for may be what others wait for."""
    cluster = Cluster(shape)
    assert cluster.longest_s[0] < 0.5, cluster.longest_s


def test_memory_for_most_of_the_dataset_is_used_even_if_the_index_says_blocks_are_larger() -> None:
    """The four arenas hold three quarters of it."""
    cluster = Cluster(replace(SMALL, epochs=3, arena_bytes=6 << 20, estimate=4.0))
    assert max(map(cluster.epoch_reads, (1, 2))) <= 0.68, "in the mean over seeds it is 0.61"


PAGE = 4096
BLOCK_COUNT = 60
ARENA = BLOCK_COUNT * PAGE


class Arena:
    """Blocks of a page each."""

    def __init__(self) -> None:
        pages = np.full(BLOCK_COUNT, PAGE, np.int64)
        marks = Marks.of(pages, np.zeros(BLOCK_COUNT, np.int64), np.ones(BLOCK_COUNT, np.bool_))
        self.dataset = DatasetBlocks(1, "d", marks, pages, pages, url=str)
        self.holdings = Holdings(ARENA)

    def load(self, index: int) -> CachedBlock:
        block = CachedBlock(self.dataset, index, index + 1, BlockPhase.READY)
        block.raw = Region(index * PAGE, PAGE)
        self.holdings.changed(block)
        return block

    def drop(self, block: CachedBlock) -> None:
        block.raw = None
        self.holdings.gone(block)


def test_what_is_being_loaded_takes_a_part_of_the_arena_or_is_two_blocks():
    arena = Arena()
    assert arena.holdings.may_read_ahead(ARENA)
    arena.holdings.loading(arena.load(50))
    assert arena.holdings.may_read_ahead(ARENA)
    for name in ("is_asked", "is_tight"):
        setattr(arena.holdings, name, True)
        assert not arena.holdings.may_read_ahead(ARENA)
        setattr(arena.holdings, name, False)
    arena.holdings.loading(arena.load(51))
    assert not arena.holdings.may_read_ahead(ARENA)
    arena = Arena()
    blocks = []
    while arena.holdings.may_read_ahead(PAGE):
        blocks.append(arena.load(len(blocks)))
        arena.holdings.loading(blocks[-1])
    assert len(blocks) == BLOCK_COUNT // LOADING_PARTS
    arena.holdings.loaded(blocks[0])
    assert arena.holdings.may_read_ahead(PAGE)
    arena.holdings.loaded(blocks[0])
    assert not arena.holdings.may_read_ahead(2 * PAGE)


def test_wanted_blocks_leave_room_for_neighbours_that_ask():
    arena = Arena()
    holdings = arena.holdings
    holdings.want(arena.dataset, np.arange(BLOCK_COUNT))
    blocks = [arena.load(index) for index in range(BLOCK_COUNT - BLOCK_COUNT // LENT_PARTS)]
    assert holdings.may_read_ahead(PAGE)
    holdings.is_asked = True
    assert not holdings.may_read_ahead(PAGE)
    arena.drop(blocks[0])
    assert holdings.may_read_ahead(PAGE)
    holdings.want(arena.dataset, np.array([1, 2]))
    holdings.want_no_more(arena.dataset, np.arange(1, BLOCK_COUNT))
    assert holdings.may_read_ahead((BLOCK_COUNT - BLOCK_COUNT // LENT_PARTS - 2) * PAGE)
    assert not holdings.may_read_ahead((BLOCK_COUNT - BLOCK_COUNT // LENT_PARTS - 1) * PAGE)


def test_what_was_sent_last_is_kept_for_others_and_what_was_sent_first_may_go():
    arena = Arena()
    blocks = [arena.load(index) for index in range(30)]
    for block in [*blocks, blocks[0]]:
        arena.holdings.sent(block)
    kept = [block for block in blocks if arena.holdings.may_be_asked(block)]
    assert kept == [blocks[0], *blocks[30 - BLOCK_COUNT // LENT_PARTS + 1 :]]
    arena.holdings.want(arena.dataset, np.array([1]))
    assert list(arena.holdings.lent()) == [*blocks[2:], blocks[0]]
    arena.drop(blocks[0])
    assert not arena.holdings.may_be_asked(blocks[0])
    assert list(arena.holdings.lent()) == blocks[2:]


def _blocks(dataset_id: int, count: int) -> DatasetBlocks:
    sizes = np.ones(count, np.int64)
    return DatasetBlocks(
        dataset_id, "d", Marks.of(sizes, sizes, np.ones(count, np.bool_)), sizes, sizes, str
    )


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_every_number_is_one_block_of_one_dataset(counts: list[int], data: st.DataObject) -> None:
    datasets = [_blocks(10 + at, count) for at, count in enumerate(counts)]
    lookup = DatasetLookup(*datasets)
    expected = [BlockName(each.dataset_id, i) for each in datasets for i in range(len(each.stored))]
    assert [lookup.name(number) for number in range(sum(counts))] == expected
    assert [lookup.number(*lookup.find(number)) for number in range(sum(counts))] == [
        *range(sum(counts))
    ]
    numbers = sorted(data.draw(st.sets(st.integers(0, sum(counts) - 1))))
    parts = lookup.parts(np.array(numbers, np.int64))
    found = [(part.dataset.dataset_id, i) for part in parts for i in part.blocks.tolist()]
    assert found == [expected[number] for number in numbers]
    assert all(len(part.blocks) for part in parts)
    for at, each in enumerate(datasets):
        each.marks.keys[:] = np.arange(len(each.stored)) + 100 * at
    keys = lookup.keys(np.array(numbers, np.int64)).tolist()
    assert keys == [100 * (expected[n].dataset_id - 10) + expected[n].block for n in numbers]
    assert all(each in lookup for each in datasets)
    assert _blocks(9, 1) not in lookup


def test_a_block_is_needed_where_the_order_over_all_datasets_has_it() -> None:
    first, second = _blocks(1, 3), _blocks(2, 2)
    lookup = DatasetLookup(first, second)
    orders = [Order(np.full(n, 4), 0, False, 1, 1, 0) for n in (3, 2)]
    order = Backwards(Concatenated(orders, [3, 2]))  # positions 0 to 7 belong to the second dataset
    uses = NextUse(lambda dataset: [WalkPosition(1, order, 5, lookup.number(dataset, 0))])
    blocks = [
        CachedBlock(*lookup.find(number), 1 + number, BlockPhase.READY) for number in range(5)
    ]
    for block in blocks:
        uses.add(block)
    found = [(block.dataset.dataset_id, block.index, use) for block, use in uses.farthest()]
    assert found == [(2, 1, NEVER), (1, 0, 11), (1, 1, 7), (1, 2, 3), (2, 0, 0)]
    assert [uses.use_of(*lookup.find(number)) for number in range(5)] == [11, 7, 3, 0, NEVER]


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.integers(0, 99), st.integers(1, 7))
def test_a_walk_works_with_any_order_that_has_the_three_methods(
    rows: list[int], seed: int, batch: int
) -> None:
    counts = [1, len(rows) - 1]
    parts = [np.array(rows[:1]), np.array(rows[1:])]
    order = Backwards(Concatenated([Order(each, seed, True, 2, 5, 0) for each in parts], counts))
    spec = JobSpec("f", global_batch=batch)
    plans = Walk(spec, order, Stream(0, 0, 0, 1), SlabSizes(4, 4, 0)).next_plans(sum(rows) + 1)
    taken = [(plan.blocks[b], row) for plan in plans for b, row in plan.row_index.tolist()]
    assert taken == list(zip(*order.locate(np.arange(sum(rows))), strict=True))
    assert sorted(taken) == [(b, row) for b, count in enumerate(rows) for row in range(count)]
