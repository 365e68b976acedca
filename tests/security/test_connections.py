"""Connections of strangers keep nobody else out of a coordinator: real sockets, real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fleet import Run, Service
from hypothesis import given
from hypothesis import strategies as st
from small_nodes import alone_and_small
from trusted import STRANGER, TOKEN, TRUSTED, client_of, serving

from dataplane.model.errors import AccessDenied, PeerLost
from dataplane.rpc.address import network_of
from dataplane.rpc.calls import CoordinatorClient
from dataplane.rpc.connections import (
    _EXCEEDED_MAX,
    _RECENT_S,
    _SILENT_S,
    OpenConnections,
    PeerConnection,
    _is_listening,
    _peer_of,
    admission_rules,
    making_way,
)
from dataplane.rpc.membership import StatusRequest
from dataplane.security.admission import Reason
from dataplane.security.security import Security
from dataplane.security.tokens import TokenSource

OPEN_FILES, PLACES = 400, 36
NEAR = PLACES - PLACES // 4
FLOOD = 300
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The beginning of a connection with HTTP/2, with empty settings: gRPC waits for calls then."""
LIMITED = ("sh", "-c", f'ulimit -n {OPEN_FILES}; exec "$@"', "sh")
DEADLINE_S = 60.0


@contextlib.contextmanager
def coordinator(folder: Path, listen: str = "127.0.0.1:0") -> Iterator[Service]:
    """A coordinator with few places."""
    given = ("--coordinator", "--listen", listen)
    environ = {"DATAPLANE_TOKEN": TOKEN, "DATAPLANE_STATE_DIR": str(folder / "state")}
    with Service(*given, environ=environ, log=folder / "coordinator.log", within=LIMITED) as made:
        yield made


class Flood:
    """Connections that stay open."""

    def __init__(self, stack: contextlib.ExitStack, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.target = (host.strip("[]"), int(port))
        self.stack = stack
        self.waiting = stack.enter_context(selectors.DefaultSelector())
        self.ports: set[int] = set()

    def comes(self, host: str, count: int, sends: bytes = PREFACE) -> None:
        for _ in range(count):
            sock = socket.create_connection(self.target, DEADLINE_S, source_address=(host, 0))
            self.stack.enter_context(sock)
            self.ports.add(sock.getsockname()[1])
            self.waiting.register(sock, selectors.EVENT_READ)
            with contextlib.suppress(ConnectionError):
                sock.sendall(sends)

    def wait_until_left(self, count: int) -> None:
        """Wait until so many connections at most are left."""
        while len(self.waiting.get_map()) > count:
            ready = self.waiting.select(DEADLINE_S)
            assert ready, f"{len(self.waiting.get_map())} connections stay open"
            for key, _ in ready:
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                try:
                    is_open = bool(sock.recv(1 << 16))
                except ConnectionError:
                    is_open = False
                if not is_open:
                    self.waiting.unregister(sock)

    def others(self) -> set[int]:
        """The ports of this process's other connections to the same address."""
        every = psutil.Process().net_connections("tcp")
        ours = {one.laddr.port for one in every if one.raddr and one.raddr.port == self.target[1]}
        return ours - self.ports

    def wait_until_gone(self, port: int) -> None:
        """Wait until this other connection is closed on our side, too."""
        deadline = time.monotonic() + DEADLINE_S
        while port in self.others():
            assert time.monotonic() < deadline, f"the connection from port {port} stays open"
            threading.Event().wait(0.02)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


async def asks(address: str) -> None:
    """A new client gets an answer, as nodes do, which ask again."""
    client = CoordinatorClient(address, TRUSTED)
    try:
        await client._patiently("status", StatusRequest(), DEADLINE_S)
    finally:
        await client.close()


def closed_lines(service: Service) -> list[str]:
    assert service.log is not None
    return [line for line in service.log.read().splitlines() if "connections closed" in line]


def test_a_stranger_with_hundreds_of_connections_keeps_no_node_and_no_trainer_out(
    tmp_path, monkeypatch, stack
):
    alone_and_small(monkeypatch, tmp_path)
    monkeypatch.setenv("DATAPLANE_TOKEN", TOKEN)
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    url = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"id": list(range(100))}), url)
    service = stack.enter_context(coordinator(tmp_path))
    address = service.address
    log = tmp_path / "node.log"
    node = stack.enter_context(Service("--node", "--join", address, log=log))
    flood = Flood(stack, address)
    flood.comes("127.0.0.9", FLOOD)
    flood.wait_until_left(NEAR - 1)

    asyncio.run(asks(address))
    with Run(tmp_path / "run", url, 1, {"batch_size": 10, "service": address}) as run:
        run.finish()
        assert run.stream() == [[i] for i in range(100)]
    (line,) = closed_lines(service)
    assert "dataplane.security: connections closed peer=127.0.0.9 count=" in line
    assert 'why="one host may have 18 of the 36 connections that open files allow"' in line
    assert node.stop() == 0
    assert "does not answer" not in log.read_text(), "the node's connection has stayed"


@pytest.mark.parametrize("sends", [b"", PREFACE], ids=["nothing", "preface"])
def test_silent_connections_of_many_hosts_go_when_others_need_their_places(tmp_path, stack, sends):
    service = stack.enter_context(coordinator(tmp_path))
    flood = Flood(stack, service.address)
    for number in range(1, 13):
        flood.comes(f"127.0.1.{number}", 3, sends)
    flood.wait_until_left(NEAR - 1)
    asyncio.run(asks(service.address))
    lines = closed_lines(service)
    assert lines
    assert all('why="no call was made on it, and few of the 36' in line for line in lines)
    assert all(line.count("peer=127.0.1.") == 1 for line in lines)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_of_one_host_the_connections_without_calls_go_first(tmp_path, stack, host):
    listen = f"[{host}]:0" if ":" in host else f"{host}:0"
    service = stack.enter_context(coordinator(tmp_path, listen))

    async def main():
        async with client_of(service.address, TRUSTED) as owner:
            await owner.status(StatusRequest())
            flood = Flood(stack, service.address)
            (before,) = flood.others()
            flood.comes(host, FLOOD)
            await asyncio.to_thread(flood.wait_until_left, NEAR - 2)
            await owner.status(StatusRequest())
            assert flood.others() == {before}

    asyncio.run(main())
    assert len(closed_lines(service)) == 1


def test_a_refused_call_saves_no_connection(tmp_path, stack):
    """A stranger's calls do not count: it has no token."""
    service = stack.enter_context(coordinator(tmp_path))

    async def main():
        async with client_of(service.address, STRANGER) as stranger:
            with pytest.raises(AccessDenied):
                await stranger.status(StatusRequest())
            flood = Flood(stack, service.address)
            (before,) = flood.others()
            flood.comes("127.0.0.1", FLOOD)
            await asyncio.to_thread(flood.wait_until_left, NEAR - 1)
            await asyncio.to_thread(flood.wait_until_gone, before)
            with pytest.raises(AccessDenied):
                await stranger._patiently("status", StatusRequest(), DEADLINE_S)

    asyncio.run(main())


@pytest.mark.parametrize(("listen", "stranger", "other"), [
    ("127.0.0.1", "127.0.0.9", "127.0.0.1"),
    ("::", "127.0.0.9", "127.0.0.1"),
    ("::", "::1", "127.0.0.9"),
])  # fmt: skip
def test_a_host_that_comes_again_and_again_is_turned_away(stack, caplog, listen, stranger, other):
    """Its connections are closed as often as it opens them, and then the kernel lets none in."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    listener = stack.enter_context(
        socket.create_server((listen, 0), family=family, dualstack_ipv6=":" in listen)
    )
    port = listener.getsockname()[1]

    def comes(host: str) -> socket.socket:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        stack.enter_context(sock).bind((host, 0))
        sock.setblocking(False)
        sock.connect_ex(("::1" if ":" in host else "127.0.0.1", port))
        return sock

    inside: list[socket.socket] = []

    def accepts() -> str:
        sock, peer = listener.accept()
        inside.append(stack.enter_context(sock))
        sock.setblocking(False)
        return peer[0].removeprefix("::ffff:")

    watched = OpenConnections(PLACES)
    for _ in range(_EXCEEDED_MAX + 1):
        while len(inside) < NEAR:
            comes(stranger)
            assert accepts() == stranger
        assert watched.look(port) == NEAR - PLACES // 2
        inside = [sock for sock in inside if not has_ended(sock)]
        assert len(inside) == PLACES // 2
    late = comes(stranger)
    comes(other)
    assert accepts() == other
    assert select.select([], [late], [], 0)[1] == []
    lines = [one.getMessage() for one in caplog.records]
    why = "it connects again as fast as its connections are closed"
    turned = f'host turned away peer={network_of(stranger)} for_s=10 why="{why}"'
    assert [line for line in lines if line.startswith("host turned away")] == [turned]
    assert len([line for line in lines if line.startswith("connections closed")]) == 1
    caplog.clear()


def has_ended(sock: socket.socket) -> bool:
    """Whether it was shut down, and so is closed, as gRPC does it."""
    try:
        sock.recv(1)
    except BlockingIOError:
        return False
    sock.close()
    return True


NOW = 1000.0
shown_connections = st.lists(
    st.builds(
        lambda host, seen, called: (host, NOW - seen, NOW - called),
        st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"]),
        st.sampled_from([0.0, _SILENT_S / 2, 2 * _SILENT_S, 100.0]),
        st.sampled_from([0.0, _RECENT_S / 2, 2 * _RECENT_S, float("inf")]),
    ),
    max_size=60,
)


def made(shown: Sequence[tuple[str, float, float]]) -> list[PeerConnection]:
    return [
        PeerConnection(number, (host, number), host, seen, called)
        for number, (host, seen, called) in enumerate(shown)
    ]


@given(shown_connections, st.integers(1, 40))
def test_what_is_closed_and_what_stays(shown, places):
    """Invariants 2 and 3 of `security/admission.py`, with the rules of gRPC."""
    found, share, near = made(shown), max(1, places // 2), places - places // 4
    gone = [one for one, _ in making_way(found, admission_rules(places), NOW)]
    left = [one for one in found if one not in gone]
    assert len(set(gone)) == len(gone)
    if len(found) < near:
        assert not gone
        return

    def of(host, among):
        return [one for one in among if one.host == host]

    for one in gone:
        if not one.is_idle(NOW):
            assert len(found) >= places
            assert len(of(one.host, found)) > share
            assert not [other for other in of(one.host, left) if other.is_idle(NOW)]
        elif NOW - one.seen <= _SILENT_S:
            assert len(of(one.host, found)) > share
    for host in {one.host for one in found}:
        if len(of(host, left)) > share:
            assert not any(one.is_idle(NOW) for one in of(host, left))
        elif len(of(host, found)) <= share:
            assert all(one.is_idle(NOW) for one in of(host, gone))
    if len(left) >= near:
        assert not [one for one in left if one.is_idle(NOW) and NOW - one.seen > _SILENT_S]
    if len(left) >= places:
        assert gone or all(len(of(one.host, left)) <= share for one in left)


def test_busy_connections_go_a_few_at_a_time():
    """A host whose connections all make calls loses as few as give others a place."""
    busy = made([("10.0.0.1", 0.0, NOW - age) for age in range(32)])
    rules = admission_rules(32)
    assert making_way(busy[:-1], rules, NOW) == []
    gone = making_way(busy, rules, NOW)
    assert [(one.called, why) for one, why in gone] == [
        (NOW - 31, Reason.SHARE), (NOW - 30, Reason.SHARE),
    ]  # fmt: skip


def test_a_socket_that_grpc_closes_meanwhile_does_not_listen() -> None:
    with socket.socket() as sock:
        os.close(sock.detach())
        assert not _is_listening(sock)


def test_the_peer_of_a_call_is_that_of_its_socket():
    assert _peer_of("ipv4:10.0.0.9:51234") == ("10.0.0.9", 51234)
    assert _peer_of("ipv6:%5B2001:db8::1%5D:51234") == ("2001:db8::1", 51234)
    assert _peer_of("ipv6:[::ffff:10.0.0.9]:5") == ("10.0.0.9", 5)
    assert _peer_of("ipv6:%5Bfe80::1%25eth0%5D:5") == ("fe80::1", 5)
    assert _peer_of("unknown") == ("", 0)


# -- Another user's process that takes the place of a coordinator on loopback gets no token


OWN = Security(TokenSource("the state directory", (TOKEN,), is_own=True))
NOBODY = 65534
SQUATTER = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
is_6 = ":" in sys.argv[2]
family = socket.AF_INET6 if is_6 else socket.AF_INET
with socket.create_server((sys.argv[2], 0), family=family, dualstack_ipv6=is_6) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    print(connection.recv(100))
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.77.0.1"])
def test_the_own_token_is_sent_to_processes_of_the_own_user(host):
    async def main():
        async with serving("0.0.0.0:0" if host == "127.77.0.1" else f"{host}:0",
                           Security(OWN.tokens, insecure=True)) as address:  # fmt: skip
            port = address.rpartition(":")[2]
            async with client_of(f"{host}:{port}", OWN) as client:
                await client.status(StatusRequest())

    asyncio.run(main())


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start another user's process")
def test_it_is_not_sent_to_those_of_others(host, caplog):
    async def main(port):
        async with client_of(f"127.0.0.1:{port}", OWN) as client:
            with pytest.raises(PeerLost, match=rf"of user {NOBODY}.*not sent"):
                await client.status(StatusRequest())

    command = [sys.executable, "-c", SQUATTER, str(NOBODY), host]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as squatter:
        assert squatter.stdout is not None
        try:
            asyncio.run(main(squatter.stdout.readline().strip()))
        finally:
            squatter.kill()
        assert squatter.stdout.read() == "", "nobody has connected"
    caplog.clear()
