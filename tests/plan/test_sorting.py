"""Words are sorted, whatever they are."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.plan.sorting import sort_rows, sorting

WORDS = st.integers(0, 2**64 - 1) | st.integers(0, 5) | st.integers(2**64 - 5, 2**64 - 1)


def _check(rows: Sequence[Sequence[int]]) -> None:
    library = sorting().library
    if library is None:
        told = f"{sorting().missing}: install one, and run `make setup`"
        if os.environ.get("CI"):
            pytest.fail(told)
        pytest.skip(told)
    words = np.array(rows, np.uint64).reshape(len(rows), -1)
    expected = np.sort(words, axis=1)
    sort_rows(words, library)
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
def test_words_that_crowd_are_sorted(words: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
    _check([words.tolist()])
