"""Stores behind a proxy that is away: one outage each, and then everything as it was."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from away import Away, Proxy, proxy_before
from awry import Awry, awry_server

from dataplane.model.errors import ClosedError, StoreError, StoreThrottled, StoreUnavailable
from dataplane.store.connect import Stores
from dataplane.store.outage import Outage, Outages

BODY = (bytes(range(251)) * 12_000)[:400_000]
URL = "s3://bucket/shard.bin"
KINDS = [way for way in Away if way is not Away.WELL]
THREADS = 16


class Seen:
    """The lines that would be on the log."""

    def __init__(self) -> None:
        self.lines: list[Outage] = []
        self._changed = threading.Condition()

    def report(self, outage: Outage) -> None:
        with self._changed:
            self.lines.append(outage)
            self._changed.notify_all()

    def wait(self, count: int) -> list[Outage]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.lines) >= count, 60), self.lines
            return self.lines[:]


@pytest.fixture
def awry() -> Iterator[Awry]:
    with awry_server({"bucket/shard.bin": BODY}) as server:
        yield server


@pytest.fixture
def proxy(awry: Awry, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with proxy_before(awry.port) as made:
        environment = {**awry.environment(), "AWS_ENDPOINT_URL": made.endpoint}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.mark.parametrize("way", KINDS)
def test_many_readers_ride_out_an_outage_that_is_told_once(proxy: Proxy, way: Away) -> None:
    seen = Seen()
    outages = Outages(seen.report)
    stores = Stores(budget_s=60.0, request_timeout_s=1.0, observe=outages.note)
    store = stores.connect(URL)
    etag = store.head(URL).etag
    stop = threading.Event()

    def read(first: int) -> int:
        count = 0
        while not stop.is_set():
            into = bytearray(150_000)
            store.read_into(URL, first + count, etag, memoryview(into))  # type: ignore[attr-defined]
            assert into == BODY[first + count : first + count + 150_000]
            count += 1
        return count

    with ThreadPoolExecutor(THREADS) as threads:
        readers = [threads.submit(read, 1000 * i) for i in range(THREADS)]
        proxy.be(way)
        (began,) = seen.wait(1)
        assert [outage.store for outage in outages.now(time.time())] == ["s3://bucket"]
        assert isinstance(stores.trouble(URL), (StoreUnavailable, StoreThrottled))
        proxy.be(Away.WELL)
        _, ended = seen.wait(2)
        stop.set()
        assert all(reader.result(60) >= 0 for reader in readers)
    assert (began.store, began.is_over, ended.is_over) == ("s3://bucket", False, True)
    assert began.since == ended.since < ended.until
    assert len(seen.lines) == 2
    assert outages.now(time.time()) == ()
    assert stores.trouble(URL) is None


@pytest.mark.parametrize("way", KINDS)
def test_a_store_that_is_away_at_the_very_first_contact_is_waited_for(
    proxy: Proxy, way: Away
) -> None:
    proxy.be(way)
    seen = Seen()
    stores = Stores(budget_s=60.0, request_timeout_s=1.0, observe=Outages(seen.report).note)
    with ThreadPoolExecutor(1) as threads:
        size = threads.submit(lambda: stores.connect(URL).head(URL).size_bytes)
        seen.wait(1)
        proxy.be(Away.WELL)
        assert size.result(60) == len(BODY)


def test_a_store_that_stays_away_is_the_error_of_every_reader(proxy: Proxy) -> None:
    proxy.be(Away.REFUSED)
    stores = Stores(budget_s=0.5, observe=Outages(lambda _: None).note)

    def error() -> StoreError:
        with pytest.raises(StoreUnavailable) as raised:
            stores.connect(URL).head(URL)
        return raised.value

    with ThreadPoolExecutor(THREADS) as threads:
        for future in [threads.submit(error) for _ in range(THREADS)]:
            assert f"{proxy.endpoint} refused the connection" in str(future.result())


def test_closing_the_stores_ends_all_waits_for_one(proxy: Proxy) -> None:
    proxy.be(Away.REFUSED)
    seen = Seen()
    stores = Stores(budget_s=600.0, observe=Outages(seen.report).note)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(stores.connect(URL).head, URL) for _ in range(2)]
        seen.wait(1)
        stores.close()
        for future in waiting:
            assert isinstance(future.exception(60), ClosedError)
