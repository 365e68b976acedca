"""Counting the rows of views: exact, once, and without reading what statistics decide."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
from counted import Counted
from msgspec import structs
from shards import parquet_bytes

from dataplane.index.counting import counted
from dataplane.index.indexing import index_dataset
from dataplane.index.processes import IndexProcesses
from dataplane.index.run import IndexProgress, StoredShard
from dataplane.index.viewing import viewed
from dataplane.model.config import NodeConfig
from dataplane.model.errors import BudgetTooSmall, CorruptShard
from dataplane.model.records import View
from dataplane.plan.manifest import Int64, Manifest
from dataplane.rpc import tasks
from dataplane.settings import default_node_config
from dataplane.store.connect import connect
from dataplane.worker.death import WorkerBytes
from dataplane.worker.indexing import counts_of

F = pc.field


def here(shard: StoredShard, order: tasks.CountRows, _: int) -> Int64:
    """Counts in this process."""
    return np.frombuffer(counts_of(shard, order), "<i8").astype(np.int64)


def counts(manifest: Manifest, where: str, **given: Any) -> list[int]:
    view = given.pop("view", View(where=where))
    given = {"connect": connect, "count_rows": here, **given}
    return counted(manifest, view, **given).tolist()


def config(cache: Path) -> NodeConfig:
    return structs.replace(default_node_config(), cache_dir=str(cache))


def test_counts_are_those_of_the_rows_of_each_block(dataset: Path) -> None:
    manifest = index_dataset(dataset)
    found = counts(manifest, "id % 3 == 0")
    starts = np.cumsum(manifest.block_rows) - manifest.block_rows
    assert found == [
        sum(not row % 3 for row in range(start, start + rows))
        for start, rows in zip(starts.tolist(), manifest.block_rows.tolist(), strict=True)
    ]


TEXT = F("text")
REAL = {
    "length > 30 and weight < 0.5": (F("length") > 30) & (F("weight") < 0.5),
    "length(text) > 30": pc.utf8_length(TEXT) > 30,
    "text like '%the%' or id < 100": pc.match_like(TEXT, "%the%") | (F("id") < 100),
    "text > 'K' and not text like '%,%'": (TEXT > "K") & ~pc.match_like(TEXT, "%,%"),
    "id >= 2000 and id < 2001": (F("id") >= 2000) & (F("id") < 2001),
    "id % 10 == 3": F("id").isin(list(range(3, 10_000, 10))),
}


@pytest.mark.parametrize("writer", ["zstd", "lz4", "duckdb", "v1-dictionary", "polars-zstd"])
def test_counts_of_real_files_are_those_of_pyarrows_filter(
    data_dir: Path, cache: Path, writer: str
) -> None:
    path = data_dir / "parquet" / f"shakespeare-{writer}.parquet"
    manifest, real = index_dataset(path), ds.dataset(path)
    for where, expression in REAL.items():
        if "weight" in where and "weight" not in real.schema.names:
            continue
        rows = real.count_rows(filter=expression)
        assert sum(counts(manifest, where)) == rows > 0, where
    where, expression = next(reversed(REAL.items()))
    found = viewed(manifest, View(where=where), connect, config(cache))  # in processes
    assert found.sample_count == real.count_rows(filter=expression)


def test_what_was_counted_is_not_counted_again(dataset: Path, cache: Path) -> None:
    store, given = Counted(), {"cache_dir": str(cache)}
    first = counts(index_dataset(dataset), "id % 7 < 3", **given)
    again = counts(index_dataset(dataset), "id % 7 < 3", connect=store.connect, **given)
    assert again == first
    assert store.read_urls == []
    table = pa.table({"id": range(20), "text": ["x"] * 20})
    (dataset / "100.parquet").write_bytes(parquet_bytes(table, row_group_size=4))
    more = counts(index_dataset(dataset), "id % 7 < 3", connect=store.connect, **given)
    assert more[: len(first)] == first
    assert store.names == {"100.parquet"}


def test_the_counts_of_old_views_are_removed(
    dataset: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.index.counting.VIEWS_KEPT", 2)
    manifest = index_dataset(dataset)
    for at in range(4):
        counts(manifest, f"id > {at}", cache_dir=str(cache))
    assert len(list((cache / "counts").iterdir())) == 2
    assert counts(manifest, "id > 3", cache_dir=str(cache), count_rows=lambda *_: None)


def test_a_failure_keeps_what_was_counted(dataset: Path, cache: Path) -> None:
    manifest, given = index_dataset(dataset), {"cache_dir": str(cache)}
    expected = counts(manifest, "text == 'x' and id > 20")

    some_are_kept = threading.Event()

    def told(progress: IndexProgress) -> None:
        if progress.shards_done >= 3:
            some_are_kept.set()

    def fails(shard: StoredShard, order: tasks.CountRows, size: int) -> Int64:
        if "007" in shard.url:
            assert some_are_kept.wait(60)
            raise CorruptShard("no", shard=shard.url)
        return here(shard, order, size)

    with pytest.raises(CorruptShard):
        counts(manifest, "text == 'x' and id > 20", count_rows=fails, progress=told, **given)
    (log,) = (cache / "counts").rglob("*.log")
    log.write_bytes(log.read_bytes()[:-3])  # as a kill may leave it
    store = Counted()
    found = counts(manifest, "text == 'x' and id > 20", connect=store.connect, **given)
    assert found == expected
    assert 0 < len(store.names) < 12


def test_progress_is_told_up_to_the_end(dataset: Path) -> None:
    told: list[IndexProgress] = []
    counts(index_dataset(dataset), "id > 5", progress=told.append)
    assert [one.shards_done for one in told] == list(range(13))
    assert told[-1].bytes_done == told[-1].bytes_total


def test_blocks_that_statistics_decide_are_not_read(tmp_path: Path) -> None:
    table = pa.table({"id": range(4000), "wide": [os.urandom(1000) for _ in range(4000)]})
    (tmp_path / "0.parquet").write_bytes(parquet_bytes(table, row_group_size=1000))
    manifest, read = index_dataset(tmp_path), list[tuple[int, int]]()

    def noting(shard: StoredShard, order: tasks.CountRows, size: int) -> Int64:
        inner = shard.store.read

        class Noted:
            def read(self, url: str, offset: int, length: int, etag: str) -> Any:
                read.append((offset, length))
                return inner(url, offset, length, etag)

        return here(StoredShard(shard.listed, Noted(), shard.stop), order, size)  # type: ignore[arg-type]

    footer = manifest.shards.preamble(0)
    assert counts(manifest, "id >= 2000", count_rows=noting) == [0, 0, 1000, 1000]
    assert read == [(footer.offset, footer.length)]
    read.clear()
    assert counts(manifest, "id >= 2500 or id is null", count_rows=noting) == [0, 0, 500, 1000]
    blocks = [(at, at + n) for at, n in read if at != footer.offset]
    assert blocks
    third = manifest.block_offset[2], manifest.block_offset[3]
    assert all(third[0] <= start < end <= third[1] for start, end in blocks)
    assert sum(end - start for start, end in blocks) < manifest.block_length[2] / 4


def test_shares_are_counted_with_the_condition(dataset: Path, cache: Path) -> None:
    manifest = index_dataset(dataset)
    half = [View(where="id < 100", split_to=1 << 31),
            View(where="id < 100", split_from=1 << 31, split_to=1 << 32)]  # fmt: skip
    parts = [viewed(manifest, view, connect, config(cache)) for view in half]
    assert sum(part.sample_count for part in parts) == 100
    assert all(part.sample_count for part in parts)
    limited = viewed(manifest, structs.replace(half[0], limit=7), connect, config(cache))
    assert limited.sample_count == 7
    assert (
        limited.block_rows.tolist()[:-1] == parts[0].block_rows.tolist()[: limited.block_count - 1]
    )


def test_a_damaged_block_is_told_of(tmp_path: Path, cache: Path) -> None:
    content = bytearray(parquet_bytes(pa.table({"s": ["abc", "d"] * 50}), row_group_size=50))
    (tmp_path / "0.parquet").write_bytes(content)
    manifest = index_dataset(tmp_path)
    place = manifest.block_offset.item(1)
    content[place : place + 64] = b"\xff" * 64
    stat = (tmp_path / "0.parquet").stat()
    (tmp_path / "0.parquet").write_bytes(content)
    os.utime(tmp_path / "0.parquet", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(CorruptShard, match=r"0\.parquet"):
        viewed(manifest, View(where="s == 'abc'"), connect, config(cache))


def test_counts_of_shares_of_a_very_large_dataset_are_kept(
    dataset: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.index.counting._ROWS_CACHED", 100)
    manifest, view = index_dataset(dataset), View(sample=1 << 30)
    first = viewed(manifest, view, connect, config(cache))
    (kept,) = (cache / "counts").rglob("*.counts")
    written = kept.stat().st_mtime_ns
    again = viewed(manifest, structs.replace(view, limit=3), connect, config(cache))
    assert again.block_rows[0] == first.block_rows[0]
    assert kept.stat().st_mtime_ns == written
    kept.write_bytes(kept.read_bytes()[:-1])
    assert viewed(manifest, view, connect, config(cache)) == first, "a damaged file is made again"


def test_a_column_that_takes_too_much_memory_harms_no_one_else(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    small = pa.table({"text": ["ab", "abc"] * 20})
    large = pa.table({"text": pa.array(["x" * 800_000]).dictionary_encode().take([0] * 300)})
    (folder / "0.parquet").write_bytes(parquet_bytes(small))
    (folder / "1.parquet").write_bytes(parquet_bytes(large.cast(small.schema)))
    limit = WorkerBytes(256 << 20, 256 << 20)
    with IndexProcesses(limit, 60.0, 1) as processes:
        manifest = index_dataset(folder, index_shard=processes.index)
        with pytest.raises(BudgetTooSmall, match=r"1\.parquet.*counting its rows"):
            counts(manifest, "length(text) > 2", count_rows=processes.count)
        one = index_dataset(folder / "0.parquet", index_shard=processes.index)
        assert counts(one, "length(text) > 2", count_rows=processes.count) == [20]


def test_the_footer_of_a_shard_in_a_store_is_read_once() -> None:
    table = pa.table({"id": range(800)})
    files, store = fsspec.filesystem("memory"), Counted()
    files.pipe_file("/counted/0.parquet", parquet_bytes(table, row_group_size=10))
    manifest = index_dataset("memory://counted/0.parquet")
    assert manifest.block_count == 80
    with IndexProcesses(WorkerBytes(256 << 20, 256 << 20), 60.0, 2) as processes:
        given = {"connect": store.connect, "count_rows": processes.count}
        assert sum(counts(manifest, "id >= 400", **given)) == 400
    assert store.read_urls == ["memory://counted/0.parquet"]
    files.rm("/counted", recursive=True)
