"""An engine over a drawn dataset, with a store and workers that let everything wait, members of its
jobs, and a node's heartbeat.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from openings import opening
from scheduler_world import PAGE, World

from dataplane.arena.memfd import Arena
from dataplane.arena.slots import plan_slots
from dataplane.base.trace import Trace
from dataplane.base.watchdog import Watchdog
from dataplane.coordinator.front import Coordinator
from dataplane.model.config import JobSpec, NodeConfig
from dataplane.model.records import Topology, View
from dataplane.node.counts import PackedManifest
from dataplane.node.dataset import dataset_of
from dataplane.node.delivery import DeliveryArena
from dataplane.node.engine import Engine
from dataplane.node.fetch import BlockRead
from dataplane.node.heartbeat import Heartbeat
from dataplane.node.jobs import Jobs
from dataplane.node.member import ServedMember
from dataplane.node.neighbours import JobTables
from dataplane.node.opener import DatasetOpener, Opened, OpenedJob
from dataplane.plan.defaults import BlockSizes
from dataplane.plan.views import identity_of
from dataplane.rpc.membership import JoinRequest, NodeReads
from dataplane.scheduler import events
from dataplane.scheduler.autoscaler import Autoscaler
from dataplane.scheduler.scheduler import Scheduler
from dataplane.scheduler.walk import SlabSizes
from dataplane.settings import default_node_config
from dataplane.store.outage import Outages


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

    def member(self, place: Topology | None = None) -> ServedMember:
        """The member m of the job j."""
        manifest, place = self.dataset.manifest, place or Topology()
        sizes = BlockSizes.of(manifest.block_rows, manifest.block_decoded)
        identity, packed = identity_of(manifest), PackedManifest(manifest)
        opened = OpenedJob(
            self.spec,
            (Opened(manifest, View(), packed, identity, sizes, 0),),
            (self.dataset,),
            identity,
            manifest.sample_count,
        )
        joining = JoinRequest("j", "u", self.spec, place, "i", "m", "n", 1)
        return ServedMember(
            opening("u", place), opened, self.deliver(), SlabSizes(4, 16, 0), 1, 1, joining
        )

    def heartbeat(
        self,
        coordinator: Coordinator,
        config: NodeConfig | None = None,
        tables: JobTables | None = None,
        node_id: str = "n",
        data_address: str = "10.0.0.1:7078",
    ) -> tuple[Heartbeat, Jobs]:
        """The heartbeat of a node, and the jobs of which it reports."""
        config, trace = config or default_node_config(), Trace("test")
        opener = DatasetOpener(config, self.engine, refuse)
        tables = tables or JobTables(bool, bool)
        jobs = Jobs(config, self.engine, coordinator, node_id, opener, tables)
        beat = Heartbeat(
            config, coordinator, jobs, self.engine, node_id, trace, Outages(), Watchdog(trace),
            NodeReads, data_address,
        )  # fmt: skip
        return beat, jobs

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


async def refuse(*_: object) -> Opened:
    raise AssertionError("the node of this test opens no dataset")
