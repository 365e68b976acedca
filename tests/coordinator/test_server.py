"""The server: where it listens, what it refuses, how it stops and comes back."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from membership import SPEC, VERSION, progress
from msgspec import structs
from trusted import OWN, TOKEN, TRUSTED, beat, join, node

from dataplane.commands import ledger
from dataplane.commands.ledger import decided
from dataplane.coordinator.front import CoordinatorConfig
from dataplane.coordinator.server import CoordinatorServer
from dataplane.model.changes import dataset_of, rows_layout
from dataplane.model.errors import (
    ClosedError,
    ConfigError,
    DataplaneError,
    NotWrittenError,
    PeerLost,
    SpecMismatch,
    VersionMismatch,
)
from dataplane.model.ledger import LedgerPosition
from dataplane.model.records import ColumnOptions, Tombstone
from dataplane.rpc.calls import CoordinatorClient
from dataplane.rpc.membership import (
    ChangeRequest,
    JoinResponse,
    MixPromise,
    RowsTaken,
    StatusRequest,
    StepsSkipped,
)
from dataplane.rpc.serve import GrpcServer
from dataplane.rpc.services import COORDINATOR

CONFIG = CoordinatorConfig(version=VERSION, lease_s=60.0)
LOCAL = "127.0.0.1:0"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

PROCESS = """
import asyncio, json, sys
from dataplane.coordinator.front import CoordinatorConfig
from dataplane.coordinator.server import CoordinatorServer
from dataplane.security.security import Security
from dataplane.security.tokens import TokenSource

async def main():
    version, database, address, token = sys.argv[1:]
    trusted = Security(TokenSource("the tests", (token,)))
    server = CoordinatorServer(CoordinatorConfig(version, database, lease_s=20.0), address, trusted)
    print(await server.start(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def start_process(database, address):
    """A coordinator in its own process, and its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROCESS,
        VERSION,
        str(database),
        address,
        TOKEN,
        stdout=asyncio.subprocess.PIPE,
    )
    line = await process.stdout.readline()
    return process, line.decode().strip()


async def kill(process):
    process.send_signal(signal.SIGKILL)
    await process.wait()


async def test_a_coordinator_killed_and_restarted_stops_no_rank(tmp_path):
    database = tmp_path / "c.db"
    # No other process uses this host of 127.0.0.0/8, so the port stays free meanwhile.
    host = ".".join(map(str, (127, *os.urandom(2), 1)))
    process, address = await start_process(database, f"{host}:0")
    client = CoordinatorClient(address, TRUSTED, patience_s=60.0, identity=OWN)
    for rank in range(2):
        assert (await client.join(join(rank))).generation == 1
    await kill(process)
    with pytest.raises(PeerLost, match="nobody answers at"):
        await client.heartbeat(beat(progress()))

    late = asyncio.create_task(client.join(join(1)))
    process, again = await start_process(database, address)
    assert again == address
    assert (await late).generation == 1
    both = beat(progress(cursor=3), progress("m1-i1", cursor=4))
    verdicts = (await client.heartbeat(both)).verdicts
    assert [(one.error, one.missing_dp_ranks) for one in verdicts] == [(None, ())] * 2
    assert (await client.join(join(0, incarnation="i2"))).generation == 2

    await kill(process)
    process, again = await start_process(database, address)
    with pytest.raises(SpecMismatch, match="asks for seed=7"):
        await client.join(join(1, incarnation="i2", spec=structs.replace(SPEC, seed=7)))
    await client.close()
    await kill(process)


class Answered(CoordinatorClient):
    """A client that notes the first answer to a change."""

    is_answered = False

    async def change(self, request):
        answer = await super().change(request)
        self.is_answered = True
        return answer


async def test_a_change_is_made_although_the_coordinator_is_away_at_first(tmp_path, caplog):
    host = ".".join(map(str, (127, *os.urandom(2), 1)))
    process, address = await start_process(tmp_path / "c.db", f"{host}:0")
    client = CoordinatorClient(address, TRUSTED, patience_s=60.0, identity=OWN)
    await client.join(join(0, 1))
    await kill(process)
    skip = ChangeRequest("j", "me@here", skip=StepsSkipped(1, 2))
    change = asyncio.create_task(decided(client, skip))
    while True:
        if "coordinator does not answer" in caplog.text:
            break
        await asyncio.sleep(0.01)
    process, _ = await start_process(tmp_path / "c.db", address)
    entry, _ = await change
    assert entry.kind == "skip"
    await client.close()
    await kill(process)
    late = CoordinatorClient(address, TRUSTED, patience_s=0.2, identity=OWN)
    with pytest.raises(PeerLost, match=f"nobody answers at {address}"):
        await decided(late, skip)
    await late.close()


async def test_a_change_is_agreed_on_although_the_coordinator_restarts_meanwhile(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(ledger, "_SILENT_S", 0.0)
    host = ".".join(map(str, (127, *os.urandom(2), 1)))
    process, address = await start_process(tmp_path / "c.db", f"{host}:0")
    client = Answered(address, TRUSTED, patience_s=60.0, identity=OWN)
    await client.join(join(0, 1))
    reading = progress(began=(0, 0))
    await client.heartbeat(beat(reading))

    async def proposed():
        while True:
            with contextlib.suppress(PeerLost):
                (verdict,) = (await client.heartbeat(beat(reading))).verdicts
                if verdict.proposal is not None and client.is_answered:
                    return MixPromise(verdict.proposal.request, LedgerPosition(0, 32))
            await asyncio.sleep(0.01)

    rows = RowsTaken((Tombstone(0, 4),), rows_layout(SPEC, dataset_of(SPEC, None)))
    change = asyncio.create_task(decided(client, ChangeRequest("j", "me@here", tombstones=rows)))
    await proposed()
    await kill(process)
    process, _ = await start_process(tmp_path / "c.db", address)
    promise = await proposed()
    (verdict,) = (await client.heartbeat(beat(structs.replace(reading, promise=promise)))).verdicts
    entry, answer = await change
    assert verdict.entries == (entry,)
    assert (answer.is_running, entry.position) == (True, LedgerPosition(0, 32))
    assert "waiting up to a minute for 1 rank (0)" in capsys.readouterr().err
    await client.close()
    await kill(process)


async def test_a_killed_coordinator_on_a_socket_file_can_be_replaced(tmp_path):
    address = f"unix:{tmp_path}/c.sock"
    process, _ = await start_process(tmp_path / "c.db", address)
    mode = (tmp_path / "c.sock").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    with pytest.raises(ConfigError, match="another service listens at"):
        await CoordinatorServer(CONFIG, address, TRUSTED).start()
    await kill(process)
    assert (tmp_path / "c.sock").exists()
    server = CoordinatorServer(CONFIG, address, TRUSTED)
    assert await server.start() == address
    await server.stop()
    assert list(tmp_path.glob("*.sock")) == []


async def test_a_file_that_is_not_a_socket_is_not_removed(tmp_path):
    (tmp_path / "thesis").write_text("years of work")
    with pytest.raises(ConfigError, match="is a file, not a socket"):
        await CoordinatorServer(CONFIG, f"unix:{tmp_path}/thesis", TRUSTED).start()
    with pytest.raises(ConfigError, match="folder must exist"):
        await CoordinatorServer(CONFIG, f"unix:{tmp_path}/no/c.sock", TRUSTED).start()
    assert (tmp_path / "thesis").read_text() == "years of work"


async def test_a_taken_port_is_named_with_what_to_do_and_not_the_file_of_an_equal_service(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"on port {port}\? Stop it, choose another"):
            await CoordinatorServer(CONFIG, f"127.0.0.1:{port}", TRUSTED).start()
    config = structs.replace(CONFIG, database=str(tmp_path / "c.db"))
    server = CoordinatorServer(config, LOCAL, TRUSTED)
    address = await server.start()
    with pytest.raises(ConfigError, match="Address already in use"):
        await CoordinatorServer(config, address, TRUSTED).start()
    await server.stop()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
async def test_only_loopback_is_bound_by_default(address):
    with pytest.raises(ConfigError, match=r"open to the network.*--insecure"):
        await CoordinatorServer(CONFIG, address, TRUSTED).start()
    server = CoordinatorServer(CONFIG, address, structs.replace(TRUSTED, insecure=True))
    assert await server.start() != address
    await server.stop()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://127.0.0.1:80", "leave out http://"),
        ("localhost", "is not an address"),
        (":80", "is not an address"),
        ("host:http", "is not an address"),
        ("127.0.0.1:70000", "is not an address"),
        ("unix:", "1 to 107 bytes, not 0"),
        ("unix:/" + "x" * 107, "1 to 107 bytes, not 108"),
        ("no-such-host.invalid:1", "cannot be resolved"),
        ("192.0.2.1:1", "open to the network"),
    ],
)
async def test_an_invalid_address_is_refused(address, words):
    with pytest.raises(ConfigError, match=words):
        await CoordinatorServer(CONFIG, address, TRUSTED).start()


async def test_a_store_that_cannot_be_opened_leaves_nothing_running(tmp_path):
    (tmp_path / "c.db").write_text("not a database, but long enough to look at" * 100)
    config = structs.replace(CONFIG, database=str(tmp_path / "c.db"))
    address = f"unix:{tmp_path}/c.sock"
    with pytest.raises(ConfigError, match="is damaged"):
        await CoordinatorServer(config, address, TRUSTED).start()
    assert list(tmp_path.glob("*.sock")) == []


class Slow:
    """A service whose join answers when the test says so."""

    def __init__(self):
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()

    async def join(self, _):
        self.asked.set()
        await self.answer.wait()
        return JoinResponse(5, 1.0)

    async def register_node(self, _):
        raise ClosedError("closed")

    async def status(self, _):
        raise ZeroDivisionError("oh")

    heartbeat = leave = ledger = change = share_manifest = register_node


def test_a_node_says_once_that_joins_are_refused_while_its_heartbeats_are_answered(
    tmp_path, caplog
):
    async def main():
        server = CoordinatorServer(
            CoordinatorConfig(VERSION, str(tmp_path / "c.db")), LOCAL, TRUSTED
        )
        client = CoordinatorClient(await server.start(), TRUSTED, patience_s=0.0, identity=OWN)
        journal = server._coordinator._journal

        def room(pages):
            count = f"PRAGMA max_page_count = {pages}"
            journal._thread.submit(lambda: journal._store._db.execute(count).close()).result()

        room(4)
        options = ColumnOptions(columns=("x" * 100_000,))
        big = join(0, spec=structs.replace(SPEC, column_options=options))
        for _ in range(3):
            with pytest.raises(NotWrittenError):
                await client.join(big)
            await client.heartbeat(beat())
        room(1 << 20)
        assert (await client.join(big)).generation == 1
        await server.stop(0.0)
        await client.close()

    with caplog.at_level(logging.WARNING, "dataplane.rpc"):
        asyncio.run(main())
    refused, accepted = [line.getMessage() for line in caplog.records if line.name.endswith("rpc")]
    caplog.clear()  # its records hold errors, whose tracebacks hold the connection
    assert refused.startswith("coordinator refuses each join, trying again address=127.0.0.1:")
    assert "database or disk is full" in refused
    assert accepted.startswith("coordinator accepts a join again address=127.0.0.1:")


async def test_draining_answers_what_is_in_flight_and_sends_the_rest_away():
    service, server = Slow(), GrpcServer(LOCAL, TRUSTED)
    address = await server.start(service)
    client = CoordinatorClient(address, TRUSTED, patience_s=0.0, identity=OWN)
    channel = grpc.aio.insecure_channel(address)
    health = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=COORDINATOR)
    assert (await health.Check(request)).status == SERVING
    watched = health.Watch(request, metadata=TRUSTED.metadata())
    assert (await watched.read()).status == SERVING

    pending = asyncio.create_task(client.join(join(0)))
    await service.asked.wait()
    stopping = asyncio.create_task(server.stop(60.0))
    assert (await watched.read()).status == NOT_SERVING
    assert (await health.Check(request)).status == NOT_SERVING
    with pytest.raises(PeerLost, match="is stopping"):
        await client.heartbeat(beat())
    service.answer.set()
    assert (await pending).generation == 5
    await stopping
    await server.stop(0.0)
    await channel.close()
    await client.close()


async def test_a_call_that_outlives_the_grace_is_cut_off(caplog):
    service, server = Slow(), GrpcServer(LOCAL, TRUSTED)
    client = CoordinatorClient(await server.start(service), TRUSTED, patience_s=0.0, identity=OWN)
    pending = asyncio.create_task(client.join(join(0)))
    await service.asked.wait()
    await server.stop(0.0)
    with pytest.raises(PeerLost):
        await pending
    await client.close()
    with pytest.raises(ClosedError):
        await client.join(join(0))
    assert "stopped with calls unanswered calls=1" in caplog.text


async def test_late_answers_closed_services_and_defects_reach_the_client_as_errors(caplog):
    service, server = Slow(), GrpcServer(LOCAL, TRUSTED)
    address = await server.start(service)
    hasty = CoordinatorClient(address, TRUSTED, timeout_s=0.2, patience_s=0.0, identity=OWN)
    with pytest.raises(PeerLost, match=r"no answer from .* in time"):
        await hasty.join(join(0))
    await hasty.close()
    client = CoordinatorClient(address, TRUSTED, patience_s=0.0, identity=OWN)
    with pytest.raises(PeerLost, match="has stopped"):
        await client.register_node(node())
    with pytest.raises(DataplaneError, match="a defect in Status: ZeroDivisionError: oh"):
        await client.status(StatusRequest())
    with pytest.raises(ConfigError, match="refused the size of a message"):
        await client.heartbeat(beat(*[progress("m" * 1000)] * 5000))
    await client.close()
    await server.stop(0.0)
    assert "a defect call=Status" in caplog.text
    caplog.clear()


async def test_what_is_no_coordinator_is_said_to_be_none():
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port(LOCAL)}"
    await server.start()
    client = CoordinatorClient(address, TRUSTED, identity=OWN)
    with pytest.raises(VersionMismatch, match="not a Dataplane service, or has another version"):
        await client.register_node(node())
    await client.close()
    await server.stop(None)


async def test_once_the_server_has_stopped_another_can_open_its_database(tmp_path):
    config = structs.replace(CONFIG, database=str(tmp_path / "c.db"))
    for _ in range(2):
        server = CoordinatorServer(config, LOCAL, TRUSTED)
        client = CoordinatorClient(await server.start(), TRUSTED, identity=OWN)
        assert (await client.join(join(0))).generation == 1
        await client.close()
        await server.stop()


async def test_an_embedding_node_reaches_the_same_jobs_without_the_wire():
    server = CoordinatorServer(CONFIG, LOCAL, TRUSTED)
    client = CoordinatorClient(await server.start(), TRUSTED, identity=OWN)
    await server.coordinator.join(join(0))
    (job,) = (await client.status(StatusRequest())).jobs
    assert job.job_id == "j"
    await client.close()
    await server.stop()
