"""A node asks the coordinator for the places of its members, and gives them back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from membership import SPEC, join
from msgspec import structs

from dataplane.coordinator.front import Coordinator, CoordinatorConfig
from dataplane.model.config import VERSION, Stage
from dataplane.model.errors import SpecMismatch
from dataplane.model.records import DatasetIdentity
from dataplane.node.places import NodePlaces
from dataplane.rpc.membership import (
    JoinRequest,
    JoinResponse,
    LeaveRequest,
    LeaveResponse,
    StatusRequest,
)
from dataplane.settings import default_node_config

OTHER = structs.replace(SPEC, seed=SPEC.seed + 1)


class SlowCoordinator(Coordinator):
    """It carries out what it is asked, leaves and answers to joins only when a test lets it."""

    def __init__(self) -> None:
        super().__init__(CoordinatorConfig(VERSION))
        self.told, self.asked = asyncio.Event(), asyncio.Event()
        self.leaves, self.answers = asyncio.Event(), asyncio.Event()
        self.answers.set()

    async def join(self, request: JoinRequest) -> JoinResponse:
        answer = await super().join(request)
        self.asked.set()
        await self.answers.wait()
        return answer

    async def leave(self, request: LeaveRequest) -> LeaveResponse:
        self.told.set()
        await self.leaves.wait()
        return await super().leave(request)

    async def states(self) -> list[str]:
        found = await self.status(StatusRequest("j"))
        return [member.state for member in found.jobs[0].members]


@asynccontextmanager
async def _slow(stall_timeout_s: float = 60.0) -> AsyncIterator[tuple[SlowCoordinator, NodePlaces]]:
    coordinator = SlowCoordinator()
    await coordinator.start()
    config = structs.replace(default_node_config(), stall_timeout_s=stall_timeout_s)
    places = NodePlaces(config, coordinator, "n0")
    try:
        yield coordinator, places
    finally:
        coordinator.leaves.set()
        await places.close()
        await coordinator.close()


async def test_a_join_never_overtakes_a_leave_of_its_job() -> None:
    async with _slow() as (coordinator, places):
        await places.join(join(member="first"))
        places.leave("j", "first", lost=False)
        joining = asyncio.create_task(places.join(join(member="second", spec=OTHER)))
        await coordinator.told.wait()
        # Joins of other jobs do not wait.
        await places.join(join(job="another"))
        assert not joining.done()
        coordinator.leaves.set()
        assert (await joining).generation == 2


async def test_a_leave_that_is_not_answered_delays_a_join_only_for_a_while() -> None:
    async with _slow(stall_timeout_s=0.01) as (_, places):
        await places.join(join(member="first"))
        places.leave("j", "first", lost=False)
        with pytest.raises(SpecMismatch):
            await places.join(join(member="second", spec=OTHER))


async def test_a_rank_in_its_next_stage_waits_for_ranks_that_are_late_and_says_so() -> None:
    stage = Stage("d", 0, 8, 16, DatasetIdentity("c", "l"))
    following = structs.replace(OTHER, stages=(stage,))
    async with _slow(stall_timeout_s=0.0) as (coordinator, places):
        coordinator.leaves.set()
        for rank in range(2):
            await places.join(join(rank, member=f"m{rank}"))
        await coordinator.leave(LeaveRequest("j", "m0", node_id="n0"))
        joining = asyncio.create_task(places.join(join(0, member="next", spec=following)))
        while not places.refused_count("next"):
            assert not joining.done()
            await asyncio.sleep(0)
        places.leave("j", "m1", lost=False)
        assert (await joining).generation == 2
        assert places.refused_count("next") == 0


async def test_a_trainer_that_goes_away_while_it_joins_gives_its_place_back() -> None:
    async with _slow() as (coordinator, places):
        coordinator.answers.clear()
        joining = asyncio.create_task(places.join(join(member="first")))
        await coordinator.asked.wait()
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        coordinator.leaves.set()
        coordinator.answers.set()
        assert (await places.join(join(member="second", spec=OTHER))).generation == 2


async def test_a_node_that_stops_waits_for_leaves_and_leaves_the_others_their_places() -> None:
    async with _slow() as (coordinator, places):
        for rank in range(2):
            await places.join(join(rank))
        places.leave("j", "m0-i1", lost=False)
        closing = asyncio.create_task(places.close())
        await coordinator.told.wait()
        assert not closing.done()
        coordinator.leaves.set()
        await closing
        places.leave("j", "m1-i1", lost=False)
        assert await coordinator.states() == ["left", "joined"]
