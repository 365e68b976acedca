"""Indexing a dataset gives the same manifest in every way, and does no work twice."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from counted import Counted
from msgspec.structs import replace
from shards import arrow_bytes, json_lines, parquet_bytes, tar_bytes, zipped

from dataplane.coordinator.refusals import check_work
from dataplane.formats import registry
from dataplane.formats.unsupported import Difference, differing, refuse_differing
from dataplane.index import indexing, journal
from dataplane.index.indexing import LongWork, all_work, index_dataset, work_on
from dataplane.index.run import IndexProgress
from dataplane.model.errors import (
    ConfigError,
    CorruptShard,
    DatasetChangedError,
    SchemaMismatch,
    ShardNotFound,
)
from dataplane.model.records import ObjectInfo, View
from dataplane.node.manifests import ManifestSources
from dataplane.plan.manifest import Manifest
from dataplane.rpc.messages import DatasetSource
from dataplane.rpc.sharing import NodeWork
from dataplane.settings import default_node_config
from dataplane.store.connect import Stores


def test_the_manifest_lists_shards_in_order_with_their_blocks(dataset: Path) -> None:
    manifest = index_dataset(dataset)
    assert [s.url.rpartition("/")[2] for s in manifest.shards] == [
        f"{i:03d}.parquet" for i in range(12)
    ]
    assert manifest.format == "parquet"
    assert manifest.block_rows.tolist() == [4, 4, 2] * 12
    assert manifest.sample_count == 120
    assert pa.ipc.read_schema(pa.py_buffer(manifest.schema)).names == ["id", "text"]


@pytest.mark.parametrize("workers", [1, 3, 16])
def test_the_manifest_does_not_depend_on_workers_or_memory(
    dataset: Path, cache: Path, workers: int
) -> None:
    first = index_dataset(dataset, cache_dir=str(cache), workers=workers)
    again = index_dataset(dataset, cache_dir=str(cache), workers=workers)
    assert first == again == index_dataset(dataset)
    assert again.to_bytes() == first.to_bytes()


def test_a_name_with_the_marks_of_a_web_url_is_a_shard_like_any_other(tmp_path: Path) -> None:
    names = ["part#1.parquet", "part-0.parquet", "part?2.parquet"]
    for name in names:
        (tmp_path / name).write_bytes(parquet_bytes(pa.table({"id": range(5)})))
    for asked in (str(tmp_path), f"{tmp_path}/*.parquet", [str(tmp_path / "part#1.parquet")]):
        found = [s.url.rpartition("/")[2] for s in index_dataset(asked).shards]
        assert found == (names if isinstance(asked, str) else names[:1])


def test_a_warm_call_reads_no_shard(dataset: Path, cache: Path) -> None:
    index_dataset(dataset, cache_dir=str(cache))
    counted = Counted()
    index_dataset(dataset, cache_dir=str(cache), connect=counted.connect)
    assert counted.read_urls == []


def test_only_the_changed_shard_is_indexed_again(dataset: Path, cache: Path) -> None:
    before = index_dataset(dataset, cache_dir=str(cache))
    table = pa.table({"id": range(5), "text": ["y"] * 5})
    (dataset / "004.parquet").write_bytes(parquet_bytes(table))
    counted = Counted()
    after = index_dataset(dataset, cache_dir=str(cache), connect=counted.connect)
    assert counted.names == {"004.parquet"}
    assert after.sample_count == before.sample_count - 5
    assert after == index_dataset(dataset)


def test_added_and_removed_shards_cost_only_themselves(dataset: Path, cache: Path) -> None:
    index_dataset(dataset, cache_dir=str(cache))
    (dataset / "000.parquet").rename(dataset / "900.parquet")
    (dataset / "001.parquet").unlink()
    counted = Counted()
    after = index_dataset(dataset, cache_dir=str(cache), connect=counted.connect)
    assert counted.names == {"900.parquet"}
    assert after == index_dataset(dataset)


def test_a_failure_keeps_what_was_indexed(dataset: Path, cache: Path) -> None:
    sound = (dataset / "011.parquet").read_bytes()
    (dataset / "011.parquet").write_bytes(sound[:-10])
    with pytest.raises(CorruptShard, match=r"011\.parquet.*truncated"):
        index_dataset(dataset, cache_dir=str(cache), workers=1)
    (dataset / "011.parquet").write_bytes(sound)
    counted = Counted()
    manifest = index_dataset(dataset, cache_dir=str(cache), connect=counted.connect)
    assert counted.names == {"011.parquet"}
    assert manifest == index_dataset(dataset)


def test_a_torn_log_is_read_up_to_the_tear(dataset: Path, cache: Path) -> None:
    sound = (dataset / "011.parquet").read_bytes()
    (dataset / "011.parquet").write_bytes(sound[:-10])
    with pytest.raises(CorruptShard):
        index_dataset(dataset, cache_dir=str(cache), workers=1)
    (dataset / "011.parquet").write_bytes(sound)
    [log] = cache.rglob("run-*.log")
    content = log.read_bytes()
    for end in (0, 1, 7, len(content) // 2, len(content) - 1):
        log.write_bytes(content[:end])
        assert len(journal.decode_indexes(content[:end])) < 11
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 1
    log.write_bytes(damaged)
    assert index_dataset(dataset, cache_dir=str(cache)) == index_dataset(dataset)


def test_a_damaged_manifest_in_the_cache_is_made_again(dataset: Path, cache: Path) -> None:
    manifest = index_dataset(dataset, cache_dir=str(cache))
    [path] = cache.rglob("*.manifest")
    path.write_bytes(path.read_bytes()[:-1])
    assert index_dataset(dataset, cache_dir=str(cache)) == manifest
    assert Manifest.from_bytes(path.read_bytes()) == manifest


def test_the_cache_holds_one_log_and_a_few_manifests(dataset: Path, cache: Path) -> None:
    for i in range(1, 9):
        table = pa.table({"id": range(i), "text": ["y"] * i})
        (dataset / "004.parquet").write_bytes(parquet_bytes(table))
        index_dataset(dataset, cache_dir=str(cache))
    assert len(list(cache.rglob("*.log"))) == 1
    assert len(list(cache.rglob("*.manifest"))) <= journal.MANIFESTS_KEPT


def test_file_systems_without_nameless_files_work_too(
    dataset: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "publish", journal._publish_named)
    manifest = index_dataset(dataset, cache_dir=str(cache))
    assert index_dataset(dataset, cache_dir=str(cache)) == manifest
    assert [path.name for path in cache.rglob(".*")] == []


def test_what_a_killed_publisher_left_is_swept(
    dataset: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_dataset(dataset, cache_dir=str(cache))
    [manifest] = cache.rglob("*.manifest")
    left = manifest.parent / ".x.manifest.00.tmp"
    left.write_bytes(b"half")
    index_dataset(dataset, cache_dir=str(cache))
    assert left.exists()
    monkeypatch.setattr(journal, "STALE_S", -1.0)
    index_dataset(dataset, cache_dir=str(cache))
    assert not left.exists()


def test_progress_is_reported_in_the_callers_thread_and_only_grows(dataset: Path) -> None:
    seen: list[tuple[threading.Thread, IndexProgress]] = []
    index_dataset(dataset, progress=lambda p: seen.append((threading.current_thread(), p)))
    assert {thread for thread, _ in seen} == {threading.current_thread()}
    done = [progress.shards_done for _, progress in seen]
    assert done == list(range(13))
    last = seen[-1][1]
    assert (last.shard_count, last.shards_done) == (12, 12)
    assert last.bytes_done == last.bytes_total


# --- what a user can get wrong ----------------------------------------------------------------


def schema_of(manifest: Manifest) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(manifest.schema))


@pytest.mark.parametrize(
    ("table", "field", "words"),
    [
        ({"id": ["1"], "text": ["x"]}, "id", r"000\.parquet has int64, this shard has string"),
        ({"id": [1]}, "text", r"000\.parquet has string, this shard has no such column"),
        ({"id": [1], "text": ["x"], "z": [1]}, "z", r"000\.\S+ has no such column, .* has int64"),
    ],
)
def test_a_column_that_differs_is_refused_if_it_is_read(
    dataset: Path, table: dict[str, list], field: str, words: str
) -> None:
    (dataset / "007.parquet").write_bytes(parquet_bytes(pa.table(table)))
    manifest = index_dataset(dataset)
    schema, urls = schema_of(manifest), manifest.shards.urls
    others = [name for name in schema.names if name != field]
    refuse_differing(schema, others, urls.__getitem__)
    with pytest.raises(SchemaMismatch, match=words) as caught:
        refuse_differing(schema, [*others, field], urls.__getitem__)
    assert str(caught.value.shard).endswith("007.parquet")
    assert caught.value.field == field
    assert f"select the others with columns=[…]: {', '.join(others)}" in str(caught.value)


def test_shards_that_share_no_column_are_refused(dataset: Path) -> None:
    table = pa.table({"id": ["1"], "text": [1]})
    (dataset / "007.parquet").write_bytes(parquet_bytes(table))
    words = r"007\.parquet: column 'id': \S+/000\.parquet has int64, this shard has string"
    with pytest.raises(SchemaMismatch, match=words) as caught:
        index_dataset(dataset)
    assert str(caught.value.shard).endswith("007.parquet")


def test_metadata_nullability_and_order_may_differ(dataset: Path) -> None:
    schema = pa.schema(
        [pa.field("text", pa.string()), pa.field("id", pa.int64(), nullable=False)],
        metadata={"by": "another tool"},
    )
    table = pa.table({"text": ["x"], "id": [1]}, schema=schema)
    (dataset / "007.parquet").write_bytes(parquet_bytes(table))
    assert index_dataset(dataset).sample_count == 111


def test_inferred_schemas_are_refused_only_where_they_contradict(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_bytes(json_lines([{"x": 1.5, "y": None}]))
    (tmp_path / "1.jsonl").write_bytes(json_lines([{"x": 1}]))
    assert index_dataset(tmp_path).sample_count == 2
    (tmp_path / "2.jsonl").write_bytes(json_lines([{"x": "text"}]))
    schema = schema_of(index_dataset(tmp_path))
    assert [differing(field) for field in schema] == [
        Difference((0, 2), ("double", "string")),
        None,
    ]
    (tmp_path / "2.jsonl").write_bytes(json_lines([{"z": 1}]))
    assert schema_of(index_dataset(tmp_path)).names == ["x", "y", "z"]


def test_a_first_shard_without_samples_sets_no_schema(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_bytes(b"\n\n")
    (tmp_path / "1.jsonl").write_bytes(json_lines([{"x": 1}]))
    manifest = index_dataset(tmp_path)
    assert pa.ipc.read_schema(pa.py_buffer(manifest.schema)).names == ["x"]


def test_an_empty_shard_and_an_empty_dataset_are_refused(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_bytes(b"\n")
    with pytest.raises(ConfigError, match=r"no samples: no rows in file://.*/0\.jsonl\. Add"):
        index_dataset(tmp_path)
    (tmp_path / "0.jsonl").write_bytes(b"")
    with pytest.raises(CorruptShard, match=r"0\.jsonl: byte 0: the shard is empty"):
        index_dataset(tmp_path)
    with pytest.raises(ShardNotFound):
        index_dataset(tmp_path / "missing")


def test_other_files_of_a_folder_are_no_shards(dataset: Path) -> None:
    (dataset / "README.md").write_text("read me")
    (dataset / "state.json").write_text(json.dumps({}))
    assert len(index_dataset(dataset).shards) == 12
    with pytest.raises(ConfigError, match=r"README\.md: this is not a shard, but 000\.parquet"):
        index_dataset([dataset / "000.parquet", dataset / "README.md"])


def test_several_formats_or_none_are_refused(dataset: Path, tmp_path: Path) -> None:
    (dataset / "a.tar").write_bytes(tar_bytes([("a.txt", b"x")]))
    with pytest.raises(ConfigError, match="several formats"):
        index_dataset(dataset)
    assert index_dataset(dataset, format_name="tar").sample_count == 1
    with pytest.raises(ConfigError, match="no format is named 'lance'"):
        index_dataset(dataset, format_name="lance")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"notes\.txt.*in an unsupported format"):
        index_dataset(tmp_path / "empty")
    (tmp_path / "images" / "n01").mkdir(parents=True)
    (tmp_path / "images" / "n01" / "a.gif").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"a\.gif.*convert them to JPEG"):
        index_dataset(tmp_path / "images")


def test_a_named_format_reads_files_without_an_ending(tmp_path: Path) -> None:
    for i in range(2):
        (tmp_path / f"part-{i:05d}-of-00002").write_bytes(zipped(json_lines([{"x": i}])))
    assert index_dataset(tmp_path, format_name="jsonl").sample_count == 2


def test_a_cache_folder_that_cannot_be_used_is_named(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match=r"cache folder .* cannot be used.*DATAPLANE_CACHE_DIR"):
        index_dataset(dataset, cache_dir=str(tmp_path / "file"))


class Rewriting(Counted):
    """Replaces a shard after it was listed, before it is read."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def note(self, url: str) -> None:
        if url.endswith(self._path.name) and not self.read_urls:
            super().note(url)
            self._path.write_bytes(parquet_bytes(pa.table({"id": [7], "text": ["z"]})))


def test_a_shard_that_changes_while_it_is_indexed_is_an_error(dataset: Path) -> None:
    rewriting = Rewriting(dataset / "005.parquet")
    with pytest.raises(DatasetChangedError, match=r"005\.parquet"):
        index_dataset(dataset, connect=rewriting.connect)


# --- saved manifests --------------------------------------------------------------------------


def test_a_saved_manifest_stands_for_its_dataset(dataset: Path, tmp_path: Path) -> None:
    manifest = index_dataset(dataset)
    saved = tmp_path / "tokens.manifest"
    saved.write_bytes(manifest.to_bytes())
    counted = Counted()
    assert index_dataset(saved, connect=counted.connect) == manifest
    assert counted.names == {"tokens.manifest"}
    assert index_dataset(str(dataset)) == manifest
    with pytest.raises(ConfigError, match="pass only it"):
        index_dataset([saved, dataset])
    saved.write_bytes(saved.read_bytes()[:-3])
    with pytest.raises(CorruptShard, match=r"tokens\.manifest"):
        index_dataset(saved)


def test_formats_of_every_kind_make_manifests(tmp_path: Path) -> None:
    table = pa.table({"id": range(10)})
    (tmp_path / "x.arrow").write_bytes(arrow_bytes(table))
    manifest = index_dataset(tmp_path)
    assert manifest.shards[0].zero_copy
    assert registry.by_name(manifest.format).name == "arrow"


@pytest.mark.parametrize("count", [0, 1, 4096, 4097])
def test_a_listing_is_remembered_under_the_digest_of_its_shards(count: int) -> None:
    version = ("parquet", 3, 0)
    shards = [ObjectInfo(f's3://b/é"{at}', at, f'"{at}"') for at in range(count)]
    keys = journal.shard_keys(version, shards)
    digest = journal.digest
    assert keys == [digest(*version, s.url, s.size_bytes, s.etag) for s in shards]
    assert journal.listing_key(version, keys) == digest(*version, *keys)


# -- Who waits long for a dataset hears how far it is


def test_only_what_takes_long_is_told_and_not_too_often(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dataplane.node")
    now = [100.0]
    told = LongWork("indexing", ["s3://bucket/a/"], "shards", "index once", lambda: now[0])
    for shards in range(100):  # two seconds each
        told(IndexProgress(100_000, 1000 * shards, 0, 0))
        now[0] += 2.0
    lines = [one.getMessage() for one in caplog.records]
    begin = "still indexing dataset=s3://bucket/a/ shards="
    end = 'left_s=190 help="index once"'
    assert lines[0] == f'{begin}"5,000 of 100,000" elapsed_s=10 {end}'
    assert lines[1] == f'{begin}"10,000 of 100,000" elapsed_s=20 left_s=180'
    assert len(lines) == 19
    caplog.clear()


def test_a_node_tells_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dataplane.node")
    monkeypatch.setattr(indexing, "_LINES_S", 0.0)
    pq.write_table(pa.table({"id": range(100)}), tmp_path / "a.parquet")
    config = replace(default_node_config(), cache_dir="", embedded=True)
    opened = ManifestSources(config, Stores(), lambda *_: None).open
    source = DatasetSource((str(tmp_path / "a.parquet"),))
    assert opened(source, View(where="id > 9"), None).sample_count == 90
    lines = [one.getMessage() for one in caplog.records]
    assert any("still indexing" in line and "0 of 1" in line for line in lines)
    assert any("still counting rows" in line and "of 1" in line for line in lines)
    caplog.clear()


def test_what_is_under_way_is_listed_and_nothing_else() -> None:
    now = [100.0]
    with LongWork("counting packs", ["s3://b/a"], "blocks", clock=lambda: now[0]) as work:
        work.advance(10, 40)  # these were known before
        now[0] += 5.0
        work.advance(20, 40)
        known = NodeWork("counting packs", "s3://b/a", 20, 40, "blocks", 10.0)
        assert work_on({"s3://b/a", "s3://b/b"}) == known
        assert all_work() == [known]
        assert work_on({"s3://b/b"}) is None
        with contextlib.suppress(ValueError), LongWork("indexing", ["s3://b/a"], "shards"):
            assert work_on({"s3://b/a"}) == NodeWork("indexing", "s3://b/a", 0, 0, "shards")
            raise ValueError
        assert work_on({"s3://b/a"}) == known
    assert not all_work()


def test_the_coordinator_takes_the_work_on_datasets_with_long_urls() -> None:
    urls = [f"s3://bucket/{'folder/' * 30}{number}.parquet" for number in range(10)]
    check_work(LongWork("indexing", urls, "shards").now)


# -- Indexing by several processes at once, and by processes that are killed


RUN = textwrap.dedent(
    """
    import sys
    from dataplane.index.indexing import index_dataset

    def told(progress):
        print(progress.shards_done, flush=True)
        if progress.shards_done == int(sys.argv[3]):
            sys.stdin.read()

    print(index_dataset(sys.argv[1], cache_dir=sys.argv[2], progress=told).fingerprint)
    """
)


def test_threads_that_index_find_the_lazy_module_that_arrow_uses_imported() -> None:
    code = "import sys, dataplane.worker.indexing; sys.exit('numpy.ma' not in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def start(dataset: Path, cache: Path, stop_at: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(dataset), str(cache), str(stop_at)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read_until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    while process.stdout.readline().strip() != line:
        assert process.poll() is None


def test_two_processes_may_index_at_once(dataset: Path, cache: Path) -> None:
    first, second = start(dataset, cache, 5), start(dataset, cache, 5)
    for process in (first, second):
        read_until(process, "5")
    found = {process.communicate("")[0].split()[-1] for process in (first, second)}
    assert found == {index_dataset(dataset).fingerprint}
    assert first.returncode == second.returncode == 0
    assert index_dataset(dataset, cache_dir=str(cache)).fingerprint in found


def test_a_killed_run_is_resumed_and_leaves_no_temporary_file(dataset: Path, cache: Path) -> None:
    process = start(dataset, cache, 7)
    read_until(process, "7")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [path.suffix for path in cache.rglob("*.*")] == [".log"]
    counted = Counted()
    manifest = index_dataset(dataset, cache_dir=str(cache), connect=counted.connect)
    assert len(counted.names) <= 5
    assert manifest == index_dataset(dataset)
    assert sorted(path.suffix for path in cache.rglob("*.*")) == [".log", ".manifest"]
