"""The entrance of a lender: accepts connections, and makes the lender's part of the handshake."""

from __future__ import annotations

import secrets
import select
import socket
import ssl
import struct
import time
from collections.abc import Iterator

from dataplane.base.trace import Trace
from dataplane.model.errors import ConfigError
from dataplane.neighbours import wire
from dataplane.neighbours.connection import Connection, LoanStage
from dataplane.neighbours.line_tls import LineTls
from dataplane.neighbours.wire import MAGIC, ONE_SIDE, TLS_HELLO, WrongFrameError
from dataplane.rpc.address import network_of
from dataplane.rpc.lending import LendingKeys

trace = Trace("security")

_ACCEPTED_A_TURN = 64
_HANDSHAKES_A_TURN = 16
"""The maximum number of steps of TLS handshakes in a turn: each step may take half a millisecond,
during which payloads wait.
"""
_PAUSE_S = 0.2
"""How long to accept no connections after the process ran out of descriptors."""
_LEFT_MAX = 256
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Entrance:
    """One listening socket, whose events an epoll reports."""

    def __init__(
        self,
        listener: socket.socket,
        epoll: select.epoll,
        handshake_s: float,
        tls: LineTls | None = None,
    ) -> None:
        self._listener = listener
        self._epoll = epoll
        self._handshake_s = handshake_s
        self._tls = tls
        self._open_at = 0.0
        self._handshakes_left = _HANDSHAKES_A_TURN
        listener.setblocking(False)
        epoll.register(listener.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        """Return the descriptor of the listening socket."""
        return self._listener.fileno()

    @property
    def open_at(self) -> float | None:
        """When to call `resume`; None if connections are accepted now."""
        return self._open_at or None

    def resume(self, now: float) -> None:
        """Begin the next turn, and accept connections again if the pause is over."""
        self._handshakes_left = _HANDSHAKES_A_TURN
        if self._open_at and now >= self._open_at:
            self._open_at = 0.0
            self._epoll.register(self._listener.fileno(), select.EPOLLIN)

    def accept(self) -> Iterator[Connection]:
        """Yield some of the waiting connections. Closing one of their sockets sends a reset."""
        for _ in range(_ACCEPTED_A_TURN):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # the connection is already gone
            except OSError as error:
                trace.failed("no data connections accepted", why=error.strerror)
                self._epoll.unregister(self._listener.fileno())
                self._open_at = time.monotonic() + _PAUSE_S
                return
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            host, port = address[:2]
            deadline = time.monotonic() + self._handshake_s
            stage = LoanStage.OPENING if self._tls is None else LoanStage.TLS
            yield Connection(sock.fileno(), sock, host, f"{host}:{port}", deadline, stage)

    def secure(self, connection: Connection) -> None:
        """Continue the TLS handshake of a connection, which enters the stage OPENING at its end. If
        this turn has had too many steps of handshakes, do nothing: the epoll reports the connection
        again.

        Raises:  WrongFrameError: the connection is refused.  OSError: the connection is gone, and
        has sent nothing.
        """
        if not self._handshakes_left:
            return
        self._handshakes_left -= 1
        try:
            self._continue(connection)
        # BlockingIOError: the event belonged to a closed connection with the same descriptor.
        except (BlockingIOError, ssl.SSLWantReadError):
            self._epoll.modify(connection.fd, select.EPOLLIN)
        except ssl.SSLWantWriteError:
            self._epoll.modify(connection.fd, select.EPOLLOUT)
        else:
            self._epoll.modify(connection.fd, select.EPOLLIN)

    def _continue(self, connection: Connection) -> None:
        assert self._tls is not None
        sock = connection.sock
        if not isinstance(sock, ssl.SSLSocket):
            first = sock.recv(1, socket.MSG_PEEK)
            if not first:
                raise ConnectionResetError
            if first[0] != TLS_HELLO:
                raise WrongFrameError(ONE_SIDE if first == MAGIC[:1] else "it does not speak TLS")
        try:
            if not isinstance(sock, ssl.SSLSocket):
                sock = connection.sock = self._tls.of_lender(sock)
            self._tls.shake_hands(sock)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except OSError:
            raise WrongFrameError("it closed the connection during the handshake") from None
        except ConfigError as error:
            raise WrongFrameError(str(error)) from error
        connection.stage = LoanStage.OPENING


def refused(connection: Connection, why: str, *, is_late: bool = False) -> None:
    """Log a refused connection. `is_late`: the connection is for a job that this node has just
    left, and is not an attack.
    """
    what, facts = "data connection refused", {**connection.about, "why": why}
    if is_late:
        trace.noted(what, **facts)
    else:
        trace.refused(what, by=network_of(connection.host), **facts)


class LeftJobError(WrongFrameError):
    """A connection is for a job that has left this node; the neighbour may not know that yet."""


class Keys:
    """The newest key of each job of a node."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._keys: dict[str, LendingKeys] = {}
        self._left: dict[str, int] = {}
        """The generations of jobs that have left this node, the most recent at the end."""

    def learn(self, key: LendingKeys) -> None:
        """Replace the key of a job. A key of b"" means that the job has left this node."""
        if key.key:
            self._keys[key.job_id] = key
        elif (former := self._keys.pop(key.job_id, None)) is not None:
            self._left.pop(key.job_id, None)
            self._left[key.job_id] = former.generation
            if len(self._left) > _LEFT_MAX:
                del self._left[next(iter(self._left))]

    def are_of(self, opening: wire.Opening) -> bool:
        """Return whether the opening's generation is the newest of its job."""
        key = self._keys.get(opening.job_id)
        return key is not None and key.generation == opening.generation

    def challenge(self, connection: Connection, frame: bytes) -> bytes:
        """Return the answer to an opening.   Raises:  WrongFrameError."""
        opening = connection.opening = wire.unpack_opening(frame)
        connection.frame, connection.nonce = frame, secrets.token_bytes(wire.NONCE_BYTES)
        connection.stage = LoanStage.PROOF
        return wire.pack_challenge(self._key(opening).key, frame, connection.nonce)

    def check(self, connection: Connection, frame: bytes) -> None:
        """Check the proof of a connection.   Raises:  WrongFrameError: the proof is wrong."""
        assert connection.opening is not None
        key = self._key(connection.opening)
        wire.check_proof(key.key, connection.frame, connection.nonce, frame)
        connection.frame = connection.nonce = b""
        connection.only_under = key.only_under

    def _key(self, opening: wire.Opening) -> LendingKeys:
        if opening.lender_id != self._node_id:
            raise WrongFrameError("it asks for another node")
        key = self._keys.get(opening.job_id)
        if key is None and self._left.get(opening.job_id) == opening.generation:
            raise LeftJobError("the job has left this node")
        if key is None:
            raise WrongFrameError("this node has no such job")
        if key.generation != opening.generation:
            raise WrongFrameError(f"it is of generation {opening.generation}, not {key.generation}")
        return key
