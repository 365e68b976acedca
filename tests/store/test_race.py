"""Two requests for the same bytes: one of them wins, and only it writes."""

from __future__ import annotations

import socket
import threading

import pytest

from dataplane.store.race import EndedEarlyError, Race, current_race, raced

TIMEOUT_S = 60.0


def test_the_first_request_wins_if_it_is_done_first() -> None:
    race = Race()
    race.claim()
    assert not race.overtake(TIMEOUT_S)
    race.claim()


def test_a_request_that_was_overtaken_may_neither_begin_nor_end() -> None:
    race = Race()
    assert race.overtake(TIMEOUT_S)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for attempt in (race.claim, lambda: race.hold(ours)):
            with pytest.raises(EndedEarlyError):
                attempt()


def test_overtaking_waits_until_the_first_request_writes_no_more() -> None:
    race, order = Race(), list[str]()
    ours, theirs = socket.socketpair()

    def first() -> None:
        race.hold(ours)
        held.set()
        assert ours.recv(1) == b"", "its connection is shut down"
        order.append("ended")
        race.release()

    held = threading.Event()
    with ours, theirs:
        thread = threading.Thread(target=first)
        thread.start()
        assert held.wait(TIMEOUT_S)
        assert race.overtake(TIMEOUT_S)
        order.append("overtaken")
        thread.join(TIMEOUT_S)
    assert order == ["ended", "overtaken"]


def test_a_first_request_that_does_not_end_is_told() -> None:
    race = Race()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        race.hold(ours)
        with pytest.raises(TimeoutError):
            race.overtake(0.0)


def test_a_thread_without_a_race_runs_alone() -> None:
    race = Race()
    with raced(race):
        assert current_race() is race
    assert current_race() is not race
    current_race().claim()
