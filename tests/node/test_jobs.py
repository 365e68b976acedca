"""Opening a job that fails halfway leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from membership import node
from msgspec import structs
from openings import opening

from dataplane.arena.memfd import Arena
from dataplane.base.trace import Trace
from dataplane.base.watchdog import Watchdog
from dataplane.coordinator.front import Coordinator, CoordinatorConfig
from dataplane.index.indexing import index_dataset
from dataplane.model.config import VERSION
from dataplane.model.errors import ConfigError
from dataplane.node.engine import Engine
from dataplane.node.fetch import Fetcher
from dataplane.node.heartbeat import Heartbeat
from dataplane.node.jobs import Jobs
from dataplane.node.member import ServedMember
from dataplane.node.neighbours import JobTables
from dataplane.node.opener import DatasetOpener, check_names
from dataplane.node.pool import WorkerPool
from dataplane.rpc.membership import (
    HeartbeatRequest,
    HeartbeatResponse,
    JoinRequest,
    JoinResponse,
    NodeReads,
    StatusRequest,
)
from dataplane.rpc.messages import OpenJob
from dataplane.scheduler.autoscaler import Autoscaler
from dataplane.scheduler.scheduler import Scheduler
from dataplane.settings import default_node_config
from dataplane.store.outage import Outages

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


@asynccontextmanager
async def running(
    coordinator: Coordinator, folder: Path, tables: JobTables
) -> AsyncIterator[tuple[Jobs, OpenJob]]:
    """A node's jobs, without its sockets, and a request to open one."""
    url = str(folder / "0.parquet")
    pq.write_table(pa.table({"x": range(10)}), url)
    config = structs.replace(
        default_node_config(), block_arena_bytes=MIB, cache_dir=str(folder / "cache")
    )
    arena, trace = Arena.create("blocks", MIB), Trace("test")
    fetcher, pool = Fetcher.of(config, arena, trace, Outages()), WorkerPool(1, trace)
    scheduler = Scheduler(MIB, 1, Autoscaler(1, 1, 1), 60.0)
    engine = Engine(scheduler, arena, fetcher, pool, trace)
    await coordinator.start()
    found = Jobs(
        config,
        engine,
        coordinator,
        "n0",
        DatasetOpener(config, engine, lambda source, _view, _given: index_dataset(source.urls)),
        tables,
    )
    try:
        yield found, opening(url, global_batch=2)
    finally:
        await coordinator.close()
        engine.close()
        fetcher.close()
        arena.close()


def test_a_trainer_that_goes_away_while_it_joins_leaves_no_dataset(tmp_path: Path) -> None:
    async def play() -> None:
        coordinator = SlowCoordinator()
        async with running(coordinator, tmp_path, JobTables(bool, bool)) as (found, request):
            opening = asyncio.create_task(found.open(request))
            await coordinator.asked.wait()
            assert found.opener.datasets
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            assert not found.opener.datasets
            assert not found.members

    asyncio.run(play())


class LateCoordinator(Coordinator):
    """It answers heartbeats and joins after members have left."""

    def __init__(self) -> None:
        super().__init__(CoordinatorConfig(VERSION))
        self.leaving: list[Callable[[], None]] = []

    async def _left(self) -> None:
        while self.leaving:
            self.leaving.pop()()
            await asyncio.sleep(0)

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        await self._left()
        return await super().heartbeat(request)

    async def join(self, request: JoinRequest) -> JoinResponse:
        await self._left()
        return await super().join(request)


def test_a_member_that_leaves_during_a_beat_or_is_joined_again_meanwhile_has_left(
    tmp_path: Path,
) -> None:
    """Its place would else be held by nobody until its lease ends."""

    async def play() -> None:
        coordinator = LateCoordinator()
        async with running(coordinator, tmp_path, JobTables(bool, bool)) as (found, request):
            beat = Heartbeat(
                default_node_config(), coordinator, found, found._engine, "n0", Trace("test"),
                Outages(), Watchdog(Trace("test")), NodeReads,
            )  # fmt: skip

            async def member_count() -> int:
                job = (await coordinator.status(StatusRequest("j"))).jobs[0]
                return sum(one.state == "joined" for one in job.members)

            def leave(member: ServedMember) -> None:
                found.close(member)
                found.leave(member, lost=False)

            await beat.register()
            for begin in (beat._beat, found.rejoin):
                member, _ = await found.open(request)
                assert await member_count() == 1
                coordinator.leaving.append(partial(leave, member))
                await (begin() if begin == beat._beat else begin(member))
                await asyncio.gather(*found.places._leaving.get("j", ()))
                assert await member_count() == 0

    asyncio.run(play())


def test_the_nodes_of_a_job_are_known_from_its_first_member_to_its_last(tmp_path: Path) -> None:
    async def play() -> None:
        coordinator, said = Coordinator(CoordinatorConfig(VERSION)), []
        tables = JobTables(said.append, said.append)
        async with running(coordinator, tmp_path, tables) as (found, request):
            await coordinator.register_node(node(version=VERSION, data_address="10.0.0.1:7078"))
            members = [(await found.open(request))[0]]
            known = tables.get("j")
            assert known is not None
            assert [one.node_id for one in known.nodes] == ["n0"]
            assert len(known.key) == 32
            members.append((await found.open(structs.replace(request, member_id="m2")))[0])
            found.close(members.pop())
            assert tables.get("j") == known
            assert found.joined.is_set()
            found.close(members.pop())
            assert tables.get("j") is None
            assert said == [known, "j"]

    asyncio.run(play())


def test_names_that_are_too_long_are_refused_before_any_work() -> None:
    whole = opening("file:///x.parquet")
    check_names(whole)
    for field in ("job_id", "incarnation", "member_id", "sharing"):
        with pytest.raises(ConfigError, match=f"{field} has 300 characters"):
            check_names(structs.replace(whole, **{field: "x" * 300}))
