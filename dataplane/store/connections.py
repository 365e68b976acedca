"""HTTP connections that are used again, and reading from them straight into memory.

Invariants:
1. A connection is reused only after a whole answer was read from it.
2. A request ends at its deadline, however slowly bytes arrive; before that if no bytes arrive for
   `silence_s` in the middle of an answer, or if for so long the server's host does not answer.
"""

from __future__ import annotations

import http.client
import operator
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Mapping

from dataplane.store.race import Race
from dataplane.store.unreachable import SilentError

CONNECT_TIMEOUT_S = 5.0
_IDLE_S = 20.0
_SILENCE_PARTS = 3
_PROBES = 3
_SLICE_BYTES = 1 << 20

Connect = Callable[[http.client.HTTPConnection], None]
"""Connects within the connection's timeout."""
_Idle = dict[str, list[tuple[float, http.client.HTTPConnection]]]


class Connections:
    """A pool of connections to servers, with at most `idle_max` idle ones for each. Thread-safe.
    Requests take at most `timeout_s`.
    """

    def __init__(self, idle_max: int, timeout_s: float) -> None:
        self._idle_max = idle_max
        self._silence_s = timeout_s / _SILENCE_PARTS
        self._lock = threading.Lock()
        self._idle: _Idle = {}
        self._tls: ssl.SSLContext | None = None
        # Not by __del__: in a cycle the sockets could be finalized first, and complain.
        weakref.finalize(self, _close_all, self._idle).atexit = False

    @property
    def tls(self) -> ssl.SSLContext:
        """The settings of all connections over TLS, made when they are first needed."""
        with self._lock:
            self._tls = self._tls or ssl.create_default_context()
            return self._tls

    def ask(
        self,
        base: str,
        target: str,
        headers: Mapping[str, str],
        deadline: float,
        race: Race,
        connect: Connect = operator.methodcaller("connect"),
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """The head of an answer from `base`, "https://host:port". A server may close an idle
        connection at any moment, even during a request: only the failure of a new connection
        counts.

        Raises:  OSError, http.client.HTTPException, and what `connect` raises.
        """
        while True:
            connection, is_new = self._connection(base)
            try:
                left_s = max(0.001, deadline - time.monotonic())
                if is_new:
                    connection.timeout = min(CONNECT_TIMEOUT_S, left_s)
                    connect(connection)
                    _probe(connection.sock, self._silence_s)
                connection.sock.settimeout(left_s)
                race.hold(connection.sock)
                connection.request("GET", target, headers=dict(headers))
                return connection, connection.getresponse()
            except BaseException as cause:
                connection.close()
                is_stale = isinstance(cause, (ConnectionError, http.client.HTTPException))
                if is_new or not is_stale or race.is_over:
                    raise

    def fill(
        self,
        answer: http.client.HTTPResponse,
        connection: http.client.HTTPConnection,
        into: memoryview,
        deadline: float,
    ) -> int:
        """How many bytes of the answer there were for this memory; fewer only if the answer ended.

        Raises:  TimeoutError.  OSError, http.client.HTTPException: the connection broke.
        """
        at = 0
        while at < len(into):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            if connection.sock is not None:
                connection.sock.settimeout(min(left_s, self._silence_s))
            try:
                count = answer.readinto(into[at : at + _SLICE_BYTES])
            except TimeoutError as cause:
                raise SilentError(*cause.args) from cause
            if not count:
                break
            at += count
        return at

    def give_back(
        self, base: str, connection: http.client.HTTPConnection, *, is_whole: bool
    ) -> None:
        """It is no longer in use. `is_whole`: all of the answer was read, so it may be reused."""
        if is_whole:
            with self._lock:
                waiting = self._idle.setdefault(base, [])
                if len(waiting) < self._idle_max:
                    waiting.append((time.monotonic(), connection))
                    return
        connection.close()

    def close(self) -> None:
        """Close those that wait. May be called twice."""
        with self._lock:
            _close_all(self._idle)

    def _connection(self, base: str) -> tuple[http.client.HTTPConnection, bool]:
        now = time.monotonic()
        with self._lock:
            waiting = self._idle.get(base, [])
            while waiting:
                since, connection = waiting.pop()
                if now - since < _IDLE_S:
                    return connection, False
                connection.close()
        scheme, _, host = base.partition("://")
        if scheme == "http":
            return http.client.HTTPConnection(host), True
        return http.client.HTTPSConnection(host, context=self.tls), True


def _probe(sock: socket.socket, silence_s: float) -> None:
    """Let the kernel find out if the server's host is gone. Otherwise what is sent again after an
    outage comes as late as the outage was long.
    """
    every_s = max(1, int(silence_s / _PROBES))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, int(silence_s * 1e3)))


def _close_all(idle: _Idle) -> None:
    for waiting in idle.values():
        for _, connection in waiting:
            connection.close()
    idle.clear()
