"""Slabs that are made elsewhere: real fetchers, lenders and sockets; the test is both nodes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from awry import Awry
from fetching import BODY, LENGTH, TIMEOUT_S, awry
from lender import JOB
from msgspec.structs import replace
from slab_makers import (
    READ,
    REQUEST,
    SLOT_BYTES,
    SLOTS,
    makers,
    reader,
)

from dataplane.model.errors import NeighbourGone
from dataplane.model.records import BlockForm, Region
from dataplane.neighbours import wire
from dataplane.rpc.fetches import SLABS_MAX
from dataplane.rpc.lending import Asked, Request
from dataplane.store.connect import open_store

pytestmark = pytest.mark.usefixtures("one_fork_server")

__all__ = ["awry"]


def test_slabs_arrive_byte_for_byte_with_their_notes() -> None:
    async def play() -> None:
        async with reader() as at, makers() as (maker,):
            end = await at.slab(maker.maker())
            assert (end.error, end.neighbour_bytes, end.note) == (None, SLOT_BYTES, maker.note)
            assert end.took_s > 0
            assert at.slot_bytes() == bytes(maker.made.buffer)
            (asked,) = maker.asked
            of_slab = bytes(16), 0, 0, SLOT_BYTES, BlockForm.SLAB
            request = Request(asked.request.number, *of_slab, slab=REQUEST)
            assert asked == Asked(asked.number, JOB, "node-2", request)
            many = [at.slab(maker.maker(), slot=slot) for slot in range(SLOTS)]
            assert [read.error for read in await asyncio.gather(*many)] == [None] * SLOTS
            for slot in range(SLOTS):
                assert at.slot_bytes(slot) == bytes(maker.made.buffer)
            await maker.until(lambda: len(maker.given) == 1 + SLOTS)
            assert sorted(maker.given) == [asked.number for asked in maker.asked]
            assert maker.lending.lent_bytes == (1 + SLOTS) * (SLOT_BYTES + len(maker.note))

    asyncio.run(play())


@pytest.mark.parametrize(
    ("length", "note"), [(0, 300), (0, 0), (1, 0), (70_001, wire.NOTE_BYTES_MAX)]
)
def test_a_slab_may_be_shorter_than_its_room_or_only_a_note(length: int, note: int) -> None:
    async def play() -> None:
        async with reader() as at, makers() as (maker,):
            maker.length, maker.note = length, bytes(range(256)) * (note // 256) + bytes(note % 256)
            end = await at.slab(maker.maker())
            assert (end.error, end.neighbour_bytes, end.note) == (None, length, maker.note)
            assert at.slot_bytes(0, length) == bytes(maker.made.view(0, length))
            assert at.slot_bytes(0, SLOT_BYTES).count(0) >= SLOT_BYTES - length
            await maker.until(lambda: maker.given)

    asyncio.run(play())


def test_what_opens_a_job_may_be_long_but_not_too_long() -> None:
    """Also more than the socket of a fetcher has room for."""

    async def play() -> None:
        async with reader() as at, makers() as (maker,):
            assert (await at.slab(maker.maker())).error is None  # the fetcher is there
            held: list[int] = []

            maker.answer = lambda asked: held.append(asked.number)
            del maker.asked[:]
            order = replace(at.order(maker.maker()), request=bytes(150_000))
            os.kill(at.fetchers.pids[0], signal.SIGSTOP)
            ends = [asyncio.ensure_future(at.end_of_slab(order)) for _ in range(20)]
            await asyncio.sleep(0)
            os.kill(at.fetchers.pids[0], signal.SIGCONT)
            async with asyncio.timeout(TIMEOUT_S):
                while len(held) < 20:
                    at.fetchers.tick()
                    await asyncio.sleep(0.01)
            for number in held:
                maker.lending.refuse(number)
            await asyncio.gather(*ends)
            assert {type(end.result().error) for end in ends} == {NeighbourGone}
            assert [len(asked.request.slab) for asked in maker.asked] == [150_000] * 20
            maker.answer = lambda asked: maker.lending.refuse(asked.number)
            longest = replace(order, request=bytes(wire.BODY_BYTES_MAX))
            assert "refused" in str((await at.end_of_slab(longest)).error)
            longer = replace(order, request=bytes(wire.BODY_BYTES_MAX + 1))
            assert "name fewer urls" in str((await at.end_of_slab(longer)).error)
            assert len(maker.asked) == 21

    asyncio.run(play())


def test_a_refusal_is_told_with_the_makers_name() -> None:
    async def play() -> None:
        async with reader() as at, makers() as (maker,):
            maker.answer = lambda asked: maker.lending.refuse(asked.number)
            end = await at.slab(maker.maker())
            assert type(end.error) is NeighbourGone
            assert end.error.peer == "node-1"
            assert (end.neighbour_bytes, end.note) == (0, b"")
            assert [asked.request.slab for asked in maker.asked] == [REQUEST]
            maker.answer = maker.give_slab
            assert (await at.slab(maker.maker())).error is None

    asyncio.run(play())


def test_slabs_that_wait_take_no_place_of_a_block(awry: Awry) -> None:
    etag = open_store("s3://bucket").head("s3://bucket/shard.bin").etag

    async def play() -> None:
        async with reader(count=2) as at, makers() as (maker,):
            maker.answer = lambda _: None
            slabs = [asyncio.ensure_future(at.slab(maker.maker())) for _ in range(SLABS_MAX)]
            await maker.until(lambda: len(maker.asked) == SLABS_MAX)
            assert await at.read(etag) is None
            assert at.bytes_at(0) == BODY[10 : 10 + LENGTH]
            assert at.fetchers.statistics().read_bytes == LENGTH
            at.fetchers.tick()
            assert len(at.fetchers.pids) == 1, "no fetcher is short of anything"
            slabs += [asyncio.ensure_future(at.slab(maker.maker())) for _ in range(3)]
            await asyncio.sleep(0)
            at.fetchers.tick()
            assert len(at.fetchers.pids) == 2, "three slabs wait for a thread"
            await maker.until(lambda: len(maker.asked) == SLABS_MAX + 3)
            for asked in maker.asked:
                maker.lending.refuse(asked.number)
            assert all(end.error for end in await asyncio.gather(*slabs))

    asyncio.run(play())


def _maps(pid: int, name: str) -> bool:
    return f"memfd:{name}" in Path(f"/proc/{pid}/maps").read_text()


def test_a_fetcher_gives_an_arena_up_once_nothing_is_read_into_it() -> None:
    async def play() -> None:
        async with reader() as at, makers() as (maker,):
            assert (await at.slab(maker.maker())).error is None
            (pid,) = at.fetchers.pids
            assert _maps(pid, "slots")
            at.fetchers.detach_arena(READ)
            await at.until(lambda: not _maps(pid, "slots"))
            assert (await at.slab(maker.maker())).error is None

    asyncio.run(play())


def test_what_a_maker_gives_wrongly_is_refused() -> None:
    async def play() -> None:
        async with reader() as at, makers() as (maker,):
            wrong: list[Callable[[Asked], None]] = [
                lambda asked: maker.lending.give(asked.number, Region(0, 10), 99, b""),
                lambda asked: maker.lending.give(asked.number, Region(0, SLOT_BYTES + 1), 7),
                lambda asked: maker.lending.give(asked.number, Region(SLOT_BYTES - 1, 2), 7),
                lambda asked: maker.lending.give(
                    asked.number, Region(0, 1), 7, bytes(wire.NOTE_BYTES_MAX + 1)
                ),
            ]
            for maker.answer in wrong:
                assert "refused" in str((await at.slab(maker.maker())).error)
            await maker.until(lambda: len(maker.given) == len(wrong))
            pid = maker.lending.pid
            maker.answer = maker.give_slab
            assert (await at.slab(maker.maker())).error is None
            assert maker.lending.pid == pid

    asyncio.run(play())


def test_an_arena_that_is_returned_stays_until_all_of_it_is_sent() -> None:
    async def play() -> None:
        async with reader() as at, makers() as (maker,):
            pid = maker.lending.pid

            def give_and_return(asked: Asked) -> None:
                maker.give_slab(asked)
                maker.lending.return_arena(7)

            maker.answer = give_and_return
            assert (await at.slab(maker.maker())).error is None
            assert at.slot_bytes() == bytes(maker.made.buffer)
            await maker.until(lambda: maker.given and not _maps(pid, "made"))
            maker.answer = maker.give_slab
            assert "refused" in str((await at.slab(maker.maker())).error)

    asyncio.run(play())
