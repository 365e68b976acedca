"""The places of columns in their blocks: encoding in a manifest, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.model.errors import ConfigError
from dataplane.plan import columns as column_module
from dataplane.plan.columns import ColumnPlaces, NullCounts, PlacesPart

TWO = [(3, 10, 20, 13, 7, 8), (), (0, 5, 6, 9, 1, 2)]


def places() -> ColumnPlaces:
    found = ColumnPlaces.of(TWO)
    assert found is not None
    return found


def tables(found: ColumnPlaces) -> list[list[list[int]]]:
    """Offset, length and decoded size of each column of all blocks."""
    parts = list(found.parts())
    assert [part.first for part in parts] == np.cumsum([0, *map(part_rows, parts)])[:-1].tolist()
    names = ("offset", "length", "decoded")
    return [np.concatenate([getattr(part, name) for part in parts]).tolist() for name in names]


def part_rows(part: PlacesPart) -> int:
    return len(part.offset)


def test_each_column_has_a_place_a_length_and_what_it_takes_once_decoded() -> None:
    found = places()
    assert (found.block_count, found.column_count) == (3, 2)
    offset, length, decoded = tables(found)
    assert offset == [[3, 13], [0, 0], [0, 9]]
    assert length == [[10, 7], [0, 0], [5, 1]]
    assert decoded == [[20, 8], [0, 0], [6, 2]]


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 12), st.data())
def test_column_places_survive_encoding(
    blocks: int, columns: int, part_columns: int, data: st.DataObject
) -> None:
    number = st.integers(0, 2**62) | st.integers(0, 9) | st.integers(2**32 - 2, 2**32 + 1)
    numbers = st.lists(number, min_size=3 * columns, max_size=3 * columns)
    drawn = [data.draw(numbers) for _ in range(blocks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_module, "PART_COLUMNS", part_columns)
        first = ColumnPlaces.of(drawn)
        assert first is not None
        again = ColumnPlaces.from_bytes(first.to_bytes())
        assert tables(again) == tables(first) == [[row[at::3] for row in drawn] for at in range(3)]


def test_places_of_equal_blocks_take_no_memory() -> None:
    blocks = [(0, 400_000, 400_000, 400_064, 7_000, 7_000)] * 40_000
    found = ColumnPlaces.of(blocks)
    assert found is not None
    assert len(found.to_bytes()) < 10_000


@pytest.mark.parametrize("cut", [0, 8, 15, 16, 18, 20, 30, -1])
def test_places_that_are_cut_off_are_refused(cut: int) -> None:
    with pytest.raises(ValueError, match="cut off"):
        ColumnPlaces.from_bytes(places().to_bytes()[:cut])


def test_damaged_places_are_refused() -> None:
    whole = bytearray(places().to_bytes())
    for huge in (0, 1 << 40):
        with pytest.raises(ValueError, match="columns in"):
            ColumnPlaces.from_bytes(huge.to_bytes(8, "little") + whole[8:])
    whole[21:25] = b"\0\0\0\0"
    with pytest.raises(ConfigError, match="damaged"):
        list(ColumnPlaces.from_bytes(whole).parts())


def test_what_is_not_known_or_too_much_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ColumnPlaces.of([]) is None
    assert ColumnPlaces.of([(), ()]) is None
    for most, is_kept in ((6, True), (5, False)):
        monkeypatch.setattr(column_module, "PLACES_MAX", most)
        assert (ColumnPlaces.of(TWO) is not None) == is_kept


def check(found: ColumnPlaces | None, lengths: list[int]) -> None:
    assert found is not None
    (part,) = found.parts()
    part.check(np.array(lengths))


def test_columns_lie_within_their_blocks_and_to_their_very_end() -> None:
    check(places(), [20, 0, 10])
    for lengths in ([19, 0, 10], [20, 0, 9]):
        with pytest.raises(ConfigError, match="outside of its block"):
            check(places(), lengths)
    for places_given in ((-1, 5, 0), (0, -1, 0), (0, 5, -1)):
        with pytest.raises(ConfigError, match="outside of its block"):
            check(ColumnPlaces.of([places_given]), [10])
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
