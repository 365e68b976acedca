"""Tables of a node's jobs, and of the other nodes of each."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fleet import Service, free_address
from msgspec.structs import replace
from raw_trainer import Trainer
from small_engine import SmallEngine

from dataplane.cli import run
from dataplane.coordinator.front import Coordinator, CoordinatorConfig
from dataplane.model.config import PROTOCOL_VERSION, VERSION, JobSpec
from dataplane.model.records import Topology
from dataplane.node.neighbours import JobTables
from dataplane.rpc import membership
from dataplane.rpc.address import served_name
from dataplane.rpc.calls import CoordinatorClient
from dataplane.rpc.membership import JobNodes, KnownNodes, NeighbourNode
from dataplane.scheduler.scheduler import Scheduler
from dataplane.security import tokens
from dataplane.security.node_identity import own_identity
from dataplane.security.security import Security
from dataplane.settings import default_node_config

SMALL = ("--block-arena-bytes", "16MiB", "--worker-count", "1")


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


def test_a_maker_learns_of_the_jobs_that_name_it_and_forgets_those_that_it_has_left(
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

    async def play() -> None:
        beat, jobs = small.heartbeat(coordinator)
        await beat._beat()
        # It has got a trainer of one of them meanwhile.
        jobs.members["m"] = small.member()
        await beat._beat()
        await beat._beat()

    asyncio.run(play())
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


def test_a_heartbeat_comes_soon_after_a_join_and_learns_of_the_jobs_that_are_served(
    small: SmallEngine,
):
    async def play() -> None:
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

    asyncio.run(play())


def test_nodes_see_each_other_through_their_coordinator(
    parquet: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Real processes; `dataplane status --json` says what each of them knows."""
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(tmp_path / "cache"))
    address = free_address()
    hosts = [address, f"host-b-{os.getpid()}:7077"]

    def seen(count: int) -> list[str] | None:
        """The addresses of all nodes of the job, once each of the nodes knows of these."""
        assert run(["status", address, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        (job,) = found["jobs"]
        known = [{"job_id": "j", "version": job["nodes_version"]}]
        by_id = {one["node_id"]: one for one in found["nodes"]}
        addresses = [one["address"] for one in job["nodes"]]
        assert addresses == [by_id[one["node_id"]]["data_address"] for one in job["nodes"]]
        assert {one["arena_bytes"] for one in job["nodes"]} == {16 << 20}
        all_know = all(by_id[one["node_id"]]["known"] == known for one in job["nodes"])
        return addresses if all_know and len(addresses) == count else None

    with ExitStack() as stack:
        services = [
            stack.enter_context(Service(*arguments, *SMALL, awaited=False))
            for arguments in (
                # Nobody but processes of this host could join: it lends blocks if it is told to.
                ("--listen", address, "--data-listen", ":0"),
                ("--node", "--join", address, "--service", hosts[1]),
            )
        ]
        for service in services:
            service.wait_ready()
        trainers = [
            stack.enter_context(Trainer(cast(Any, SimpleNamespace(name=name))))
            for name in (served_name(os.getuid(), host) for host in hosts)
        ]
        for rank, trainer in enumerate(trainers):
            trainer.open(parquet, dp_rank=rank, dp_size=2)
        both = until(lambda: seen(2))
        for one in both:
            connect(one)
        trainers[1].close()
        (left,) = until(lambda: seen(1))
        # The other node has no trainer any more: it makes slabs for a job that has no workers.
        asyncio.run(join_without_workers(address, tmp_path / "state"))

        def made_for() -> list[str] | None:
            assert run(["status", address, "--json", "--job", "short"]) == 0
            found = json.loads(capsys.readouterr().out)
            known = {"job_id": "short", "version": found["jobs"][0]["nodes_version"]}
            knows = [one["data_address"] for one in found["nodes"] if known in one["known"]]
            named = [one for one in found["jobs"][0]["nodes"] if one["worker_count"]]
            assert {one["address"] for one in named} <= set(both) - {left}
            return knows or None

        assert until(made_for) == [one for one in both if one != left]


def connect(address: str) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10):
        pass


async def join_without_workers(address: str, state: Path) -> None:
    """A node without workers joins the job "short"."""
    token = tokens.find({}, "", str(state), makes=False)
    own = own_identity()
    client = CoordinatorClient(address, Security(token), identity=own)
    try:
        await client.register_node(
            membership.RegisterNodeRequest(own.node_id, "a-host", 1, VERSION, PROTOCOL_VERSION)
        )
        spec = JobSpec("f" * 32, global_batch=1)
        join = membership.JoinRequest(
            "short", "mem://x", spec, Topology(), "i", "m", own.node_id, 1
        )
        await client.join(join)
    finally:
        await client.close()


def until(found: Callable[[], list[str] | None]) -> list[str]:
    """What it finds in the end."""
    deadline = time.monotonic() + 60
    while True:
        if (one := found()) is not None:
            return one
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)
