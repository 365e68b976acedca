"""JSON lines: blank lines, long lines, types that change, and lines that are broken."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from shards import MemoryShard, json_lines, read_rows, zipped

from dataplane.errors import CorruptShard, SchemaMismatch
from dataplane.formats import jsonl, source
from dataplane.formats.jsonl import JsonLines

JSONL = JsonLines()
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.integers(-(2**63), 2**63 - 1),
            "text": st.none() | st.text(max_size=9),
            "lists": st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3),
            "struct": st.fixed_dictionaries({"a": st.booleans(), "b": st.text(max_size=3)}),
        }
    ),
    min_size=1,
    max_size=15,
)
BLANKS = st.lists(
    st.sampled_from([b"", b"\n", b"  \n", b"\r\n", b"\t \n"]), min_size=16, max_size=16
)


@hypothesis_settings(max_examples=60)
@given(rows=ROWS, blanks=BLANKS, piece=st.integers(1, 200), compressed=st.booleans())
def test_rows_come_back_around_blank_lines_and_any_piece_size(
    rows: list[dict], blanks: list[bytes], piece: int, compressed: bool
) -> None:
    lines = [blank + json_lines([row]) for row, blank in zip(rows, blanks, strict=False)]
    content = b"".join(lines) + blanks[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "BLOCK_BYTES", piece)
        blocks = list(jsonl._blocks(source.Window(MemoryShard(content))))
    assert sum(block.rows for block in blocks) == len(rows)
    assert blocks[0].place.offset == 0
    ends = [block.place.offset + block.place.length for block in blocks]
    assert ends[:-1] == [block.place.offset for block in blocks[1:]]
    found = read_rows(JSONL, zipped(content) if compressed else content)
    assert [row["id"] for row in found] == [row["id"] for row in rows]
    assert [row["text"] for row in found] == [row["text"] for row in rows]
    assert [row["struct"] for row in found] == [row["struct"] for row in rows]


def test_a_last_line_without_a_newline_and_a_byte_order_mark_are_fine() -> None:
    assert read_rows(JSONL, b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}') == [{"a": 1}, {"a": 2}]


def test_dates_stay_text_and_missing_fields_are_null() -> None:
    content = b'{"day": "2024-01-31", "x": [{"t": "2024-01-31T00:00:00"}]}\n{}\n'
    assert read_rows(JSONL, content) == [
        {"day": "2024-01-31", "x": [{"t": "2024-01-31T00:00:00"}]},
        {"day": None, "x": None},
    ]


def long_rows(last: bytes) -> bytes:
    line = b'{"score": 1, "text": "' + b"x" * 1000 + b'"}\n'
    return line * 5000 + last


def test_a_fraction_after_a_block_of_integers_is_an_error_that_says_so() -> None:
    content = long_rows(b'{"score": 0.5, "text": "y"}\n')
    with pytest.raises(SchemaMismatch, match="does not fit the dataset's schema") as caught:
        read_rows(JSONL, content)
    assert caught.value.offset == content.index(b'{"score": 0.5')
    assert "int64" in str(caught.value)


def test_integers_and_fractions_in_the_first_block_are_double() -> None:
    assert read_rows(JSONL, b'{"x": 1}\n{"x": 0.5}\n') == [{"x": 1.0}, {"x": 0.5}]


def test_a_field_that_the_schema_lacks_is_an_error() -> None:
    with pytest.raises(SchemaMismatch, match="unexpected"):
        read_rows(JSONL, long_rows(b'{"score": 1, "text": "y", "more": 1}\n'))


def test_a_broken_line_in_a_later_block_has_its_offset() -> None:
    content = long_rows(b'{"score": 1, "text": "y"\n{"score": 2, "text": "z"}\n')
    with pytest.raises(CorruptShard, match="broken JSON") as caught:
        read_rows(JSONL, content)
    assert caught.value.offset == content.index(b'"y"\n') - len(b'{"score": 1, "text": ')


@pytest.mark.parametrize(
    "line", [b"[1]", b"1", b'"x"', b'{"a": 1} {"a": 2}', b'{"a": "\xff"}', b"{"]
)
def test_a_line_that_is_no_object_is_refused(line: bytes) -> None:
    with pytest.raises(CorruptShard, match="line 2"):
        read_rows(JSONL, b'{"a": 1}\n' + line + b"\n")


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(CorruptShard):
        read_rows(JSONL, b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")


def test_only_blank_lines_are_no_samples() -> None:
    index = JSONL.index(MemoryShard(b"\n \n\r\n"))
    assert index.blocks == ()
    assert index.schema.names == []


def test_blocks_are_about_four_mebibytes() -> None:
    content = long_rows(b"") * 3
    index = JSONL.index(MemoryShard(content))
    assert len(index.blocks) == -(-len(content) // (4 << 20))
    assert isinstance(index.schema, pa.Schema)
