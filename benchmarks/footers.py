"""What does a block cost if its dataset has large footers?

    python benchmarks/footers.py [--shards 100] [--columns 100] [--groups 100] [--json]

Parquet shards with this many columns and row groups, and blocks of 1 MiB, which are read from a
store in memory in random order. The table shows CPU microseconds per block: of a node that fetches
it, with and without a copy of the footer; and of a worker that looks up the footer, if it parses
the whole footer and in the way that workers do it.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import random
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataplane.arena.memfd import Arena
from dataplane.formats.base import RawBlock
from dataplane.formats.parquet_footers import Footers, parsed
from dataplane.model import Region, StorePause
from dataplane.node.block_read import BlockRead
from dataplane.node.fetch import Fetcher
from dataplane.node.fetchers import Report
from dataplane.node.preambles import Preambles
from dataplane.rpc import fetches
from dataplane.rpc.membership import NodeReads
from dataplane.rpc.tasks import BLOCK_ARENA, PREAMBLE_ARENA, RawBlockRef
from dataplane.store.reads import copy_into

BLOCK_BYTES, AT_ONCE = 1 << 20, 16
BLOCKS_FETCHED, BLOCKS_FOUND, BLOCKS_PARSED = 2000, 1000, 100


def footer_of(columns: int, groups: int) -> bytes:
    """The footer of a shard of floats."""
    values, sink = np.random.default_rng(1).random(groups), io.BytesIO()
    table = pa.table({f"column_{each:05d}": values for each in range(columns)})
    pq.write_table(table, sink, row_group_size=1)
    content = sink.getvalue()
    return content[-8 - int.from_bytes(content[-8:-4], "little") :]


class MemoryOrigin:
    """Shards of zeros with a footer, read in the calling process."""

    def __init__(self, footer: bytes, blocks: Arena, preambles: Arena) -> None:
        self._footer, self._body = footer, bytes(BLOCK_BYTES)
        self._arenas = {BLOCK_ARENA: blocks, PREAMBLE_ARENA: preambles}

    def read(self, order: fetches.ReadBody, report: Report) -> None:
        assert isinstance(order, fetches.ReadRange)
        into = order.into
        body = self._body[: into.length] if order.offset else self._footer
        copy_into(body, self._arenas[order.arena_id].view(into.offset, into.length))
        asyncio.get_running_loop().call_soon(report, None)

    def start(self, store: str = "") -> None: ...

    def read_slab(self, _order: object, _arena_fd: int, _report: object) -> int:
        raise AssertionError

    def end_slab(self, number: int) -> None: ...

    def detach_arena(self, arena_id: int) -> None: ...

    def trouble(self, url: str) -> None: ...

    def pause(self, pause: StorePause) -> None: ...

    def look(self) -> None: ...

    def statistics(self) -> NodeReads:
        return NodeReads()

    def close(self) -> None: ...


async def fetched_us(footer: bytes, shards: int, *, is_copied: bool) -> float:
    """CPU time of this process to fetch a block of a shard that has been read once before."""
    arena, chance = Arena.create("footers", 64 << 20), random.Random(1)
    arena.reserve(0, arena.size_bytes)
    place, preamble = Region(len(footer), BLOCK_BYTES), Region(0, len(footer))
    length = place.length + preamble.length
    preambles = Preambles(shards * 2 * len(footer))
    fetcher = Fetcher(MemoryOrigin(footer, arena, preambles.arena), preambles)
    free: asyncio.Queue[int] = asyncio.Queue()

    async def read(urls: list[str]) -> None:
        for key, url in enumerate(urls):
            slot = await free.get()

            def ended(error: fetches.Outcome, key: int = key, slot: int = slot) -> None:
                assert error is None
                fetcher.let_go(key)
                free.put_nowait(slot)

            raw = RawBlockRef(url, 0, 1, place, preamble, length, "tag")
            into = Region(slot * length, length)
            fetcher.fetch([BlockRead(key, raw, into, ended, arena if is_copied else None)])
        for slot in [await free.get() for _ in range(AT_ONCE)]:
            free.put_nowait(slot)

    for slot in range(AT_ONCE):
        free.put_nowait(slot)
    await read([f"s3://b/{each}" for each in range(shards)])
    began = time.process_time()
    await read([f"s3://b/{chance.randrange(shards)}" for _ in range(BLOCKS_FETCHED)])
    fetcher.close()
    return (time.process_time() - began) / BLOCKS_FETCHED * 1e6


def found_us(footer: bytes, shards: int, groups: int, *, is_whole: bool) -> float:
    """CPU time of a worker that looks up the footer of a block."""
    footers, chance, nowhere = Footers(), random.Random(1), Region(0, 0)
    count = BLOCKS_PARSED if is_whole else BLOCKS_FOUND
    spent = 0.0
    for each in range(-2 * shards, count):  # after each shard was seen
        number = chance.randrange(shards)
        block = RawBlock(
            f"s3://b/{number}", chance.randrange(groups), 1, nowhere, 0, nowhere,
            memoryview(footer), memoryview(b""), (), number + 1,
        )  # fmt: skip
        if is_whole and each < 0:
            continue
        began = time.thread_time()
        if is_whole:
            parsed(footer)
        else:
            footers.group_of(block)
        spent += time.thread_time() - began if each >= 0 else 0.0
    return spent / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    given = parser.parse_args()
    footer = footer_of(given.columns, given.groups)
    found = {
        "footer, bytes": float(len(footer)),
        "node, footer copied to the block": asyncio.run(
            fetched_us(footer, given.shards, is_copied=True)
        ),
        "node, footer kept apart": asyncio.run(fetched_us(footer, given.shards, is_copied=False)),
        "worker, footer parsed whole": found_us(footer, given.shards, given.groups, is_whole=True),
        "worker, as in production": found_us(footer, given.shards, given.groups, is_whole=False),
    }
    if given.json:
        print(json.dumps({name: round(value, 1) for name, value in found.items()}))
        return
    for name, value in found.items():
        print(f"{name:<40}{value:>12,.0f}")


if __name__ == "__main__":
    main()
