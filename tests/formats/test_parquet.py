"""Parquet: nested types, odd row groups, footers that lie."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from struct import pack
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import parquet_facts as oracle
from oracles.thrift import struct
from shards import NESTED, NESTED_ROWS, MemoryShard, decoded, parquet_bytes, raw_block, read_rows

from dataplane.formats import parquet, parquet_footers
from dataplane.formats.base import RawBlock
from dataplane.formats.parquet import Parquet
from dataplane.formats.parquet_footers import FooterFacts, Footers, cut_footer, parsed, read_footer
from dataplane.model.errors import ConfigError, CorruptShard, SchemaMismatch
from dataplane.model.records import Region


@given(rows=NESTED_ROWS, group=st.integers(1, 20), version=st.sampled_from(["1.0", "2.0"]))
def test_nested_values_and_nulls_come_back(rows: list[dict], group: int, version: str) -> None:
    if int(pa.__version__.split(".")[0]) < 26:  # pyarrow cannot read null lists of a fixed size
        rows = [row | {"fixed": row["fixed"] or [0, 1, 2]} for row in rows]
    table = pa.Table.from_pylist(rows, schema=NESTED)
    content = parquet_bytes(table, row_group_size=group, data_page_version=version)
    assert read_rows(Parquet(), content) == rows
    backwards = NESTED.names[::-1]
    assert read_rows(Parquet(), content, columns=backwards) == [
        {name: row[name] for name in backwards} for row in rows
    ]


def test_empty_row_groups_are_left_out_and_counted_right() -> None:
    table = pa.table({"id": [1, 2]})
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema) as writer:
        for part in (table.slice(0, 0), table.slice(0, 1), table.slice(0, 0), table.slice(1, 1)):
            writer.write_table(part)
    index = Parquet().index(MemoryShard(sink.getvalue()))
    assert [block.rows for block in index.blocks] == [1, 1]
    assert read_rows(Parquet(), sink.getvalue()) == [{"id": 1}, {"id": 2}]


@pytest.mark.parametrize("read", [read_footer, oracle.read_footer])
def test_an_empty_row_group_may_list_no_columns(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[bytes], FooterFacts]
) -> None:
    monkeypatch.setattr(parquet, "read_footer", read)
    content = parquet_bytes(pa.table({"id": [1, 2]}))
    length = int.from_bytes(content[-8:-4], "little")
    footer = content[-8 - length : -8]
    groups = int(cut_footer(memoryview(footer)).starts[0])
    # A list of two row groups; the first one has no columns, bytes or rows.
    footer = footer[: groups - 1] + bytes.fromhex("2c 190c 1600 1600 00") + footer[groups:]
    changed = content[: -8 - length] + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    assert pq.read_metadata(io.BytesIO(changed)).num_row_groups == 2
    assert read_rows(Parquet(), changed) == [{"id": 1}, {"id": 2}]


def test_a_file_without_columns() -> None:
    content = parquet_bytes(pa.table({}))
    assert not read_rows(Parquet(), content)
    # The rows of the file and those of its row group, as a zigzag varint.
    of_none, of_three = (
        bytes.fromhex(f"16 {rows} 19 1c 19 0c 16 00 16 {rows}") for rows in ("00", "06")
    )
    assert content.count(of_none) == 1
    changed = content.replace(of_none, of_three)
    assert pq.read_table(io.BytesIO(changed)).num_rows == 3
    assert read_rows(Parquet(), changed) == [{}, {}, {}]


@pytest.mark.parametrize("columns", [None, ["name"], ["comment_col", "nation_key"]])
def test_columns_of_an_early_writer_are_longer_than_they_say(
    data_dir: Path, columns: list[str] | None
) -> None:
    path = data_dir / "odd" / "impala-dictionary.parquet"
    expected = pq.read_table(path, columns=columns).to_pylist()
    assert len(expected) == 25
    assert read_rows(Parquet(), path.read_bytes(), columns=columns) == expected


def test_only_early_versions_have_columns_that_are_longer_than_they_say() -> None:
    early = ["parquet-mr", "parquet-mr version 1.2.8", "parquet-mr version 1.0.0-SNAPSHOT"]
    others = [
        "",
        "parquet-mr version 1.2.9",
        "parquet-mr version 1.13.1 (build db4)",
        "parquet-cpp",
    ]
    assert [bool(parquet._slack_bytes(name)) for name in early + others] == [True] * 3 + [False] * 4


def test_a_footer_longer_than_the_first_read_is_read_whole() -> None:
    table = pa.table({f"column {i} {'x' * 400}": [i] for i in range(300)})
    content = parquet_bytes(table)
    shard = MemoryShard(content)
    index = Parquet().index(shard)
    assert index.preamble.length > 64 << 10
    assert len(shard.reads) == 2
    assert read_rows(Parquet(), content) == table.to_pylist()


def test_what_is_read_does_not_grow_with_the_shard() -> None:
    content = parquet_bytes(pa.table({"x": range(300_000)}), compression="none")
    shard = MemoryShard(content)
    Parquet().index(shard)
    assert len(content) > 1 << 20
    assert shard.bytes_read <= 64 << 10


def test_list_children_may_be_named_differently_in_other_shards() -> None:
    mine = pa.table({"x": pa.array([[1], [2, 3]], pa.list_(pa.field("item", pa.int32())))})
    schema = pa.schema([("x", pa.list_(pa.field("element", pa.int32(), nullable=True)))])
    [batch] = decoded(Parquet(), parquet_bytes(mine), schema=schema)
    assert batch.schema.field("x").type.equals(schema.field("x").type)
    assert batch.to_pylist() == mine.to_pylist()


def test_a_missing_column_is_named() -> None:
    schema = pa.schema([("x", pa.int64()), ("label", pa.int64())])
    with pytest.raises(SchemaMismatch, match=r"'label'.*no such column"):
        decoded(Parquet(), parquet_bytes(pa.table({"x": [1]})), schema=schema)


def test_two_columns_of_one_name_are_refused() -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(ConfigError, match="not supported: two columns are named 'x'") as caught:
        Parquet().index(MemoryShard(parquet_bytes(table)))
    assert caught.value.shard == "memory://test/shard"


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**32 - 1])
def test_a_lying_footer_length_is_refused(length: int) -> None:
    content = bytearray(parquet_bytes(pa.table({"x": [1, 2, 3]})))
    content[-8:-4] = length.to_bytes(4, "little")
    with pytest.raises(CorruptShard, match="footer"):
        Parquet().index(MemoryShard(bytes(content)))


def test_text_that_is_not_utf8_is_refused() -> None:
    content = parquet_bytes(pa.table({"x": ["abcdefgh"]}), compression="none", use_dictionary=False)
    at = content.index(b"\x08\0\0\0abcdefgh") + 4
    content = content[:at] + b"\xff" + content[at + 1 :]
    with pytest.raises(CorruptShard, match="invalid values"):
        decoded(Parquet(), content)


def test_one_row_group_is_decoded_from_its_own_bytes() -> None:
    table = pa.table({"x": list(range(5000)), "y": ["text"] * 5000})
    content = parquet_bytes(table, row_group_size=1000)
    index = Parquet().index(MemoryShard(content))
    block = raw_block(content, index, 3, "u")
    assert Parquet().decode(block, index.schema, ["y", "x"]).column("x").to_pylist() == list(
        range(3000, 4000)
    )


def test_json_and_uuids_are_their_storage_where_no_arrow_schema_is_stored() -> None:
    uuid, json = pa.array([b"1" * 16, None], pa.uuid()), pa.array(["{}", None], pa.json_())
    table = pa.table(
        {
            "u": uuid,
            "j": json,
            "s": pa.StructArray.from_arrays([uuid, json], ["u", "j"]),
            "l": pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), uuid),
            "m": pa.MapArray.from_arrays(
                pa.array([0, 1, 2], pa.int32()), pa.array(["a", "b"]), json
            ),
        }
    )
    value, none = b"1" * 16, None
    rows = [
        {"u": value, "j": "{}", "s": {"u": value, "j": "{}"}, "l": [value], "m": [("a", "{}")]},
        {"u": none, "j": none, "s": {"u": none, "j": none}, "l": [none], "m": [("b", none)]},
    ]
    assert read_rows(Parquet(), parquet_bytes(table, store_schema=False)) == rows


def test_no_row_group_is_skipped() -> None:
    """With one byte of the footer changed, all rows are found, or none."""
    table = pa.table({"id": range(7), "l": [[1]] * 7})
    content = parquet_bytes(table, row_group_size=3, store_schema=False)
    place = Parquet().index(MemoryShard(content)).preamble
    refused = 0
    for at in range(place.offset, place.offset + place.length - 8):
        for byte in (0, 1, content[at] ^ 8):
            changed = content[:at] + bytes([byte]) + content[at + 1 :]
            try:
                index = Parquet().index(MemoryShard(changed))
            except (CorruptShard, ConfigError):
                refused += 1
                continue
            # More of them are found wanting when they are decoded.
            assert sum(block.rows for block in index.blocks) >= 7, (at, byte)
    assert refused > 100


def test_a_count_of_rows_that_early_writers_left_out_is_not_missed() -> None:
    content = parquet_bytes(pa.table({"id": range(23)}), compression="none")
    footer = Parquet().index(MemoryShard(content)).preamble.offset
    at = content.index(bytes([0x16, 2 * 23]), footer)  # of the file: field 3, a number of 23
    changed = content[: at + 1] + bytes(1) + content[at + 2 :]
    assert len(read_rows(Parquet(), changed)) == 23


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (bytes([0x36, 2, 0x06, 6, 4, 0]), "field 3 of a structure occurs twice"),
        (bytes([0x32, 0]), "field 3 of a structure has another type"),
    ],
)
def test_a_structure_with_conflicting_fields_is_refused(content: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        struct(content, {3: None})


_US = pa.timestamp("us")
_INT96 = {
    "flat": (_US, lambda time: time),
    "list": (pa.list_(_US), lambda time: [None, time]),
    "struct": (pa.struct([("t", _US)]), lambda time: {"t": time}),
    "map": (pa.map_(pa.int8(), _US), lambda time: [(1, time)]),
}


def _time(text: str) -> Any:
    return np.datetime64(text, "us").item()


def _int96(kind: str, *times: Any) -> bytes:
    stored, wrapped = _INT96[kind]
    values = [None if time is None else wrapped(time) for time in times]
    table = pa.table({"id": range(len(times)), "end": pa.array(values, stored)})
    return parquet_bytes(table, use_deprecated_int96_timestamps=True)


@pytest.mark.parametrize("kind", _INT96)
def test_int96_beyond_nanoseconds_is_refused_and_never_wraps(kind: str) -> None:
    first, last = _time("1677-09-21T00:12:44"), _time("2262-04-11T23:47:16")
    content = _int96(kind, first, None, last)
    wrapped = _INT96[kind][1]
    (batch,) = decoded(Parquet(), content)
    times = batch.column("end").cast(_INT96[kind][0])
    assert times.to_pylist() == [wrapped(first), None, wrapped(last)]
    for beyond in map(_time, ("9999-12-31T00:00:00", "1677-09-21T00:00:00")):
        content = _int96(kind, first, None, beyond)
        with pytest.raises(SchemaMismatch, match="row 2 of block 0: column 'end' has") as caught:
            decoded(Parquet(), content)
        assert caught.value.nouns["found"] == beyond.isoformat()
        assert "columns=" in str(caught.value)
        rows = read_rows(Parquet(), content, columns=["id"])
        assert rows == [{"id": 0}, {"id": 1}, {"id": 2}]


def test_int96_with_a_negative_time_of_day_as_early_arrow_wrote_it_is_read() -> None:
    time = _time("1969-12-31T12:00:00")
    table = pa.table({"end": pa.array([time], _US)})
    content = parquet_bytes(table, compression="none", use_deprecated_int96_timestamps=True)
    noon, epoch = 43_200 * 10**9, 2_440_588
    early = pack("<qi", -noon, epoch)
    content = content.replace(pack("<qi", noon, epoch - 1), early)
    assert early in content
    (batch,) = decoded(Parquet(), content)
    assert batch.column("end").cast(_US).to_pylist() == [time]


def footer(rows: int = 3, name: str = "x", groups: int = 1) -> bytes:
    sink = io.BytesIO()
    table = pa.table({name: pa.array(range(rows * groups), pa.int64())})
    pq.write_table(table, sink, row_group_size=rows)
    content = sink.getvalue()
    length = int.from_bytes(content[-8:-4], "little")
    return content[-8 - length :]


def test_the_same_bytes_are_parsed_once() -> None:
    footers, content = Footers(), footer(groups=3)
    first = footers.of("a", content)
    assert footers.of("a", memoryview(bytearray(content))) is first
    assert first.groups == (0, 1, 2)
    assert first.metadata.num_rows == 9


def test_a_rewritten_shard_has_a_new_footer() -> None:
    footers = Footers()
    old, new = footer(name="x"), footer(name="y")
    assert len(old) == len(new)
    assert footers.of("a", old).metadata.schema.names == ["x"]
    assert footers.of("a", new).metadata.schema.names == ["y"]
    assert footers.of("a", old).metadata.schema.names == ["x"]
    assert footers.of("b", new).metadata.schema.names == ["y"]


def test_what_is_remembered_does_not_change_with_the_memory_that_it_was_read_from() -> None:
    footers, content = Footers(), bytearray(footer(name="x"))
    first = footers.of("a", content)
    content[:] = footer(name="y")
    assert footers.of("a", content).metadata.schema.names == ["y"]
    assert first.metadata.schema.names == ["x"]


def test_as_many_are_remembered_as_the_bytes_allow_and_the_last_one_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = footer()
    for bytes_max, kept in ((0, 1), (20 * len(content), 20)):
        monkeypatch.setattr(parquet_footers, "BYTES_MAX", bytes_max)
        footers = Footers()
        made = [footers.of(str(number), content) for number in range(30)]
        # From the last to the first, so that asking for one forgets none that is asked for later.
        again = [footers.of(str(i), content) is made[i] for i in range(29, 29 - kept, -1)]
        assert all(again)
        assert footers.of("0", content) is not made[0]


def test_what_is_no_footer_is_not_remembered() -> None:
    footers = Footers()
    for _ in range(2):
        with pytest.raises((pa.ArrowException, OSError)):
            footers.of("a", b"nothing")
    assert footers.of("a", footer()).metadata.num_rows == parsed(footer()).metadata.num_rows


def wide_footer(groups: int = 40, columns: int = 40, seed: int = 0) -> bytes:
    """More than SMALL_BYTES; every third row group is empty."""
    sink = io.BytesIO()
    table = pa.table({f"column{seed}_{i}": pa.array([float(i)]) for i in range(columns)})
    with pq.ParquetWriter(sink, table.schema) as writer:
        for group in range(groups):
            writer.write_table(table.slice(0, 0 if group % 3 == 2 else 1))
    content = sink.getvalue()
    length = int.from_bytes(content[-8:-4], "little")
    assert length > parquet_footers.SMALL_BYTES
    return content[-8 - length :]


def block_of(content: bytes, index: int, number: int, url: str = "a") -> RawBlock:
    nowhere, preamble = Region(0, 0), memoryview(content)
    return RawBlock(url, index, 1, nowhere, 0, nowhere, preamble, memoryview(b""), (), number)


def test_only_the_row_group_of_a_block_is_parsed_where_large_footers_have_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content, first = wide_footer(), wide_footer(seed=1)
    monkeypatch.setattr(parquet_footers, "BYTES_MAX", len(first) + 1)
    footers, whole = Footers(), parsed(content)
    remembered, _ = footers.group_of(block_of(first, 0, number=1, url="first"))
    assert remembered.num_row_groups == 40
    for index, group in enumerate(whole.groups):
        metadata, at = footers.group_of(block_of(content, index, number=2))
        assert (metadata.num_row_groups, at) == (1, 0)
        assert metadata.row_group(0).to_dict() == whole.metadata.row_group(group).to_dict()
        assert metadata.schema.equals(whole.metadata.schema)
        assert metadata.metadata == whole.metadata.metadata
    with pytest.raises(IndexError):
        footers.group_of(block_of(content, len(whole.groups), number=2))
    assert footers.group_of(block_of(first, 0, number=1, url="first"))[0] is remembered


def test_an_unused_footer_makes_room_for_a_large_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content, first = wide_footer(), wide_footer(seed=1)
    monkeypatch.setattr(parquet_footers, "BYTES_MAX", len(first) + 1)
    monkeypatch.setattr(parquet_footers, "STALE_USES", 2)
    footers = Footers()
    footers.group_of(block_of(first, 0, number=1, url="first"))
    footers_read = [footers.group_of(block_of(content, 0, number=2))[0] for _ in range(4)]
    assert [metadata.num_row_groups for metadata in footers_read] == [1, 1, 40, 40]


def test_a_preamble_with_a_known_number_is_not_read_again() -> None:
    footers, content = Footers(), footer()
    first, _ = footers.group_of(block_of(content, 0, number=3))
    assert footers.group_of(block_of(bytes(len(content)), 0, number=3))[0] is first
    assert footers.group_of(block_of(content, 0, number=4))[0] is first, "its bytes are the same"
    with pytest.raises((pa.ArrowException, OSError)):
        footers.group_of(block_of(bytes(len(content)), 0, number=5))


def test_a_damaged_footer_is_cut_or_refused() -> None:
    content, chance = wide_footer()[:-8], random.Random(1)
    cut_count = 0
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.choice((0, 127, 128, 255))
        damaged = damaged[: chance.choice((len(damaged), chance.randrange(len(damaged))))]
        try:
            cuts = cut_footer(memoryview(damaged))
        except ValueError:
            continue
        cut_count += 1
        for index in range(len(cuts.filled)):
            assert len(cuts.footer_of(memoryview(damaged), index)) <= len(damaged)
    assert 0 < cut_count < 300


def test_more_row_groups_than_are_expected_are_cut_as_well() -> None:
    content = footer(rows=1, groups=1500)
    cuts, whole = cut_footer(memoryview(content)[:-8]), parsed(content)
    assert len(cuts.filled) == len(whole.groups) == 1500
    own = cuts.footer_of(memoryview(content)[:-8], 1499)
    metadata = parsed(own + len(own).to_bytes(4, "little") + b"PAR1").metadata
    assert metadata.row_group(0).to_dict() == whole.metadata.row_group(1499).to_dict()


_DECODE_ALL = """
import os, sys
sys.path.insert(0, {tests!r})
import pyarrow as pa
import pyarrow.json, pyarrow.parquet
from shards import *
from dataplane.formats import registry
table = pa.table({{"x": list(range(1000)), "s": [str(i) for i in range(1000)]}})
shards = {{
    "parquet": parquet_bytes(table, row_group_size=300),
    "arrow": arrow_bytes(table),
    "arrow file": arrow_bytes(table, file=True),
    "jsonl": json_lines(table.to_pylist()),
    "jsonl gz": zipped(json_lines(table.to_pylist())),
    "tfrecord": tfrecord_bytes([example_bytes({{"a": ("int64_list", [1])}})]),
    "tar": tar_bytes([("a.txt", b"x")]),
}}
before = len(os.listdir("/proc/self/task"))
for name, content in shards.items():
    decoded(registry.by_name(name.split()[0]), content)
    print(name, len(os.listdir("/proc/self/task")) - before)
"""


def test_no_format_starts_a_thread_that_may_outlive_the_interpreter() -> None:
    tests = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", _DECODE_ALL.format(tests=tests)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    threads = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert len(threads) == 7
    assert set(threads.values()) == {"0"}, threads
