"""Columns in another type than the stored one, against numpy's astype."""

from __future__ import annotations

import math
from typing import Any

import arrow_columns
import numpy as np
import pyarrow as pa
import pytest
from arrow_columns import Leaf, canonical_values, comparable
from arrow_layouts import ARRAYS
from foreign_values import exact_values
from hypothesis import given
from hypothesis import strategies as st

from dataplane.model.errors import ConfigError, CorruptShard
from dataplane.model.records import ColumnOptions, Kind, ListPolicy, NullPolicy, StackSpec
from dataplane.plan.columns import NEVER, UNKNOWN, NullCounts
from dataplane.transforms.canonical import canonical
from dataplane.transforms.casts import converted, read_written
from dataplane.transforms.codes import (
    categories_in,
    check_codes,
    codes_of,
    plain_values,
    shown_as,
    stored_values,
    with_categories,
)
from dataplane.transforms.columns import plan_columns
from dataplane.transforms.dtypes import DTYPES
from dataplane.transforms.leaves import canonical_type, leaves_of
from dataplane.transforms.nulls import check_fills, check_nulls
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


SCHEMA = pa.schema([("tokens", pa.list_(pa.uint16())), ("raw", pa.binary()), ("f", pa.float32())])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": {"token": "int64"}}, "dtype names 'token', .*did you mean 'tokens'"),
        ({"dtype": {"f": "float64"}, "columns": ["tokens"]}, "'f', which columns=.* leaves out"),
        ({"dtype": {"raw": "int64"}}, "column 'raw' has bytes values: only numbers"),
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
        assert [comparable_codes(one) for one in found] == [comparable_codes(one) for one in wanted]


def comparable_codes(value: Any) -> Any:
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


NULLABLE = pa.schema(
    [
        ("age", pa.int64()),
        ("ok", pa.bool_()),
        ("price", pa.float32()),
        ("when", pa.timestamp("us", "UTC")),
        ("tags", pa.list_(pa.int16())),
        ("text", pa.string()),
        ("box", pa.list_(pa.int8(), 4)),
        ("s", pa.struct([("n", pa.uint8()), ("x", pa.float64())])),
    ]
)
# age, ok, price, when, tags, tags.item, text, box, box.item, s, s.n, s.x
SHARDS = ("file:///0", "file:///1", "file:///2")


def nulls(*counts: tuple[int, ...]) -> NullCounts:
    found = NullCounts.of(counts)
    assert found is not None
    return found


def one(**counts: int) -> NullCounts:
    names = ("age", "ok", "price", "when", "tags", "tag", "text", "box", "boxes", "s", "n", "x")
    return nulls(tuple(counts.get(name, 0) for name in names))


def refusal(found: NullCounts | None, **options: object) -> str | None:
    plan = plan_columns(NULLABLE, column_options(**options))  # type: ignore[arg-type]
    check_fills(plan)
    try:
        check_nulls(plan, found, SHARDS)
    except ConfigError as error:
        return str(error)
    return None


def test_one_error_lists_all_columns_with_nulls_and_the_fill_null_to_paste():
    found = one(age=3, ok=1, price=5, when=2, tags=4, tag=1, text=9, box=1, n=6, x=2)
    told = refusal(found)
    assert told is not None
    assert "6 columns: 'age' (int64, the first in file:///0), 'ok' (bool, " in told
    pasted = '{"age": 0, "ok": False, "when": 0, "tags": 0, "box": 0, "s.n": 0}'
    assert f"fill_null={pasted}" in told
    assert refusal(found, fill_null=eval(pasted)) is None


def test_what_was_passed_already_is_part_of_what_is_to_be_pasted():
    told = refusal(one(age=1, ok=1, when=1), fill_null={"age": -1, "price": 0.5})
    assert told is not None
    assert '{"age": -1, "price": 0.5, "ok": False, "when": 0}' in told
    told = refusal(one(age=1, n=1, ok=1), fill_null=-1)
    assert told is not None
    assert '{"age": -1, "ok": False, "s.n": 0}' in told


def test_null_floats_lists_and_texts_need_no_value_and_unknown_counts_refuse_nothing():
    assert refusal(one(price=1, tags=1, text=1, x=1)) is None
    assert refusal(None) is None
    assert refusal(nulls((UNKNOWN,) * 12)) is None
    assert refusal(nulls((NEVER,) * 12)) is None


def test_columns_that_were_not_chosen_do_not_matter():
    assert refusal(one(age=1, ok=1), columns=["price", "text"]) is None
    assert refusal(one(age=1, ok=1), columns=["age"], fill_null={"age": 0}) is None


def test_a_null_struct_is_a_null_in_each_of_its_leaves():
    told = refusal(one(s=1))
    assert told is not None
    assert 'fill_null={"s.n": 0}' in told


def test_the_first_shard_with_nulls_is_named():
    none = (0,) * 12
    told = refusal(nulls(none, (0, 7, *none[2:]), (1, 1, *none[2:])))
    assert told is not None
    assert "'age' (int64, the first in file:///2), 'ok' (bool, the first in file:///1)" in told


def test_very_many_columns_are_listed_in_a_readable_line():
    schema = pa.schema([(f"c{i}", pa.int8()) for i in range(5000)])
    plan = plan_columns(schema)
    with pytest.raises(ConfigError, match=r"5000 columns: .* and 4900 more.*fill_null=0, ") as told:
        check_nulls(plan, nulls((1,) * 5000), SHARDS)
    assert len(str(told.value)) < 10_000


def test_one_number_fills_every_column_of_which_it_is_a_value():
    options = column_options(fill_null=-1)
    plan = plan_columns(NULLABLE, options)
    batch = pa.record_batch([pa.nulls(1, field.type) for field in NULLABLE], schema=NULLABLE)
    with pytest.raises(ConfigError, match=r"2 columns: 'ok' \(bool\), 's.n' \(uint8\)"):
        canonical(batch, plan, "file:///x")
    kept = ("age", "price", "when", "tags", "text", "box", "s.x")
    plan = plan_columns(NULLABLE, column_options(columns=kept, fill_null=-1))
    found = canonical(batch, plan, "file:///x").to_pylist()
    assert found == [
        {"age": -1, "price": -1.0, "when": -1, "tags": [], "text": None, "box": [-1] * 4, "s.x": -1}
    ]


def test_a_zero_for_every_column_is_different_from_no_value():
    assert column_options(fill_null=0) == ColumnOptions(fill_null_all=0.0)
    assert column_options(fill_null=0) != column_options()
    assert column_options(fill_null={}) == column_options()


@pytest.mark.parametrize(
    ("fill_null", "says"),
    [
        ("x", "pass a number"),
        ({"age": "x"}, r"fill_null=\{'age': 'x'\}: pass a number"),
        ({"age": None}, "pass a number"),
        ({3: 1}, "3 is not the name of a column"),
        ([0], "pass a number"),
        ({"age": 2**63 - 1}, "must have an exact double"),
        (10**400, "must have an exact double"),
        ({"age": 1.5}, "column 'age' cannot hold 1.5, since it holds int64"),
        ({"age": float("nan")}, "column 'age' cannot hold nan"),
        ({"ok": 2}, "column 'ok' cannot hold 2, since it holds bool"),
        ({"s.n": 256}, "column 's.n' cannot hold 256, since it holds uint8"),
        ({"price": 1e39}, r"column 'price' cannot hold 1e\+39, since it holds float32"),
        (
            {"text": 0},
            "column 'text' cannot hold 0, since it holds string values: its nulls arrive as None",
        ),
        ({"nix": 0}, "names 'nix', which is not a column of the batches; they have: age, box"),
        ({"s": 0}, "names 's', which is not a column"),
    ],
)
def test_what_no_column_can_hold_is_told(fill_null, says):
    with pytest.raises(ConfigError, match=says):
        check_fills(plan_columns(NULLABLE, column_options(fill_null=fill_null)))


@pytest.mark.parametrize("value", [1.5, float("nan"), 300])
def test_a_number_that_fits_no_column_is_an_error(value):
    options = column_options(columns=["s.n", "ok", "text"], fill_null=value)
    with pytest.raises(ConfigError, match="no column can hold it; they hold bool, string, uin"):
        check_fills(plan_columns(NULLABLE, options))


@pytest.mark.parametrize("value", [True, np.int64(1), np.float32(1), np.bool_(True), 1])
def test_numbers_of_numpy_and_bools_are_numbers(value):
    assert column_options(fill_null={"x": value}).fill_null == (("x", 1.0),)
    assert column_options(fill_null=value).fill_null_all == 1.0


def test_counts_of_shards_add_up_and_unknown_outweighs_zero():
    found = nulls((NEVER, NEVER, 0, 1, 2), (NEVER, 0, UNKNOWN, UNKNOWN, 3))
    assert found.counts.tolist() == [NEVER, 0, UNKNOWN, 1, 5]
    assert found.shards.tolist() == [-1, -1, -1, 0, 0]
    silent = nulls((NEVER, 0, 1), ())
    assert silent.counts.tolist() == [UNKNOWN, UNKNOWN, 1]
    assert NullCounts.of([(), ()]) is None
    copy = NullCounts.from_bytes(found.to_bytes())
    assert copy is not None
    assert copy.counts.tolist() == found.counts.tolist()
    assert copy.shards.tolist() == found.shards.tolist()


@pytest.mark.parametrize(
    ("written", "nearest"),
    [
        ("1.00048828125", 1.0),
        ("1.0004882812500000000001", 1.0009765625),
        ("1.0014648437499999999999", 1.0009765625),
        ("-1.0004882812500000000001", -1.0009765625),
        ("65519.99999999999999999999", 65504.0),
        ("2.98023223876953125000000001e-8", 2.0**-24),
        ("2.98023223876953125e-8", 0.0),
        ("1.0004882812500002", 1.0009765625),
        ("0.1", 0.0999755859375),
    ],
)
def test_a_float16_of_digits_is_rounded_once(written: str, nearest: float) -> None:
    array = pa.array([None, written])
    assert read_written(array, pa.float16(), "x", URL).to_pylist() == [None, nearest]


def test_digits_that_are_nearer_to_the_value_after_the_largest_float16_are_refused() -> None:
    for written in ("65520", "65520.00000000000000000001"):
        with pytest.raises(ConfigError, match="cannot hold"):
            read_written(pa.array([written]), pa.float16(), "x", URL)


@pytest.mark.parametrize("target", [pa.float16(), pa.float32(), pa.float64()], ids=str)
def test_texts_of_nan_and_infinity_become_floats_as_in_python(target: pa.DataType) -> None:
    texts = ["nan", "NaN", "-nan", "+NAN", "inf", "-Inf", "+INF", "Infinity", "-infinity", "1.5"]
    found = read_written(pa.array([*texts, None]), target, "x", URL).to_pylist()
    assert comparable(found) == comparable([*map(float, texts), None])
    for other in ("1e999", "nan1", "infinit", " nan", "NA", ""):
        with pytest.raises(ConfigError, match=f"row 1 .* has {other!r} .*cannot hold"):
            read_written(pa.array(["inf", other]), target, "x", URL)
    with pytest.raises(ConfigError, match=r"'nan' .*int64 cannot hold"):
        read_written(pa.array(["nan"]), pa.int64(), "x", URL)
