"""Ranged reads from S3 over our own connections, straight into the destination memory.

obstore returns bytes in its own memory, collected from small pieces, which must be copied again;
that takes more than half of the client's CPU time. Here the kernel writes received bytes directly
to their destination. obstore still finds the credentials and signs each request. If an answer is
neither the bytes nor a temporary failure of the store, obstore repeats the request, so that all
other errors come from one place.

Invariant: memory is filled with exactly the range of the object with that etag. Status, range,
length and etag of the answer are checked.
"""

from __future__ import annotations

import http.client
import re
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence

from dataplane.errors import DataplaneError
from dataplane.store.connections import Connections
from dataplane.store.pieces import is_strong
from dataplane.store.race import EndedEarlyError, Race, current_race
from dataplane.store.refusals import kind_of, refusal
from dataplane.store.unreachable import UNREACHABLE, Why, unreachable, why_of

Sign = Callable[[str], str]
"""The url of a key with its signature in it."""

_IDLE_MAX = 64
_SPAN = re.compile(r"bytes (\d{1,18})-(\d{1,18})/")
# After this many refusals in a row, direct requests pause for a while.
_REFUSALS_MAX = 8
_PAUSE_S = 60.0


class Refused(Exception):
    """The answer is not the requested bytes, for an unknown reason."""


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
        """Whether to try direct requests: not after repeated refusals, which mean that the server
        needs another kind of request.
        """
        return not self._off_until or time.monotonic() > self._off_until

    def read_into(self, url: str, key: str, offset: int, etag: str, *into: memoryview) -> None:
        """Fill these buffers, one after the other, from that offset on.

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
        headers = {"Range": f"bytes={offset}-{offset + length - 1}"}
        if is_strong(etag):
            headers["If-Match"] = etag
        base, target = _split(self._sign(key))
        try:
            connection, answer = self._connections.ask(base, target, headers, deadline, race)
        except (OSError, http.client.HTTPException) as cause:
            why = why_of(cause)
            if why is None:
                raise self._refused() from cause
            raise unreachable(url, base, why) from cause
        is_whole = False
        try:
            _check(url, answer, offset, length, etag)
            try:
                fill = self._connections.fill
                filled = sum(fill(answer, connection, each, race) for each in into)
                if filled < length:
                    raise ConnectionResetError(f"closed after {filled} bytes of {length}")
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
    """Whether direct requests are possible: no proxy is set, and requests are signed."""
    upper = {name.upper(): value for name, value in environment.items() if value}
    through = {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "AWS_PROXY_URL", "PROXY_URL"}
    return not through & upper.keys() and "AWS_SKIP_SIGNATURE" not in upper


def _split(signed: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(signed)
    return f"{parts.scheme}://{parts.netloc}", f"{parts.path}?{parts.query}"


def _check(url: str, answer: http.client.HTTPResponse, offset: int, length: int, etag: str) -> None:
    """Check that the answer is the requested range."""
    if issubclass(kind_of(answer.status), UNREACHABLE):
        # To ask again at once would double the load.
        raise refusal(url, answer.status)
    # Of an object that is stored compressed, this is a range of what is stored. One that the server
    # compresses has another length.
    span = _SPAN.match(answer.getheader("Content-Range", ""))
    if (
        answer.status != 206
        or span is None
        or (int(span[1]), int(span[2])) != (offset, offset + length - 1)
        or answer.length != length
        or answer.getheader("ETag") != etag
    ):
        raise Refused
