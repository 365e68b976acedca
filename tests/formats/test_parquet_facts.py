"""Facts are read from Parquet's footers, and refused, as the oracle does."""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs
from oracles import parquet_facts as oracle
from shards import MemoryShard, parquet_bytes

import dataplane
from dataplane.formats import parquet
from dataplane.formats.parquet import Parquet
from dataplane.formats.parquet_footers import FooterFacts, read_footer

BOOL, BYTE, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT, UUID = 1, 3, 6, 7, 8, 9, 10, 11, 12, 13
INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 200)

Value = tuple[int, bytes]
"""A thrift type, and the bytes of a value of it."""


def check(content: bytes) -> FooterFacts | None:
    """The result for a footer, which is that of the oracle; None if both refuse it."""
    results: list[FooterFacts | str] = []
    for read in (read_footer, oracle.read_footer):
        try:
            results.append(read(content))
        except ValueError as fault:
            assert str(fault)  # noqa: PT017
            results.append(str(fault))
    ours, reference = results
    if isinstance(ours, str) or isinstance(reference, str):
        assert type(ours) is type(reference), results
        return None
    for field in structs.fields(FooterFacts):
        own, other = getattr(ours, field.name), getattr(reference, field.name)
        assert np.array_equal(own, other), field.name
        assert np.shape(own) == np.shape(other), field.name
    return ours


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def number(value: int) -> Value:
    return I64, varint(value << 1 if value >= 0 else ~(value << 1))


def text(value: bytes) -> Value:
    return BINARY, varint(len(value)) + value


def listed(values: Sequence[Value], kind: int = LIST, of: int = STRUCT) -> Value:
    """A list of values that are all of the first one's type."""
    values = [value for value in values if value[0] == values[0][0]]
    of = values[0][0] if values else of
    head = bytes([len(values) << 4 | of]) if len(values) < 15 else b""
    head = head or bytes([15 << 4 | of]) + varint(len(values))
    return kind, head + b"".join(bytes([1]) if of == BOOL else content for _, content in values)


def structure(fields: Sequence[tuple[int, Value]]) -> Value:
    out, last = b"", 0
    for field, (kind, content) in fields:
        if 0 < field - last < 16:
            out += bytes([(field - last) << 4 | kind]) + content
        else:
            out += bytes([kind]) + number(field)[1] + content
        last = field
    return STRUCT, out + b"\0"


def mapped(pairs: Sequence[tuple[Value, Value]]) -> Value:
    pairs = [pair for pair in pairs if [v[0] for v in pair] == [v[0] for v in pairs[0]]]
    if not pairs:
        return MAP, b"\0"
    kinds = bytes([pairs[0][0][0] << 4 | pairs[0][1][0]])
    contents = b"".join(bytes([1]) if k == BOOL else v for pair in pairs for k, v in pair)
    return MAP, varint(len(pairs)) + kinds + contents


SINGLE = st.one_of(
    INT64.map(number),
    st.binary(max_size=20).map(text),
    st.just((BOOL, b"")),
    st.binary(min_size=1, max_size=1).map(lambda content: (BYTE, content)),
    st.just((DOUBLE, bytes(8))),
    st.just((UUID, bytes(16))),
)
FIELDS = st.integers(1, 17) | st.integers(-3, 40_000)
ANYTHING = st.recursive(
    SINGLE,
    lambda inner: st.one_of(
        st.builds(listed, st.lists(inner, max_size=20), st.sampled_from([LIST, SET])),
        st.lists(st.tuples(FIELDS, inner), max_size=4).map(structure),
        st.lists(st.tuples(inner, inner), max_size=3).map(mapped),
    ),
    max_leaves=6,
)


def one_with(**fields: st.SearchStrategy[Value]) -> st.SearchStrategy[Value]:
    """A structure with these fields (f1=…). Now and then a field is missing, has another type, or
    is added.
    """

    @st.composite
    def made(draw: st.DrawFn) -> Value:
        found = []
        for name, usual in fields.items():
            luck = draw(st.integers(0, 99))  # the ends of this range come often
            if luck != 33:
                found.append((int(name[1:]), draw(ANYTHING if luck == 66 else usual)))
        if draw(st.integers(0, 9)) == 5:
            found.append((draw(FIELDS), draw(ANYTHING)))
        return structure(found)

    return made()


def many(values: st.SearchStrategy[Value], most: int) -> st.SearchStrategy[Value]:
    return st.lists(values, max_size=most).map(listed)


NUMBER, TEXT = INT64.map(number), st.binary(max_size=30).map(text)
ELEMENT = one_with(f1=NUMBER, f2=NUMBER, f3=NUMBER, f4=TEXT, f5=NUMBER)
METADATA = one_with(
    **dict.fromkeys(("f1", "f5", "f6", "f7", "f9", "f11"), NUMBER),
    f12=one_with(f1=TEXT, f2=TEXT, f3=NUMBER, f5=TEXT, f6=TEXT),
    f16=one_with(f1=NUMBER, f3=many(NUMBER, 20)),
)
COLUMN = one_with(f2=NUMBER, f3=METADATA)
GROUP = one_with(f1=many(COLUMN, 3), f2=NUMBER, f3=NUMBER)
FOOTER = one_with(f1=NUMBER, f2=many(ELEMENT, 4), f3=NUMBER, f4=many(GROUP, 3), f6=TEXT)
MUTATIONS = st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=3)), max_size=3)


def footer_of(content: bytes) -> bytes:
    length = int.from_bytes(content[-8:-4], "little")
    return content[-8 - length : -8]


NO_TEXT = structure(  # a bound of statistics that is a floating-point number
    [
        (2, listed([])),
        (3, number(0)),
        (
            4,
            listed(
                [
                    structure(
                        [
                            (
                                1,
                                listed(
                                    [
                                        structure(
                                            [
                                                (
                                                    3,
                                                    structure(
                                                        [(12, structure([(6, (DOUBLE, bytes(8)))]))]
                                                    ),
                                                )
                                            ]
                                        )
                                    ]
                                ),
                            ),
                            (3, number(0)),
                        ]
                    )
                ]
            ),
        ),
    ]
)


@given(FOOTER, MUTATIONS)
@example(NO_TEXT, [])
def test_any_footer_is_the_same_or_refused_by_both(
    footer: Value, mutations: list[tuple[int, bytes]]
) -> None:
    content = footer[1]
    check(content)
    for place, put in mutations:
        at = place % len(content)
        content = content[:at] + put + content[at + 1 :]
        if not content:
            return
        check(content)


@given(st.binary(max_size=80))
@example(b"")
@example(b"\x1c" * 60)  # structures within structures, too deep
@example(b"\x29\x19" + b"\x19" * 60)  # lists within lists
@example(b"\x1b\x7f\x99" + b"\x01\x99" * 60)  # maps within maps
@example(b"\x29\xfc" + b"\xff" * 9 + b"\x01")  # the largest possible number of structures
@example(b"\x18" + b"\xff" * 9 + b"\x01")  # a text of that many bytes
@example(b"\x16" + b"\xff" * 9 + b"\x03")  # a number of 65 bits
@example(b"\x16" + b"\xff" * 9 + b"\x81")  # and one of more
@example(b"\x06" + b"\xfe" + b"\xff" * 8 + b"\x01" + b"\x02\xf6\x02\xf6\x02\0")  # fields 2**63 on
def test_any_bytes_are_the_same_or_refused_by_both(content: bytes) -> None:
    check(content)


def test_bytes_behind_the_end_are_not_looked_at() -> None:
    footer = footer_of(parquet_bytes(pa.table({"x": [1, 2]})))
    for end in range(len(footer)):
        assert check(footer[:end]) is None
    facts = check(footer + b"\xff")
    assert facts is not None
    assert facts.rows == 2


def test_each_byte_of_a_footer_that_changes_changes_both_readers_alike() -> None:
    table = pa.table(
        {"x": [1, None, 3], "l": [[1], None, []], "s": [{"a": "x"}, None, {"a": None}]}
    )
    content = footer_of(parquet_bytes(table, row_group_size=2))
    refused = 0
    for at in range(len(content)):
        for byte in (0, content[at] ^ 1, content[at] ^ 16):
            refused += check(content[:at] + bytes([byte]) + content[at + 1 :]) is None
    assert refused > 100


def test_footers_of_other_writers_are_the_same(data_dir: Path) -> None:
    paths = sorted((data_dir / "parquet").glob("*.parquet"))
    assert paths
    for path in paths:
        facts = check(footer_of(path.read_bytes()))
        assert facts is not None
        metadata = pq.read_metadata(path)
        assert len(facts.groups) == metadata.num_row_groups
        assert len(facts.columns) == metadata.num_row_groups * metadata.num_columns


def test_the_tables_agree_with_pyarrow() -> None:
    table = pa.table(
        {"x": [1, None, 3] * 10, "t": ["a", "bc", None] * 10, "l": [[1, 2], [], None] * 10}
    )
    content = parquet_bytes(table, row_group_size=7)
    metadata = pq.read_metadata(io.BytesIO(content))
    facts = check(footer_of(content))
    assert facts is not None
    assert facts.rows == 30
    at = 0
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        assert facts.groups[i].tolist() == [group.num_rows, group.num_columns]
        for j in range(group.num_columns):
            numbers, column = facts.columns[at].tolist(), group.column(j)
            at += 1
            assert numbers[1:6] == [
                column.num_values, column.total_uncompressed_size, column.total_compressed_size,
                column.data_page_offset, column.dictionary_page_offset or 0,
            ]  # fmt: skip
            assert numbers[7] == column.statistics.null_count
    assert len(facts.levels) == facts.columns[:, 8].sum()


def test_a_shard_has_the_index_that_follows_from_the_oracle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = pa.table({"x": [1, None] * 20, "l": [[1], None] * 20, "s": [{"a": 1, "b": None}] * 40})
    shard = MemoryShard(parquet_bytes(table, row_group_size=9))
    index = Parquet().index(shard)
    monkeypatch.setattr(parquet, "read_footer", oracle.read_footer)
    assert Parquet().index(shard) == index
    assert len(index.blocks) == 5


def test_no_column_of_a_wide_table_costs_a_call_while_its_footer_is_read() -> None:
    narrow, wide = (_calls(width) for width in (20, 420))
    assert narrow == wide


def _calls(width: int) -> Counter[str]:
    """By function of ours, the calls of and in it while a table of that width is indexed."""
    values = pa.array([1.0, None, 2.0], pa.float32())
    table = pa.Table.from_arrays([values] * width, [f"x{i}" for i in range(width)])
    shard = MemoryShard(parquet_bytes(table, row_group_size=2))
    ours = str(Path(dataplane.__file__).parent)
    counts: Counter[str] = Counter()

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event in {"call", "c_call"} and frame.f_code.co_filename.startswith(ours):
            counts[frame.f_code.co_qualname] += 1

    Parquet().index(shard)  # libraries that are loaded once
    sys.setprofile(seen)
    try:
        Parquet().index(shard)
    finally:
        sys.setprofile(None)
    return counts
