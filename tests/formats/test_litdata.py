"""LitData's chunks, with what their index.json says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sample_files import litdata_bytes, litdata_index, zstd
from shards import MemoryShard, Row, read_rows

from dataplane.commands.datasets import read_block, schema_of
from dataplane.formats import registry
from dataplane.formats.base import Format
from dataplane.formats.litdata import described
from dataplane.formats.unsupported import unsupported
from dataplane.index.indexing import index_dataset
from dataplane.model.errors import ConfigError, CorruptShard, SchemaMismatch, ShardNotFound

KINDS = {"id": "int", "x": "float", "ok": "bool", "text": "str", "image": "jpeg"}
ROWS: list[Row] = [
    {"id": n, "x": n / 3, "ok": n % 2 == 0, "text": f"日{n}", "image": bytes(n)} for n in range(20)
]


def format_of(kinds: dict[str, str]) -> Format:
    return registry.by_name(f"litdata:{json.dumps(kinds)}")


@pytest.mark.parametrize("frame_rows", [0, 1, 7, 99])
def test_values_come_as_they_were_written(frame_rows: int) -> None:
    assert read_rows(format_of(KINDS), litdata_bytes(KINDS, ROWS, frame_rows)) == ROWS
    assert read_rows(format_of(KINDS), zstd(litdata_bytes(KINDS, ROWS))) == ROWS


def test_frames_are_blocks_of_about_4_mib() -> None:
    rows = [{"x": bytes(1 << 20)} for _ in range(9)]
    content = litdata_bytes({"x": "bytes"}, rows, 2)
    format_ = format_of({"x": "bytes"})
    assert [b.rows for b in format_.index(MemoryShard(content)).blocks] == [2, 2, 2, 3]
    assert read_rows(format_, content) == rows


@pytest.mark.parametrize("kind", ["tensor", "numpy"])
def test_arrays_have_one_shape_or_are_nested_lists(kind: str) -> None:
    alike = [{"x": np.full((2, 3), n, np.float32)} for n in range(5)]
    mixed = [{"x": np.full((n + 1, 2), n, np.int64)} for n in range(5)]
    scalars = [{"x": np.array(n, np.int32)} for n in range(5)]
    format_ = format_of({"x": kind})
    for rows in (alike, mixed, scalars):
        content = litdata_bytes({"x": kind}, rows)
        assert read_rows(format_, content) == [{"x": row["x"].tolist()} for row in rows]
    schema = format_.index(MemoryShard(litdata_bytes({"x": kind}, alike))).schema
    assert schema.field("x").type == pa.list_(pa.list_(pa.float32(), 3), 2)
    late = [*alike * 14, {"x": np.ones((2, 4), np.float32)}]
    for frame_rows in (0, 10):
        content = litdata_bytes({"x": kind}, late, frame_rows)
        assert read_rows(format_, content) == [{"x": row["x"].tolist()} for row in late]
    deep = litdata_bytes({"x": kind}, [{"x": alike[0]["x"].reshape(2, 3, *[1] * 60)}])
    deep = deep.replace(bytes([62]), bytes([65]))
    with pytest.raises(CorruptShard, match="65 axes"):
        format_.index(MemoryShard(deep))
    with pytest.raises(SchemaMismatch, match="its arrays have several shapes"):
        read_rows(format_, litdata_bytes({"x": kind}, mixed), schema=schema)


def test_pickles_are_refused() -> None:
    index = format_of({"a": "pickle", "b": "int"}).index(
        MemoryShard(litdata_bytes({"a": "pickle", "b": "int"}, [{"a": b"\x80\x04N.", "b": 1}]))
    )
    assert "is pickled, which nodes do not unpickle" in unsupported(index.schema.field("a"))


def written(folder: Path, **config: object) -> list[str]:
    """Eleven chunks; the third by its number is not the third by its name."""
    files = [f"chunk-0-{n}.bin" for n in range(11)]
    for n, file in enumerate(files):
        (folder / file).write_bytes(litdata_bytes(KINDS, ROWS[n : n + 1]))
    (folder / "index.json").write_bytes(litdata_index(KINDS, files, **config))
    return files


def test_shards_are_read_in_the_order_of_their_index(tmp_path: Path) -> None:
    files = written(tmp_path)
    (tmp_path / "chunk-1-0.bin").write_bytes(b"of another run")
    manifest = index_dataset(tmp_path)
    assert [url.rpartition("/")[2] for url in manifest.shards.urls] == files
    assert pa.ipc.read_schema(pa.py_buffer(manifest.schema)).names == [*KINDS]
    some = index_dataset(str(tmp_path / "chunk-0-1*.bin"))
    assert [url.rpartition("/")[2] for url in some.shards.urls] == ["chunk-0-1.bin", files[-1]]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / written(tmp_path)[3]).unlink()
    with pytest.raises(ShardNotFound, match=r"index.json names chunk-0-3.bin, which is not there"):
        index_dataset(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"encryption": {"algorithm": "fernet"}}, "are encrypted"),
        ({"item_loader": "ParquetLoader"}, "are read by a ParquetLoader"),
        ({"compression_level": "sample"}, "are compressed sample by sample"),
        ({"data_format": None}, "have no data_format"),
    ],
)
def test_files_of_other_kinds_are_refused(config: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        described("index.json", litdata_index(KINDS, ["a.bin"], **config))


@pytest.mark.parametrize("content", [b"[]", b'{"shards": []}', b'{"chunks": 1, "config": {}}'])
def test_an_index_of_another_program_is_none_of_litdata(content: bytes) -> None:
    assert described("index.json", content) is None


def test_samples_may_have_tokens_alone() -> None:
    known = described("index.json", litdata_index({"tokens": "no_header_tensor:18"}, []))
    assert known is not None
    content = litdata_bytes({"tokens": "no_header_tensor:18"}, [{"tokens": np.arange(3)}])
    assert read_rows(registry.by_name(known[0]), content) == [{"tokens": [0, 1, 2]}]


def test_names_follow_the_structure_of_a_sample() -> None:
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    pair = {"type": "builtins.tuple", "context": "null", "children_spec": [leaf, leaf]}
    spec = {"type": "builtins.dict", "context": '["a", "b"]', "children_spec": [leaf, pair]}
    kinds = ["int", "int", "float"]
    for tree, names in ((spec, ["a", "b.0", "b.1"]), (pair, ["0", "1"]), (leaf, ["sample"])):
        own = kinds[: len(names)]
        config = {"data_format": own, "data_spec": json.dumps([1, tree])}
        known = described("index.json", litdata_index({}, [], **config))
        assert known is not None
        assert (
            known[0]
            == f"litdata:{json.dumps(dict(zip(names, own, strict=True)), separators=(',', ':'))}"
        )


def test_a_file_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    files = written(tmp_path)
    (tmp_path / "index.json").write_bytes(litdata_index(KINDS, [*files, files[3]]))
    with pytest.raises(ConfigError, match=r"names chunk-0-3\.bin twice"):
        index_dataset(tmp_path)


@pytest.mark.parametrize("sizes", [[0, 0, 3, 0, 2 << 20, 0, 0, 5, 0], [0, 0], [1 << 20, 0, 1, 0]])
@pytest.mark.parametrize("frame_rows", [0, 1, 2, -1])
def test_documents_may_be_empty(tmp_path: Path, sizes: list[int], frame_rows: int) -> None:
    kind = "no_header_tensor:16"
    rows = [{"": np.full(size, size, np.int32)} for size in sizes]
    content = litdata_bytes({"": kind}, rows, max(frame_rows, 0))
    (tmp_path / "0.bin").write_bytes(content if frame_rows >= 0 else zstd(content))
    index = litdata_index({}, ["0.bin"], data_format=[kind], item_loader="TokensLoader")
    (tmp_path / "index.json").write_bytes(index)
    manifest = index_dataset(tmp_path)
    batches = [
        read_block(manifest, at, schema_of(manifest), ["tokens"])
        for at in range(manifest.block_count)
    ]
    lengths = [len(tokens) for batch in batches for tokens in batch.column("tokens")]
    assert lengths == sizes


def test_documents_of_a_tokens_loader_are_rows() -> None:
    kinds = ["no_header_tensor:16"]
    index = litdata_index({}, [], data_format=kinds, item_loader="TokensLoader")
    known = described("index.json", index)
    assert known is not None
    rows = [{"": np.arange(n + 1, dtype=np.int32)} for n in range(9)]
    content = litdata_bytes({"": kinds[0]}, rows)
    assert read_rows(registry.by_name(known[0]), content) == [
        {"tokens": [*range(n + 1)]} for n in range(9)
    ]
