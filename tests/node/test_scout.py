"""What is asked of a store while a node starts, and what becomes of it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from away import Away, Proxy
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from servers import S3Server
from shards import arrow_bytes

from dataplane.errors import StoreError
from dataplane.formats import registry
from dataplane.formats.first_reads import first_reads
from dataplane.index.indexing import index_dataset
from dataplane.model import ObjectInfo
from dataplane.node import scout as scouts
from dataplane.node.early import EarlyOpening
from dataplane.rpc.messages import DatasetSource
from dataplane.settings import default_node_config
from dataplane.store.ahead import Answered, AskedAhead, EarlyAnswers, Known
from dataplane.store.base import Store
from dataplane.worker.forking import fork_server

SCOUT = """
import json, sys, time
from dataplane.node.scout import scout
sent = scout(tuple(sys.argv[2:]))
began = time.monotonic()
found = None if sent is None else sent.answers(float(sys.argv[1]))
told = None if found is None else [sorted(found.lists), len(found.reads)]
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


def sent(*urls: str, patience_s: float = 30.0) -> dict[str, Any]:
    """In a process with one thread, as a node is when it starts."""
    command = [sys.executable, "-c", SCOUT, str(patience_s), *urls]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_a_scout_lists_a_dataset_and_reads_its_shards_before_anything_heavy_is_imported(
    stored: tuple[Proxy, str],
) -> None:
    _, url = stored
    assert sent(url) == {"sent": True, "found": [[url], 3], "heavy": []}


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


def test_a_node_opens_a_dataset_with_what_its_scout_has_found(
    stored: tuple[Proxy, str], tmp_path: Path
) -> None:
    proxy, url = stored
    whole = index_dataset(url)
    answers = scouts._asked((url,))
    proxy.be(Away.REFUSED)

    class Sent:
        """It has ended."""

        def answers(self, _patience_s: float) -> EarlyAnswers:
            return answers

    settings = structs.replace(
        default_node_config(), cache_dir=str(tmp_path), embedded=True, stall_timeout_s=1.0
    )
    with fork_server.held():
        early = EarlyOpening(settings, DatasetSource((url,)), Sent())  # type: ignore[arg-type]
        opened = early.take(DatasetSource((url,)))
        assert opened is not None
        assert opened.result(60).to_bytes() == whole.to_bytes()
        for thread in threading.enumerate():
            if thread.name == "dataplane-early":
                thread.join(60)
        early.stores.stores.close()


def test_the_first_bytes_of_only_some_shards_are_read(
    stored: tuple[Proxy, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, url = stored
    monkeypatch.setattr(scouts, "_SHARDS_MAX", 2)
    found = scouts._asked((f"{url}*.arrow",))
    assert len(found.lists[url]) == 3
    assert {one[0] for one in found.reads} == {f"{url}0.arrow", f"{url}1.arrow"}


@given(st.integers(1, 1 << 40), st.sampled_from(("arrow", "parquet")))
def test_what_is_read_ahead_is_what_indexing_asks_for_first(size: int, name: str) -> None:
    format_: Any = registry.by_name(name)
    assert first_reads(f"s3://b/x.{name}", size) == format_.first_reads(size)
    assert first_reads("s3://b/x.tar", size) == first_reads("s3://b/x", size) == ()


class Counted:
    """A store of made-up objects, which counts what it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.asked += 1
        return iter([ObjectInfo(f"{prefix}{n}", 100 + n, f"e{n}") for n in range(3)])

    def head(self, url: str) -> ObjectInfo:
        self.asked += 1
        if "missing" in url:
            raise StoreError("no such object", shard=url)
        return ObjectInfo(url, 7, "e")

    def read(self, url: str, offset: int, length: int, etag: str) -> bytes:
        self.asked += 1
        return f"{url} {offset} {etag}".encode().ljust(length)[:length]

    def stream(self, url: str, _etag: str) -> Iterator[bytes]:
        self.asked += 1
        yield url.encode()


CALLS = st.one_of(
    st.tuples(st.just("list"), st.sampled_from(("s3://b/", "s3://c/"))),
    st.tuples(st.just("head"), st.sampled_from(("s3://b/0", "s3://b/missing"))),
    st.tuples(
        st.just("read"),
        st.sampled_from(("s3://b/0", "s3://b/1")),
        st.integers(0, 2),
        st.integers(1, 40),
        st.sampled_from(("e0", "e1")),
    ),
    st.tuples(st.just("stream"), st.just("s3://b/0"), st.just("e0")),
)


@given(st.lists(CALLS, max_size=12), st.lists(CALLS, max_size=12))
def test_a_store_with_answers_says_what_the_store_says(before: list[Any], later: list[Any]) -> None:
    def said(store: Store, call: Any) -> object:
        name, *arguments = call
        try:
            found = getattr(store, name)(*arguments)
        except StoreError as error:
            return str(error)
        return list(found) if name in {"list", "stream"} else found

    answers, inner = EarlyAnswers(), Counted()
    ahead = AskedAhead(Counted(), answers)
    for call in before:
        assert said(ahead, call) == said(Counted(), call)
    answered = Answered(inner, Known(answers))
    assert [said(answered, call) for call in later] == [said(Counted(), call) for call in later]
    known = {tuple(call) for call in before if call[0] != "stream" and "missing" not in call[1]}
    assert inner.asked == len(later) - len(known & {tuple(call) for call in later})
