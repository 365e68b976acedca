"""Opening a job that fails halfway leaves nothing behind."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from dataplane.arena.memfd import Arena
from dataplane.config import VERSION
from dataplane.coordinator.front import Coordinator, CoordinatorConfig
from dataplane.errors import ConfigError
from dataplane.index.indexing import open_dataset
from dataplane.model import Topology
from dataplane.node import jobs
from dataplane.node.engine import Engine
from dataplane.node.fetch import Fetcher
from dataplane.node.jobs import Jobs
from dataplane.node.pool import WorkerPool
from dataplane.rpc.membership import JoinRequest, JoinResponse
from dataplane.rpc.messages import DatasetSource, OpenJob
from dataplane.scheduler.autoscaler import Autoscaler
from dataplane.scheduler.scheduler import Scheduler
from dataplane.settings import default_node_config
from dataplane.store.outage import Outages
from dataplane.trace import Trace

MIB = 1 << 20


class SlowCoordinator(Coordinator):
    """It admits all members, and delays its answer."""

    def __init__(self) -> None:
        super().__init__(CoordinatorConfig(VERSION))
        self.asked = asyncio.Event()

    async def join(self, request: JoinRequest) -> JoinResponse:
        await super().join(request)
        self.asked.set()
        return await asyncio.get_running_loop().create_future()


def test_a_trainer_that_goes_away_while_it_joins_leaves_no_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(tmp_path / "cache"))
    url = str(tmp_path / "0.parquet")
    pq.write_table(pa.table({"x": range(10)}), url)
    config = dataclasses.replace(default_node_config(), block_arena_bytes=MIB)
    request = OpenJob("j", "i", "m", DatasetSource((url,)), Topology(), global_batch=2)

    async def play() -> None:
        arena, trace = Arena.create("blocks", MIB), Trace("test")
        fetcher, pool = Fetcher.of(config, arena, trace, Outages()), WorkerPool(1, trace)
        scheduler = Scheduler(MIB, 1, Autoscaler(1, 1, 1), 60.0)
        engine = Engine(scheduler, arena, fetcher, pool, trace)
        coordinator = SlowCoordinator()
        await coordinator.start()
        running = Jobs(
            config, engine, coordinator, "node", lambda source: open_dataset(source.urls)
        )
        try:
            opening = asyncio.create_task(running.open(request))
            await coordinator.asked.wait()
            assert running._datasets
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            assert not running._datasets
            assert not running.members
        finally:
            await coordinator.close()
            engine.close()
            fetcher.close()
            arena.close()

    asyncio.run(play())


def test_names_that_are_too_long_are_refused_before_any_work() -> None:
    whole = OpenJob("j", "i", "m", DatasetSource(("file:///x.parquet",)), Topology())
    jobs._check_names(whole)
    for field in ("job_id", "incarnation", "member_id", "sharing"):
        with pytest.raises(ConfigError, match=f"{field} has 300 characters"):
            jobs._check_names(structs.replace(whole, **{field: "x" * 300}))
