"""Urls whose query opens them: presigned ones, and those with a token."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from dataplane_torch import DataLoader
from fake_clock import Time
from signed_server import SignedServer, signed_server

from dataplane.model.errors import DataplaneError, DatasetChangedError, ShardNotFound, StoreDenied
from dataplane.store.connect import Stores
from dataplane.store.expand import expand

SECRET = "5ec2e75ec2e7"
BODY = (bytes(range(251)) * 12_000)[:400_000]


@pytest.fixture
def server() -> Iterator[SignedServer]:
    with signed_server() as made:
        yield made


@pytest.fixture
def stores() -> Iterator[Stores]:
    made = Stores(clock=Time().clock())
    yield made
    made.close()


def test_a_loader_reads_shards_that_only_their_own_queries_open(
    server: SignedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CACHE_DIR", "STATE_DIR"):
        monkeypatch.setenv(f"DATAPLANE_{name}", str(tmp_path / name))
    monkeypatch.setenv("DATAPLANE_WORKER_COUNT", "1")
    monkeypatch.setenv("DATAPLANE_LINGER_S", "0.2")
    urls = [
        server.add(f"/{name}.jsonl?token={name}{SECRET}", _lines(range(first, first + 20)))
        for name, first in (("a", 0), ("b", 20))
    ]

    # Together, so that one node serves both.
    with DataLoader(urls, batch_size=4) as both, DataLoader(urls[0], batch_size=4) as single:
        for loader, count in ((both, 40), (single, 20)):
            ids = sorted(number for batch in loader for number in batch["id"].tolist())
            assert ids == list(range(count))
    assert {method for method, _ in server.seen} == {"GET"}


@pytest.mark.parametrize(
    "query",
    [
        f"X-Amz-Credential=A%2F20260101%2Fus-east-1&X-Amz-Signature={SECRET}",
        f"token={SECRET}+/a==",
        f"token={SECRET}/",
        f"token=*{SECRET}[1]",
        f"id=%7e&empty=&flag&token={SECRET}~%2B%20",
    ],
)
def test_a_query_is_sent_unchanged(server: SignedServer, stores: Stores, query: str) -> None:
    url = server.add(f"/folder/a%20b.bin?{query}", BODY)

    (info,) = expand(url, stores.connect)
    store = stores.connect(url)
    into = memoryview(bytearray(len(BODY)))
    store.read_into(url, 0, info.etag, into)

    assert (info.url, info.size_bytes) == (url, len(BODY))
    assert bytes(store.read(url, 7, 9, info.etag)) == BODY[7:16]
    assert bytes(into) == BODY
    assert set(server.seen) == {("GET", f"/folder/a%20b.bin?{query}")}


def test_an_empty_object_behind_a_query_has_no_bytes(server: SignedServer, stores: Stores) -> None:
    url = server.add("/empty.bin?token=x", b"")

    (info,) = expand(url, stores.connect)

    assert info.size_bytes == 0
    assert bytes(stores.connect(url).read(url, 0, 0, info.etag)) == b""


def test_a_changed_object_behind_a_query_is_refused(server: SignedServer, stores: Stores) -> None:
    url = server.add("/a.bin?token=x", BODY)
    (info,) = expand(url, stores.connect)
    server.add("/a.bin?token=x", BODY[::-1])

    with pytest.raises(DatasetChangedError, match="changed since"):
        stores.connect(url).read(url, 0, 10, info.etag)
    with pytest.raises(DatasetChangedError, match="changed since"):
        stores.connect(url).read_into(url, 0, info.etag, memoryview(bytearray(10)))


def test_no_error_shows_the_query_that_opens_a_url(
    server: SignedServer, stores: Stores, port_of_nobody: int
) -> None:
    server.add("/a.bin?token=right", BODY)
    cases: list[tuple[str, type[DataplaneError], str]] = [
        (f"{server.endpoint}/a.bin?token={SECRET}", StoreDenied, "has not expired"),
        (f"{server.endpoint}/b.bin?token={SECRET}", ShardNotFound, "no object"),
        (f"http://127.0.0.1:{port_of_nobody}/a.bin?token={SECRET}", DataplaneError, "refused"),
    ]

    for url, error, says in cases:
        with pytest.raises(error, match=says) as raised:
            expand(url, stores.connect)
        assert SECRET not in "".join(traceback.format_exception(raised.value))
        assert SECRET not in repr(raised.value.nouns)


def _lines(ids: range) -> bytes:
    return b"".join(json.dumps({"id": number}).encode() + b"\n" for number in ids)
