"""The node's reaction to the verdicts of a heartbeat."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from membership import join, node, progress
from msgspec.structs import replace
from small_engine import SmallEngine

from dataplane.base.trace import Trace
from dataplane.coordinator.front import Coordinator, CoordinatorConfig
from dataplane.model.changes import TOMBSTONE, EpochSteps, ReplacedRow
from dataplane.model.config import VERSION
from dataplane.model.errors import ConfigError, CorruptShard, DataStallError, LeaseFenced
from dataplane.model.ledger import LedgerEntry, LedgerPosition
from dataplane.model.records import End, Region, Topology
from dataplane.node import heartbeat
from dataplane.node.delivery import ReplacedRows
from dataplane.node.heartbeat import beat_after_s
from dataplane.node.places import Following
from dataplane.rpc import tasks
from dataplane.rpc.membership import (
    HeartbeatRequest,
    HeartbeatResponse,
    MemberVerdict,
    MixProposal,
)
from dataplane.rpc.messages import Batch, Slab
from dataplane.settings import default_node_config


async def test_a_fenced_member_may_have_left_before_it_is_notified(
    small: SmallEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sending finds that the trainer is gone, which closes all of its streams."""
    coordinator = Coordinator(CoordinatorConfig(""))
    told = []

    error = LeaseFenced("a newer launch runs")
    beat, _ = small.heartbeat(coordinator)
    member = small.member()
    streams: dict[int, Any] = {0: "first", 1: "second"}
    member.streams = streams

    def gone(stream: object, error: Exception) -> None:
        told.append((stream, error))
        streams.clear()

    monkeypatch.setattr(small.engine, "refuse_stream", gone)
    beat._end(member, error)
    assert member.error is error
    assert told[0] == ("first", error)


async def test_a_maker_that_ends_is_named_no_longer(small: SmallEngine) -> None:
    coordinator = Coordinator(CoordinatorConfig(VERSION))
    config = replace(default_node_config(), coordinator="10.0.0.9:7077", worker_count=2)
    beat, _ = small.heartbeat(coordinator, config, None, "maker", "10.0.0.2:7078")
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


async def test_who_waits_for_an_outcome_is_told_which_coordinator_owes_it(
    small: SmallEngine,
) -> None:
    found: list[Any] = []
    following = Following((), 8, lambda _: None, follows=True)
    verdict = MemberVerdict("m", proposal=MixProposal("r"))
    assert following.heard(verdict, LedgerPosition(0, 0), 0.0)
    slab = Slab(1, 1, Region(0, 0), (Batch(0, 8, 8),), b"")
    following.sending(
        0, EpochSteps(80, 0, 8, End.RAGGED), 0, lambda number, body: found.append((number, body))
    )(7, slab)
    config = replace(default_node_config(), coordinator="10.0.0.9:7077", stall_timeout_s=0.0)

    beat, jobs = small.heartbeat(Coordinator(CoordinatorConfig("")), config)
    jobs.members["m"] = small.member()
    jobs.members["m"].following = following
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


@pytest.mark.parametrize("lasts", ["until all are there", "not for ever", "until an error"])
def test_a_rank_waits_for_the_others_of_its_launch(
    lasts: str, small: SmallEngine, monkeypatch: Any
) -> None:
    async def main() -> None:
        answers, member = Answers(), small.member(Topology(world_size=4))
        # Without fast beats while the launch gathers, the second one would not come.
        monkeypatch.setattr(heartbeat, "_BEAT_S_MAX", 3600.0)
        config = replace(default_node_config(), embedded=False, lease_s=1e6)
        beat, jobs = small.heartbeat(answers, config)
        jobs.members["m"] = member
        monkeypatch.setattr(beat, "_sees_all_ranks", lambda _: False)
        answers.missing = (3,)
        beating = asyncio.create_task(beat.run())
        jobs.joined.set()
        waiting = asyncio.create_task(beat.wait_gathered(member))
        for _ in range(2):
            await answers.beats.acquire()
        assert not waiting.done()
        if lasts == "not for ever":
            member.opened_at -= 3600
            await beat.wait_gathered(member)
            assert not member.gathered.is_set()
            waiting.cancel()
        elif lasts == "until an error":
            beat._end(member, DataStallError("gone"))
            await waiting
        else:
            answers.missing = ()
            await waiting
            assert member.gathered.is_set()
        beating.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))


# -- What a node says to proposals of other weights, and to those that wait, by the invariants


START, STEPS = LedgerPosition(0, 0), EpochSteps(80, 0, 8, End.RAGGED)
NOTHING, PROPOSED = MemberVerdict("m"), MemberVerdict("m", proposal=MixProposal("r"))
SLAB = Slab(1, 5, Region(0, 0), (Batch(0, 8, 8),), b"")


def test_2_who_waits_too_long_for_the_outcome_gets_an_error_and_nothing_else() -> None:
    released: list[int] = []
    found: list[Any] = []
    following = Following((), 8, released.append, follows=True)
    send = following.sending(0, STEPS, 0, lambda number, body: found.append((number, body)))
    assert following.heard(PROPOSED, START, 0.0)
    assert not following.is_overdue(1e6, 60)
    error = DataStallError("the coordinator is away")
    for now in (100, 1000):
        send(7, SLAB)
        waits = [following.is_overdue(now + passed, 60) for passed in (0, 59, 60)]
        assert waits == [False, False, True]
        following.refuse(error)
    assert (found, released) == ([(7, error), (7, error)], [5, 5])
    send(8, SLAB)
    assert not following.heard(NOTHING, START, 0.0)
    assert (found[2:], released) == ([(8, SLAB)], [5, 5])


def test_promised_places_are_those_at_which_steps_begin() -> None:
    following = Following((), 8, lambda _: None, follows=True)
    following.heard(PROPOSED, LedgerPosition(0, 12), 3.0)  # the launch began within a step of 8
    assert following.promise is not None
    assert following.promise.position == LedgerPosition(0, 28)


def test_who_has_read_on_past_rows_that_others_took_out_gets_an_error() -> None:
    following = Following((), 8, lambda _: None, follows=True)
    send = following.sending(0, STEPS, 0, lambda number, body: None)
    payload = '{"generation":1,"layout":"x","rows":[[0,3]]}'
    entries = [
        LedgerEntry(seq, TOMBSTONE, LedgerPosition(0, cursor), payload, "me", 0.0, "")
        for seq, cursor in ((1, 8), (2, 0))
    ]
    send(7, SLAB)  # samples 0 to 7
    assert not following.heard(MemberVerdict("m", entries=(entries[0],)), START, 0.0)
    with pytest.raises(ConfigError, match=r"from sample 0 of epoch 0 .* given samples up to 8"):
        following.heard(MemberVerdict("m", entries=tuple(entries)), START, 0.0)


def test_what_a_member_says_of_itself_fits_into_a_promise() -> None:
    following = Following((), 8, lambda _: None, follows=True)
    for cursor, per_s in (((1 << 64) - 1, 0.0), (1 << 62, 1e30)):
        following.heard(PROPOSED, LedgerPosition(0, cursor), per_s)
        assert following.promise is not None
        assert cursor <= following.promise.position.cursor < 1 << 64
        following.heard(NOTHING, None, 0.0)


# -- What a node tells of rows that have others in their places


def delivery_of(incarnation: str, bad_limit: int | None) -> Any:
    launch = incarnation, "digest"
    facts = {"is_for_nodes": False, "launch": launch, "bad_limit": bad_limit, "datasets": ()}
    return SimpleNamespace(job_id="j", readers=1, **facts)


def test_rows_are_counted_and_reported_for_one_launch() -> None:
    rows = ReplacedRows(Trace("node"))
    bad = tasks.Assembled(1, replaced=tuple(ReplacedRow("u", 0, at, 9, "") for at in range(300)))
    good, first, other = tasks.Assembled(1), delivery_of("i", 1), delivery_of("i2", 1)
    assert isinstance(rows.checked(first, bad), CorruptShard)
    assert isinstance(rows.checked(first, good), CorruptShard)
    rows.heard(first, 3)
    assert rows.checked(other, good) is good
    assert (len(rows.unreported(first, 64)), rows.unreported(other, 64)) == (64, ())
    rows.begin(first)
    assert len(rows.end(first, [])) == 256
    assert isinstance(rows.checked(first, good), CorruptShard), "another rank still reads"
    assert len(rows.end(first, [other])) == 44
    assert rows.checked(first, bad) == good, "a slab that is ready too late"
    again = delivery_of("i", 1)
    assert rows.checked(again, good) is good
    assert rows.unreported(again, 64) == ()
    assert rows.count("j") == 0


def test_what_another_node_says_is_cut_and_without_secrets() -> None:
    rows = ReplacedRows(Trace("node"))
    delivery: Any = delivery_of("i", None)
    signed = "https://h/a.parquet?X-Amz-Signature=abc&session=0123456789abcdef0123456789"
    made = tasks.Assembled(
        1, replaced=(ReplacedRow(signed, 0, 1, 2, "r" * 9999), ReplacedRow("u" * 9999, 0, 1, 2, ""))
    )
    rows.checked(delivery, made)
    told = rows.unreported(delivery, 64)
    assert [one.url for one in told] == ["https://h/a.parquet?session=***", "u" * 1024]
    assert told[0].reason == "r" * 1024
