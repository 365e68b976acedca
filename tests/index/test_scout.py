"""What is asked of a store while a node starts, and what becomes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from away import Away, Proxy
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from servers import S3Server
from shards import arrow_bytes, parquet_bytes

from dataplane.base import machine
from dataplane.formats import registry
from dataplane.formats.first_reads import PROBE_BYTES, first_reads
from dataplane.index import scout as scouts
from dataplane.index.indexing import index_dataset, open_manifest
from dataplane.index.scout import Scouted
from dataplane.model.errors import CorruptShard
from dataplane.rpc.messages import DatasetSource
from dataplane.settings import default_node_config
from dataplane.store.connect import Stores, open_store
from dataplane.store.urls import base_of

SCOUT = """
import json, sys, time
from dataplane.index.scout import scout
sent = scout((sys.argv[2],))
began = time.monotonic()
found = None if sent is None else sent.result(float(sys.argv[1]))
told = None if found is None else [[one[0] for one in found.listed], len(found.parts)]
heavy = [name for name in ("numpy", "pyarrow", "asyncio") if name in sys.modules]
print(json.dumps({"sent": sent is not None, "found": told, "heavy": heavy}))
"""


@pytest.fixture
def stored(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Proxy, str]]:
    bucket = s3_server.bucket()
    shards = {f"{n}.arrow": arrow_bytes(pa.table({"id": range(n, n + 5)})) for n in range(3)}
    s3_server.put(bucket, shards)
    proxy = Proxy(s3_server.server.port)
    for name, value in (s3_server.environment() | {"AWS_ENDPOINT_URL": proxy.endpoint}).items():
        monkeypatch.setenv(name, value)
    yield proxy, f"s3://{bucket}/"
    proxy.close()


def sent(url: str, patience_s: float = 30.0) -> dict[str, Any]:
    """Send a scout from a process with one thread, as a node is when it starts."""
    command = [sys.executable, "-c", SCOUT, str(patience_s), url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_a_scout_lists_a_dataset_and_reads_its_shards_before_anything_heavy_is_imported(
    stored: tuple[Proxy, str],
) -> None:
    _, url = stored
    shards = [f"{url}{n}.arrow" for n in range(3)]
    assert sent(url) == {"sent": True, "found": [shards, 3], "heavy": []}


def test_a_scout_is_not_sent_for_files_and_finds_nothing_where_there_is_nothing(
    stored: tuple[Proxy, str], tmp_path: Path
) -> None:
    _, url = stored
    nothing = {"sent": False, "found": None, "heavy": []}
    assert sent(str(tmp_path)) == sent("s3:/b/typo") == nothing
    assert sent(f"{url}none/") == {**nothing, "sent": True}


@pytest.mark.parametrize("way", [Away.HANG, Away.REFUSED, Away.UNAVAILABLE, Away.RESET])
def test_a_scout_that_gets_no_answer_is_given_up_and_gone(
    way: Away, stored: tuple[Proxy, str]
) -> None:
    proxy, url = stored
    proxy.be(way)
    assert sent(url, patience_s=0.3) == {"sent": True, "found": None, "heavy": []}


def found(*urls: str) -> Scouted:
    with ThreadPoolExecutor(4) as threads:
        return scouts._scouted(urls, lambda url: open_store(base_of(url), 5.0), threads)


def test_a_saved_manifest_is_read_by_the_scout(
    s3_server: S3Server, stored: tuple[Proxy, str]
) -> None:
    _, url = stored
    bucket = s3_server.bucket()
    content = index_dataset(url).to_bytes()
    s3_server.put(bucket, {"a.manifest": content})
    assert found(f"s3://{bucket}/a.manifest") == Scouted([], [], content)


def test_the_first_bytes_of_only_some_shards_are_read(
    stored: tuple[Proxy, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, url = stored
    monkeypatch.setattr(scouts, "_SHARDS_MAX", 2)
    seen = found(f"{url}*.arrow")
    assert [one[0] for one in seen.listed] == [f"{url}{n}.arrow" for n in range(3)]
    assert [url for url, _, _ in seen.parts] == [one[0] for one in seen.listed[:2]]


def opened(scouted: Scouted | None, url: str, cache: Path) -> tuple[bytes, set[str]]:
    """The manifest that a node makes, and the names of the shards whose preambles it keeps."""
    config = structs.replace(default_node_config(), cache_dir=str(cache), embedded=True)
    stores, kept = Stores(2.0, is_settled=True), set[str]()

    def keep(url: str, *_: object) -> None:
        kept.add(url.rpartition("/")[2])

    try:
        found = open_manifest(config, stores, DatasetSource((url,)), keep=keep, scouted=scouted)
    finally:
        stores.close()
    return found.to_bytes(), kept


def test_what_was_scouted_is_not_asked_for_again(stored: tuple[Proxy, str], tmp_path: Path) -> None:
    proxy, url = stored
    whole, scouted = index_dataset(url).to_bytes(), found(url)
    proxy.be(Away.REFUSED)
    names = {f"{n}.arrow" for n in range(3)}
    assert opened(scouted, url, tmp_path) == (whole, names)
    listed_only = Scouted(scouted.listed, [])
    assert opened(listed_only, url, tmp_path) == (whole, set())  # the first run kept its indexes


def test_the_node_reads_what_the_scout_has_not(s3_server: S3Server, tmp_path: Path) -> None:
    bucket, wide = s3_server.bucket(), pa.table({f"column {n:05}": [n] for n in range(2000)})
    s3_server.put(bucket, {"0.parquet": parquet_bytes(wide), "1.parquet": parquet_bytes(wide)})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.environment().items():
            patch.setenv(name, value)
        url = f"s3://{bucket}/"
        whole, scouted = index_dataset(url).to_bytes(), found(url)
        assert {len(part) for *_, part in scouted.parts} == {PROBE_BYTES}  # not the whole footer
        assert opened(scouted, url, tmp_path)[0] == whole
        s3_server.put(bucket, {"1.parquet": b"PAR1" + bytes(200) + b"PAR1"})
        with pytest.raises(CorruptShard, match=r"1\.parquet"):
            opened(found(url), url, tmp_path)


@given(st.integers(1, 1 << 40), st.sampled_from(("arrow", "parquet")))
def test_what_is_read_ahead_is_what_indexing_asks_for_first(size: int, name: str) -> None:
    format_: Any = registry.by_name(name)
    assert first_reads(f"s3://b/x.{name}", size) == format_.first_reads(size)
    assert first_reads("s3://b/x.tar", size) == first_reads("s3://b/x", size) == ()


def test_a_child_is_ended_and_one_that_the_kernel_holds_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scouts, "_END_S", 0.05)
    with subprocess.Popen(["sleep", "600"]) as held:
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda *_: None)  # as if it waited for a disk that is gone
            scouts.end_child(held.pid)
        assert not machine.has_ended(held.pid)
        monkeypatch.setattr(scouts, "_END_S", 30.0)
        scouts.end_child(held.pid)
        with pytest.raises(ProcessLookupError):
            os.kill(held.pid, 0)
        scouts.end_child(held.pid)  # it is gone
