"""The trainer's loop: take a batch, note when, compute for a while, take the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

BIN_S = 0.1
"""Width of a point of the timeline."""


class Loop:
    """One pass after another over a loader, and what was seen of it.

    It looks at nothing but a batch's length: two clock readings and three appends a batch, which
    `noop` measures.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._ends: list[float] = []
        self._waits: list[float] = []
        self._counts: list[int] = []

    def first(self) -> None:
        """Take one batch."""
        next(self._batches)

    def run(self, stop: threading.Event, step_s: float) -> float:
        """Take batches until `stop`, sleeping after each as a host does whose device computes.

        The result is the share of a core that the loading thread used.
        """
        self._ends, self._waits, self._counts = [], [], []
        ends, waits, counts = self._ends.append, self._waits.append, self._counts.append
        clock, is_over, batches = time.monotonic, stop.is_set, self._batches
        began, cpu = clock(), time.thread_time()
        before = began
        while not is_over():
            batch = next(batches)
            now = clock()
            ends(now)
            waits(now - before)
            counts(len(next(iter(batch.values()))))
            if step_s:
                time.sleep(step_s)
                before = clock()
            else:
                before = now
        return (time.thread_time() - cpu) / max(clock() - began, 1e-9)

    def whole(self, began: float, stop: threading.Event) -> dict[str, Any]:
        """Take all batches, or those until `stop`; `began` is when the loader was opened."""
        first = 0.0
        for batch in self._batches:
            now = time.monotonic()
            first = first or now
            self._ends.append(now)
            self._counts.append(len(next(iter(batch.values()))))
            if stop.is_set():
                break
        self._waits = list(np.diff([began, *self._ends]))
        return self.window(began, self._ends[-1]) | {"first_batch_s": first - began}

    def window(self, start: float, end: float) -> dict[str, Any]:
        """What happened between two moments. A batch that was on its way at an edge counts in part.

        Shapes:  timeline: [s since start, samples/s] of every BIN_S.
        """
        ends, counts = np.array(self._ends), np.array(self._counts)
        waits = np.array(self._waits)
        total = np.concatenate([[0], np.cumsum(counts)])
        # Before the first end we know only when the wait for it began.
        times = np.concatenate([[ends[0] - waits[0]], ends]) if len(ends) else np.array([start])
        edges = np.linspace(start, end, max(int((end - start) / BIN_S), 1) + 1)
        at_edges = np.interp(edges, times, total)
        inside = (ends > start) & (ends <= end)
        seen = waits[inside] if inside.any() else waits
        overlaps = np.minimum(ends, end) - np.maximum(ends - waits, start)
        rates = np.diff(at_edges) / np.diff(edges)
        return {
            "sample_count": float(at_edges[-1] - at_edges[0]),
            "batch_count": int(inside.sum()),
            "seconds": end - start,
            "start": start,
            "wait_share": float(np.clip(overlaps, 0, None).sum() / (end - start)),
            "wait_p50_ms": float(np.percentile(seen, 50) * 1000) if len(seen) else 0.0,
            "wait_p99_ms": float(np.percentile(seen, 99) * 1000) if len(seen) else 0.0,
            "timeline": [
                [round(float(at - start), 3), round(float(rate), 1)]
                for at, rate in zip(edges[1:], rates, strict=True)
            ],
        }
