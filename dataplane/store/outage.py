"""Stores that do not answer, and pauses that stores request, which processes of a host share.

An `Outage` consists of plain values, so that a process can send it to another one. The stores of
`connect.Stores` call `observe(outage)` when an outage begins, at every request that fails from then
on, and, with `until` set, when it ends. `Outages.note` is such a function.

Invariants:
1. Each outage is reported once when it begins and once when it ends.
2. Each pause is passed to every member except its source, in the thread that reports it, so no
   member may block. A new member gets the pauses that are still in effect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from dataplane.base.trace import Trace
from dataplane.model.records import StorePause
from dataplane.store.faults import Clock


class Outage(Struct, frozen=True):
    """A store that does not answer. The times, in seconds since 1970, are those of the first failed
    request, of the last request, and of the answer that ended the outage (0 while it lasts).

    `store` is a url such as "s3://bucket". Neither it nor `error` contains a secret.
    """

    store: str
    since: float
    error: str
    last_request_at: float
    until: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.until > 0


FORGOTTEN_S = 300.0

Observe = Callable[[Outage], None]
Share = Callable[[StorePause], None]


def log(outage: Outage) -> None:
    """Log an outage in one line."""
    if outage.is_over:
        away_s = round(outage.until - outage.since, 1)
        _trace.failed("store answers again", store=outage.store, away_s=away_s)
    else:
        _trace.failed("store does not answer, trying again", store=outage.store, error=outage.error)


class Outages:
    """The stores that are away, according to this process and those that report to it.

    A store is away while at least one `source` says so. `report` is called once when an outage
    begins, and once, with `until` set, when it ends. Thread-safe.
    """

    def __init__(self, report: Observe = log) -> None:
        self._report = report
        self._lock = threading.RLock()  # `report` may call `now`
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
                self._report(after)
            elif before is not None and after is None:
                self._report(replace(before, until=outage.until))

    def now(self, now: float) -> tuple[Outage, ...]:
        """Return the stores that are away, sorted by name. A store without requests for a while is
        left out, since its state is unknown.
        """
        with self._lock:
            seen = [_together(self._seen[store]) for store in sorted(self._seen)]
        return tuple(
            outage
            for outage in seen
            if outage is not None and now - outage.last_request_at < FORGOTTEN_S
        )

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


class Pauses:
    """The pauses that one process knows. An overloaded store limits the whole host, so all
    processes of the host that send requests observe them. Thread-safe.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._lock = threading.Lock()
        self._joined: tuple[Share, ...] = ()
        self._known: dict[str, tuple[StorePause, float]] = {}

    def join(self, member: Share) -> None:
        """Call this function with each pause, beginning with those that are still in effect."""
        with self._lock:
            self._joined += (member,)
        for pause in self.now():
            member(pause)

    def leave(self, member: Share) -> None:
        """Stop calling this function. May be called twice."""
        with self._lock:
            self._joined = tuple(other for other in self._joined if other != member)

    def publish(self, pause: StorePause, source: Share | None = None) -> None:
        """Pass on a pause that a store has requested, or that `source`, a member, has reported."""
        with self._lock:
            self._known[pause.store] = (pause, self._clock.now() + pause.left_s)
            joined = self._joined
        for member in joined:
            if member != source:
                member(pause)

    def now(self) -> list[StorePause]:
        """Return the pauses that are still in effect: the latest of each store."""
        with self._lock:
            now = self._clock.now()
            self._known = {store: known for store, known in self._known.items() if known[1] > now}
            return [replace(pause, left_s=until - now) for pause, until in self._known.values()]
