"""Reads of shards that are joined from objects of one or several stores."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from dataplane.model.errors import StoreUnavailable
from dataplane.model.joined import Joined
from dataplane.model.records import ObjectInfo
from dataplane.store.base import Store
from dataplane.store.reads import EndedEarlyError, Race, raced, read_joined

COUNT = 256


class Members:
    """A store that answers once it is let go. `failing` is the url of an object that is lost."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.urls = failing, list[str]()
        self.go, self.is_busy = threading.Event(), threading.Event()

    def read(self, url: str, offset: int, length: int, etag: str) -> bytes:
        self.urls.append(url)
        if len(self.urls) == COUNT // 2:
            self.is_busy.set()
        if url == self.failing:
            raise StoreUnavailable(f"{url} is away", shard=url)
        assert self.go.wait(30)
        return bytes(length)


def shard(host: str) -> ObjectInfo:
    urls = [f"http://{host}/a/{at}.jpg" for at in range(COUNT)]
    return Joined([ObjectInfo(url, 10, '"e"') for url in urls]).listed(f"http://{host}/joined")


def read(store: Members, host: str) -> int:
    info = shard(host)
    connected = cast("Store", store)
    body: Any = read_joined(lambda _: connected, info.url, 0, info.size_bytes, info.etag)
    return len(body)


def begun(store: Members, host: str) -> int:
    """How many reads of the store have begun, once a later read of this host has ended."""
    later = Members()
    later.go.set()
    read(later, host)
    return len(store.urls)


def test_a_store_that_does_not_answer_holds_up_no_other() -> None:
    silent, healthy = Members(), Members()
    healthy.go.set()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(read, silent, "silent")
        try:
            assert silent.is_busy.wait(10)
            pool.submit(read, healthy, "healthy").result(10)
            assert not waiting.done()
        finally:
            silent.go.set()
        waiting.result()


def test_after_a_failure_the_other_objects_are_not_read() -> None:
    store = Members("http://lost/a/3.jpg")
    try:
        with pytest.raises(StoreUnavailable, match=r"a/3\.jpg is away"):
            read(store, "lost")
    finally:
        store.go.set()
    assert begun(store, "lost") < COUNT


def test_an_overtaken_read_does_not_wait_for_its_objects() -> None:
    store, race = Members(), Race()

    def first() -> int:
        with raced(race):
            return read(store, "overtaken")

    with ThreadPoolExecutor() as pool:
        try:
            reading = pool.submit(first)
            assert race.overtake(1)
            with pytest.raises(EndedEarlyError):
                reading.result(10)
        finally:
            store.go.set()
    assert begun(store, "overtaken") < COUNT
