"""Who waits long for a dataset hears how far it is."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from dataplane.coordinator.refusals import check_work
from dataplane.index import indexing
from dataplane.index.indexing import LongWork, all_work, work_on
from dataplane.index.run import IndexProgress
from dataplane.model.records import View
from dataplane.node.manifests import ManifestSources
from dataplane.rpc.messages import DatasetSource
from dataplane.rpc.sharing import NodeWork
from dataplane.settings import default_node_config
from dataplane.store.connect import Stores


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
