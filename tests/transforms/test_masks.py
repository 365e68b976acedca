"""Masks of nulls: a column of bools for each column that may have nulls."""

from __future__ import annotations

import arrow_columns
import numpy as np
import pyarrow as pa
import pytest
from arrow_columns import Leaf, canonical_values, comparable
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnOptions, Kind, ListPolicy, NullPolicy, StackSpec
from dataplane.plan.columns import NEVER, NullCounts
from dataplane.transforms.annotations import annotated
from dataplane.transforms.canonical import canonical
from dataplane.transforms.columns import plan_columns
from dataplane.transforms.nulls import check_nulls
from dataplane.worker.stacking import canonical_stacked, plan_stacked

URL = "file:///shard.parquet"
MASK = ColumnOptions(nulls=NullPolicy.MASK)


def without_null_rows(leaf: Leaf) -> Leaf:
    """The leaf as it should be delivered with its mask."""
    empty = 0 if leaf.kind is Kind.FIXED and "float" not in leaf.dtype else None
    for width in reversed(leaf.shape):
        empty = [empty] * width
    values = [empty if value is None else value for value in leaf.values]
    return Leaf(leaf.name, leaf.kind, values, leaf.dtype, leaf.shape)


@settings(max_examples=70)
@given(st.integers(0, 4).flatmap(arrow_columns.batches), st.sampled_from(ListPolicy))
def test_every_column_of_any_type_is_beside_what_was_null_in_it(drawn, lists):
    batch, leaves = drawn
    plan = plan_columns(batch.schema, ColumnOptions(lists=lists, nulls=NullPolicy.MASK))
    assert [spec.name for spec in plan.specs] == [
        name for leaf in leaves for name in (leaf.name, f"{leaf.name}.is_null")
    ]
    beside = [canonical_values(without_null_rows(leaf), None) for leaf in leaves]
    if any(values is None for values in beside):
        with pytest.raises(ConfigError, match=r"nulls within lists of .*fill_null="):
            canonical(batch, plan, URL)
        fills = tuple((leaf.name, 1.0) for leaf in leaves if leaf.dtype)
        filled = ColumnOptions(lists=lists, nulls=NullPolicy.MASK, fill_null=fills)
        plan = plan_columns(batch.schema, filled)
        beside = [canonical_values(leaf, 1.0) for leaf in leaves]
    found = canonical(batch, plan, URL)
    found.validate(full=True)
    assert found.schema == plan.schema
    for i, leaf in enumerate(leaves):
        values, mask = found.column(2 * i).to_pylist(), found.column(2 * i + 1).to_pylist()
        assert comparable(values) == comparable(beside[i])
        assert mask == [int(value is None) for value in leaf.values]


def test_a_null_list_is_told_from_an_empty_one():
    batch = pa.record_batch({"l": pa.array([[1], [], None], pa.list_(pa.int8()))})
    found = canonical(batch, plan_columns(batch.schema, MASK), URL)
    assert found.to_pydict() == {"l": [[1], [], []], "l.is_null": [0, 0, 1]}


def test_what_shards_declare_to_be_without_nulls_has_no_mask():
    schema = pa.schema(
        [("a", pa.int8()), ("s", pa.struct([("x", pa.int8()), ("y", pa.int8())])), ("b", pa.int8())]
    )
    nulls = NullCounts.of([(NEVER, NEVER, NEVER, 0, 0), (NEVER, NEVER, NEVER, NEVER, NEVER)])
    known = annotated(schema, MASK, nulls)
    names = [spec.name for spec in plan_columns(known, MASK).specs]
    assert names == ["a", "s.x", "s.y", "s.y.is_null", "b", "b.is_null"]
    assert annotated(schema, ColumnOptions(), nulls) is schema
    again = pa.ipc.read_schema(known.serialize())
    assert [spec.name for spec in plan_columns(again, MASK).specs] == names


def test_a_stack_comes_with_a_mask_of_its_shape():
    batch = pa.record_batch(
        {"a": pa.array([1, None, 3]), "b": pa.array([4.0, None, 6.0]), "c": pa.array([7, 8, 9])}
    )
    nulls = NullCounts.of([(1, 1, NEVER)])
    stack = (StackSpec("x", ("b", "c", "a"), "float32"),)
    options = ColumnOptions(stack=stack, nulls=NullPolicy.MASK)
    plan = plan_stacked(annotated(batch.schema, options, nulls), options)
    assert [(s.name, s.dtype, s.shape) for s in plan.specs] == [
        ("x", "float32", (3,)),
        ("x.is_null", "bool", (3,)),
    ]
    found = canonical_stacked(batch, plan, URL)
    mask = [[0, 0, 0], [1, 0, 1], [0, 0, 0]]
    assert found.column("x.is_null").to_pylist() == mask
    x = found.column("x").values.to_numpy().reshape(3, 3)
    np.testing.assert_array_equal(x, [[4, 7, 1], [np.nan, 8, 0], [6, 9, 3]])


def test_a_stack_of_columns_without_nulls_has_no_mask():
    options = ColumnOptions(stack=(StackSpec("x", ("a",)),), nulls=NullPolicy.MASK)
    schema = annotated(pa.schema([("a", pa.int8())]), options, NullCounts.of([(NEVER,)]))
    assert [spec.name for spec in plan_stacked(schema, options).specs] == ["x"]


def test_a_name_that_a_mask_would_take_is_refused():
    schema = pa.schema([("a", pa.int8()), ("a.is_null", pa.bool_())])
    with pytest.raises(ConfigError, match=r"adds a column 'a.is_null' for the nulls of 'a'"):
        plan_columns(schema, MASK)
    alone = ColumnOptions(("a.is_null",), nulls=NullPolicy.MASK)
    assert len(plan_columns(schema, alone).specs) == 2


def test_nulls_that_are_marked_are_not_refused_but_those_within_lists_are():
    schema = pa.schema(
        [("i", pa.int8()), ("l", pa.list_(pa.int8())), ("f", pa.list_(pa.int8(), 2))]
    )
    plan = plan_columns(schema, MASK)
    check_nulls(plan, NullCounts.of([(3, 3, 0, 3, 0)]), [URL])
    with pytest.raises(ConfigError, match=r"column 'l' .*fill_null=..l.: 0"):
        check_nulls(plan, NullCounts.of([(3, 3, 1, 0, 0)]), [URL])
