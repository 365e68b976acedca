"""Answers of makers are checked before a trainer gets them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from openings import opening
from scheduler_world import PAGE, World

from dataplane.arena.memfd import Arena
from dataplane.arena.slots import plan_slots
from dataplane.model.errors import CorruptShard, NeighbourGone
from dataplane.model.records import MixHistory, Region, ShareChange, Stream, Topology
from dataplane.node.dataset import dataset_of
from dataplane.node.delivery import DelegatedJob, DeliveryArena
from dataplane.node.effects import Delegating
from dataplane.rpc import fetches, lending, messages, tasks
from dataplane.rpc.codec import decode, encode
from dataplane.scheduler import events
from dataplane.scheduler.events import GiveUpSlab

DIGEST, ROOM, PLACE = "d" * 32, 4096, Topology(1, 2, 1, 2, 1, 2)
WEIGHTS = MixHistory((ShareChange(0, 0, (1, 2)), ShareChange(3, 64, (2, 1))), 90)
AT = Stream(3, 64, 1, 2, step_stride=2, mix=WEIGHTS)
MAKER = fetches.Peer("10.0.0.2:1", "job", 1, bytes(32), "own", "maker")
OTHER = fetches.Peer("10.0.0.3:1", "job", 1, bytes(32), "own", "other")


class Reads:
    """Remembers what is asked for."""

    def __init__(self) -> None:
        self.orders: list[tuple[fetches.ReadSlab, Callable[[fetches.ReadEnded], None]]] = []
        self.detached: list[int] = []
        self.given_up: list[int] = []

    def read_slab(
        self, order: fetches.ReadSlab, _fd: int, report: Callable[[fetches.ReadEnded], None]
    ) -> int:
        self.orders.append((order, report))
        return 40 + len(self.orders)

    def end_slab(self, number: int) -> None:
        self.given_up.append(number)

    def detach_arena(self, arena_id: int) -> None:
        self.detached.append(arena_id)


class Makers:
    """The other nodes."""

    def __init__(self, *makers: fetches.Peer) -> None:
        self.found: Sequence[fetches.Peer] = makers

    def makers(self, job_id: str, /) -> Sequence[fetches.Peer]:
        return self.found if job_id == "job" else ()


class Delegated:
    """A delivery of which other nodes make slabs, and all that is told to the scheduler."""

    def __init__(self, delivery: DeliveryArena) -> None:
        self.reads, self.makers, self.told = Reads(), Makers(MAKER, OTHER), list[events.Event]()
        neighbours: Any = self.makers
        self.delegating = Delegating(self.reads, neighbours, self.told.append, self._made)
        self.made = list[object]()
        source = messages.DatasetSource(("s3://bucket/data",))
        request = opening(source, PLACE, job="job", launch="launch", member="member")
        delivery.job = DelegatedJob(request, DIGEST, "")
        self.delivery = delivery
        self.delegating.open(delivery)

    def _made(self, delivery: DeliveryArena, result: tasks.ResultBody) -> tasks.ResultBody:
        assert delivery is self.delivery
        self.made.append(result)
        return result

    def make(self, maker: str = "maker") -> None:
        steps, coming = lending.StepRange(4, 2), (lending.StepRange(8, 2),)
        self.delegating.make(
            events.MakeElsewhere(
                7, self.delivery.delivery_id, AT, steps, coming, Region(0, ROOM), 8192, maker
            )
        )

    def answer(self, note: bytes, length: int = 100, **more: Any) -> tasks.ResultBody:
        self.make()
        _, report = self.reads.orders.pop()
        report(fetches.ReadEnded(1, note=note, neighbour_bytes=length, **more))
        told = self.told.pop()
        assert isinstance(told, events.SlabAssembled)
        assert told.number == 7
        assert self.made.pop() is told.result
        return told.result


@pytest.fixture
def delegated() -> Iterator[Delegated]:
    world, plan = World(random.Random(1)), plan_slots(0, PAGE)
    arena = Arena.create("test", plan.arena_bytes)
    dataset = dataset_of(1, world.manifest, world.spec)
    yield Delegated(DeliveryArena(1, arena, plan, (dataset,)))
    arena.close()


def note(body: messages.FromNodeBody) -> bytes:
    return encode(messages.FromNode(1, body))


def slab(bytes_used: int, layout: bytes, steps: Sequence[int] = (4, 6)) -> messages.Slab:
    batches = tuple(messages.Batch(step, 1, 1) for step in steps)
    return messages.Slab(1, 1, Region(0, 4096), batches, layout, bytes_used=bytes_used)


def layout(*columns: messages.Column) -> bytes:
    return encode(messages.Layout(columns))


GOOD = messages.Column(values=(0, 32), lengths=(64, 96), width=(1, 1))


def test_a_maker_is_told_all_that_a_slab_depends_on(delegated: Delegated) -> None:
    assert delegated.told == [
        events.MakersKnown(delegated.delivery.delivery_id, ("maker", "other"))
    ]
    delegated.make()
    ((order, _),) = delegated.reads.orders
    assert order.maker == MAKER
    asked = decode(lending.MakeSlab, order.request)
    coming = (lending.StepRange(8, 2),)
    of_slab = DIGEST, AT, lending.StepRange(4, 2), 8192, asked.opening
    assert asked == lending.MakeSlab(*of_slab, "", coming)
    opening = decode(messages.OpenJob, bytes(asked.opening))
    assert opening.source.urls == ("s3://bucket/data",)


def test_what_describes_a_slab_points_nowhere_else(delegated: Delegated) -> None:
    made = tasks.Assembled(2, bytes_used=100, layout=layout(GOOD))
    assert delegated.answer(note(slab(100, layout(GOOD)))) == made
    for wrong in (
        b"\xff\xff",
        note(slab(100, layout(GOOD), (4, 6, 8))),
        note(slab(100, layout(GOOD), (6, 8))),
        note(slab(100, layout(GOOD), ())),
        note(slab(101, layout(GOOD))),
        note(slab(ROOM + 1, layout(GOOD))),
        note(slab(100, layout(GOOD, GOOD))),
        note(slab(100, layout(messages.Column((101,))))),
        note(slab(100, layout(messages.Column((), (101,))))),
        note(slab(100, b"\xff")),
        note(messages.EndOfStream(1)),
    ):
        assert isinstance(delegated.answer(wrong), NeighbourGone), wrong


def test_errors_of_the_data_and_of_makers_are_told_apart(delegated: Delegated) -> None:
    broken = CorruptShard("s3://bucket/data/1 is broken", shard="s3://bucket/data/1")
    found = delegated.answer(note(broken))
    assert isinstance(found, CorruptShard)
    assert isinstance(delegated.answer(b"", error=NeighbourGone("it has died")), NeighbourGone)
    working = delegated.answer(note(messages.Working("making it")), length=0)
    assert isinstance(working, NeighbourGone)
    assert working.working
    too_large = note(slab(ROOM + 1, layout(GOOD)))
    assert delegated.answer(too_large, length=0) == tasks.Assembled(0, bytes_needed=ROOM + 1)


def test_makers_come_and_go(delegated: Delegated) -> None:
    delegated.told.clear()
    delegated.makers.found = (OTHER,)
    delegated.delegating.nodes_changed("another job")
    assert not delegated.told
    delegated.delegating.nodes_changed("job")
    assert delegated.told == [events.MakersKnown(delegated.delivery.delivery_id, ("other",))]
    delegated.make()
    assert not delegated.reads.orders
    told = delegated.told[-1]
    assert isinstance(told, events.SlabAssembled)
    assert isinstance(told.result, NeighbourGone)
    newer = fetches.Peer("10.0.0.3:1", "job", 2, bytes([1] * 32), "own", "other")
    delegated.makers.found = (newer,)
    count = len(delegated.told)
    delegated.delegating.nodes_changed("job")
    assert len(delegated.told) == count, "the same nodes, with another key"
    delegated.make("other")
    assert delegated.reads.orders[0][0].maker == newer
    delegated.delegating.drop(delegated.delivery.delivery_id)
    assert delegated.reads.detached == [delegated.delivery.delivery_id]


def test_a_slab_is_given_up_by_the_number_of_its_order_until_that_has_ended(
    delegated: Delegated,
) -> None:
    delegated.make()
    delegated.delegating.give_up(GiveUpSlab(7))
    assert delegated.reads.given_up == [41]
    _, report = delegated.reads.orders.pop()
    report(fetches.ReadEnded(41, NeighbourGone("silent", peer="maker")))
    delegated.delegating.give_up(GiveUpSlab(7))
    assert delegated.reads.given_up == [41]
