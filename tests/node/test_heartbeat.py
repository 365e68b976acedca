"""The node's reaction to the verdicts of a heartbeat."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from membership import join, node, progress
from msgspec.structs import replace

from dataplane.base.trace import Trace
from dataplane.base.watchdog import Watchdog
from dataplane.coordinator.front import Coordinator, CoordinatorConfig
from dataplane.model.changes import EpochSteps
from dataplane.model.config import VERSION
from dataplane.model.errors import DataStallError, LeaseFenced
from dataplane.model.ledger import LedgerPosition
from dataplane.model.records import End, Region
from dataplane.node import heartbeat
from dataplane.node.delivery import ReplacedRows
from dataplane.node.heartbeat import Heartbeat, beat_after_s
from dataplane.node.member import Following, ServedMember
from dataplane.rpc.membership import (
    HeartbeatRequest,
    HeartbeatResponse,
    HeldBlocks,
    MemberVerdict,
    MixProposal,
    NodeReads,
)
from dataplane.rpc.messages import Batch, Slab
from dataplane.settings import default_node_config
from dataplane.store.outage import Outages


def test_a_fenced_member_may_have_left_before_it_is_notified() -> None:
    """Sending finds that the trainer is gone, which closes all of its streams."""
    coordinator = Coordinator(CoordinatorConfig(""))
    jobs: Any = SimpleNamespace(members={})
    streams: dict[int, Any] = {0: "first", 1: "second"}
    told = []

    def gone(stream: object, error: Exception) -> None:
        told.append((stream, error))
        streams.clear()

    engine: Any = SimpleNamespace(refuse_stream=gone)
    config = default_node_config()
    trace = Trace("test")
    beat = Heartbeat(
        config, coordinator, jobs, engine, "node", trace, Outages(), Watchdog(trace), NodeReads
    )
    member: Any = SimpleNamespace(streams=streams, error=None, gathered=asyncio.Event())
    error = LeaseFenced("a newer launch runs")
    beat._end(member, error)
    assert member.error is error
    assert told[0] == ("first", error)


def test_a_maker_that_ends_is_named_no_longer() -> None:
    async def main() -> None:
        coordinator = Coordinator(CoordinatorConfig(VERSION))
        config = replace(default_node_config(), coordinator="10.0.0.9:7077", worker_count=2)
        trace, empty = Trace("test"), SimpleNamespace(members={})
        jobs: Any = empty
        engine: Any = empty
        beat = Heartbeat(
            config, coordinator, jobs, engine, "maker", trace, Outages(), Watchdog(trace),
            NodeReads, "10.0.0.2:7078",
        )  # fmt: skip
        short = node("n0", VERSION, data_address="10.0.0.1:7078", worker_count=0)
        await coordinator.start()
        await beat.register()
        await coordinator.register_node(short)
        told = (await coordinator.join(join(0, 2))).nodes
        assert [one.node_id for one in told.nodes] == ["n0", "maker"]
        await beat.leave()
        renewed = HeartbeatRequest(short, (progress(),), is_short=True)
        (news,) = (await coordinator.heartbeat(renewed)).jobs
        assert [one.node_id for one in news.nodes] == ["n0"]
        await coordinator.close()

    asyncio.run(main())


def test_who_waits_for_an_outcome_is_told_which_coordinator_owes_it() -> None:
    found: list[Any] = []
    following = Following((), 8, lambda _: None, follows=True)
    verdict = MemberVerdict("m", proposal=MixProposal("r"))
    assert following.heard(verdict, LedgerPosition(0, 0), 0.0)
    slab = Slab(1, 1, Region(0, 0), (Batch(0, 8, 8),), b"")
    following.sending(
        0, EpochSteps(80, 0, 8, End.RAGGED), 0, lambda number, body: found.append((number, body))
    )(7, slab)
    jobs: Any = SimpleNamespace(members={"m": SimpleNamespace(following=following, job_id="j")})
    engine: Any = None
    trace = Trace("test")
    config = replace(default_node_config(), coordinator="10.0.0.9:7077", stall_timeout_s=0.0)
    beat = Heartbeat(
        config, Coordinator(CoordinatorConfig("")), jobs, engine, "node", trace, Outages(),
        Watchdog(trace), NodeReads,
    )  # fmt: skip
    beat.tick()
    ((number, error),) = found
    assert (number, type(error)) == (7, DataStallError)
    said = (
        "the coordinator at 10.0.0.9:7077 has not said where the new weights of `dataplane mix j`"
    )
    assert said in str(error)


def test_nodes_hear_soon_of_ranks_that_join_last_however_many_there_are() -> None:
    whole, gathers = MemberVerdict("a"), MemberVerdict("b", None, (3,), 1.0)
    assert beat_after_s(2.0, (), 4) == beat_after_s(2.0, (whole,), 4) == 2.0
    assert beat_after_s(2.0, (whole, gathers), 4) == 0.25
    assert beat_after_s(0.1, (gathers,), 4) == 0.1
    for hosts in (100, 300, 10_000):
        assert hosts / beat_after_s(2.0, (gathers,), hosts) <= max(200, hosts / 2.0)
    assert beat_after_s(2.0, (MemberVerdict("b", None, (3,), 600.0),), 4) == 2.0


class Answers(Coordinator):
    """Says of the one member what is given to it."""

    def __init__(self) -> None:
        super().__init__(CoordinatorConfig(""))
        self.missing: tuple[int, ...] = ()
        self.beats = asyncio.Semaphore(0)

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        self.beats.release()
        return HeartbeatResponse((MemberVerdict("m", None, self.missing, 0.5),))


class Joined(SimpleNamespace):
    """A member of a launch over four hosts, as far as a heartbeat looks at it."""

    def __init__(self) -> None:
        began = time.monotonic()
        super().__init__(
            member_id="m", following=None, host_count=4, opened_at=began, closed=False, streams={}
        )
        self.gathered = asyncio.Event()


@pytest.mark.parametrize("lasts", ["until all are there", "not for ever", "until an error"])
def test_a_rank_waits_for_the_others_of_its_launch(lasts: str, monkeypatch: Any) -> None:
    async def main() -> None:
        answers, member = Answers(), Joined()
        tables = SimpleNamespace(known=tuple)
        jobs: Any = SimpleNamespace(members={"m": member}, joined=asyncio.Event(), tables=tables)
        scheduler, replaced = (
            SimpleNamespace(is_short=False, held=HeldBlocks()),
            ReplacedRows(Trace("test")),
        )
        engine: Any = SimpleNamespace(scheduler=scheduler, replaced=replaced)
        monkeypatch.setattr(heartbeat, "progress_of", lambda _: progress())
        # Without fast beats while the launch gathers, the second one would not come.
        monkeypatch.setattr(heartbeat, "_BEAT_S_MAX", 3600.0)
        config = replace(default_node_config(), embedded=False, lease_s=1e6)
        beat = Heartbeat(
            config, answers, jobs, engine, "n0", Trace("test"), Outages(), Watchdog(Trace("test")),
            NodeReads, "10.0.0.1:7078",
        )  # fmt: skip
        monkeypatch.setattr(beat, "_sees_all_ranks", lambda _: False)
        answers.missing = (3,)
        beating = asyncio.create_task(beat.run())
        jobs.joined.set()
        waiting = asyncio.create_task(beat.wait_gathered(cast("ServedMember", member)))
        for _ in range(2):
            await answers.beats.acquire()
        assert not waiting.done()
        if lasts == "not for ever":
            member.opened_at -= 3600
            await beat.wait_gathered(cast("ServedMember", member))
            assert not member.gathered.is_set()
            waiting.cancel()
        elif lasts == "until an error":
            engine.refuse_stream = None
            beat._end(cast("ServedMember", member), DataStallError("gone"))
            await waiting
        else:
            answers.missing = ()
            await waiting
            assert member.gathered.is_set()
        beating.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))
