"""Workers of a node on a virtual clock, and how long they are idle while a trainer waits."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque

import numpy as np
from scheduler_settled import tell

from dataplane.arena.slots import AHEAD_SLOTS_MIN, SlotLayout
from dataplane.model.config import JobSpec
from dataplane.model.records import Stream
from dataplane.plan.order import Order
from dataplane.rpc import messages, tasks
from dataplane.scheduler import events
from dataplane.scheduler.autoscaler import Autoscaler
from dataplane.scheduler.dataset import DatasetBlocks, DatasetLookup, Marks
from dataplane.scheduler.scheduler import Scheduler
from dataplane.scheduler.walk import SlabSizes, Walk

LOOK_S = 0.5
PIECE_S = 0.005
SLABS = 400
IDLE_MAX = 0.02
"""The share of a wait in which a worker may be idle: calls take a tenth more or less."""


class Host:
    """A node with so many `workers`, each of which takes `row_s` for a row, give or take a tenth;
    and `ranks` that ask for their next slab as soon as they have one.
    """

    def __init__(
        self, workers: int, rows: int, batches: int, row_s: float, *, is_divisible: bool,
        ranks: int = 1, seed: int = 0,
    ) -> None:  # fmt: skip
        self.workers, self.row_s, self.now = workers, row_s, 0.0
        self.chance = random.Random(seed)
        self.scheduler = Scheduler(0, 1, Autoscaler(workers, workers, workers), 1e9)
        self.slabs = [0] * ranks
        self.pieces: list[int] = []
        self.idle_s = self.awaited_s = 0.0
        self._at_work = 0
        self._waiting = [0] * ranks
        self._queue: deque[tuple[int, float]] = deque()
        self._left: dict[int, tuple[int, float, events.AssembleSlab]] = {}
        self._due: list[tuple[float, int, events.Event | None, int]] = []
        self._numbers = itertools.count(1)
        count = np.full(4 * SLABS, rows * batches, np.int64)
        none = np.zeros(len(count), np.int64)
        marks = Marks.of(none, none, none.astype(bool))
        dataset = DatasetBlocks(1, "numbers", marks, none + 1, count, "{}".format)
        order = Order(count, 0, shuffle=False, lanes=1, window=1, epoch=0)
        for rank in range(ranks):
            layout = SlotLayout(1 << 16, max(workers + AHEAD_SLOTS_MIN, 12), 1 << 17)
            self.tell(
                events.DeliveryOpened(rank, layout, DatasetLookup(dataset), None, is_declared=False)
            )
            sizes = SlabSizes(batches, batches, 1 << 16, is_divisible=is_divisible)
            walk = Walk(
                JobSpec("numbers", global_batch=rows), order, Stream(0, 0, 0, 1, 0, 1), sizes,
            )  # fmt: skip
            self.tell(events.StreamStarted(rank, rank, walk, rank))
            self._request(rank)
        heapq.heappush(self._due, (LOOK_S, next(self._numbers), None, 0))

    def run(self, until: float) -> None:
        while self._due and self._due[0][0] <= until and min(self.slabs) < SLABS:
            at, _, event, ended = heapq.heappop(self._due)
            if all(self._waiting):
                self.awaited_s += at - self.now
                self.idle_s += (at - self.now) * (self.workers - self._at_work)
            self.now = at
            if ended:
                self._ended(ended)
            elif event is None:
                heapq.heappush(self._due, (at + LOOK_S, next(self._numbers), None, 0))
                self.tell(events.Ticked(float(self._at_work), 1.0))
            else:
                self.tell(event)
            self._start()

    def tell(self, event: events.Event) -> None:
        tell(self.scheduler, event, self.now, self._do)

    def _do(self, effect: events.Effect) -> list[events.Event]:
        match effect:
            case events.PlanSteps():
                plans = effect.walk.next_plans(effect.count)
                return [events.Planned(effect.stream_id, plans)]
            case events.AssembleSlab():
                rows = effect.plan.row_count
                self._left[effect.number] = effect.pieces, 0.0, effect
                self.pieces.append(effect.pieces)
                for _ in range(effect.pieces):
                    took = rows / effect.pieces * self.row_s * self.chance.uniform(0.9, 1.1)
                    self._queue.append((effect.number, took))
            case events.Send(body=messages.Slab() as slab):
                rank = effect.stream_id
                self.slabs[rank] += 1
                self._waiting[rank] -= 1
                heapq.heappush(
                    self._due,
                    (self.now, next(self._numbers), events.Released(rank, [slab.slab_id]), 0),
                )
                self._request(rank)
        return []

    def _request(self, rank: int) -> None:
        self._waiting[rank] += 1
        heapq.heappush(self._due, (self.now, next(self._numbers), events.Requested(rank, 1), 0))

    def _start(self) -> None:
        while self._queue and self._at_work < self.workers:
            number, took = self._queue.popleft()
            self._at_work += 1
            pieces, worker_s, effect = self._left[number]
            self._left[number] = pieces, worker_s + took, effect
            heapq.heappush(self._due, (self.now + took, next(self._numbers), None, number))

    def _ended(self, number: int) -> None:
        self._at_work -= 1
        pieces, worker_s, effect = self._left.pop(number)
        if pieces > 1:
            self._left[number] = pieces - 1, worker_s, effect
            return
        made = tasks.Assembled(len(effect.plan.batches), 0, 64)
        self.tell(events.SlabAssembled(number, made, self.now, worker_s=worker_s))


def idle_in_pieces(workers: int, rows: int, batches: int, row_s: float, seed: int) -> float:
    """The mean share of the trainer's waits in which a worker is idle, if slabs of so many batches
    of so many rows can be divided anywhere. Rows take at least as long as pieces are worth it.
    """
    row_s = max(row_s, 1.5 * workers * PIECE_S / (rows * batches))
    host = Host(workers, rows, batches, row_s, is_divisible=True, seed=seed)
    alone_s = rows * batches * row_s
    host.run(4 * LOOK_S + 3 * alone_s)  # what a row takes is known when a slab was made
    return _idle(host, 40 * alone_s / workers)


def idle_in_batches(workers: int, batches: int, row_s: float, seed: int) -> float:
    """The same for slabs of batches of four rows, each of which one worker makes."""
    host = Host(workers, 4, batches, row_s, is_divisible=False, seed=seed)
    slab_s = 4 * batches * host.row_s
    host.run(4 * LOOK_S + 30 * slab_s)  # the first plans are longer
    return _idle(host, 10 * slab_s)


def _idle(host: Host, seconds: float) -> float:
    host.idle_s = host.awaited_s = 0.0
    host.run(host.now + seconds)
    return host.idle_s / (host.workers * host.awaited_s) if host.awaited_s else 0.0


def history(seed: int) -> str:
    """A host drawn with this seed.   Raises:  AssertionError: workers were idle."""
    chance = random.Random(seed)
    workers, batches = chance.randint(1, 64), chance.randint(1, 64)
    if chance.random() < 0.7:
        rows, row_s = chance.randint(1, 512), 10 ** chance.uniform(-5, -1)
        idle = idle_in_pieces(workers, rows, batches, row_s, seed)
    else:
        rows, row_s = 4, 10 ** chance.uniform(-3, -1)
        idle = idle_in_batches(workers, batches, row_s, seed)
    told = f"{workers} workers, {batches} batches of {rows} rows, {row_s:.2g} s a row"
    assert idle <= IDLE_MAX, f"idle for {idle:.1%} of the waits: {told}"
    return told
