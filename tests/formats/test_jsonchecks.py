"""JSON lines: every number is exact, or its line is refused; none changes silently."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from shards import MemoryShard, decoded, json_lines, read_rows, zipped

from dataplane.formats.joint_types import contradicts
from dataplane.formats.jsonl import JsonLines
from dataplane.model.errors import CorruptShard, SchemaMismatch

JSONL = JsonLines()
INT64_MAX, UINT64_MAX = 2**63 - 1, 2**64 - 1
EDGES = [
    0,
    1,
    2**53 - 1,
    2**53,
    2**53 + 1,
    INT64_MAX,
    2**63,
    UINT64_MAX,
    2**64,
    -(2**63),
    -(2**63) - 1,
]
EDGES += [10**30, 10**400, -(2**53) - 1, 2**1023, 2**1024]
FRACTIONS = st.floats(allow_nan=False, allow_infinity=False)
NUMBERS = st.none() | st.sampled_from(EDGES) | st.integers(-(2**70), 2**70) | FRACTIONS


def types_of(content: bytes) -> list[pa.DataType]:
    return JSONL.index(MemoryShard(content)).schema.types


def written(value: object) -> object:
    """Numbers of one type, so that an integer in a column of doubles compares equal."""
    if isinstance(value, dict):
        return {name: written(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [written(inner) for inner in value]
    return None if value is None else (int(value) if value == int(value) else value)


@hypothesis_settings(max_examples=300)
@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "a": NUMBERS,
                "l": st.lists(NUMBERS, max_size=2),
                "s": st.fixed_dictionaries({"x": NUMBERS}),
            }
        ),
        min_size=1,
        max_size=3,
    ),
    compressed=st.booleans(),
)
def test_every_number_is_exact_or_its_line_is_refused(rows: list[dict], compressed: bool) -> None:
    content = json_lines(rows)
    try:
        values = read_rows(JSONL, zipped(content) if compressed else content)
    except SchemaMismatch as error:
        refused = error
    else:
        assert written(values) == written(rows)
        return
    assert f"byte {refused.offset}, {refused.line}" in str(refused)
    assert refused.shard == "memory://test/shard"


def test_integers_beyond_int64_are_uint64_wherever_they_stand() -> None:
    row = {"a": 9007199254740993, "b": 2**63, "l": [UINT64_MAX], "s": {"x": [{"y": 2**63 + 1}]}}
    other = {"a": 1, "b": 9007199254740993, "l": [], "s": {"x": None}}
    content = json_lines([row, other])
    assert types_of(content)[:3] == [pa.int64(), pa.uint64(), pa.list_(pa.uint64())]
    assert read_rows(JSONL, content) == [row, other]


@pytest.mark.parametrize(
    "lines",
    [
        [{"a": 2**64 + 1}],
        [{"a": 2**63 + 1}, {"a": -1}],
        [{"a": 9007199254740993}, {"a": 0.5}],
        [{"a": [0.5, {"x": 1}["x"], 2**53 + 1]}],
        [{"s": {"x": 0.5}}, {"s": {"x": 10**22 + 1}}],
        [{"a": 10**30 + 1, "b": 2**63}],
    ],
)
def test_integers_that_fit_no_column_are_refused_with_their_line(lines: list[dict]) -> None:
    content = json_lines([{"n": 1}, *lines])
    with pytest.raises(
        SchemaMismatch, match=r"byte \d+, line \d+: .* write such numbers as text"
    ) as caught:
        read_rows(JSONL, content)
    assert caught.value.shard == "memory://test/shard"
    assert content[caught.value.offset :].startswith(b"{")
    assert caught.value.field in {"a", "s"}


def test_doubles_may_be_written_without_a_fraction() -> None:
    content = b'{"a": 100000000000000000000}\n{"a": -1}\n{"a": 18446744073709551616}\n'
    assert read_rows(JSONL, content) == [{"a": 1e20}, {"a": -1.0}, {"a": 2.0**64}]


def test_an_integer_of_a_million_digits_is_refused_and_not_repeated_in_full() -> None:
    content = b'{"a": 1}\n{"a": ' + b"7" * 1_000_000 + b"}\n"
    with pytest.raises(SchemaMismatch, match=r"1000000 characters") as caught:
        read_rows(JSONL, content)
    assert caught.value.offset == 9
    assert len(str(caught.value)) < 500


def test_an_integer_that_is_no_double_is_refused_in_a_later_block_too() -> None:
    start = json_lines([{"a": 0.5, "b": 1, "text": "x" * 1000}] * 5000)
    fits = json_lines([{"a": 2**60, "b": 2**60 + 1, "text": ""}])
    assert read_rows(JSONL, start + fits)[-1] == {"a": float(2**60), "b": 2**60 + 1, "text": ""}
    with pytest.raises(SchemaMismatch, match="the number 1152921504606846977 of 'a'") as caught:
        read_rows(JSONL, start + fits + json_lines([{"a": 2**60 + 1, "b": 1, "text": ""}]))
    assert caught.value.offset == len(start + fits)
    with pytest.raises(SchemaMismatch, match=r"does not fit .*9223372036854775808"):
        read_rows(JSONL, start + json_lines([{"a": 0.5, "b": 2**63, "text": ""}]))


@pytest.mark.parametrize("text", [b"1.7976931348623159e308", b"1e309", b"-1e400", b"9" * 400])
def test_a_number_beyond_all_doubles_is_refused_and_not_infinite(text: bytes) -> None:
    with pytest.raises((SchemaMismatch, CorruptShard), match="line 2"):
        read_rows(JSONL, b'{"a": 0.5}\n{"a": ' + text + b"}\n{}")


@given(
    st.lists(
        FRACTIONS
        | st.decimals(
            allow_nan=False, allow_infinity=False, min_value=-(10**20), max_value=10**20
        ).map(str),
        min_size=1,
    )
)
def test_fractions_become_the_nearest_double(numbers: list[float | str]) -> None:
    texts = [
        repr(n) if isinstance(n, float) else f"{n}.0" if n.lstrip("-").isdigit() else n
        for n in numbers
    ]
    texts = [text for text in texts if text.lstrip("-")[0].isdigit()]
    content = b"".join(b'{"a": ' + text.encode() + b"}\n" for text in texts)
    if content:
        assert [row["a"] for row in read_rows(JSONL, content)] == [float(text) for text in texts]


def test_minus_zero_is_zero_among_integers_and_keeps_its_sign_among_fractions() -> None:
    assert repr(read_rows(JSONL, b'{"a": -0}')) == "[{'a': 0}]"
    assert repr(read_rows(JSONL, b'{"a": -0.0}\n{"a": 1e-400}')) == "[{'a': -0.0}, {'a': 0.0}]"


def test_numbers_in_quotes_stay_text() -> None:
    rows = [{"a": "1"}, {"a": "9007199254740993"}, {"a": "1e400"}]
    assert read_rows(JSONL, json_lines(rows)) == rows
    with pytest.raises(SchemaMismatch, match="from number to string"):
        read_rows(JSONL, b'{"a": 1}\n{"a": "1"}\n')


def test_nan_and_infinity_are_numbers() -> None:
    [batch] = decoded(JSONL, b'{"a": NaN}\n{"a": Infinity}\n{"a": -Infinity}\n')
    assert str(batch.column("a").to_pylist()) == "[nan, inf, -inf]"


@pytest.mark.parametrize(
    "line",
    [
        b'{"a": 1, "a": 2}',
        b'{"a": 1, "\\u0061": 2}',
        b'{"l": [{"b": 1, "b": 1}]}',
        b'{"t": "\\ud800"}',
        b'{"t": "\\udc00\\ud800"}',
        b'{"t": "\xed\xa0\x80"}',
        b'{"t": "\xff"}',
        b'{"a": 01}',
        b'{"a": +1}',
    ],
)
def test_what_readers_disagree_about_is_broken_json_and_not_guessed(line: bytes) -> None:
    first = b'{"a": 1, "l": [{"b": 1}], "t": "x"}\n'
    for content in (first + line + b"\n", first + line):
        with pytest.raises(CorruptShard, match=r"line 1 from byte 36|line 2") as caught:
            read_rows(JSONL, content)
        assert not isinstance(caught.value, SchemaMismatch)
        assert caught.value.offset == len(first)


def test_lists_of_nothing_but_nulls_are_read_and_may_have_values_later() -> None:
    rows = [
        {"l": [None, None], "d": [[None], []], "s": [{"x": None, "y": 1}, None]},
        {"l": [], "d": None, "s": []},
        {"l": None, "d": [None, [None, None]], "s": [{"x": None, "y": None}]},
    ]
    assert read_rows(JSONL, json_lines(rows)) == rows
    before = [{"l": [None], "text": "x" * 1000}] * 5000
    for value in ([True], [None, 1], ["x"]):
        rows = [*before, {"l": value, "text": None}]
        assert read_rows(JSONL, json_lines(rows)) == rows
    lists_of_nulls = JSONL.index(MemoryShard(json_lines(before[:1]))).schema
    with pytest.raises(SchemaMismatch, match="does not fit"):
        read_rows(JSONL, json_lines([{"l": [1], "text": ""}]), schema=lists_of_nulls)


def test_surrogate_pairs_and_escapes_are_the_characters_that_they_mean() -> None:
    text = "\U0001f600 \u0000 \u2028 / é"
    assert read_rows(JSONL, json.dumps({"t": text}).encode()) == [{"t": text}]


def test_a_shard_without_large_integers_fits_a_column_that_has_them() -> None:
    assert not contradicts(pa.uint64(), pa.int64(), closed=True)
    assert contradicts(pa.int64(), pa.uint64(), closed=True)
    assert contradicts(pa.uint64(), pa.float64(), closed=True)
    assert not contradicts(pa.float64(), pa.uint64(), closed=True)
    schema = JSONL.index(MemoryShard(b'{"a": 18446744073709551615}\n')).schema
    assert read_rows(JSONL, b'{"a": 7}\n', schema=schema) == [{"a": 7}]
    with pytest.raises(SchemaMismatch, match="-7"):
        read_rows(JSONL, b'{"a": -7}\n', schema=schema)
