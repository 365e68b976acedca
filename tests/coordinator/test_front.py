"""The coordinator in this process: acknowledged writes are on disk, even if the disk fails."""

import asyncio
import contextlib
import logging
import sqlite3

import pytest
from membership import SPEC, VERSION, beat, join, leave, progress
from msgspec import structs
from trusted import TRUSTED

from dataplane.coordinator.front import Coordinator, CoordinatorConfig, Journal, steady_wall_clock
from dataplane.coordinator.records import Forget, Incarnation, Keep, Member, Phase
from dataplane.coordinator.server import CoordinatorServer
from dataplane.coordinator.store import JobStore, _body
from dataplane.model.errors import (
    ClosedError,
    ConfigError,
    DataStallError,
    LeaseExpired,
    NotWrittenError,
)
from dataplane.model.records import ColumnOptions, Topology
from dataplane.node.places import patiently
from dataplane.rpc.membership import StatusRequest

MEMBER = Member("j", "m", Topology(dp_size=2, world_size=2), "n", Phase.JOINED, 1)


class Clock:
    """Moved by the test."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def config(tmp_path, **changes):
    return CoordinatorConfig(version=VERSION, database=str(tmp_path / "c.db"), **changes)


def is_behind(journal):
    """Whether anything that was added is not yet on disk."""
    return journal._committed < journal._added


def crash(coordinator):
    """Close the files as the kernel does after SIGKILL: without writing anything."""

    async def close():
        coordinator._ticking.cancel()
        await coordinator._journal.close()

    return close()


def test_after_a_crash_joins_and_leaves_are_there_and_progress_is_what_was_flushed(tmp_path):
    async def main():
        clock = Clock()
        first = Coordinator(config(tmp_path), clock)
        await first.start()
        await first.join(join(0, 3))
        await first.join(join(1, 3))
        await first.join(join(2, 3))
        await first.leave(leave("m2-i1"))
        await first.heartbeat(beat(progress(cursor=10)))
        clock.now += 6
        await first.tick()
        await first.heartbeat(beat(progress(cursor=20)))
        await first.tick()
        await crash(first)

        second = Coordinator(config(tmp_path), clock)
        await second.start()
        (job,) = (await second.status(StatusRequest())).jobs
        assert [one.state for one in job.members] == ["joined", "joined", "left"]
        assert [one.cursor for one in job.members] == [10, 0, 0]
        assert second.coordinator_id != first.coordinator_id
        (verdict,) = (await second.heartbeat(beat(progress(cursor=20)))).verdicts
        assert verdict.error is None
        await second.close()

        third = Coordinator(config(tmp_path), clock)
        await third.start()
        (job,) = (await third.status(StatusRequest())).jobs
        assert job.members[0].cursor == 20
        await third.close()

    asyncio.run(main())


def test_a_join_whose_write_failed_is_not_acknowledged_by_its_retry_either(tmp_path):
    async def main():
        coordinator, big = await without_room(tmp_path)
        for _ in range(2):
            with pytest.raises(NotWrittenError, match=r"database or disk is full.*make room"):
                await coordinator.join(big)
        limit(coordinator, 1 << 20)
        assert (await coordinator.join(big)).generation == 1
        await crash(coordinator)
        again = JobStore(str(tmp_path / "c.db"))
        assert len(again.load()) == 3
        again.close()

    asyncio.run(main())


async def without_room(folder):
    """A coordinator with a small disk, and a join that it has no room for."""
    coordinator = Coordinator(config(folder))
    await coordinator.start()
    limit(coordinator, 4)
    options = ColumnOptions(columns=("x" * 100_000,))
    return coordinator, join(0, spec=structs.replace(SPEC, column_options=options))


def limit(coordinator, pages):
    """Make the disk smaller or larger, from the thread that owns the connection."""
    store = coordinator._journal._store
    statement = f"PRAGMA max_page_count = {pages}"
    coordinator._journal._thread.submit(lambda: store._db.execute(statement).close()).result()


def test_a_rank_waits_for_room_on_the_coordinators_disk_and_is_told_so(tmp_path):
    async def main():
        coordinator, big = await without_room(tmp_path)
        names = {"job": "j", "coordinator": "c:1", "node": "n"}
        refused = asyncio.Event()

        async def ask():
            try:
                return await coordinator.join(big)
            finally:
                refused.set()

        with pytest.raises(DataStallError, match=r"'j' cannot be joined: for .*disk is full.*room"):
            await patiently(ask, 0.0, **names)
        refused.clear()
        waiting = asyncio.create_task(patiently(ask, 60.0, **names))
        await refused.wait()
        limit(coordinator, 1 << 20)
        assert (await waiting).generation == 1
        await coordinator.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "body",
    [
        _body(Keep(MEMBER)).replace('"node_id"', '"of_a_newer_version":1,"node_id"'),
        _body(Keep(MEMBER)).replace('"order":1', '"order":"one"'),
        _body(Keep(MEMBER)).replace('"joined"', '"ascended"'),
        _body(Keep(MEMBER))[:-9],
        "[]",
        "7",
        "[" * 100_000,
        b"\xff\x00",
    ],
)
def test_a_record_that_cannot_be_read_stops_the_start_with_advice(tmp_path, body):
    async def main():
        path = tmp_path / "c.db"
        JobStore(str(path)).close()
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("INSERT INTO members VALUES ('j', 'm', ?)", (body,))
            db.commit()
        server = CoordinatorServer(config(tmp_path), "127.0.0.1:0", TRUSTED)
        advice = "c.db: the record 'j' of members cannot be read.* Another version.* move it away"
        with pytest.raises(ConfigError, match=advice):
            await server.start()
        await server.stop()
        JobStore(str(path)).close()  # its lock is free

    asyncio.run(main())


def test_progress_that_cannot_be_written_waits_and_says_so(tmp_path, caplog):
    async def main():
        clock = Clock()
        coordinator = Coordinator(config(tmp_path), clock)
        await coordinator.start()
        ranks = range(100)
        await asyncio.gather(*(coordinator.join(join(rank, 100)) for rank in ranks))
        bound = "x" * 250
        beats = [structs.replace(progress(f"m{rank}-i1", cursor=5), bound=bound) for rank in ranks]
        await coordinator.heartbeat(beat(*beats))
        limit(coordinator, 4)
        clock.now += 6
        with caplog.at_level(logging.WARNING), pytest.raises(NotWrittenError):
            await coordinator.tick()
        assert "progress waits to be written" in caplog.text
        assert is_behind(coordinator._journal)
        limit(coordinator, 1 << 20)
        await coordinator.close()
        assert not is_behind(coordinator._journal)

    asyncio.run(main())


def test_a_caller_that_gives_up_does_not_disturb_the_commit_of_others(tmp_path):
    async def main():
        coordinator = Coordinator(config(tmp_path))
        await coordinator.start()
        callers = [asyncio.create_task(coordinator.join(join(rank, 8))) for rank in range(8)]
        await asyncio.sleep(0)
        for caller in callers[::2]:
            caller.cancel()
        answers = await asyncio.gather(*callers, return_exceptions=True)
        assert [type(answer).__name__ for answer in answers] == [
            "CancelledError",
            "JoinResponse",
        ] * 4
        await coordinator.close()

    asyncio.run(main())


def test_later_writes_of_a_record_replace_waiting_ones(tmp_path):
    async def main():
        journal = Journal(str(tmp_path / "j.db"))
        assert await journal.open() == []
        journal.add([Keep(Incarnation("j", "a", 1)), Keep(Incarnation("j", "b", 1))])
        journal.add([Keep(Incarnation("j", "a", 2)), Forget(Incarnation, "j", "b")])
        assert is_behind(journal)
        await journal.commit()
        assert not is_behind(journal)
        await journal.close()
        await journal.close()
        journal = Journal(str(tmp_path / "j.db"))
        assert await journal.open() == [Incarnation("j", "a", 2)]
        await journal.close()

    asyncio.run(main())


def test_one_write_alone_is_on_disk_when_the_commit_returns(tmp_path):
    async def main():
        journal = Journal(str(tmp_path / "j.db"))
        await journal.open()
        journal.add([Keep(Incarnation("j", "a", 1))])
        await journal.commit()
        await journal.close()
        journal = Journal(str(tmp_path / "j.db"))
        assert await journal.open() == [Incarnation("j", "a", 1)]
        await journal.close()

    asyncio.run(main())


def test_time_that_passes_ends_leases(tmp_path):
    async def main():
        clock = Clock()
        coordinator = Coordinator(config(tmp_path, lease_s=9.0), clock)
        await coordinator.start()
        await coordinator.join(join(0, 1))
        for _ in range(4):
            clock.now += 3
            await coordinator.tick()
        (verdict,) = (await coordinator.heartbeat(beat(progress()))).verdicts
        assert isinstance(verdict.error, LeaseExpired)
        await coordinator.close()

    asyncio.run(main())


def test_leases_end_by_themselves(tmp_path):
    async def main():
        with pytest.raises(ConfigError, match="at least"):
            Coordinator(config(tmp_path, lease_s=0.09))
        coordinator = Coordinator(config(tmp_path, lease_s=0.1))
        await coordinator.start()
        await coordinator.join(join(0, 1))
        async with asyncio.timeout(30):
            while True:
                (job,) = (await coordinator.status(StatusRequest())).jobs
                if job.members[0].state == "expired":
                    break
                await asyncio.sleep(0.01)
        await coordinator.close()

    asyncio.run(main())


def test_a_coordinator_that_is_not_running_says_so(tmp_path):
    async def main():
        coordinator = Coordinator(config(tmp_path))
        with pytest.raises(ClosedError, match="call start"):
            await coordinator.join(join(0))
        await coordinator.start()
        await coordinator.close()
        await coordinator.close()
        with pytest.raises(ClosedError):
            await coordinator.status(StatusRequest())
        with pytest.raises(ConfigError, match="lease_s is 0"):
            Coordinator(config(tmp_path, lease_s=0.0))

    asyncio.run(main())


def test_the_clock_starts_at_the_wall_clock_and_runs_evenly():
    clock = steady_wall_clock()
    first, second = clock(), clock()
    assert first > 1_700_000_000
    assert second >= first
