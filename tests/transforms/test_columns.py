"""Any Arrow column becomes what the rules of columns.py say, or is refused."""

from __future__ import annotations

from typing import Any

import arrow_columns
import numpy as np
import pyarrow as pa
import pytest
from arrow_columns import Leaf, canonical_values, comparable
from hypothesis import given
from hypothesis import strategies as st

from dataplane.model.errors import ConfigError
from dataplane.model.records import (
    ColumnOptions,
    ColumnSpec,
    Kind,
    ListPolicy,
    NullPolicy,
    StackSpec,
)
from dataplane.plan.columns import NEVER, NullCounts
from dataplane.transforms.annotations import annotated
from dataplane.transforms.canonical import canonical
from dataplane.transforms.columns import plan_columns
from dataplane.transforms.lists import ListForm, check_lists, list_forms
from dataplane.transforms.nulls import check_nulls
from dataplane.transforms.options import column_options
from dataplane.worker.stacking import canonical_stacked, plan_stacked

URL = "file:///shard.parquet"
LISTS = st.sampled_from(ListPolicy)


@given(
    st.integers(0, 4).flatmap(arrow_columns.batches),
    LISTS,
    st.sampled_from([None, 7.0]),
)
def test_every_leaf_has_the_values_of_its_source(
    drawn: tuple[pa.RecordBatch, tuple[Leaf, ...]], lists: ListPolicy, fill: float | None
) -> None:
    batch, leaves = drawn
    fills = () if fill is None else tuple((leaf.name, fill) for leaf in leaves)
    plan = plan_columns(batch.schema, ColumnOptions(lists=lists, fill_null=fills))
    variable = Kind.PADDED if lists is ListPolicy.PADDED else Kind.RAGGED
    assert [(s.name, s.kind, s.dtype, s.shape) for s in plan.specs] == [
        (at.name, variable if at.kind is Kind.PADDED else at.kind, at.dtype, at.shape)
        for at in leaves
    ]
    expected = [canonical_values(leaf, fill) for leaf in leaves]
    if any(values is None for values in expected):
        refused = [leaf for leaf, values in zip(leaves, expected, strict=True) if values is None]
        with pytest.raises(ConfigError, match=URL) as caught:
            canonical(batch, plan, URL)
        assert caught.value.nouns["field"] == refused[0].name
        pasted = ", ".join(
            f'"{leaf.name}": {"False" if leaf.dtype == "bool" else 0}' for leaf in refused
        )
        assert f"fill_null={{{pasted}}}" in str(caught.value)
        return
    result = canonical(batch, plan, URL)
    result.validate(full=True)
    assert result.schema == plan.schema
    assert [comparable(c.to_pylist()) for c in result.columns] == [comparable(v) for v in expected]


@given(st.integers(1, 4).flatmap(arrow_columns.batches), st.data())
def test_only_chosen_leaves_are_read_and_in_the_chosen_order(
    drawn: tuple[pa.RecordBatch, tuple[Leaf, ...]], data: st.DataObject
) -> None:
    batch, leaves = drawn
    names = data.draw(st.permutations([leaf.name for leaf in leaves]))
    chosen = names[: data.draw(st.integers(1, len(names)))]
    fills = tuple((name, 1.0) for name in chosen)
    plan = plan_columns(batch.schema, ColumnOptions(tuple(chosen), fill_null=fills))
    assert [spec.name for spec in plan.specs] == chosen
    assert set(plan.top_level) == {name.partition(".")[0] for name in chosen}
    by_name = {leaf.name: leaf for leaf in leaves}
    # A format decodes just these columns, in this order.
    decoded = batch.select(list(plan.top_level))
    result = canonical(decoded, plan, URL)
    for name, column in zip(chosen, result.columns, strict=True):
        assert comparable(column.to_pylist()) == comparable(canonical_values(by_name[name], 1.0))


def test_a_column_that_is_canonical_already_is_not_copied() -> None:
    batch = pa.record_batch(
        {
            "x": pa.array([1, 2, 3], pa.int32()),
            "y": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int8(), 2)),
            "z": pa.array([[1], [], [2]], pa.large_list(pa.int64())),
        }
    )
    plan = plan_columns(batch.schema, ColumnOptions(lists=ListPolicy.RAGGED))
    result = canonical(batch, plan, URL)
    for before, after in zip(batch.columns, result.columns, strict=True):
        assert [b and b.address for b in before.buffers()] == [
            b and b.address for b in after.buffers()
        ]


def test_a_structs_name_means_all_of_its_leaves() -> None:
    inner = pa.struct([("u", pa.int8()), ("v", pa.struct([("w", pa.string())]))])
    schema = pa.schema([("a", inner), ("b", pa.int8()), ("ab", pa.int8())])
    for name, leaves in {
        "a": ["a.u", "a.v.w"],
        "a.v": ["a.v.w"],
        "a.v.w": ["a.v.w"],
        "b": ["b"],
    }.items():
        plan = plan_columns(schema, ColumnOptions((name,)))
        assert [spec.name for spec in plan.specs] == leaves


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["c"], "no column 'c'; the dataset has: a.u, b"),
        (["a.x"], "no column 'a.x'; did you mean 'a.u'.* The dataset has: a.u, b"),
        (["b."], "no column 'b.'"),
        (["b", "b"], "'b' occurs twice"),
        (["a", "a.u"], "'a.u' occurs twice"),
    ],
)
def test_a_column_that_is_missing_or_named_twice_is_refused(
    columns: list[str], message: str
) -> None:
    schema = pa.schema([("a", pa.struct([("u", pa.int8())])), ("b", pa.int8())])
    with pytest.raises(ConfigError, match=message):
        plan_columns(schema, ColumnOptions(tuple(columns)))


def test_a_name_with_a_dot_that_means_two_columns_is_refused() -> None:
    schema = pa.schema([("a", pa.struct([("b", pa.int8())])), ("a.b", pa.int16())])
    for columns in ([], ["a.b"], ["a"]):
        with pytest.raises(ConfigError, match=r"'a\.b' occurs twice") as caught:
            plan_columns(schema, ColumnOptions(tuple(columns)))
        assert "(as field 'b' of column 'a' and column 'a.b': rename one" in str(caught.value)
    inner = pa.struct([("c", pa.int8())])
    schema = pa.schema([("a.b", inner), ("a", pa.struct([("b", inner)])), ("x", pa.int8())])
    said = r"'c' of column 'a\.b' and field 'b\.c' of column 'a': .* others with columns=\[…\]: x"
    with pytest.raises(ConfigError, match=said):
        plan_columns(schema)
    assert [spec.name for spec in plan_columns(schema, ColumnOptions(("x",))).specs] == ["x"]


def test_two_columns_of_one_name_are_refused_however_many_columns_there_are() -> None:
    names = [f"c{i}" for i in range(6000)]
    schema = pa.schema([(name, pa.int8()) for name in [*names, "c17"]])
    with pytest.raises(ConfigError, match="'c17' occurs twice"):
        plan_columns(schema)
    twice = pa.schema([("a", pa.struct([("b", pa.int8())])), ("a", pa.struct([("c", pa.int8())]))])
    with pytest.raises(ConfigError, match=r"occurs twice \('a'\)"):
        plan_columns(twice)


def test_names_with_dots_are_read_from_where_they_lie() -> None:
    kind = pa.struct([("b.c", pa.int64()), ("b", pa.struct([("y", pa.int64())])), ("", pa.int64())])
    batch = pa.record_batch(
        {
            "a": pa.array([{"b.c": 1, "b": {"y": 2}, "": 3}], kind),
            "a.b": pa.array([{"d": 4}]),
            "a.x": pa.array([5]),
        }
    )
    plan = plan_columns(batch.schema)
    result = canonical(batch, plan, URL)
    assert dict(zip(result.schema.names, (c[0].as_py() for c in result.columns), strict=True)) == {
        "a.b.c": 1,
        "a.b.y": 2,
        "a.": 3,
        "a.b.d": 4,
        "a.x": 5,
    }
    of_a = plan_columns(batch.schema, ColumnOptions(("a",)))
    assert [spec.name for spec in of_a.specs] == ["a.b.c", "a.b.y", "a."]
    with pytest.raises(ConfigError, match="no column 'x'"):
        plan_columns(pa.schema([("x.y", pa.int8())]), ColumnOptions(("x",)))


def test_a_tensor_whose_dimensions_are_permuted_is_not_taken_for_another_tensor() -> None:
    kind = pa.fixed_shape_tensor(pa.int8(), [2, 3], permutation=[1, 0])
    array = pa.ExtensionArray.from_storage(
        kind, pa.array([[1, 2, 3, 4, 5, 6], None], pa.list_(pa.int8(), 6))
    )
    batch = pa.record_batch({"t": array})
    plan = plan_columns(batch.schema)
    assert [(spec.kind, spec.shape) for spec in plan.specs] == [(Kind.OBJECT, ())]
    result = canonical(batch, plan, URL)
    assert result.column(0).to_pylist() == [[1, 2, 3, 4, 5, 6], None]


@pytest.mark.parametrize(
    "kind",
    [
        pa.fixed_shape_tensor(pa.decimal128(5, 2), [2]),
        pa.fixed_shape_tensor(pa.string(), [2]),
        pa.list_(pa.decimal128(5, 2), 2),
    ],
    ids=str,
)
def test_fixed_lists_of_non_numbers_are_objects(kind: pa.DataType) -> None:
    (spec,) = plan_columns(pa.schema([("t", kind)])).specs
    assert (spec.kind, spec.dtype) == (Kind.OBJECT, "")


def test_fixed_lists_of_no_values_have_rows_all_the_same() -> None:
    batch = pa.record_batch({"e": pa.array([[], None, []], pa.list_(pa.int16(), 0))})
    plan = plan_columns(batch.schema)
    assert plan.specs[0].shape == (0,)
    assert canonical(batch, plan, URL).num_rows == 3


def test_a_null_run_in_a_null_struct_is_no_value() -> None:
    runs = pa.RunEndEncodedArray.from_arrays(
        pa.array([2, 3], pa.int32()), pa.array([1.0, 2.0], pa.float64())
    )
    struct = pa.StructArray.from_arrays([runs], ["r"], mask=pa.array([False, True, False]))
    batch = pa.record_batch({"s": struct})
    plan = plan_columns(batch.schema)
    found = canonical(batch, plan, URL).column(0).to_pylist()
    assert comparable(found) == ["1.0", "nan", "2.0"]


@pytest.mark.parametrize("given", ["x", {"x", "y"}, 3])
def test_columns_without_an_order_are_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="pass a list of names"):
        column_options(columns=given)  # type: ignore[arg-type]


def test_columns_that_are_no_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="pass a list of names"):
        column_options(columns=["x", 3])  # type: ignore[list-item]


def test_names_of_columns_may_come_in_an_array() -> None:
    names = np.array(["y", "x"])
    found = column_options(columns=names, codes=names)  # type: ignore[arg-type]
    assert found == column_options(columns=["y", "x"], codes=["x", "y"])
    assert {type(name) for name in (*found.columns, *found.codes)} == {str}


SPECS = (
    ColumnSpec("id", Kind.FIXED, "int64"),
    ColumnSpec("tokens", Kind.PADDED, "int32"),
    ColumnSpec("flags", Kind.PADDED, "bool"),
    ColumnSpec("marks", Kind.RAGGED, "float16"),
)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_length": {"id": 3}}, "max_length names 'id', which is not a column of lists"),
        ({"pad_value": {"gone": 3}}, "pad_value names 'gone'.*flags, marks, tokens"),
        ({"pad_value": {"tokens": 1.5}}, "column 'tokens' cannot hold 1.5.*int32"),
        ({"pad_value": {"marks": 1e6}}, r"column 'marks' cannot hold 1e\+06.*float16"),
        ({"pad_value": {"flags": 2}}, "column 'flags' cannot hold 2.*bool"),
    ],
)
def test_what_these_columns_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_lists(SPECS, column_options(**options))


def test_a_value_for_every_column_must_be_one_of_some_column() -> None:
    with pytest.raises(
        ConfigError,
        match=r"pad_value=1\.5: no column of lists can hold it; their types are bool, int32",
    ):
        check_lists(SPECS[:3], column_options(pad_value=1.5))
    with pytest.raises(ConfigError, match="no column of the batches has lists"):
        check_lists(SPECS[:1], column_options(max_length=3))


def test_only_lists_with_options_have_a_form() -> None:
    assert list_forms(SPECS, column_options()) == {}
    one = (1).to_bytes(4, "little")
    assert list_forms(SPECS, column_options(pad_value=1, max_length={"marks": 7})) == {
        1: ListForm(padding=one),
        2: ListForm(padding=b"\1"),
        3: ListForm(7),
    }
    assert list_forms(SPECS, column_options(max_length=5, truncation_side="left")) == {
        at: ListForm(5, keeps_end=True) for at in (1, 2, 3)
    }


MASK = ColumnOptions(nulls=NullPolicy.MASK)


def without_null_rows(leaf: Leaf) -> Leaf:
    """The leaf as it should be delivered with its mask."""
    empty = 0 if leaf.kind is Kind.FIXED and "float" not in leaf.dtype else None
    for width in reversed(leaf.shape):
        empty = [empty] * width
    values = [empty if value is None else value for value in leaf.values]
    return Leaf(leaf.name, leaf.kind, values, leaf.dtype, leaf.shape)


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
