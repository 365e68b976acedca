"""Objects of untrusted http servers, over our own connections.

obstore resolves names and follows redirects itself, and does not report where it connects to. So a
node that serves others reads http urls here: every address is checked when the connection is made,
whatever DNS said before, and every redirect before it is followed. This is not possible through a
proxy; then obstore is used, and the proxy decides what can be reached.

Invariants:
1. Nothing is sent before the connected address was checked.
2. No text of a server's answer appears in an error, except its status and etag.
"""

from __future__ import annotations

import base64
import email.utils
import http.client
import re
import socket
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from typing_extensions import Buffer

from dataplane.model.errors import (
    DatasetChangedError,
    ShardNotFound,
    StoreDenied,
    StoreError,
    StoreUnavailable,
    TruncatedRead,
)
from dataplane.model.records import ObjectInfo
from dataplane.store.connections import Connections, TimedConnection, range_headers
from dataplane.store.faults import refusal, shortened, unreachable, why_of
from dataplane.store.reads import (
    NO_ETAG,
    Race,
    check_etag,
    first_request,
    in_pieces,
    no_version,
    short_read,
    unmet,
)
from dataplane.store.url_policy import UrlPolicy, refused

_REDIRECTS_MAX = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_IDLE_MAX = 16
_HOST_MAX = 253
_SPAN = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18})")


class HttpStore:
    """One http server, and the servers that it redirects to."""

    def __init__(self, base: str, request_timeout_s: float, policy: UrlPolicy) -> None:
        self._base = base
        self._timeout_s = request_timeout_s
        self._policy = policy
        self._connections = Connections(_IDLE_MAX, request_timeout_s)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        raise ShardNotFound(f"{prefix}: an http server cannot list: name each file", shard=prefix)

    def head(self, url: str) -> ObjectInfo:
        try:
            info, _ = self._get(url, 0, 1, (), Race())
        except TruncatedRead:  # the object is empty: it has no first byte
            info, _ = self._get(url, 0, 0, (), Race())
        return info

    def read(self, url: str, offset: int, length: int, etag: str) -> Buffer:
        into = bytearray(length)
        self.read_into(url, offset, etag, memoryview(into))
        return into

    def read_into(self, url: str, offset: int, etag: str, *into: memoryview) -> None:
        """Implement `base.Filling.read_into`."""
        if not any(map(len, into)):
            check_etag(self.head(url), etag)
            return
        length = sum(map(len, into))
        with first_request() as race:
            try:
                info, given = self._get(url, offset, length, into, race, etag)
            except DatasetChangedError:
                raise unmet(self, url, etag) from None
            check_etag(info, etag)
            if given != length:
                raise short_read(url, offset, length, given)
            race.claim()

    def stream(self, url: str, etag: str) -> Iterator[Buffer]:
        return in_pieces(self, url, etag)

    def reconnect(self) -> None:
        """Implement `base.Reconnecting.reconnect`."""
        self._connections.close()

    def _get(
        self,
        url: str,
        offset: int,
        length: int,
        into: Sequence[memoryview],
        race: Race,
        etag: str = "",
    ) -> tuple[ObjectInfo, int]:
        """Return the object's facts, and how many bytes of the range the answer has: fewer than
        requested if the object ends before. Without a length, the whole object is requested.
        """
        headers = range_headers(offset, length, etag)
        deadline = time.monotonic() + self._timeout_s
        at = url
        for _ in range(_REDIRECTS_MAX + 1):
            base, server = "/".join(at.split("/", 3)[:3]), _server_of(at)
            is_whole, connection, answer = False, None, None
            try:
                connection, answer = self._asked(url, at, headers, deadline, race)
                if answer.status in _REDIRECTS:
                    at = self._redirected(url, at, answer.getheader("Location", ""))
                    continue
                info, given = _described(url, answer, offset, length, etag)
                if into and given == length:
                    self._connections.fill(answer, connection, into, race)
                else:
                    answer.read(given)
                is_whole = answer.isclosed() and not answer.will_close
            except (OSError, http.client.HTTPException) as cause:
                why = why_of(cause)
                if why is None:
                    said = type(cause).__name__
                    raise StoreUnavailable(f"{url}: {base} failed: {said}", shard=url) from cause
                detail = getattr(cause, "verify_message", "")  # if the certificate is not trusted
                raise unreachable(url, base, why, detail) from cause
            finally:
                if answer is not None:
                    answer.close()
                if connection is not None:
                    self._connections.give_back(server, connection, is_whole=is_whole)
            return info, given
        raise StoreError(f"{url} redirects more than {_REDIRECTS_MAX} times", shard=url)

    def _redirected(self, url: str, at: str, location: str) -> str:
        """Return the url that a redirect leads to.

        Raises:  StoreDenied: this url may not be opened.  StoreError: the target is not a url.
        """
        try:
            target = urllib.parse.urljoin(at, location)
            parts = urllib.parse.urlsplit(target)
            host = (parts.hostname or "").encode("idna")
            _ = parts.port
        except ValueError:
            raise StoreError(f"{url} redirects to what is not a url", shard=url) from None
        if not location or len(host) > _HOST_MAX:
            raise StoreError(f"{url} redirects to what is not a url", shard=url)
        scheme = shortened(parts.scheme)
        if scheme not in ("http", "https") or (at.startswith("https:") and scheme == "http"):
            refused(url, f"it redirects to {scheme}, which is not followed")
            raise StoreDenied(f"{url} redirects to {scheme}, which is not followed", shard=url)
        try:
            self._policy.check(target)
        except StoreDenied as error:
            raise StoreDenied(f"{url} redirects: {error}", shard=url) from None
        return target

    def _asked(
        self, url: str, at: str, headers: Mapping[str, str], deadline: float, race: Race
    ) -> tuple[TimedConnection, http.client.HTTPResponse]:
        """Send a request, and return the head of its answer."""
        parts = urllib.parse.urlsplit(at)
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        target = urllib.parse.quote(target, safe="/%?&=+$,;:@~!*'()-._")
        shown = {**headers, **_credentials(parts)}
        connect = partial(self._connect, url, parts)
        return self._connections.request(_server_of(at), target, shown, deadline, race, connect)

    def _connect(
        self,
        url: str,
        parts: urllib.parse.SplitResult,
        connection: http.client.HTTPConnection,
    ) -> None:
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        sock = socket.create_connection((host, port), connection.timeout)
        try:
            self._policy.check_address(url, sock.getpeername()[0])
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if parts.scheme == "https":
                sock = self._connections.tls.wrap_socket(sock, server_hostname=host)
        except BaseException:
            sock.close()
            raise
        connection.sock = sock


def _server_of(url: str) -> str:
    """Return a url's scheme, host and port, without credentials."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _credentials(parts: urllib.parse.SplitResult) -> dict[str, str]:
    """Return the credentials in the url, to be sent only to its own server."""
    if parts.username is None:
        return {}
    pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
    return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}


def _described(
    url: str, answer: http.client.HTTPResponse, offset: int, length: int, pinned: str
) -> tuple[ObjectInfo, int]:
    """Return the object that an answer describes, and how many bytes of the range follow. `pinned`
    is the etag of a conditional request.

    Raises:  the error that the answer's status means.  TruncatedRead: another range follows, or
    none.
    """
    if answer.status == 412 and pinned:
        raise DatasetChangedError(f"{url} changed since it was indexed", shard=url)
    if answer.status >= 300 and answer.status != 416:
        raise refusal(url, answer.status)
    span = _SPAN.fullmatch(answer.getheader("Content-Range", ""))
    etag = answer.getheader("ETag", "")
    size, given = int(span[3]) if span else 0, 0
    if answer.status == 416 and not (span and etag):  # Last-Modified is the error page's
        raise short_read(url, offset, length, 0)
    is_empty = answer.status == 200 and answer.length == 0
    if not is_empty and (answer.status not in (206, 416) or span is None):
        raise StoreError(
            f"{url}: the server answered a ranged GET with HTTP {answer.status}: it must support "
            "ranges",
            shard=url,
        )
    if span and answer.status == 206:
        given = _given(url, answer, span, offset, length)
    etag = etag or _etag_of_time(answer.getheader("Last-Modified"), size)
    if not etag:
        raise no_version(url)
    return ObjectInfo(url, size, etag), given


def _given(
    url: str, answer: http.client.HTTPResponse, span: re.Match[str], offset: int, length: int
) -> int:
    """Return how many bytes of the range follow.

    Raises:  TruncatedRead: another range follows.  StoreError: the bytes are compressed.
    """
    first, last, size = int(span[1] or 0), int(span[2] or -1), int(span[3])
    given = last + 1 - first
    # Refuse an encoding only if the length differs: an object that is stored compressed has the
    # size and the ranges of its compressed bytes.
    is_encoded = answer.getheader("Content-Encoding", "identity") not in {"identity", "aws-chunked"}
    if is_encoded and answer.length != given:
        raise StoreError(
            f"{url}: the server compresses the ranges that it sends (Content-Encoding), though not "
            "asked to: turn this off for these files",
            shard=url,
        )
    if first != offset or given != min(length, size - offset):
        raise short_read(url, offset, length, given, f" from {first} on")
    if answer.length not in (given, None):
        raise short_read(url, offset, length, answer.length or 0)
    return given


def _etag_of_time(modified: str | None, size: int) -> str:
    """Make an etag of the time and the size; empty if the time is invalid."""
    try:
        at = email.utils.parsedate_to_datetime(modified or "").timestamp()
    except (ValueError, OverflowError):
        return ""
    return f"{NO_ETAG}{at:.0f}-{size}"
