"""Ranged reads of S3 over connections of our own, straight into the memory that is to have them.

obstore gives bytes in memory of its own, which it gathers from small pieces and which somebody must
then copy: that is more than half of the client's CPU. Here the kernel writes what arrives where it
belongs. obstore still knows the credentials, and signs each request; and it is asked whenever the
answer is not simply the bytes, so that errors are told by one place.

Invariants:
1. What is filled is exactly the range, of the object with that etag: status, range, length and etag
   of the answer are checked.
2. A connection goes back to the others only after a whole answer was read from it.
3. A request ends by its timeout, however slowly bytes arrive.
"""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dataplane.errors import StoreThrottled, StoreUnavailable, TruncatedRead

CONNECT_TIMEOUT_S = 5.0
Sign = Callable[[str], str]
"""The url of a key with its signature in it."""

IDLE_MAX = 64
IDLE_S = 20.0
_HEAD_BYTES_MAX = 64 << 10
_STATUS = re.compile(rb"HTTP/1\.([01]) (\d{3})[ \r]")
_SPAN = re.compile(rb"bytes (\d+)-(\d+)/")
# So many refusals, one after the other, and nothing is asked this way for a while.
_REFUSALS_MAX = 8
_PAUSE_S = 60.0


class Refused(Exception):
    """The answer is not the bytes; nothing is said about why."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """The head of an answer, and what came of its body along with it."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes
    is_last: bool


class _Stale(Exception):
    """The server closed the connection without a word."""


class DirectReads:
    """Connections to one endpoint. `sign` is asked for every request: it costs 15 us."""

    def __init__(self, sign: Sign, request_timeout_s: float) -> None:
        self._sign = sign
        self._timeout_s = request_timeout_s
        self._tls: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._idle: dict[str, list[tuple[float, socket.socket]]] = {}
        self._refusals = 0
        self._off_until = 0.0

    @property
    def is_of_use(self) -> bool:
        """False where it was refused again and again: a server that wants to be asked otherwise."""
        return not self._off_until or time.monotonic() > self._off_until

    def read_into(self, url: str, key: str, offset: int, etag: str, into: memoryview) -> None:
        """Fill `into` from that offset on.

        Raises:  Refused.  StoreThrottled, StoreUnavailable, TruncatedRead.
        """
        deadline = time.monotonic() + self._timeout_s
        base, target = _split(self._sign(key))
        request = _request(base, target, offset, len(into), etag)
        try:
            sock, answer = self._asked(base, request, deadline)
        except TimeoutError as cause:
            raise _late(url) from cause
        except (OSError, _Stale, UnicodeError) as cause:
            raise self._refused() from cause
        is_whole = False
        try:
            _check(url, answer, offset, len(into), etag)
            _fill(url, answer, sock, into, offset, deadline)
            is_whole = True
        except Refused:
            raise self._refused() from None
        finally:
            if is_whole and not answer.is_last:
                self._give_back(base, sock)
            else:
                sock.close()
        self._refusals, self._off_until = 0, 0.0

    def _refused(self) -> Refused:
        self._refusals += 1
        if self._refusals >= _REFUSALS_MAX:
            self._off_until = time.monotonic() + _PAUSE_S
        return Refused()

    def close(self) -> None:
        """Close what is idle. May be called twice."""
        with self._lock:
            for each in self._idle.values():
                for _, sock in each:
                    sock.close()
            self._idle.clear()

    def __del__(self) -> None:
        self.close()

    def _asked(self, base: str, request: bytes, deadline: float) -> tuple[socket.socket, _Answer]:
        """The head of an answer. A server may close an idle connection at any moment, also while
        we ask: only what a new one says counts.
        """
        while True:
            sock = self._idle_one(base)
            is_new = sock is None
            sock = sock or self._connected(base, deadline)
            try:
                sock.settimeout(_left_s(deadline))
                sock.sendall(request)
                return sock, _head(sock)
            except (ConnectionError, _Stale):
                sock.close()
                if is_new:
                    raise
            except BaseException:
                sock.close()
                raise

    def _idle_one(self, base: str) -> socket.socket | None:
        now = time.monotonic()
        with self._lock:
            waiting = self._idle.get(base, [])
            while waiting:
                since, sock = waiting.pop()
                if now - since < IDLE_S:
                    return sock
                sock.close()
        return None

    def _connected(self, base: str, deadline: float) -> socket.socket:
        parts = urllib.parse.urlsplit(base)
        host, is_tls = parts.hostname or "", parts.scheme == "https"
        timeout_s = min(CONNECT_TIMEOUT_S, _left_s(deadline))
        sock = socket.create_connection((host, parts.port or (443 if is_tls else 80)), timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not is_tls:
            return sock
        with self._lock:
            self._tls = self._tls or ssl.create_default_context()
        try:
            return self._tls.wrap_socket(sock, server_hostname=host)
        except BaseException:
            sock.close()
            raise

    def _give_back(self, base: str, sock: socket.socket) -> None:
        with self._lock:
            waiting = self._idle.setdefault(base, [])
            if len(waiting) < IDLE_MAX:
                waiting.append((time.monotonic(), sock))
                return
        sock.close()


def is_possible(environment: Mapping[str, str]) -> bool:
    """Whether requests can go out this way: no proxy is to be used, and they are to be signed."""
    upper = {name.upper(): value for name, value in environment.items() if value}
    through = {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "AWS_PROXY_URL", "PROXY_URL"}
    return not through & upper.keys() and "AWS_SKIP_SIGNATURE" not in upper


def _split(signed: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(signed)
    return f"{parts.scheme}://{parts.netloc}", f"{parts.path}?{parts.query}"


def _request(base: str, target: str, offset: int, length: int, etag: str) -> bytes:
    host = base.partition("://")[2]
    lines = (
        f"GET {target} HTTP/1.1",
        f"Host: {host}",
        f"Range: bytes={offset}-{offset + length - 1}",
        f"If-Match: {etag}",
        "Accept-Encoding: identity",
    )
    if any("\r" in line or "\n" in line for line in lines):
        raise Refused
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _head(sock: socket.socket) -> _Answer:
    """Raises:  _Stale: the connection ended, or what it says is no answer."""
    said, end = b"", -1
    while end < 0:
        more = sock.recv(_HEAD_BYTES_MAX)
        if not more or len(said) > _HEAD_BYTES_MAX:
            raise _Stale
        said += more
        end = said.find(b"\r\n\r\n")
    first, *lines = said[:end].split(b"\r\n")
    status = _STATUS.match(first + b"\r")
    if status is None:
        raise _Stale
    pairs = (line.partition(b":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    is_last = status[1] == b"0" or headers.get(b"connection", b"").lower() == b"close"
    return _Answer(int(status[2]), headers, said[end + 4 :], is_last)


def _check(url: str, answer: _Answer, offset: int, length: int, etag: str) -> None:
    """Go on only with an answer that is the range."""
    if answer.status in {429, 503}:
        raise StoreThrottled(
            f"{url}: the store asks to slow down (HTTP {answer.status})", shard=url
        )
    headers = answer.headers
    span = _SPAN.match(headers.get(b"content-range", b""))
    if (
        answer.status != 206
        or span is None
        or (int(span[1]), int(span[2])) != (offset, offset + length - 1)
        or headers.get(b"content-length") != b"%d" % length
        or b"transfer-encoding" in headers
        or headers.get(b"etag", b"").decode("latin-1") != etag
        or headers.get(b"content-encoding", b"identity") not in {b"identity", b"aws-chunked"}
        or len(answer.body) > length
    ):
        raise Refused


def _fill(
    url: str, answer: _Answer, sock: socket.socket, into: memoryview, offset: int, deadline: float
) -> None:
    at, length = len(answer.body), len(into)
    into[:at] = answer.body
    try:
        while at < length:
            sock.settimeout(_left_s(deadline))
            count = sock.recv_into(into[at:])
            if not count:
                break
            at += count
    except TimeoutError as cause:
        raise _late(url) from cause
    except OSError as cause:
        raise _broken(url, "broke off the connection") from cause
    if at < length:
        raise TruncatedRead(
            f"{url}: fewer bytes came than asked for, bytes [{offset}, {offset + length})",
            shard=url,
            offset=offset,
            expected=length,
            found=at,
        )


def _left_s(deadline: float) -> float:
    """Raises:  TimeoutError: nothing is left."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _late(url: str) -> StoreUnavailable:
    return _broken(url, "did not answer in time: it is overloaded, or a firewall drops packets")


def _broken(url: str, what: str) -> StoreUnavailable:
    return StoreUnavailable(f"{url}: the store {what}", shard=url)
