"""Whose turn it is to be lent something."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dataplane.neighbours.connection import BodyBytes, InFlight, Limits

ARENA = 3200  # 400 in flight, of which 100 for one neighbour


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcdef"), st.integers(1, 500))))
def test_the_bounds_hold_and_everything_begins_in_order(
    steps: list[tuple[bool, str, int]],
) -> None:
    in_flight: InFlight[tuple[str, int, int]] = InFlight(ARENA)
    begun: list[tuple[str, int, int]] = []
    waiting: dict[str, list[tuple[str, int, int]]] = {}

    def begin() -> None:
        while (request := in_flight.next()) is not None:
            assert waiting[request[0]].pop(0) == request
            begun.append(request)
            used = Counter(dict.fromkeys("abcdef", 0))
            for node, length, _ in begun:
                used[node] += length
            mine = [each for each in begun if each[0] == request[0]]
            assert used.total() <= ARENA // 8 or len(begun) == 1
            assert used[request[0]] <= ARENA // 32 or len(mine) == 1

    for number, (is_asked, node, length) in enumerate(steps):
        if is_asked:
            waiting.setdefault(node, []).append((node, length, number))
            in_flight.ask(node, length, (node, length, number))
        elif begun:
            over = begun.pop(length % len(begun))
            in_flight.ended(over[0], over[1])
        begin()
    while begun:
        over = begun.pop(0)
        in_flight.ended(over[0], over[1])
        begin()
    assert not any(waiting.values())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 150))))
def test_bodies_count_until_they_are_read(steps: list[tuple[str, int]]) -> None:
    bodies = BodyBytes(Limits(body_bytes=300, body_bytes_of_neighbour=120))
    held: list[tuple[str, int]] = []
    for node, length in steps:
        used = sum(bytes_ for _, bytes_ in held)
        of_node = sum(bytes_ for name, bytes_ in held if name == node)
        fits = used + length <= 300 and of_node + length <= 120
        assert bodies.reserve(node, length) == fits
        if fits:
            held.append((node, length))
        elif held:
            bodies.release(*held.pop(0))
    for each in held:
        bodies.release(*each)
    assert bodies.reserve("a", 120)


def test_one_neighbour_that_asks_for_much_does_not_delay_the_others() -> None:
    in_flight: InFlight[str] = InFlight(ARENA)
    for number in range(20):
        in_flight.ask("greedy", 60, f"greedy {number}")
    in_flight.ask("modest", 60, "modest")
    assert in_flight.next() == "greedy 0"
    assert in_flight.next() == "modest"
    assert in_flight.next() is None
    in_flight.ended("greedy", 60)
    assert in_flight.next() == "greedy 1"
