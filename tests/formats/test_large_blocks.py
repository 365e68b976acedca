"""More than 2 GiB of text, or 2^31 items, in one column of one block: offsets become wide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shards

from dataplane.formats import arrays, parquet
from dataplane.formats.arrays import joined, read_as, widened
from dataplane.formats.conform import batch_of
from dataplane.formats.jsonl import JsonLines
from dataplane.formats.parquet import Parquet
from dataplane.formats.tar import Tar
from dataplane.formats.tfrecord import TfRecord
from dataplane.transforms.canonical import canonical
from dataplane.transforms.columns import plan_columns

TEXT = "x" * 3000
HALF = 1 << 30


def many_nulls() -> pa.Array:
    """A list of 2^30 nulls, which take no memory."""
    return pa.ListArray.from_arrays(pa.array([0, HALF], pa.int32()), pa.nulls(HALF))


def test_arrays_that_are_too_long_together_are_joined_with_wide_offsets() -> None:
    short = joined([many_nulls()])
    assert pa.types.is_list(short.type)
    whole = joined([many_nulls()] * 3)
    assert whole.type == pa.large_list(pa.null())
    assert whole.offsets.to_pylist() == [0, HALF, 2 * HALF, 3 * HALF]


def test_a_block_that_its_dataset_has_no_room_for_keeps_wide_offsets() -> None:
    schema = pa.schema([("id", pa.int64()), ("x", pa.list_(pa.null()))])
    given = {"id": pa.array(range(3)), "x": joined([many_nulls()] * 3)}
    batch = batch_of(given, schema, ["x", "id"], 3)
    assert batch.schema.types == [pa.large_list(pa.null()), pa.int64()]
    small = batch_of(
        {"x": read_as(pa.array([[None]]), widened(schema.field("x").type))}, schema, ["x"], 1
    )
    assert small.schema.types == [pa.list_(pa.null())]


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.binary(),
        pa.string_view(),
        pa.list_(pa.string()),
        pa.struct([("a", pa.string()), ("b", pa.list_(pa.binary()))]),
        pa.map_(pa.string(), pa.list_(pa.string())),
        pa.list_(pa.list_(pa.int8(), 2)),
        pa.dictionary(pa.int8(), pa.string()),
    ],
)
def test_wide_types_have_the_same_values(kind: pa.DataType) -> None:
    values: dict[Any, Any] = {
        pa.string(): "a",
        pa.string_view(): "a",
        pa.binary(): b"a",
        pa.list_(pa.string()): ["a", None],
        pa.list_(pa.list_(pa.int8(), 2)): [[1, 2], None],
    }
    value = values.get(kind, "a")
    if pa.types.is_struct(kind):
        value = {"a": "x", "b": [b"y", None]}
    if pa.types.is_map(kind):
        value = [("k", ["v", None])]
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    array = pa.array([None, value, None, value, value], plain)
    array = array.dictionary_encode() if pa.types.is_dictionary(kind) else array
    for some in (array, array.slice(1, 3)):
        wide = read_as(some, widened(some.type))
        assert wide.type == widened(some.type)
        wide.validate(full=True)
        assert wide.to_pylist() == some.to_pylist()


@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
def test_texts_of_a_dictionary_get_room_when_they_are_written_out(
    monkeypatch: pytest.MonkeyPatch, kind: pa.DataType
) -> None:
    array = pa.array(["a", None, "bcd", "a"]).cast(kind).dictionary_encode()
    runs = pa.RunEndEncodedArray.from_arrays([1, 4], pa.array(["a", "bcd"]).cast(kind))
    assert arrays.decoded(array).type == kind
    monkeypatch.setattr(arrays, "OFFSET_MAX", 10)
    for some in (array, runs):
        assert arrays.decoded(some).type == widened(kind)
        expected = (
            [text.as_py() for text in some]
            if some is array
            else [some[i].as_py() for i in range(4)]
        )
        assert arrays.decoded(some).to_pylist() == expected


def test_columns_of_compressed_shards_get_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "OFFSET_MAX", 5)
    pieces = [b"abc", None, b"def"]
    column = arrays.bytes_column(pieces, pa.binary())
    assert column.type == pa.large_binary()
    assert column.to_pylist() == pieces
    lists = arrays.list_column(
        np.array([3, 0, 4]), np.array([True, False, True]), pa.array(range(7))
    )
    assert lists.type == pa.large_list(pa.int64())
    assert lists.to_pylist() == [[0, 1, 2], None, [3, 4, 5, 6]]
    tar = shards.zipped(shards.tar_bytes([("a.txt", b"some text"), ("b.txt", b"more of it")]))
    assert [row["txt"] for row in shards.read_rows(Tar(), tar)] == ["some text", "more of it"]
    records = [
        shards.example_bytes(
            {"b": ("bytes_list", [b"some", b"bytes"]), "i": ("int64_list", range(9))}
        ),
        shards.example_bytes({"b": ("bytes_list", [b"x"]), "i": ("int64_list", [])}),
    ]
    assert shards.read_rows(TfRecord(), shards.zipped(shards.tfrecord_bytes(records))) == [
        {"b": [b"some", b"bytes"], "i": list(range(9))},
        {"b": [b"x"], "i": []},
    ]


class NarrowReader:
    """A reader of Parquet whose chunks hold few rows: it fails as pyarrow does beyond 2 GiB."""

    def __init__(self, reader: Any, rows_max: int) -> None:
        self._reader, self._rows_max = reader, rows_max
        self.tried: list[int] = []

    def read_row_group(self, group: int, **options: Any) -> pa.Table:
        self._expect_few(self._reader.metadata.row_group(group).num_rows)
        return self._reader.read_row_group(group, **options)

    def iter_batches(self, rows: int, groups: Sequence[int], **options: Any) -> Iterator[Any]:
        self._expect_few(rows)
        return self._reader.iter_batches(rows, groups, **options)

    def _expect_few(self, rows: int) -> None:
        self.tried.append(rows)
        if rows > self._rows_max:
            raise pa.ArrowNotImplementedError(
                "Nested data conversions not implemented for chunked array outputs"
            )


@pytest.mark.parametrize(
    ("rows_max", "tried"), [(1000, [300]), (50, [300, 38]), (6, [300, 38, 5]), (1, [300, 38, 5, 1])]
)
def test_nested_columns_are_read_in_as_many_parts_as_it_takes(
    rows_max: int, tried: list[int]
) -> None:
    table = pa.table({
        "id": range(300),
        "l": [[f"text {i}"] * (i % 3) for i in range(300)],
        "s": [{"a": None if i % 5 else f"a{i}"} for i in range(300)],
        "m": pa.array([[("k", str(i))] for i in range(300)], pa.map_(pa.string(), pa.string())),
    })  # fmt: skip
    reader = pq.ParquetFile(pa.BufferReader(shards.parquet_bytes(table))).reader
    narrow = NarrowReader(reader, rows_max)
    parts = parquet._read_group(narrow, 0, [1, 2, 3, 4], 300)
    assert narrow.tried == tried
    whole = {name: joined(parts.column(name).chunks) for name in parts.column_names}
    assert {name: array.to_pylist() for name, array in whole.items()} == (
        table.select(["l", "s", "m"]).to_pydict()
    )


def test_a_row_that_is_too_long_alone_is_refused() -> None:
    reader = pq.ParquetFile(pa.BufferReader(shards.parquet_bytes(pa.table({"x": [1, 2]})))).reader
    narrow = NarrowReader(reader, 0)
    with pytest.raises(pa.ArrowNotImplementedError):
        parquet._read_group(narrow, 0, None, 2)
    assert narrow.tried == [2, 1]


def test_blocks_of_wide_texts_are_canonical() -> None:
    values = {"s": ["a", None, "bc"], "b": [b"a", b"", None], "l": [[1], [], [2, 3]]}
    narrow = pa.table(values).combine_chunks().to_batches()[0]
    wide = pa.record_batch(
        [read_as(c, widened(c.type)) for c in narrow.columns], names=list(values)
    )
    plan = plan_columns(narrow.schema)
    batch = canonical(wide, plan, "u")
    assert batch.to_pydict() == canonical(narrow, plan, "u").to_pydict()


def test_json_lines_in_pieces_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.formats.jsonl.LINE_BYTES_MAX", 64)
    rows = [{"a": f"text {i}", "l": [str(i)]} for i in range(20)]
    assert shards.read_rows(JsonLines(), shards.json_lines(rows)) == rows


# --- the real size ----------------------------------------------------------------------------


def large(value: Any, kind: pa.DataType, folder: Path) -> bytes:
    """One row group of 760,000 rows, which is 2.3 GB once decoded, and a few MB in the file."""
    some = pa.record_batch([pa.array([value] * 20_000, kind)], names=["x"])
    path = folder / "large.parquet"
    pq.write_table(pa.Table.from_batches([some] * 38), path, row_group_size=760_000)
    return path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (TEXT, pa.string()),
        (TEXT.encode(), pa.binary()),
        ([TEXT], pa.list_(pa.string())),
        ({"s": TEXT}, pa.struct([("s", pa.string())])),
        ([("k", TEXT)], pa.map_(pa.string(), pa.string())),
    ],
)
def test_a_row_group_of_more_than_2_gib(value: Any, kind: pa.DataType, tmp_path: Path) -> None:
    (batch,) = shards.decoded(Parquet(), large(value, kind, tmp_path))
    assert batch.num_rows == 760_000
    assert batch.schema.types == [widened(kind)]
    assert batch.column("x")[759_999].as_py() == value
    converted = canonical(batch, plan_columns(pa.schema([("x", kind)])), "u")
    assert converted.num_rows == 760_000
