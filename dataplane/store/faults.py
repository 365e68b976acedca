"""Faults of stores, as tables: how each appears, which error it becomes, and how it is retried.

All stores and the retries use two tables. `FAULTS` has the meanings of answers. `BREAKS` has the
ways in which a connection fails. Nearly all are temporary: a server restarts, the network is down,
DNS does not know a name yet. Those in `LASTING` are not, and are raised at once as StoreErrors.
"""

from __future__ import annotations

import enum
import errno
import random
import socket
import threading
import time
from collections.abc import Callable

from msgspec import Struct

from dataplane.model.errors import (
    ShardNotFound,
    StoreDenied,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
    TruncatedRead,
)

CONNECT_TIMEOUT_S = 5.0


class Refused(Exception):
    """A direct read got an answer that is not the requested bytes, and does not say why."""


class Wait(Struct, frozen=True):
    """How waits grow: from `base_s`, doubled each time, up to `cap_s`. The actual wait is uniformly
    random between zero and this span ("full jitter").

    Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """

    base_s: float
    cap_s: float

    def span_s(self, attempt: int) -> float:
        """Return the longest wait after the attempt with this number, counted from 1."""
        return float(min(self.cap_s, self.base_s * 2.0 ** min(attempt - 1, 60)))


class Clock(Struct, frozen=True):
    """Time and randomness for retries; tests pass their own. `wait` waits for a condition whose
    lock is held, and may return early.
    """

    now: Callable[[], float] = time.monotonic
    wait: Callable[[threading.Condition, float], object] = threading.Condition.wait
    random: Callable[[], float] = random.random
    wall: Callable[[], float] = time.time


class Fault(Struct, frozen=True):
    """One kind of fault: an answer with one of these HTTP statuses or error codes. `wait` is how a
    call pauses before it is retried; None means that it is not retried. After `attempts_max`
    attempts a call gives up, even if time is left. `is_answer` is true if the fault proves that the
    store answers.
    """

    error: type[StoreError]
    meaning: str
    wait: Wait | None = None
    attempts_max: int | None = None
    is_answer: bool = False
    statuses: frozenset[int] = frozenset()
    codes: tuple[str, ...] = ()


# The first row that has the status or the code is used. S3 sends some codes with status 400.
FAULTS = (
    # If a store asks to slow down, all of its callers pause (SlowDown in retry.py), so the call
    # itself need not.
    Fault(
        StoreThrottled,
        "the store asks to slow down",
        wait=Wait(base_s=0.0, cap_s=0.0),
        statuses=frozenset({429, 503}),
    ),
    # 501 and 505 are left out: they say that a server will never support a request.
    Fault(
        StoreUnavailable,
        "the store reported an internal failure",
        wait=Wait(base_s=0.1, cap_s=10.0),
        statuses=frozenset({408, 425, *range(500, 600)} - {501, 503, 505}),
        codes=("RequestTimeout", "InternalError"),
    ),
    Fault(
        StoreDenied,
        "access refused",
        is_answer=True,
        statuses=frozenset({401, 403, 407}),
        codes=("ExpiredToken", "InvalidToken", "TokenRefreshRequired"),
    ),
    Fault(ShardNotFound, "there is no such object", is_answer=True, statuses=frozenset({404, 410})),
    Fault(
        TruncatedRead,
        "the answer is too short",
        wait=Wait(base_s=0.05, cap_s=2.0),
        attempts_max=5,
        is_answer=True,
    ),
    Fault(StoreError, "the store refused the request"),
)
_THROTTLE_WORDS = (
    "SlowDown", "Throttl", "TooManyRequests", "RequestLimitExceeded", "ServerBusy",
    "ateLimitExceeded", "throttl", "reduce your request rate"
)  # fmt: skip
"""Parts of error codes and messages that ask to slow down."""
UNREACHABLE = (StoreUnavailable, StoreThrottled)
"""The errors of a store that is unreachable for now."""
_TEXT_MAX = 300


def fault_of(error: StoreError) -> Fault:
    """Return the row of `FAULTS` for an error of ours."""
    return next(fault for fault in FAULTS if isinstance(error, fault.error))


def kind_of(status: int, code: str = "") -> type[StoreError]:
    """Return the class of error that an HTTP status means. The store's own code, if any, is more
    specific.
    """
    return _fault_of_answer(status, code).error


def _fault_of_answer(status: int, code: str) -> Fault:
    if is_throttle(code):
        return FAULTS[0]
    fitting = (fault for fault in FAULTS if status in fault.statuses or code in fault.codes)
    return next(fitting, FAULTS[-1])


def is_throttle(text: str) -> bool:
    """Return whether an error code or a message asks to slow down."""
    return any(word in text for word in _THROTTLE_WORDS)


def refusal(url: str, status: int, code: str = "") -> StoreError:
    """Return the error for an answer, from its status and code alone."""
    fault = _fault_of_answer(status, code)
    return fault.error(f"{url}: {fault.meaning} ({f'HTTP {status} {code}'.strip()})", shard=url)


def shortened(text: str) -> str:
    """Shorten a server's or library's text for an error message: some are whole pages."""
    line = text.strip().partition("\n")[0].strip()
    return line if len(line) <= _TEXT_MAX else f"{line[:_TEXT_MAX]}…"


class SilentError(TimeoutError):
    """A server sent part of an answer, and then nothing for too long."""


class Why(enum.Enum):
    """The way in which a store cannot be reached."""

    UNTRUSTED = "has a TLS certificate that is not trusted"
    NO_TLS = "does not speak TLS"
    SILENT = "stopped in the middle of an answer"
    LATE = "did not answer in time"
    NO_ADDRESS = "has no address"
    REFUSED = "refused the connection"
    NO_ROUTE = "cannot be reached: there is no route to it"
    UNKNOWN = "cannot be connected to"
    BROKEN = "closed the connection"


class Break(Struct, frozen=True):
    """One way in which a connection fails: what to check ({port} and {host} depend on the scheme),
    and how it is recognized: by Python's exceptions and error numbers, or by words in obstore's
    messages or in ssl's reasons.
    """

    advice: str = ""
    exceptions: tuple[type[BaseException], ...] = ()
    errnos: frozenset[int] = frozenset()
    words: tuple[str, ...] = ()


_NETWORK = frozenset(
    {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL}
)
# The first match is used. SILENT comes before LATE, since a SilentError is also a TimeoutError.
BREAKS = {
    Why.UNTRUSTED: Break(
        ": check the host name, the clock, and the certificate authorities of this machine",
        words=("InvalidCertificate", "CERTIFICATE_VERIFY_FAILED"),
    ),
    Why.NO_TLS: Break(
        ": write http:// instead of https://, or check the port",
        words=("InvalidContentType", "WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"),
    ),
    Why.SILENT: Break(": it may be overloaded, or the connection is dead", (SilentError,)),
    Why.LATE: Break(
        ": it may be overloaded, or a firewall drops packets",
        (TimeoutError,),
        words=("kind: Timeout", "TimedOut"),
    ),
    Why.NO_ADDRESS: Break(
        ": check the host name ({host}) and DNS",
        (socket.gaierror,),
        words=("dns error", "failed to lookup"),
    ),
    Why.REFUSED: Break(
        ": check that it runs, and {port}", (ConnectionRefusedError,), words=("ConnectionRefused",)
    ),
    Why.NO_ROUTE: Break(
        ": check the network",
        errnos=_NETWORK,
        words=("HostUnreachable", "NetworkUnreachable", "NetworkDown"),
    ),
    Why.UNKNOWN: Break(
        ": check the endpoint, the network, the proxy and TLS", words=("kind: Connect,",)
    ),
    Why.BROKEN: Break(exceptions=(ConnectionError,)),
}
LASTING = (Why.UNTRUSTED, Why.NO_TLS)
# Errors that may pass: a disk or a network file system may recover, and a process that has too many
# descriptors may close some.
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


def unreachable(url: str, endpoint: str, why: Why, detail: str = "") -> StoreError:
    """Return the error for an unreachable store, with advice on what to check. `endpoint` is the
    server that did not answer.
    """
    error = StoreError if why in LASTING else StoreUnavailable
    port, host = _ENDPOINT_HINTS.get(url.partition("://")[0], _OTHER_HINT)
    advice = BREAKS[why].advice.format(port=port, host=host)
    shown = f" ({detail})" if detail else ""
    return error(f"{url}: {endpoint} {why.value}{shown}{advice}", shard=url)


def why_of(error: BaseException) -> Why | None:
    """Return how a connection failed; None if it failed in another way."""
    number = error.errno if isinstance(error, OSError) else None
    reason = getattr(error, "reason", None)  # ssl errors have one
    for why, kind in BREAKS.items():
        if isinstance(error, kind.exceptions) or number in kind.errnos or reason in kind.words:
            return why
    return None


def why_of_text(text: str) -> Why:
    """Return how a connection failed, from a message of obstore."""
    return next(
        (why for why, kind in BREAKS.items() if any(word in text for word in kind.words)),
        Why.BROKEN,
    )


def passes(error: OSError) -> bool:
    """Return whether an OSError may be gone at the next attempt. Without an errno it counts as
    temporary, since libraries raise such OSErrors for network errors of all kinds.
    """
    why = why_of(error)
    if why is not None:
        return why not in LASTING
    return error.errno is None or error.errno in _PASSING
