"""Retry the calls of a store whose failures are temporary, and decide when requests may be sent.

Each store has one gate, through which all callers go. A store that answers no caller is *away*.
Meanwhile one caller at a time sends a probe, and all others wait: if each thread retried on its
own, the store would face a storm of requests when it comes back.

Invariants:
1. Only faults that have a wait in faults.FAULTS are retried. A changed, missing or denied object
   never is.
2. If a store does not answer, or asks to slow down, a call is retried until it has failed for
   `budget_s`. After that, a call starts no attempt and no unlimited wait: so it takes at most
   `budget_s` and the time of two requests.
3. An answer that is too short is requested again only a few times, since it may never get longer.
4. A store is away if requests to it fail and none has been answered since the first of them began:
   at once if it has never answered, otherwise after AWAY_AFTER_S. One answer, even a refusal, ends
   the outage.
5. While a store is away, at most one request is in flight: that of the caller that has waited
   longest. So a single object that can never be read does not keep other callers from trying.
6. If a store asks to slow down, every call to it waits, also in other processes of the host:
   `share` passes the pause on to them, and `slow_down` takes a pause from another process.
7. `observe` and `share` are called in the order of events, and never under the lock.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace
from typing_extensions import Buffer

from dataplane.base.meters import RequestMeter
from dataplane.base.trace import Trace
from dataplane.model.errors import (
    ClosedError,
    ConfigError,
    DataplaneError,
    DatasetChangedError,
    StoreError,
    StoreThrottled,
)
from dataplane.model.joined import is_joined
from dataplane.model.records import ObjectInfo, StorePause
from dataplane.model.redact import redacted
from dataplane.store.base import (
    NotInOrderError,
    Page,
    Paged,
    Pinning,
    Reconnecting,
    Restricted,
    Store,
    Writable,
)
from dataplane.store.faults import Clock, Wait, fault_of
from dataplane.store.listing import listed
from dataplane.store.outage import Observe, Outage, Outages, Share
from dataplane.store.reads import (
    Connect,
    copy_into,
    fill,
    in_pieces,
    read_joined,
    stream_joined,
)

AWAY_AFTER_S = 1.0
RETRIES_LOGGED_S = 60.0
"""How often the failures of a store that answers other requests are logged, as one sum."""
RETURN_S = 1.0
"""After an outage, waiting callers resume one by one within this time."""


SLOW_DOWN = Wait(base_s=0.5, cap_s=20.0)
PROBE = Wait(base_s=0.5, cap_s=5.0)


class SlowDown:
    """The pause that all calls to one store share.

    A throttling store limits the load per second, so the whole host must send fewer requests: if
    only the refused calls waited, the others would keep the store at its limit. Refusals that
    arrive together count once: calls are numbered by the round in which they began.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._level = 0
        self._until = 0.0
        self.round = 0

    def wait_s(self) -> float:
        """Return how long a call has to wait before it may begin.

        Each waiting call resumes at a random moment within the pause, so that they do not all
        resume at once.
        """
        left = self._until - self._clock.now()
        return left + self._clock.random() * SLOW_DOWN.span_s(self._level) if left > 0 else 0.0

    def refused(self, began_in: int, store: str) -> StorePause | None:
        """Note that the store throttled a call that began in this round. Return the pause that this
        starts, if any.
        """
        if began_in != self.round:
            return None
        self.round += 1
        self._level += 1
        left_s = self._clock.random() * SLOW_DOWN.span_s(self._level)
        self._until = self._clock.now() + left_s
        return StorePause(store, self._level, left_s)

    def noted(self, pause: StorePause) -> None:
        """Note that another process of the host was throttled. Calls that began earlier do not
        count again.
        """
        self.round += 1
        self._level = max(self._level, pause.level)
        self._until = max(self._until, self._clock.now() + pause.left_s)

    def served(self) -> None:
        """Note that the store answered: the next pause is shorter again."""
        self._level = max(0, self._level - 1)


class Turn(Struct, frozen=True):
    """Permission for one request. A probe checks whether the store is back."""

    began: float
    round: int
    is_probe: bool


class Gate:
    """The gate of one store."""

    def __init__(
        self, store: str, clock: Clock, observe: Observe, share: Share = lambda _: None
    ) -> None:
        self._base = store
        self._store = redacted(store)
        self._clock = clock
        self._observe = observe
        self._share = share
        self._changed = threading.Condition()
        self._reporting = threading.Lock()
        self._unreported: deque[Outage] = deque()
        self._queue: deque[object] = deque()
        self._slow_down = SlowDown(clock)
        self._answered_at: float | None = None
        self._failing_since: float | None = None
        self._in_flight = 0
        self._away: Outage | None = None
        self._last_error: StoreError | None = None
        self._is_probed = False
        self._probes = 0
        self._probe_at = 0.0
        self._closed = False
        self._retries = 0
        self._retries_logged_at: float | None = None

    @property
    def last_error(self) -> StoreError | None:
        """Why the store is away; None while it answers."""
        return self._last_error

    def enter(self, deadline: float) -> Turn | None:
        """Wait until a request may be sent; return None if that is not before the deadline.

        Raises:  ClosedError: the gate was closed during the wait.
        """
        me, was_held = object(), False
        with self._changed:
            self._queue.append(me)
            try:
                while True:
                    wait_s = self._wait_s(me)
                    if was_held and self._away is None:
                        was_held = False
                        wait_s = max(wait_s, self._clock.random() * RETURN_S)
                    if wait_s <= 0:
                        self._in_flight += 1
                        is_probe = self._is_probed = self._away is not None
                        return Turn(self._clock.now(), self._slow_down.round, is_probe)
                    was_held = self._away is not None
                    if not self._waited(wait_s, deadline):
                        return None
            finally:
                self._queue.remove(me)
                self._changed.notify_all()

    def pause(self, seconds: float, deadline: float) -> bool:
        """Pause this call alone; return False if that would exceed the deadline.

        Raises:  ClosedError: the gate was closed during the wait.
        """
        with self._changed:
            until = self._clock.now() + seconds
            while (left := until - self._clock.now()) > 0 and self._away is None:
                if not self._waited(left, deadline):
                    return False
            return True

    def answered(self, turn: Turn) -> None:
        """Note that the store answered, with success or a refusal."""
        with self._changed:
            self._left(turn)
            self._answered_at, self._failing_since = self._clock.now(), None
            self._slow_down.served()
            retries = self._retries_to_log() if self._away is None else 0
            if self._away is not None:
                self._unreported.append(replace(self._away, until=self._clock.wall()))
                self._away, self._last_error, self._probes = None, None, 0
                self._changed.notify_all()
        if retries:
            _trace.noted("requests failed and were retried", store=self._store, count=retries)
        self._report()

    def failed(self, turn: Turn, error: StoreError) -> None:
        """Note that the store gave no answer, or asked to try again later."""
        pause = None
        with self._changed:
            self._left(turn)
            self._retries += self._away is None
            now = self._clock.now()
            is_alone = self._answered_at is not None and self._answered_at > turn.began
            if not is_alone:
                since = turn.began if self._failing_since is None else self._failing_since
                self._failing_since = min(since, turn.began)
                self._note_failure(error, now)
            if isinstance(error, StoreThrottled) and (is_alone or self._away is None):
                pause = self._slow_down.refused(turn.round, self._base)
            if turn.is_probe:
                self._probes += 1
                self._probe_at = now + self._clock.random() * PROBE.span_s(self._probes)
        self._report()
        if pause is not None:
            self._share(pause)

    def slow_down(self, pause: StorePause) -> None:
        """Note that another process of this host was asked to slow down."""
        with self._changed:
            self._slow_down.noted(pause)

    def dropped(self, turn: Turn) -> None:
        """Note that the attempt ended without showing anything about the store."""
        with self._changed:
            self._left(turn)

    def close(self) -> None:
        """End all waiting calls."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _retries_to_log(self) -> int:
        now, count, logged_at = self._clock.now(), self._retries, self._retries_logged_at
        if not count or (logged_at is not None and now - logged_at < RETRIES_LOGGED_S):
            return 0
        self._retries, self._retries_logged_at = 0, now
        return count

    def _wait_s(self, me: object) -> float:
        if self._away is None:
            return self._slow_down.wait_s()
        if self._is_probed or self._queue[0] is not me:
            return float("inf")  # wait until the state changes
        return self._probe_at - self._clock.now()

    def _waited(self, seconds: float, deadline: float) -> bool:
        """Wait for `seconds` or until the state changes. Return False without waiting if the wait
        would exceed the deadline. An infinite wait ends at the deadline.
        """
        left = deadline - self._clock.now()
        if left <= 0 or (left < seconds < float("inf")):
            return False
        self._clock.wait(self._changed, min(seconds, left))
        if self._closed:
            raise ClosedError(f"{self._store} was closed while a read waited for it")
        return True

    def _left(self, turn: Turn) -> None:
        self._in_flight -= 1
        if turn.is_probe:
            self._is_probed = False
            self._changed.notify_all()

    def _note_failure(self, error: StoreError, now: float) -> None:
        assert self._failing_since is not None
        if self._away is None:
            never_answered = self._answered_at is None and not self._in_flight
            if not never_answered and now - self._failing_since < AWAY_AFTER_S:
                return
            self._retries = 0  # failures during an outage are reported with the outage
            since = self._clock.wall() - (now - self._failing_since)
            self._probe_at = now + self._clock.random() * PROBE.span_s(1)
            self._changed.notify_all()  # callers that pause on their own now wait for the store
        else:
            since = self._away.since
        # Keep a copy, since the traceback of the error would keep other objects alive.
        self._last_error = type(error)(str(error), **error.nouns)
        text = str(error).removeprefix(f"{error.nouns.get('shard')}: ")
        self._away = Outage(self._store, since, text, last_request_at=self._clock.wall())
        self._unreported.append(self._away)

    def _report(self) -> None:
        with self._reporting:
            while self._unreported:
                self._observe(self._unreported.popleft())


_trace = Trace("store")


T = TypeVar("T")


class _Call(Struct, eq=False):
    """The state of one call."""

    what: str
    url: str
    deadline: float
    started: float
    attempts: int = 0
    limited_attempts: int = 0
    error: StoreError | None = None


class Retrying:
    """A store that retries the calls of another store, according to faults.FAULTS.

    `stream` reads in pieces, each in a separate call, so a failed stream resumes at the offset
    reached. `name` is the store's url as shown to people. `connect` returns the store of any
    url: shards that are joined from several objects are read object by object (reads.py).
    """

    def __init__(
        self,
        inner: Store,
        name: str = "",
        budget_s: float = 120.0,
        clock: Clock | None = None,
        observe: Observe | None = None,
        share: Share = lambda _: None,
        connect: Connect | None = None,
    ) -> None:
        self._inner = inner
        self._connect = connect or (lambda _: self)
        self._budget_s = budget_s
        self._clock = clock or Clock()
        self._gate = Gate(name, self._clock, observe or Outages().note, share)
        self._lock = threading.Lock()
        self._failing: set[_Call] = set()
        self.meter = RequestMeter()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        inner = self._inner
        if isinstance(inner, Paged) and inner.has_pages():
            with contextlib.suppress(NotInOrderError):
                return iter(listed(prefix, functools.partial(self._page, inner, prefix)))
        # Retry a failed list from its beginning: a store without pages cannot continue at a key.
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
        if is_joined(etag):
            return read_joined(self._connect, url, offset, length, etag)
        what = f"read of {url} bytes [{offset}, {offset + length})"
        return self._call(what, url, lambda: self._inner.read(url, offset, length, etag))

    def read_into(self, url: str, offset: int, etag: str, *into: memoryview) -> None:
        """Implement `base.Filling.read_into`, even if the other store has no such method."""
        if is_joined(etag):
            length = sum(map(len, into))
            copy_into(read_joined(self._connect, url, offset, length, etag), *into)
            return
        what = f"read of {url} bytes [{offset}, {offset + sum(map(len, into))})"
        self._call(what, url, lambda: fill(self._inner, url, offset, etag, *into))

    def stream(self, url: str, etag: str) -> Iterator[Buffer]:
        if is_joined(etag):
            return stream_joined(self._connect, url, etag)
        return in_pieces(self, url, etag)

    def put(self, url: str, content: Buffer) -> None:
        """Write a whole object, in place of any other.

        Raises:  ConfigError: this store cannot be written.  As `Store.head`.
        """
        inner = self._inner
        if not isinstance(inner, Writable):
            raise ConfigError(f"{url}: cannot be written: pass a url of a bucket, or a local path")
        self._call(f"write of {url}", url, lambda: inner.put(url, content))

    def trouble(self, url: str) -> StoreError | None:
        """Return why reads of this url are waiting: the last error of such a read, or of the whole
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
                with contextlib.suppress(ConfigError):  # the old connections are kept then
                    self._inner.reconnect()
            result = attempt()
        except DataplaneError as error:
            if isinstance(error, StoreError):
                self.meter.ended(self._clock.now() - turn.began, error)
            fault = fault_of(error) if isinstance(error, StoreError) else None
            if isinstance(error, DatasetChangedError) or (fault and fault.is_answer):
                self._gate.answered(turn)
            elif isinstance(error, StoreError) and fault and fault.wait:
                self._gate.failed(turn, error)
            else:
                self._gate.dropped(turn)
            raise
        except BaseException:
            self._gate.dropped(turn)
            raise
        self.meter.ended(self._clock.now() - turn.began)
        self._gate.answered(turn)
        return result

    def _after(self, call: _Call, error: StoreError) -> None:
        """Handle a failed attempt: pause before the next one, or raise."""
        fault = fault_of(error)
        if fault.wait is None:
            raise error
        now = self._clock.now()
        call.attempts += 1
        call.limited_attempts += fault.attempts_max is not None
        if call.error is None:
            call.deadline = now + self._budget_s
        with self._lock:
            # Keep a copy, since the traceback of the error would keep other objects alive.
            call.error = type(error)(str(error), **error.nouns)
            self._failing.add(call)
        pause_s = self._clock.random() * fault.wait.span_s(call.attempts)
        most = math.inf if fault.attempts_max is None else fault.attempts_max
        is_over = call.limited_attempts >= most or now >= call.deadline
        if is_over or not self._gate.pause(pause_s, call.deadline):
            raise self._given_up(call) from error
        self.meter.retried()

    def _given_up(self, call: _Call) -> StoreError:
        spent_s = self._clock.now() - call.started
        cause = call.error or self._gate.last_error
        if cause is None:  # the call only waited in a pause that another call started
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
