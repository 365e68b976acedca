"""Columns in another type than the stored one, against numpy's astype."""

from __future__ import annotations

import math

import arrow_columns
import numpy as np
import pyarrow as pa
import pytest
from arrow_columns import Leaf, canonical_values, comparable
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnOptions, Kind, ListPolicy, NullPolicy, StackSpec
from dataplane.transforms.canonical import canonical
from dataplane.transforms.casts import converted
from dataplane.transforms.columns import plan_columns
from dataplane.transforms.dtypes import DTYPES
from dataplane.transforms.options import column_options
from dataplane.worker.stacking import canonical_stacked, plan_stacked

URL = "file:///shard.parquet"
DTYPE = st.sampled_from(DTYPES)


def is_float(dtype: str) -> bool:
    return np.dtype(dtype).kind == "f"


def fits(value: float, dtype: str) -> bool:
    if not is_float(dtype):
        limits = np.iinfo(dtype)
        return limits.min <= value <= limits.max
    with np.errstate(over="ignore"):
        return not math.isfinite(value) or bool(np.isfinite(np.float64(value).astype(dtype)))


def flat(leaf: Leaf) -> list[float | None]:
    """The numbers of a leaf; a hidden one, below a null list, is none of them."""
    rows = [[]] if leaf.kind is Kind.PADDED else []
    for value in leaf.values:
        if leaf.kind is Kind.PADDED:
            rows.append(value or [])
        else:
            rows.append(arrow_columns.flattened(value, leaf.shape))
    return [value for row in rows for value in row]


@settings(max_examples=90)
@given(
    st.integers(0, 4).flatmap(lambda rows: arrow_columns.batches(rows, 2)),
    st.sampled_from(ListPolicy),
    st.data(),
)
def test_numbers_and_lists_of_them_become_what_numpy_makes_of_them_or_are_refused(
    drawn: tuple[pa.RecordBatch, tuple[Leaf, ...]], lists: ListPolicy, data: st.DataObject
) -> None:
    batch, leaves = drawn
    dtypes = {leaf.name: data.draw(DTYPE) for leaf in leaves if leaf.dtype}
    fills = tuple((leaf.name, 1.0) for leaf in leaves)
    options = ColumnOptions(lists=lists, fill_null=fills, dtype=tuple(dtypes.items()))
    impossible = [
        leaf.name
        for leaf in leaves
        if leaf.dtype and is_float(leaf.dtype) and not is_float(dtypes[leaf.name])
    ]
    if impossible:
        with pytest.raises(ConfigError, match=f"'{impossible[0]}' has .*choose a float"):
            plan_columns(batch.schema, options)
        return
    plan = plan_columns(batch.schema, options)
    stored = plan_columns(batch.schema, ColumnOptions(lists=lists)).specs
    assert [(s.kind, s.shape) for s in plan.specs] == [(s.kind, s.shape) for s in stored]
    assert [s.dtype for s in plan.specs] == [dtypes.get(leaf.name, "") for leaf in leaves]
    lost = [
        leaf.name
        for leaf in leaves
        if leaf.dtype and not all(v is None or fits(v, dtypes[leaf.name]) for v in flat(leaf))
    ]
    if lost:
        with pytest.raises(ConfigError, match=f"{URL}: .*'{lost[0]}', which .*cannot hold"):
            canonical(batch, plan, URL)
        return
    found = canonical(batch, plan, URL)
    found.validate(full=True)
    assert found.schema == plan.schema
    for column, leaf in zip(found.columns, leaves, strict=True):
        rows = canonical_values(leaf, 1.0)
        if leaf.dtype:
            source, target = "uint8" if leaf.dtype == "bool" else leaf.dtype, dtypes[leaf.name]
            rows = [_cast(row, source, target) for row in rows or []]
        assert comparable(column.to_pylist()) == comparable(rows)


def _cast(row, source: str, target: str):
    """A number or a list of them, as numpy converts it."""
    return np.array(row, source).astype(target).tolist()


def test_only_numbers_that_are_delivered_must_fit() -> None:
    hidden = pa.ListArray.from_arrays([0, 1, 2, 3], pa.array([1, 70_000, 3]), mask=pa.array(
        [False, True, False]
    ))  # fmt: skip
    fixed = pa.FixedSizeListArray.from_arrays(
        pa.array([1, 70_000, 3]), 1, mask=pa.array([False, True, False])
    )
    plain = pa.array([1, 2, 70_000, 3]).slice(0, 2)
    options = ColumnOptions(
        dtype=(("f", "int16"), ("l", "int16"), ("p", "int16")),
        nulls=NullPolicy.MASK,
    )
    batch = pa.record_batch({"f": fixed.slice(1, 2), "l": hidden.slice(1, 2), "p": plain})
    plan = plan_columns(batch.schema, options)
    found = canonical(batch, plan, URL)
    assert {name: found.column(name).to_pylist() for name in "flp"} == {
        "f": [[0], [3]], "l": [[], [3]], "p": [1, 2],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("array", "dtype", "said"),
    [
        (pa.array([1, 2, 70_000]), "uint16", "row 2 of its block has 70000 in column 'x', which"),
        (pa.array([-1]), "uint64", "row 0 of its block has -1 in column"),
        (pa.array([0, 2**63], pa.uint64()), "int64", "row 1 of its block has 9223372036854775808"),
        (pa.array([None, 1e39]), "float32", r"row 1 of its block has 1e\+39"),
        (pa.array([70_000]), "float16", "row 0 of its block has 70000"),
        (pa.array([[], [3, 300]]), "uint8", "a list of its block has 300"),
        (pa.array([[1, 2], [3, 300]], pa.list_(pa.int32(), 2)), "int8", "row 1 .* has 300"),
    ],
)
def test_a_number_that_does_not_fit_is_named_with_column_and_shard(array, dtype, said) -> None:
    batch = pa.record_batch({"x": array})
    plan = plan_columns(batch.schema, ColumnOptions(dtype=(("x", dtype),)))
    with pytest.raises(ConfigError, match=f"{URL}: {said}") as caught:
        canonical(batch, plan, URL)
    assert caught.value.nouns["field"] == "x"


def test_nulls_of_integers_become_nan_in_floats_and_fill_values_are_of_the_new_type() -> None:
    batch = pa.record_batch({"x": pa.array([1, None], pa.uint8()), "y": pa.array([2, None])})
    options = ColumnOptions(dtype=(("x", "float32"), ("y", "int32")), fill_null=(("y", -1.0),))
    found = canonical(batch, plan_columns(batch.schema, options), URL)
    assert comparable(found.column("x").to_pylist()) == ["1.0", "nan"]
    assert found.column("y").to_pylist() == [2, -1]


def test_columns_of_one_type_can_be_stacked() -> None:
    batch = pa.record_batch({"x": pa.array([1, 2], pa.uint16()), "y": pa.array([3, 4], pa.int32())})
    stack = (StackSpec("xy", ("x", "y")),)
    plan = plan_stacked(batch.schema, ColumnOptions(stack=stack, dtype=(("x", "int32"),)))
    assert canonical_stacked(batch, plan, URL).column("xy").to_pylist() == [[1, 3], [2, 4]]


def test_a_column_of_the_wanted_type_is_not_copied() -> None:
    array = pa.array([1, 2, 3])
    assert converted(array, pa.int64(), "x", URL) is array


SCHEMA = pa.schema([("tokens", pa.list_(pa.uint16())), ("text", pa.string()), ("f", pa.float32())])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": {"token": "int64"}}, "dtype names 'token', .*did you mean 'tokens'"),
        ({"dtype": {"f": "float64"}, "columns": ["tokens"]}, "'f', which columns=.* leaves out"),
        ({"dtype": {"text": "int64"}}, "column 'text' has string values: only numbers"),
        ({"dtype": {"f": "int64"}}, "column 'f' has float32 values, whose fractions int64"),
        ({"dtype": {"tokens": "int46"}}, "did you mean 'int64'.: choose one of float32, float16"),
        ({"dtype": {"tokens": int}}, "{'tokens': 'int'}: choose one of"),
        ({"dtype": {"tokens": "bool"}}, "choose one of"),
        ({"dtype": "int64"}, 'pass a dict .*dtype={"tokens": "int64"}'),
        ({"dtype": {1: "int64"}}, "pass a dict"),
    ],
)
def test_what_cannot_be_converted_says_what_to_do(options, said) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_columns(SCHEMA, column_options(**options))


def test_types_are_named_as_numpy_or_torch_names_them() -> None:
    for given_ in ("int64", "torch.int64", np.int64, np.dtype("int64")):
        assert column_options(dtype={"x": given_}).dtype == (("x", "int64"),)
