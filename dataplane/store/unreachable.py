"""Define when a store counts as unreachable, and the error that reports it.

All of these conditions are temporary: a server restarts, the network is down, DNS does not know a
name yet. Permanent ones (no such bucket, access refused, an untrusted certificate, an endpoint that
is not a url) are errors of other classes, and are raised at once.
"""

from __future__ import annotations

import enum
import errno
import socket

from dataplane.errors import StoreThrottled, StoreUnavailable

UNREACHABLE = (StoreUnavailable, StoreThrottled)
"""The errors of a store that is unreachable for now."""

_NETWORK = frozenset(
    {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL}
)
# A disk or a network file system may recover from these, and a process may close descriptors.
_PASSING = _NETWORK | {
    errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.EMFILE, errno.ENFILE,
    errno.ENOBUFS, errno.ENOMEM, errno.EREMOTEIO, errno.EPROTO, errno.ENONET, errno.ENOTCONN,
}  # fmt: skip

_ENDPOINT_HINTS = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL, AWS_REGION"),
    "http": ("the port in the url", "in the url"),
    "https": ("the port in the url", "in the url"),
}
_OTHER_HINT = ("the endpoint", "of the endpoint")


class SilentError(TimeoutError):
    """A server sent a part of an answer, and then nothing for too long."""


class Why(enum.Enum):
    """The way in which a store cannot be reached."""

    REFUSED = "refused the connection"
    NO_ROUTE = "cannot be reached: there is no route to it"
    NO_ADDRESS = "has no address"
    LATE = "did not answer in time"
    SILENT = "stopped in the middle of an answer"
    BROKEN = "closed the connection"
    UNKNOWN = "cannot be connected to"


def unreachable(url: str, endpoint: str, why: Why) -> StoreUnavailable:
    """Return the error for an unreachable store, with what to check. `endpoint` did not answer."""
    scheme = url.partition("://")[0]
    port, host = _ENDPOINT_HINTS.get(scheme, _OTHER_HINT)
    advice = {
        Why.REFUSED: f": check that it runs, and {port}",
        Why.NO_ROUTE: ": check the network",
        Why.NO_ADDRESS: f": check the host name ({host}) and DNS",
        Why.LATE: ": it may be overloaded, or a firewall drops packets",
        Why.SILENT: ": it may be overloaded, or the connection is dead",
        Why.BROKEN: "",
        Why.UNKNOWN: ": check the endpoint, the network, the proxy and TLS",
    }[why]
    return StoreUnavailable(f"{url}: {endpoint} {why.value}{advice}", shard=url)


def why_of(error: BaseException) -> Why | None:
    """Return how a connection failed; None if it failed in another way."""
    if isinstance(error, SilentError):
        return Why.SILENT
    if isinstance(error, TimeoutError):
        return Why.LATE
    if isinstance(error, ConnectionRefusedError):
        return Why.REFUSED
    if isinstance(error, socket.gaierror):
        return Why.NO_ADDRESS
    if isinstance(error, OSError) and error.errno in _NETWORK:
        return Why.NO_ROUTE
    return Why.BROKEN if isinstance(error, ConnectionError) else None


def passes(error: OSError) -> bool:
    """Whether an OSError may be gone at the next attempt. Libraries raise OSErrors without an errno
    for network errors of all kinds.
    """
    return why_of(error) is not None or error.errno is None or error.errno in _PASSING
