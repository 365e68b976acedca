"""Reusable HTTP connections that read straight into memory, and ranged reads over them.

Invariants:
1. A connection is reused only after a whole answer was read from it.
2. A request ends at its deadline, however slowly bytes arrive. It ends earlier if no bytes arrive
   for `silence_s` in the middle of an answer, or if the server's host does not respond for as long.
3. `DirectReads` fills memory with exactly the range of the object with that etag: it checks status,
   range, length and etag of the answer.
"""

from __future__ import annotations

import http.client
import io
import operator
import re
import socket
import ssl
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import Buffer

from dataplane.store.faults import (
    CONNECT_TIMEOUT_S,
    LASTING,
    UNREACHABLE,
    Refused,
    SilentError,
    Why,
    kind_of,
    refusal,
    unreachable,
    why_of,
)
from dataplane.store.reads import Race, Sink, first_request, is_strong
from dataplane.store.receiving import Patience, receive_into_file, receive_into_memory

_IDLE_S = 20.0
_SILENCE_PARTS = 3
_PROBES = 3
_DIRECT_BYTES_MIN = 256 << 10
"""From this size on, receiving without http.client is faster."""
_HEAD_BYTES = io.DEFAULT_BUFFER_SIZE
_COPY_BYTES = 256 << 10

Connect = Callable[[http.client.HTTPConnection], None]
"""Connects within the connection's timeout."""


class TimedConnection(http.client.HTTPConnection):
    """A connection whose answers end at a deadline. The timeout of a socket would not suffice: it
    bounds each receive call, and an answer may take as many calls as it has bytes.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.patience = Patience()

    def response_class(  # type: ignore[override]
        self, sock: socket.socket, method: str | None = None
    ) -> http.client.HTTPResponse:
        return _Answer(sock, self.patience, method)


class _TlsConnection(TimedConnection, http.client.HTTPSConnection):
    """A TimedConnection over TLS."""


class _Answer(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, patience: Patience, method: str | None) -> None:
        super().__init__(sock, method=method)
        self.fp.close()
        # Reads larger than the buffer bypass it and go straight to the destination.
        self.arriving = _Arriving(sock, patience)
        self.fp = io.BufferedReader(self.arriving, _HEAD_BYTES)

    def _read_status(self) -> tuple[str, int, str]:
        """Skip all interim answers; http.client skips only 100 (Continue)."""
        version, status, reason = super()._read_status()  # type: ignore[misc]
        is_early = http.HTTPStatus.SWITCHING_PROTOCOLS < status < http.HTTPStatus.OK
        return version, http.HTTPStatus.CONTINUE if is_early else status, reason


class _Arriving(io.RawIOBase):
    """A file of the bytes that a socket receives."""

    def __init__(self, sock: socket.socket, patience: Patience) -> None:
        self._sock, self._patience = sock, patience
        # Keep the socket open even if its connection is closed before the last answer was read.
        self._hold = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, into: Buffer) -> int:
        """Receive bytes into this buffer.

        Raises:  TimeoutError.
        """
        wait_s, late = self._wait_s()
        if wait_s != self._sock.gettimeout():  # setting it is a system call
            self._sock.settimeout(wait_s)
        try:
            return self._sock.recv_into(into)
        except TimeoutError as cause:
            raise late(*cause.args) from cause

    def move(self, sink: Sink, length: int) -> int:
        """Move up to this many bytes into a sink: see store/receiving.py."""
        return receive_into_file(self._sock, sink, length, self._patience)

    def receive(self, into: memoryview) -> int:
        """Receive as many bytes as there is room for: see store/receiving.py."""
        return receive_into_memory(self._sock, into, self._patience)

    def _wait_s(self) -> tuple[float, type[TimeoutError]]:
        """Return how long the next bytes may take, and the error to raise if they take longer."""
        left_s, silence_s = self._patience.deadline - time.monotonic(), self._patience.silence_s
        if min(left_s, silence_s) <= 0:
            raise TimeoutError
        return (silence_s, SilentError) if silence_s < left_s else (left_s, TimeoutError)

    def close(self) -> None:
        self._hold.close()
        super().close()


_Idle = dict[str, list[tuple[float, TimedConnection]]]


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
        # Close idle connections in a finalizer, not in __del__: in a reference cycle, the sockets
        # might be finalized before __del__ runs, and warn that they were not closed.
        weakref.finalize(self, _close_all, self._idle).atexit = False

    @property
    def tls(self) -> ssl.SSLContext:
        """The settings of all connections over TLS, made when they are first needed."""
        with self._lock:
            self._tls = self._tls or ssl.create_default_context()
            return self._tls

    def request(
        self,
        base: str,
        target: str,
        headers: Mapping[str, str],
        deadline: float,
        race: Race,
        connect: Connect = operator.methodcaller("connect"),
    ) -> tuple[TimedConnection, http.client.HTTPResponse]:
        """Send a request to `base`, "https://host:port", and return the head of its answer. A
        server may close an idle connection at any moment, even during a request, so only the
        failure of a new connection is an error.

        Raises:  OSError, http.client.HTTPException, and any error of `connect`.
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
                connection.patience = Patience(deadline)
                race.hold(connection.sock)
                connection.request("GET", target, headers=dict(headers))
                if _is_tls(connection) or not race.has_sinks:
                    race.sent()
                return connection, connection.getresponse()
            except BaseException as cause:
                connection.close()
                is_stale = isinstance(cause, (ConnectionError, http.client.HTTPException))
                if is_new or not is_stale or race.is_over:
                    raise

    def fill(
        self,
        answer: http.client.HTTPResponse,
        connection: TimedConnection,
        into: Sequence[memoryview],
        race: Race,
    ) -> None:
        """Read the answer into these buffers, one after the other.

        Raises:  TimeoutError.  OSError, http.client.HTTPException: the connection broke, or the
                 answer ended early.  Errors of `race.sent`.
        """
        connection.patience.silence_s = self._silence_s
        is_tls = _is_tls(connection)
        for part in into:
            # A sink exists for memory that is not mapped yet: the kernel, which fills it, need
            # neither map nor clear its pages.
            sink = None if is_tls else race.sink(part)
            if sink is None:
                race.sent()
            count = 0 if is_tls else _direct(answer, part, sink)
            # Read the last byte through http.client, which otherwise would not notice that the
            # answer has ended.
            if sink is None:
                count += _received(answer, part[count:])
            else:
                count += _copied(answer, sink, len(part) - count)
            if count < len(part):
                raise ConnectionResetError(f"closed after {count} bytes of {len(part)}")

    def give_back(self, base: str, connection: TimedConnection, *, is_whole: bool) -> None:
        """Return a connection that is no longer in use. If `is_whole`, all of the answer was read,
        so the connection may be reused.
        """
        if is_whole:
            with self._lock:
                waiting = self._idle.setdefault(base, [])
                if len(waiting) < self._idle_max:
                    waiting.append((time.monotonic(), connection))
                    return
        connection.close()

    def close(self) -> None:
        """Close idle connections. May be called twice."""
        with self._lock:
            _close_all(self._idle)

    def _connection(self, base: str) -> tuple[TimedConnection, bool]:
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
            return TimedConnection(host), True
        return _TlsConnection(host, context=self.tls), True


def range_headers(offset: int, length: int, etag: str) -> dict[str, str]:
    """Return the headers that request a range of the object with this etag, if it is a strong one;
    without a length, the whole object.
    """
    headers = {"Range": f"bytes={offset}-{offset + length - 1}"} if length else {}
    if etag and is_strong(etag):
        headers["If-Match"] = etag
    return headers


def _is_tls(connection: TimedConnection) -> bool:
    return isinstance(connection, _TlsConnection)


def _direct(answer: http.client.HTTPResponse, into: memoryview, sink: Sink | None) -> int:
    """Receive the next `len(into)` bytes of an answer except the last one, bypassing http.client.
    Return how many were received: fewer if the answer ends or the kernel cannot fill the sink, and
    0 if the answer is not suitable.

    Raises:  as `Connections.fill`.
    """
    is_long = len(into) >= _DIRECT_BYTES_MIN
    if not is_long or not isinstance(answer, _Answer) or answer.chunked or answer.length is None:
        return 0
    end = min(len(into), answer.length) - 1
    head = answer.read1(_HEAD_BYTES)  # bytes that arrived with the headers
    at = len(head)
    if sink is None:
        into[:at] = head
        count = answer.arriving.receive(into[at:end])
    else:
        _written(sink, head)
        count = answer.arriving.move(sink, end - at)
    answer.length -= count
    return at + count


def _copied(answer: http.client.HTTPResponse, sink: Sink, length: int) -> int:
    """Copy the next `length` bytes of an answer into a sink, through a buffer. Returns fewer only
    if the answer ends.

    Raises:  as `Connections.fill`.
    """
    buffer = memoryview(bytearray(min(length, _COPY_BYTES)))
    at = 0
    while at < length:
        part = buffer[: length - at]
        count = _received(answer, part)
        at += _written(sink, part[:count])
        if count < len(part):
            break
    return at


def _received(answer: http.client.HTTPResponse, into: memoryview) -> int:
    at = 0
    while at < len(into):
        count = answer.readinto(into[at:])
        if not count:
            break
        at += count
    return at


def _written(sink: Sink, body: Buffer) -> int:
    left = memoryview(body)
    while left:
        left = left[sink.write(left) :]
    return len(memoryview(body))


def _probe(sock: socket.socket, silence_s: float) -> None:
    """Let the kernel detect that the server's host is gone. Otherwise a connection that survives an
    outage of the network may resend its data only after another wait as long as the outage.
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


# Ranged reads from S3 over our own connections, straight into the destination memory.
#
# obstore returns bytes in its own memory, collected from small pieces, which must be copied again;
# that takes more than half of the client's CPU time. Here the kernel writes received bytes directly
# to their destination. obstore still finds the credentials and signs each request. If an answer is
# neither the bytes nor a temporary failure of the store, obstore repeats the request, so that all
# other errors come from one place.

Sign = Callable[[str], str]
"""Returns the url to request for a key, signed if the store needs that."""

_IDLE_MAX = 64
_SPAN = re.compile(r"bytes (\d{1,18})-(\d{1,18})/")
# After this many refusals in a row, direct requests pause for a while.
_REFUSALS_MAX = 8
_PAUSE_S = 60.0


class DirectReads:
    """Connections to one endpoint. `sign` is called for every request, which costs 15 us."""

    def __init__(self, sign: Sign, request_timeout_s: float) -> None:
        self._sign = sign
        self._timeout_s = request_timeout_s
        self._connections = Connections(_IDLE_MAX, request_timeout_s)
        self._refusals = 0
        self._off_until = 0.0

    @property
    def is_of_use(self) -> bool:
        """Return whether to try direct requests. After repeated refusals they pause, since the
        server seems to need another kind of request.
        """
        return not self._off_until or time.monotonic() > self._off_until

    def read_into(self, url: str, key: str, offset: int, etag: str, *into: memoryview) -> None:
        """Fill these buffers, one after the other, from that offset on.

        Raises:  Refused.  StoreThrottled, StoreUnavailable.
        """
        with first_request() as race:
            self._read_into(url, key, offset, etag, into, race)

    def _read_into(
        self, url: str, key: str, offset: int, etag: str, into: Sequence[memoryview], race: Race
    ) -> None:
        deadline, length = time.monotonic() + self._timeout_s, sum(map(len, into))
        headers = range_headers(offset, length, etag)
        base, target = _split(self._sign(key))
        try:
            connection, answer = self._connections.request(base, target, headers, deadline, race)
        except (OSError, http.client.HTTPException) as cause:
            why = why_of(cause)
            if why is None or why in LASTING:  # obstore may trust other certificates
                raise self._refused() from cause
            raise unreachable(url, base, why) from cause
        is_whole = False
        try:
            _check(url, answer, offset, length, etag)
            try:
                self._connections.fill(answer, connection, into, race)
            except (OSError, http.client.HTTPException) as cause:
                raise unreachable(url, base, why_of(cause) or Why.BROKEN) from cause
            race.claim()
            is_whole = True
        except Refused:
            raise self._refused() from None
        finally:
            is_usable = is_whole and not answer.will_close
            self._connections.give_back(base, connection, is_whole=is_usable)
        self._refusals, self._off_until = 0, 0.0

    def _refused(self) -> Refused:
        self._refusals += 1
        if self._refusals >= _REFUSALS_MAX:
            self._off_until = time.monotonic() + _PAUSE_S
        return Refused()

    def close(self) -> None:
        """Close idle connections. May be called twice."""
        self._connections.close()


def is_possible(environment: Mapping[str, str]) -> bool:
    """Return whether direct requests are possible: no proxy is set, and requests are signed."""
    upper = {name.upper(): value for name, value in environment.items() if value}
    through = {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "AWS_PROXY_URL", "PROXY_URL"}
    return not through & upper.keys() and "AWS_SKIP_SIGNATURE" not in upper


def _split(signed: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(signed)
    return f"{parts.scheme}://{parts.netloc}", f"{parts.path}?{parts.query}"


def _check(url: str, answer: http.client.HTTPResponse, offset: int, length: int, etag: str) -> None:
    """Check that the answer is the requested range."""
    if issubclass(kind_of(answer.status), UNREACHABLE):
        # Raise rather than let obstore repeat the request, which would double the load of a failing
        # store.
        raise refusal(url, answer.status)
    # Content-Encoding need not be checked: the ranges of an object that is stored compressed are
    # ranges of its compressed bytes, as requested, and if the server itself compresses the answer,
    # the length differs.
    span = _SPAN.match(answer.getheader("Content-Range", ""))
    if (
        answer.status != 206
        or span is None
        or (int(span[1]), int(span[2])) != (offset, offset + length - 1)
        or answer.length != length
        or answer.getheader("ETag") != etag
    ):
        raise Refused
