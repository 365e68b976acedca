"""Requests between neighbours for runs of blocks and for single ones, in both directions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace
from scheduler_world import World
from small_engine import SmallEngine

from dataplane.arena.memfd import Arena
from dataplane.model.errors import ClosedError
from dataplane.model.records import BlockForm, Region
from dataplane.neighbours.wire import GIVEN_WHOLE, NOT_GIVEN
from dataplane.node.dataset import Dataset, dataset_of
from dataplane.node.effects import LentBlocks
from dataplane.node.fetch import RUN_PARTS, BlockRead, Fetcher, Report
from dataplane.node.stored import Preambles
from dataplane.rpc import tasks
from dataplane.rpc.fetches import (
    HeldDecoded,
    Neighbour,
    NeighbourGave,
    Outcome,
    PartlyGiven,
    Peer,
    ReadBody,
    ReadTarget,
)
from dataplane.rpc.lending import Asked, Request
from dataplane.scheduler import events

LENDER = Neighbour(Peer("host:1", "job", 1, bytes(32), "own", "node-1"), bytes(16), 0)


class Answers:
    """Those that neighbours have got, by number: what `give` gets, or None."""

    def __init__(self) -> None:
        self.found: dict[int, object] = {}
        self.after: dict[int, Callable[[], object]] = {}
        self.lending = self

    def owner_of(self, dataset: Dataset, block: int, _jobs: object) -> Neighbour | None:
        return replace(LENDER, block=block)

    def makers(self, job_id: str) -> Sequence[Peer]:
        return ()

    def _answer(self, number: int, answer: object) -> None:
        assert number not in self.found, "an ask is answered twice"
        self.found[number] = answer

    def give(
        self,
        number: int,
        first: Region,
        *,
        more: Sequence[Region] = (),
        ends: Sequence[int] = (),
        after: Callable[[], object],
    ) -> None:
        regions = [region for region in (first, *more) if region.length]
        self._answer(number, (regions, [*ends]))
        self.after[number] = after

    def refuse(self, number: int) -> None:
        self._answer(number, None)


def a_dataset(seed: int) -> Dataset:
    """With two blocks at least."""
    for each in range(seed, seed + 1000):
        world = World(random.Random(each))
        if world.manifest.block_count > 1:
            return dataset_of(1, world.manifest, world.spec)
    raise AssertionError


def expected_answer(ends: Sequence[int], regions: Sequence[Region]) -> object:
    """Of an ask for so many blocks, of which these regions are given, as wire.py describes it."""
    if all(end == NOT_GIVEN for end in ends):
        return None
    return [*regions], [*ends]


class Ask(Struct, frozen=True):
    """What a neighbour asks for, and how each block ends."""

    asked: Asked
    ends: tuple[int, ...]

    @property
    def numbers(self) -> range:
        return range(self.asked.number, self.asked.number + self.asked.request.count)

    def end_of(self, number: int) -> int:
        return self.ends[number - self.asked.number]


def drawn_asks(chance: random.Random, dataset: Dataset, refused: set[int]) -> list[Ask]:
    """For runs and single blocks, some of them wrong, while some blocks are refused in any case."""
    asks, number, shards = list[Ask](), 1, dataset.manifest.block_shard
    for _ in range(chance.randint(1, 5)):
        block = chance.randrange(len(shards))
        count = chance.randint(1, min(6, len(shards) - block + 1))
        blocks = range(block, block + count)
        is_outside = blocks[-1] >= len(shards)
        length = sum(dataset.blocks.read_bytes(n) for n in blocks if n < len(shards))
        is_longer = count > 1 and chance.random() < 0.1
        is_wrong = is_outside or is_longer or shards[block] != shards[blocks[-1]]
        of_blocks = bytes(16), block, 0, length + is_longer, BlockForm.RAW, count
        asked = Asked(number, "job", "asker", Request(1, *of_blocks))
        drawn = chance.choices([GIVEN_WHOLE, NOT_GIVEN, 77], k=count)
        ends = [
            NOT_GIVEN if is_wrong or n in refused else end
            for n, end in zip(blocks, drawn, strict=True)
        ]
        asks.append(Ask(asked, tuple(ends)))
        number += count
    return asks


def effect_of(event: events.NeighbourAsked, end: int) -> events.Effect:
    """What the scheduler answers."""
    if end == GIVEN_WHOLE:
        return events.LendBlock(event.number, Region(1000 * event.number, event.part.length))
    return (
        events.RefuseAsk(event.number)
        if end == NOT_GIVEN
        else events.OnlyDecoded(event.number, end)
    )


@given(st.integers(0, 50), st.randoms())
def test_each_ask_has_one_answer_when_all_its_blocks_have_one(
    seed: int, chance: random.Random
) -> None:
    """The plain twin of each ask is its list of ends; blocks end in any order."""
    dataset, answers, told = a_dataset(seed), Answers(), list[events.Event]()
    lent = LentBlocks(answers, told.append)
    refused = {n for n in range(dataset.manifest.block_count) if chance.random() < 0.2}
    for block in refused:  # they are on their way here
        lent.source_of(dataset, events.Fetch(1, 1, block, Region(0, 1)), [])
    asks = drawn_asks(chance, dataset, refused)
    for ask in asks:
        lent.asked(ask.asked, dataset)
    waiting = [event for event in told if isinstance(event, events.NeighbourAsked)]
    left = {event.number for event in waiting}
    assert len(left) == len(waiting) == len(told)
    chance.shuffle(waiting)
    for event in waiting:
        ask = next(each for each in asks if event.number in each.numbers)
        block = ask.asked.request.block + event.number - ask.asked.number
        assert (event.block, event.part.offset) == (block, 0)
        assert event.part.length == dataset.blocks.read_bytes(block)
        assert event.is_of_run == (len(ask.ends) > 1)
        effect = effect_of(event, ask.end_of(event.number))
        match effect:
            case events.LendBlock():
                lent.lend(effect)
            case events.OnlyDecoded():
                lent.say_decoded(effect)
            case _:
                lent.say_no(effect)
        left.remove(event.number)
        assert (ask.asked.number in answers.found) == left.isdisjoint(ask.numbers)
    told.clear()
    given = list[int]()
    for ask in asks:
        regions = [
            Region(
                1000 * n, dataset.blocks.read_bytes(ask.asked.request.block + n - ask.asked.number)
            )
            for n in ask.numbers
            if ask.end_of(n) == GIVEN_WHOLE
        ]
        found = answers.found[ask.asked.number]
        assert found == expected_answer(ask.ends, regions)
        if isinstance(found, tuple):
            answers.after[ask.asked.number]()
        given += [n for n in ask.numbers if ask.end_of(n) == GIVEN_WHOLE]
    assert told == [events.SendingEnded(each) for each in given]


@given(st.integers(0, 50), st.data())
def test_blocks_of_one_owner_that_are_fetched_together_are_one_read(
    seed: int, data: st.DataObject
) -> None:
    """As the engine carries out a scheduler's effects: `is_joined` names runs, owners divide them."""
    owners = data.draw(st.lists(st.sampled_from("aab-"), min_size=16, max_size=16))

    class Owners(Answers):
        def owner_of(self, dataset: Dataset, block: int, _jobs: object) -> Neighbour | None:
            name = owners[block]
            return (
                None
                if name == "-"
                else replace(LENDER, peer=replace(LENDER.peer, node_id=name), block=block)
            )

    joined = [False, *data.draw(st.lists(st.booleans(), max_size=15))]

    async def requests() -> list[list[int]]:
        small = SmallEngine(seed, Owners())
        small.deliver()
        count = small.dataset.manifest.block_count
        del joined[count:]
        small.fetch(
            [
                events.Fetch(block + 1, 1, block, Region(block, 1), is_joined)
                for block, is_joined in enumerate(joined)
            ]
        )
        small.close()
        return [[each.block for each in request] for request in small.requests]

    found = asyncio.run(requests())
    expected = list[list[int]]()
    for block, is_joined in enumerate(joined):
        if is_joined and owners[block] == owners[block - 1]:
            expected[-1].append(block)
        else:
            expected.append([block])
    assert found == expected


class Told:
    """An origin that ends each order as the test says."""

    def __init__(self) -> None:
        self.orders: list[tuple[Any, Report]] = []

    def read(self, order: ReadBody, report: Report) -> None:
        self.orders.append((order, report))


@given(st.lists(st.sampled_from([GIVEN_WHOLE, NOT_GIVEN, 77]), min_size=2, max_size=6))
def test_what_is_refused_of_a_run_is_asked_for_alone(ends: list[int]) -> None:
    origin, found = Told(), dict[int, Outcome]()
    preambles = Preambles(4096)
    fetcher = Fetcher(origin, preambles)  # type: ignore[arg-type]
    reads = [
        BlockRead(
            n,
            tasks.RawBlockRef("s3://b/0", n, 1, Region(10 * n, 9), Region(0, 0), 99),
            Region(64 * n, 9),
            lambda end, n=n: found.update({n: end}),
            copied_to=None,
            neighbour=replace(LENDER, block=5 + n),
            block=5 + n,
        )
        for n in range(len(ends))
    ]
    fetcher.fetch(reads)
    ((order, report),) = origin.orders
    assert order.targets == tuple(ReadTarget(10 * n, Region(64 * n, 9)) for n in range(len(ends)))
    assert order.neighbour == reads[0].neighbour
    report(PartlyGiven(tuple(ends)) if any(ends) else NeighbourGave(9 * len(ends)))
    left = [n for n, end in enumerate(ends) if end == NOT_GIVEN]
    assert [each.neighbour for each, _ in origin.orders[1:]] == [reads[n].neighbour for n in left]
    assert [each.into for each, _ in origin.orders[1:]] == [reads[n].into for n in left]
    for _, end in origin.orders[1:]:
        end(None)
    each_end = {GIVEN_WHOLE: NeighbourGave(9), 77: HeldDecoded(77), NOT_GIVEN: None}
    assert found == {n: each_end[end] for n, end in enumerate(ends)}
    preambles.close()


@pytest.mark.parametrize("is_closed", [False, True])
def test_what_a_neighbour_gave_of_a_block_is_told_when_all_of_it_is_there(
    is_closed: bool,
) -> None:
    """Its two pieces are asked for, its preamble comes from the store, and is then copied."""
    arena = Arena.create("blocks", 4096)
    if is_closed:
        arena.close()
    pieces = Region(20, 10), Region(50, 1)

    async def run() -> list[Outcome]:
        origin, found, preambles = Told(), list[Outcome](), Preambles(4096)
        fetcher = Fetcher(origin, preambles)  # type: ignore[arg-type]
        raw = tasks.RawBlockRef("s3://b/0", 0, 1, Region(0, 60), Region(0, 5), 99, pieces=pieces)
        read = BlockRead(1, raw, Region(0, 16), found.append, arena, LENDER, bytes(16))
        fetcher.fetch([read])
        asked = [(order, end) for order, end in origin.orders if order.neighbour is not None]
        assert [order.into for order, _ in asked] == [Region(5, 10), Region(15, 1)]
        for order, end in asked:
            end(NeighbourGave(order.length))
        assert found == []
        for order, end in origin.orders:
            if order.neighbour is None:
                preambles.arena.view(order.into.offset, 5)[:] = b"head!"
                end(None)
        await asyncio.sleep(0)
        assert is_closed or bytes(arena.view(0, 5)) == b"head!"
        preambles.close()
        arena.close()
        return found

    (end,) = asyncio.run(run())
    assert isinstance(end, ClosedError) if is_closed else end == NeighbourGave(11)


def read(
    block: int, neighbour: Neighbour | None, *pieces: Region, is_kept: bool = False
) -> BlockRead:
    raw = tasks.RawBlockRef("s3://b/0", 0, 1, Region(0, 10), Region(0, 0), 99, pieces=pieces)
    told = (lambda _: None) if is_kept else None
    return BlockRead(1, raw, Region(0, 10), bool, None, neighbour, bytes(16), block, told)


@pytest.mark.parametrize(
    ("last", "own", "may"),
    [
        (read(1, None), read(2, None), True),
        (read(1, LENDER), read(2, LENDER), True),
        (read(1, LENDER), read(2, None), False),
        (read(1, None), read(2, LENDER), False),
        (read(1, LENDER), read(3, LENDER), False),
        (
            read(1, LENDER),
            read(2, replace(LENDER, peer=replace(LENDER.peer, node_id="node-2"))),
            False,
        ),
        (read(1, LENDER), read(2, replace(LENDER, form=BlockForm.DECODED)), False),
        (read(1, LENDER), read(2, LENDER, Region(0, 4), Region(6, 4)), False),
        (read(1, LENDER, Region(0, 4), Region(6, 4)), read(2, LENDER), False),
        (read(1, LENDER), read(2, LENDER, is_kept=True), False),
        (read(1, None, is_kept=True), read(2, None), False),
    ],
)
def test_blocks_follow_each_other_if_they_come_from_one_place(
    last: BlockRead, own: BlockRead, may: bool
) -> None:
    assert own.may_follow([last], 20 * RUN_PARTS) is may
    assert not (own.may_follow([last], 20 * RUN_PARTS - 1) and own.neighbour)
