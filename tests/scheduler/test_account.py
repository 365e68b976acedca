"""Stage times add up for any order of events, and each piece of work is reported once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.scheduler.dataset import Account, Stamps, stage_times

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
