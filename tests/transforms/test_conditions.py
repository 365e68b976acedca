"""Conditions on rows: a plain evaluation in Python leaves the same rows, nulls are SQL's, types are
checked, and statistics exclude no result that a row has.
"""

from __future__ import annotations

import datetime as dt
import decimal
import io
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings

from dataplane.formats.parquet import Parquet
from dataplane.model.errors import ConfigError
from dataplane.model.records import View
from dataplane.transforms.condition import Condition, Outcomes
from dataplane.transforms.row_filter import BlockRows, RowFilter
from dataplane.transforms.where import canonical_where

NAN = float("nan")
DAY = dt.datetime.fromisoformat("2020-01-01")
ROWS = 6
BATCH = pa.record_batch(
    {
        "i": pa.array([1, 2, None, 4, 5, 6], pa.int32()),
        "u": pa.array([0, 1, 2, 3, None, 2**64 - 1], pa.uint64()),
        "f": pa.array([0.5, None, NAN, 1.0, 2.0, -1.0], pa.float32()),
        "s": pa.array(["en", "de", None, "fr", "en", ""]),
        "v": pa.array(["en", "de", None, "fr", "en", ""], pa.string_view()),
        "d": pa.array(["a", "b", "a", None, "c", "a"]).dictionary_encode(),
        "b": pa.array([b"a", b"bb", None, b"", b"a", b"zz"]),
        "t": pa.array([1, 2, None, 86400 * 20000, 5, 6], pa.timestamp("s")),
        "z": pa.array([1, 2, None, 1728 * 10**9, 5, 6], pa.timestamp("ms", "Europe/Berlin")),
        "day": pa.array([0, 1, None, 20000, 3, 4], pa.date32()),
        "clock": pa.array([1, 2, None, 4, 5, 6], pa.time32("s")),
        "ok": pa.array([True, None, False, True, False, True]),
        "l": pa.array([[1], [1, 2], None, [], [3], [4]]),
        "ls": pa.array(
            [
                [{"a": 1, "t": "u"}],
                [{"a": 2, "t": "v"}, {"a": 1, "t": None}],
                [{"a": None, "t": "u"}, {"a": 2, "t": "u"}],
                None,
                [],
                [None],
            ]
        ),
        "ll": pa.array([[[1], [2]], [[]], [None], [[3, 4], [0]], None, []]),
        "ld": pa.array([["a"], ["a", "b"], ["b"], None, [], [None]]).cast(
            pa.large_list(pa.dictionary(pa.int8(), pa.string()))
        ),
        "lb": pa.array(
            [[False], [None], None, [False, False], [None, False], [None, True]],
            pa.list_(pa.bool_()),
        ),
        "st": pa.array([{"a": 1, "b.c": "x"}, None, {"a": None}, {"a": 4}, {"a": 5}, {"a": 6}]),
        "n": pa.array([decimal.Decimal(i) / 2 for i in range(ROWS)], pa.decimal128(9, 2)),
        "we ird": pa.array(range(ROWS)),
    }
)


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("i > 2", [3, 4, 5]),
        ("i > 2.5 and i < 5.5", [3, 4]),
        ("i == 2.5 or i != 2.5 and i < 3e30", [0, 1, 3, 4, 5]),
        ("i in (1, 2.5, 6, 300000000000)", [0, 5]),
        ("i not in (1, 6)", [1, 3, 4]),
        ("u > 9223372036854775808", [5]),
        ("u >= -5", [0, 1, 2, 3, 5]),
        ("u < i", [0, 1, 3]),
        ("f > 0.5", [3, 4]),
        ("not f > 0.5", [0, 2, 5]),
        ("f != 1", [0, 2, 4, 5]),
        ("f in (1, 0.5, -0.0)", [0, 3]),
        ("f is null", [1]),
        ("s == 'en' and v == 'en'", [0, 4]),
        ("s in ('en', '') and v in ('en', '')", [0, 4, 5]),
        ("s not in ('en')", [1, 3, 5]),
        ("s like 'e%' and v like '_n'", [0, 4]),
        ("length(s) == 2 and length(v) == 2", [0, 1, 3, 4]),
        ("length(l) == 1", [0, 4, 5]),
        ("any(x > 1 for x in l)", [1, 4, 5]),
        ("all(x > 1 for x in l)", [3, 4, 5]),
        ("not any(x in (1, 3) for x in l) and len(l) > 0", [5]),
        ("any(l == 3 for l in l) or any(i == 4 for i in l) and i > 5", [4, 5]),
        ("any(x.a > 1 and x.t == 'u' for x in ls)", [2]),
        ("all(x.t is null for x in ls)", [4, 5]),
        ("not all(x.a > 1 for x in ls)", [0, 1]),
        ("any(all(y > 1 for y in x) for x in ll)", [0, 1, 3]),
        ("any(x == 'b' for x in ld) or any(x for x in lb)", [1, 2, 5]),
        ("length(b) >= 1 and b != 'zz'", [0, 1, 4]),
        ("d in ('a', 'c') and d != 'c'", [0, 2, 5]),
        ("t < '1970-01-01 00:00:03' or t > '2024-01-01'", [0, 1, 3]),
        ("t in ('1970-01-01 00:00:02')", [1]),
        ("z > '2024-01-01'", [3]),
        ("z == '1970-01-01T01:00:00.002+01:00'", [1]),
        ("day >= '1970-01-04' and day != '1970-01-05'", [3, 4]),
        ("ok", [0, 3, 5]),
        ("not ok", [2, 4]),
        ("ok == false or ok is null", [1, 2, 4]),
        ("st.a > 3", [3, 4, 5]),
        ("st.`b.c` == 'x' and st.b.c == 'x'", [0]),
        ("st is null", [1]),
        ("st.a is null", [1, 2]),
        ("n >= 1.5", [3, 4, 5]),
        ("`we ird` > 3", [4, 5]),
        ("i % 2 == 0 and i / 4 >= 1", [3, 5]),
        ("-i < -4", [4, 5]),
        ("i % 0 == 0", []),
        ("i * 2 - 1 > f", [0, 3, 4, 5]),
        ("i > 2 and f > 0 or 1 == i", [0, 3, 4]),
        ("not (i > 2 and s == 'en')", [0, 1, 3, 5]),
        ("3 < i", [3, 4, 5]),
        ("i is not null and true", [0, 1, 3, 4, 5]),
    ],
)
def test_a_condition_leaves_the_rows_where_it_is_true(where: str, rows: list[int]) -> None:
    found = RowFilter.of(View(where=where), BATCH.schema)
    assert found is not None
    left = found.left(BATCH.select(found.columns), BlockRows(ROWS))
    assert np.flatnonzero(found.mask(BATCH, BlockRows(ROWS))).tolist() == rows
    every = BATCH.select(found.columns).to_pylist()
    assert repr(left.to_pylist()) == repr([every[row] for row in rows])  # NaN equals nothing


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("lang == 'en'", "no column 'lang'.*The dataset has: i, u.*in quotes"),
        ("wird > 1", "no column 'wird'; did you mean 'we ird'"),
        ("i.x > 1", "no column 'i.x'"),
        ("any(x > 1 for x in i)", r"i \(int32\): any\(\) is for lists"),
        ("any(x > i for x in l)", "no column 'i'.* The dataset has: x"),
        ("all(x > 'a' for x in l)", r"x \(int64\): it is compared with 'a'"),
        ("l == 1", "any\\(\\), all\\(\\) and length"),
        ("s > 1", r"s \(string\): it is compared with 1: write it in quotes"),
        ("s", r"s \(string\): a condition must be true or false"),
        ("i == 'x'", r"i \(int32\).*compare it with a number"),
        ("i in ('x')", r"i \(int32\)"),
        ("l == 1", "is null.*length"),
        ("st > 1", "is null"),
        ("t > 5", "ISO 8601"),
        ("t > 'abc'", "'abc' is not a time in its range"),
        ("day < t", r"day \(date32"),
        ("ok > 1", "true or false"),
        ("clock > '12:00:00'", "clock .time32.*is null"),
        ("i + s > 1", "'\\+' is for numbers"),
        ("length(i) > 1", r"length\(\) is for"),
        ("i like 'x'", "'like' is for texts"),
        ("(i > 1) + 1 > 2", "is true or false, but is used as a value"),
        ("1 == 1", "uses no column"),
    ],
)
def test_what_types_do_not_allow_is_told(where: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Condition.of(where, BATCH.schema)


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_columns_with_a_time_zone_have_all_years_of_their_unit(unit: str) -> None:
    kind = pa.timestamp(unit, "Europe/Berlin")
    batch = pa.record_batch({"z": pa.array([0, 253_402_300_800], pa.timestamp("s")).cast(kind)})
    for where, expected in (
        ("z < '9999-12-31'", [True, False]),
        ("z >= '0001-01-01T00:00:00Z'", [True, True]),
        ("z in ('9999-12-31', '1970-01-01T01:00:00.000+01:00')", [True, False]),
    ):
        assert Condition.of(where, batch.schema).values(batch).to_pylist() == expected
    with pytest.raises(ConfigError, match="'9999' is not a time in its range"):
        Condition.of("z < '9999'", batch.schema)


def test_statistics_say_nothing_of_constants_with_nanoseconds() -> None:
    column = pa.array([0, 1000, None], pa.timestamp("ns"))
    sink = io.BytesIO()
    pq.write_table(pa.table({"t": column}), sink)
    content = sink.getvalue()
    footer = memoryview(content)[-int.from_bytes(content[-8:-4], "little") - 8 :]
    (bounds,) = Parquet().column_bounds("x", footer, [0], ["t"])
    for where in ("t < '1970-01-01 00:00:00.000000001'", "t in ('1970-01-01 00:00:00.000000001')"):
        found = Condition.of(where, pa.schema({"t": column.type})).outcomes(bounds)
        assert {Outcomes.TRUE, Outcomes.FALSE} <= set(found)


@pytest.mark.parametrize(
    ("pattern", "rows"),
    [
        ("C:\\temp\\\\%", [0, 1]),
        ("%\\x", [0]),
        ("_:\\temp\\%", [2]),
        ("100\\%", [3]),
        ("100\\%_", [4]),
        ("a\\_b\\\\", [5]),
        ("a_b\\", [5, 6]),
        ("%\n\\", [7]),
    ],
)
def test_a_backslash_takes_the_next_sign_of_a_pattern_as_it_is(
    pattern: str, rows: list[int]
) -> None:
    texts = ["C:\\temp\\x", "C:\\temp\\", "C:\\temp%", "100%", "100%\n", "a_b\\", "axb\\", "a\n\\"]
    batch = pa.record_batch({"s": pa.array([*texts, None])})
    found = RowFilter.of(View(where=f"s like '{pattern}'"), batch.schema)
    assert found is not None
    assert np.flatnonzero(found.mask(batch, BlockRows(len(batch)))).tolist() == rows


def test_a_result_without_room_is_told() -> None:
    test = Condition.of("i * 9223372036854775807 > 2", BATCH.schema)
    with pytest.raises(ConfigError, match="does not fit into 64 bits"):
        test.values(BATCH)


def _quoted(value: Any) -> str:
    return f"'{value}'"


DECIMALS = [decimal.Decimal(text) for text in ("-0.50", "0.10", "2.00", "90071992547409.93")]
KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any], Callable[[Any], str]]] = {
    "i": (pa.int16(), st.integers(-3, 3), str),
    "u": (pa.uint64(), st.sampled_from([0, 2, 2**53 + 1, 2**64 - 1]), str),
    "f": (pa.float64(), st.sampled_from([-0.0, 0.0, 1.5, 2.0, 2.0**53, NAN]), repr),
    "n": (pa.decimal128(20, 2), st.sampled_from(DECIMALS), str),
    "s": (pa.string(), st.sampled_from(["", "a", "b", "bb", "é"]), _quoted),
    "o": (pa.bool_(), st.booleans(), lambda value: str(value).lower()),
    "d": (pa.date32(), st.dates(dt.date(2020, 1, 1), dt.date(2020, 1, 4)), _quoted),
    "t": (pa.timestamp("us"), st.integers(0, 3).map(lambda us: DAY.replace(microsecond=us)), _quoted),
    "z": (pa.timestamp("us", "Europe/Berlin"),
          st.integers(0, 3).map(lambda us: DAY.replace(microsecond=us, tzinfo=dt.UTC)), _quoted),
    "l": (pa.list_(pa.int8()), st.lists(st.none() | st.integers(0, 2), max_size=3), str),
}  # fmt: skip
NUMBERS, TEXTS, SCALARS = ["i", "u", "f", "n", "m.i"], ["s", "m.s"], [*KINDS][:-1]
RELATIONS = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le,
             ">": operator.gt, ">=": operator.ge}  # fmt: skip
PATTERNS = {"%b": lambda text: text.endswith("b"), "_": lambda text: len(text) == 1}
Row = dict[str, Any]
Oracle = Callable[[Row], Any]


def _column(name: str) -> Oracle:
    """The value of a column, or of a field of the struct `m`, as Python compares it exactly."""

    def value(row: Row) -> Any:
        inner, own = (row["m"] or {}) if name.startswith("m.") else row, name.removeprefix("m.")
        known = inner.get(own)
        return known if not isinstance(known, float) or known != known else Fraction(known)

    return value


def _of(function: Callable[..., Any], *operands: Oracle) -> Oracle:
    """A function of values, null if one of them is."""

    def value(row: Row) -> Any:
        values = [operand(row) for operand in operands]
        return None if any(each is None for each in values) else function(*values)

    return value


def _joined(word: str, left: Oracle, right: Oracle) -> Oracle:
    def value(row: Row) -> bool | None:
        both, decides = (left(row), right(row)), word == "or"
        return decides if decides in both else None if None in both else not decides

    return value


def _over(word: str, results: list[bool | None]) -> bool | None:
    decides = word == "any"
    return decides if decides in results else None if None in results else not decides


@st.composite
def _conditions(draw: st.DrawFn, depth: int = 3) -> tuple[str, Oracle]:
    kind = draw(st.sampled_from(["test"] * 2 + ["and", "or", "not"] if depth else ["test"]))
    if kind == "not":
        text, of = draw(_conditions(depth - 1))
        return f"not ({text})", _of(operator.not_, of)
    if kind != "test":
        (text, left), (other, right) = (draw(_conditions(depth - 1)) for _ in range(2))
        return f"({text}) {kind} ({other})", _joined(kind, left, right)
    test = draw(
        st.sampled_from(
            ["null", "constant", "in", "like", "columns", "length", "sum", "any", "all"]
        )
    )
    name = draw(st.sampled_from([*KINDS, "m", *NUMBERS, *TEXTS]))
    sign = draw(st.sampled_from([*RELATIONS]))
    relation = RELATIONS[sign]
    if test == "null":
        of = _column(name)
        return f"{name} is null", lambda row: of(row) is None
    if test in {"constant", "in"}:
        name = draw(st.sampled_from([*SCALARS, "m.i", "m.s"]))
        _, values, text_of = KINDS[name.removeprefix("m.")]
        given = draw(st.lists(values.filter(lambda value: value == value), min_size=1, max_size=3))
        if test == "constant":
            return f"{name} {sign} {text_of(given[0])}", _of(
                lambda v: relation(v, given[0]), _column(name)
            )
        return f"{name} in ({', '.join(map(text_of, given))})", _of(
            given.__contains__, _column(name)
        )
    if test == "like":
        name, pattern = draw(st.sampled_from(TEXTS)), draw(st.sampled_from([*PATTERNS]))
        return f"{name} like '{pattern}'", _of(PATTERNS[pattern], _column(name))
    if test in {"any", "all"}:
        return f"{test}(i {sign} 1 for i in l)", _of(
            lambda values: _over(test, [None if v is None else relation(v, 1) for v in values]),
            _column("l"),
        )
    if test == "length":
        name = draw(st.sampled_from([*TEXTS, "l"]))
        return f"length({name}) {sign} 1", _of(lambda value: relation(len(value), 1), _column(name))
    name, other = (draw(st.sampled_from(NUMBERS)) for _ in range(2))
    if test == "columns":
        return f"{name} {sign} {other}", _of(relation, _column(name), _column(other))
    name = draw(st.sampled_from(["i", "m.i"]))
    by = draw(st.integers(1, 3))
    computed = _of(lambda value: value * 2 + value % by, _column(name))
    return f"{name} * 2 + {name} % {by} {sign} {other}", _of(relation, computed, _column(other))


@st.composite
def _tables(draw: st.DrawFn) -> pa.Table:
    rows = draw(st.integers(1, 6))

    def column(values: st.SearchStrategy[Any], kind: pa.DataType) -> pa.Array:
        return pa.array(draw(st.lists(st.none() | values, min_size=rows, max_size=rows)), kind)

    inner = {name: KINDS[name][:2] for name in ("i", "s")}
    structs = st.fixed_dictionaries({name: st.none() | of for name, (_, of) in inner.items()})
    columns = {name: column(values, kind) for name, (kind, values, _) in KINDS.items()}
    return pa.table(
        {**columns, "m": column(structs, pa.struct({n: k for n, (k, _) in inner.items()}))}
    )


@given(_tables(), _conditions())
def test_rows_are_those_of_a_plain_evaluation_and_statistics_agree(
    table: pa.Table, case: tuple[str, Oracle]
) -> None:
    (where, oracle), batch = case, table.to_batches()[0]
    condition = Condition.of(canonical_where(where), table.schema)
    rows, values = batch.to_pylist(), condition.values(batch).to_pylist()
    assert values == [oracle(row) for row in rows]
    for statistics in ({}, {"write_statistics": False}, {"write_statistics": ["i", "s", "m.i"]}):
        sink = io.BytesIO()
        pq.write_table(table, sink, **statistics)
        content = sink.getvalue()
        preamble = memoryview(content)[-int.from_bytes(content[-8:-4], "little") - 8 :]
        (bounds,) = Parquet().column_bounds("x", preamble, [0], condition.fields)
        outcomes = condition.outcomes(bounds)
        names = {True: Outcomes.TRUE, False: Outcomes.FALSE, None: Outcomes.NULL}
        assert all(names[value] in outcomes for value in values), (values, outcomes, bounds)
    for result, outcome in ((True, Outcomes.TRUE), (False, Outcomes.FALSE)):
        for name in condition.known(outcome):
            of = _column(name)
            assert not any(value is result and of(row) is None
                           for row, value in zip(rows, values, strict=True))  # fmt: skip


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("i > 6", 0),
        ("i == 7 or s > 'z'", 0),
        ("i <= 6 and i is not null", None),
        ("day is null", None),
        ("whole >= 0", ROWS),
        ("whole < 0", 0),
        ("whole in (7, 8)", 0),
        ("whole is null", 0),
        ("nothing > 1 or nothing < 1", 0),
        ("not whole < 0", ROWS),
        ("x < 100", None),  # NaN lies within no bounds
        ("x > 100", 0),
        ("s == 'en'", None),
        ("l is null", None),
    ],
)
def test_statistics_decide_what_they_can(where: str, count: int | None) -> None:
    more = {"whole": range(ROWS), "nothing": pa.nulls(ROWS, pa.int8()), "x": [1.0] * ROWS}
    table = pa.table({**{name: BATCH[name] for name in ("i", "s", "day", "l")}, **more})
    sink = io.BytesIO()
    pq.write_table(table, sink)
    content = sink.getvalue()
    length = int.from_bytes(content[-8:-4], "little") + 8
    rows = RowFilter.of(View(where=where), table.schema)
    assert rows is not None
    assert rows.condition is not None
    bounds = Parquet().column_bounds("x", memoryview(content)[-length:], [0], rows.condition.fields)
    assert rows.count_known(bounds[0], BlockRows(ROWS)) == count


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
    """Compare as SQL does."""
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


@settings(max_examples=80)
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


@settings(max_examples=80)
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
    with pytest.raises(ConfigError, match="does not fit into 64 bits"):
        values("i + 9223372036854775808 > 3", batch)
