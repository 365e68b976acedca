"""The meaning of an HTTP answer without the requested bytes: one table for all ways to read a
store.
"""

from __future__ import annotations

from dataplane.errors import (
    ShardNotFound,
    StoreDenied,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
)

_SAID_MAX = 300
_THROTTLES = (
    "SlowDown", "Throttl", "TooManyRequests", "RequestLimitExceeded", "ServerBusy",
    "ateLimitExceeded",
)  # fmt: skip
# S3 says these with status 400, too.
_PASSING = frozenset({"RequestTimeout", "InternalError"})
_DENIED = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})
_SAYS: dict[type[StoreError], str] = {
    StoreThrottled: "the store asks to slow down",
    StoreUnavailable: "the store reported an internal failure",
    StoreDenied: "access refused",
    ShardNotFound: "there is no such object",
    StoreError: "the store refused the request",
}


def kind_of(status: int, code: str = "") -> type[StoreError]:
    """Return the class of error that an HTTP status means. The store's own code, if any, is more
    specific.
    """
    if status in (429, 503) or is_throttle(code):
        return StoreThrottled
    # 501 and 505 are about what a server cannot do at all.
    is_failure = status in (408, 425) or (500 <= status < 600 and status not in (501, 505))
    if is_failure or code in _PASSING:
        return StoreUnavailable
    if status in (401, 403, 407) or code in _DENIED:
        return StoreDenied
    return ShardNotFound if status in (404, 410) else StoreError


def is_throttle(text: str) -> bool:
    """Whether an error code asks to slow down."""
    return any(word in text for word in _THROTTLES)


def refusal(url: str, status: int) -> StoreError:
    """Return the error for an answer of which only the status is known, or may be shown."""
    kind = kind_of(status)
    return kind(f"{url}: {_SAYS[kind]} (HTTP {status})", shard=url)


def shortened(text: str) -> str:
    """Shorten a server's or library's text for an error message: some are whole pages."""
    line = text.strip().partition("\n")[0].strip()
    return line if len(line) <= _SAID_MAX else f"{line[:_SAID_MAX]}…"
