"""The loops in C give the results of numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.plan.loops import find_places, number_values, sort_rows

WORDS = st.integers(0, 2**64 - 1) | st.integers(0, 5) | st.integers(2**64 - 5, 2**64 - 1)


def _check(rows: Sequence[Sequence[int]]) -> None:
    words = np.array(rows, np.uint64).reshape(len(rows), -1)
    expected = np.sort(words, axis=1)
    sort_rows(words)
    assert (words == expected).all()


@given(st.integers(0, 40).flatmap(lambda n: st.lists(st.lists(WORDS, min_size=n, max_size=n))))
def test_rows_of_any_words_are_sorted_each_by_itself(rows: list[list[int]]) -> None:
    _check(rows or [[]])


@pytest.mark.parametrize("count", [0, 1, 2, 255, 1023, 1024, 1025, 70_001, 300_000])
def test_hashes_are_sorted(count: int) -> None:
    _check(np.random.default_rng(count).integers(0, 2**64, (2, count), np.uint64).tolist())


@pytest.mark.parametrize(
    "words",
    [
        np.arange(5000)[::-1],
        np.zeros(5000),
        np.arange(5000, dtype=np.uint64)[::-1] * np.uint64(2**51),
        np.arange(5000, dtype=np.uint64) % np.uint64(3) * np.uint64(2**62),
        np.repeat(np.array([2**63, 1], np.uint64), 70_000),
    ],
)
def test_colliding_words_are_sorted(words: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
    _check([words.tolist()])


@given(st.lists(st.integers(-5, 60), min_size=1, max_size=50))
def test_distinct_values_are_numbered_in_rising_order(drawn: list[int]) -> None:
    values = np.array(drawn, np.int64)
    distinct, numbers = number_values(values, -5, 66)
    assert distinct.tolist() == sorted(set(drawn))
    assert distinct[numbers].tolist() == drawn


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30), st.integers(0, 4), st.data())
def test_positions_are_found_from_any_part(
    lengths: list[int], shift: int, data: st.DataObject
) -> None:
    starts = np.concatenate([[0], np.cumsum(lengths)])
    end = int(starts[-1])
    places = np.array(data.draw(st.lists(st.integers(0, end - 1), max_size=20)), np.int64)
    edges = np.minimum(np.arange(((end - 1) >> shift) + 2) << shift, end - 1)
    first = (np.searchsorted(starts, edges, side="right") - 1).astype(np.int32)
    expected = np.searchsorted(starts, places, side="right") - 1
    found, within = find_places(places, first, shift, starts)
    assert found.tolist() == expected.tolist()
    assert (starts[found] + within).tolist() == places.tolist()
