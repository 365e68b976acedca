"""What a node does with blocks that its neighbours ask for."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.arena.allocator import GRANULE_BYTES, Allocator
from dataplane.arena.slots import Slots, plan_slots
from dataplane.model.config import JobSpec
from dataplane.model.errors import StoreDenied
from dataplane.model.records import Region, Stream
from dataplane.plan.order import Order
from dataplane.rpc import tasks
from dataplane.scheduler.asks import PATIENCE_S, Asks, Borrowed
from dataplane.scheduler.blocks import BlockTable
from dataplane.scheduler.dataset import BlockPlaces, DatasetBlocks, DatasetLookup, Marks
from dataplane.scheduler.disk import DiskTier
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
from dataplane.scheduler.holdings import Holdings, WaitingTasks
from dataplane.scheduler.records import Delivery, Moment, StreamState
from dataplane.scheduler.streams import SharedSlabs, StreamTable
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
        self.allocator, self.time, streams = (
            Allocator(pages * GRANULE_BYTES),
            Moment(),
            StreamTable(),
        )
        self.effects: list[Effect] = []
        do, shared = self.effects.append, SharedSlabs(self.allocator, streams, self.time)
        waiting = WaitingTasks(self.time, Holdings(self.allocator.size_bytes))
        disk = DiskTier(0, 0, shared.readings)
        self.blocks = BlockTable(self.allocator, fetches, shared, waiting, disk, do, self.time)
        self.borrowed = Borrowed(self.blocks)
        self.asks = Asks(self.blocks, waiting, self.borrowed, do, self.time)
        delivery = Delivery(1, Slots(plan_slots(0, 4096)), DatasetLookup(self.dataset), None)
        order = Order(ROWS, 0, shuffle=False, lanes=1, window=1, epoch=0)
        walk = Walk(SPEC, order, Stream(0, 0, 0, 1), SlabSizes(1, 1, 0))
        streams.add(StreamState(1, delivery, walk, 1, 0))
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

    def fetched(self, error: StoreDenied | None = None) -> Fetch:
        """The last read has ended."""
        fetch = next(each for each in reversed(self.effects) if isinstance(each, Fetch))
        self.blocks.fetched(BlockFetched(fetch.key, error))
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
