"""A node that reads a far store for one trainer, on a virtual clock: how much is in flight, and
when. Workers take no time: the store alone is waited for.
"""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

import numpy as np
from scheduler_settled import tell

from dataplane.arena.slots import SlotLayout
from dataplane.model.config import JobSpec
from dataplane.model.records import Stream
from dataplane.plan.order import Order
from dataplane.rpc import messages, tasks
from dataplane.scheduler import events
from dataplane.scheduler.autoscaler import Autoscaler
from dataplane.scheduler.dataset import DatasetBlocks, DatasetLookup, Marks
from dataplane.scheduler.scheduler import Scheduler
from dataplane.scheduler.walk import SlabSizes, Walk

MIB = 1 << 20
LOOK_S = 0.5
BLOCK_ROWS = 512
BATCH_ROWS = 32
FETCH_COUNT = 16
SLAB_BYTES = 16 * MIB


class Link(NamedTuple):
    """A store: the time to a read's first byte, and what all reads together get."""

    latency_s: float
    bytes_per_s: float = float("inf")


class FarStoreNode:
    """Reads shuffled blocks of this size. The trainer takes `bytes_per_s`, or all that comes, and
    asks for two slabs at a time.
    """

    def __init__(
        self,
        link: Link,
        block_bytes: int = 4 * MIB,
        trainer_bytes_per_s: float = float("inf"),
        arena_bytes: int = 64 << 30,
        block_count: int = 20_000,
    ) -> None:
        self.link, self.now = link, 0.0
        self.trainer_bytes_per_s = trainer_bytes_per_s
        self.scheduler = Scheduler(arena_bytes, FETCH_COUNT, Autoscaler(1, 1, 1), 1e9)
        self.in_flight: list[tuple[float, int]] = []
        """The time and how many bytes are in flight, after each change."""
        self.taken: list[tuple[float, int]] = []
        """When the trainer got slabs, and their bytes."""
        self._bytes = 0
        self._link_free_at = self._trainer_free_at = 0.0
        self._numbers = itertools.count(1)
        self._due: list[tuple[float, int, events.Event]] = []
        self._slabs: dict[int, int] = {}
        self._open(block_bytes, block_count)
        self._later(LOOK_S, events.Ticked(0.0, 0.0))

    def _open(self, block_bytes: int, block_count: int) -> None:
        raw = np.full(block_count, block_bytes, np.int64)
        rows = np.full(block_count, BLOCK_ROWS, np.int64)
        marks = Marks.of(raw, np.zeros_like(raw), np.ones(block_count, np.bool_))
        dataset = DatasetBlocks(1, "far", marks, raw, rows, "{}".format)
        batch_bytes = BATCH_ROWS * block_bytes // BLOCK_ROWS
        batches = max(SLAB_BYTES // batch_bytes, 1)
        layout = SlotLayout(SLAB_BYTES, 16, 2 * SLAB_BYTES)
        lookup = DatasetLookup(dataset)
        self._tell(events.DeliveryOpened(1, layout, lookup, None, is_declared=False))
        spec = JobSpec("far", global_batch=BATCH_ROWS)
        order = Order(rows, 0, shuffle=True, lanes=4, window=16, epoch=0)
        sizes = SlabSizes(batches, batches, SLAB_BYTES, batch_bytes)
        self._batch_bytes = batch_bytes
        self._tell(events.StreamStarted(1, 1, Walk(spec, order, Stream(0, 0, 0, 1), sizes), 1))
        for _ in range(2):
            self._tell(events.Requested(1, next(self._numbers)))

    @property
    def first_taken(self) -> float:
        """When the trainer got its first slab."""
        return self.taken[0][0]

    def rate(self, since: float, until: float) -> float:
        """Bytes per second that the trainer got between these times."""
        return sum(size for at, size in self.taken if since < at <= until) / (until - since)

    def most_in_flight(self, since: float, until: float) -> int:
        """The most bytes in flight between these times."""
        return max((size for at, size in self.in_flight if since < at <= until), default=0)

    def run(self, until: float) -> None:
        """Let time pass."""
        while self._due[0][0] <= until:
            self.now, _, event = heapq.heappop(self._due)
            if isinstance(event, events.Ticked):
                self._later(self.now + LOOK_S, event)
            self._tell(event)
        self.now = until

    def _later(self, at: float, event: events.Event) -> None:
        heapq.heappush(self._due, (at, next(self._numbers), event))

    def _tell(self, event: events.Event) -> None:
        if isinstance(event, events.BlockFetched):
            self._bytes -= self.scheduler.block(event.key).raw.length  # type: ignore[union-attr]
            self.in_flight.append((self.now, self._bytes))
        tell(self.scheduler, event, self.now, self._do)

    def _do(self, effect: events.Effect) -> list[events.Event]:
        match effect:
            case events.PlanSteps():
                return [events.Planned(1, effect.walk.next_plans(effect.count))]
            case events.Fetch():
                length = effect.into.length
                self._bytes += length
                self.in_flight.append((self.now, self._bytes))
                begins = max(self.now + self.link.latency_s, self._link_free_at)
                self._link_free_at = begins + length / self.link.bytes_per_s
                self._later(self._link_free_at, events.BlockFetched(effect.key))
            case events.AssembleSlab():
                count = len(effect.plan.batches)
                made = tasks.Assembled(count, 0, count * self._batch_bytes)
                return [events.SlabAssembled(effect.number, made, self.now)]
            case events.Send(body=messages.Slab() as slab):
                size = slab.bytes_used
                self.taken.append((self.now, size))
                self._later(self.now, events.Released(1, [slab.slab_id]))
                busy_s = size / self.trainer_bytes_per_s
                self._trainer_free_at = max(self.now, self._trainer_free_at) + busy_s
                self._later(self._trainer_free_at, events.Requested(1, next(self._numbers)))
        return []
