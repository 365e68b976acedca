"""How many workers there are: in a simulated node, whose workers and trainers are numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_workers import IDLE_MAX, Host, idle_in_batches, idle_in_pieces

from dataplane.scheduler.autoscaler import (
    HUNGRY_LOOKS,
    Autoscaler,
    Utilization,
)

counts = st.integers(1, 64)
looks = st.builds(Utilization, st.floats(0, 70), st.floats(0, 1e9), st.booleans())


def look_at(count: int, useful: float, demand: float) -> Utilization:
    """At most `useful` of `count` workers help; a trainer consumes what `demand` of them make."""
    made = min(count, useful)
    is_awaited = demand > made
    # Surplus workers are as busy, since all share the same memory bandwidth.
    return Utilization(float(count) if is_awaited else demand, min(made, demand), is_awaited)


def settled(autoscaler: Autoscaler, useful: float, demand: float, looks: int = 1500) -> Autoscaler:
    for _ in range(looks):
        autoscaler = autoscaler.after(look_at(autoscaler.count, useful, demand))
        assert autoscaler.least <= autoscaler.count <= autoscaler.most
    return autoscaler


@given(least=counts, more=st.integers(0, 64), seen=st.lists(looks, max_size=200))
def test_there_are_never_more_or_fewer_than_allowed(least, more, seen):
    autoscaler = Autoscaler(least, least + more, least)
    for look in seen:
        autoscaler = autoscaler.after(look)
        assert least <= autoscaler.count <= least + more
        if not more:
            assert autoscaler.count == least


@given(least=counts, more=counts, useful=st.floats(1, 128), demand=st.floats(0.1, 200))
def test_as_many_workers_stay_as_raise_the_trainers_rate(least, more, useful, demand):
    autoscaler = settled(Autoscaler(least, least + more, least), useful, demand)
    best = min(useful, demand, autoscaler.most)
    assert (
        min(max(autoscaler.count, autoscaler.former if autoscaler.trial else 0), useful, demand)
        >= 0.9 * best
    )
    if not autoscaler.trial:
        needed = max(least, math.ceil(min(useful, demand)))
        assert autoscaler.count <= max(math.ceil(1.25 * needed) + 1, least)


def test_a_short_wait_changes_nothing():
    autoscaler = Autoscaler(2, 8, 2)
    for _ in range(3):
        for _ in range(HUNGRY_LOOKS - 1):
            autoscaler = autoscaler.after(look_at(2, 8, 8))
        autoscaler = autoscaler.after(look_at(2, 8, 1))
    assert autoscaler.count == 2


def changes(autoscaler: Autoscaler, seen: Iterable[Utilization]) -> list[tuple[int, int]]:
    """(which look, how many workers from then on) of each change."""
    found = []
    for at, each in enumerate(seen, 1):
        before, autoscaler = autoscaler, autoscaler.after(each)
        found += [(at, autoscaler.count)] if autoscaler.count != before.count else []
    return found


def hungry(rate: float, share: float = 1.0, count: int = 4) -> Utilization:
    return Utilization(share * count, rate, is_awaited=True)


def test_all_are_tried_after_two_hungry_looks_and_judged_by_the_last_four_of_eight():
    helped = [*[hungry(100.0)] * 2, *[hungry(0.0, count=6)] * 4, *[hungry(105.0, count=6)] * 4]
    assert changes(Autoscaler(4, 6, 4), helped) == [(2, 6)]
    assert changes(Autoscaler(4, 6, 4), [*helped[:-1], hungry(104.0)]) == [(2, 6), (10, 4)]


def test_of_those_that_were_tried_a_quarter_more_stay_than_would_do():
    helped = [*[hungry(100.0)] * 2, *[hungry(250.0, count=64)] * 8]
    assert changes(Autoscaler(4, 64, 4), helped) == [(2, 64), (10, 13)]
    assert changes(Autoscaler(4, 12, 4), helped) == [(2, 12)]


def test_all_stay_if_nothing_was_made_before():
    helped = [*[hungry(0.0)] * 2, *[hungry(1.0, count=64)] * 8]
    assert changes(Autoscaler(4, 64, 4), helped) == [(2, 64)]


@settings(max_examples=80)
@given(least=counts, more=counts, useful=st.floats(1, 128), demand=st.floats(0.1, 200))
def test_nine_tenths_of_the_last_rate_are_reached_three_seconds_after_the_first_wait(
    least, more, useful, demand
):
    autoscaler = Autoscaler(least, least + more, least)
    at_once = settled(autoscaler, useful, demand, looks=6)
    at_last = settled(at_once, useful, demand)
    reached, final = (min(each.count, useful, demand) for each in (at_once, at_last))
    assert reached >= 0.9 * final


def test_workers_count_as_busy_if_at_most_one_in_ten_is_idle():
    assert changes(Autoscaler(4, 5, 4), [hungry(1.0, 0.9)] * 2) == [(2, 5)]
    assert changes(Autoscaler(4, 5, 4), [hungry(1.0, 0.89)] * 9) == []


def test_what_did_not_help_is_tried_again_after_a_minute_and_then_twice_as_long_each_time():
    useless = [hungry(1.0, count=6)] * 16_000
    at = [look for look, count in changes(Autoscaler(4, 6, 4), useless) if count == 6]
    assert at == [2, 70, 198, 446, 934, 1902, 3830, 7678, 11526, 15374]


def test_what_helps_at_last_makes_the_next_try_early_again():
    useless, helps = [hungry(1.0, count=6)] * 197, [hungry(1.2, count=6)] * 9
    again = [hungry(1.2, count=9)] * 80
    found = changes(Autoscaler(4, 16, 4), [*useless, hungry(1.0, count=6), *helps, *again])
    assert found[:5] == [(2, 16), (10, 4), (70, 16), (78, 4), (198, 16)]
    assert found[5:] == [(206, 6), (208, 16), (216, 6), (276, 16), (284, 6)]


def test_what_was_not_needed_for_120_looks_goes_but_for_one_more_than_was():
    idle, busy = Utilization(2.5, 1.0, is_awaited=False), Utilization(5.0, 1.0, is_awaited=False)
    assert changes(Autoscaler(1, 16, 8), [idle] * 300) == [(120, 4)]
    assert changes(Autoscaler(1, 16, 8), [busy, *[idle] * 300]) == [(120, 6), (240, 4)]
    assert changes(Autoscaler(6, 16, 8), [idle] * 300) == [(120, 6)]
    assert changes(Autoscaler(1, 16, 2), [busy] * 300) == []


@settings(max_examples=6)
@given(
    st.integers(1, 64),
    st.integers(1, 512),
    st.integers(1, 64),
    st.floats(-5, -1),
    st.integers(0, 9),
)
def test_while_a_trainer_waits_all_workers_make_pieces_of_its_slabs(
    workers: int, rows: int, batches: int, power: float, seed: int
) -> None:
    assert idle_in_pieces(workers, rows, batches, 10**power, seed) <= IDLE_MAX


def test_pieces_are_larger_while_every_worker_has_one() -> None:
    host = Host(16, 64, 1, 0.0014, is_divisible=True)
    host.run(4.0)
    later = sorted(host.pieces[100:])
    assert max(host.pieces[:50]) == 16  # the first slabs show how long a row takes
    assert later[len(later) // 2] == 4


@settings(max_examples=6)
@given(st.integers(1, 64), st.integers(1, 64), st.floats(-3, -1), st.integers(0, 9))
def test_workers_that_make_whole_slabs_are_all_busy_while_a_trainer_waits(
    workers: int, batches: int, power: float, seed: int
) -> None:
    assert idle_in_batches(workers, batches, 10**power, seed) <= IDLE_MAX


@pytest.mark.parametrize(
    ("ranks", "workers", "is_divisible"),
    [(2, 1, False), (8, 4, True), (3, 8, True), (4, 16, True), (3, 32, True), (5, 32, True)],
)
def test_ranks_of_one_host_get_equal_shares_of_its_workers(
    ranks: int, workers: int, is_divisible: bool
) -> None:
    host = Host(workers, 64, 4, 0.001, is_divisible=is_divisible, ranks=ranks)
    host.run(ranks * 30 * 0.256 / min(workers, 8))
    assert min(host.slabs) >= 0.7 * max(host.slabs) - 4


def test_slabs_that_one_worker_makes_take_no_slots_while_workers_have_enough_to_do() -> None:
    host = Host(2, 4, 4, 0.0001, is_divisible=True, ranks=2)
    host.run(1.0)
    most = 0
    for tick in range(100):
        host.run(1.0 + tick / 1000)
        most = max(most, len(host._left))
    assert host.pieces[-1] == 1
    assert 4 <= most <= 6, "two for each worker, and the first of each stream"
