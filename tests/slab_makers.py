"""Makers of a test, which give the slabs that they have, and a node that reads them."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from fetching import TIMEOUT_S, Node
from lender import ASKER, GENERATION, JOB, LENDER, LendingNode
from lender_bench import frame

from dataplane.arena.memfd import Arena
from dataplane.model.config import PeerTls
from dataplane.model.records import Region
from dataplane.neighbours import wire
from dataplane.rpc import fetches, lending

MADE, READ = 7, 9
"""The numbers of the delivery arenas of maker and reader."""
SLOT_BYTES = 1 << 20
SLOTS = 4
REQUEST = b"a slab"


class Maker(LendingNode):
    """Gives `length` bytes of its only slab, and a note."""

    def __init__(self, host: str = "127.0.0.1", tls: PeerTls | None = None) -> None:
        super().__init__(host, tls)
        self.made = Arena.create("made", SLOT_BYTES)
        self.made.reserve(0, SLOT_BYTES)
        self.made.buffer[:] = os.urandom(SLOT_BYTES)
        self.lending.lend_arena(MADE, self.made.fd)
        self.note = os.urandom(300)
        self.length = SLOT_BYTES
        self.answer = self.give_slab

    def give_slab(self, asked: lending.Asked) -> None:
        self.lending.give(asked.number, Region(0, self.length), MADE, self.note, ends=())

    def maker(
        self, *, key: bytes | None = None, address: str = "", node_id: str = LENDER
    ) -> fetches.Peer:
        return fetches.Peer(
            address or self.address,
            JOB,
            GENERATION,
            self.key if key is None else key,
            ASKER,
            node_id,
        )

    def close(self) -> None:
        self.lending.close()
        self.lines.close()
        self.arena.close()
        self.made.close()


@asynccontextmanager
async def makers(count: int = 1, tls: PeerTls | None = None) -> AsyncIterator[list[Maker]]:
    made = [Maker(tls=tls) for _ in range(count)]
    try:
        yield made
    finally:
        for each in made:
            each.close()


class Reader(Node):
    """Fetchers that read slabs into the slots of an arena."""

    def __init__(self, count: int = 1, tls: PeerTls | None = None) -> None:
        super().__init__(count, 60.0, 30.0, tls=tls)
        self.slots = Arena.create("slots", SLOTS * SLOT_BYTES)
        self.reads: list[fetches.ReadEnded] = []
        self.numbers: list[int] = []
        """Of all orders."""

    def order(
        self,
        maker: fetches.Peer,
        slot: int = 0,
        length: int = SLOT_BYTES,
        arena_id: int = READ,
    ) -> fetches.ReadSlab:
        into = Region(slot * SLOT_BYTES, length)
        return fetches.ReadSlab(0, maker, REQUEST, arena_id, into)

    async def slab(
        self,
        maker: fetches.Peer,
        slot: int = 0,
        length: int = SLOT_BYTES,
    ) -> fetches.ReadEnded:
        """The slab, also if the machine is too busy for a handshake in time."""
        while True:
            end = await self.end_of_slab(self.order(maker, slot, length))
            if end.error is None or "did not answer in time" not in str(end.error):
                return end

    async def end_of_slab(self, order: fetches.ReadSlab) -> fetches.ReadEnded:
        end: asyncio.Future[fetches.ReadEnded] = asyncio.Future()

        def report(read: fetches.ReadEnded) -> None:
            self.reads.append(read)
            end.set_result(read)

        self.numbers.append(self.fetchers.read_slab(order, self.slots.fd, report))
        async with asyncio.timeout(TIMEOUT_S):
            return await end

    def slot_bytes(self, slot: int = 0, length: int = SLOT_BYTES) -> bytes:
        return bytes(self.slots.view(slot * SLOT_BYTES, length))

    def close(self) -> None:
        self.fetchers.close()
        for each in (self.arena, self.preambles, self.slots):
            each.close()


@asynccontextmanager
async def reader(count: int = 1, tls: PeerTls | None = None) -> AsyncIterator[Reader]:
    made = Reader(count, tls)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def false_maker(
    behave: Callable[[socket.socket, lending.Request], None],
) -> Iterator[fetches.Peer]:
    """Has the key, hears each request, and then behaves like this; at the end it stays silent."""
    key, listener, socks = os.urandom(32), socket.create_server(("127.0.0.1", 0)), []
    threads: list[threading.Thread] = []

    def serve(sock: socket.socket) -> None:
        with suppress(OSError):
            sock.sendall(wire.pack_challenge(key, frame(sock), os.urandom(32)))
            frame(sock)  # the proof
            while request := frame(sock):
                behave(sock, wire.unpack_request(request))

    def accept() -> None:
        with suppress(OSError):
            while True:
                socks.append(listener.accept()[0])
                start(lambda sock=socks[-1]: serve(sock))

    def start(work: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=work))
        threads[-1].start()

    start(accept)
    try:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        yield fetches.Peer(address, JOB, GENERATION, key, ASKER, "false")
    finally:
        for sock in (listener, *socks):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for sock in (listener, *socks):
            sock.close()
