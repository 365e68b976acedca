"""An index counts nulls correctly, for all column types and all writers."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import arrow_columns
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arrow_columns import Leaf
from hypothesis import assume, given
from hypothesis import strategies as st
from shards import (
    MemoryShard,
    arrow_bytes,
    decoded,
    example_bytes,
    json_lines,
    parquet_bytes,
    tar_bytes,
    tfrecord_bytes,
)

from dataplane.formats import registry
from dataplane.formats.arrow_ipc import ArrowIpc
from dataplane.formats.base import Format
from dataplane.formats.jsonl import JsonLines
from dataplane.formats.nulls import aligned, alignment, node_count
from dataplane.formats.parquet import Parquet
from dataplane.formats.parquet_columns import NullCounter, schema_tree
from dataplane.formats.parquet_footers import CHILDREN, LEVELS, NULLS, REPETITION, VALUES, Int64
from dataplane.formats.tar import Tar
from dataplane.formats.tfrecord import TfRecord
from dataplane.plan.columns import NEVER, UNKNOWN
from dataplane.transforms.leaves import leaves_of

NONE = {0, NEVER}


def check(format_: Format, content: bytes, leaves: Sequence[Leaf], *, exact: bool = False) -> None:
    """Each claim of the index about each leaf; `exact`: it knows everything."""
    index = format_.index(MemoryShard(content))
    assert len(index.nulls) == node_count(index.schema)
    by_name = {leaf.name: leaf.values for leaf in leaves}
    for leaf in leaves_of(index.schema):
        values = by_name[leaf.name]
        rows = [index.nulls[node] for node in leaf.row_nodes]
        inner = [index.nulls[node] for node in range(*leaf.inner_nodes)]
        for counts, has_nulls in (
            (rows, any(value is None for value in values)),
            (inner, any(within(value) for value in values)),
        ):
            if any(count > 0 for count in counts):
                assert has_nulls, (leaf, counts)
            elif all(count in NONE for count in counts):
                assert not has_nulls, (leaf, counts)
            else:
                assert not exact, (leaf, counts)


def within(value: Any) -> bool:
    """Whether there is a null within a value."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return False
    return any(inner is None or within(inner) for inner in value)


@given(
    st.integers(1, 6).flatmap(arrow_columns.batches),
    st.sampled_from([None, "lz4"]),
    st.booleans(),
    st.integers(1, 7),
)
def test_arrow_null_counts_are_exact(drawn, codec, file, rows):
    batch, leaves = drawn
    table = pa.Table.from_batches([batch])
    check(ArrowIpc(), arrow_bytes(table, rows=rows, file=file, codec=codec), leaves)


@given(
    st.integers(1, 6).flatmap(arrow_columns.batches),
    st.integers(1, 7),
    st.fixed_dictionaries(
        {
            "write_statistics": st.booleans(),
            "store_schema": st.booleans(),
            "use_dictionary": st.booleans(),
        }
    ),
)
def test_parquet_null_counts_are_exact(drawn, rows, options):
    batch, leaves = drawn
    try:
        content = parquet_bytes(pa.Table.from_batches([batch]), row_group_size=rows, **options)
        read = pq.read_table(io.BytesIO(content))
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        assume(False)
    assume([leaf.name for leaf in leaves_of(read.schema)] == [leaf.name for leaf in leaves])
    check(Parquet(), content, leaves, exact=options["write_statistics"])


NESTED = pa.table(
    {
        "i": pa.array([1, None, 3, 4]),
        "all": pa.array([1, 2, 3, 4]),
        "l": pa.array([[1, 2], [], None, [3]], pa.list_(pa.int32())),
        "ln": pa.array([[1, None], [], [None], [3]], pa.list_(pa.int32())),
        "s": pa.array([{"a": 1, "b": None}, None, {"a": 2, "b": [3]}, {"a": 3, "b": []}]),
    }
)


def nested(**options: Any) -> dict[str, list[int]]:
    index = Parquet().index(MemoryShard(parquet_bytes(NESTED, **options)))
    at, counts = 0, {}
    for field in index.schema:
        counts[field.name] = list(index.nulls[at : at + node_count([field])])
        at += node_count([field])
    return counts


def test_levels_tell_a_null_list_from_an_empty_one_and_from_a_null_within():
    assert nested() == {"i": [1], "all": [0], "l": [1, 0], "ln": [0, 2], "s": [1, 0, 1, 0]}


def test_parquet_without_statistics_knows_what_its_schema_forbids():
    counter = counter_of([2, 0], [0, 0], [0, 1])
    counter.add(told((4, -1), (4, -1)), NO_LEVELS)
    required = pa.field("x", pa.int32(), nullable=False)
    assert counter.counts(pa.schema([required, ("y", pa.int32())])).tolist() == [NEVER, UNKNOWN]


def test_without_levels_only_lists_without_gaps_are_known():
    """Older writers leave it so: an empty list is an entry without a value, as a null one is."""
    listed = [[1, 0], [1, 1], [1, 2], [0, 1]]
    schema = pa.schema([("l", pa.list_(pa.int32()))])
    for empty, expected in ((0, [0, 0]), (2, [UNKNOWN, UNKNOWN])):
        counter = counter_of(*listed)
        counter.add(told((4, empty)), NO_LEVELS)
        assert counter.counts(schema).tolist() == expected
    # A list whose items are written another way than Arrow reads them is not misunderstood.
    counter = counter_of([1, 0], [1, 1], [1, 2], [1, 1], [0, 1])
    counter.add(told((4, 0)), NO_LEVELS)
    assert counter.counts(schema).tolist() == [UNKNOWN, UNKNOWN]


def test_null_counts_that_cannot_be_are_not_believed():
    assert parquet_counter((3, 9)) == UNKNOWN
    assert parquet_counter((3, -1)) == UNKNOWN
    assert parquet_counter((3, 2), (4, -1)) == UNKNOWN
    assert parquet_counter((3, 2), (4, 1)) == 3
    assert parquet_counter((1 << 62, 1 << 62), (1 << 62, 1 << 62)) == UNKNOWN


@pytest.mark.parametrize(
    ("groups", "nulls"),
    [
        ([(5, [2, 3])], 2),
        ([(5, [2, 3]), (4, [0, 4])], 2),
        ([(5, [2, 3]), (4, [])], UNKNOWN),
        ([(5, [2, 4])], UNKNOWN),
        ([(5, [-1, 6])], UNKNOWN),
        ([(5, [2, 3, 0])], UNKNOWN),
        ([(4, [1 << 62] * 2), (4, [1 << 62] * 2)], UNKNOWN),
        ([(5, [2, 4]), (5, [2, 3])], UNKNOWN),
    ],
)
def test_a_histogram_of_levels_is_believed_if_it_adds_up(
    groups: list[tuple[int, list[int]]], nulls: int
):
    """In a column between two whose histograms are whole, or not there."""
    counter = counter_of([3, 0], [0, 1], [0, 1], [0, 1])
    for entries, levels in groups:
        columns = told((entries, -1), (entries, -1), (entries, -1))
        columns[:, LEVELS] = 2, len(levels), 0
        counter.add(columns, np.array([1, entries - 1, *levels], np.int64))
    schema = pa.schema((name, pa.int32()) for name in "xyz")
    assert counter.counts(schema).tolist() == [len(groups), nulls, UNKNOWN]


NO_LEVELS = np.empty(0, np.int64)


def counter_of(*elements: list[int]) -> NullCounter:
    """Return the number of children and the repetition of each element of a schema."""
    table = np.zeros((len(elements), 4), np.int64)
    table[:, [CHILDREN, REPETITION]] = elements
    return NullCounter(schema_tree(table).level_max)


def told(*columns: tuple[int, int]) -> Int64:
    """The statistics of a row group's columns: numbers of entries and of nulls."""
    table = np.zeros((len(columns), 9), np.int64)
    table[:, [VALUES, NULLS]] = columns
    return table


def parquet_counter(*groups: tuple[int, int]) -> int:
    counter = counter_of([1, 0], [0, 1])
    for group in groups:
        counter.add(told(group), NO_LEVELS)
    (count,) = counter.counts(pa.schema([("x", pa.int32())])).tolist()
    return count


def test_tar_counts_the_fields_that_samples_lack():
    names = ("a.cls", "a.txt", "b.cls", "c.txt", "d.cls")
    index = Tar().index(MemoryShard(tar_bytes((name, b"1") for name in names)))
    assert index.schema.names == ["__key__", "cls", "txt"]
    assert list(index.nulls) == [NEVER, 1, 2]


def test_json_lines_knows_the_nulls_of_its_sample_and_that_there_is_more():
    rows = [{"x": 1, "y": [1, None]}, {"x": 2, "y": None}, {"z": {"a": None}}]
    short = json_lines(rows)
    index = JsonLines().index(MemoryShard(short))
    assert index.schema.names == ["x", "y", "z"]
    assert list(index.nulls) == [1, 2, 1, 2, 3]
    more = json_lines({"x": 1, "y": [2]} for _ in range(300_000))
    longer = JsonLines().index(MemoryShard(more))
    assert longer.schema.names == ["x", "y"]
    assert list(longer.nulls) == [UNKNOWN, UNKNOWN, UNKNOWN]


def test_tfrecord_knows_what_the_records_of_its_sample_lack():
    def record(i: int) -> bytes:
        features: dict[str, tuple[str, list[Any]]] = {"i": ("int64_list", [i])}
        if i % 3:
            features["l"] = ("float_list", [0.5] * (i % 2))
        return example_bytes(features)

    few = TfRecord().index(MemoryShard(tfrecord_bytes(record(i) for i in range(9))))
    assert few.schema.names == ["i", "l"]
    assert list(few.nulls) == [0, 3, NEVER]
    many = TfRecord().index(MemoryShard(tfrecord_bytes(record(i) for i in range(1500))))
    assert list(many.nulls) == [UNKNOWN, 334, NEVER]


@pytest.mark.parametrize(
    ("found", "counts", "expected"),
    [
        (pa.schema([("b", pa.int8()), ("a", pa.list_(pa.int8()))]), [5, 6, 7], [6, 7, 5, 9]),
        (pa.schema([("a", pa.null()), ("c", pa.int8())]), [4, 1], [4, UNKNOWN, 9, 1]),
        (pa.schema([("a", pa.list_(pa.int8()))]), [UNKNOWN] * 2, [UNKNOWN, UNKNOWN, 9, 9]),
    ],
)
def test_counts_of_a_shard_with_another_schema_find_their_places(found, counts, expected):
    schema = pa.schema([("a", pa.list_(pa.int8())), ("b", pa.int8()), ("c", pa.int8())])
    places = np.array(alignment(schema, found))
    assert aligned(places, counts, 9).tolist() == expected


def test_a_null_that_belongs_to_no_list_view_is_no_null_of_the_column() -> None:
    values = pa.array([1, None], pa.int64())
    lists = pa.ListViewArray.from_arrays(
        pa.array([0], pa.int32()), pa.array([1], pa.int32()), values
    )
    index = ArrowIpc().index(MemoryShard(arrow_bytes(pa.table({"x": lists}))))
    assert [*index.nulls] == [0, UNKNOWN]


WITH_TOKENS = ("none", "snappy", "zstd", "lz4", "v1-dictionary")
CODINGS = (*WITH_TOKENS, "duckdb", "polars-zstd")


def read(path: Path) -> pa.Table:
    format_ = registry.format_of_url(str(path))
    assert format_ is not None
    return pa.Table.from_batches(decoded(format_, path.read_bytes(), url=path.as_uri()))


@pytest.fixture(scope="module")
def paragraphs(data_dir: Path) -> list[str]:
    return (data_dir / "text" / "tinyshakespeare.txt").read_text().split("\n\n")


def expected_column(name: str, paragraphs: list[str]) -> list[Any]:
    count = len(paragraphs)
    return {
        "id": list(range(count)),
        "text": paragraphs,
        "tokens": [list(text.encode()) for text in paragraphs],
        "length": [len(text.encode()) for text in paragraphs],
        "weight": [None if i % 17 == 0 else float(np.float32(i / 7)) for i in range(count)],
    }[name]


@pytest.mark.parametrize("coding", CODINGS)
def test_parquet_paragraphs(data_dir: Path, paragraphs: list[str], coding: str) -> None:
    table = read(data_dir / "parquet" / f"shakespeare-{coding}.parquet")
    names = {"id", "text", "length"}
    names |= {"weight"} if coding != "polars-zstd" else set()
    names |= {"tokens"} if coding in WITH_TOKENS else set()
    assert set(table.column_names) == names
    for name in table.column_names:
        assert table.column(name).to_pylist() == expected_column(name, paragraphs), name


@pytest.mark.parametrize("name", ["polars-2", "polars-2-zstd", "polars-2-sink"])
def test_arrow_of_polars_2(data_dir: Path, name: str) -> None:
    path = data_dir / "odd" / f"{name}.arrow"
    table = read(path)
    assert table.to_pydict() == {"a": [1, 2, 3]}
    assert table.equals(pa.ipc.open_file(path.read_bytes()).read_all())


@pytest.mark.parametrize(
    "name", ["tokens-plain.arrow", "tokens-lz4.arrow", "tokens-zstd.arrow", "tokens-stream.arrows"]
)
def test_arrow_tokens(data_dir: Path, name: str) -> None:
    table = read(data_dir / "arrow" / name)
    codes = np.frombuffer((data_dir / "text" / "tinyshakespeare.txt").read_bytes(), np.uint8)
    expected = codes[: len(codes) // 256 * 256].astype(np.int32).reshape(-1, 256)
    column = table.column("input_ids").combine_chunks()
    tokens = (column.chunk(0) if isinstance(column, pa.ChunkedArray) else column).flatten()
    assert table.schema.field("input_ids").type.list_size == 256
    assert np.array_equal(tokens.to_numpy().reshape(-1, 256), expected)


@pytest.mark.parametrize("name", ["shakespeare.jsonl", "shakespeare.jsonl.gz"])
def test_jsonl_paragraphs(data_dir: Path, paragraphs: list[str], name: str) -> None:
    table = read(data_dir / "jsonl" / name)
    assert table.schema.names == ["id", "text"]
    for column in table.column_names:
        assert table.column(column).to_pylist() == expected_column(column, paragraphs)


# Which image is which class is known from no text file here: all formats must agree on it.
@pytest.fixture(scope="module")
def labels(data_dir: Path) -> dict[str, int]:
    rows = read(data_dir / "parquet" / "images-huggingface.parquet").to_pylist()
    return {row["image"]["path"]: row["label"] for row in rows}


def image(data_dir: Path, file: str) -> bytes:
    return (data_dir / "images" / file).read_bytes()


@pytest.mark.parametrize(
    ("path", "count"),
    [
        ("parquet/images-huggingface.parquet", 20),
        ("huggingface-disk/data-00000-of-00001.arrow", 8),
    ],
)
def test_hugging_face_images(data_dir: Path, labels: dict[str, int], path: str, count: int) -> None:
    rows = read(data_dir / path).to_pylist()
    assert len(rows) == count
    assert len({row["image"]["path"] for row in rows}) == count
    for row in rows:
        file = row["image"]["path"]
        assert row == {
            "image": {"bytes": image(data_dir, file), "path": file},
            "label": labels[file],
        }


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (("images-00000-of-00002.tfrecord", "images-00001-of-00002.tfrecord"), 40),
        (("images-gzip.tfrecord.gz",), 8),
    ],
)
def test_tfrecord_images(
    data_dir: Path, labels: dict[str, int], names: tuple[str, ...], count: int
) -> None:
    rows = [row for name in names for row in read(data_dir / "tfrecord" / name).to_pylist()]
    files = {row["image/filename"].decode() for row in rows}
    assert len(rows) == len(files) == count
    for row in rows:
        file = row["image/filename"].decode()
        assert row["image/encoded"] == image(data_dir, file)
        assert row["image/class/label"] == labels.get(file, row["image/class/label"])
        assert row["image/object/bbox"][:2] == [float(np.float32(0.1)), 0.25]
        assert len(row["image/object/bbox"]) == 4
    assert len(files & set(labels)) >= min(count, len(labels))


def test_ragged_tfrecord(data_dir: Path) -> None:
    rows = read(data_dir / "tfrecord" / "ragged.tfrecord").to_pylist()
    assert rows == [
        {
            "id": i,
            "score": None if i % 5 == 0 else float(np.float32(i / 3)),
            "tokens": list(range(-(i % 13), i % 29)),
        }
        for i in range(1000)
    ]


@pytest.mark.parametrize("shard", ["images-000000.tar", "images-000001.tar"])
def test_webdataset_images(data_dir: Path, labels: dict[str, int], shard: str) -> None:
    rows = read(data_dir / "webdataset" / shard).to_pylist()
    assert len(rows) == 20
    for n, row in enumerate(rows):
        facts = json.loads(row["json"])
        assert facts["n"] == n
        assert row["__key__"] + ".JPEG" == facts["file"]
        assert row["jpg"] == image(data_dir, facts["file"])
        assert row["cls"] == labels.get(facts["file"], row["cls"])


def test_webdataset_gzip_with_folders(data_dir: Path) -> None:
    rows = read(data_dir / "webdataset" / "images-gz.tar.gz").to_pylist()
    assert len(rows) == 12
    for row in rows:
        assert row["__key__"] == f"sub/{row['txt']}"
        assert row["jpg"] == image(data_dir, f"{row['txt']}.JPEG")


def test_labels_agree_between_formats(data_dir: Path, labels: dict[str, int]) -> None:
    records = read(data_dir / "tfrecord" / "images-00000-of-00002.tfrecord").to_pylist()
    samples = read(data_dir / "webdataset" / "images-000000.tar").to_pylist()
    assert {r["image/filename"].decode(): r["image/class/label"] for r in records} == {
        f"{s['__key__']}.JPEG": s["cls"] for s in samples
    }


def test_a_small_parquet_shard_is_indexed_in_one_request(data_dir: Path) -> None:
    shard = MemoryShard((data_dir / "parquet" / "shakespeare-zstd.parquet").read_bytes())
    registry.by_name("parquet").index(shard)
    assert len(shard.reads) == 1
