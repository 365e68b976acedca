"""Conditions on numbers: every type is compared with constants, and with every other, exactly."""

from __future__ import annotations

import decimal
import io
import operator
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings

from dataplane.formats.parquet import Parquet
from dataplane.model.errors import ConfigError
from dataplane.transforms.condition import Condition, Outcomes

OPERATORS = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le,
             ">": operator.gt, ">=": operator.ge}  # fmt: skip
OUTCOMES = {True: Outcomes.TRUE, False: Outcomes.FALSE, None: Outcomes.NULL}
FLOATS = [-0.0, 0.5, 0.1, 2.0, 2.0**24, 2.0**53, 2.0**63, 1e30, float("inf"), float("nan")]
CENTS = st.decimals(-10, 10, places=2) | st.sampled_from([
    decimal.Decimal(f"{2**53 + 1}.07"), decimal.Decimal("12345678901234567890.12")
])  # fmt: skip
TYPES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "i32": (pa.int32(), st.sampled_from([-3, 0, 2, 2**24 + 1, -(2**31)])),
    "i64": (pa.int64(), st.sampled_from([-3, 0, 2, 2**53, 2**53 + 1, 2**63 - 1, -(2**63)])),
    "u64": (pa.uint64(), st.sampled_from([0, 2, 2**53 + 1, 2**63, 2**64 - 1])),
    "f32": (pa.float32(), st.sampled_from(FLOATS)),
    "f64": (pa.float64(), st.sampled_from(FLOATS)),
    "d64": (pa.decimal64(9, 2), st.decimals(-10, 10, places=2)),
    "d128": (pa.decimal128(38, 2), CENTS),
    "d256": (pa.decimal256(60, 30), CENTS),
}
CONSTANTS = ["0", "2", "-3", "0.1", "0.7", "4.35", "2.5", "16777217", "9007199254740993", "1e30",
             "9223372036854775808", "18446744073709551615", "-18446744073709551615",
             "0.10000000000000000001", "9007199254740993.07", "9007199254740993.0",
             "12345678901234567890.1234567890", "10" * 30]  # fmt: skip


def known(value: Any) -> Any:
    """A value that Python compares exactly with others; floats that are no numbers stay."""
    if isinstance(value, float) and not abs(value) < float("inf"):
        return value
    return Fraction(value)


def told(sign: str, one: Any, other: Any) -> bool | None:
    """What a comparison is, as in SQL."""
    return None if one is None or other is None else OPERATORS[sign](known(one), known(other))


def values(where: str, batch: pa.RecordBatch) -> list[bool | None]:
    """A condition on each row, which the statistics of a Parquet shard do not contradict."""
    condition = Condition.of(where, batch.schema)
    found = condition.values(batch).to_pylist()
    if not any(pa.types.is_decimal64(field.type) for field in batch.schema):
        sink = io.BytesIO()
        pq.write_table(pa.table(batch), sink)
        content = sink.getvalue()
        footer = memoryview(content)[-int.from_bytes(content[-8:-4], "little") - 8 :]
        (bounds,) = Parquet().column_bounds("x", footer, [0], condition.fields)
        outcomes = condition.outcomes(bounds)
        assert all(OUTCOMES[one] in outcomes for one in found), (where, bounds)
    return found


@st.composite
def columns(draw: st.DrawFn, count: int) -> dict[str, list[Any]]:
    names = draw(
        st.lists(st.sampled_from(list(TYPES)), min_size=count, max_size=count, unique=True)
    )
    rows = draw(st.integers(1, 4))
    of = {
        name: st.lists(st.none() | TYPES[name][1], min_size=rows, max_size=rows) for name in names
    }
    return {name: draw(each) for name, each in of.items()}


def batch_of(given: dict[str, list[Any]]) -> pa.RecordBatch:
    return pa.record_batch({name: pa.array(each, TYPES[name][0]) for name, each in given.items()})


@settings(max_examples=150)
@given(columns(1), st.sampled_from(CONSTANTS), st.sampled_from(list(OPERATORS)))
@example({"d128": [decimal.Decimal("0.70")]}, "0.7", "==")
@example({"d128": [decimal.Decimal(f"{2**53 + 1}.07")]}, "9007199254740993", ">")
@example({"f64": [2.0**53]}, "9007199254740993", "<")
def test_a_column_is_compared_with_a_constant_as_it_is_written(
    given: dict[str, list[Any]], constant: str, sign: str
) -> None:
    batch = batch_of(given)
    (name,), (column,) = batch.schema.names, batch.to_pydict().values()
    # A number is compared as it is written. A fraction beside floats means the nearest float.
    other: Any = Fraction(constant)
    if name in {"f32", "f64"} and (other.denominator > 1 or "e" in constant):
        other = float(constant)
    assert values(f"{name} {sign} {constant}", batch) == [told(sign, one, other) for one in column]
    is_one = [told("==", one, other) for one in column]
    assert values(f"{name} in ({constant}, 77)", batch) == is_one
    is_other = [None if one is None else not one for one in is_one]
    assert values(f"{name} not in ({constant}, 77)", batch) == is_other


@settings(max_examples=150)
@given(columns(2), st.sampled_from(list(OPERATORS)))
@example({"i32": [2**24 + 1], "f32": [2.0**24]}, ">")
@example({"i64": [2**53 + 1], "f64": [2.0**53]}, "==")
@example({"u64": [2**64 - 1], "f64": [2.0**64]}, "<")
@example({"d128": [decimal.Decimal("0.10")], "f64": [0.1]}, "<")
def test_columns_of_any_two_types_are_compared_exactly(
    given: dict[str, list[Any]], sign: str
) -> None:
    batch = batch_of(given)
    (one, left), (other, right) = batch.to_pydict().items()
    expected = [told(sign, *pair) for pair in zip(left, right, strict=True)]
    assert values(f"{one} {sign} {other}", batch) == expected


@given(
    st.lists(st.tuples(*[st.none() | st.integers(-(2**63), 2**63 - 1)] * 2), min_size=1),
    st.sampled_from(["s", "ms", "us", "ns"]),
    st.sampled_from(list(OPERATORS)),
)
@example([(2**40, 1)], "s", "==")
def test_times_of_any_two_units_are_compared_exactly(
    pairs: list[tuple[int | None, int | None]], unit: str, sign: str
) -> None:
    kinds = {"a": pa.timestamp(unit), "b": pa.timestamp("ns")}
    ticks = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[unit]
    columns = zip(*pairs, strict=True)
    batch = pa.record_batch([pa.array(column, pa.int64()).cast(kind)
                             for column, kind in zip(columns, kinds.values(), strict=True)],
                            names=list(kinds))  # fmt: skip
    found = Condition.of(f"a {sign} b", batch.schema).values(batch).to_pylist()
    assert found == [told(sign, None if a is None else a * ticks, b) for a, b in pairs]


def test_what_is_computed_is_compared_with_constants_beyond_64_bits() -> None:
    batch = pa.record_batch({"i": pa.array([1, 2**53 + 1, None])})
    assert values("i * 1 < 18446744073709551615", batch) == [True, True, None]
    assert values("i * 1 == 9007199254740992.0", batch) == [False, False, None]
    assert values("i / 18446744073709551615 < 1", batch) == [True, True, None]
    with pytest.raises(ConfigError, match="no room in 64 bits"):
        values("i + 9223372036854775808 > 3", batch)
