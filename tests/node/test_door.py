"""Which connections a node accepts, and what happens when there are too many."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from dataplane.base.trace import Trace
from dataplane.model.errors import ConfigError
from dataplane.node import door as doors
from dataplane.node.door import Door
from dataplane.rpc import local


class Visitor:
    def __init__(self, party: Party, sock: socket.socket) -> None:
        self.party, self.sock = party, sock

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.party.inside.remove(self)
        self.party.door.left(self)
        self.sock.close()

    def hung_up(self) -> None:
        self.party.gone.append(self)
        self.close()


class Party:
    """A door over a real listener, and the admitted connections in order of arrival."""

    def __init__(self, count_max: int) -> None:
        self.name = f"dp-door-{os.getpid()}-{time.monotonic_ns()}"
        self.inside: list[Visitor] = []
        self.gone: list[Visitor] = []
        self.door = Door(local.listen(self.name), self._admit, Trace("test"), count_max)
        self.door.open()

    def _admit(self, sock: socket.socket) -> Visitor:
        self.inside.append(Visitor(self, sock))
        return self.inside[-1]

    async def comes(self, stack: contextlib.ExitStack) -> socket.socket:
        """Open another connection, and wait until the door has seen it."""
        sock = stack.enter_context(local.connect(self.name, 10.0))
        await turns()
        return sock


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def party(count_max: int) -> AsyncIterator[tuple[Party, contextlib.ExitStack]]:
    with contextlib.ExitStack() as stack:
        made = Party(count_max)
        try:
            yield made, stack
        finally:
            made.door.close()
            for visitor in list(made.inside):
                visitor.close()


def test_silent_connections_are_closed_and_greeted_ones_stay() -> None:
    async def play() -> None:
        async with party(8) as (made, stack):
            for _ in range(2):
                await made.comes(stack)
            silent, polite = made.inside
            made.door.greeted(polite)
            made.door.tick()
            assert made.inside == [silent, polite]
            made.door.tick(time.monotonic() + 1000)
            assert made.inside == [polite]

    asyncio.run(play())


def test_a_connection_that_ends_is_reported_at_once_though_nothing_of_it_is_read() -> None:
    async def play() -> None:
        async with party(8) as (made, stack):
            socks = [await made.comes(stack) for _ in range(4)]
            first, second, third, fourth = made.inside
            socks[1].send(b"unread")
            await turns()
            assert not made.gone
            socks[1].close()
            await turns()
            assert made.gone == [second]
            third.close()  # by the node itself
            socks[2].close()
            await made.comes(stack)  # takes the descriptor of one that has gone
            assert made.gone == [second]
            socks[0].close()
            await turns()
            assert made.gone == [second, first]
            assert made.inside[0] is fourth
            assert len(made.inside) == 2

    asyncio.run(play())


def test_in_a_full_node_only_the_longest_silent_connection_is_closed() -> None:
    async def play() -> None:
        async with party(4) as (made, stack):
            for _ in range(4):
                await made.comes(stack)
            first, _, third, fourth = made.inside
            made.door.greeted(first)
            await made.comes(stack)
            assert made.inside[:3] == [first, third, fourth]
            made.door.greeted(third)
            with pytest.raises(ConfigError, match=r"process \d+ has 2 connections .* close\(\)"):
                made.door.greeted(fourth)
            third.close()
            made.door.greeted(fourth)

    asyncio.run(play())


def test_a_process_may_have_only_a_few_silent_connections(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        async with party(1000) as (made, stack):
            for _ in range(100):
                await made.comes(stack)
            assert len(made.inside) == doors._SILENT_MAX
        assert 0 < len(caplog.records) <= 30, "its rate is limited"

    asyncio.run(play())


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    filler: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 400), hard))
        with contextlib.suppress(OSError):
            while True:
                filler.append(os.dup(0))
        yield
    finally:
        for fd in filler:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_descriptors_nothing_spins_and_later_connections_are_accepted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(doors, "_PAUSE_S", 0.01)

    async def play() -> None:
        async with party(8) as (made, stack):
            await made.comes(stack)
            made.door.greeted(made.inside[0])
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            with no_descriptor_left():
                waiting.connect("\0" + made.name)
                for _ in range(1000):
                    await asyncio.sleep(0)
                assert len(made.inside) == 1
                assert "nobody is let in" in caplog.text
                assert len(caplog.records) <= 30
            async with asyncio.timeout(60):
                while len(made.inside) < 2:  # noqa: ASYNC110 - the door has no event for it
                    await asyncio.sleep(0)

    asyncio.run(play())
