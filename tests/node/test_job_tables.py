"""Tables of a node's jobs, and of the other nodes of each."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from small_engine import SmallEngine

from dataplane.coordinator.front import Coordinator, CoordinatorConfig
from dataplane.model.config import VERSION
from dataplane.node.neighbours import JobTables
from dataplane.rpc import membership
from dataplane.rpc.membership import JobNodes, KnownNodes, NeighbourNode
from dataplane.scheduler.scheduler import Scheduler
from dataplane.settings import default_node_config


def nodes(generation: int, version: int, job: str = "j") -> JobNodes:
    return JobNodes(job, generation, version, b"k")


@pytest.fixture
def said() -> list[object]:
    return []


@pytest.fixture
def tables(said: list[object]) -> JobTables:
    return JobTables(said.append, said.append)


def test_what_was_told_is_known_until_the_job_is_gone(tables: JobTables, said: list[object]):
    tables.joined(None)
    assert tables.get("j") is None
    tables.joined(nodes(1, 11))
    tables.told(nodes(2, 12, "k"), {})
    assert tables.known() == (KnownNodes("j", 11), KnownNodes("k", 12))
    tables.forget("j")
    tables.forget("j")
    assert tables.known() == (KnownNodes("k", 12),)
    assert said == [nodes(1, 11), nodes(2, 12, "k"), "j"]


def test_what_is_told_again_changes_nothing(tables: JobTables, said: list[object]):
    for _ in range(2):
        tables.joined(nodes(1, 11))
        tables.told(nodes(1, 11), {})
    assert len(said) == 1


def test_answers_that_overtake_each_other_never_bring_an_older_generation_back(tables: JobTables):
    tables.joined(nodes(2, 20))
    tables.joined(nodes(1, 10))
    assert tables.get("j") == nodes(2, 20)
    # A heartbeat that was sent before the join, and answered after it.
    tables.told(nodes(1, 10), {"j": 9})
    tables.told(nodes(1, 10), {})
    assert tables.get("j") == nodes(2, 20)
    tables.told(nodes(2, 21), {})
    assert tables.get("j") == nodes(2, 21)


def test_a_coordinator_that_has_lost_its_state_is_heard_all_the_same(tables: JobTables):
    tables.joined(nodes(5, 50))
    tables.joined(nodes(1, 10))
    tables.told(nodes(1, 10), {"j": 50})
    assert tables.get("j") == nodes(1, 10)


def test_a_maker_forgets_what_it_has_left_unless_a_join_told_it_again(
    tables: JobTables, said: list[object]
):
    tables.told(nodes(1, 10), {})
    tables.left("j", {})
    tables.left("j", {"j": 9})
    tables.left("another", {"another": 1})
    assert tables.get("j") == nodes(1, 10)
    tables.left("j", {"j": 10})
    assert said == [nodes(1, 10), "j"]
    assert tables.known() == ()


class Beaten(Coordinator):
    """Gives these answers, and notes what it was asked."""

    def __init__(self, *answers: membership.HeartbeatResponse) -> None:
        super().__init__(CoordinatorConfig(VERSION))
        self.answers = list(answers)
        self.asked: list[membership.HeartbeatRequest] = []
        self.more = asyncio.Event()

    async def heartbeat(self, request: membership.HeartbeatRequest) -> membership.HeartbeatResponse:
        self.asked.append(request)
        self.more.set()
        return self.answers.pop(0)


async def test_a_maker_learns_of_the_jobs_that_name_it_and_forgets_those_that_it_has_left(
    small: SmallEngine,
):
    def naming(version: int, job: str, worker_count: int) -> JobNodes:
        named = (NeighbourNode("n", "10.0.0.1:7078", 1, worker_count),)
        return JobNodes(job, 1, version, b"k", named)

    first = (naming(1, "j", 4), naming(2, "k", 4), naming(3, "unnamed", 0), nodes(1, 4, "l"))
    answers = (
        membership.HeartbeatResponse((), first),
        membership.HeartbeatResponse((), (), ("j", "k")),
        membership.HeartbeatResponse(),
    )
    coordinator = Beaten(*answers)

    beat, jobs = small.heartbeat(coordinator)
    await beat._beat()
    # It has got a trainer of one of them meanwhile.
    jobs.members["m"] = small.member()
    await beat._beat()
    await beat._beat()
    both = (KnownNodes("j", 1), KnownNodes("k", 2))
    assert [one.known for one in coordinator.asked] == [(), both, both[:1]]


@pytest.mark.parametrize(
    ("count", "count_max", "is_short"),
    [(0, 0, True), (0, 8, False), (4, 0, False), (2, 8, True)],
)
def test_a_node_says_how_many_workers_it_may_have_and_whether_they_are_too_few(
    count: int, count_max: int, is_short: bool, small: SmallEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Scheduler, "is_short", is_short)
    config = replace(default_node_config(), worker_count=count, worker_count_max=count_max)
    coordinator = Beaten(membership.HeartbeatResponse())
    asyncio.run(small.heartbeat(coordinator, config)[0]._beat())
    (asked,) = coordinator.asked
    most = max(count, count_max)
    assert (asked.node.worker_count, asked.is_short) == (most, is_short)
    assert asked.node.arena_bytes == (config.block_arena_bytes if most else 0)


async def test_a_heartbeat_comes_soon_after_a_join_and_learns_of_the_jobs_that_are_served(
    small: SmallEngine,
):
    told = membership.HeartbeatResponse((), (nodes(1, 7), nodes(1, 8, "another")))
    coordinator, config = Beaten(*[told] * 3), default_node_config()
    beat, jobs = small.heartbeat(coordinator, config)
    beat._beat_s = 3600.0
    running = asyncio.create_task(beat.run())
    async with asyncio.timeout(60):
        for _ in range(3):
            jobs.joined.set()
            await coordinator.more.wait()
            coordinator.more.clear()
            jobs.members["m"] = small.member()
    running.cancel()
    assert [one.known for one in coordinator.asked] == [(), (), (KnownNodes("j", 7),)]
    said = coordinator.asked[0].node
    assert (said.data_address, said.arena_bytes) == ("10.0.0.1:7078", config.block_arena_bytes)
