"""Reads that go straight into memory, over connections of our own, from servers that misbehave."""

from __future__ import annotations

import gc
import http.client
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from awry import Awry, Mood, awry_server, etag_of
from fake_clock import Time
from servers import reach

from dataplane.arena.memfd import Arena
from dataplane.base.trace import Trace
from dataplane.model.errors import (
    DatasetChangedError,
    ShardNotFound,
    StoreDenied,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
    TruncatedRead,
)
from dataplane.model.records import ObjectInfo
from dataplane.store import connections, url_policy
from dataplane.store.base import Filling, Reconnecting, Store
from dataplane.store.connect import Stores, open_store
from dataplane.store.connections import Connections
from dataplane.store.http_store import HttpStore
from dataplane.store.reads import EndedEarlyError, Race, current_race, fill, raced
from dataplane.store.url_policy import UrlPolicy

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


HTTP_BODY = bytes(i % 251 for i in range(200_000))


@pytest.fixture
def http_server() -> Iterator[Awry]:
    with awry_server({"web/shard.bin": HTTP_BODY}) as server:
        yield server


def _url(http_server: Awry) -> str:
    return f"{http_server.endpoint}/web/shard.bin"


def _head(http_server: Awry) -> ObjectInfo:
    return HttpStore(http_server.endpoint, 30.0, UrlPolicy()).head(_url(http_server))


def _read(http_server: Awry, timeout_s: float = 30.0) -> bytes:
    store = HttpStore(http_server.endpoint, timeout_s, UrlPolicy())
    return bytes(store.read(_url(http_server), 10, 1000, etag_of(HTTP_BODY)))


@pytest.mark.parametrize(
    ("mood", "error", "says"),
    [
        (Mood.SLOW_DOWN, StoreThrottled, "503"),
        (Mood.TOO_MANY, StoreThrottled, "429"),
        (Mood.INTERNAL, StoreUnavailable, "500"),
        (Mood.LATE, StoreUnavailable, "408"),
        (Mood.DENIED, StoreDenied, "403"),
        (Mood.NO_BUCKET, ShardNotFound, "404"),
        (Mood.TRUNCATED, StoreUnavailable, "closed the connection"),
        (Mood.RESET, StoreUnavailable, "closed the connection"),
        (Mood.SHORT, TruncatedRead, "gave 999 bytes"),
        (Mood.WHOLE, StoreError, "must support ranges"),
        (Mood.DRIP_HEAD, StoreUnavailable, "did not answer in time"),
    ],
)
def test_each_failure_over_http_has_its_error(
    http_server: Awry, mood: Mood, error: type[StoreError], says: str
) -> None:
    http_server.be(mood)
    # Only a server that never answers meets a short timeout: others answer late on a busy machine.
    timeout_s = 0.5 if mood is Mood.DRIP_HEAD else 30.0
    with pytest.raises(error, match=says) as raised:
        _read(http_server, timeout_s)
    assert type(raised.value) is error
    assert raised.value.shard == _url(http_server)
    assert len(http_server.seen) == 1
    assert _read(http_server) == HTTP_BODY[10:1010]


@pytest.mark.parametrize(
    ("altered", "error", "says"),
    [
        ({"Content-Range": "bytes 17-1016/200000"}, TruncatedRead, "1000 bytes from 17 on"),
        ({"Content-Range": "bytes 10-2009/200000"}, TruncatedRead, "2000 bytes from 10 on"),
        ({"Content-Range": f"bytes 10-1009/{'9' * 5000}"}, StoreError, "must support ranges"),
        ({"Content-Range": None}, StoreError, "must support ranges"),
        ({"Content-Length": "1001"}, TruncatedRead, "gave 1001 bytes"),
        ({"Content-Length": "500", "Content-Encoding": "gzip"}, StoreError, "compresses"),
        ({"ETag": '"another"'}, DatasetChangedError, "another"),
        ({"ETag": None}, DatasetChangedError, "modified-"),
        ({"ETag": None, "Last-Modified": None}, StoreError, "neither ETag nor Last-Modified"),
        ({"ETag": None, "Last-Modified": "now"}, StoreError, "neither ETag nor Last-Modified"),
    ],
)
def test_an_answer_that_is_not_the_pinned_range_is_refused(
    http_server: Awry, altered: dict[str, str | None], error: type[StoreError], says: str
) -> None:
    http_server.altered = altered
    with pytest.raises(error, match=says) as raised:
        _read(http_server)
    assert type(raised.value) is error


def test_an_object_that_is_stored_compressed_is_read_as_it_is_stored(
    http_server: Awry,
) -> None:
    http_server.altered = {"Content-Encoding": "gzip"}
    assert _head(http_server).size_bytes == len(HTTP_BODY)
    assert _read(http_server) == HTTP_BODY[10:1010]


def test_a_range_beyond_the_end_has_its_error(http_server: Awry) -> None:
    http_server.altered = {"Content-Range": "bytes */200000"}
    store = HttpStore(http_server.endpoint, 0.5, UrlPolicy())
    with pytest.raises(TruncatedRead, match="gave 0 bytes"):
        store.read(_url(http_server), len(HTTP_BODY), 10, etag_of(HTTP_BODY))


@pytest.mark.parametrize(
    "location", ["http://[", "http://h:99999/", "http://a..b/", f"http://{'a.' * 3000}/", ""]
)
def test_a_redirect_to_what_is_no_url_has_its_error(http_server: Awry, location: str) -> None:
    http_server.altered = {"Location": location}
    http_server.be(Mood.ELSEWHERE)
    with pytest.raises(StoreError, match="redirects to what is not a url"):
        _head(http_server)
    assert len(http_server.seen) == 1


@pytest.mark.parametrize("scheme", ["file", "gopher", "ftp", "dict", "s3"])
def test_a_redirect_to_another_scheme_leaves_one_line_of_the_log(
    http_server: Awry,
    scheme: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(url_policy, "_trace", Trace("security"))
    http_server.altered = {"Location": f"{scheme}:///etc/passwd"}
    http_server.be(Mood.ELSEWHERE)
    with pytest.raises(StoreDenied, match=f"redirects to {scheme}, which is not followed"):
        _head(http_server)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"url refused url={_url(http_server)} ")
    assert f"it redirects to {scheme}, which is not followed" in line


def test_a_redirect_to_another_scheme_shows_no_more_than_that(http_server: Awry) -> None:
    http_server.altered = {"Location": f"data:{'x' * 3000}"}
    http_server.be(Mood.ELSEWHERE)
    with pytest.raises(StoreDenied, match="redirects to data, which is not followed"):
        _head(http_server)


READ_BODY = (bytes(range(251)) * 12_000)[:300_000]


@pytest.fixture
def pinned_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Awry]:
    with awry_server({"web/shard.bin": READ_BODY}) as server:
        reach(server, monkeypatch)
        yield server


@pytest.fixture(params=["http", "checked http", "s3"])
def store(request: pytest.FixtureRequest, pinned_server: Awry) -> Iterator[tuple[Store, str]]:
    """A store, and the url of its object."""
    base, key = ("s3://web", "") if request.param == "s3" else (pinned_server.endpoint, "web/")
    policy = UrlPolicy() if request.param == "checked http" else None
    opened = open_store(base, policy=policy)
    yield opened, f"{base}/{key}shard.bin"
    assert isinstance(opened, Reconnecting)
    opened.reconnect()  # closes its idle connections


@pytest.mark.parametrize("etag", [f"W/{etag_of(READ_BODY)}", None], ids=["weak", "none"])
def test_an_object_is_read_and_its_change_seen_without_a_strong_etag(
    pinned_server: Awry, store: tuple[Store, str], etag: str | None
) -> None:
    opened, url = store
    pinned_server.altered = {"ETag": etag}
    info = opened.head(url)
    for length in (1000, 200_000):
        into = bytearray(length)
        fill(opened, url, 10, info.etag, memoryview(into))
        assert into == READ_BODY[10 : 10 + length]
    pinned_server.altered = {
        "ETag": etag and 'W/"2"',
        "Last-Modified": "Wed, 21 Oct 2026 07:28:01 GMT",
    }
    for length in (1000, 200_000):
        with pytest.raises(DatasetChangedError):
            fill(opened, url, 10, info.etag, memoryview(bytearray(length)))


def test_an_object_without_etag_and_date_is_refused(
    pinned_server: Awry, store: tuple[Store, str]
) -> None:
    pinned_server.altered = {"ETag": None, "Last-Modified": None}
    opened, url = store
    with pytest.raises(StoreError, match=r"Last-Modified|last modified|LAST_MODIFIED"):
        opened.head(url)


def test_without_etags_a_listed_object_is_the_one_that_is_read(pinned_server: Awry) -> None:
    pinned_server.altered, pinned_server.listed = {"ETag": None}, "2026-10-21T07:28:00.700Z"
    store = open_store("s3://web")
    (info,) = store.list("s3://web/")
    assert store.head(info.url) == info
    assert bytes(store.read(info.url, 5, 10, info.etag)) == READ_BODY[5:15]


def test_a_server_that_does_not_know_conditions_is_told_as_such(
    pinned_server: Awry, store: tuple[Store, str]
) -> None:
    opened, url = store
    pinned_server.altered = {"ETag": '"of the front"'}
    info = opened.head(url)
    for length in (1000, 200_000):
        with pytest.raises(StoreError, match="does not know If-Match"):
            fill(opened, url, 10, info.etag, memoryview(bytearray(length)))


def test_a_refused_condition_is_told_with_the_etag_of_now(
    pinned_server: Awry, store: tuple[Store, str]
) -> None:
    opened, url = store
    info = opened.head(url)
    pinned_server.objects["web/shard.bin"] = READ_BODY[::-1]
    for length in (1000, 200_000):
        with pytest.raises(DatasetChangedError) as raised:
            fill(opened, url, 10, info.etag, memoryview(bytearray(length)))
        assert raised.value.found == etag_of(READ_BODY[::-1])


@pytest.mark.parametrize(
    "etag", [etag_of(READ_BODY), f"W/{etag_of(READ_BODY)}"], ids=["strong", "weak"]
)
def test_a_server_that_refuses_without_a_condition_is_no_change(
    pinned_server: Awry, store: tuple[Store, str], etag: str
) -> None:
    opened, url = store
    pinned_server.be(then=Mood.UNMET)
    with pytest.raises(StoreError, match="412"):
        fill(opened, url, 10, etag, memoryview(bytearray(1000)))
    assert len(pinned_server.seen) <= 3


TIMEOUT_S = 60.0


def test_the_first_request_wins_if_it_is_done_first() -> None:
    race = Race()
    race.claim()
    assert not race.overtake(TIMEOUT_S)
    race.claim()


def test_a_request_that_was_overtaken_may_neither_begin_nor_end() -> None:
    race = Race()
    assert race.overtake(TIMEOUT_S)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for attempt in (race.claim, lambda: race.hold(ours)):
            with pytest.raises(EndedEarlyError):
                attempt()


def test_overtaking_waits_until_the_first_request_writes_no_more() -> None:
    race, order = Race(), list[str]()
    ours, theirs = socket.socketpair()

    def first() -> None:
        race.hold(ours)
        held.set()
        assert ours.recv(1) == b"", "its connection is shut down"
        order.append("ended")
        race.release()

    held = threading.Event()
    with ours, theirs:
        thread = threading.Thread(target=first)
        thread.start()
        assert held.wait(TIMEOUT_S)
        assert race.overtake(TIMEOUT_S)
        order.append("overtaken")
        thread.join(TIMEOUT_S)
    assert order == ["ended", "overtaken"]


def test_a_first_request_that_does_not_end_is_told() -> None:
    race = Race()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        race.hold(ours)
        with pytest.raises(TimeoutError):
            race.overtake(0.0)


def test_a_thread_without_a_race_runs_alone() -> None:
    race = Race()
    with raced(race):
        assert current_race() is race
    assert current_race() is not race
    current_race().claim()
