"""Megatron's pairs of .bin and .idx."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from sample_files import megatron_bytes

from dataplane.cli import run
from dataplane.formats import megatron, registry
from dataplane.formats.base import RawBlock
from dataplane.index.indexing import index_dataset
from dataplane.model.config import JobSpec
from dataplane.model.errors import ConfigError, CorruptShard, DatasetChangedError, ShardNotFound
from dataplane.model.records import Region
from dataplane.node.dataset import dataset_of
from dataplane.plan.manifest import Manifest
from dataplane.store.connect import connect
from dataplane.worker.mapped import MappedShards


def written(folder: Path, documents: list[np.ndarray], name: str = "text_document") -> None:
    tokens, table = megatron_bytes(documents)
    (folder / f"{name}.bin").write_bytes(tokens)
    (folder / f"{name}.idx").write_bytes(table)


def documents_of(count: int, dtype: str = "<u2") -> list[np.ndarray]:
    return [np.arange(1 + n % 7, dtype=dtype) + n % 50 for n in range(count)]


def rows_of(manifest: Manifest) -> list[list[int]]:
    """All rows, as a node would read them: preamble and block of each."""
    format_, shards, rows = registry.by_name(manifest.format), manifest.shards, []
    schema = pa.ipc.read_schema(pa.py_buffer(manifest.schema))
    for shard in range(len(shards)):
        url, etag = shards.urls[shard], shards.etags[shard]
        blocks = range(int(shards.block_starts[shard]), int(shards.block_starts[shard + 1]))
        first = Region(0, int(shards.preamble_length[shard]))
        head = memoryview(connect(url).read(url, 0, first.length, etag))
        for number, at in enumerate(blocks):
            place = Region(int(manifest.block_offset[at]), int(manifest.block_length[at]))
            body = memoryview(connect(url).read(url, place.offset, place.length, etag))
            count = int(manifest.block_rows[at])
            size = int(shards.size_bytes[shard])
            block = RawBlock(url, number, count, place, size, first, head, body)
            batch = format_.decode(block, schema, ["tokens"])
            rows += [row["tokens"] for row in batch.to_pylist()]
    return rows


@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<i8", "<f4"])
def test_a_long_pair_is_cut_into_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(megatron, "SHARD_DOCUMENTS", 64)
    given = [*documents_of(150, dtype), np.array([], dtype), *documents_of(3, dtype)]
    written(tmp_path, given)
    manifest = index_dataset(tmp_path)
    assert len(manifest.shards) == 3
    assert rows_of(manifest) == [document.tolist() for document in given]


def test_the_lengths_of_a_shard_alone_are_its_preamble(tmp_path: Path) -> None:
    count = 300_000
    lengths, places = np.full(count, 2, "<i4"), np.arange(count, dtype=np.int64) * 4
    head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + b"\x08"
    head += count.to_bytes(8, "little") + (count + 1).to_bytes(8, "little")
    (tmp_path / "a.idx").write_bytes(
        head + lengths.tobytes() + places.tobytes() + np.arange(count + 1).tobytes()
    )
    (tmp_path / "a.bin").write_bytes(np.arange(2 * count, dtype="<u2").tobytes())
    manifest = index_dataset(str(tmp_path / "a.bin"))
    assert manifest.sample_count == count
    assert max(manifest.shards.preamble_length.tolist()) < 300_000


def test_a_local_pair_is_mapped_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron, "SHARD_DOCUMENTS", 64)
    written(tmp_path, documents_of(150), "a")
    manifest = index_dataset(tmp_path)
    dataset, shards = dataset_of(1, manifest, JobSpec(manifest.fingerprint)), MappedShards()
    for block in range(manifest.block_count):
        raw = dataset.raw_block(block, None)
        assert not dataset.blocks.needs_fetch(block)
        mapped = shards.of(raw)
        mapped.load(raw.place.offset, raw.place.length)
        for place in (raw.preamble_place, raw.place):
            read = connect(raw.url).read(raw.url, place.offset, place.length, raw.etag)
            assert bytes(mapped.view(place)) == bytes(read)
    (tmp_path / "a.bin").write_bytes(b"other")
    with pytest.raises(DatasetChangedError, match=r"a\.bin changed since it was indexed"):
        shards.of(raw)


def test_a_pair_is_verified(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, documents_of(50), "a")
    written(tmp_path, documents_of(20), "b")
    assert run(["verify", str(tmp_path)]) == 0
    assert "OK: 70 samples in 2 blocks of 2 shards" in capfd.readouterr().out
    (tmp_path / "b.bin").write_bytes(b"")
    assert run(["verify", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("suffix", "cut", "words"),
    [
        (".idx", 9, r"a\.idx: .*truncated or damaged"),
        (".bin", 2, r"do not fit .*a\.bin: one is truncated"),
    ],
)
def test_a_truncated_file_is_named(tmp_path: Path, suffix: str, cut: int, words: str) -> None:
    written(tmp_path, documents_of(50), "a")
    path = tmp_path / f"a{suffix}"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CorruptShard, match=words):
        index_dataset(tmp_path)


def test_tokens_without_an_index_need_a_format(tmp_path: Path) -> None:
    written(tmp_path, documents_of(9), "a")
    (tmp_path / "a.idx").unlink()
    with pytest.raises(ConfigError, match='pass format="tokens:uint16,end=50256"'):
        index_dataset(tmp_path)


def test_a_pair_without_documents_is_left_out(tmp_path: Path) -> None:
    given = documents_of(5)
    written(tmp_path, [], "a")
    with pytest.raises(ConfigError, match=r"a\.idx has no documents"):
        index_dataset(tmp_path)
    written(tmp_path, given, "b")
    written(tmp_path, [], "c")
    assert rows_of(index_dataset(tmp_path)) == [document.tolist() for document in given]
    (tmp_path / "c.bin").write_bytes(b"12")
    with pytest.raises(CorruptShard, match=r"do not fit .*c\.bin"):
        index_dataset(tmp_path)


@pytest.mark.parametrize("stray", ["0.bin", "z.bin"])
def test_a_file_without_its_pair_is_named(tmp_path: Path, stray: str) -> None:
    written(tmp_path, documents_of(5), "a")
    (tmp_path / stray).write_bytes(b"1234")
    for paths in (tmp_path, str(tmp_path / "*.bin")):
        with pytest.raises(ShardNotFound, match=stray.replace(".bin", ".idx")):
            index_dataset(paths)
