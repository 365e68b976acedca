"""Reads: the etags that pin them, and two requests that race for one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from awry import Awry, Mood, awry_server, etag_of
from servers import reach

from dataplane.model.errors import DatasetChangedError, StoreError
from dataplane.store.base import Reconnecting, Store
from dataplane.store.connect import open_store
from dataplane.store.policy import UrlPolicy
from dataplane.store.reads import EndedEarlyError, Race, current_race, fill, raced

BODY = (bytes(range(251)) * 12_000)[:300_000]


@pytest.fixture
def awry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Awry]:
    with awry_server({"web/shard.bin": BODY}) as server:
        reach(server, monkeypatch)
        yield server


@pytest.fixture(params=["http", "checked http", "s3"])
def store(request: pytest.FixtureRequest, awry: Awry) -> Iterator[tuple[Store, str]]:
    """A store, and the url of its object."""
    base, key = ("s3://web", "") if request.param == "s3" else (awry.endpoint, "web/")
    policy = UrlPolicy() if request.param == "checked http" else None
    opened = open_store(base, policy=policy)
    yield opened, f"{base}/{key}shard.bin"
    assert isinstance(opened, Reconnecting)
    opened.reconnect()  # closes its idle connections


@pytest.mark.parametrize("etag", [f"W/{etag_of(BODY)}", None], ids=["weak", "none"])
def test_an_object_is_read_and_its_change_seen_without_a_strong_etag(
    awry: Awry, store: tuple[Store, str], etag: str | None
) -> None:
    opened, url = store
    awry.altered = {"ETag": etag}
    info = opened.head(url)
    for length in (1000, 200_000):
        into = bytearray(length)
        fill(opened, url, 10, info.etag, memoryview(into))
        assert into == BODY[10 : 10 + length]
    awry.altered = {"ETag": etag and 'W/"2"', "Last-Modified": "Wed, 21 Oct 2026 07:28:01 GMT"}
    for length in (1000, 200_000):
        with pytest.raises(DatasetChangedError):
            fill(opened, url, 10, info.etag, memoryview(bytearray(length)))


def test_an_object_without_etag_and_date_is_refused(awry: Awry, store: tuple[Store, str]) -> None:
    awry.altered = {"ETag": None, "Last-Modified": None}
    opened, url = store
    with pytest.raises(StoreError, match=r"Last-Modified|last modified|LAST_MODIFIED"):
        opened.head(url)


def test_without_etags_a_listed_object_is_the_one_that_is_read(awry: Awry) -> None:
    awry.altered, awry.listed = {"ETag": None}, "2026-10-21T07:28:00.700Z"
    store = open_store("s3://web")
    (info,) = store.list("s3://web/")
    assert store.head(info.url) == info
    assert bytes(store.read(info.url, 5, 10, info.etag)) == BODY[5:15]


def test_a_server_that_does_not_know_conditions_is_told_as_such(
    awry: Awry, store: tuple[Store, str]
) -> None:
    opened, url = store
    awry.altered = {"ETag": '"of the front"'}
    info = opened.head(url)
    for length in (1000, 200_000):
        with pytest.raises(StoreError, match="does not know If-Match"):
            fill(opened, url, 10, info.etag, memoryview(bytearray(length)))


def test_a_refused_condition_is_told_with_the_etag_of_now(
    awry: Awry, store: tuple[Store, str]
) -> None:
    opened, url = store
    info = opened.head(url)
    awry.objects["web/shard.bin"] = BODY[::-1]
    for length in (1000, 200_000):
        with pytest.raises(DatasetChangedError) as raised:
            fill(opened, url, 10, info.etag, memoryview(bytearray(length)))
        assert raised.value.found == etag_of(BODY[::-1])


@pytest.mark.parametrize("etag", [etag_of(BODY), f"W/{etag_of(BODY)}"], ids=["strong", "weak"])
def test_a_server_that_refuses_without_a_condition_is_no_change(
    awry: Awry, store: tuple[Store, str], etag: str
) -> None:
    opened, url = store
    awry.be(then=Mood.UNMET)
    with pytest.raises(StoreError, match="412"):
        fill(opened, url, 10, etag, memoryview(bytearray(1000)))
    assert len(awry.seen) <= 3


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
