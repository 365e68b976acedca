"""Tells the log how far an opening has come that takes long: somebody waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dataplane.index.run import IndexProgress
from dataplane.plan.shard import named
from dataplane.trace import Trace

_FIRST_S = 10.0
_THEN_S = 30.0

_trace = Trace("node")


class SlowProgress:
    """A `Progress` that logs how far the work on a dataset is: `event`, and how many of its shards
    or blocks, called `unit` there, are done. The first line comes after ten seconds and has the
    `advice`, the next ones come every half minute.
    """

    def __init__(
        self,
        event: str,
        urls: Sequence[str],
        unit: str,
        advice: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._event, self._dataset, self._unit = event, named(urls), unit
        self._advice, self._clock = advice, clock
        self._began = clock()
        self._next = self._began + _FIRST_S

    def __call__(self, done: IndexProgress) -> None:
        """So much is done."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + _THEN_S
        facts: dict[str, object] = {
            "dataset": self._dataset,
            self._unit: f"{done.shards_done:,} of {done.shard_count:,}",
            "elapsed_s": round(now - self._began),
        }
        if self._advice:
            facts["help"], self._advice = self._advice, ""
        _trace.failed(self._event, **facts)
