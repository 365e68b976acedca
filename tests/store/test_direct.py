"""Reads that go straight into memory, over connections of our own, from servers that misbehave."""

from __future__ import annotations

import gc
import http.client
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from awry import Awry, Mood, awry_server
from fake_clock import Time
from servers import reach

from dataplane.arena.memfd import Arena
from dataplane.model.errors import (
    DatasetChangedError,
    ShardNotFound,
    StoreDenied,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
    TruncatedRead,
)
from dataplane.store import connections
from dataplane.store.base import Filling, Store
from dataplane.store.connect import Stores, open_store
from dataplane.store.connections import Connections
from dataplane.store.reads import Race, raced

BODY = (bytes(range(251)) * 12_000)[:600_000]
URL = "s3://bucket/a folder/shard+1.bin"
LENGTH = 300_000
INTO = {"new": False}


@pytest.fixture(params=["mapped", "new"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of the test go into memory that is mapped, or into memory that the kernel allocates as
    it copies bytes there.
    """
    monkeypatch.setitem(INTO, "new", request.param == "new")


@pytest.fixture
def awry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Awry]:
    with awry_server({"bucket/a folder/shard+1.bin": BODY}) as server:
        reach(server, monkeypatch)
        yield server


def _fill(store: Store, etag: str, offset: int = 10, length: int = LENGTH) -> bytes:
    assert isinstance(store, Filling)
    if not INTO["new"]:
        into = bytearray(length)
        store.read_into(URL, offset, etag, memoryview(into))
        return bytes(into)
    return _fill_new(store, etag, offset, length, Arena.prepare)


def _fill_new(
    store: Store,
    etag: str,
    offset: int,
    length: int,
    prepare: Callable[[Arena, int, int], None],
) -> bytes:
    assert isinstance(store, Filling)
    arena = Arena.create("test", 4096 + length)
    try:
        make_ready = partial(prepare, arena, 4096, length)
        with arena.view(4096, length) as view, raced(Race(make_ready, arena.new_memory)):
            store.read_into(URL, offset, etag, view)
            assert not any(arena.view(0, 4096))
            return bytes(view)
    finally:
        arena.close()


@pytest.mark.usefixtures("memory")
def test_one_read_is_one_request_and_connections_are_used_again(awry: Awry) -> None:
    store = open_store("s3://bucket")
    etag = store.head(URL).etag
    awry.be()
    for _ in range(3):
        assert _fill(store, etag) == BODY[10 : 10 + LENGTH]
    assert awry.seen == [("GET", f"bytes=10-{9 + LENGTH}")] * 3
    assert len(awry.open) <= 2, "one of obstore's, one of ours"


def _unprepared(arena: Arena, offset: int, length: int) -> None:
    raise AssertionError(f"{length} bytes of new memory are mapped before they are filled")


@pytest.mark.parametrize("can_splice", [True, False])
def test_new_memory_is_filled_unmapped_also_where_the_kernel_cannot_splice(
    awry: Awry, monkeypatch: pytest.MonkeyPatch, can_splice: bool
) -> None:
    if not can_splice:
        monkeypatch.setattr("dataplane.store.connections.receive_into_file", lambda *_: 0)
    store = open_store("s3://bucket")
    etag = store.head(URL).etag
    awry.be()
    for length in (200_000, 260_000, LENGTH, len(BODY) - 10):
        assert _fill_new(store, etag, 10, length, _unprepared) == BODY[10 : 10 + length]
    assert len(awry.seen) == 4
    assert len(awry.open) <= 2, "connections are used again"


@pytest.mark.usefixtures("memory")
def test_an_object_that_is_stored_compressed_is_read_in_one_request(awry: Awry) -> None:
    store = open_store("s3://bucket")
    etag = store.head(URL).etag
    awry.altered = {"Content-Encoding": "gzip"}
    awry.be()
    assert _fill(store, etag) == BODY[10 : 10 + LENGTH]
    assert len(awry.seen) == 1


@pytest.mark.usefixtures("memory")
def test_a_range_that_the_server_compresses_is_not_taken_for_the_bytes(awry: Awry) -> None:
    store = open_store("s3://bucket")
    etag = store.head(URL).etag
    awry.altered = {"Content-Encoding": "gzip", "Content-Length": "5000"}
    with pytest.raises(TruncatedRead):
        _fill(store, etag)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("mood", "error", "asked"),
    [
        (Mood.SLOW_DOWN, StoreThrottled, 1),
        (Mood.TOO_MANY, StoreThrottled, 1),
        (Mood.INTERNAL, StoreUnavailable, 1),
        (Mood.LATE, StoreUnavailable, 1),
        (Mood.TRUNCATED, StoreUnavailable, 1),
        (Mood.RESET, StoreUnavailable, 1),
        # What these mean is asked of obstore.
        (Mood.DENIED, StoreDenied, 2),
        (Mood.NO_BUCKET, ShardNotFound, 2),
        (Mood.SHORT, TruncatedRead, 2),
        (Mood.WHOLE, StoreError, 2),
    ],
)
def test_each_failure_has_its_error(
    awry: Awry, mood: Mood, error: type[StoreError], asked: int
) -> None:
    store = open_store("s3://bucket")
    etag = store.head(URL).etag
    awry.be(then=mood)
    with pytest.raises(error) as raised:
        _fill(store, etag)
    assert type(raised.value) is error
    assert raised.value.shard == URL
    assert len(awry.seen) == asked
    awry.be()
    assert _fill(store, etag) == BODY[10 : 10 + LENGTH]


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("mood", "said"),
    [
        (Mood.HANG, "did not answer in time"),
        (Mood.STALL, "stopped in the middle of an answer"),
        (Mood.DRIP, "did not answer in time|stopped in the middle"),
        (Mood.DRIP_HEAD, "did not answer in time"),
    ],
)
def test_a_server_that_hangs_is_given_up(awry: Awry, mood: Mood, said: str) -> None:
    etag = open_store("s3://bucket").head(URL).etag
    store = open_store("s3://bucket", request_timeout_s=0.3)
    awry.be(mood)
    with pytest.raises(StoreUnavailable, match=said):
        _fill(store, etag)
    assert len(awry.seen) == 1


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    "mood",
    [Mood.SLOW_DOWN, Mood.INTERNAL, Mood.TRUNCATED, Mood.SHORT, Mood.RESET, Mood.WHOLE],
)
def test_a_passing_failure_is_survived(awry: Awry, mood: Mood) -> None:
    store = Stores(clock=Time().clock()).connect(URL)
    etag = store.head(URL).etag
    awry.be(mood)
    assert _fill(store, etag) == BODY[10 : 10 + LENGTH]
    assert len(awry.seen) == 2


@pytest.mark.usefixtures("memory")
def test_a_changed_object_is_refused_even_if_the_server_ignores_the_pin(awry: Awry) -> None:
    store = open_store("s3://bucket")
    old = store.head(URL).etag
    awry.objects["bucket/a folder/shard+1.bin"] = BODY[::-1]
    for mood in (Mood.WELL, Mood.UNPINNED):
        awry.be(then=mood)
        with pytest.raises(DatasetChangedError) as raised:
            _fill(store, old)
        assert raised.value.expected == old


@pytest.mark.usefixtures("memory")
def test_a_connection_that_the_server_closed_meanwhile_is_no_failure(awry: Awry) -> None:
    store = open_store("s3://bucket")
    etag = store.head(URL).etag
    _fill(store, etag)
    with awry.lock:
        for connection in awry.open:
            connection.shutdown(socket.SHUT_RDWR)
    awry.be()
    assert _fill(store, etag) == BODY[10 : 10 + LENGTH]
    assert len(awry.seen) == 1


def test_a_server_that_refuses_direct_requests_is_asked_through_obstore(
    awry: Awry, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store("s3://bucket")
    etag = store.head(URL).etag
    awry.be(then=Mood.WHOLE)
    for _ in range(connections._REFUSALS_MAX):
        with pytest.raises(StoreError):
            _fill(store, etag)
    awry.be()
    assert _fill(store, etag) == BODY[10 : 10 + LENGTH]
    deadline = time.monotonic() + 30
    while len(awry.open) > 1:  # the server has yet to see that ours is closed
        assert time.monotonic() < deadline, "ours is closed, and none was opened"
        os.sched_yield()


@pytest.mark.parametrize(
    ("name", "value"), [("HTTPS_PROXY", "http://proxy:1"), ("AWS_SKIP_SIGNATURE", "true")]
)
def test_no_connection_of_ours_goes_past_a_proxy_or_is_signed_unasked(
    name: str, value: str
) -> None:
    assert connections.is_possible({})
    assert not connections.is_possible({name.lower(): value})


def test_idle_connections_that_the_collector_finds_are_closed_first() -> None:
    gc.disable()
    try:
        held: Any = Connections(4, 30.0)
        held.itself = held
        gc.collect(0)  # older than its connection, which ends first
        with socket.create_server(("127.0.0.1", 0)) as server:
            connection = http.client.HTTPConnection(*server.getsockname())
            connection.connect()
            held.give_back("http://host", connection, is_whole=True)
            closes = weakref.finalize(connection, int)
            del held, connection
            gc.collect()
        assert not closes.alive
    finally:
        gc.enable()
