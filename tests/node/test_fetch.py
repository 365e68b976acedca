"""Blocks and preambles on their way into the arena."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from dataplane.errors import DataplaneError, StoreError, StoreUnavailable
from dataplane.model import ObjectInfo, Region
from dataplane.node.fetch import Fetcher
from dataplane.rpc import tasks

BODY = bytes(range(256)) * 4
PAGE = 4096
PREAMBLE = Region(0, 16)
TIMEOUT_S = 60.0


class Shard:
    """A store of one object, which records reads; `on_read` may wait, or fail."""

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


def _raw(place: Region, *pieces: Region, url: str = "url") -> tasks.RawBlockRef:
    return tasks.RawBlockRef(url, 0, 1, place, PREAMBLE, len(BODY), "tag", pieces=pieces)


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
                    raw, view = _raw(Region(offset, 10)), memoryview(memory)
                    fetcher.fetch(offset, raw, view, end.set_result, is_copied=True)
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
        raw = _raw(Region(20, 110), *pieces)
        fetcher.fetch(1, raw, memoryview(memory), end.set_result, is_copied=True)
        async with asyncio.timeout(TIMEOUT_S):
            assert await end is None
        fetcher.close()
        return bytes(memory)

    assert asyncio.run(run()) == BODY[:16] + BODY[20:30] + BODY[50:51] + BODY[100:130]


def test_a_failed_preamble_fails_its_waiters_and_is_read_again() -> None:
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
    assert type(found) is StoreError  # which is not retried: it is a bug
    assert "ZeroDivisionError" in str(found)


class Panic(BaseException):
    """As libraries in Rust raise it."""


def test_a_librarys_panic_is_reported_too() -> None:
    def on_read(offset: int) -> None:
        raise Panic("index out of bounds")

    (found,) = _fetched(Shard(on_read), [100])
    assert isinstance(found, StoreError)
    assert "Panic: index out of bounds" in str(found)


@pytest.mark.parametrize("pages", [1, 2])
def test_preambles_are_kept_within_their_budget(pages: int) -> None:
    async def run() -> Counter[int]:
        shard = Shard()
        fetcher = Fetcher(1, lambda _: shard, preamble_bytes=pages * PAGE)
        try:
            for key, url in enumerate(("a", "b", "a")):
                assert await _end_of(fetcher, key, _raw(Region(20, 10), url=url)) is None
                fetcher.let_go(key)
        finally:
            fetcher.close()
        return shard.reads

    assert asyncio.run(run())[0] == (3 if pages == 1 else 2)


def test_a_block_that_is_decoded_shares_the_preamble_of_its_shard_with_others() -> None:
    """It is not copied: workers receive its place and its number."""

    async def run() -> None:
        shard = Shard()
        fetcher = Fetcher(2, lambda _: shard, preamble_bytes=PAGE)
        try:
            blocks = [_raw(Region(at, 10)) for at in (20, 30)]
            memories = [bytearray(26), bytearray(26)]
            for key, raw in enumerate(blocks):
                assert await _end_of(fetcher, key, raw, memories[key]) is None
            assert [bytes(memory[:16]) for memory in memories] == [bytes(16)] * 2
            assert [bytes(memory[16:]) for memory in memories] == [BODY[20:30], BODY[30:40]]
            told = [fetcher.for_worker(key, raw) for key, raw in enumerate(blocks)]
            assert told[0][1] == told[1][1]
            ((arena_id, fd),) = told[0][1]
            assert arena_id == tasks.PREAMBLE_ARENA
            assert len({(raw.kept_preamble, raw.preamble_number) for raw, _ in told}) == 1
            place, number = told[0][0].kept_preamble, told[0][0].preamble_number
            assert place is not None
            assert number
            assert os.pread(fd, place.length, place.offset) == BODY[:16]
        finally:
            fetcher.close()

    asyncio.run(run())


def test_a_preamble_stays_while_a_block_needs_it_and_its_number_never_comes_again() -> None:
    async def run() -> None:
        shard = Shard()
        fetcher = Fetcher(2, lambda _: shard, preamble_bytes=PAGE)
        try:
            first, other = _raw(Region(20, 10)), _raw(Region(20, 10), url="b")
            assert await _end_of(fetcher, 1, first) is None
            memory = bytearray(26)
            assert await _end_of(fetcher, 2, other, memory) is None
            assert fetcher.for_worker(2, other) == (other, ()), "there is no room for another"
            assert bytes(memory) == _whole(20), "so it lies before the block, as it used to"
            number = fetcher.for_worker(1, first)[0].preamble_number
            fetcher.let_go(1)
            fetcher.let_go(1)
            assert await _end_of(fetcher, 3, other) is None
            assert fetcher.for_worker(3, other)[0].preamble_number > number
        finally:
            fetcher.close()

    asyncio.run(run())


def test_an_error_is_reported_even_if_the_preamble_has_no_reader_left() -> None:
    """Afterwards another block may use the memory that was held."""
    may_end, order = threading.Event(), []

    def on_read(offset: int) -> None:
        if offset:
            may_end.set()
            raise StoreUnavailable("url: gone")
        assert may_end.wait(TIMEOUT_S)
        order.append("preamble")

    async def run() -> DataplaneError | None:
        fetcher = Fetcher(2, lambda _: Shard(on_read))
        try:
            found = await _end_of(fetcher, 1, _raw(Region(20, 10)))
            order.append("told")
        finally:
            fetcher.close()
        return found

    assert isinstance(asyncio.run(run()), StoreUnavailable)
    assert order == ["preamble", "told"]


async def _end_of(
    fetcher: Fetcher, key: int, raw: tasks.RawBlockRef, memory: bytearray | None = None
) -> DataplaneError | None:
    """The end of fetching a block that is to be decoded."""
    end: asyncio.Future[DataplaneError | None] = asyncio.Future()
    into = memoryview(bytearray(26) if memory is None else memory)
    fetcher.fetch(key, raw, into, end.set_result, is_copied=False)
    async with asyncio.timeout(TIMEOUT_S):
        return await end
