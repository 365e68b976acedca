"""Which reads are asked for a second time."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from dataplane.fetcher.neighbours import (
    FAILURES_MAX,
    HEDGED_SHARE,
    LATE_FACTOR,
    LATE_S,
    PAUSE_S,
    PAUSE_S_MAX,
    READS_MIN,
    Hedging,
    NeighbourHealth,
    NeighbourReads,
)
from dataplane.rpc.fetches import Neighbour, Peer

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


# -- Which neighbours a fetcher asks


def test_a_neighbour_that_fails_in_a_row_is_left_alone_and_then_tried_once() -> None:
    health = NeighbourHealth()
    for _ in range(FAILURES_MAX - 1):
        assert not health.failed("a", 0.0)
        assert health.may_ask("a", 0.0)
    assert health.failed("a", 0.0)
    assert not health.failed("a", 0.1)  # of what was cut off
    assert not health.may_ask("a", PAUSE_S - 0.01)
    assert health.may_ask("b", 0.0)
    assert health.may_ask("a", PAUSE_S)
    assert not health.may_ask("a", PAUSE_S)
    assert health.failed("a", PAUSE_S + 1.0)
    assert not health.may_ask("a", PAUSE_S + 1.0 + PAUSE_S)
    assert health.may_ask("a", PAUSE_S + 1.0 + 2 * PAUSE_S)
    health.answered("a", 10.0)
    assert all(health.may_ask("a", 10.0) for _ in range(9))


def test_one_answer_ends_a_row_of_failures() -> None:
    health = NeighbourHealth()
    for _ in range(5):
        for _ in range(FAILURES_MAX - 1):
            assert not health.failed("a", 0.0)
        health.answered("a", 0.0)
    assert health.may_ask("a", 0.0)


def test_a_neighbour_is_silent_until_it_answers_anybody() -> None:
    health = NeighbourHealth()
    assert health.is_silent("a", 1.0)
    health.answered("a", 2.0)
    assert not health.is_silent("a", 1.0)
    assert health.is_silent("a", 3.0)
    assert health.is_silent("b", 1.0)


def test_what_waits_for_a_silent_neighbour_is_hedged_without_a_budget() -> None:
    reads, length = NeighbourReads(), 8 << 20
    neighbour = Neighbour(Peer("host:1", "job", 1, bytes(32), "a", "b"), bytes(16), 0)
    assert not reads.is_to_hedge(neighbour, length, 10.0, 10.0 + LATE_S / 2)
    for _ in range(9):
        assert reads.is_to_hedge(neighbour, length, 10.0, 10.0 + LATE_S)
    reads._health.answered(neighbour.peer.address, 10.5)  # it is slow, but there
    assert not reads.is_to_hedge(neighbour, length, 10.0, 10.0 + LATE_S)
    for _ in range(50):
        reads._hedging.ended(length, 0.1)
    assert [reads.is_to_hedge(neighbour, length, 10.0, 10.4) for _ in range(3)] == [
        True,
        False,
        False,
    ]
    reads.close()


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from(["ask", "fail", "answer"]))))
def test_no_pause_is_longer_than_the_longest(steps: list[tuple[float, str]]) -> None:
    health, now = NeighbourHealth(), 0.0
    for wait_s, step in steps:
        now += wait_s
        if step == "fail":
            health.failed("a", now)
        elif step == "answer":
            health.answered("a", now)
        else:
            health.may_ask("a", now)
    assert health.may_ask("a", now + PAUSE_S_MAX)
