"""Counts that rooms keep for metrics: cheap to add to, and read only when metrics are scraped."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from dataplane.model.records import Unsigned

BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""The upper bounds of the buckets of durations; one more bucket counts longer durations."""
WAIT_STAGES = ("fetch", "decode", "room", "queue", "assemble", "other")
"""The stages for which a trainer waits, as in client/statistics.py."""
FIRST_BATCH_STAGES = ("node", "connect", "index", "plan", *WAIT_STAGES[:-1], "hand_over")
STORES_MAX = 64
OTHER_STORES = "others"
_US_A_S = 1e6


class Durations(Struct, eq=False):
    """How many durations fell into each bucket, and their sum."""

    counts: list[int]
    sum_s: float = 0.0

    @classmethod
    def none(cls) -> Durations:
        """Return empty buckets."""
        return cls([0] * (len(BOUNDS_S) + 1))

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def extend(self, counts: Sequence[int], sum_s: float) -> None:
        """Add durations that were counted elsewhere: their counts by bucket, and their sum."""
        self.counts = [mine + more for mine, more in zip(self.counts, counts, strict=True)]
        self.sum_s += sum_s


class RequestCounts(Struct, frozen=True):
    """Requests to one store: how long they took, in the buckets of `BOUNDS_S`; how many failed, by
    class of the error; and how many were sent again.
    """

    counts: tuple[Unsigned, ...]
    sum_s: float
    errors: dict[str, Unsigned]
    retries: Unsigned


class RequestMeter:
    """Counts the requests of this process to one store. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._took, self._errors, self._retries = Durations.none(), Counter[str](), 0
        self._is_empty = True

    def ended(self, took_s: float, error: BaseException | None = None) -> None:
        """Note the end of one request."""
        with self._lock:
            self._is_empty = False
            self._took.add(max(took_s, 0.0))
            if error is not None:
                self._errors[type(error).__name__] += 1

    def retried(self) -> None:
        """Note that a failed request is sent again."""
        with self._lock:
            self._is_empty = False
            self._retries += 1

    def take(self) -> RequestCounts | None:
        """Return the requests counted since the last call; None if there were none."""
        with self._lock:
            if self._is_empty:
                return None
            took, errors, retries = self._took, dict(self._errors), self._retries
            self._clear()
        return RequestCounts(tuple(took.counts), took.sum_s, errors, retries)


class JobMeter:
    """Counts of one job at a node: how long the job's slabs were in each stage, and how many
    samples of each source of a mixture they had.
    """

    def __init__(self) -> None:
        self.stages: dict[str, Durations] = {}
        self.samples_by_source: list[int] = []

    def sources(self, counts: Sequence[int]) -> None:
        """Count the samples of each source in a slab."""
        before = self.samples_by_source or [0] * len(counts)
        self.samples_by_source = [mine + more for mine, more in zip(before, counts, strict=True)]

    def slab(self, stages_us: Mapping[str, int]) -> None:
        """Count a slab, given how long it was in each stage."""
        for stage, took_us in stages_us.items():
            self.stages.setdefault(stage, Durations.none()).add(took_us / _US_A_S)


class RankMeter:
    """Counts of one rank at a node. DataLoader workers of a rank share it."""

    def __init__(self, job: JobMeter) -> None:
        self.job = job
        self.samples = 0
        self.waits_us = dict.fromkeys(WAIT_STAGES, 0)
        self.first_batch_s: tuple[float, ...] = ()

    def waited(self, waits_us: Sequence[int], first_batch_s: tuple[float, ...]) -> None:
        """Add the waits that a trainer has reported."""
        for stage, wait_us in zip(WAIT_STAGES, waits_us, strict=False):
            self.waits_us[stage] += wait_us
        if first_batch_s:
            self.first_batch_s = first_batch_s[: len(FIRST_BATCH_STAGES)]


class StoreMeters:
    """Requests to stores, by store. Beyond STORES_MAX stores, all others are counted under one
    name: each signed url counts as a store, and the table must not grow with them.
    """

    def __init__(self) -> None:
        self.by_store: dict[str, StoreTotals] = {}

    def add(self, store: str, counts: RequestCounts) -> None:
        """Add the requests that a process has counted."""
        if store not in self.by_store and len(self.by_store) >= STORES_MAX:
            store = OTHER_STORES
        total = self.by_store.setdefault(store, StoreTotals(Durations.none()))
        total.took.extend(counts.counts, counts.sum_s)
        total.errors.update(counts.errors)
        total.retries += counts.retries


class StoreTotals(Struct, eq=False):
    """All requests to one store so far."""

    took: Durations
    errors: Counter[str] = field(default_factory=Counter)
    retries: int = 0
