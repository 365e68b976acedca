"""The trainer's loop: take a batch, note when, compute for a while, take the next."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

BIN_S = 0.1
"""Width of a point of the timeline."""


class NoBatch(Exception):
    """An epoch has no batch at all."""


class Loop:
    """One pass after another over a loader, and what was seen of it.

    It looks at nothing but a batch's length: two clock readings and three appends a batch, which
    `noop` measures.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._forget()

    def _forget(self) -> None:
        self._ends, self._waits, self._counts = array("d"), array("d"), array("q")

    def run(self, stop: threading.Event, step_s: float) -> float:
        """Take batches until `stop`, sleeping after each as a host does whose device computes. The
        last one arrives after `stop`.

        The result is the share of a core that the loading thread used.
        """
        self._forget()
        ends, waits, counts = self._ends.append, self._waits.append, self._counts.append
        clock, is_over, batches = time.monotonic, stop.is_set, self._batches
        began, cpu = clock(), time.thread_time()
        before = began
        while True:
            batch = next(batches)
            now = clock()
            ends(now)
            waits(now - before)
            counts(len(next(iter(batch.values()))))
            if is_over():
                return (time.thread_time() - cpu) / max(now - began, 1e-9)
            if step_s:
                time.sleep(step_s)
                before = clock()
            else:
                before = now

    def whole(self, began: float, stop: threading.Event) -> dict[str, Any]:
        """Take all batches, or those until `stop`; `began` is when the loader was opened.

        Raises:  NoBatch.
        """
        self._forget()
        before = began
        for batch in self._batches:
            now = time.monotonic()
            self._ends.append(now)
            self._waits.append(now - before)
            self._counts.append(len(next(iter(batch.values()))))
            before = now
            if stop.is_set():
                break
        if not self._ends:
            raise NoBatch("the epoch has no batch")
        return self.window(began, self._ends[-1]) | {"first_batch_s": self._ends[0] - began}

    def window(self, start: float, end: float) -> dict[str, Any]:
        """What happened between two moments. A batch that was on its way at an edge counts in part.

        Shapes:  timeline: [s since start, samples/s] of every BIN_S; the last one may be longer or
        shorter by half of that.
        """
        ends = np.array(self._ends)
        waits, counts = np.array(self._waits), np.array(self._counts)
        edges = _edges(start, end)
        at_edges = _taken(edges, ends, waits, counts)
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


Floats = NDArray[np.float64]


def _edges(start: float, end: float) -> Floats:
    whole = start + BIN_S * np.arange(max(round((end - start) / BIN_S), 1))
    return np.append(whole, end)


def _taken(at: Floats, ends: Floats, waits: Floats, counts: NDArray[np.int64]) -> Floats:
    """How many samples had been taken at these moments; a batch arrives evenly from the one before
    it on. Before the first we know only when the wait for it began.

    Shapes:  at: [n].   ends, waits, counts: one a batch.   result: [n].
    """
    if not len(ends):
        return np.zeros(len(at))
    times = np.concatenate([[ends[0] - waits[0]], ends])
    return np.asarray(np.interp(at, times, np.concatenate([[0], np.cumsum(counts)])))
