"""Which stores do not answer, told once when that begins and once when it ends.

An `Outage` is made of plain values, so that a process can send what it sees to another one. The
stores of `connect.Stores` report to one `observe(outage)`: when an outage begins, at every request
that fails from then on, and, with `until` set, when it ends. `Outages.note` is such a function.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass

from dataplane.trace import Trace


@dataclass(frozen=True, slots=True)
class Outage:
    """A store that does not answer. Times are seconds since 1970: of the first request that failed,
    of the last one, and of the answer that ended it (0 while it lasts).

    `store` is a url such as "s3://bucket"; neither it nor `error` has a secret in it.
    """

    store: str
    since: float
    error: str
    asked: float
    until: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.until > 0


FORGOTTEN_S = 300.0

Observe = Callable[[Outage], None]
Tell = Callable[[Outage], None]


def log(outage: Outage) -> None:
    """One line on the log."""
    if outage.is_over:
        away_s = round(outage.until - outage.since, 1)
        _trace.failed("store answers again", store=outage.store, away_s=away_s)
    else:
        _trace.failed("store does not answer, trying again", store=outage.store, error=outage.error)


class Outages:
    """The stores that are away, as this process and those that report to it see them.

    A store is away as long as one `source` says so. `tell` is called once when that begins, and
    once, with `until` set, when it ends. Thread-safe.
    """

    def __init__(self, tell: Tell = log) -> None:
        self._tell = tell
        self._lock = threading.RLock()  # `tell` may ask which stores are unreachable
        self._seen: dict[str, dict[object, Outage]] = {}

    def note(self, outage: Outage, source: object = None) -> None:
        """An outage as `source` sees it: it began, goes on, or is over."""
        with self._lock:
            seen = self._seen.setdefault(outage.store, {})
            before = _together(seen)
            seen.pop(source, None)
            if not outage.is_over:
                seen[source] = outage
            after = _together(seen)
            if after is None:
                del self._seen[outage.store]
            if before is None and after is not None:
                self._tell(after)
            elif before is not None and after is None:
                self._tell(dataclasses.replace(before, until=outage.until))

    def now(self, now: float) -> tuple[Outage, ...]:
        """The stores that are away, in the order of their names. One that nobody has asked for a
        while, since nobody wants anything of it, is left out.
        """
        with self._lock:
            found = [_together(self._seen[store]) for store in sorted(self._seen)]
        return tuple(one for one in found if one is not None and now - one.asked < FORGOTTEN_S)

    def forget(self, source: object, now: float) -> None:
        """A source is gone: what it alone saw is over."""
        with self._lock:
            lasting = [seen[source] for seen in self._seen.values() if source in seen]
        for outage in lasting:
            self.note(dataclasses.replace(outage, until=now), source)


def _together(seen: dict[object, Outage]) -> Outage | None:
    """Since when the first source sees it, with the error that was reported last."""
    if not seen:
        return None
    *_, last = seen.values()
    return dataclasses.replace(last, since=min(outage.since for outage in seen.values()))


_trace = Trace("store")
