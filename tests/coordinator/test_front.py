"""The coordinator in this process: acknowledged writes are on disk, even if the disk fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sqlite3
import stat
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from membership import SPEC, VERSION, beat, join, leave, progress
from msgspec import structs
from trusted import TRUSTED

from dataplane.coordinator.front import Coordinator, CoordinatorConfig, Journal, steady_wall_clock
from dataplane.coordinator.records import (
    Forget,
    Incarnation,
    Job,
    Keep,
    LedgerRecord,
    Member,
    Phase,
)
from dataplane.coordinator.server import CoordinatorServer
from dataplane.coordinator.store import MEMORY, SCHEMA_VERSION, JobStore, _body, _read
from dataplane.model.config import JobSpec
from dataplane.model.errors import (
    ClosedError,
    ConfigError,
    DataStallError,
    NotWrittenError,
)
from dataplane.model.ledger import LedgerEntry, LedgerPosition
from dataplane.model.records import (
    ColumnOptions,
    Cut,
    DatasetIdentity,
    Decoding,
    End,
    ImageSpec,
    ListPolicy,
    StackSpec,
    StepSpec,
    Topology,
)
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


async def test_after_a_crash_joins_and_leaves_are_there_and_progress_is_what_was_flushed(tmp_path):
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


async def test_a_join_whose_write_failed_is_not_acknowledged_by_its_retry_either(tmp_path):
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


async def test_a_rank_waits_for_room_on_the_coordinators_disk_and_is_told_so(tmp_path, caplog):
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
    # The coordinator's log says once that it waits, however often it tries, and for how long.
    lines = [line.getMessage() for line in caplog.records if "database" in line.getMessage()]
    assert len(lines) == 2, lines
    assert "jobs that open wait for the database" in lines[0]
    assert "make room on that disk" in lines[0]
    assert "the database is written again after_s=" in lines[1]
    await coordinator.close()


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
async def test_a_record_that_cannot_be_read_stops_the_start_with_advice(tmp_path, body):
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


async def test_progress_that_cannot_be_written_waits_and_says_so(tmp_path, caplog):
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
    assert "jobs that open wait for the database" in caplog.text
    assert is_behind(coordinator._journal)
    limit(coordinator, 1 << 20)
    await coordinator.close()
    assert not is_behind(coordinator._journal)


async def test_a_caller_that_gives_up_does_not_disturb_the_commit_of_others(tmp_path):
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


async def test_later_writes_of_a_record_replace_waiting_ones(tmp_path):
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


async def test_one_write_alone_is_on_disk_when_the_commit_returns(tmp_path):
    journal = Journal(str(tmp_path / "j.db"))
    await journal.open()
    journal.add([Keep(Incarnation("j", "a", 1))])
    await journal.commit()
    await journal.close()
    journal = Journal(str(tmp_path / "j.db"))
    assert await journal.open() == [Incarnation("j", "a", 1)]
    await journal.close()


async def test_leases_end_by_themselves(tmp_path):
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


async def test_a_coordinator_that_is_not_running_says_so(tmp_path):
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


def test_the_clock_starts_at_the_wall_clock_and_runs_evenly():
    clock = steady_wall_clock()
    first, second = clock(), clock()
    assert first > 1_700_000_000
    assert second >= first


JOB = Job("j", "s3://b/x", SPEC, 1000, 2, 1, "i1")

names = st.text(max_size=12)
u64 = st.integers(0, 2**64 - 1)
images = ImageSpec("\x00é", 2**64 - 1, 4, Cut.RANDOM, (8, 9), (0.5, 1.0), decode=Decoding.FAST)
of_columns = ColumnOptions(
    ("x", ""), ListPolicy.RAGGED, fill_null=(("x", -0.5),), stack=(StackSpec("s", ("x",), ""),)
)
specs = st.builds(
    JobSpec,
    fingerprint=names,
    seed=u64,
    shuffle=st.booleans(),
    end=st.sampled_from(End),
    transforms=st.sampled_from([(), (images,)]),
    column_options=st.sampled_from([ColumnOptions(), of_columns]),
)
jobs = st.builds(
    Job, names, names, specs, u64, u64, u64, names, u64, u64, st.floats(0, 1e10),
    urls=st.lists(names, max_size=2).map(tuple),
    identity=st.none() | st.builds(DatasetIdentity, names, names),
)  # fmt: skip
places = st.builds(Topology, *[st.integers(0, 2**32 - 1)] * 6)
members = st.builds(
    Member, names, names, places, names, st.sampled_from(Phase), u64, u64, u64, st.floats(0, 1e9)
)
entries = st.builds(
    LedgerEntry, u64, names, st.builds(LedgerPosition, u64, u64), names, names, st.floats(0, 1e10)
)
records = st.lists(
    jobs
    | members
    | st.builds(Incarnation, names, names, u64)
    | st.builds(LedgerRecord, names, names, entries),
    max_size=8,
)


def key(record):
    name = getattr(record, "member_id", getattr(record, "name", ""))
    return (type(record).__name__, record.job_id, name)


@given(batches=st.lists(records, max_size=3))
def test_what_is_written_last_comes_back(batches):
    store = JobStore(MEMORY)
    expected = {}
    for batch in batches:
        store.write([Keep(record) for record in batch])
        expected |= {key(record): record for record in batch}
    assert {key(record): record for record in store.load()} == expected
    for record in expected.values():
        store.write([Forget(type(record), *key(record)[1:])])
    assert store.load() == []
    store.close()
    store.close()


def test_a_job_in_the_form_of_another_version_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "c.db"
    JobStore(str(path)).close()
    body = '{"job_id":"j","dataset":"d","spec":{"fingerprint":"f","columns":["a","b"]},"sample_count":9}'
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("INSERT INTO jobs VALUES ('j', '', ?)", (body,))
    store = JobStore(str(path))
    with pytest.raises(ConfigError, match="Another version of Dataplane has written it: use that"):
        store.load()
    store.close()


def test_records_survive_and_the_file_is_private(tmp_path):
    path = tmp_path / "deep" / "er" / "c.db"
    store = JobStore(str(path))
    store.write([Keep(JOB), Keep(MEMBER), Keep(Incarnation("j", "i1", 1))])
    store.close()
    again = JobStore(str(path))
    assert again.load() == [JOB, MEMBER, Incarnation("j", "i1", 1)]
    again.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_lease_is_not_stored():
    store = JobStore(MEMORY)
    store.write([Keep(structs.replace(MEMBER, deadline=99.0))])
    assert store.load() == [MEMBER]
    store.close()


def test_a_batch_is_written_whole_or_not_at_all():
    store = JobStore(MEMORY)
    store.write([Keep(JOB)])
    unwritable = structs.replace(MEMBER, member_id="\ud800")
    with pytest.raises(UnicodeEncodeError):
        store.write([Forget(Job, "j"), Keep(unwritable)])
    assert store.load() == [JOB]
    store.write([Keep(MEMBER)])
    store.close()


@pytest.mark.parametrize("is_new", [True, False])
def test_a_second_coordinator_on_the_same_file_is_refused(tmp_path, is_new):
    path = str(tmp_path / "c.db")
    if not is_new:
        JobStore(path).close()
    first = JobStore(path)
    code = (
        "import sys\n"
        "from dataplane.coordinator import store\n"
        "from dataplane.model.errors import ConfigError\n"
        "store._LOCK_TIMEOUT_S = 0.1\n"
        "try: store.JobStore(sys.argv[1])\n"
        "except ConfigError as error: sys.stdout.write(str(error))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True, timeout=60
    )
    # Some kernels and sandboxes do not say which process holds a lock.
    who = rf"another coordinator( \(process {os.getpid()}\))?"
    assert re.search(rf"c\.db is locked: {who} uses it", found.stdout)
    first.write([Keep(JOB)])
    first.close()


def test_a_damaged_database_is_refused(tmp_path):
    path = tmp_path / "c.db"
    store = JobStore(str(path))
    many = [Keep(structs.replace(MEMBER, member_id=f"m{n}")) for n in range(500)]
    store.write(many)
    store.close()
    whole = path.read_bytes()
    for damaged in (
        b"this is no database at all" * 50,
        whole[:100] + b"\xa5" * (len(whole) - 100),
        whole[: len(whole) // 2],
    ):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"is damaged: .* move it away") as caught:
            JobStore(str(path))
        assert caught.value.nouns == {"path": str(path)}


def test_another_version_and_another_program_are_refused_and_left_alone(tmp_path):
    path = tmp_path / "c.db"
    JobStore(str(path)).close()
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    newer = path.read_bytes()
    with pytest.raises(ConfigError, match="written by another version of Dataplane"):
        JobStore(str(path))
    assert path.read_bytes() == newer

    foreign = tmp_path / "bookmarks.db"
    db = sqlite3.connect(foreign)
    db.execute("CREATE TABLE bookmarks (url)")
    db.close()
    before = foreign.read_bytes()
    with pytest.raises(ConfigError, match="the database of another program"):
        JobStore(str(foreign))
    assert foreign.read_bytes() == before


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be opened: Is a directory"):
        JobStore(str(tmp_path))
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ConfigError, match="cannot be opened"):
        JobStore(str(blocked / "c.db"))


def test_a_full_disk_is_an_error_that_changes_nothing(tmp_path):
    store = JobStore(str(tmp_path / "c.db"))
    store.write([Keep(JOB)])
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    big = structs.replace(MEMBER, node_id="x" * 100_000)
    with pytest.raises(NotWrittenError, match=r"database or disk is full.*make room"):
        store.write([Forget(Job, "j"), Keep(big)])
    assert store.load() == [JOB]
    store._db.execute("PRAGMA max_page_count = 1000000")
    store.write([Keep(big)])
    store.close()


def test_the_stored_form_of_a_record_stays_the_same():
    """Rows that were written by older versions are compared with, and read beside, newer ones."""
    member = structs.replace(MEMBER, stall_s=1e16)
    newer = ',"pp_rank":0,"pp_size":1,"cp_rank":0,"cp_size":1,"source":""'
    body = (
        '{"job_id":"j","member_id":"m","topology":{"dp_rank":0,"dp_size":2,"rank":0,'
        f'"world_size":2,"local_rank":0,"local_world_size":1{newer}}},"node_id":"n","phase":'
        '"joined","order":1,"epoch":0,"cursor":0,"samples_per_s":0.0,"stall_s":1e+16,"bound":""}'
    )
    assert _body(Keep(structs.replace(member, deadline=9.0))) == body
    assert _read(Member, body.replace(newer, "")) == member
    image = ImageSpec("é", 3, 4, Cut.RANDOM, steps=(StepSpec("S", (float("inf"),)),))
    spec = JobSpec("f", 2**64 - 1, transforms=(image,), column_options=ColumnOptions(("x",)))
    job, newer = Job("j", "d", spec, 9, 2, 3, "i"), ',"replaces":false'
    body = _body(Keep(job))
    assert body.startswith(
        '{"job_id":"j","dataset":"d","spec":{"fingerprint":"f","seed":18446744073709551615,'
        '"shuffle":false,"lanes":1,"window":1,"global_batch":1,"end":"ragged","transforms":['
        '{"column":"\\u00e9","height":3,"width":4,"cut":"random","resize":[],"scale":[],'
        '"ratio":[],"flip":0.0,"layout":"HWC","dtype":"uint8","mean":[],"std":[],'
        '"decode":"auto","steps":[{"name":"S","numbers":[Infinity]}]'
        f'{newer}}}],"column_options":{{'
    )
    assert _read(Job, body.replace(newer, "")) == job
