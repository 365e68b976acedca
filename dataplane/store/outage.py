"""Track stores that do not answer. Each outage is reported once when it begins and once when it
ends.

An `Outage` is made of plain values, so that a process can send it to another one. The stores of
`connect.Stores` report to one `observe(outage)`: when an outage begins, at every request that fails
from then on, and, with `until` set, when it ends. `Outages.note` is such a function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from dataplane.trace import Trace


class Outage(Struct, frozen=True):
    """A store that does not answer. Times are seconds since 1970: of the first failed request, of
    the last request, and of the answer that ended the outage (0 while it lasts).

    `store` is a url such as "s3://bucket". Neither it nor `error` contains a secret.
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
    """Log an outage in one line."""
    if outage.is_over:
        away_s = round(outage.until - outage.since, 1)
        _trace.failed("store answers again", store=outage.store, away_s=away_s)
    else:
        _trace.failed("store does not answer, trying again", store=outage.store, error=outage.error)


class Outages:
    """The stores that are away, according to this process and those that report to it.

    A store is away while at least one `source` says so. `tell` is called once when an outage
    begins, and once, with `until` set, when it ends. Thread-safe.
    """

    def __init__(self, tell: Tell = log) -> None:
        self._tell = tell
        self._lock = threading.RLock()  # `tell` may ask which stores are unreachable
        self._seen: dict[str, dict[object, Outage]] = {}

    def note(self, outage: Outage, source: object = None) -> None:
        """Record an outage reported by `source`: it has begun, continues, or is over."""
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
                self._tell(replace(before, until=outage.until))

    def now(self, now: float) -> tuple[Outage, ...]:
        """Return the stores that are away, sorted by name. A store without requests for a while is
        left out, since its state is unknown.
        """
        with self._lock:
            found = [_together(self._seen[store]) for store in sorted(self._seen)]
        return tuple(one for one in found if one is not None and now - one.asked < FORGOTTEN_S)

    def forget(self, source: object, now: float) -> None:
        """Remove a source. Outages that no other source sees are over."""
        with self._lock:
            lasting = [seen[source] for seen in self._seen.values() if source in seen]
        for outage in lasting:
            self.note(replace(outage, until=now), source)


def _together(seen: dict[object, Outage]) -> Outage | None:
    """Combine the reports of several sources: the earliest start, and the last reported error."""
    if not seen:
        return None
    *_, last = seen.values()
    return replace(last, since=min(outage.since for outage in seen.values()))


_trace = Trace("store")
