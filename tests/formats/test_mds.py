"""MosaicML's MDS shards: every encoding but pickle."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from sample_files import mds_bytes, zstd
from shards import MemoryShard, decoded, raw_block, read_rows

from dataplane.commands.datasets import read_block, schema_of
from dataplane.formats.mds import Mds
from dataplane.formats.unsupported import unsupported
from dataplane.index.indexing import index_dataset
from dataplane.model.errors import ConfigError, CorruptShard, SchemaMismatch

MDS = Mds()
NUMBERS = ("int", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@pytest.mark.parametrize("encoding", [*NUMBERS, "float16", "float32", "float64"])
def test_numbers_have_their_type(encoding: str) -> None:
    rows = [{"x": value} for value in (1, 0, 100)]
    content = mds_bytes({"x": encoding}, rows)
    assert read_rows(MDS, content) == rows
    kind = pa.from_numpy_dtype(np.dtype("int64" if encoding == "int" else encoding))
    assert MDS.index(MemoryShard(content)).schema == pa.schema([("x", kind)])


@pytest.mark.parametrize(
    ("encoding", "value", "read"),
    [
        ("str", "日本", "日本"),
        ("json", {"a": [1]}, '{"a": [1]}'),
        ("str_int", 10**30, str(10**30)),
        ("str_decimal", "1.50", "1.50"),
        ("bytes", b"", b""),
        ("jpeg", b"\xff\xd8", b"\xff\xd8"),
        ("list[png]", [b"a", b"", b"bc"], [b"a", b"", b"bc"]),
        ("jpeg_array", [b"a"], [b"a"]),
    ],
)
def test_texts_bytes_and_lists(encoding: str, value: object, read: object) -> None:
    rows = [{"id": at, "x": value} for at in range(3)]
    content = mds_bytes({"id": "int", "x": encoding}, rows)
    assert read_rows(MDS, content) == [{"id": at, "x": read} for at in range(3)]


@pytest.mark.parametrize("encoding", ["ndarray", "ndarray:int16", "ndarray:int16:2,3"])
def test_arrays_of_one_shape(encoding: str) -> None:
    arrays = [np.arange(6, dtype=np.int16).reshape(2, 3) + at for at in range(5)]
    content = mds_bytes({"x": encoding}, [{"x": array} for array in arrays])
    assert read_rows(MDS, content) == [{"x": array.tolist()} for array in arrays]


def test_arrays_of_several_shapes() -> None:
    shapes = [(1, 2), (300, 1), (2, 70_000), (1, 1)]  # sizes of one, two and four bytes
    arrays = [np.ones(shape, np.uint8) * at for at, shape in enumerate(shapes)]
    content = mds_bytes({"x": "ndarray"}, [{"x": array} for array in arrays])
    assert read_rows(MDS, content) == [{"x": array.tolist()} for array in arrays]


def written(folder: Path, shards: list[list[np.ndarray]]) -> tuple[pa.DataType, list[object]]:
    """Write these shards of arrays, and return the type and the values that are read."""
    for at, arrays in enumerate(shards):
        rows = [{"id": 0, "x": array} for array in arrays]
        content = mds_bytes({"id": "int", "x": "ndarray"}, rows)
        (folder / f"shard.{at}.mds").write_bytes(content if at else zstd(content))
    manifest = index_dataset(folder)
    schema = schema_of(manifest)
    batches = [read_block(manifest, at, schema, ["x"]) for at in range(manifest.block_count)]
    return schema.field("x").type, [row["x"] for batch in batches for row in batch.to_pylist()]


F4 = pa.float32()
A, B, C = (np.arange(2 * n, dtype=np.float32).reshape(2, n) for n in (3, 4, 5))
LARGE = [np.ones((1024, n), np.float32) for n in (1100, 1200)]


@pytest.mark.parametrize(
    ("shards", "kind"),
    [
        ([[A, A], [A]], pa.list_(pa.list_(F4, 3), 2)),
        ([[A], [B], [C]], pa.list_(pa.list_(F4))),
        ([[A, A], [A, B]], pa.list_(pa.list_(F4))),
        ([[A, B], [A, A]], pa.list_(pa.list_(F4))),
        ([[A] * 70 + [B]], pa.list_(pa.list_(F4))),
        ([[A], [A, A.T]], pa.list_(pa.list_(F4))),
    ],
)
def test_shapes_may_differ_within_and_between_shards(
    tmp_path: Path, shards: list[list[np.ndarray]], kind: pa.DataType
) -> None:
    assert written(tmp_path, shards) == (kind, [a.tolist() for shard in shards for a in shard])


def test_arrays_larger_than_a_block_may_have_several_shapes() -> None:
    shard = MemoryShard(mds_bytes({"x": "ndarray"}, [{"x": array} for array in LARGE]))
    assert MDS.index(shard).schema.field("x").type == pa.list_(pa.list_(F4))
    lengths = [len(b.column(0).flatten().flatten()) for b in decoded(MDS, bytes(shard.content))]
    assert lengths == [array.size for array in LARGE]


def test_lists_without_values_are_bounded_by_the_bytes_of_the_shard() -> None:
    empty = np.zeros((5, 0), np.float32)
    assert read_rows(MDS, mds_bytes({"x": "ndarray"}, [{"x": empty}])) == [{"x": [[]] * 5}]
    bomb = mds_bytes({"x": "ndarray"}, [{"x": np.zeros((0x8000000, 0), np.float32)}])
    with pytest.raises(CorruptShard, match="arrays without values state 134217728 lists"):
        read_rows(MDS, bomb)


def test_fixed_arrays_are_copied_once() -> None:
    rows = [{"x": np.zeros(1 << 19, np.float64)} for _ in range(2)]
    content = mds_bytes({"x": f"ndarray:float64:{1 << 19}"}, rows)
    index = MDS.index(MemoryShard(content))
    block = raw_block(content, index, 0, "u")
    tracemalloc.start()
    try:
        MDS.decode(block, index.schema, ["x"])
        assert tracemalloc.get_traced_memory()[1] < 2 * len(block.body)
    finally:
        tracemalloc.stop()


def test_arrays_of_several_types_are_refused() -> None:
    rows = [{"x": np.ones(2, np.int16)}, {"x": np.ones(2, np.int32)}]
    with pytest.raises(SchemaMismatch, match="column 'x': its arrays have several types"):
        read_rows(MDS, mds_bytes({"x": "ndarray"}, rows))


def test_a_pickled_column_is_refused_and_the_others_are_read() -> None:
    content = mds_bytes({"id": "int", "x": "pkl"}, [{"id": 1, "x": b"\x80\x04N."}])
    index = MDS.index(MemoryShard(content))
    assert "is pickled, which nodes do not unpickle" in unsupported(index.schema.field("x"))
    assert decoded(MDS, content, ["id"])[0].to_pylist() == [{"id": 1}]


def test_only_the_header_is_read() -> None:
    rows = [{"x": bytes(1 << 20)} for _ in range(9)]
    shard = MemoryShard(mds_bytes({"x": "bytes"}, rows))
    assert [block.rows for block in MDS.index(shard).blocks] == [3, 3, 3]
    assert shard.bytes_read < 1 << 20
    packed = MemoryShard(zstd(shard.content))
    assert [block.rows for block in MDS.index(packed).blocks] == [9]


def test_a_compressed_shard_that_is_truncated_is_corrupt() -> None:
    whole = zstd(mds_bytes({"x": "bytes"}, [{"x": bytes(range(256)) * 99} for _ in range(9)]))
    with pytest.raises(CorruptShard, match="truncated compressed data"):
        decoded(MDS, whole[:-9])


def test_a_folder_with_each_shard_twice_is_refused(tmp_path: Path) -> None:
    content = mds_bytes({"id": "int"}, [{"id": 1}])
    (tmp_path / "shard.0.mds").write_bytes(content)
    (tmp_path / "shard.0.mds.zstd").write_bytes(zstd(content))
    with pytest.raises(ConfigError, match=r"shard\.0\.mds\.zstd is there without .zstd, too"):
        index_dataset(tmp_path)
    assert index_dataset(str(tmp_path / "*.mds")).sample_count == 1


def test_shards_of_the_library_are_read_and_their_index_is_left_out(data_dir: Path) -> None:
    listed = json.loads((data_dir / "mds" / "index.json").read_text())["shards"]
    manifest = index_dataset(data_dir / "mds")
    assert manifest.sample_count == sum(shard["samples"] for shard in listed)
    rows = read_rows(MDS, (data_dir / "mds" / "shard.00000.mds.zstd").read_bytes())
    assert [row["id"] for row in rows] == list(range(listed[0]["samples"]))
    assert all(type(row["text"]) is str and type(row["tokens"]) is list for row in rows)
