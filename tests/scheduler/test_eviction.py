"""What goes first is what the plan needs last: never worse than guessing from the past."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.plan.order import Order
from dataplane.scheduler.eviction import NEVER, next_use, victims

COUNTS = st.lists(st.integers(1, 5), min_size=1, max_size=8)


def _order(rows: list[int], seed: int, lanes: int, window: int) -> Order:
    return Order(np.array(rows, np.int64), seed, True, lanes, window, 0)


@given(COUNTS, st.integers(0, 99), st.integers(1, 3), st.sampled_from([1, 4, 100]), st.data())
def test_the_next_use_is_never_later_than_the_plan_says(
    rows: list[int], seed: int, lanes: int, window: int, data: st.DataObject
) -> None:
    orders = [_order(rows, seed, lanes, window), _order(rows, seed + 1, 1, 1)]
    total = sum(rows)
    walks = [(order, data.draw(st.integers(0, total))) for order in orders]
    use = next_use(np.arange(len(rows)), walks).tolist()
    for block, found in enumerate(use):
        truth = NEVER
        for order, position in walks:
            blocks, _ = order.locate(np.arange(position, total))
            ahead = np.flatnonzero(blocks == block)
            truth = min(truth, int(ahead[0]) if len(ahead) else NEVER)
        assert found <= truth
        if found == NEVER:
            assert truth == NEVER


@given(st.lists(st.tuples(st.sampled_from([0, 3, 9, NEVER]), st.integers(0, 99)), max_size=12))
def test_the_farthest_goes_first_and_among_equals_the_one_touched_longest_ago(
    blocks: list[tuple[int, int]],
) -> None:
    use = np.array([u for u, _ in blocks], np.int64)
    touched = np.array([t for _, t in blocks], np.int64)
    order = victims(use, touched).tolist()
    assert sorted(order) == list(range(len(blocks)))
    for a, b in itertools.pairwise(order):
        assert (-use[a], touched[a]) <= (-use[b], touched[b])


def _misses(uses: list[int], room: int, victim: Callable[[int, list[int]], int]) -> int:
    held: list[int] = []
    missed = 0
    for at, block in enumerate(uses):
        if block in held:
            held.remove(block)
        else:
            missed += 1
            if len(held) == room:
                held.remove(victim(at, held))
        held.append(block)  # the one touched last is last
    return missed


def _fewest(uses: tuple[int, ...], room: int) -> int:
    """By trying everything."""

    @cache
    def best(at: int, held: frozenset[int]) -> int:
        if at == len(uses):
            return 0
        if uses[at] in held:
            return best(at + 1, held)
        if len(held) < room:
            return 1 + best(at + 1, held | {uses[at]})
        return 1 + min(best(at + 1, held - {gone} | {uses[at]}) for gone in held)

    return best(0, frozenset())


@settings(max_examples=60)
@given(st.integers(0, 99), st.sampled_from([1, 4, 8]), st.integers(1, 3), st.integers(1, 3))
def test_reading_an_epoch_misses_no_more_than_the_best_and_no_more_than_lru(
    seed: int, window: int, lanes: int, room: int
) -> None:
    rows = [2, 1, 3, 2, 1]
    order = _order(rows, seed, lanes, window)
    blocks = order.locate(np.arange(sum(rows)))[0].tolist()

    def farthest(at: int, held: list[int]) -> int:
        exact = [blocks.index(b, at) if b in blocks[at:] else NEVER for b in held]
        return held[victims(np.array(exact), np.arange(len(held)))[0]]

    lru = _misses(blocks, room, lambda _, held: held[0])
    assert _misses(blocks, room, farthest) == _fewest(tuple(blocks), room) <= lru

    def planned(at: int, held: list[int]) -> int:
        use = next_use(np.array(held), [(order, at)])
        return held[victims(use, np.arange(len(held)))[0]]

    # The node knows windows, not rows: between the best and what guessing gives.
    assert _misses(blocks, room, planned) <= lru
