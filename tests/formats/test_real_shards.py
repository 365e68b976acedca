"""Files that other people's tools wrote, value by value against the text and images inside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from shards import MemoryShard, decoded

from dataplane.formats import registry

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
