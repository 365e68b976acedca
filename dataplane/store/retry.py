"""The one retry table, and a store that follows it.

Invariants:
1. Only the classes in the table are tried again. A changed, missing or denied object never is.
2. A call starts no attempt, and no wait that cannot end, after its budget: it takes at most
   `budget_s` and the time of one request.
3. When a store asks to slow down, every call to that store waits, not only the one that was told.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import tenacity
from typing_extensions import Buffer

from dataplane.errors import StoreError, StoreThrottled, StoreUnavailable, TruncatedRead
from dataplane.model import ObjectInfo
from dataplane.store.base import Store
from dataplane.store.pieces import fill, in_pieces

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rule:
    """How often a call is tried, and how its waits grow: `base_s`, doubled each time, up to
    `cap_s`. The wait itself is drawn evenly from zero to that ("full jitter").

    Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """

    attempts: int
    base_s: float
    cap_s: float

    def span_s(self, attempt: int) -> float:
        """The longest wait after the attempt of that number, counted from 1."""
        return float(min(self.cap_s, self.base_s * 2.0 ** min(attempt - 1, 60)))


RetryTable = Mapping[type[StoreError], Rule]

RETRY_TABLE: RetryTable = {
    StoreThrottled: Rule(attempts=12, base_s=0.5, cap_s=20.0),
    StoreUnavailable: Rule(attempts=8, base_s=0.1, cap_s=10.0),
    TruncatedRead: Rule(attempts=5, base_s=0.05, cap_s=2.0),
}


@dataclass(frozen=True, slots=True)
class Clock:
    """Time and chance, as a retry needs them; a test gives its own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    random: Callable[[], float] = random.random


class SlowDown:
    """The pause that all calls to one store share.

    A store that throttles sheds load by the second, so the whole process must ask for less: were
    only the refused calls to wait, the others would keep the store at its limit. Refusals that
    arrive together count once: each call carries the round in which it began.
    """

    def __init__(self, rule: Rule, clock: Clock) -> None:
        self._rule = rule
        self._clock = clock
        self._lock = threading.Lock()
        self._round = 0
        self._level = 0
        self._until = 0.0

    def enter(self) -> tuple[int, float]:
        """The round that a call begins in, and how long it has to wait before it may begin.

        A waiting call comes back at a moment of its own within the span of the pause, so that
        they do not all return at once.
        """
        with self._lock:
            left = self._until - self._clock.now()
            if left <= 0:
                return self._round, 0.0
            return self._round, left + self._clock.random() * self._rule.span_s(self._level)

    def refused(self, began_in: int) -> None:
        """The store throttled a call that began in that round."""
        with self._lock:
            if began_in != self._round:
                return
            self._round += 1
            self._level += 1
            span = self._rule.span_s(self._level)
            self._until = self._clock.now() + self._clock.random() * span

    def served(self) -> None:
        """The store answered: the next pause is shorter again."""
        with self._lock:
            self._level = max(0, self._level - 1)


class Retrying:
    """A store that asks another one again, as the table says.

    `stream` reads in pieces, each of them a call of its own: so it resumes at the offset reached.
    """

    def __init__(
        self,
        inner: Store,
        table: RetryTable = RETRY_TABLE,
        budget_s: float = 120.0,
        clock: Clock | None = None,
    ) -> None:
        self._inner = inner
        self._table = table
        self._budget_s = budget_s
        self._clock = clock or Clock()
        self._slow_down = SlowDown(
            table.get(StoreThrottled, RETRY_TABLE[StoreThrottled]), self._clock
        )

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        # A listing that broke off starts anew: no store can say what came between two pages.
        return iter(self._call(f"listing {prefix}", prefix, lambda: [*self._inner.list(prefix)]))

    def head(self, url: str) -> ObjectInfo:
        return self._call(f"head of {url}", url, lambda: self._inner.head(url))

    def read(self, url: str, offset: int, length: int, etag: str) -> Buffer:
        what = f"read of {url} bytes [{offset}, {offset + length})"
        return self._call(what, url, lambda: self._inner.read(url, offset, length, etag))

    def read_into(self, url: str, offset: int, etag: str, into: memoryview) -> None:
        """As `base.Filling.read_into`, whether the store asked can do so or not."""
        what = f"read of {url} bytes [{offset}, {offset + len(into)})"
        self._call(what, url, lambda: fill(self._inner, url, offset, etag, into))

    def stream(self, url: str, etag: str) -> Iterator[Buffer]:
        return in_pieces(self, url, etag)

    def _call(self, what: str, url: str, attempt: Callable[[], T]) -> T:
        started = self._clock.now()
        try:
            return self._once(attempt, url, started)
        except StoreError as error:
            if self._rule(error) is None:
                raise
            return self._again(what, url, attempt, started, error)

    def _again(
        self, what: str, url: str, attempt: Callable[[], T], started: float, first: StoreError
    ) -> T:
        """After a first attempt, which ended so."""
        failed = [first]

        def give_up(state: tenacity.RetryCallState) -> T:
            cause = _cause(state)
            spent = self._clock.now() - started
            message = (
                f"{what}: gave up after {state.attempt_number} attempts in {spent:.1f} s "
                f"(budget {self._budget_s:g} s). The last: {cause}"
            )
            nouns = {"shard": url, **cause.nouns, "attempts": state.attempt_number}
            raise type(cause)(message, **nouns) from cause

        def once() -> T:
            if failed:
                raise failed.pop()
            return self._once(attempt, url, started)

        result: T = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda error: self._rule(error) is not None),
            wait=self._wait_s,
            stop=lambda state: self._is_spent(state, started),
            sleep=self._clock.sleep,
            retry_error_callback=give_up,
        )(once)
        return result

    def _once(self, attempt: Callable[[], T], url: str, started: float) -> T:
        began_in = self._pass_gate(url, started)
        try:
            result = attempt()
        except StoreThrottled:
            self._slow_down.refused(began_in)
            raise
        self._slow_down.served()
        return result

    def _pass_gate(self, url: str, started: float) -> int:
        began_in, wait_s = self._slow_down.enter()
        while wait_s > 0:
            if self._clock.now() + wait_s > started + self._budget_s:
                raise StoreThrottled(
                    f"the store of {url} has asked to slow down, and the pause of {wait_s:.1f} s "
                    f"does not fit into the call's budget of {self._budget_s:g} s. Ask for less "
                    "at once (fewer fetches in flight), or spread the shards over more prefixes",
                    shard=url,
                )
            self._clock.sleep(wait_s)
            began_in, wait_s = self._slow_down.enter()
        return began_in

    def _rule(self, error: BaseException | None) -> Rule | None:
        return next((self._table[c] for c in type(error).__mro__ if c in self._table), None)

    def _wait_s(self, state: tenacity.RetryCallState) -> float:
        cause = _cause(state)
        if isinstance(cause, StoreThrottled):
            return 0.0  # the shared pause is the wait: the next attempt passes it first
        rule = self._rule(cause)
        assert rule is not None
        return self._clock.random() * rule.span_s(state.attempt_number)

    def _is_spent(self, state: tenacity.RetryCallState, started: float) -> bool:
        rule = self._rule(_cause(state))
        assert rule is not None
        return (
            state.attempt_number >= rule.attempts
            or self._clock.now() + state.upcoming_sleep >= started + self._budget_s
        )


def _cause(state: tenacity.RetryCallState) -> StoreError:
    assert state.outcome is not None
    cause = state.outcome.exception()
    assert isinstance(cause, StoreError)
    return cause
