"""An engine over a drawn dataset, with a store and workers that let everything wait."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from scheduler_world import PAGE, World

from dataplane.arena.memfd import Arena
from dataplane.arena.slots import plan_slots
from dataplane.base.trace import Trace
from dataplane.model.config import JobSpec
from dataplane.node.dataset import dataset_of
from dataplane.node.delivery import DeliveryArena
from dataplane.node.engine import Engine
from dataplane.node.fetch import BlockRead
from dataplane.scheduler import events
from dataplane.scheduler.autoscaler import Autoscaler
from dataplane.scheduler.scheduler import Scheduler


class _Quiet:
    """A fetcher and a pool of workers."""

    def __init__(self) -> None:
        self.requests: list[Sequence[BlockRead]] = []
        self.origin = self

    def fetch(self, blocks: Sequence[BlockRead]) -> None:
        self.requests.append(blocks)

    def for_worker(self, key: int, raw: object) -> tuple[object, tuple[()]]:
        return raw, ()

    def let_go(self, key: int) -> None: ...

    def submit(self, job: object, urgency: int) -> None: ...

    def forget_slabs(self, dataset_id: int, arena_id: int) -> None: ...

    def forget_block(self, key: int) -> None: ...

    def forget_dataset(self, dataset_id: int) -> None: ...

    def detach_arena(self, arena_id: int) -> None: ...


class SmallEngine:
    """Use: `engine`, `spec`, and `deliver()` for places to deliver to. `requests` are the reads that
    it has begun.
    """

    def __init__(self, seed: int, neighbours: Any = None) -> None:
        world = World(random.Random(seed))
        quiet: Any = _Quiet()
        self.requests: list[Sequence[BlockRead]] = quiet.requests
        self._arena = Arena.create("test", 64 * PAGE)
        scheduler = Scheduler(64 * PAGE, 2, Autoscaler(1, 1, 1), 60.0)
        self.engine = Engine(
            scheduler, self._arena, quiet, quiet, Trace("test"), neighbours=neighbours
        )
        self.spec: JobSpec = world.spec
        self.dataset = dataset_of(1, world.manifest, world.spec)
        self._deliveries: list[DeliveryArena] = []

    def deliver(self) -> DeliveryArena:
        """A place for slabs."""
        layout = plan_slots(0, PAGE)
        arena = Arena.create("test", layout.arena_bytes)
        number = 1 + len(self._deliveries)
        delivery = DeliveryArena(number, arena, layout, (self.dataset,))
        self.engine.open_delivery(delivery)
        self._deliveries.append(delivery)
        return delivery

    def fetch(self, effects: Sequence[events.Fetch]) -> None:
        """Carry out these effects of one event."""
        for effect in effects:
            self.engine._fetch(effect)
        self.engine._start_reads()

    def close(self) -> None:
        """Free all its memory, even if work is running."""
        for delivery in self._deliveries:
            self.engine.close_delivery(delivery)
            delivery.arena.close()
        self.engine.close()
        self._arena.close()
