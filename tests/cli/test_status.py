"""`dataplane status` against a real coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from contextlib import ExitStack, asynccontextmanager, contextmanager

import pytest
from msgspec import structs
from rich.console import Console
from trusted import TOKEN, TRUSTED

from dataplane.cli import run
from dataplane.commands import output
from dataplane.commands.status import _job_row, render
from dataplane.coordinator.front import Coordinator, CoordinatorConfig
from dataplane.coordinator.server import CoordinatorServer
from dataplane.model.config import PROTOCOL_VERSION, VERSION, JobSpec
from dataplane.model.errors import ConfigError
from dataplane.model.records import Topology
from dataplane.rpc.membership import (
    HeartbeatRequest,
    HeldBlocks,
    JobStatus,
    JoinRequest,
    KnownNodes,
    LeaveRequest,
    MemberProgress,
    MemberStatus,
    NodeReads,
    RegisterNodeRequest,
    StatusRequest,
    StatusResponse,
    StoreOutage,
)
from dataplane.rpc.sharing import NodeWork

DATASET = "s3://corpora/tokens-2026/"
AWAY = (StoreOutage("s3://lab", 61.0, "http://10.0.0.5:9000 refused the connection"),)
NODE = RegisterNodeRequest(
    "node-1", "host-1", 17, VERSION, PROTOCOL_VERSION, "10.0.0.1:7078", 64 << 30, 8
)
HELD = HeldBlocks(16 << 30, 64 << 30, 300 << 30, 400 << 30, 98_304)
READS = NodeReads(2, 5 << 30, 64 << 20, 3 << 30, 2 << 30, 1 << 30, 7 << 30)


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("DATAPLANE_TOKEN", TOKEN)


@asynccontextmanager
async def coordinator_with_one_of_two_ranks():
    server = CoordinatorServer(CoordinatorConfig(VERSION), "127.0.0.1:0", TRUSTED)
    address = await server.start()
    try:
        joined = await join_one(server.coordinator)
        told = [
            MemberProgress("job-1", "m-0", joined.generation, 3, 250, 1234.5, 0.5, "decode"),
            MemberProgress("job-1", "m-1", joined.generation, 3, 125, 1000.0, 0.5),
        ]
        await join_one(server.coordinator, "m-1")
        known = (KnownNodes("job-1", joined.nodes.version),)
        work = NodeWork("counting packs", "mem://text", 12, 40, "blocks", 61.0)
        beat = HeartbeatRequest(
            NODE, tuple(told), AWAY, 3, 0.0414, READS, known, held=HELD, work=(work,)
        )
        await server.coordinator.heartbeat(beat)
        yield address, server.coordinator
    finally:
        await server.stop(0.0)


async def join_one(coordinator, member="m-0"):
    await coordinator.register_node(NODE)
    spec = JobSpec(fingerprint="f" * 32, global_batch=4)
    topology = Topology(dp_rank=0, dp_size=2, rank=0, world_size=2, source="torchrun: RANK=0")
    return await coordinator.join(
        JoinRequest("job-1", "mem://shards", spec, topology, "one", member, "node-1", 1000)
    )


async def dataplane(*arguments: str) -> tuple[int, str, str]:
    """Run a command in a thread: its exit status, and what it has written."""
    out, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
        status = await asyncio.to_thread(run, arguments)
    return status, out.getvalue(), told.getvalue()


async def asked(*arguments: str) -> tuple[int, str, str]:
    async with coordinator_with_one_of_two_ranks() as (address, _):
        return await dataplane("status", address, *arguments)


def test_the_table_shows_jobs_ranks_and_nodes():
    code, out, _ = asyncio.run(asked())
    assert code == 0
    job = next(line for line in out.splitlines() if "mem://shards" in line).split()
    assert job[:9] == ["job-1", "forming", "1", "1/2", "1", "3", "25.0%", "1,234.5", "mem://shards"]
    node = next(line for line in out.splitlines() if line.split()[:2] == ["node-1", "host-1"])
    assert node.split()[2:9] == ["17", VERSION, "41", "ms", "5.0", "GiB", "1.25%"]
    blocks = next(line for line in out.splitlines() if "10.0.0.1:7078" in line).split()
    came = ["5.0", "GiB", "3.0", "GiB", "7.0", "GiB", "1.0", "GiB", "2.0", "GiB"]
    assert blocks == ["node-1", "10.0.0.1:7078", *came]
    kept = out[out.index("where blocks are kept") :].splitlines()
    held = next(line for line in kept if line.split()[:1] == ["node-1"])
    assert " ".join(held.split()[1:]) == (
        "16.0 GiB of 64.0 GiB (25%) 300.0 GiB of 400.0 GiB (75%) 98,304"
    )
    assert any("0.5" in line and "decode" in line for line in out.splitlines())
    assert "ranks from" in out
    work = next(line for line in out.splitlines() if "mem://text" in line).split()
    assert " ".join(work) == "node-1 counting packs mem://text 12 of 40 blocks 2 min"
    away = next(line for line in out.splitlines() if "s3://lab" in line)
    assert away.split()[:2] == ["node-1", "s3://lab"]
    assert "refused the connection" in away


def test_a_node_without_neighbours_and_disk_tells_where_its_blocks_came_from():
    alone = structs.replace(NODE, node_id="alone-1", data_address="")
    idle = structs.replace(NODE, node_id="idle-1", data_address="")

    async def shown():
        async with coordinator_with_one_of_two_ranks() as (address, coordinator):
            reads = NodeReads(2, 5 << 30, memory_bytes=3 << 30)
            await coordinator.heartbeat(HeartbeatRequest(alone, reads=reads))
            await coordinator.heartbeat(HeartbeatRequest(idle))
            return await dataplane("status", address)

    _, out, _ = asyncio.run(shown())
    came = out[out.index("where blocks came from") :]
    rows = [line.split() for line in came[: came.index("where blocks are kept")].splitlines()]
    assert [row for row in rows if row[:1] == ["alone-1"]] == [
        ["alone-1", "-", "5.0", "GiB", "-", "-", "3.0", "GiB", "-"]
    ]
    assert not [row for row in rows if row[:1] == ["idle-1"]], "it has read nothing yet"


def test_peers_of_a_dp_rank_that_are_missing_can_be_seen():
    def job(*ranks, world=4):
        members = tuple(
            MemberStatus(f"m{rank}", Topology(rank // 2, 2, rank, world), "n", "joined")
            for rank in ranks
        )
        spec = JobSpec("f" * 32, global_batch=4)
        return JobStatus("j", "mem://shards", spec, "d", 1, "running", 8, 2, (), members)

    assert _job_row(job(0, 1, 3))[3] == "2/2 (3 of 4)"
    assert _job_row(job(0, 2, world=2))[3] == "2/2"


def test_what_is_left_out_is_counted():
    members = (MemberStatus("m0", Topology(0, 1000), "n", "joined"),)
    job = JobStatus(
        "j", "mem://shards", JobSpec("f" * 32, global_batch=4), "d", 1, "forming", 8, 1000, (7, 8),
        members, missing_count=10, member_count=5000, joined_dp_rank_count=990,
    )  # fmt: skip
    assert _job_row(job)[3:5] == ("990/1000", "7, 8 and 8 others")
    console = output.stdout()
    with console.capture() as shown:
        console.print(render(StatusResponse("v", "c", (job,), node_count=3, job_count=5)))
    text = shown.get()
    assert "and 4 jobs that are idle or were active earlier" in text
    assert "and 4999 members of j, which are not in sums" in text
    assert "and 3 nodes that were heard of earlier" in text


def drawn(status: StatusResponse, **options: bool) -> list[str]:
    console = Console(width=100)
    with console.capture() as shown:
        console.print(render(status, **options))
    return shown.get().splitlines()


async def status_of_512_ranks() -> StatusResponse:
    """Return the status of a job on 64 hosts, all of which wait for a store, open other jobs, or
    make slabs; two ranks waited much longer than the others.
    """
    job, member_count = "pretrain-7", 8
    spec = JobSpec(fingerprint="f" * 32, global_batch=512)
    coordinator = Coordinator(CoordinatorConfig(VERSION))
    await coordinator.start()
    try:
        for host in range(64):
            name, progress = f"node-{host}", []
            node = structs.replace(NODE, node_id=name, host=f"gpu-{host}", worker_count=96)
            await coordinator.register_node(node)
            for rank in range(host * member_count, (host + 1) * member_count):
                place = Topology(dp_rank=rank, dp_size=512, rank=rank, world_size=512)
                joined = await coordinator.join(
                    JoinRequest(job, DATASET, spec, place, "one", f"m-{rank}", name, 1_000_000)
                )
                waited_s, bound = (61.0, "storage") if rank in {77, 300} else (0.5, "consumer")
                reached = (joined.generation, 3, 250, 100.0, waited_s + rank / 1000, bound)
                progress.append(MemberProgress(job, f"m-{rank}", *reached))
            work = NodeWork("counting packs", f"s3://corpora/{host}/", 12, 40, "blocks", 61.0)
            await coordinator.heartbeat(
                HeartbeatRequest(
                    node,
                    tuple(progress),
                    AWAY,
                    3,
                    0.0414,
                    READS,
                    is_short=True,
                    held=HELD,
                    work=(work,) * 2,
                )
            )
        return await coordinator.status(StatusRequest(job))
    finally:
        await coordinator.close()


def test_a_job_of_512_ranks_fits_a_screen():
    status = asyncio.run(status_of_512_ranks())
    lines = drawn(status)
    assert len(lines) <= 40
    rows = [line.split() for line in lines]
    sums = [row for row in rows if "hosts" in row and "512" in row]
    assert [" ".join(row) for row in sums] == [
        "pretrain-7 64 hosts 512 0.8 consumer 61.3 storage 300 51,200.0"
    ]
    worst = [row for row in rows if row[1:2] and row[1].startswith("gpu-")]
    assert [row[1:2] + row[5:8] for row in worst] == [
        ["gpu-37", "61.3", "storage", "300"],
        ["gpu-9", "61.1", "storage", "77"],
        ["gpu-63", "1.0", "consumer", "511"],
        ["gpu-62", "1.0", "consumer", "503"],
    ]
    text = "\n".join(lines)
    assert "ranks bound by: 510 consumer, 2 storage; members: 512 joined" in text
    assert "all 64" in text
    assert "320.0 GiB" in text, "bytes from the origin"
    assert "stores that do not answer (2 of 64)" in text
    whole = drawn(status, whole=True)
    assert sum("node-" in line and "joined" in line for line in whole) == 512
    assert not any("--all" in line for line in whole)


def test_json_has_the_same_for_programs():
    code, out, _ = asyncio.run(asked("--json", "--job", "job-1"))
    assert code == 0
    job = json.loads(out)["jobs"][0]
    assert job["missing_dp_ranks"] == [1]
    assert job["members"][0]["cursor"] == 250
    assert job["spec"]["end"] == "ragged"
    (away,) = json.loads(out)["nodes"][0]["stores_away"]
    assert away["store"] == "s3://lab"
    assert json.loads(out)["nodes"][0]["loop_holds"] == 3
    assert json.loads(out)["nodes"][0]["reads"]["hedged_bytes"] == 64 << 20
    assert away["away_s"] >= 61.0, "it goes on since the node told"
    node = json.loads(out)["nodes"][0]
    assert node["data_address"] == "10.0.0.1:7078"
    assert (node["reads"]["neighbour_bytes"], node["reads"]["lent_bytes"]) == (3 << 30, 2 << 30)
    assert (node["reads"]["memory_bytes"], node["reads"]["disk_bytes"]) == (1 << 30, 7 << 30)
    assert node["held"] == {
        "memory_bytes": 16 << 30, "memory_limit_bytes": 64 << 30,
        "disk_bytes": 300 << 30, "disk_limit_bytes": 400 << 30, "disk_blocks": 98_304,
    }  # fmt: skip
    address, arena_bytes = "10.0.0.1:7078", 64 << 30
    lends = {
        "node_id": "node-1", "address": address, "arena_bytes": arena_bytes, "worker_count": 0,
        "disk_id": "",
    }  # fmt: skip
    assert job["nodes"] == [lends]
    assert node["known"] == [{"job_id": "job-1", "version": job["nodes_version"]}]


def test_who_makes_slabs_for_whom_can_be_seen():
    maker = structs.replace(NODE, node_id="maker-1", data_address="10.0.0.2:7078", worker_count=96)

    async def short(*arguments):
        async with coordinator_with_one_of_two_ranks() as (address, coordinator):
            made = NodeReads(made_slabs=3, made_bytes=3 << 20)
            await coordinator.heartbeat(HeartbeatRequest(maker, reads=made))
            progress = MemberProgress("job-1", "m-0", 1)
            await coordinator.heartbeat(HeartbeatRequest(NODE, (progress,), is_short=True))
            return await dataplane("status", address, *arguments)

    _, out, _ = asyncio.run(short())
    lines = out[out.index("slabs from other nodes") :].splitlines()
    rows = [line.split() for line in lines if "job-1" in line]
    assert rows == [
        ["maker-1", "96", "job-1", "-", "3", "3.0", "MiB"],
        ["node-1", "8", "-", "job-1", "-", "-"],
    ]
    _, out, _ = asyncio.run(short("--json"))
    found = json.loads(out)
    assert [(one["node_id"], one["worker_count"]) for one in found["jobs"][0]["nodes"]] == [
        ("node-1", 0),
        ("maker-1", 96),
    ]
    assert [(one["worker_count"], one["is_short"]) for one in found["nodes"]] == [
        (96, False),
        (8, True),
    ]


def test_a_finished_job_still_shows_how_far_it_came():
    async def left():
        async with coordinator_with_one_of_two_ranks() as (address, coordinator):
            for member in ("m-0", "m-1"):
                await coordinator.leave(LeaveRequest("job-1", member, node_id="node-1"))
            return await dataplane("status", address)

    _, out, _ = asyncio.run(left())
    job = next(line for line in out.splitlines() if "mem://shards" in line).split()
    assert job[:8] == ["job-1", "idle", "1", "0/2", "1", "3", "25.0%", "0"]


def test_an_unknown_job_is_an_error():
    code, _, told = asyncio.run(asked("--job", "job-2"))
    assert code == 2
    assert "job-2" in told


def test_no_answer_is_exit_status_3(capsys):
    assert run(["status", "127.0.0.1:1"]) == 3
    told = capsys.readouterr().err
    assert "127.0.0.1:1" in told
    assert "dataplane serve" in told


@pytest.mark.parametrize("address", ["nonsense", "host:99999"])
def test_what_is_no_address_is_a_usage_error(address, capsys):
    assert run(["status", address]) == 2
    assert address in capsys.readouterr().err


@contextmanager
def watching(address, *arguments, **streams):
    process = subprocess.Popen(
        [sys.executable, "-m", "dataplane", "status", address, "--watch", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        **({"stdout": subprocess.PIPE} | streams),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def awaited(stream, words: str) -> str:
    """Return the next line of a stream with these words."""
    async with asyncio.timeout(60):
        line = await asyncio.to_thread(
            lambda: next((line for line in stream if words in line), "the stream ended")
        )
    assert words in line
    return line


async def interrupted(process) -> None:
    """End the command with Ctrl-C."""
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(60):
        assert await asyncio.to_thread(process.wait) == 130


@asynccontextmanager
async def restarted(address: str):
    """Run a coordinator that knows nothing at the address of one that has ended."""
    server = CoordinatorServer(CoordinatorConfig(VERSION), address, TRUSTED)
    await server.start()
    try:
        yield server.coordinator
    finally:
        await server.stop(0.0)


def test_watching_survives_a_restarted_coordinator_that_does_not_know_the_job_yet():
    async def main():
        with ExitStack() as stack:
            async with coordinator_with_one_of_two_ranks() as (address, _):
                process = stack.enter_context(watching(address, "--job", "job-1"))
                await awaited(process.stdout, "mem://shards")
            assert address in await awaited(process.stderr, "trying again")
            async with restarted(address) as coordinator:
                assert "job-1" in await awaited(process.stderr, "no job is called")
                await join_one(coordinator)
                assert "restarted" in await awaited(process.stderr, "going on after")
                await awaited(process.stdout, f"coordinator at {address}")
                assert "\x1b" not in await awaited(process.stdout, "mem://shards")
                await interrupted(process)

    asyncio.run(main())


def test_watching_in_json_writes_an_object_a_line_also_after_an_outage():
    async def main():
        with ExitStack() as stack:
            async with coordinator_with_one_of_two_ranks() as (address, _):
                process = stack.enter_context(watching(address, "--json"))
                before = json.loads(await awaited(process.stdout, ""))
                assert before["jobs"][0]["members"][0]["cursor"] == 250
            await awaited(process.stderr, "trying again")
            async with restarted(address) as coordinator:
                await awaited(process.stderr, "going on after")
                await interrupted(process)
                last = process.stdout.read().splitlines()[-1]
                assert json.loads(last)["time"] > before["time"]
                assert json.loads(last)["jobs"] == []
                status = await coordinator.status(StatusRequest())
                assert json.loads(last)["coordinator_id"] == status.coordinator_id

    asyncio.run(main())


def test_a_terminal_keeps_the_last_status_below_a_line_about_an_outage():
    async def main():
        with ExitStack() as stack:
            ours, terminal = pty.openpty()
            screen = stack.enter_context(os.fdopen(ours, encoding="utf-8"))
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 200, 0, 0))
            async with coordinator_with_one_of_two_ranks() as (address, _):
                process = stack.enter_context(watching(address, stdout=terminal))
                os.close(terminal)
                await awaited(screen, "mem://shards")
            assert address in await awaited(screen, "trying again")
            await awaited(screen, "mem://shards")
            await interrupted(process)
            assert "trying again" not in process.stderr.read()

    asyncio.run(main())


def test_watching_what_never_answered_ends(capsys):
    assert run(["status", "127.0.0.1:1", "--watch"]) == 3
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_a_refused_call_has_the_status_of_a_peer_that_refuses(monkeypatch, capsys):
    async def main():
        async with coordinator_with_one_of_two_ranks() as (address, _):
            monkeypatch.setenv("DATAPLANE_TOKEN", "another-token-of-somebody")
            return await asyncio.to_thread(run, ["status", address])

    assert asyncio.run(main()) == 3
    assert "AccessDenied" in capsys.readouterr().err


def test_tables_and_errors_have_no_command_for_a_terminal(capsys):
    hostile = "a\x1b[2J\nb\x9b\ud800"
    output.write_table(("job",), [(hostile,)])
    output.write_error(ConfigError(f"no {hostile}", field=hostile))
    output.warn(hostile)
    output.write_json({"job": hostile})
    shown = capsys.readouterr()
    assert not set(shown.out + shown.err) & set("\x1b\x9b\ud800")
    assert "a\\u001b[2J\\nb\\u009b\\ud800" in shown.out
