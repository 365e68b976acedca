"""Slow work on a dataset before a job can be opened. Its progress goes to the log, to the trainers
that wait, and to `dataplane status`.

Invariants:
1. Only work in progress is listed: the function that adds work removes it, also when it fails.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Self

from dataplane.base.trace import Trace
from dataplane.index.run import IndexProgress
from dataplane.model.redact import redacted
from dataplane.plan.shards import named
from dataplane.rpc.sharing import NodeWork

_LINES_S = 10.0
_TEXT_MAX = 300
_RATED_S = 1.0
"""How long the rest takes is not said sooner: the first parts of the work say too little."""

_trace = Trace("node")
_listed: dict[int, LongWork] = {}
_listing = threading.Lock()


class LongWork:
    """Work on the dataset with these urls, such as "indexing", counted in `units`. The log gets a
    line every ten seconds, and the first one has the `advice`. Use it as a context around the work;
    it also serves as a `Progress`. Thread-safe.
    """

    def __init__(
        self,
        what: str,
        urls: Sequence[str],
        unit: str,
        advice: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.urls = what, frozenset(urls)
        self._dataset, self._unit = redacted(named(urls)), unit
        self._advice, self._clock = advice, clock
        self._began = clock()
        self._next = self._began + _LINES_S
        self._first: tuple[float, int] | None = None
        self._done = self._total = 0

    def __enter__(self) -> Self:
        with _listing:
            _listed[id(self)] = self
        return self

    def __exit__(self, *_: object) -> None:
        with _listing:
            _listed.pop(id(self), None)

    def __call__(self, done: IndexProgress) -> None:
        """Note how many shards, or groups of blocks, are done."""
        self.advance(done.shards_done, done.shard_count)

    def advance(self, done: int, total: int) -> None:
        """Note the progress; it never goes back."""
        now = self._clock()
        self._done, self._total = max(done, self._done), total
        self._first = self._first or (now, done)
        if now < self._next:
            return
        self._next = now + _LINES_S
        facts: dict[str, object] = {
            "dataset": self._dataset,
            self._unit: f"{done:,} of {total:,}",
            "elapsed_s": round(now - self._began),
        }
        if left_s := self._left_s(now):
            facts["left_s"] = round(left_s)
        if self._advice:
            facts["help"], self._advice = self._advice, ""
        _trace.noted(f"still {self.what}", **facts)

    @property
    def now(self) -> NodeWork:
        """Return the progress."""
        left_s, dataset = self._left_s(self._clock()), self._dataset[:_TEXT_MAX]
        return NodeWork(self.what, dataset, self._done, self._total, self._unit, left_s)

    def _left_s(self, now: float) -> float:
        began, before = self._first or (now, 0)
        took_s, done = now - began, self._done - before
        return took_s / done * (self._total - self._done) if done and took_s > _RATED_S else 0.0


def work_on(urls: Collection[str]) -> NodeWork | None:
    """Return the work on datasets with one of these urls; if there are several, the last that was
    begun.
    """
    with _listing:
        mine = [each for each in _listed.values() if not each.urls.isdisjoint(urls)]
    return mine[-1].now if mine else None


def all_work() -> list[NodeWork]:
    """Return all work that this process does now."""
    with _listing:
        return [each.now for each in _listed.values()]
