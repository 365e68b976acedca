"""The places of columns in their blocks: encoding in a manifest, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import ConfigError
from dataplane.plan import column_places
from dataplane.plan.column_places import ColumnPlaces
from dataplane.plan.null_counts import NullCounts

TWO = [(3, 10, 20, 13, 7, 8), (), (0, 5, 6, 9, 1, 2)]


def places() -> ColumnPlaces:
    found = ColumnPlaces.of(TWO)
    assert found is not None
    return found


def test_each_column_has_a_place_a_length_and_what_it_takes_once_decoded() -> None:
    found = places()
    assert found.column_count == 2
    assert found.offset.tolist() == [[3, 13], [0, 0], [0, 9]]
    assert found.length.tolist() == [[10, 7], [0, 0], [5, 1]]
    assert found.decoded.tolist() == [[20, 8], [0, 0], [6, 2]]
    assert not found.offset.flags.writeable


def test_consecutive_columns_are_stored_as_lengths_only() -> None:
    gap, length, decoded = places().to_lists()
    assert gap.tolist() == [3, 0, 0, 0, 0, 4]
    assert length.tolist() == [10, 7, 0, 0, 5, 1]
    assert decoded.tolist() == [20, 8, 0, 0, 6, 2]


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_column_places_survive_encoding_as_lists(
    blocks: int, columns: int, data: st.DataObject
) -> None:
    numbers = st.lists(st.integers(0, 2**62), min_size=3 * columns, max_size=3 * columns)
    first = ColumnPlaces.of([data.draw(numbers) for _ in range(blocks)])
    assert first is not None
    again = ColumnPlaces.from_lists(*first.to_lists(), blocks)
    assert again is not None
    for name in ("offset", "length", "decoded"):
        assert getattr(again, name).tolist() == getattr(first, name).tolist()


def test_what_is_not_known_or_too_much_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = np.empty(0, np.int64)
    assert ColumnPlaces.of([]) is None
    assert ColumnPlaces.of([(), ()]) is None
    assert ColumnPlaces.from_lists(nothing, nothing, nothing, 3) is None
    for most, is_kept in ((6, True), (5, False)):
        monkeypatch.setattr(column_places, "PLACES_MAX", most)
        assert (ColumnPlaces.of(TWO) is not None) == is_kept


def test_columns_lie_within_their_blocks_and_to_their_very_end() -> None:
    places().check(np.array([20, 0, 10]))
    for lengths in ([19, 0, 10], [20, 0, 9], [20, 0], [20, 0, 10, 10]):
        with pytest.raises(ConfigError, match=r"outside of its block|not those of the blocks"):
            places().check(np.array(lengths))
    for columns in ((-1, 5, 0), (0, -1, 0), (0, 5, -1)):
        found = ColumnPlaces.of([columns])
        assert found is not None
        with pytest.raises(ConfigError, match="outside of its block"):
            found.check(np.array([10]))
    with pytest.raises(ConfigError, match="different numbers of columns"):
        ColumnPlaces.of([(0, 1, 1), (0, 1, 1, 1, 1, 1)])


@given(st.lists(st.integers(-2, 2**60), min_size=1))
def test_null_counts_come_back_from_their_bytes(told: list[int]) -> None:
    first = NullCounts.of([told, told])
    assert first is not None
    again = NullCounts.from_bytes(first.to_bytes())
    assert again is not None
    assert again.counts.tolist() == first.counts.tolist()
    assert again.shards.tolist() == first.shards.tolist()
    for each in (first.counts, first.shards, again.counts, again.shards):
        assert not each.flags.writeable
    assert NullCounts.from_bytes(b"") is None
    with pytest.raises(ValueError, match="3 numbers"):
        NullCounts.from_bytes(bytes(24))
