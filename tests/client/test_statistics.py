"""The attribution of waits, the sums of statistics, and the stage that bounds a run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from dataplane.client.statistics import (
    Recent,
    Stage,
    Statistics,
    Tally,
    bound_of,
    stages_waited_for,
    sum_of,
)
from dataplane.model.records import Region
from dataplane.rpc.messages import Batch, Slab, StageTimes

us = st.integers(0, 10**9)
stage_times = st.builds(StageTimes, us, us, us, us, us, us)


def slab(times: StageTimes, rows: int = 10, valid: int | None = None) -> Slab:
    batch = Batch(0, rows, rows if valid is None else valid)
    return Slab(1, 1, Region(0, 64), (batch, batch), b"", times=times)


@given(waited=us, times=stage_times)
def test_a_wait_is_attributed_to_the_last_stages_of_its_slab_and_only_once(waited, times):
    fetch, decode, room, queue, assemble, other = stages_waited_for(waited, times)
    assert fetch + decode + room + queue + assemble + other == waited
    of = (times.fetch, times.decode, times.room, times.queue, times.assemble)
    waits = (fetch, decode, room, queue, assemble)
    assert all(0 <= part <= whole for part, whole in zip(waits, of, strict=True))
    # If a stage was waited for, all later stages were waited for completely.
    first = next((i for i, part in enumerate(waits) if part), len(waits))
    assert waits[first + 1 :] == of[first + 1 :]


@given(slabs=st.lists(st.tuples(stage_times, st.integers(0, 10**9), st.integers(0, 10**9))))
def test_a_tally_adds_up_to_the_time_of_the_loop_and_the_last_slab_counts_when_it_is_done(slabs):
    tally = Tally()
    for times, waited, consumed in slabs:
        tally.handed_over(slab(times, valid=9), waited / 1e6, was_copied=False)
        before = tally.statistics()
        tally.consumed(consumed / 1e6)
        tally.consumed(1.0)  # an end of the epoch: it has had no slab since
        assert tally.statistics().since(before).samples == 18
    found = tally.statistics()
    assert found.slabs == len(slabs)
    assert found.elapsed_s == pytest.approx(sum(w + c for _, w, c in slabs) / 1e6)
    waits = [v for name, v in structs.asdict(found).items() if name.endswith("_wait_s")]
    assert sum(waits) - found.disk_wait_s == pytest.approx(found.waited_s)


def test_bytes_are_told_apart_by_where_they_came_from():
    tally = Tally()
    for _ in range(2):
        times = StageTimes(read_bytes=100, disk_bytes=10, neighbour_bytes=30, memory_bytes=500)
        tally.handed_over(slab(times), 0.1, was_copied=False)
        tally.consumed(0.1)
    found = tally.statistics()
    assert (found.read_bytes, found.disk_bytes, found.neighbour_bytes) == (200, 20, 60)
    assert (found.origin_bytes, found.memory_bytes) == (120, 1000)
    assert found.plus(found).since(found) == found


@given(st.lists(st.builds(Statistics, slabs=us, samples=us, consumed_s=st.floats(0, 1e6))))
def test_statistics_of_a_part_are_the_whole_without_the_rest(parts):
    whole, first = sum_of(parts), sum_of(parts[:2])
    rest = whole.since(first)
    assert rest.slabs == sum(part.slabs for part in parts[2:])
    assert rest.consumed_s == pytest.approx(sum(p.consumed_s for p in parts[2:]), abs=1e-3)


def ran(**fields: float) -> Statistics:
    """Ten seconds of a loop with two workers, of which so much was waited for."""
    waits = sum(v for name, v in fields.items() if name.endswith("_wait_s"))
    waited = {"waited_s": waits - fields.get("disk_wait_s", 0.0)}
    waited["consumed_s"] = 10.0 - waited["waited_s"]
    return Statistics(slabs=50, samples=1000, worker_count=2, **{**waited, **fields})


@pytest.mark.parametrize(
    ("found", "stage", "without"),
    [
        # It hardly waits, although the workers are busy too.
        (ran(assemble_wait_s=0.5, assembling_s=18.0), Stage.CONSUMER, 1000 / 9),
        (ran(assemble_wait_s=9.0, assembling_s=19.0), Stage.ASSEMBLE, 1000 / 1),
        # The trainer waited for the last stage of a slab; the workers spent their time elsewhere.
        (ran(assemble_wait_s=9.0, assembling_s=4.0, decoding_s=15.0), Stage.DECODE, 1000 / 2),
        (ran(fetch_wait_s=8.0, decode_wait_s=1.0, reading_s=10.0), Stage.STORAGE, 1000 / 1),
        # The decoding of a slab's last block hides how long the read before it took.
        (
            ran(fetch_wait_s=2, decode_wait_s=6, reading_s=9.9, decoding_s=9),
            Stage.STORAGE,
            1000 / 4.5,
        ),
        # Workers wait for pages of files.
        (ran(assemble_wait_s=9, assembling_s=19, disk_wait_s=15), Stage.STORAGE, 1000 / 2),
        (ran(queue_wait_s=7.0, assemble_wait_s=2, assembling_s=4), Stage.WORKERS, 1000 / 2),
        (ran(queue_wait_s=7.0, assemble_wait_s=2, assembling_s=14), Stage.ASSEMBLE, 1000 / 1),
        (ran(room_wait_s=5.0), Stage.ROOM, 1000 / 5),
        (ran(other_wait_s=8.0), Stage.NODE, 1000 / 8),
    ],
)
def test_the_bottleneck_is_the_busiest_part_or_else_the_one_that_was_waited_for(
    found, stage, without
):
    bound = bound_of(found)
    assert bound is not None
    assert bound.stage is stage
    assert bound.samples_per_s == pytest.approx(100.0)
    if stage is not Stage.NODE:
        assert bound.samples_per_s_without == pytest.approx(without, rel=0.15)


def test_nothing_bounds_a_run_that_has_not_begun():
    assert bound_of(Statistics()) is None


def test_the_bottleneck_of_the_last_seconds_is_computed_again_after_them():
    tally = Tally()
    recent = Recent(tally.statistics)
    assert recent.stage(0.0) == ""

    def loop(waited_s: float, consumed_s: float) -> None:
        tally.handed_over(slab(StageTimes(fetch=10**9)), waited_s, was_copied=False)
        tally.consumed(consumed_s)

    loop(1.0, 0.1)
    assert recent.stage(1.0) == ""
    assert recent.stage(3.0) == "storage"
    loop(0.001, 5.0)
    assert recent.stage(4.0) == "storage"
    assert recent.stage(6.0) == "consumer"
    assert recent.stage(9.0) == "consumer"  # nothing since: the last values stay
