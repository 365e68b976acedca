"""A node that lends in a test: a real lender over real sockets, and a node that is asked."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from dataplane.arena.memfd import Arena
from dataplane.base.trace import Trace
from dataplane.model.config import PeerTls
from dataplane.model.errors import NeighbourGone
from dataplane.model.records import BlockForm, Region
from dataplane.neighbours.asking import Lines
from dataplane.neighbours.line_tls import LineTls
from dataplane.neighbours.wire import GIVEN_WHOLE, Outcome
from dataplane.node.neighbours import Lending
from dataplane.rpc import lending
from dataplane.rpc.fetches import Neighbour, Peer

JOB, GENERATION, LENDER, ASKER = "a job", 3, "node-1", "node-2"
DATASET = bytes(range(16))
BLOCK_BYTES = 300_000
BLOCKS = 8
TIMEOUT_S = 60.0


def free(_: socket.socket) -> None:
    """Nobody else reads the same bytes."""


class NotedLending(Lending):
    """Notes in `given` the numbers whose regions are no longer read."""

    given: list[int]

    def give(self, number: int, *region: Any, **more: Any) -> None:
        super().give(number, *region, **more, after=lambda: self.given.append(number))


class LendingNode:
    """Blocks 0 to BLOCKS, one after the other in its arena. `answer` says what to do if asked."""

    def __init__(self, host: str, tls: PeerTls | None = None, node_id: str = LENDER) -> None:
        self.arena = Arena.create("lent", BLOCKS * BLOCK_BYTES)
        self.arena.reserve(0, BLOCKS * BLOCK_BYTES)
        self.arena.buffer[:] = os.urandom(BLOCKS * BLOCK_BYTES)
        self.key = os.urandom(32)
        self.asked: list[lending.Asked] = []
        self.given: list[int] = []
        self.answer: Callable[[lending.Asked], None] = self.give
        self.lines = Lines(None if tls is None else LineTls(tls))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        self.listens_at = listener.getsockname()[:2]
        self.address = (
            f"[{host}]:{self.listens_at[1]}" if ":" in host else "{}:{}".format(*self.listens_at)
        )
        self.lending = NotedLending(
            listener,
            node_id,
            self.arena,
            Trace("node"),
            tls=tls,
        )
        self.lending.given = self.given
        self.lending.serve(self._on_asked)
        self.lending.keys(JOB, GENERATION, self.key)

    def _on_asked(self, asked: lending.Asked) -> None:
        self.asked.append(asked)
        self.answer(asked)

    def give(self, asked: lending.Asked) -> None:
        request = asked.request
        region = Region(request.block * BLOCK_BYTES + request.offset, request.length)
        self.lending.give(asked.number, region)

    def give_run(self, asked: lending.Asked, lengths: Sequence[int], ends: Sequence[int]) -> None:
        """The beginnings of its blocks, of these lengths, which end like this."""
        regions = [
            Region((asked.request.block + number) * BLOCK_BYTES, length)
            for number, (length, end) in enumerate(zip(lengths, ends, strict=True))
            if end == GIVEN_WHOLE
        ]
        first, *more = regions or [Region(0, 0)]
        self.lending.give(asked.number, first, more=tuple(more), ends=tuple(ends))

    def give_decoded(self, asked: lending.Asked, length: int) -> None:
        """Only the decoded block is here, of this length."""
        self.lending.give(asked.number, Region(0, 0), ends=(length,))

    def block(self, number: int, offset: int = 0, length: int = BLOCK_BYTES) -> bytes:
        return bytes(self.arena.view(number * BLOCK_BYTES + offset, length))

    def neighbour(
        self,
        block: int = 0,
        offset: int = 0,
        *,
        form: BlockForm = BlockForm.RAW,
        generation: int = GENERATION,
        key: bytes | None = None,
        job: str = JOB,
        node_id: str = LENDER,
        address: str = "",
    ) -> Neighbour:
        own_key = self.key if key is None else key
        peer = Peer(address or self.address, job, generation, own_key, ASKER, node_id)
        return Neighbour(peer, DATASET, block, offset, form)

    async def ask(self, neighbour: Neighbour, length: int = BLOCK_BYTES) -> bytes:
        """Return the neighbour's bytes; b"" if it refused."""
        into = memoryview(bytearray(length))
        while True:
            try:
                answer = await asyncio.to_thread(self.lines.read, neighbour, [into], free, bool)
            except NeighbourGone as error:
                if isinstance(error.__cause__, TimeoutError):  # the machine is busy
                    continue
                raise
            return bytes(into) if answer.outcome is Outcome.GIVEN else b""

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():  # noqa: ASYNC110 - of other processes
                await asyncio.sleep(0.001)


@asynccontextmanager
async def lending_node(
    host: str = "127.0.0.1", tls: PeerTls | None = None, node_id: str = LENDER
) -> AsyncIterator[LendingNode]:
    node = LendingNode(host, tls, node_id)
    try:
        yield node
    finally:
        node.lending.close()
        node.lines.close()
        node.arena.close()
