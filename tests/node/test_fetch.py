"""Blocks and preambles on their way into the arena."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from awry import Awry, awry_server
from raw_trainer import Node, Trainer
from shards import arrow_bytes

from dataplane.arena.memfd import Arena
from dataplane.model.errors import DataplaneError, StoreDenied, StoreUnavailable, TruncatedRead
from dataplane.model.records import ObjectInfo, Region
from dataplane.node.fetch import BlockRead, Fetcher, Report
from dataplane.node.stored import REMEMBERED_MAX, Preambles
from dataplane.rpc import fetches, tasks
from dataplane.rpc.membership import NodeReads
from dataplane.scheduler.in_flight import RANGE_BYTES

BODY = bytes(range(256)) * 4
PAGE = 4096
PREAMBLE, FIRST = Region(0, 16), Region(0, 26)
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


class FromShard:
    """An origin: reads a shard in threads, into the arenas of a fetcher."""

    def __init__(self, shard: Shard, blocks: Arena, preambles: Arena) -> None:
        self.orders: list[fetches.ReadBody] = []
        self._shard = shard
        self._arenas = {tasks.BLOCK_ARENA: blocks, tasks.PREAMBLE_ARENA: preambles}
        self._threads: list[threading.Thread] = []

    def read(self, order: fetches.ReadBody, report: Report) -> None:
        self.orders.append(order)
        loop = asyncio.get_running_loop()

        def work() -> None:
            error = None
            try:
                self._fill(order)
            except DataplaneError as failure:
                error = failure
            loop.call_soon_threadsafe(report, error)

        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()

    def _fill(self, order: fetches.ReadBody) -> None:
        assert isinstance(order, fetches.ReadRange)
        body = self._shard.read(order.url, order.offset, order.length, order.etag)
        for target in order.targets:
            at, place = target.offset - order.offset, target.into
            part = self._arenas[order.arena_id].view(place.offset, place.length)
            part[:] = body[at : at + place.length]

    def start(self, store: str = "") -> None: ...

    def trouble(self, url: str) -> None: ...

    def tick(self) -> None: ...

    def statistics(self) -> NodeReads:
        return NodeReads()

    def close(self) -> None:
        for thread in self._threads:
            thread.join(TIMEOUT_S)


class Place:
    """A fetcher of a shard, and the arena that it fills. Blocks are 26 bytes, unless said."""

    def __init__(self, shard: Shard, preamble_bytes: int = PAGE) -> None:
        self.arena = Arena.create("blocks", 64 * PAGE)
        self.arena.reserve(0, 64 * PAGE)
        preambles = Preambles(preamble_bytes)
        self.origin = FromShard(shard, self.arena, preambles.arena)
        self.fetcher = Fetcher(self.origin, preambles)

    async def end_of(
        self,
        key: int,
        raw: tasks.RawBlockRef,
        into: Region = FIRST,
        *,
        is_copied: bool = False,
    ) -> DataplaneError | None:
        end: asyncio.Future[DataplaneError | None] = asyncio.Future()
        copied_to = self.arena if is_copied else None
        self.fetcher.fetch([BlockRead(key, raw, into, end.set_result, copied_to)])
        async with asyncio.timeout(TIMEOUT_S):
            return await end

    def bytes_at(self, offset: int, length: int = 26) -> bytes:
        return bytes(self.arena.view(offset, length))

    def close(self) -> None:
        self.fetcher.close()
        self.arena_bytes = bytes(self.arena.buffer)
        self.arena.close()


def _raw(place: Region, *pieces: Region, url: str = "url") -> tasks.RawBlockRef:
    return tasks.RawBlockRef(url, 0, 1, place, PREAMBLE, len(BODY), "tag", pieces=pieces)


def _fetched(shard: Shard, *rounds: list[int]) -> list[DataplaneError | bytes]:
    """Blocks of 10 bytes at these offsets, those of a round together."""

    async def run() -> list[DataplaneError | bytes]:
        place = Place(shard)
        found: list[DataplaneError | bytes] = []
        try:
            for offsets in rounds:
                ends = [
                    place.end_of(at, _raw(Region(at, 10)), Region(32 * n, 26), is_copied=True)
                    for n, at in enumerate(offsets)
                ]
                errors = await asyncio.gather(*ends)
                found += [error or place.bytes_at(32 * n) for n, error in enumerate(errors)]
        finally:
            place.close()
        return found

    return asyncio.run(run())


def _whole(offset: int) -> bytes:
    return BODY[:16] + BODY[offset : offset + 10]


def test_the_preamble_of_blocks_that_start_together_is_read_once() -> None:
    shard, offsets = Shard(), list(range(20, 100, 10))
    assert _fetched(shard, offsets, [200]) == [_whole(at) for at in (*offsets, 200)]
    assert shard.reads == Counter(dict.fromkeys((0, *offsets, 200), 1))


def test_a_long_preamble_is_copied_while_the_event_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dataplane.node.stored._COPIED_BYTES_MAX", PREAMBLE.length - 1)
    assert _fetched(Shard(), [20, 40]) == [_whole(20), _whole(40)]


def test_preamble_and_block_are_asked_for_at_once() -> None:
    both = threading.Barrier(2, timeout=TIMEOUT_S)
    assert _fetched(Shard(lambda _: both.wait()), [40]) == [_whole(40)]  # type: ignore[arg-type]


def test_the_pieces_of_a_block_are_asked_for_at_once_and_lie_behind_the_preamble() -> None:
    pieces = [Region(20, 10), Region(50, 1), Region(100, 30)]
    all_of_them = threading.Barrier(4, timeout=TIMEOUT_S)
    shard = Shard(lambda _: all_of_them.wait())  # type: ignore[arg-type,return-value]

    async def run() -> bytes:
        with contextlib.closing(Place(shard)) as place:
            whole = Region(7, PREAMBLE.length + 41)
            raw = _raw(Region(20, 110), *pieces)
            assert await place.end_of(1, raw, whole, is_copied=True) is None
            return place.bytes_at(whole.offset, whole.length)

    assert asyncio.run(run()) == BODY[:16] + BODY[20:30] + BODY[50:51] + BODY[100:130]


def test_a_long_block_is_read_in_ranges_that_leave_nothing_out() -> None:
    async def run() -> list[fetches.ReadBody]:
        origin = Noted([])
        fetcher = Fetcher(origin, Preambles(PAGE))
        length = 3 * RANGE_BYTES + 1
        whole, nothing = Region(100, length), Region(0, 0)
        raw = tasks.RawBlockRef("url", 0, 1, whole, nothing, 1 << 40, "tag")
        into = Region(5, length)
        fetcher.fetch([BlockRead(1, raw, into, lambda _: None, copied_to=None)])
        fetcher.close()
        return origin.orders

    at = 0
    for order in asyncio.run(run()):
        assert isinstance(order, fetches.ReadRange)
        assert (order.offset, order.into.offset) == (100 + at, 5 + at)
        assert 0 < order.into.length <= RANGE_BYTES
        at += order.into.length
    assert at == 3 * RANGE_BYTES + 1


def _together(
    shard: Shard, *blocks: tuple[Region, ...]
) -> tuple[list[DataplaneError | bytes], list[list[int]]]:
    """Blocks of these pieces, read together; and where the reads that these took begin."""

    async def run() -> tuple[list[DataplaneError | bytes], list[list[int]]]:
        place, reads, ends, at = Place(shard), list[BlockRead](), [], 0
        for key, pieces in enumerate(blocks):
            end: asyncio.Future[DataplaneError | None] = asyncio.Future()
            length = PREAMBLE.length + sum(piece.length for piece in pieces)
            whole = Region(pieces[0].offset, 0)
            raw, into = _raw(whole, *pieces), Region(at, length)
            reads.append(BlockRead(key, raw, into, end.set_result, place.arena))
            ends.append(end)
            at += 64 + length
        try:
            place.fetcher.fetch(reads)
            async with asyncio.timeout(TIMEOUT_S):
                errors = await asyncio.gather(*ends)
        finally:
            place.close()
        orders = [o for o in place.origin.orders if isinstance(o, fetches.ReadRange) and o.offset]
        found = [
            error or bytes(place.arena_bytes[read.into.offset :][: read.into.length])
            for read, error in zip(reads, errors, strict=True)
        ]
        return found, [[target.offset for target in order.targets] for order in orders]

    return asyncio.run(run())


def _body_of(*pieces: Region) -> bytes:
    return BODY[:16] + b"".join(BODY[p.offset : p.offset + p.length] for p in pieces)


def test_neighbours_are_read_in_one_request_each_into_its_place_and_holes_are_not() -> None:
    side_by_side = [(Region(20, 10),), (Region(30, 50),), (Region(85, 3),)]
    edges = [(Region(20, 10), Region(90, 10)), (Region(100, 10), Region(300, 5), Region(500, 5))]
    for blocks, expected in (
        (side_by_side, [[20, 30, 85]]),
        (edges, [[20], [90, 100], [300], [500]]),
    ):
        found, orders = _together(Shard(), *blocks)
        assert found == [_body_of(*block) for block in blocks]
        assert orders == expected


@pytest.mark.parametrize("is_of_length", [True, False])
def test_a_block_fails_only_by_itself_unless_all_of_the_shard_is_lost(
    *, is_of_length: bool
) -> None:
    """So one that is broken does not fail its neighbours."""
    kind = TruncatedRead if is_of_length else StoreDenied
    failing = {20, 40} if is_of_length else {20}

    def on_read(offset: int) -> None:
        if offset in failing:
            raise kind("url: bad")

    shard = Shard(on_read)
    blocks = [(Region(20, 10),), (Region(30, 10),), (Region(40, 5),)]
    found, orders = _together(shard, *blocks)
    if is_of_length:
        assert [type(each) for each in found] == [kind, bytes, kind]
        assert found[1] == _body_of(*blocks[1])
        assert orders == [[20, 30, 40], [20], [30], [40]]
    else:
        assert [type(each) for each in found] == [kind] * 3
        assert orders == [[20, 30, 40]]


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


@pytest.mark.parametrize("pages", [1, 2])
def test_preambles_are_kept_within_their_budget(pages: int) -> None:
    async def run() -> Counter[int]:
        shard = Shard()
        with contextlib.closing(Place(shard, pages * PAGE)) as place:
            for key, url in enumerate(("a", "b", "a")):
                assert await place.end_of(key, _raw(Region(20, 10), url=url)) is None
                place.fetcher.let_go(key)
        return shard.reads

    assert asyncio.run(run())[0] == (3 if pages == 1 else 2)


async def test_a_block_that_is_decoded_shares_the_preamble_of_its_shard_with_others() -> None:
    """The preamble is not copied: workers receive its place and its number."""

    with contextlib.closing(Place(Shard())) as place:
        blocks = [_raw(Region(at, 10)) for at in (20, 30)]
        for key, raw in enumerate(blocks):
            assert await place.end_of(key, raw, Region(32 * key, 26)) is None
        found = [place.bytes_at(at) for at in (0, 32)]
        assert [each[:16] for each in found] == [bytes(16)] * 2
        assert [each[16:] for each in found] == [BODY[20:30], BODY[30:40]]
        told = [place.fetcher.for_worker(key, raw) for key, raw in enumerate(blocks)]
        assert told[0][1] == told[1][1]
        ((arena_id, fd),) = told[0][1]
        assert arena_id == tasks.PREAMBLE_ARENA
        assert len({(raw.kept_preamble, raw.preamble_number) for raw, _ in told}) == 1
        kept, number = told[0][0].kept_preamble, told[0][0].preamble_number
        assert kept is not None
        assert number
        assert os.pread(fd, kept.length, kept.offset) == BODY[:16]


def test_so_many_preambles_are_remembered_and_no_more() -> None:
    with contextlib.closing(Preambles(64 << 10)) as preambles:
        for number in range(REMEMBERED_MAX + 1):
            preambles.remember(f"shard {number}", "tag", PREAMBLE, BODY[:16])
        first, last = (
            preambles.hold(key, f"shard {number}", "tag", PREAMBLE)
            for key, number in enumerate((0, REMEMBERED_MAX))
        )
        assert first is not None
        assert not preambles.fill(first)
        assert last is not None
        assert preambles.fill(last)
        assert bytes(preambles.arena.view(last.region.offset, 16)) == BODY[:16]


async def test_a_preamble_that_indexing_has_read_is_not_read_again() -> None:
    with contextlib.closing(Place(Shard(), 4 * PAGE)) as place:
        place.fetcher.remember_preamble("known", "tag", PREAMBLE, BODY[:16])
        place.fetcher.remember_preamble("changed", "old tag", PREAMBLE, BODY[:16])
        place.fetcher.remember_preamble("shorter", "tag", Region(0, 15), BODY[:15])
        for key, url in enumerate(("known", "known", "changed", "shorter")):
            raw, into = _raw(Region(20, 10), url=url), Region(32 * key, 26)
            assert await place.end_of(key, raw, into, is_copied=True) is None
            assert place.bytes_at(into.offset) == _whole(20)
        orders = [o for o in place.origin.orders if isinstance(o, fetches.ReadRange)]
        assert [order.url for order in orders if not order.offset] == ["changed", "shorter"]


async def test_a_preamble_stays_while_a_block_needs_it_and_its_number_never_comes_again() -> None:
    place = Place(Shard())
    fetcher = place.fetcher
    try:
        first, other = _raw(Region(20, 10)), _raw(Region(20, 10), url="b")
        assert await place.end_of(1, first) is None
        assert await place.end_of(2, other, Region(64, 26)) is None
        assert fetcher.for_worker(2, other) == (other, ()), "there is no room for another"
        assert place.bytes_at(64) == _whole(20), "so it lies before the block, as it used to"
        number = fetcher.for_worker(1, first)[0].preamble_number
        fetcher.let_go(1)
        fetcher.let_go(1)
        assert await place.end_of(3, other) is None
        assert fetcher.for_worker(3, other)[0].preamble_number > number
    finally:
        place.close()


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
        with contextlib.closing(Place(Shard(on_read))) as place:
            found = await place.end_of(1, _raw(Region(20, 10)))
            order.append("told")
        return found

    assert isinstance(asyncio.run(run()), StoreUnavailable)
    assert order == ["preamble", "told"]


class Noted(FromShard):
    """Only notes the orders."""

    def __init__(self, orders: list[fetches.ReadBody]) -> None:
        self.orders = orders

    def read(self, order: fetches.ReadBody, report: Report) -> None:
        self.orders.append(order)

    def close(self) -> None: ...


# -- A job that reads small blocks in order takes few requests, and gets the same


ROWS, BLOCK_ROWS, SHARDS = 800, 10, 2
ROW_BYTES = 1000


def shard(number: int, form: str) -> bytes:
    chance = np.random.default_rng(number)
    ids = pa.array(range(number * ROWS, (number + 1) * ROWS), pa.int64())
    table = pa.table({"id": ids, "x": [chance.bytes(ROW_BYTES) for _ in range(ROWS)]})
    if form == "arrow":
        return arrow_bytes(table, rows=BLOCK_ROWS, file=True)
    out = io.BytesIO()
    pq.write_table(
        table, out, row_group_size=BLOCK_ROWS, compression="none", use_dictionary=False,
        write_statistics=False,
    )  # fmt: skip
    return out.getvalue()


def ranges(server: Awry, block_bytes: int) -> list[tuple[int, int]]:
    """Return the ranges that were read of blocks: the first byte, and the one behind the last."""
    found = [re.fullmatch(r"bytes=(\d+)-(\d+)", asked or "") for _, asked in server.seen]
    spans = [(int(each[1]), int(each[2]) + 1) for each in found if each is not None]
    return sorted(span for span in spans if span[0] < block_bytes)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_small_blocks_in_order_are_read_once_in_few_requests(tmp_path: Path, form: str) -> None:
    bodies = {f"bucket/d/{number}.{form}": shard(number, form) for number in range(SHARDS)}
    with (
        awry_server(bodies) as server,
        Node(tmp_path, **server.environment()) as node,
        Trainer(node) as trainer,
    ):
        trainer.open("s3://bucket/d/", global_batch=BLOCK_ROWS, shuffle=False)
        server.be()
        batches = trainer.batches()
    assert [i for ids, _ in batches for i in ids] == [*range(SHARDS * ROWS)]
    for number in range(SHARDS):
        chance = np.random.default_rng(number)
        of_shard = batches[number * ROWS // BLOCK_ROWS :][: ROWS // BLOCK_ROWS]
        for value in (value for _, values in of_shard for value in values):
            assert bytes(value) == chance.bytes(ROW_BYTES)
    spans = ranges(server, ROWS * ROW_BYTES)
    assert len(spans) <= SHARDS * ROWS // BLOCK_ROWS // 4
    assert sum(stop - start for start, stop in spans) < SHARDS * ROWS * (ROW_BYTES + 200)
