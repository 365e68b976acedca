"""Any Arrow column becomes what the rules of columns.py say, or is refused."""

from __future__ import annotations

import arrow_columns
import numpy as np
import pyarrow as pa
import pytest
from arrow_columns import Leaf, canonical_values, comparable
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnOptions, Kind, ListPolicy
from dataplane.transforms.canonical import canonical
from dataplane.transforms.columns import plan_columns
from dataplane.transforms.options import column_options

URL = "file:///shard.parquet"
LISTS = st.sampled_from(ListPolicy)


@settings(max_examples=90)
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
        with pytest.raises(ConfigError, match=r"'a\.b' occurs twice"):
            plan_columns(schema, ColumnOptions(tuple(columns)))


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
