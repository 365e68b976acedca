"""Blocks and preambles on their way into the arena."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from dataplane.errors import DataplaneError, StoreError, StoreUnavailable
from dataplane.model import ObjectInfo, Region
from dataplane.node.fetch import Fetcher

BODY = bytes(range(256)) * 4
PREAMBLE = Region(0, 16)
TIMEOUT_S = 60.0


class Shard:
    """A store of one object, which notes what was read; `on_read` may wait, or fail."""

    def __init__(self, on_read: Callable[[int], None] = lambda _: None) -> None:
        self.reads: Counter[int] = Counter()
        self._on_read = on_read
        self._lock = threading.Lock()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter([self.head(prefix)])

    def head(self, url: str) -> ObjectInfo:
        return ObjectInfo(url, len(BODY), "tag")

    def read(self, url: str, offset: int, length: int, etag: str) -> bytes:
        with self._lock:
            self.reads[offset] += 1
        self._on_read(offset)
        return BODY[offset : offset + length]

    def stream(self, url: str, etag: str) -> Iterator[bytes]:
        yield BODY


def _fetched(shard: Shard, *rounds: list[int]) -> list[DataplaneError | bytes]:
    """Blocks of 10 bytes at these offsets, those of a round together."""

    async def run() -> list[DataplaneError | bytes]:
        fetcher = Fetcher(8, lambda _: shard)
        found: list[DataplaneError | bytes] = []
        try:
            for offsets in rounds:
                ends, memories = [], [bytearray(26) for _ in offsets]
                for offset, memory in zip(offsets, memories, strict=True):
                    end: asyncio.Future[DataplaneError | None] = asyncio.Future()
                    place = Region(offset, 10)
                    fetcher.fetch(
                        "url", "tag", PREAMBLE, [place], memoryview(memory), end.set_result
                    )
                    ends.append(end)
                async with asyncio.timeout(TIMEOUT_S):
                    errors = await asyncio.gather(*ends)
                found += [e or bytes(m) for e, m in zip(errors, memories, strict=True)]
        finally:
            fetcher.close()
        return found

    return asyncio.run(run())


def _whole(offset: int) -> bytes:
    return BODY[:16] + BODY[offset : offset + 10]


def test_the_preamble_of_blocks_that_start_together_is_read_once() -> None:
    shard, offsets = Shard(), list(range(20, 100, 10))
    assert _fetched(shard, offsets, [200]) == [_whole(at) for at in (*offsets, 200)]
    assert shard.reads == Counter(dict.fromkeys((0, *offsets, 200), 1))


def test_preamble_and_block_are_asked_for_at_once() -> None:
    both = threading.Barrier(2, timeout=TIMEOUT_S)
    assert _fetched(Shard(lambda _: both.wait()), [40]) == [_whole(40)]  # type: ignore[arg-type]


def test_the_pieces_of_a_block_are_asked_for_at_once_and_lie_behind_the_preamble() -> None:
    pieces = [Region(20, 10), Region(50, 1), Region(100, 30)]
    all_of_them = threading.Barrier(4, timeout=TIMEOUT_S)
    shard = Shard(lambda _: all_of_them.wait())  # type: ignore[arg-type,return-value]

    async def run() -> bytes:
        fetcher = Fetcher(4, lambda _: shard)
        memory = bytearray(PREAMBLE.length + 41)
        end: asyncio.Future[DataplaneError | None] = asyncio.Future()
        fetcher.fetch("url", "tag", PREAMBLE, pieces, memoryview(memory), end.set_result)
        async with asyncio.timeout(TIMEOUT_S):
            assert await end is None
        fetcher.close()
        return bytes(memory)

    assert asyncio.run(run()) == BODY[:16] + BODY[20:30] + BODY[50:51] + BODY[100:130]


def test_a_preamble_that_failed_fails_who_waits_for_it_and_is_read_anew() -> None:
    left = iter([StoreUnavailable("url: gone")])

    def on_read(offset: int) -> None:
        if offset == 0 and (error := next(left, None)) is not None:
            raise error

    shard = Shard(on_read)
    first, second = _fetched(shard, [30], [50])
    assert isinstance(first, StoreUnavailable)
    assert second == _whole(50)
    assert shard.reads[0] == 2


def test_whatever_a_store_raises_is_reported() -> None:
    def on_read(offset: int) -> None:
        raise ZeroDivisionError

    (found,) = _fetched(Shard(on_read), [30])
    assert type(found) is StoreError  # which nobody tries again: it is a bug
    assert "ZeroDivisionError" in str(found)


class Panic(BaseException):
    """As libraries in Rust raise it."""


def test_a_librarys_panic_is_reported_too() -> None:
    def on_read(offset: int) -> None:
        raise Panic("index out of bounds")

    (found,) = _fetched(Shard(on_read), [100])
    assert isinstance(found, StoreError)
    assert "Panic: index out of bounds" in str(found)


@pytest.mark.parametrize("budget", [16, 40])
def test_preambles_are_kept_within_their_budget(
    monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    monkeypatch.setattr("dataplane.node.fetch.PREAMBLE_BYTES_MAX", budget)

    async def run() -> Counter[int]:
        shard = Shard()
        fetcher = Fetcher(1, lambda _: shard)
        for url in ("a", "b", "a"):
            end: asyncio.Future[DataplaneError | None] = asyncio.Future()
            memory = memoryview(bytearray(26))
            fetcher.fetch(url, "tag", PREAMBLE, [Region(20, 10)], memory, end.set_result)
            assert await end is None
        fetcher.close()
        return shard.reads

    assert asyncio.run(run())[0] == (3 if budget == 16 else 2)
