"""Jobs of one group and peers of one rank: each slab is made once, and none waits for another."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_run import Run
from scheduler_scenes import simulate
from scheduler_world import PAGE

from dataplane.arena.allocator import Allocator
from dataplane.arena.slots import SlotLayout
from dataplane.model.changes import NO_GAPS
from dataplane.model.errors import BudgetTooSmall
from dataplane.model.records import MixHistory, Region, ShareChange, Stream
from dataplane.rpc.tasks import Assembled
from dataplane.scheduler.records import Group, Moment, SharedSlab
from dataplane.scheduler.streams import SharedSlabs, _Behind, _distance

SEEDS = st.integers(0, 10**9)


def together(run: Run, *, peers: bool) -> None:
    """Consumers of a group that all walk over one epoch, in an arena that has room for all of it:
    jobs that declared it, or peers of one rank.
    """
    run.worlds = {1: run.worlds[1]}
    world, group = run.worlds[1], "group"
    run.layout = SlotLayout(8 * PAGE, 6, run.layout.zone_bytes + 16 * PAGE)
    place = run.deliver_to(world, group, is_declared=not peers)
    for _ in range(run.chance.randint(2, 4)):
        run.consume(place, 0, 1, steps=(0, 1))
        place = place if peers else run.deliver_to(world, group, is_declared=True)


@settings(max_examples=20)
@given(SEEDS, st.booleans())
def test_where_there_is_room_each_slab_is_made_once(seed: int, peers: bool) -> None:
    run = simulate(
        lambda: Run(random.Random(seed), tight=False, factor=200),
        lambda run: together(run, peers=peers),
    )
    assert not [c.error for c in run.consumers if c.error is not None]
    made = run.outside.assembled
    assert len(set(made)) == len(made)
    if all(consumer.ended for consumer in run.consumers):
        assert run.outside.copied >= (len(run.consumers) - 1) * len(made)
    told = [note.facts for note in run.notes if note.event == "shared"]
    assert told == [{"made": len(made), "copied": run.outside.copied}] * bool(run.outside.copied)


def test_a_stream_whose_next_slabs_are_kept_needs_none_of_their_blocks() -> None:
    run = Run(random.Random(3), tight=False, factor=400)
    world = run.worlds[1]
    for _ in range(2):
        run.consume(run.deliver_to(world, "group", is_declared=True), 0, 1, steps=(0, 1))
    first = run.consumers[0]
    while not first.ended:
        first.ask()
        run.drain()
        while first.held:
            first.release()
    run.drain()
    stream, shared = run.scheduler._streams.find(2), run.scheduler._shared
    assert stream is not None
    assert stream.tasks
    assert stream.position < shared.position(stream) == stream.planned_to
    run.end()


class _Consumers:
    """One consumer of every group, which reads from a position on."""

    def __init__(self, position: int) -> None:
        order = SimpleNamespace(sample_count=1000)
        at = Stream(0, 0, 0, 1)
        walk = SimpleNamespace(stream=at, global_batch=1, order=order, gaps=NO_GAPS)
        self._stream = SimpleNamespace(walk=walk, wanted_position=position, after=None)

    def of_group(self, group: Group) -> list[Any]:
        return [self._stream]


def test_keeping_a_new_slab_evicts_only_memory_that_is_needed_later() -> None:
    allocator, group = Allocator(64 * PAGE), Group("group", is_declared=True)
    streams: Any = _Consumers(position=5)
    shared = SharedSlabs(allocator, streams, Moment())

    def slab(position: int) -> SharedSlab:
        return SharedSlab(group, (0, position, 1, 1, None), position, Region(0, 8 * PAGE))

    for position in (10, 20, 30, 40):
        kept = slab(position)
        offset = allocator.allocate(8 * PAGE)
        assert offset is not None
        shared.begin(kept, Region(offset, 8 * PAGE))
        kept.made = Assembled(1, bytes_used=8 * PAGE)
    assert shared.make_way(slab(50)) is None
    assert [each.number for each in shared.spare()] == [40, 30, 20, 10]
    assert [each.number for each in shared.make_way(slab(25)) or ()] == [30]
    assert [each.number for each in shared.spare()] == [30, 20, 10]
    # No consumer reads earlier slabs again: they are evicted first, the oldest first.
    behind = slab(4)
    shared.begin(behind, Region(allocator.allocate(8 * PAGE) or 0, 8 * PAGE))
    behind.made = Assembled(1, bytes_used=8 * PAGE)
    assert [each.number for each in shared.spare()] == [4, 30, 20, 10]
    assert shared.make_way(slab(3)) is None


def test_a_slab_is_found_by_a_task_of_the_same_steps_and_by_no_other() -> None:
    def task(
        epoch: int, position: int, stride: int, batches: int, of: Group, mix: Any = None
    ) -> Any:
        walk = SimpleNamespace(
            stream=Stream(epoch, 0, 0, 1, step_stride=stride, mix=mix),
            sizes=SimpleNamespace(batch_bytes=0),
            position_of=lambda plan: plan.first_position,
        )
        plan = SimpleNamespace(first_position=position, batches=(None,) * batches)
        delivery = SimpleNamespace(group=of)
        stream = SimpleNamespace(walk=walk, delivery=delivery)
        return SimpleNamespace(stream=stream, delivery=delivery, plan=plan, oversize=False)

    group = Group("group", is_declared=True)
    shared = SharedSlabs(Allocator(64 * PAGE), cast("Any", None), Moment())
    slab = shared.wanted(task(1, 40, 2, 3, group), PAGE)
    assert slab is not None
    shared.begin(slab, Region(0, PAGE))
    assert shared.find(task(1, 40, 2, 3, group)) is slab
    others = [(0, 40, 2, 3), (1, 46, 2, 3), (1, 40, 1, 3), (1, 40, 2, 2)]
    assert not [each for each in others if shared.find(task(*each, group)) is not None]
    weights = MixHistory((ShareChange(0, 0, (1, 2)),))
    assert shared.find(task(1, 40, 2, 3, group, weights)) is None
    assert shared.find(task(1, 40, 2, 3, Group("another", is_declared=True))) is None


@given(st.data())
def test_a_consumer_needs_exactly_the_steps_that_it_has_not_reached(
    data: st.DataObject,
) -> None:
    batch, stride = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    first, epoch = data.draw(st.integers(0, stride)), data.draw(st.integers(1, 3))
    cursor, goes_on = data.draw(st.integers(0, 9)), data.draw(st.booleans())
    count = 60
    mine = range(cursor + first * batch, count, stride * batch)
    wanted = data.draw(st.sampled_from([*mine, count]))
    walk = SimpleNamespace(
        stream=Stream(epoch, cursor, 0, 1, first, stride),
        global_batch=batch,
        order=SimpleNamespace(sample_count=count),
        gaps=NO_GAPS,
    )
    stream: Any = SimpleNamespace(walk=walk, wanted_position=wanted)
    behind = _Behind.of(stream, goes_on=goes_on)
    later = range(first % stride * batch, count, stride * batch)
    for position in range(count):
        assert behind.comes_to(epoch, position, stride) == (position in mine and position >= wanted)
        assert behind.comes_to(epoch + 1, position, stride) == (goes_on and position in later)
        assert not behind.comes_to(epoch - 1, position, stride)
        assert not behind.comes_to(epoch, position, stride + 1)


def test_the_distance_of_a_slab_is_measured_from_its_nearest_consumer_across_epochs() -> None:
    def behind(epoch: int, position: int) -> _Behind:
        return _Behind(epoch, position, 0, 0, 1, 1, sample_count=100, goes_on=True)

    def away(epoch: int, position: int, *behinds: _Behind) -> int | None:
        group = Group("group", is_declared=False)
        return _distance(SharedSlab(group, (epoch, position, 1, 1), 1, Region(0, 1)), behinds)

    assert away(2, 30, behind(2, 10)) == 20
    assert away(3, 30, behind(1, 90)) == 140
    assert away(2, 30, behind(2, 10), behind(2, 25), behind(2, 31), behind(1, 99)) == 5
    assert away(2, 30, behind(2, 31), behind(3, 0)) is None


class _Nobody:
    def of_group(self, _group: Group) -> list[Any]:
        return []


def _kept(shared: SharedSlabs, allocator: Allocator, slab: SharedSlab, length: int) -> SharedSlab:
    offset = allocator.allocate(length)
    assert offset is not None
    shared.begin(slab, Region(offset, length))
    slab.made = Assembled(1, bytes_used=length)
    return slab


def test_kept_slabs_take_half_of_the_arena_and_those_without_a_consumer_a_sixteenth() -> None:
    allocator, group = Allocator(64 * PAGE), Group("group", is_declared=True)
    streams: Any = _Nobody()
    shared = SharedSlabs(allocator, streams, Moment())

    def slab(number: int, pages: int = 1) -> SharedSlab:
        return SharedSlab(group, (0, number, 1, 1), number, Region(0, pages * PAGE))

    for number in range(1, 5):
        _kept(shared, allocator, slab(number), PAGE)
    assert [each.number for each in shared.make_way(slab(5)) or ()] == [1, 2, 3, 4]
    for number in (5, 6):
        _kept(shared, allocator, slab(number), PAGE)
    assert [each.number for each in shared.make_way(slab(7)) or ()] == [3, 4, 5, 6]
    assert shared.make_way(slab(8, pages=29)) == [shared.spare()[0], *shared.spare()[1:]]
    assert [each.number for each in shared.spare()] == [4, 5, 6]
    assert shared.make_way(slab(9, pages=32)) == []
    assert shared.spare() == []
    assert shared.make_way(slab(10, pages=33)) is None


def test_a_slab_that_is_being_made_or_copied_is_not_evicted() -> None:
    allocator, group = Allocator(64 * PAGE), Group("group", is_declared=True)
    streams: Any = _Nobody()
    shared = SharedSlabs(allocator, streams, Moment())

    def slab(number: int) -> SharedSlab:
        return SharedSlab(group, (0, number, 1, 1), number, Region(0, 8 * PAGE))

    for number in range(1, 5):
        _kept(shared, allocator, slab(number), 8 * PAGE)
    first, second, *_ = shared.spare()
    shared.begin_copy(first)
    second.made = None
    assert [each.number for each in shared.spare()] == [3, 4]
    assert shared.make_way(slab(5)) == []
    assert [each.number for each in shared.spare()] == []
    assert shared.ended(first, BudgetTooSmall("no memory"), is_kept=True) is not None
    assert [each.number for each in shared.spare()] == [1]


def test_a_kept_slab_reserves_its_expected_size_until_one_is_larger() -> None:
    allocator, group = Allocator(64 * PAGE), Group("group", is_declared=True)
    shared = SharedSlabs(allocator, cast("Any", _Nobody()), Moment())

    def wanted(position: int, batch_bytes: int) -> SharedSlab:
        walk = SimpleNamespace(
            stream=Stream(0, 0, 0, 1),
            sizes=SimpleNamespace(batch_bytes=batch_bytes),
            position_of=lambda _plan: position,
        )
        plan = SimpleNamespace(batches=(None,) * 3)
        delivery = SimpleNamespace(group=group)
        stream: Any = SimpleNamespace(walk=walk, delivery=delivery)
        task: Any = SimpleNamespace(stream=stream, delivery=delivery, plan=plan, oversize=False)
        slab = shared.wanted(task, 8 * PAGE)
        assert slab is not None
        return slab

    def make(slab: SharedSlab, used: int) -> bool:
        offset = allocator.allocate(slab.region.length)
        assert offset is not None
        shared.begin(slab, Region(offset, slab.region.length))
        shared.ended(slab, Assembled(3, bytes_used=used), is_kept=True)
        return slab in shared.spare()

    assert wanted(0, 0).region.length == 8 * PAGE
    assert wanted(0, 4 * PAGE).region.length == 8 * PAGE
    assert wanted(1, PAGE).region.length == 3 * PAGE
    assert make(wanted(1, PAGE), 3 * PAGE)
    assert not group.is_whole
    assert make(wanted(2, PAGE), 2 * PAGE + 1)
    assert sum(each.region.length for each in shared.spare()) == 5 * PAGE + 1
    assert not make(wanted(3, PAGE), 3 * PAGE + 1)
    assert group.is_whole, "a larger one has come: from now on each gets all of the room"
    assert wanted(4, PAGE).region.length == 8 * PAGE
    assert make(wanted(4, PAGE), 3 * PAGE + 1)
    assert allocator.free_bytes == (64 - 3 - 3 - 4) * PAGE
