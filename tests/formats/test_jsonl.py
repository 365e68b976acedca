"""JSON lines: blank lines, long lines, types that change, and lines that are broken."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from shards import MemoryShard, decoded, json_lines, parquet_bytes, raw_block, read_rows, zipped

from dataplane.formats import jsonl, registry, source
from dataplane.formats.joint_types import contradicts
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


@hypothesis_settings(max_examples=80)
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


DAMAGE = {
    "arrow-truncated.arrow": r"truncated, its footer is missing",
    "parquet-truncated.parquet": r"truncated, its footer is missing",
    "empty.parquet": r"the shard is empty.*0 bytes",
    "empty.tar": r"the shard is empty.*0 bytes",
    "empty.tfrecord": r"the shard is empty.*0 bytes",
    "error-page.parquet": r"not a Parquet file.*AccessDenied",
    "tar-header-damaged.tar": r"byte 0: the checksum of a tar header is wrong",
    "tar-truncated.tar": r"byte 170496: the tar archive is truncated",
    "tfrecord-bitflip-length.tfrecord": r"byte 0: .*its first length is damaged",
    "tfrecord-bitflip-payload.tfrecord": r"byte 4870: the payload .* is damaged \(checksum\)",
    "tfrecord-truncated.tfrecord": r"byte 91810: record 667 is truncated",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(data_dir: Path, name: str) -> None:
    url = f"s3://bucket/{name}"
    format_ = registry.format_of_url(url)
    assert format_ is not None
    with pytest.raises(CorruptShard, match=DAMAGE[name]) as caught:
        decoded(format_, (data_dir / "bad" / name).read_bytes(), url=url)
    assert str(caught.value).startswith(f"{url}: byte ")
    assert caught.value.shard == url
    assert isinstance(caught.value.offset, int)


def test_every_bad_shard_is_looked_at(data_dir: Path) -> None:
    shards = {p.name for p in (data_dir / "bad").iterdir() if p.suffix != ".jpg"}
    without_evidence = {"parquet-page-bitflip.parquet", "jsonl-broken-line.jsonl"}
    assert shards == set(DAMAGE) | without_evidence


# --- two files whose damage left no trace in them ---------------------------------------------
# A reader can see damage only against a checksum or a broken syntax. These two have neither, so
# nothing but a copy or a checksum from elsewhere tells them from sound ones. What is tested is that
# this is so, and that the same damage is seen where the file gives a reader the means.


def test_a_flipped_bit_in_an_unchecked_parquet_page_leaves_no_trace(data_dir: Path) -> None:
    damaged = data_dir / "bad" / "parquet-page-bitflip.parquet"
    sound = data_dir / "parquet" / "shakespeare-zstd.parquet"
    table = pq.read_table(damaged, page_checksum_verification=True)
    table.validate(full=True)
    assert not table.equals(pq.read_table(sound))
    assert table.schema.equals(pq.read_table(sound).schema)


def test_the_same_flipped_bit_is_seen_where_pages_have_checksums(data_dir: Path) -> None:
    table = pq.read_table(data_dir / "parquet" / "shakespeare-zstd.parquet")
    content = bytearray(
        parquet_bytes(table, row_group_size=997, compression="zstd", write_page_checksum=True)
    )
    parquet = registry.by_name("parquet")
    index = parquet.index(MemoryShard(bytes(content)))
    content[40_000] ^= 0x10
    damaged = [
        i
        for i, block in enumerate(index.blocks)
        if block.place.offset <= 40_000 < block.place.offset + block.place.length
    ]
    assert damaged == [0]
    block = raw_block(bytes(content), index, 0, "s3://bucket/shard.parquet")
    with pytest.raises(CorruptShard, match=r"byte 4: row group 0 cannot be decoded.*CRC"):
        parquet.decode(block, index.schema, index.schema.names)


def test_bytes_missing_inside_of_a_json_string_leave_no_trace(data_dir: Path) -> None:
    content = (data_dir / "bad" / "jsonl-broken-line.jsonl").read_bytes()
    rows = [json.loads(line) for line in content.splitlines()]
    assert read_rows(registry.by_name("jsonl"), content) == rows


@pytest.mark.parametrize("cut", [slice(-10, -2), slice(0, 3), slice(5, 9), slice(14, 18)])
def test_bytes_missing_from_the_syntax_of_a_line_are_named(data_dir: Path, cut: slice) -> None:
    lines = (data_dir / "jsonl" / "shakespeare.jsonl").read_bytes().splitlines(keepends=True)
    broken = bytearray(lines[23])
    del broken[cut]
    content = b"".join([*lines[:23], bytes(broken), *lines[24:]])
    offset = sum(map(len, lines[:23]))
    with pytest.raises(CorruptShard, match=rf"byte {offset}, line 24: ") as caught:
        read_rows(registry.by_name("jsonl"), content, url="s3://bucket/shard.jsonl")
    assert caught.value.offset == offset
