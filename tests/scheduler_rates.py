"""A node whose slabs are made by other nodes and its own workers, each at a rate of its own, on a
virtual clock: what they make, and how long that takes.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter

import numpy as np
from msgspec import Struct, field
from scheduler_settled import tell

from dataplane.arena.slots import SlotLayout
from dataplane.model.config import JobSpec
from dataplane.model.errors import NeighbourGone
from dataplane.model.records import Stream
from dataplane.plan.order import Order
from dataplane.rpc import messages, tasks
from dataplane.rpc.lending import StepRange
from dataplane.scheduler import events
from dataplane.scheduler.autoscaler import Autoscaler
from dataplane.scheduler.dataset import DatasetBlocks, DatasetLookup, Marks
from dataplane.scheduler.events import GiveUpSlab
from dataplane.scheduler.scheduler import Scheduler
from dataplane.scheduler.walk import SlabSizes, Walk

BATCHES = 4
"""Of a slab."""
_ROWS, _LOOK_S, _REQUESTS = 8, 0.5, 2


class Maker(Struct):
    """Takes so long for a batch, 0 if it fails at once; makes what it is told will come, too. If it
    has so much `patience_s`, it says then that it is still making the slab.
    """

    seconds: float
    patience_s: float = 0.0
    free_at: float = 0.0
    made: dict[StepRange, float] = field(default_factory=dict)
    asked: list[float] = field(default_factory=list)

    def ends(self, effect: events.MakeElsewhere, now: float) -> float:
        """When it has the slab that it is asked for now."""
        self.asked.append(now)
        for steps in (effect.steps, *effect.coming) if self.seconds else ():
            if steps not in self.made:
                self.free_at = max(self.free_at, now) + steps.count * self.seconds
                self.made[steps] = self.free_at
        return max(self.made.get(effect.steps, now), now)


class Node:
    """Has one trainer; `own_s` is what its one worker takes for a batch, 0 if it has none."""

    def __init__(
        self,
        makers: dict[str, float],
        own_s: float = 0.0,
        dp_rank: int = 0,
        stall_s: float = 1e9,
        patience_s: float = 0.0,
    ) -> None:
        self.makers = {name: Maker(seconds, patience_s) for name, seconds in makers.items()}
        self.own_s, self.now, self.dp_rank = own_s, 0.0, dp_rank
        count = 1 if own_s else 0
        self.scheduler = Scheduler(0, 1, Autoscaler(count, count, count), stall_s)
        self.made: Counter[str] = Counter()
        """Batches, by who has made them; "" are the own workers."""
        self.orders: list[events.MakeElsewhere] = []
        self.stalls: list[events.Stalled] = []
        self.given_up: list[float] = []
        """When slabs were given up."""
        self._asked: dict[int, events.MakeElsewhere] = {}
        self.is_short: list[bool] = []
        """At each look."""
        self.trainer_s = 0.0
        """What the trainer takes for a slab."""
        self.made_at_once = BATCHES
        """More batches do not fit into a slab."""
        self._taken_at = 0.0
        self._due: list[tuple[float, int, events.Event | None]] = []
        self._numbers = itertools.count(1)
        self._own_free_at = self._own_busy_s = 0.0
        self._open()
        self._later(_LOOK_S, None)

    def _open(self) -> None:
        blocks = 1000
        none = np.zeros(blocks, np.int64)
        rows = np.full(blocks, _ROWS * BATCHES * 4, np.int64)
        marks = Marks.of(none, none, none.astype(bool))
        dataset = DatasetBlocks(1, "numbers", marks, none + 1, rows, "{}".format)
        layout = SlotLayout(1 << 16, 16, 1 << 17)
        opened = events.DeliveryOpened(1, layout, DatasetLookup(dataset), None, is_declared=False)
        self.tell(opened)
        self.known(*self.makers)
        size = self.dp_rank + 1
        spec = JobSpec("numbers", global_batch=_ROWS * size)
        order = Order(rows, 0, shuffle=False, lanes=1, window=1, epoch=0)
        walk = Walk(
            spec, order, Stream(0, 0, self.dp_rank, size, 0, 1), SlabSizes(BATCHES, BATCHES, 1 << 16),
            is_ahead=True, is_light=not self.own_s,
        )  # fmt: skip
        self.tell(events.StreamStarted(1, 1, walk, 1))
        for _ in range(_REQUESTS):
            self.tell(events.Requested(1, next(self._numbers)))

    def known(self, *names: str) -> None:
        """These nodes make slabs from now on."""
        for name in names:
            self.makers.setdefault(name, Maker(0.0))
        self.tell(events.MakersKnown(1, names))

    def run(self, until: float) -> None:
        """Let time pass."""
        while self._due[0][0] <= until:
            self.now, _, event = heapq.heappop(self._due)
            self.tell(event if event is not None else self._look())
        self.now = until

    def _later(self, at: float, event: events.Event | None) -> None:
        heapq.heappush(self._due, (at, next(self._numbers), event))

    def _look(self) -> events.Ticked:
        begun = max(self._own_free_at - self.now, 0.0)
        busy_s, self._own_busy_s = self._own_busy_s - begun, begun
        self._later(self.now + _LOOK_S, None)
        self.is_short.append(self.scheduler.is_short)
        return events.Ticked(min(max(busy_s, 0.0) / _LOOK_S, 1.0), 0.0)

    def tell(self, event: events.Event) -> None:
        """Tell the scheduler, and do what it decides."""
        tell(self.scheduler, event, self.now, self._do)

    def _do(self, effect: events.Effect) -> list[events.Event]:
        match effect:
            case events.PlanSteps():
                return [events.Planned(1, effect.walk.next_plans(effect.count))]
            case events.MakeElsewhere():
                self.orders.append(effect)
                maker = self.makers[effect.maker]
                result: tasks.ResultBody = self._result(effect.steps.count)
                if maker.seconds:
                    self.made[effect.maker] += effect.steps.count
                else:
                    result = NeighbourGone(f"{effect.maker} is gone")
                at = maker.ends(effect, self.now)
                if maker.patience_s and at > self.now + maker.patience_s:
                    self.made[effect.maker] -= effect.steps.count
                    at, result = self.now + maker.patience_s, NeighbourGone("working", working=1)
                ended = events.SlabAssembled(effect.number, result, 0.0)
                self._asked[effect.number] = effect
                self._later(at, ended)
            case events.AssembleSlab():
                count = len(effect.plan.batches)
                self.made[""] += count
                self._own_free_at = max(self._own_free_at, self.now) + count * self.own_s
                self._own_busy_s += count * self.own_s
                ended = events.SlabAssembled(effect.number, self._result(count), 0.0)
                self._later(self._own_free_at, ended)
            case events.Send(body=messages.Slab(slab_id=slab_id)):
                self._take(slab_id)
            case events.Stalled():
                self.stalls.append(effect)
            case GiveUpSlab():
                return self._give_up(effect.number)
        return []

    def _give_up(self, number: int) -> list[events.Event]:
        order = self._asked[number]
        self.given_up.append(self.now)
        self.made[order.maker] -= order.steps.count
        self._due = [each for each in self._due if getattr(each[2], "number", 0) != number]
        heapq.heapify(self._due)
        return [events.SlabAssembled(number, NeighbourGone(f"{order.maker} is silent"), 0.0)]

    def _take(self, slab_id: int) -> None:
        self._later(self.now, events.Released(1, [slab_id]))
        self._taken_at = max(self._taken_at, self.now) + self.trainer_s
        self._later(self._taken_at, events.Requested(1, next(self._numbers)))

    def _result(self, count: int) -> tasks.Assembled:
        count = min(count, self.made_at_once)
        return tasks.Assembled(count, 0, count * 64)
