"""A trainer's connection with its node."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakValueDictionary

import pytest
from openings import opening
from raw_trainer import Node, Trainer

from dataplane.base.trace import Trace
from dataplane.model.config import PROTOCOL_VERSION, VERSION
from dataplane.model.errors import ConfigError, PeerLost
from dataplane.node.door import Door
from dataplane.node.server import (
    _MESSAGES_A_TURN,
    _REQUESTS_MAX,
    NodeServer,
    TrainerConnection,
    _Process,
)
from dataplane.rpc import local, messages

HELLO = messages.Hello(VERSION, PROTOCOL_VERSION, os.getpid())


def fake_server(closed: asyncio.Event) -> Any:
    return SimpleNamespace(
        door=SimpleNamespace(greeted=lambda _: None),
        heartbeat=SimpleNamespace(awaited=""),
        jobs=SimpleNamespace(),
        node_id="node-1",
        stopping=False,
        trace=Trace("node"),
        process_of=lambda _: _Process(),
        forget=lambda _: closed.set(),
    )


class Peers:
    """Connections with one fake server: those of the node, and their other ends."""

    def __init__(self, server: Any) -> None:
        self._server, self.ended = server, []

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.ended.append(TrainerConnection(cast("Any", self._server), ours).close)
        return theirs

    def close(self) -> None:
        for close in self.ended:
            close()


async def greeted(theirs: socket.socket) -> bool:
    local.send(theirs, messages.ToNode(1, HELLO))
    answer, _ = await asyncio.to_thread(local.receive, theirs, messages.FromNode)
    return isinstance(answer.body, messages.Welcome)


async def test_a_trainer_with_many_requests_under_way_is_not_read_and_others_are() -> None:
    server, under_way, end = fake_server(asyncio.Event()), 0, asyncio.Event()

    async def wait(_: str) -> None:
        nonlocal under_way
        under_way += 1
        await end.wait()
        under_way -= 1
        raise ConfigError("it is over")

    server.draining, server.heartbeat.wait_registered = False, wait
    peers = Peers(server)
    with peers.connect() as flood, peers.connect() as other:
        assert await greeted(flood)
        body = opening("x")
        flood.settimeout(60)

        def send() -> None:
            for number in range(2, 102):
                local.send(flood, messages.ToNode(number, body))

        sending = asyncio.create_task(asyncio.to_thread(send))
        assert await greeted(other)
        async with asyncio.timeout(60):
            while under_way < _REQUESTS_MAX:  # noqa: ASYNC110 - as its messages come
                await asyncio.sleep(0)
        assert await greeted(other)
        assert under_way == _REQUESTS_MAX
        end.set()
        for _ in range(100):
            answer, _ = await asyncio.to_thread(local.receive, flood, messages.FromNode)
            assert isinstance(answer.body, ConfigError)
        await sending
        assert not under_way
        peers.close()


async def test_a_flood_of_valid_messages_leaves_others_their_turn() -> None:
    """The loop answers another trainer before it has read all of the flood."""

    peers = Peers(fake_server(asyncio.Event()))
    with peers.connect() as flood, peers.connect() as other:
        flood.setblocking(False)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                local.send(flood, messages.ToNode(0, messages.Release("j", (1, 2))))
                sent += 1
        assert sent > 5 * _MESSAGES_A_TURN
        local.send(other, messages.ToNode(1, HELLO))
        other.setblocking(False)
        turns = 0
        while not select.select([other], [], [], 0)[0]:
            turns += 1
            await asyncio.sleep(0)
        assert turns <= 5
        peers.close()


async def test_a_job_is_opened_when_what_its_process_said_before_elsewhere_was_read() -> None:
    server, process, order = fake_server(asyncio.Event()), _Process(), []
    server.process_of, server.draining = lambda _: process, False
    peers = Peers(server)
    sockets = [peers.connect() for _ in range(_MESSAGES_A_TURN)]
    first = peers.ended[0].__self__
    first._close_job = order.append

    async def wait_registered(job: str) -> None:
        order.append(job)
        raise ConfigError("it is over")

    server.heartbeat.wait_registered = wait_registered
    assert await greeted(sockets[-1])
    leaving = messages.CloseJob("x")
    for body in (*[messages.Release("x", (1,))] * 40, leaving):
        local.send(sockets[0], messages.ToNode(0, body))
    local.send(sockets[-1], messages.ToNode(2, opening("x", job="x")))
    answer, _ = await asyncio.to_thread(local.receive, sockets[-1], messages.FromNode)
    assert isinstance(answer.body, ConfigError)
    assert order == [leaving, "x"]
    peers.close()
    for sock in sockets:
        sock.close()


async def test_a_process_that_opens_job_after_job_is_slowed_down_also_on_new_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, seconds in {"_TURN_S": 0.0, "_JOB_COST_S": 3600.0, "_UNPAID_S_MAX": 7200.0}.items():
        monkeypatch.setattr(f"dataplane.node.server.{name}", seconds)

    server, started = fake_server(asyncio.Event()), []
    server.heartbeat.wait_registered, server.draining = None, True  # it opens no job
    server._processes = WeakValueDictionary()
    server.process_of = partial(NodeServer.process_of, server)
    peers = Peers(server)
    for n in range(5):
        with peers.connect() as sock:
            assert await greeted(sock)
            body = opening("x", job=f"j{n}")
            local.send(sock, messages.ToNode(2, body))
            for _ in range(100):
                await asyncio.sleep(0)
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                started.append(local.receive(sock, messages.FromNode)[0].body)
        peers.close()
        peers.ended.clear()
        for _ in range(100):
            await asyncio.sleep(0)
        gc.collect()
    assert [type(answer) for answer in started] == [PeerLost] * 3


async def test_the_next_long_message_of_a_process_waits_and_short_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_PARSE_PAUSES", "_PARSE_PAUSE_S_MAX"):
        monkeypatch.setattr(f"dataplane.node.server.{name}", 1e6)
    source = messages.DatasetSource(tuple(f"/data/{n}" for n in range(1000)))
    long = opening(source)

    server, process = fake_server(asyncio.Event()), _Process()
    server.process_of = lambda _: process
    peers = Peers(server)
    with peers.connect() as first, peers.connect() as second:
        local.send(first, messages.ToNode(2, long))
        answer, _ = await asyncio.to_thread(local.receive, first, messages.FromNode)
        assert "say Hello first" in str(answer.body)
        assert await greeted(first)
        first.close()
        local.send(second, messages.ToNode(2, long))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not select.select([second], [], [], 0)[0]
        assert process._parsing.locked()
        peers.close()


async def test_many_connections_of_a_process_have_the_turns_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This holds for messages that are read, and for requests that start."""
    monkeypatch.setattr("dataplane.node.server._TURN_S", 3600.0)

    server, started, flood = fake_server(asyncio.Event()), [], _Process()

    async def wait_registered(job_id: str) -> None:
        started.append(job_id)
        await asyncio.Event().wait()

    server.draining, server.heartbeat.wait_registered = False, wait_registered
    server.process_of = lambda _: flood
    peers, other = Peers(server), Peers(server)
    sockets = [peers.connect() for _ in range(4)]
    server.process_of = lambda _: _Process()
    sockets.append(other.connect())
    for n, sock in enumerate(sockets):
        assert await greeted(sock)
        body = opening("x", job=f"j{n}")
        local.send(sock, messages.ToNode(2, body))
    async with asyncio.timeout(60):
        while len(started) < 2:  # noqa: ASYNC110 - as its messages come
            await asyncio.sleep(0)
    assert sorted(started) == ["j0", "j4"]
    for _ in range(100):
        await asyncio.sleep(0)
    assert sorted(started) == ["j0", "j4"]
    first = peers.ended[0].__self__
    sent = 2 * _MESSAGES_A_TURN
    for _ in range(sent):
        local.send(sockets[0], messages.ToNode(0, messages.Release("j", (1, 2))))
    first._on_readable()
    left = 0
    with contextlib.suppress(BlockingIOError):
        while first._sock.recv(1000, socket.MSG_DONTWAIT):
            left += 1
    assert sent - left == _MESSAGES_A_TURN // 4
    for one in (peers, other):
        one.close()
    for sock in sockets:
        sock.close()


@pytest.mark.parametrize("part", [b"\xa1x", b"\x90", b"\xc0"], ids=["urls", "messages", "nothing"])
async def test_a_message_of_a_million_empty_parts_ends_its_session(
    part: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    closed = asyncio.Event()
    peers = Peers(fake_server(closed))
    with peers.connect() as theirs:
        # A Release of so many slabs.
        head = b"\x93\xa6ToNode\x00\x93\xa7Release\xa1j\xdd\x00\x10\x00\x00"
        fd = local._sealed(head + part * (1 << 20))
        try:
            size = len(head) + (len(part) << 20)
            packet = local._LARGE_PACKET.pack(local._LARGE, size)
            local._send_packet(theirs, packet, (fd,))
        finally:
            os.close(fd)
        await closed.wait()
    assert "more than 262144 values in its lists" in caplog.text


def test_a_request_for_a_slab_needs_a_number_of_its_own(tmp_path: Path, arrow: str) -> None:
    with Node(tmp_path) as node, Trainer(node) as trainer:
        trainer.open(arrow)
        stream = trainer.call(messages.OpenStream("j", 0, 0)).stream_id
        trainer.tell(messages.NextSlab(stream, 0, 0.0))  # with the number 0: ignored
        assert isinstance(trainer.call(messages.NextSlab(stream, 0, 0.0)), messages.Slab)


async def test_a_trainer_that_asks_and_hangs_up_at_once_leaves_nothing_that_was_never_run(
    recwarn: pytest.WarningsRecorder,
) -> None:
    closed = asyncio.Event()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    TrainerConnection(cast("Any", fake_server(closed)), ours)
    with theirs:
        local.send(theirs, messages.ToNode(1, HELLO))
        answer, _ = await asyncio.to_thread(local.receive, theirs, messages.FromNode)
        assert isinstance(answer.body, messages.Welcome)
        local.send(theirs, messages.ToNode(2, messages.OpenStream("job", 0, 0)))
    await closed.wait()
    assert not [str(one.message) for one in recwarn if "never awaited" in str(one.message)]


async def test_a_connection_that_is_gone_is_closed_although_its_requests_wait() -> None:
    closed, waits = asyncio.Event(), asyncio.Event()
    server = fake_server(closed)

    async def wait(_: str) -> None:
        waits.set()
        await asyncio.Event().wait()

    def forget(connection: TrainerConnection) -> None:
        server.door.left(connection)
        closed.set()

    server.draining, server.heartbeat.wait_registered = False, wait
    server.forget = forget
    name = f"dp-gone-{os.getpid()}"

    def admit(sock: socket.socket) -> TrainerConnection:
        return TrainerConnection(cast("Any", server), sock)

    server.door = Door(local.listen(name), admit, Trace("node"))
    server.door.open()
    async with asyncio.timeout(60):
        with local.connect(name, 60.0) as theirs:
            assert await greeted(theirs)
            body = opening("x")
            for number in range(2, 100):  # more than are read
                local.send(theirs, messages.ToNode(number, body))
            await waits.wait()
            assert not closed.is_set()
        await closed.wait()
    server.door.close()
