"""Retry the calls of a store whose failures are temporary.

Invariants:
1. Only the classes in the table are tried again. A changed, missing or denied object never is.
2. If a store does not answer, or asks to slow down, a call is retried until it has failed for
   `budget_s`. After that, a call starts no attempt, and no wait that cannot end: so it takes at
   most `budget_s` and the time of two requests.
3. An answer that is too short is requested again a few times: it may never become longer.
4. The store's gate decides how many callers send requests at once, and when.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from msgspec import Struct
from typing_extensions import Buffer

from dataplane.errors import (
    ConfigError,
    DataplaneError,
    DatasetChangedError,
    ShardNotFound,
    StoreDenied,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
    TruncatedRead,
)
from dataplane.model import ObjectInfo, StorePause
from dataplane.store.base import (
    NotInOrderError,
    Page,
    Paged,
    Pinning,
    Reconnecting,
    Restricted,
    Store,
)
from dataplane.store.gate import Clock, Gate, Share, Turn, Wait
from dataplane.store.listing import listed
from dataplane.store.outage import Observe, Outages
from dataplane.store.pieces import fill, in_pieces

T = TypeVar("T")

# A failure that passes, and how long a call pauses after it while others are answered. A store
# that asks to slow down is left alone by all of them: see SlowDown in gate.py.
RETRY_TABLE: Mapping[type[StoreError], Wait] = {
    StoreThrottled: Wait(base_s=0.0, cap_s=0.0),
    StoreUnavailable: Wait(base_s=0.1, cap_s=10.0),
    TruncatedRead: Wait(base_s=0.05, cap_s=2.0),
}
SHORT_ANSWERS_MAX = 5
_ANSWERS = (ShardNotFound, StoreDenied, TruncatedRead, DatasetChangedError)


class _Call(Struct, eq=False):
    """The state of one call."""

    what: str
    url: str
    deadline: float
    started: float
    attempts: int = 0
    short_answers: int = 0
    error: StoreError | None = None


class Retrying:
    """A store that retries the calls of another store, according to the table.

    `stream` reads in pieces, each in a separate call, so a failed stream resumes at the offset
    reached. `name` is the store's url as shown to people.
    """

    def __init__(
        self,
        inner: Store,
        name: str = "",
        budget_s: float = 120.0,
        clock: Clock | None = None,
        observe: Observe | None = None,
        share: Share = lambda _: None,
    ) -> None:
        self._inner = inner
        self._budget_s = budget_s
        self._clock = clock or Clock()
        self._gate = Gate(name, self._clock, observe or Outages().note, share)
        self._lock = threading.Lock()
        self._failing: set[_Call] = set()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        inner = self._inner
        if isinstance(inner, Paged) and inner.has_pages():
            with contextlib.suppress(NotInOrderError):
                return iter(listed(prefix, functools.partial(self._page, inner, prefix)))
        # If it breaks off, it starts again: such a store cannot go on at an exact place.
        return iter(self._call(f"listing {prefix}", prefix, lambda: [*inner.list(prefix)]))

    def pinned(self, url: str) -> str:
        """Implement `base.Pinning.pinned`."""
        inner = self._inner
        if not isinstance(inner, Pinning):
            return url
        return self._call(f"version of {url}", url, lambda: inner.pinned(url))

    def opens(self, url: str) -> bool:
        """Implement `base.Restricted.opens`."""
        return not isinstance(self._inner, Restricted) or self._inner.opens(url)

    def head(self, url: str) -> ObjectInfo:
        return self._call(f"head of {url}", url, lambda: self._inner.head(url))

    def read(self, url: str, offset: int, length: int, etag: str) -> Buffer:
        what = f"read of {url} bytes [{offset}, {offset + length})"
        return self._call(what, url, lambda: self._inner.read(url, offset, length, etag))

    def read_into(self, url: str, offset: int, etag: str, *into: memoryview) -> None:
        """Implement `base.Filling.read_into`, even if the other store has no such method."""
        what = f"read of {url} bytes [{offset}, {offset + sum(map(len, into))})"
        self._call(what, url, lambda: fill(self._inner, url, offset, etag, *into))

    def stream(self, url: str, etag: str) -> Iterator[Buffer]:
        return in_pieces(self, url, etag)

    def trouble(self, url: str) -> StoreError | None:
        """Return why reads of this url are waiting: the last error of one, or of the whole
        store.
        """
        with self._lock:
            own = next((call.error for call in self._failing if call.url == url), None)
        return own or self._gate.last_error

    def slow_down(self, pause: StorePause) -> None:
        """Note that another process of this host was asked to slow down by this store."""
        self._gate.slow_down(pause)

    def close(self) -> None:
        """End all waits for the store."""
        self._gate.close()

    def _page(self, inner: Paged, prefix: str, after: str | None) -> Page:
        what = f"listing {prefix}" + (f" after {after}" if after is not None else "")
        return self._call(what, prefix, lambda: inner.page(prefix, after))

    def _call(self, what: str, url: str, attempt: Callable[[], T]) -> T:
        now = self._clock.now()
        call = _Call(what, url, now + self._budget_s, now)
        try:
            while True:
                turn = self._gate.enter(call.deadline)
                if turn is None:
                    raise self._given_up(call)
                try:
                    return self._attempt(turn, attempt)
                except StoreError as error:
                    self._after(call, error)
        finally:
            with self._lock:
                self._failing.discard(call)

    def _attempt(self, turn: Turn, attempt: Callable[[], T]) -> T:
        """Make one attempt, and report its result to the gate."""
        try:
            if turn.is_probe and isinstance(self._inner, Reconnecting):
                with contextlib.suppress(ConfigError):  # then keep the old connections
                    self._inner.reconnect()
            result = attempt()
        except DataplaneError as error:
            if isinstance(error, _ANSWERS):
                self._gate.answered(turn)
            elif isinstance(error, StoreError) and _wait_after(error) is not None:
                self._gate.failed(turn, error)
            else:
                self._gate.dropped(turn)
            raise
        except BaseException:
            self._gate.dropped(turn)
            raise
        self._gate.answered(turn)
        return result

    def _after(self, call: _Call, error: StoreError) -> None:
        """Handle a failed attempt: pause before the next one, or raise."""
        wait = _wait_after(error)
        if wait is None:
            raise error
        now = self._clock.now()
        call.attempts += 1
        call.short_answers += isinstance(error, TruncatedRead)
        if call.error is None:
            call.deadline = now + self._budget_s
        with self._lock:
            # A copy: the error itself would keep alive what its traceback holds.
            call.error = type(error)(str(error), **error.nouns)
            self._failing.add(call)
        pause_s = self._clock.random() * wait.span_s(call.attempts)
        is_over = call.short_answers >= SHORT_ANSWERS_MAX or now >= call.deadline
        if is_over or not self._gate.pause(pause_s, call.deadline):
            raise self._given_up(call) from error

    def _given_up(self, call: _Call) -> StoreError:
        spent_s = self._clock.now() - call.started
        cause = call.error or self._gate.last_error
        if cause is None:  # a pause begun by another throttled call
            return StoreThrottled(
                f"{call.what}: the store asks to slow down, for {spent_s:.1f} s. Use fewer "
                "fetches in flight, or spread the shards over more "
                "prefixes",
                shard=call.url,
            )
        attempts = f"{call.attempts} attempt" + ("s" if call.attempts != 1 else "")
        message = f"{call.what}: gave up after {attempts} in {spent_s:.1f} s. The last: {cause}"
        nouns = {"shard": call.url, **cause.nouns, "attempts": call.attempts}
        return type(cause)(message, **nouns)


def _wait_after(error: StoreError) -> Wait | None:
    """Return how to pause after this failure; None if it is permanent."""
    return next((RETRY_TABLE[c] for c in type(error).__mro__ if c in RETRY_TABLE), None)
