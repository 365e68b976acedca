"""The entrance of a lender: accept its connections."""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections.abc import Iterator

from dataplane.errors import ConfigError
from dataplane.neighbours import audit
from dataplane.neighbours.connection import Connection, LoanStage
from dataplane.neighbours.handshake import ONE_SIDE, TLS_HELLO, is_opening
from dataplane.neighbours.line_tls import LineTls
from dataplane.neighbours.wire import WrongFrameError

_ACCEPTED_A_TURN = 64
_HANDSHAKES_A_TURN = 16
"""Steps of TLS handshakes: each may take half a millisecond, and payloads wait meanwhile."""
_PAUSE_S = 0.2
"""Without accepting, after the process ran out of descriptors."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Entrance:
    """One listening socket, which an epoll reports."""

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
        """The descriptor of the listening socket."""
        return self._listener.fileno()

    @property
    def open_at(self) -> float | None:
        """When to call `resume`, if connections are not accepted now."""
        return self._open_at or None

    def resume(self, now: float) -> None:
        """A turn is over: accept connections again, if it is time to."""
        self._handshakes_left = _HANDSHAKES_A_TURN
        if self._open_at and now >= self._open_at:
            self._open_at = 0.0
            self._epoll.register(self._listener.fileno(), select.EPOLLIN)

    def accept(self) -> Iterator[Connection]:
        """Yield some of the waiting connections. Their sockets are closed with a reset."""
        for _ in range(_ACCEPTED_A_TURN):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # it is gone already
            except OSError as error:
                audit.trace.failed("no data connections accepted", why=error.strerror)
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
        """Continue with the handshake of TLS, after which the connection is in the stage OPENING.
        If there were many in this turn, the epoll reports it again.

        Raises:  WrongFrameError: it is refused.  OSError: it is gone, and has sent nothing.
        """
        if not self._handshakes_left:
            return
        self._handshakes_left -= 1
        try:
            self._continue(connection)
        except (BlockingIOError, ssl.SSLWantReadError):  # also an event of an older descriptor
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
                raise WrongFrameError(ONE_SIDE if is_opening(first) else "it does not speak TLS")
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
