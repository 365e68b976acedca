"""Which reads are asked for a second time."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from dataplane.fetcher.neighbours import HEDGED_SHARE, LATE_FACTOR, READS_MIN, Hedging

SIZE = 8 << 20


@given(st.lists(st.tuples(st.booleans(), st.integers(1, SIZE)), max_size=300))
def test_no_more_than_the_budget_is_asked_for_twice(steps: list[tuple[bool, int]]) -> None:
    hedging, read, hedged = Hedging(), 0, 0
    for is_read, length in steps:
        if is_read:
            hedging.ended(length, 0.1)
            read += length
        elif hedging.spend(length):
            hedged += length
        assert hedged <= HEDGED_SHARE * read


def test_a_read_is_late_only_among_enough_of_its_size() -> None:
    hedging = Hedging()
    for _ in range(READS_MIN - 1):
        hedging.ended(SIZE, 0.1)
    assert hedging.late_s(SIZE) == math.inf
    hedging.ended(SIZE, 0.1)
    assert hedging.late_s(SIZE) == LATE_FACTOR * 0.1
    assert hedging.late_s(SIZE // 8) == math.inf


def test_stragglers_do_not_become_the_measure_of_lateness() -> None:
    hedging = Hedging()
    for number in range(1000):
        hedging.ended(SIZE, 5.0 if number % 50 == 0 else 0.1)
    assert hedging.late_s(SIZE) == LATE_FACTOR * 0.1


def test_lateness_follows_a_store_that_becomes_slower() -> None:
    hedging = Hedging()
    for took_s in (0.1, 0.4):
        for _ in range(500):
            hedging.ended(SIZE, took_s)
    assert hedging.late_s(SIZE) == LATE_FACTOR * 0.4
