"""JSON lines: blank lines, long lines, types that change, and lines that are broken."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from shards import MemoryShard, json_lines, read_rows, zipped

from dataplane.formats import jsonl, source
from dataplane.formats.jsonl import JsonLines
from dataplane.formats.nulls import node_count
from dataplane.model.errors import CorruptShard, SchemaMismatch

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
        blocks = list(jsonl._blocks(source.Window(MemoryShard(content)), lambda *_: None))
    assert sum(block.rows for block in blocks) == len(rows)
    assert blocks[0].place.offset == 0
    ends = [block.place.offset + block.place.length for block in blocks]
    assert ends[:-1] == [block.place.offset for block in blocks[1:]]
    values = read_rows(JSONL, zipped(content) if compressed else content)
    assert [row["id"] for row in values] == [row["id"] for row in rows]
    assert [row["text"] for row in values] == [row["text"] for row in rows]
    assert [row["struct"] for row in values] == [row["struct"] for row in rows]


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


LATE = [
    (b'{"score": 1, "more": 1}', {"more": 1}),
    (b'{"score":1,"text":"y","more" : [true]}', {"more": [True]}),
    (b'{"more": {"a": "\\": b", "caf\\u00e9": 2.5}}', {"more": {"a": '": b', "café": 2.5}}),
    ('{"größe": ":"}'.encode(), {"größe": ":"}),
    (b'{"empty": [3], "none": {"a": 1}}', {"empty": [3], "none": {"a": 1}}),
    (b'{"inner": {"a": 1, "late": "x"}}', {"inner": {"a": 1, "late": "x"}}),
]


@pytest.mark.parametrize(("line", "values"), LATE)
@pytest.mark.parametrize("compressed", [True, False])
def test_fields_and_values_that_first_occur_late_are_read(
    monkeypatch: pytest.MonkeyPatch, line: bytes, values: dict, compressed: bool
) -> None:
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 200)
    first = b'{"score": 1, "empty": [], "none": null, "inner": {"a": 0}, "text": "x"}\n'
    content = first * 20 + line + b'\n{"text": "z"}'
    content = zipped(content) if compressed else content
    index = JSONL.index(MemoryShard(content))
    rows = read_rows(JSONL, content, schema=index.schema)
    assert {name: rows[-2][name] for name in values} == values
    assert rows[-1] == dict.fromkeys(index.schema.names) | {"text": "z"}
    assert len(index.nulls) == node_count(index.schema)


KEYS = ("a", "b", "text", "a long name", "another name", "größe", 'q"', "back\\slash", "", "c:d")
TRICKY = st.sampled_from(['":', ' "x": 1', '\\":', ":", "[", '"a"', "é"]) | st.text(max_size=4)
VALUES = st.none() | TRICKY | st.lists(st.none() | TRICKY, max_size=2)


@hypothesis_settings(max_examples=60)
@given(data=st.data(), piece=st.integers(1, 80), is_ascii=st.booleans(), is_tight=st.booleans())
def test_all_fields_of_a_shard_are_columns_wherever_they_occur(
    data: st.DataObject, piece: int, is_ascii: bool, is_tight: bool
) -> None:
    texts = st.none() | TRICKY
    kinds = {key: data.draw(st.sampled_from([texts, st.none() | st.lists(texts)])) for key in KEYS}
    rows = data.draw(
        st.lists(st.fixed_dictionaries({"id": st.just("x")}, optional=kinds), max_size=9)
    )
    separators = (",", ":") if is_tight else (", ", ": ")
    lines = [json.dumps(row, ensure_ascii=is_ascii, separators=separators) for row in rows]
    content = "\n".join(lines).encode()
    if not content:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "BLOCK_BYTES", piece)
        values = read_rows(JSONL, content)
    names = {name for row in rows for name in row}
    assert values == [dict.fromkeys(names) | row for row in rows]


def test_blocks_without_new_fields_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    read = jsonl._read
    monkeypatch.setattr(jsonl, "_read", lambda *of: parsed.append(len(of[0])) or read(*of))
    text = r'"text": ":) \"x\": 1 \\", "tags": [":", "[\":"]'
    line = f'{{"id": 1, "none": null, "no": [], {text}}}\n'.encode()
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 1000)
    index = JSONL.index(MemoryShard(line * 100))
    assert len(index.blocks) > 3
    assert len(parsed) == 1


def test_a_field_that_the_schema_lacks_is_an_error_that_names_it() -> None:
    content = long_rows(b'{"score": 1, "text": "y", "more": [{"a": {"late": 1}}]}\n')
    schema = JSONL.index(MemoryShard(long_rows(b'{"more": [{"a": {"b": 1}}]}\n'))).schema
    with pytest.raises(SchemaMismatch, match=r"field 'more\.a\.late' is not in it") as caught:
        read_rows(JSONL, content, schema=schema)
    assert caught.value.field == "more.a.late"
    assert caught.value.offset == content.index(b'{"score": 1, "text": "y"')


def test_a_field_that_first_occurs_beside_a_very_long_line_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 200)
    monkeypatch.setattr(jsonl, "_SURVEYED_BYTES_MAX", 1000)
    content = long_rows(b"")[:10_000].rpartition(b"\n")[0] + b"\n"
    assert read_rows(JSONL, content[:900] + b'"}\n{"late": 1}\n')[-1]["late"] == 1
    long_line = json.dumps({"late": "x" * 2000}).encode()
    for more in (b"", b"\n" + content):
        with pytest.raises(SchemaMismatch, match="field 'late' is not in it"):
            read_rows(JSONL, content + long_line + more)


def test_a_broken_line_beside_a_new_field_is_refused_when_it_is_read() -> None:
    content = long_rows(b'{"late": 1}\n{"score": 1,\n')
    assert JSONL.index(MemoryShard(content)).schema.names == ["score", "text"]
    with pytest.raises(CorruptShard, match="broken JSON"):
        read_rows(JSONL, content)


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
