"""The attribution of waits, the sums of statistics, and the stage that bounds a run."""

from __future__ import annotations

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from dataplane.client import waiting
from dataplane.client.statistics import (
    NOT_YET,
    FirstBatch,
    Opening,
    Recent,
    Stage,
    Statistics,
    Tally,
    bound_of,
    stages_waited_for,
    sum_of,
)
from dataplane.client.waiting import Notice
from dataplane.commands import doctor_run
from dataplane.model.records import Region
from dataplane.rpc.messages import Batch, Slab, StageTimes, Working

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


class Terminal(io.StringIO):
    """A terminal, or another stream."""

    def __init__(self, *, is_one: bool) -> None:
        super().__init__()
        self._is_one = is_one

    def isatty(self) -> bool:
        return self._is_one


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    return now


def counted(notice: Notice, clock: list[float]) -> None:
    """Forty blocks, two seconds each."""
    for done in range(41):
        notice.working(Working("counting packs", done, 40, left_s=2.0 * (40 - done)))
        clock[0] += 2.0


def test_a_script_hears_every_ten_seconds_how_far_its_node_is(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal(is_one=False))
    notice = Notice("a job to be opened", job="j")
    counted(notice, clock)
    notice.tell()  # there is something better to say
    notice.over()
    lines = [one.getMessage() for one in caplog.records]
    assert lines[:2] == [
        "counting packs: 2 of 40 blocks, 2 min left job=j",
        "counting packs: 7 of 40 blocks, 2 min left job=j",
    ]
    assert lines[-1] == "counting packs: 37 of 40 blocks, 6 s left job=j"
    assert len(lines) == 8
    caplog.clear()


def test_a_terminal_has_one_line_that_changes_and_is_gone_at_the_end(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = Terminal(is_one=True)
    monkeypatch.setattr(sys, "stderr", terminal)
    notice = Notice("the first batch", work_of="first batch")
    notice.working(Working("reading blocks", 1, 40))
    assert not terminal.getvalue(), "most waits are short"
    clock[0] += 4
    notice.working(Working("reading blocks", 1, 40))
    notice.working(Working("planning the batch"))
    notice.over()
    assert terminal.getvalue().split("\r\x1b[2K") == [
        "",
        "dataplane: first batch: reading blocks: 1 of 40 blocks",
        "dataplane: first batch: planning the batch",
        "",
    ]
    assert not caplog.records


def test_other_ranks_of_the_host_say_nothing(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    counted(Notice("a job", shows_work=False), clock)
    assert not caplog.records


microseconds = st.integers(0, 10**8)
TIMES = StageTimes(fetch=200_000, decode=50_000, assemble=30_000, ready=1_000)
OPENING = Opening(node_s=0.4, open_s=0.5, done_at=10.0, index_s=0.3, plan_s=0.1)


def test_a_request_that_opened_the_job_is_divided_into_all_stages():
    first = OPENING.first_batch(9.1, 10.3, TIMES)
    assert first.stages() == pytest.approx(
        {
            "node": 0.4, "connect": 0.1, "index": 0.3, "plan": 0.1,
            "fetch": 0.2, "decode": 0.05, "room": 0.0, "queue": 0.0, "assemble": 0.03,
            "hand_over": 0.02,
        }
    )  # fmt: skip
    assert first.total_s == pytest.approx(0.9 + 0.3)


def test_a_slab_that_was_ready_when_it_was_requested_later_was_only_handed_over():
    first = OPENING.first_batch(50.0, 50.001, structs.replace(TIMES, ready=40_000_000))
    assert first.hand_over_s == pytest.approx(0.001)
    assert first.fetch_s == first.decode_s == first.assemble_s == 0.0


@given(
    asked=st.floats(0, 100),
    waited=st.floats(0, 100),
    times=st.builds(StageTimes, microseconds, microseconds, microseconds),
)
def test_the_stages_are_never_longer_than_the_time_that_passed(asked, waited, times):
    first = OPENING.first_batch(asked, asked + waited, times)
    since = max(asked + waited - max(asked, OPENING.done_at), 0.0)
    assert min(first.stages().values()) >= 0.0
    assert first.total_s == pytest.approx(0.9 + since, abs=1e-5)


def test_statistics_of_a_part_or_a_sum_keep_the_first_batch():
    first = FirstBatch(node_s=0.5)
    whole = Statistics(slabs=9, first_batch=first)
    assert whole.since(Statistics(slabs=4)).first_batch == first
    assert sum_of([Statistics(), whole]).first_batch == first
    assert Statistics().plus(Statistics()).first_batch == NOT_YET


@pytest.mark.parametrize("stage", NOT_YET.stages())
def test_the_longest_stage_is_named_with_one_advice(stage):
    slow = structs.replace(FirstBatch(node_s=0.1), **{f"{stage}_s": 0.9})
    named = stage.replace("_", " ")
    told = doctor_run.first_batch_advice(slow)
    assert told.startswith(f"The first batch waited most for {named} (")
    assert "To shorten it: " in told
    assert next(row[0] for row in doctor_run.first_batch_rows(slow)) == "first batch"
    assert f"  {named}" in [row[0] for row in doctor_run.first_batch_rows(slow)]


def test_nothing_is_said_of_a_batch_that_never_came():
    assert doctor_run.first_batch_advice(NOT_YET) == ""
    assert doctor_run.first_batch_rows(NOT_YET) == []


def test_scalars_are_flat_numbers_with_stable_names() -> None:
    scalars = Statistics(samples=8, waited_s=0.5, consumed_s=1.5, read_bytes=7).scalars()
    assert scalars["dataplane/samples"] == 8
    assert scalars["dataplane/samples_per_s"] == 4
    assert scalars["dataplane/origin_bytes"] == 7
    assert scalars["dataplane/first_batch/fetch_s"] == 0
    assert {type(value) for value in scalars.values()} == {float}
    assert Statistics().scalars().keys() == scalars.keys()
