"""Nodes that lend each other blocks and slabs inside of TLS: real lenders and fetchers."""

from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path

import pytest
from certificates import Authority
from fetching import LENGTH, URL
from slab_makers import SLOT_BYTES, SLOTS, Maker, Reader, makers, reader

from dataplane.fetcher.neighbours import READS_MIN
from dataplane.model.config import PeerTls
from dataplane.model.records import BlockForm, Region
from dataplane.rpc import fetches, tasks

pytestmark = pytest.mark.usefixtures("one_fork_server")

ROUNDS_MAX = READS_MIN // 3 - 2
"""Of three reads: with more, those that a busy machine delays are late, and cut off."""


def written(authority: Authority, folder: Path) -> PeerTls:
    files = authority.write(folder, "node")
    return PeerTls(files.cert, files.key, files.ca)


def block(maker: Maker, number: int, at: int = 0) -> fetches.ReadRange:
    """Only the neighbour has these bytes."""
    neighbour = maker.neighbour(number, form=BlockForm.DECODED)
    into = Region(at, LENGTH)
    return fetches.ReadRange(0, URL, 10, "", tasks.BLOCK_ARENA, into, neighbour=neighbour)


def shown(maker: Maker) -> str:
    """The certificate that its lender shows now."""
    return ssl.get_server_certificate(maker.listens_at)


def test_blocks_and_slabs_arrive_byte_for_byte_also_while_certificates_are_replaced(
    tmp_path: Path,
) -> None:
    authority = Authority.made()
    tls = written(authority, tmp_path)

    async def everything(at: Reader, maker: Maker) -> None:
        maker.answer = maker.give
        reads = [at.end_of(block(maker, n, n * LENGTH)) for n in range(3)]
        assert await asyncio.gather(*reads) == [fetches.NeighbourGave(LENGTH)] * 3
        for n in range(3):
            assert at.bytes_at(n * LENGTH) == maker.block(n, 0, LENGTH)
        maker.answer = maker.give_slab
        slabs = [at.slab(maker.maker(), slot=slot) for slot in range(SLOTS)]
        for slot, end in enumerate(await asyncio.gather(*slabs)):
            assert (end.error, end.neighbour_bytes, end.note) == (None, SLOT_BYTES, maker.note)
            assert at.slot_bytes(slot) == bytes(maker.made.buffer)

    async def play() -> None:
        async with reader(tls=tls) as at, makers(tls=tls) as (maker,):
            await everything(at, maker)
            before = await asyncio.to_thread(shown, maker)
            written(authority, tmp_path)
            deadline, rounds_left = time.monotonic() + 60, ROUNDS_MAX
            while await asyncio.to_thread(shown, maker) == before:
                assert time.monotonic() < deadline
                if rounds_left := max(rounds_left - 1, 0):
                    await everything(at, maker)
            await everything(at, maker)

    asyncio.run(play())
