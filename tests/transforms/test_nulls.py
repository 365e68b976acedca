"""Nulls that tensors cannot hold: detected before anything is read, all in one error."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnOptions
from dataplane.plan.columns import NEVER, UNKNOWN, NullCounts
from dataplane.transforms.canonical import canonical
from dataplane.transforms.columns import plan_columns
from dataplane.transforms.nulls import check_fills, check_nulls
from dataplane.transforms.options import column_options

SCHEMA = pa.schema(
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
    plan = plan_columns(SCHEMA, column_options(**options))  # type: ignore[arg-type]
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
    plan = plan_columns(SCHEMA, options)
    batch = pa.record_batch([pa.nulls(1, field.type) for field in SCHEMA], schema=SCHEMA)
    with pytest.raises(ConfigError, match=r"2 columns: 'ok' \(bool\), 's.n' \(uint8\)"):
        canonical(batch, plan, "file:///x")
    kept = ("age", "price", "when", "tags", "text", "box", "s.x")
    plan = plan_columns(SCHEMA, column_options(columns=kept, fill_null=-1))
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
        ({"age": 2**63 - 1}, "holds exactly"),
        (10**400, "holds exactly"),
        ({"age": 1.5}, "1.5 is not a value of column 'age', which holds int64"),
        ({"age": float("nan")}, "nan is not a value of column 'age'"),
        ({"ok": 2}, "2 is not a value of column 'ok', which holds bool"),
        ({"s.n": 256}, "256 is not a value of column 's.n', which holds uint8"),
        ({"price": 1e39}, r"1e\+39 is not a value of column 'price', which holds float32"),
        ({"text": 0}, "column 'text', which holds string values: its nulls arrive as None"),
        ({"nix": 0}, "names 'nix', which is not a column of the batches; they have: age, box"),
        ({"s": 0}, "names 's', which is not a column"),
    ],
)
def test_what_no_column_can_hold_is_told(fill_null, says):
    with pytest.raises(ConfigError, match=says):
        check_fills(plan_columns(SCHEMA, column_options(fill_null=fill_null)))


@pytest.mark.parametrize("value", [1.5, float("nan"), 300])
def test_a_number_that_fits_no_column_is_an_error(value):
    options = column_options(columns=["s.n", "ok", "text"], fill_null=value)
    with pytest.raises(ConfigError, match="not a value of any column; they hold bool, string, uin"):
        check_fills(plan_columns(SCHEMA, options))


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
