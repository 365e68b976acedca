"""The code of a value is its index among all values, in every layout."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from arrow_layouts import ARRAYS
from foreign_values import exact_values

from dataplane.model.errors import CorruptShard
from dataplane.transforms.codes import (
    categories_in,
    check_codes,
    codes_of,
    plain_values,
    shown_as,
    stored_values,
    with_categories,
)
from dataplane.transforms.leaves import canonical_type, leaves_of

CODED = (
    *("dictionary", "dictionary of times", "dictionary of views", "run ends", "run ends of codes"),
    *("string view", "binary view", "bool", "uuid", "timestamp", "seconds", "duration", "days"),
    *("date64", "time of day", "time32"),
)


def sorted_values(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Those that are not null, as plan and workers have them."""
    found = {one for one in plain_values(array, kind).to_pylist() if one is not None}
    return pa.array(sorted(found), kind)


@pytest.mark.parametrize("name", CODED)
def test_codes_stand_for_the_values_in_any_layout(name: str) -> None:
    array = ARRAYS[name](0)
    (leaf,) = leaves_of(pa.schema([("x", array.type)]))
    check_codes(["x"], [leaf], [leaf])
    categories = sorted_values(array, canonical_type(leaf.type))
    people = shown_as(categories, leaf).to_pylist()
    assert stored_values(shown_as(categories, leaf)).equals(categories)
    for part in (array, array.slice(1)):
        codes = codes_of(part, leaf, categories, -1, "url")
        assert codes.type == pa.int64()
        wanted = exact_values(part)
        found = [None if code < 0 else people[code] for code in codes.to_pylist()]
        assert [comparable(one) for one in found] == [comparable(one) for one in wanted]


def comparable(value: Any) -> Any:
    """A UUID as its bytes."""
    return value.bytes if hasattr(value, "bytes") else value


def test_values_of_a_dictionary_that_no_row_has_need_no_code() -> None:
    array = pa.DictionaryArray.from_arrays(
        pa.array([2, None, 0, 3]), pa.array(["b", "unused", "a", None])
    )
    (leaf,) = leaves_of(pa.schema([("x", array.type)]))
    categories = pa.array([b"a", b"b"], pa.large_binary())
    assert codes_of(array, leaf, categories, -1, "url").to_pylist() == [0, -1, 1, -1]


def test_a_value_that_was_not_counted_is_reported_with_shard_and_column() -> None:
    (leaf,) = leaves_of(pa.schema([("x", pa.string())]))
    categories = pa.array([b"a"], pa.large_binary())
    with pytest.raises(CorruptShard, match=r"url: column 'x' has a value.*: new"):
        codes_of(pa.array(["a", None, "new"]), leaf, categories, -1, "url")


def test_categories_travel_with_a_schema() -> None:
    schema = pa.schema([("x", pa.string())], metadata={"a": "b"})
    values = {"x": pa.array([b"a", b"b"], pa.large_binary()), "n": pa.array([1, 2, 3])}
    wire = with_categories(schema, values).serialize()
    read = pa.ipc.read_schema(wire)
    assert read.metadata[b"a"] == b"b"
    assert categories_in(read) == values
    assert categories_in(schema) == {}
