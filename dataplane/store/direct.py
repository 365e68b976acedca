"""Ranged reads from S3 over our own connections, straight into the destination memory.

obstore returns bytes in its own memory, collected from small pieces, and these must be copied
again: that is more than half of the client's CPU time. Here the kernel writes received bytes
directly to their destination. obstore still finds the credentials and signs each request. It also
repeats every request that was not answered with the bytes, so that all errors come from one place.

Invariants:
1. Memory is filled with exactly the range of the object with that etag: status, range, length and
   etag of the answer are checked.
2. A connection is reused only after a whole answer was read from it.
3. A request ends at its timeout, however slowly bytes arrive.
"""

from __future__ import annotations

import http.client
import re
import ssl
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Mapping, Sequence

from dataplane.errors import DataplaneError, StoreThrottled
from dataplane.store.race import EndedEarlyError, Race, current_race
from dataplane.store.unreachable import Why, unreachable, why_of

CONNECT_TIMEOUT_S = 5.0
Sign = Callable[[str], str]
"""The url of a key with its signature in it."""

IDLE_MAX = 64
IDLE_S = 20.0
_SLICE_BYTES = 1 << 20
_SPAN = re.compile(r"bytes (\d+)-(\d+)/")
# After this many refusals in a row, direct requests pause for a while.
_REFUSALS_MAX = 8
_PAUSE_S = 60.0


_Idle = dict[str, list[tuple[float, http.client.HTTPConnection]]]


class Refused(Exception):
    """The answer is not the requested bytes, for an unknown reason."""


class DirectReads:
    """Connections to one endpoint. `sign` is asked for every request: it costs 15 us."""

    def __init__(self, sign: Sign, request_timeout_s: float) -> None:
        self._sign = sign
        self._timeout_s = request_timeout_s
        self._tls: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._idle: _Idle = {}
        # Not by __del__: in a cycle the sockets could be finalized first, and complain.
        weakref.finalize(self, _close_all, self._idle).atexit = False
        self._refusals = 0
        self._off_until = 0.0

    @property
    def is_of_use(self) -> bool:
        """False if requests were refused repeatedly, because the server needs another kind of
        request.
        """
        return not self._off_until or time.monotonic() > self._off_until

    def read_into(self, url: str, key: str, offset: int, etag: str, *into: memoryview) -> None:
        """Fill these, one after the other, from that offset on.

        Raises:  Refused.  StoreThrottled, StoreUnavailable.
        """
        race = current_race()
        try:
            self._read_into(url, key, offset, etag, into, race)
        except (DataplaneError, Refused):
            if race.is_over:
                raise EndedEarlyError from None
            raise
        finally:
            race.release()

    def _read_into(
        self, url: str, key: str, offset: int, etag: str, into: Sequence[memoryview], race: Race
    ) -> None:
        deadline, length = time.monotonic() + self._timeout_s, sum(map(len, into))
        headers = {"Range": f"bytes={offset}-{offset + length - 1}", "If-Match": etag}
        base, target = _split(self._sign(key))
        try:
            connection, answer = self._asked(base, target, headers, deadline, race)
        except (OSError, http.client.HTTPException) as cause:
            why = why_of(cause)
            if why is None:
                raise self._refused() from cause
            raise unreachable(url, base, why) from cause
        is_whole = False
        try:
            _check(url, answer, offset, length, etag)
            try:
                for each in into:
                    _fill(answer, connection, each, deadline)
            except (OSError, http.client.HTTPException) as cause:
                raise unreachable(url, base, why_of(cause) or Why.BROKEN) from cause
            race.claim()
            is_whole = True
        except Refused:
            raise self._refused() from None
        finally:
            if is_whole and not answer.will_close:
                self._give_back(base, connection)
            else:
                connection.close()
        self._refusals, self._off_until = 0, 0.0

    def _refused(self) -> Refused:
        self._refusals += 1
        if self._refusals >= _REFUSALS_MAX:
            self._off_until = time.monotonic() + _PAUSE_S
        return Refused()

    def close(self) -> None:
        """Close idle connections. May be called twice."""
        with self._lock:
            _close_all(self._idle)

    def _asked(
        self, base: str, target: str, headers: Mapping[str, str], deadline: float, race: Race
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """The head of an answer. A server may close an idle connection at any moment, even during a
        request: only the failure of a new connection counts.
        """
        while True:
            connection, is_new = self._connection(base)
            try:
                left_s = max(0.001, deadline - time.monotonic())
                if is_new:
                    connection.timeout = min(CONNECT_TIMEOUT_S, left_s)
                    connection.connect()
                connection.sock.settimeout(left_s)
                race.hold(connection.sock)
                connection.request("GET", target, headers=dict(headers))
                return connection, connection.getresponse()
            except BaseException as cause:
                connection.close()
                is_stale = isinstance(cause, (ConnectionError, http.client.HTTPException))
                if is_new or not is_stale or race.is_over:
                    raise

    def _connection(self, base: str) -> tuple[http.client.HTTPConnection, bool]:
        now = time.monotonic()
        with self._lock:
            waiting = self._idle.get(base, [])
            while waiting:
                since, connection = waiting.pop()
                if now - since < IDLE_S:
                    return connection, False
                connection.close()
        scheme, _, host = base.partition("://")
        if scheme == "http":
            return http.client.HTTPConnection(host), True
        with self._lock:
            self._tls = self._tls or ssl.create_default_context()
        return http.client.HTTPSConnection(host, context=self._tls), True

    def _give_back(self, base: str, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            waiting = self._idle.setdefault(base, [])
            if len(waiting) < IDLE_MAX:
                waiting.append((time.monotonic(), connection))
                return
        connection.close()


def _close_all(idle: _Idle) -> None:
    for each in idle.values():
        for _, connection in each:
            connection.close()
    idle.clear()


def is_possible(environment: Mapping[str, str]) -> bool:
    """Whether direct requests are possible: no proxy is set, and requests are to be signed."""
    upper = {name.upper(): value for name, value in environment.items() if value}
    through = {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "AWS_PROXY_URL", "PROXY_URL"}
    return not through & upper.keys() and "AWS_SKIP_SIGNATURE" not in upper


def _split(signed: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(signed)
    return f"{parts.scheme}://{parts.netloc}", f"{parts.path}?{parts.query}"


def _check(url: str, answer: http.client.HTTPResponse, offset: int, length: int, etag: str) -> None:
    """Continue only if the answer is the requested range."""
    if answer.status in {429, 503}:
        raise StoreThrottled(
            f"{url}: the store asks to slow down (HTTP {answer.status})", shard=url
        )
    span = _SPAN.match(answer.getheader("Content-Range", ""))
    if (
        answer.status != 206
        or span is None
        or (int(span[1]), int(span[2])) != (offset, offset + length - 1)
        or answer.length != length
        or answer.getheader("ETag") != etag
        or answer.getheader("Content-Encoding", "identity") not in {"identity", "aws-chunked"}
    ):
        raise Refused


def _fill(
    answer: http.client.HTTPResponse,
    connection: http.client.HTTPConnection,
    into: memoryview,
    deadline: float,
) -> None:
    """Raises:  TimeoutError.  OSError, http.client.HTTPException: the connection broke."""
    at, length = 0, len(into)
    while at < length:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if connection.sock is not None:
            connection.sock.settimeout(left_s)
        count = answer.readinto(into[at : at + _SLICE_BYTES])
        if not count:
            raise ConnectionResetError(f"closed after {at} bytes of {length}")
        at += count
