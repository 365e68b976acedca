"""A lender in a thread, with short deadlines, and a test that is its node and its neighbours."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import ssl
import threading
from collections.abc import Iterator

import pytest

from dataplane.arena.memfd import Arena
from dataplane.base.trace import Trace
from dataplane.model.config import PeerTls
from dataplane.model.errors import PeerLost
from dataplane.model.records import BlockForm, Region
from dataplane.neighbours import wire
from dataplane.neighbours.asking import Lines
from dataplane.neighbours.connection import Limits
from dataplane.neighbours.lender import Lender
from dataplane.neighbours.line_tls import LineTls
from dataplane.rpc import lending, local
from dataplane.security.admission import AdmissionRules

ARENA_BYTES = 256 << 20
OF_NEIGHBOUR = 8 << 20
"""Bytes in flight that are allowed one neighbour."""
TIMEOUT_S = 60.0
KEY, OLD_KEY = secrets.token_bytes(32), secrets.token_bytes(32)
LIMITS = Limits(
    AdmissionRules(40, silent_of_source_max=8), handshake_s=0.5, frame_s=0.5, send_s=0.5, idle_s=60.0,
    turn_s=0.5, slowest_bytes=1 << 40,
)  # fmt: skip
HONEST, HOSTILE = "127.0.0.2", "127.0.0.3"


class Bench:
    """A lender of generation 2 of the job "job", whose node gives what it is asked for."""

    def __init__(self, limits: Limits = LIMITS, tls: PeerTls | None = None) -> None:
        self.sock, theirs = local.pair()
        self.sock.settimeout(TIMEOUT_S)
        self.arena = Arena.create("lent", ARENA_BYTES)
        self.arena.reserve(0, OF_NEIGHBOUR)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.address: tuple[str, int] = self.listener.getsockname()
        start = lending.StartLending("lender", tls=tls)
        self.tls = None if tls is None else LineTls(tls)
        self.lender = Lender(theirs, os.dup(self.arena.fd), self.listener, start, limits)
        self.theirs = theirs
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()
        self.tell(lending.LendingKeys("job", 1, OLD_KEY))
        self.tell(lending.LendingKeys("job", 2, KEY))
        self.tell(lending.LendingKeys("another", 2, OLD_KEY))
        self.lines = Lines(self.tls)
        self.connected: list[socket.socket] = []

    def _serve(self) -> None:
        with pytest.raises(PeerLost):
            self.lender.serve()

    def tell(self, body: lending.ToLenderBody) -> None:
        local.send(self.sock, lending.ToLender(body))

    def hear(self) -> lending.FromLenderBody:
        return local.receive(self.sock, lending.FromLender)[0].body

    def close(self) -> None:
        self.sock.close()
        self.thread.join()
        self.lender.close()
        for each in (self.theirs, self.listener, self.lines, self.arena, *self.connected):
            each.close()

    def connect(self, host: str = HOSTILE) -> socket.socket:
        sock = socket.socket()
        self.connected.append(sock)
        sock.settimeout(TIMEOUT_S)
        sock.bind((host, 0))
        sock.connect(self.address)
        return sock

    def inside_tls(self, sock: socket.socket, tls: LineTls) -> ssl.SSLSocket:
        """The same connection, after the handshake of TLS."""
        self.connected.remove(sock)
        secured = tls._current().asker.wrap_socket(sock)
        self.connected.append(secured)
        return secured

    def opened(self, host: str = HOSTILE, asker: str = "asker") -> socket.socket:
        """A connection of somebody who has the key."""
        sock = self.connect(host)
        if self.tls is not None:
            sock = self.inside_tls(sock, self.tls)
        opening = wire.pack(wire.Opening("job", 2, asker, "lender", secrets.token_bytes(32)))
        sock.sendall(opening)
        challenge = frame(sock)
        sock.sendall(wire.answer_challenge(KEY, opening, challenge))
        return sock

    def ask(self, sock: socket.socket, length: int, number: int = 1) -> lending.Asked:
        sock.sendall(wire.pack(request(length, number)))
        asked = self.hear()
        assert isinstance(asked, lending.Asked)
        return asked

    def lends(self, sock: socket.socket, number: int = 1) -> None:
        """An honest neighbour gets what it asks for over this connection."""
        asked = self.ask(sock, 1000, number)
        self.tell(lending.Give(asked.number, Region(4096, 1000), ends=(wire.GIVEN_WHOLE,)))
        assert wire.unpack_answer(frame(sock), request(1000, number)).length == 1000
        assert received(sock, 1000) == bytes(self.arena.view(4096, 1000))
        sock.sendall(wire.pack(wire.Receipt(number)))
        assert self.hear() == lending.Given(asked.number, 1000)


def request(length: int, number: int = 1) -> lending.Request:
    return lending.Request(number, bytes(16), 0, 0, length, BlockForm.RAW)


def frame(sock: socket.socket) -> bytes:
    """The next frame; b"" if the connection is closed instead."""
    head = received(sock, wire.HEAD_BYTES)
    length = wire.frame_bytes(head, wire.NOTE_BYTES_MAX + wire.SMALL_BYTES_MAX)
    return head + received(sock, length - len(head)) if length else b""


def received(sock: socket.socket, length: int) -> bytes:
    """So many bytes, or fewer if it is closed before."""
    found = b""
    while len(found) < length and (part := sock.recv(length - len(found))):
        found += part
    return found


def is_closed(sock: socket.socket) -> bool:
    """Wait until the other side has closed it; it sends nothing before."""
    try:
        return not sock.recv(1)
    except ConnectionResetError:
        return True


@pytest.fixture(autouse=True)
def every_line_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many the tests before have caused."""
    monkeypatch.setattr("dataplane.neighbours.entrance.trace", Trace("security"))


@pytest.fixture
def bench(run_mark: str, caplog: pytest.LogCaptureFixture) -> Iterator[Bench]:
    caplog.set_level(logging.INFO, "dataplane")
    made = Bench()
    made.arena.view(4096, 1000)[:] = os.urandom(1000)
    try:
        yield made
    finally:
        made.close()
    assert KEY.hex() not in caplog.text
    assert repr(KEY) not in caplog.text


def opening(job: str = "job", generation: int = 2, lender: str = "lender") -> bytes:
    return wire.pack(wire.Opening(job, generation, "asker", lender, secrets.token_bytes(32)))


def wrong_proof(sock: socket.socket, key: bytes, opened: bytes) -> None:
    sock.sendall(opened)
    # Made as by somebody who does not look whether the lender has the key.
    nonce = wire.unpack(wire.Challenge, frame(sock)).nonce
    own = wire.pack_challenge(key, opened, nonce)
    sock.sendall(wire.answer_challenge(key, opened, own))
