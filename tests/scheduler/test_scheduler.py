"""The scheduler with workers and a store that end in any order: nothing is lost, wrong or stuck."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from scheduler_consumers import Consumer
from scheduler_run import STALL_S, Run
from scheduler_scenes import epoch_of_one, far_too_small, several, simulate

from dataplane.arena.slots import AHEAD_SLOTS_MIN, SlotLayout, Slots, plan_slots
from dataplane.model.errors import BudgetTooSmall, StoreDenied
from dataplane.model.records import Stream
from dataplane.scheduler import events, scheduler
from dataplane.scheduler.autoscaler import HUNGRY_LOOKS
from dataplane.scheduler.blocks import ReadAgain
from dataplane.scheduler.dataset import Account, DatasetLookup, Stamps, stage_times
from dataplane.scheduler.events import Note
from dataplane.scheduler.records import Delivery, SlabPhase

SEEDS = st.integers(0, 10**9)
Effect = events.Effect
Decide = Callable[[events.Event, float], list[Effect]]


@settings(max_examples=20)
@given(SEEDS)
def test_a_block_that_cannot_be_read_fails_only_the_consumers_that_need_it(seed: int) -> None:
    def scene(run: Run) -> None:
        several(run)
        for world in run.worlds.values():
            world.broken.add(run.chance.randrange(len(world.sizes)))

    run = simulate(lambda: Run(random.Random(seed), tight=False), scene)
    for consumer in run.consumers:
        assert consumer.error is None or isinstance(consumer.error, StoreDenied)
        if consumer.ended:
            broken = {
                b
                for b in consumer.world.broken
                if consumer.world.blocks.needs_fetch(b) or consumer.world.blocks.needs_decode(b)
            }
            assert not consumer.blocks_needed & broken


@settings(max_examples=15)
@given(SEEDS)
def test_however_few_loads_are_begun_at_once_every_stream_gets_its_batches(seed: int) -> None:
    with mock.patch.object(scheduler, "_STARTS_MAX", 1):
        run = simulate(lambda: Run(random.Random(seed), tight=False), several)
    assert not [c.error for c in run.consumers if c.error is not None]


def test_of_a_slab_with_many_blocks_only_some_loads_are_begun_in_one_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scheduler_world.KINDS", (("file", False),) * 4)
    monkeypatch.setattr(scheduler, "_STARTS_MAX", 2)
    begun: list[int] = []
    for seed in range(5):
        run = Run(random.Random(seed), tight=False)
        spec = structs.replace(run.worlds[1].spec, shuffle=True, lanes=1, window=10_000)
        spec = structs.replace(spec, global_batch=run.worlds[1].spec.global_batch * 8)
        run.consume(run.deliver_to(run.worlds[1], spec=spec), 0, 1, steps=(0, 1))
        decide = run.scheduler.decide

        def counted(event: events.Event, now: float, decide: Decide = decide) -> list[Effect]:
            effects = decide(event, now)
            begun.append(sum(isinstance(each, events.DecodeBlock) for each in effects))
            return effects

        monkeypatch.setattr(run.scheduler, "decide", counted)
        run.consumers[0].ask()
        run.drain()
        assert run.consumers[0].error is None
        run.end()
    assert sum(begun) > 20
    assert max(begun) <= 2


def test_a_rank_that_waited_too_long_gets_an_error_with_the_stage_and_what_is_missing() -> None:
    run = Run(random.Random(1), tight=False)
    several(run)
    run.settle()
    consumer = run.consumers[0]
    consumer.ask()
    run.settle()
    run.now += STALL_S / 2
    run.tell(events.Ticked(0.0, 0.0))
    assert not consumer.stalled
    run.now += STALL_S / 2
    run.tell(events.Ticked(0.0, 0.0))
    stalled = consumer.stalled[0]
    assert stalled.waited_s > STALL_S
    assert stalled.progress.stage == "plan"
    run.end()


def test_a_rank_for_which_something_is_done_waits_on_and_hears_of_it() -> None:
    run = Run(random.Random(1), tight=False)
    several(run)
    run.settle()
    consumer = run.consumers[0]
    consumer.ask()
    run.settle()
    stream = run.scheduler._streams.find(consumer.number)
    assert stream is not None
    dataset = stream.delivery.datasets.datasets[0].dataset_id
    for _ in range(12):  # a worker needs four timeouts for a block
        run.now += STALL_S / 3
        run.tell(events.Ticked(1.0, 0.0, frozenset((dataset,))))
        assert not consumer.stalled
    assert len(consumer.advanced) > 4
    run.now += STALL_S * 1.1
    run.tell(events.Ticked(1.0, 0.0, frozenset((dataset + 100,))))
    assert consumer.stalled
    run.end()


def _blocks_that_lie_as_they_are_read(monkeypatch: pytest.MonkeyPatch, seed: int) -> Run:
    monkeypatch.setattr("scheduler_world.KINDS", (("file", True),) * 4)
    run = Run(random.Random(seed), tight=False)
    run.consume(run.deliver_to(run.worlds[1]), 0, 1, steps=(0, 1))
    return run


def test_a_slab_of_blocks_that_need_no_loading_waits_for_no_other_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = _blocks_that_lie_as_they_are_read(monkeypatch, 1)
    run.consumers[0].ask()
    while not run.consumers[0].held:
        run.settle()
        assert run.outside.pending, "nothing is under way, and the consumer waits"
        run.end_one()
        run.settle()


def test_a_consumer_that_asked_twice_for_a_failed_slab_gets_two_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = _blocks_that_lie_as_they_are_read(monkeypatch, 1)
    run.outside.refused = 1.0
    consumer = run.consumers[0]
    consumer.ask()
    consumer.ask()
    run.drain()
    assert isinstance(consumer.error, BudgetTooSmall)
    assert consumer.asked == 0


def test_slabs_are_made_ahead_of_a_consumer_as_far_as_slots_allow() -> None:
    most = 0
    for seed in range(12):
        run = Run(random.Random(seed), tight=False, factor=200)
        run.row_bytes = run.outside.row_bytes = 16
        spec = structs.replace(run.worlds[1].spec, global_batch=1)
        run.consume(run.deliver_to(run.worlds[1], spec=spec), 0, 1, steps=(0, 1))
        run.drain()
        stream = run.scheduler._streams.find(1)
        assert stream is not None
        assert not any(task.missing for task in stream.tasks), "whatever is planned is loaded"
        ready = sum(task.phase is SlabPhase.READY for task in stream.tasks)
        assert ready == min(AHEAD_SLOTS_MIN, len(stream.tasks))
        most = max(most, ready)
        run.end()
    assert most == AHEAD_SLOTS_MIN


def test_a_trainer_that_waits_has_all_free_slots_used_and_one_that_does_not_has_fewer() -> None:
    delivery = Delivery(1, Slots(plan_slots(1 << 20, 4096, 20)), DatasetLookup())
    assert delivery.ahead == AHEAD_SLOTS_MIN
    for others, ahead in (0, AHEAD_SLOTS_MIN), (9, 9), (5, 9):
        delivery.was_late(others, are_free=False)
        assert delivery.ahead == ahead
    for _ in range(20):
        delivery.was_late(0, are_free=True)
    assert delivery.ahead == delivery.slots.layout.slot_count - 3
    for _ in range(10_000):
        delivery.was_in_time()
    assert delivery.ahead == AHEAD_SLOTS_MIN


def test_nothing_is_read_beside_a_first_slab_until_it_is_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scheduler_world.KINDS", (("s3", True),) * 4)
    most = 0
    for seed in range(40):
        run = Run(random.Random(seed), tight=False, factor=200)
        run.consume(run.deliver_to(run.worlds[1]), 0, 1, steps=(0, 1))
        stream, consumer = run.scheduler._streams.find(1), run.consumers[0]
        assert stream is not None
        consumer.ask()
        while not consumer.held:
            run.settle()
            first = stream.tasks[0] if stream.tasks else None
            keys = run.scheduler._blocks.fetches._requests
            fetching = {run.scheduler._blocks.block(key).index for key in keys}
            if first is not None and not consumer.held:
                assert fetching <= {*first.plan.blocks.tolist()}
            most = max(most, len(fetching))
            run.end_one()
            run.settle()
        run.drain()
        run.end()
    assert most > 1


def _single_rows(layout: SlotLayout) -> Consumer:
    """A consumer of batches of one row of 400 bytes, and of 2,400 in step 3."""
    run = Run(random.Random(3), tight=False, factor=200)
    run.row_bytes = run.outside.row_bytes = 400
    run.layout = layout
    spec = structs.replace(run.worlds[1].spec, global_batch=1)
    consumer = run.consume(run.deliver_to(run.worlds[1], spec=spec), 0, 1, steps=(0, 1))
    while not consumer.is_done:
        consumer.ask()
        run.drain()
    run.end()
    return consumer


def test_a_batch_as_large_as_the_zone_is_sent_and_a_larger_one_is_refused() -> None:
    batch, larger, index = 16 + 416, 16 + 2416, 64
    consumer = _single_rows(SlotLayout(256, 6, batch + index))
    assert consumer.next_step == 3
    assert isinstance(consumer.error, BudgetTooSmall)
    assert consumer.error.needed == larger + index
    assert consumer.error.budget == batch + index
    assert _single_rows(SlotLayout(256, 6, batch + index - 1)).next_step == 0
    assert _single_rows(SlotLayout(256, 6, larger + index)).ended


def test_a_slot_with_room_for_nothing_but_the_row_index_is_an_error() -> None:
    consumer = _single_rows(SlotLayout(64, 6, 4096))
    assert isinstance(consumer.error, BudgetTooSmall)
    assert (consumer.error.needed, consumer.error.budget) == (64, 64)
    assert consumer.next_step == 0


def test_there_are_more_workers_when_all_are_at_work_and_a_trainer_waits() -> None:
    run = Run(random.Random(1), tight=False)
    run.consume(run.deliver_to(run.worlds[1]), 0, 1)
    run.tell(events.Ticked(2.0, 1.0))
    assert not run.sizes
    run.consumers[0].ask()
    for _ in range(HUNGRY_LOOKS):
        run.tell(events.Ticked(2.0, 1.0))
    assert run.sizes == [4]
    run.end()


times = st.floats(0.0, 1e5)


@given(stamps=st.builds(Stamps, times, times, times, times, times, times), later=times)
def test_stages_follow_one_another_from_the_plan_to_the_hand_over(stamps, later):
    now = stamps.planned + later
    stages = stamps.stages(now)
    assert all(stage >= 0 for stage in stages)
    assert sum(stages) == pytest.approx(later * 1e6, abs=len(stages))


@given(st.lists(st.tuples(st.sampled_from(["read", "end", "tell"]), st.integers(1, 100))))
def test_time_of_overlapping_reads_is_counted_once(acts):
    account, now, under_way, read_s, told = Account(), 0.0, 0, 0.0, []
    for act, seconds in acts:
        if act == "read":
            account.read_began(now)
            under_way += 1
        elif act == "end" and under_way:
            account.read_ended(now, 10)
            under_way -= 1
        elif act == "tell":
            told.append(stage_times((0,) * 6, [account], 2, now))
        read_s += seconds if under_way else 0
        now += seconds
    told.append(stage_times((0,) * 6, [account], 2, now))
    assert sum(one.reading for one in told) == pytest.approx(read_s * 1e6)
    assert sum(one.read_bytes for one in told) % 10 == 0
    again = stage_times((0,) * 6, [account], 2, now)
    assert (again.reading, again.read_bytes, again.decoding) == (0, 0, 0)
    assert all(a.workers == b.workers for a, b in itertools.pairwise(told))


@pytest.mark.parametrize("seed", range(20))
def test_what_was_read_and_what_was_found_is_what_was_needed(seed: int) -> None:
    run = Run(random.Random(seed), tight=False, factor=8.0)
    (world, *_) = run.worlds.values()
    consumers = []
    for _ in range(3):
        place = run.deliver_to(world)
        consumers.append(run.begin(place, Stream(0, 0, 0, 1)))
        run.go()
    needed = sum(
        int(world.lengths[block])
        for consumer in consumers
        for block in consumer.blocks_needed
        if world.blocks.needs_fetch(block)
    )
    read = sum(
        int(world.lengths[block])
        for block in set().union(*(one.blocks_needed for one in consumers))
        if world.blocks.needs_fetch(block)
    )
    assert run.scheduler.found_bytes == needed - read, "each block was read once"
    run.end()


def block(dataset_id: int = 1, index: int = 0) -> Any:
    dataset = SimpleNamespace(dataset_id=dataset_id, name="lab", stored=np.array([7, 9]))
    return SimpleNamespace(dataset=dataset, index=index)


def test_a_line_comes_less_and_less_often() -> None:
    notes: list[Note] = []
    again = ReadAgain(1 << 20, notes.append)
    for second in range(3600):
        again.note(block(index=0), float(second))
        again.note(block(index=1), float(second))
    lines = [note.facts for note in notes]
    assert [line["seconds"] for line in lines] == [10, 60, 120, 240, 480, 960]
    assert [line["blocks"] for line in lines[:2]] == [21, 120]
    assert lines[0]["bytes"] == 10 * 16 + 7
    assert lines[1]["bytes"] == 60 * 16
    assert lines[0]["block_arena_bytes"] == 1 << 20
    assert lines[0]["dataset"] == "lab"


def test_repeated_reads_are_logged_at_least_every_hour() -> None:
    notes: list[Note] = []
    again = ReadAgain(1 << 20, notes.append)
    for minute in range(24 * 60):
        again.note(block(), 60.0 * minute)
    assert [note.facts["seconds"] for note in notes][-3:] == [3600] * 3


def test_a_few_repeated_reads_are_not_logged_and_a_closed_dataset_is_forgotten() -> None:
    notes: list[Note] = []
    again = ReadAgain(1, notes.append)
    again.note(block(), 0.0)
    again.forget(1)
    again.note(block(), 100.0)
    assert notes == []


def test_an_arena_larger_than_the_dataset_reads_nothing_twice_and_a_smaller_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = []

    def note(_: ReadAgain, evicted: Any, _now: float) -> None:
        counted.append(evicted)

    monkeypatch.setattr(ReadAgain, "note", note)
    for seed in range(8):
        simulate(lambda seed=seed: Run(random.Random(seed), tight=False, factor=50), several)
    assert not counted
    for seed in range(24):
        simulate(lambda seed=seed: Run(random.Random(seed), tight=False, factor=1), several)
        if counted:
            return
    raise AssertionError("no block was read again")


@pytest.mark.parametrize("seed", [1, 2, 5])
def test_blocks_that_leave_rows_behind_count(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arena is smaller than one batch's blocks: their rows are copied, and they give way."""
    noted: list[int] = []
    monkeypatch.setattr(ReadAgain, "note", lambda _, block, _now: noted.append(block.index))
    run = simulate(lambda: far_too_small(random.Random(seed), monkeypatch), epoch_of_one)
    needed = len({block for _, _, samples in run.consumers[0]._steps for block, _ in samples})
    again = run.outside.loads - needed
    assert again > needed
    # Some give way before their windows open, and each may for a last time at the end of its own.
    assert 0.7 * again <= len(noted) <= again + needed
