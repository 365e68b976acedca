"""Decides when a request may be sent to a store: one gate per store, which all callers pass.

A store that answers no caller is *away*. Meanwhile one caller at a time sends a probe, and all
others wait: if each thread retried on its own, the store would face a storm of requests when it
comes back.

Invariants:
1. A store is away when requests to it fail and none has been answered since the first of them
   began: at once if it never answered, otherwise after AWAY_AFTER_S. One answer, even a refusal,
   ends the outage.
2. While it is away, at most one request is in flight, that of the caller that has waited longest.
   So a single object that can never be read does not keep other callers from trying.
3. When a store asks to slow down, every call to it waits, also those of other processes of the
   host: `share` passes the pause on, and `slow_down` takes one from another process.
4. `observe` and `share` are called in the order of events, and never under the lock.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from dataplane.errors import ClosedError, StoreError, StoreThrottled
from dataplane.model import StorePause
from dataplane.redact import redacted
from dataplane.store.outage import Observe, Outage
from dataplane.trace import Trace

AWAY_AFTER_S = 1.0
RETRIES_TOLD_S = 60.0
"""Interval for logging, summed up, the failures of a store that answers other requests."""
RETURN_S = 1.0
"""After an outage, waiting callers resume one by one within this time."""


class Wait(Struct, frozen=True):
    """The growth of waits: `base_s`, doubled each time, up to `cap_s`. The actual wait is uniformly
    random between zero and that ("full jitter").

    Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """

    base_s: float
    cap_s: float

    def span_s(self, attempt: int) -> float:
        """Return the longest wait after the attempt with this number, counted from 1."""
        return float(min(self.cap_s, self.base_s * 2.0 ** min(attempt - 1, 60)))


Share = Callable[[StorePause], None]

SLOW_DOWN = Wait(base_s=0.5, cap_s=20.0)
PROBE = Wait(base_s=0.5, cap_s=5.0)


class Clock(Struct, frozen=True):
    """Time and randomness for retries; tests pass their own. `wait` waits for a condition whose
    lock is held, and may return early.
    """

    now: Callable[[], float] = time.monotonic
    wait: Callable[[threading.Condition, float], object] = threading.Condition.wait
    random: Callable[[], float] = random.random
    wall: Callable[[], float] = time.time


class SlowDown:
    """The pause that all calls to one store share.

    A throttling store limits the load per second, so the whole host must send fewer requests: if
    only the refused calls waited, the others would keep the store at its limit. Refusals that
    arrive together count once, since each call has the number of the round in which it began.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._level = 0
        self._until = 0.0
        self.round = 0

    def wait_s(self) -> float:
        """How long a call has to wait before it may begin.

        Each waiting call resumes at a random moment within the pause, so that they do not all
        resume at once.
        """
        left = self._until - self._clock.now()
        return left + self._clock.random() * SLOW_DOWN.span_s(self._level) if left > 0 else 0.0

    def refused(self, began_in: int, store: str) -> StorePause | None:
        """Note that the store throttled a call that began in that round. Return the pause that this
        begins, if any.
        """
        if began_in != self.round:
            return None
        self.round += 1
        self._level += 1
        left_s = self._clock.random() * SLOW_DOWN.span_s(self._level)
        self._until = self._clock.now() + left_s
        return StorePause(store, self._level, left_s)

    def told(self, pause: StorePause) -> None:
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
        self._telling = threading.Lock()
        self._untold: deque[Outage] = deque()
        self._queue: deque[object] = deque()
        self._slow_down = SlowDown(clock)
        self._answered_at: float | None = None
        self._failing_since: float | None = None
        self._asking = 0
        self._away: Outage | None = None
        self._last_error: StoreError | None = None
        self._is_probed = False
        self._probes = 0
        self._probe_at = 0.0
        self._closed = False
        self._retries = 0
        self._retries_told: float | None = None

    @property
    def last_error(self) -> StoreError | None:
        """Return why the store is away; None while it answers."""
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
                        self._asking += 1
                        is_probe = self._is_probed = self._away is not None
                        return Turn(self._clock.now(), self._slow_down.round, is_probe)
                    was_held = self._away is not None
                    if not self._waited(wait_s, deadline):
                        return None
            finally:
                self._queue.remove(me)
                self._changed.notify_all()

    def pause(self, seconds: float, deadline: float) -> bool:
        """Pause this call alone; return False if that would pass the deadline.

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
            retries = self._retries_to_tell() if self._away is None else 0
            if self._away is not None:
                self._untold.append(replace(self._away, until=self._clock.wall()))
                self._away, self._last_error, self._probes = None, None, 0
                self._changed.notify_all()
        if retries:
            _trace.noted("requests failed and were retried", store=self._store, count=retries)
        self._tell()

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
        self._tell()
        if pause is not None:
            self._share(pause)

    def slow_down(self, pause: StorePause) -> None:
        """Note that another process of this host was asked to slow down."""
        with self._changed:
            self._slow_down.told(pause)

    def dropped(self, turn: Turn) -> None:
        """Note that the attempt ended without showing anything about the store."""
        with self._changed:
            self._left(turn)

    def close(self) -> None:
        """End all waiting calls."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _retries_to_tell(self) -> int:
        now, count, told = self._clock.now(), self._retries, self._retries_told
        if not count or (told is not None and now - told < RETRIES_TOLD_S):
            return 0
        self._retries, self._retries_told = 0, now
        return count

    def _wait_s(self, me: object) -> float:
        if self._away is None:
            return self._slow_down.wait_s()
        if self._is_probed or self._queue[0] is not me:
            return float("inf")  # until that changes
        return self._probe_at - self._clock.now()

    def _waited(self, seconds: float, deadline: float) -> bool:
        """Wait; return False if that would exceed the deadline. An infinite wait ends at the
        deadline.
        """
        left = deadline - self._clock.now()
        if left <= 0 or (left < seconds < float("inf")):
            return False
        self._clock.wait(self._changed, min(seconds, left))
        if self._closed:
            raise ClosedError(f"{self._store} was closed while a read waited for it")
        return True

    def _left(self, turn: Turn) -> None:
        self._asking -= 1
        if turn.is_probe:
            self._is_probed = False
            self._changed.notify_all()

    def _note_failure(self, error: StoreError, now: float) -> None:
        assert self._failing_since is not None
        if self._away is None:
            never_answered = self._answered_at is None and not self._asking
            if not never_answered and now - self._failing_since < AWAY_AFTER_S:
                return
            self._retries = 0  # the outage reports them
            since = self._clock.wall() - (now - self._failing_since)
            self._probe_at = now + self._clock.random() * PROBE.span_s(1)
            self._changed.notify_all()  # callers in their own pause now wait here
        else:
            since = self._away.since
        # A copy: the error itself would keep alive what its traceback holds.
        self._last_error = type(error)(str(error), **error.nouns)
        said = str(error).removeprefix(f"{error.nouns.get('shard')}: ")
        self._away = Outage(self._store, since, said, asked=self._clock.wall())
        self._untold.append(self._away)

    def _tell(self) -> None:
        with self._telling:
            while self._untold:
                self._observe(self._untold.popleft())


_trace = Trace("store")
