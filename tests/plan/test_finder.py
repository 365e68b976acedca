"""The finder gives the same intervals as a binary search."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.plan.order import Finder

LENGTHS = st.lists(st.integers(1, 9) | st.integers(1, 1 << 40), min_size=1, max_size=40)


@given(LENGTHS, st.data())
def test_intervals_of_any_lengths_are_found(lengths: list[int], data: st.DataObject) -> None:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    drawn = data.draw(st.lists(st.integers(0, int(starts[-1]) - 1), max_size=20))
    places = np.array([*drawn, *starts[:-1], *(starts[1:] - 1)], np.int64)
    expected = np.searchsorted(starts, places, side="right") - 1
    found, within = Finder(starts).find(places)
    assert found.tolist() == expected.tolist()
    assert within.tolist() == (places - starts[expected]).tolist()


@pytest.mark.parametrize("count", [1, 3, 100, 70_000])
@pytest.mark.parametrize("length", [1, 7, 23_301])
def test_equal_intervals_with_a_short_one_at_every_tenth_are_found(count: int, length: int) -> None:
    lengths = np.full(count, length, np.int64)
    lengths[9::10] = 1
    starts = np.concatenate([[0], np.cumsum(lengths)])
    places = np.random.default_rng(0).integers(0, starts[-1], 1000)
    found, within = Finder(starts).find(places)
    assert (starts[found] + within == places).all()
    assert (within >= 0).all()
    assert (places < starts[found + 1]).all()


@pytest.mark.parametrize("count", [100_000, 300_001])
def test_intervals_that_crowd_into_one_part_are_found(count: int) -> None:
    lengths = np.ones(count, np.int64)
    lengths[count // 2] = 1 << 40
    starts = np.concatenate([[0], np.cumsum(lengths)])
    expected = np.random.default_rng(0).integers(0, count, 1000)
    found, within = Finder(starts).find(starts[expected] + lengths[expected] - 1)
    assert found.tolist() == expected.tolist()
    assert within.tolist() == (lengths[expected] - 1).tolist()


@pytest.mark.parametrize("count", [1 << 15, 1 << 20])
def test_each_part_of_the_finder_has_at_most_two_intervals(count: int) -> None:
    finder = Finder(np.arange(count + 1, dtype=np.int64) * 1000)
    assert int(np.diff(finder._first).max()) <= 2
