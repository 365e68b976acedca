"""Some fetchers of a test, which read one shard of a server that misbehaves on request."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from awry import Awry, awry_server
from dataplane_bench.s3 import make_certificate
from servers import reach

from dataplane.arena.memfd import Arena
from dataplane.base.trace import Trace
from dataplane.model.config import PeerTls
from dataplane.model.records import Region, StorePause
from dataplane.node.fetchers import Fetchers, OnKept
from dataplane.rpc import fetches, tasks
from dataplane.store.connect import open_store
from dataplane.store.outage import Outage, Outages, Pauses

BODY = bytes(i % 251 for i in range(600_000))
URL = "s3://bucket/shard.bin"
LENGTH = 200_000
ARENA_BYTES = 1 << 20
TIMEOUT_S = 60.0
# Parts of the shard, with a gap, and where they go: not in order.
PARTS = (
    (Region(10, 100_000), Region(300_000, 100_000)),
    (Region(100_010, 90_000), Region(7, 90_000)),
    (Region(195_010, 5_000), Region(500_000, 5_000)),
)


@pytest.fixture
def awry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Awry]:
    with awry_server({"bucket/shard.bin": BODY}) as server:
        reach(server, monkeypatch)
        yield server


@pytest.fixture
def awry_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Awry]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate")
    with awry_server({"bucket/shard.bin": BODY}, make_certificate(tmp_path)) as server:
        reach(server, monkeypatch)
        yield server


@pytest.fixture
def etag(awry: Awry) -> str:
    """The version of the shard; the server has seen no request yet."""
    known = open_store("s3://bucket").head(URL).etag
    awry.seen.clear()
    return known


class Node:
    """Some fetchers, their arenas, and what they have told."""

    def __init__(
        self,
        count: int,
        budget_s: float,
        request_timeout_s: float,
        kept_folder: str = "",
        tls: PeerTls | None = None,
    ) -> None:
        self.arena = Arena.create("blocks", ARENA_BYTES)
        self.preambles = Arena.create("preambles", ARENA_BYTES)
        self.preambles.reserve(0, ARENA_BYTES)  # the fetchers allocate what they need of the other
        environment = tuple(b"%s=%s" % entry for entry in os.environb.items())
        start = fetches.StartFetching(
            environment, budget_s, request_timeout_s, kept_folder=kept_folder, tls=tls
        )
        arenas = (self.arena, self.preambles)
        self.outages: list[Outage] = []
        self.pauses: list[StorePause] = []
        self.all_pauses = Pauses()
        self.all_pauses.join(self.pauses.append)
        outages = Outages(self.outages.append)
        self.fetchers = Fetchers(count, start, arenas, Trace("test"), outages, self.all_pauses)

    def read(
        self, etag: str, at: int = 0, length: int = LENGTH, url: str = URL
    ) -> Awaitable[fetches.Outcome]:
        """Bytes 10 to 10 + length, to this place of the arena."""
        into = Region(at, length)
        return self.end_of(fetches.ReadRange(0, url, 10, etag, tasks.BLOCK_ARENA, into))

    def read_parts(self, etag: str) -> Awaitable[fetches.Outcome]:
        """Parts of bytes 10 to 10 + LENGTH, in one request."""
        targets = [fetches.ReadTarget(part.offset, into) for part, into in PARTS]
        first, *more = targets
        return self.end_of(
            fetches.ReadRange(
                0, URL, first.offset, etag, tasks.BLOCK_ARENA, first.into, tuple(more)
            )
        )

    def check_parts(self) -> None:
        for part, into in PARTS:
            body = BODY[part.offset : part.offset + part.length]
            assert self.bytes_at(into.offset, into.length) == body

    async def end_of(
        self, order: fetches.ReadBody, on_kept: OnKept | None = None
    ) -> fetches.Outcome:
        end: asyncio.Future[fetches.Outcome] = asyncio.Future()
        self.fetchers.read(order, end.set_result, on_kept)
        async with asyncio.timeout(TIMEOUT_S):
            return await end

    def bytes_at(self, at: int, length: int = LENGTH) -> bytes:
        return bytes(self.arena.view(at, length))

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():  # noqa: ASYNC110 - of other processes
                await asyncio.sleep(0)


@asynccontextmanager
async def node(
    count: int = 1,
    budget_s: float = 60.0,
    request_timeout_s: float = 30.0,
    kept_folder: str = "",
) -> AsyncIterator[Node]:
    made = Node(count, budget_s, request_timeout_s, kept_folder)
    try:
        yield made
    finally:
        made.fetchers.close()
        made.arena.close()
        made.preambles.close()
