"""The first batch of a loader, divided into stages, and what is said about the longest one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from dataplane.client.statistics import NOT_YET, FirstBatch, Opening, Statistics, sum_of
from dataplane.commands import doctor_run
from dataplane.rpc.messages import StageTimes

us = st.integers(0, 10**8)
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


@given(asked=st.floats(0, 100), waited=st.floats(0, 100), times=st.builds(StageTimes, us, us, us))
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
