"""Every refusal leaves a line of the log, or is counted in one; no noise hides those of others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from lender_bench import HOSTILE, Bench, is_closed
from membership import VERSION, progress
from trusted import (
    STRANGER,
    TOKEN,
    TRUSTED,
    beat,
    client_of,
    join,
    leave,
    node,
    refusals,
    serving,
    share,
)

from dataplane.arena.memfd import Arena
from dataplane.base.trace import LINES_A_MINUTE, Trace
from dataplane.coordinator.front import CoordinatorConfig
from dataplane.fetcher.process import Reads
from dataplane.model.errors import AccessDenied, ConfigError, PeerLost, VersionMismatch
from dataplane.model.records import Region
from dataplane.neighbours import entrance
from dataplane.node.door import Door
from dataplane.rpc import fetches, local, receiving, tasks
from dataplane.rpc.address import network_of
from dataplane.rpc.calls import CoordinatorClient
from dataplane.rpc.grpc_errors import error_of
from dataplane.rpc.membership import LedgerRequest, StatusRequest
from dataplane.rpc.services import COORDINATOR, coordinator_methods
from dataplane.security.security import Security
from dataplane.security.tokens import CALLS, TokenSource
from dataplane.store import url_policy
from dataplane.store.connect import Stores
from dataplane.store.url_policy import UrlPolicy

NOISE = LINES_A_MINUTE + 7
QUIET_FOR_S = 59.8


class Clock:
    """Log lines of a trace. What happens before `go` has happened nearly a minute ago."""

    def __init__(self) -> None:
        self._shift = -QUIET_FOR_S

    def __call__(self) -> float:
        return time.monotonic() + self._shift

    def go(self) -> None:
        self._shift = 0.0


def suppressed(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [one.getMessage() for one in caplog.records]
    return [line for line in lines if line.startswith("lines suppressed")]


def wait_told(caplog: pytest.LogCaptureFixture) -> str:
    """The line about suppressed ones, which comes although nothing else happens."""
    deadline = time.monotonic() + 60
    while not (lines := suppressed(caplog)):
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    (line,) = lines
    caplog.clear()
    return line


@asynccontextmanager
async def as_seen_from(host: str, address: str) -> AsyncIterator[str]:
    """An address behind which that one sees connections come from this host."""

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(target):
            while part := await source.read(1 << 16):
                target.write(part)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, port = address.rpartition(":")[::2]
        found = await asyncio.open_connection(there, int(port), local_addr=(host, 0))
        await asyncio.gather(copy(reader, found[1]), copy(found[0], writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    # gRPC may keep a connection for minutes after its client is closed.
    left = [task for task in asyncio.all_tasks() if task.get_coro().__name__ == "relay"]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def test_one_peer_does_not_hide_behind_the_refusals_of_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def refused(address: str, count: int) -> None:
        async with client_of(address, STRANGER) as stranger:
            for _ in range(count):
                with pytest.raises(AccessDenied):
                    await stranger.status(StatusRequest())

    async def main() -> None:
        async with (
            serving() as address,
            as_seen_from("127.0.0.7", address) as other,
            client_of(address, TRUSTED) as owner,
        ):
            for _ in range(2):  # another port is no other peer
                await refused(address, NOISE)
            assert len(refusals(caplog)) == LINES_A_MINUTE
            await refused(other, 1)
            (line,) = refusals(caplog)
            assert "peer=ipv4:127.0.0.7:" in line
            await owner.status(StatusRequest())

    asyncio.run(main())


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.9", "10.0.0.9"),
        ("::ffff:10.0.0.9", "10.0.0.9"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("", ""),
        ("unix", "unix"),
    ],
)
def test_whoever_has_one_address_of_a_network_has_all(host: str, network: str) -> None:
    assert network_of(host) == network


def test_a_coordinator_tells_how_many_refusals_it_has_suppressed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(receiving, "_trace", Trace("security", clock))

    async def main() -> None:
        async with serving() as address, client_of(address, STRANGER) as stranger:
            for _ in range(NOISE):
                with pytest.raises(AccessDenied):
                    await stranger.status(StatusRequest())
            clock.go()
            line = await asyncio.to_thread(wait_told, caplog)
            assert 'of="call refused" suppressed=7 by="127.0.0.1 (7)"' in line

    asyncio.run(main())


def test_a_lender_tells_how_many_refusals_it_has_suppressed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, run_mark: str
) -> None:
    clock = Clock()
    monkeypatch.setattr(entrance, "trace", Trace("security", clock))
    caplog.set_level(logging.INFO, "dataplane")
    with contextlib.closing(Bench()) as bench:
        for _ in range(NOISE):
            sock = bench.connect()
            sock.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n" * 4)
            assert is_closed(sock)
        clock.go()
        line = wait_told(caplog)
        assert f'of="data connection refused" suppressed=7 by="{HOSTILE} (7)"' in line


@contextmanager
def fetching(arena: Arena) -> Iterator[socket.socket]:
    """Our end of the socket of a fetcher that may read files below /data."""
    ours, theirs = local.pair()
    stores = Stores(1.0, policy=UrlPolicy(("/data",)))
    reads = Reads(theirs, {tasks.BLOCK_ARENA: arena}, lambda _: stores)

    def serve() -> None:
        with pytest.raises(PeerLost):
            reads.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield ours
    finally:
        ours.close()
        thread.join(60)
        theirs.close()
        reads.close()


def test_a_fetcher_tells_how_many_urls_it_has_refused_without_a_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(url_policy, "_trace", Trace("security", clock))
    with contextlib.closing(Arena.create("blocks", 1 << 20)) as arena, fetching(arena) as sock:
        for number in range(NOISE):
            url, into = f"file:///etc/{number}", Region(0, 10)
            order = fetches.ReadRange(number, url, 0, "", tasks.BLOCK_ARENA, into)
            local.send(sock, fetches.ToFetcher(order))
            local.receive(sock, fetches.FromFetcher)
        clock.go()
        assert 'of="url refused" suppressed=7 by="file:// (7)"' in wait_told(caplog)


def test_a_node_tells_how_many_connections_it_has_refused_without_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()

    async def main() -> None:
        name = f"dp-audit-{os.getpid()}-{time.monotonic_ns()}"
        door = Door(local.listen(name), lambda sock: sock, Trace("node", clock), 1000)
        door.open()
        with contextlib.ExitStack() as stack:
            for _ in range(16 + NOISE):  # so many may be silent
                stack.enter_context(local.connect(name, 10.0))
                for _ in range(20):
                    await asyncio.sleep(0)
            for each in list(door._visitor_of.values()):
                stack.callback(each.close)
            door.close()
        clock.go()
        while not suppressed(caplog):
            door.tick()
            await asyncio.sleep(0.01)

    asyncio.run(main())
    line = wait_told(caplog)
    assert 'of="connection refused" suppressed=7' in line
    assert f'by="process {os.getpid()} (7)"' in line


def test_a_process_that_ends_tells_what_it_has_suppressed(tmp_path: Path) -> None:
    script = (
        "from dataplane.base.trace import Trace, configure\n"
        "configure('info', 'text')\n"
        "trace = Trace('security')\n"
        f"for _ in range({NOISE}): trace.refused('call refused', by='10.0.0.9')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert len(done.stderr.splitlines()) == LINES_A_MINUTE + 1
    assert 'suppressed=7 by="10.0.0.9 (7)"' in done.stderr.splitlines()[-1]


CONFIG = CoordinatorConfig(version=VERSION, lease_s=60.0)
OTHER = Security(TokenSource("a test", ("another-token-0123456789",)))
LOCAL = "127.0.0.1:0"


def test_the_table_names_every_call_and_no_other():
    health = {f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch")}
    assert set(CALLS) == {method.path for method in coordinator_methods()} | health


@pytest.mark.parametrize(
    ("security", "why"),
    [(STRANGER, "no token was sent"), (OTHER, "the token is not the coordinator's")],
    ids=["no token", "another token"],
)
def test_a_stranger_on_loopback_is_refused_every_call_and_moves_no_generation(
    security, why, caplog
):
    calls = {
        "Join": lambda one: one.join(join(0, incarnation="a-stranger")),
        "Leave": lambda one: one.leave(leave()),
        "Heartbeat": lambda one: one.heartbeat(beat(progress())),
        "RegisterNode": lambda one: one.register_node(node()),
        "ShareManifest": lambda one: one.share_manifest(share()),
        "Status": lambda one: one.status(StatusRequest()),
        "Ledger": lambda one: one.ledger(LedgerRequest("j")),
    }

    async def main():
        async with (
            serving() as address,
            client_of(address, TRUSTED) as owner,
            client_of(address, security) as stranger,
        ):
            assert (await owner.join(join(0))).generation == 1
            for name, call in calls.items():
                with pytest.raises(AccessDenied, match=why) as caught:
                    await call(stranger)
                assert caught.value.call == name
                assert address in str(caught.value)
                assert "DATAPLANE_TOKEN" in str(caught.value)
                assert TOKEN not in str(caught.value)
                (line,) = refusals(caplog)
                assert "peer=" in line
                assert f"call={name}" in line
                assert why in line
                assert security.tokens is None or security.tokens.first() not in line
            (job,) = (await owner.status(StatusRequest())).jobs
            assert job.generation == 1
            assert [one.state for one in job.members] == ["joined"]

    asyncio.run(main())


def test_what_a_stranger_sends_is_not_parsed(caplog):
    async def main():
        async with serving() as address, grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary(f"/{COORDINATOR}/Join")
            for metadata in ((), (("authorization", TOKEN),), (("authorization", "Basic eA=="),)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(b"\xff" * 1000, metadata=metadata)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert len(refusals(caplog)) == 3

    asyncio.run(main())


@pytest.mark.parametrize("metadata", [(), TRUSTED.metadata()], ids=["stranger", "node"])
def test_a_call_that_does_not_exist_is_refused_with_one_line(metadata, caplog):
    async def main():
        async with serving() as address, grpc.aio.insecure_channel(address) as channel:
            for path in (
                f"/{COORDINATOR}/Steal",
                "/grpc.reflection.v1.Any/Info",
                f"/x/{'y' * 3000}",
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(path)(b"\xff" * 1000, metadata=metadata)
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
                assert isinstance(error_of(caught.value, address), VersionMismatch)
                (line,) = refusals(caplog)
                assert f"call={path.rpartition('/')[2][:256]} " in line
                assert "there is no such call" in line
                assert "peer=ipv4:127.0.0.1:" in line
                assert TOKEN not in line

    asyncio.run(main())


def test_what_a_node_sends_that_is_no_message_is_an_error_of_its_own_and_no_defect(caplog):
    async def main():
        async with serving() as address, grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary(f"/{COORDINATOR}/Heartbeat")
            with pytest.raises(grpc.aio.AioRpcError, match="not a HeartbeatRequest") as caught:
                await call(b"\xff" * 1000, metadata=TRUSTED.metadata())
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION

    asyncio.run(main())
    (line,) = [one.getMessage() for one in caplog.records]
    assert line.startswith("malformed message peer=ipv4:127.0.0.1:")
    assert "call=Heartbeat" in line


def test_a_probe_may_ask_whether_the_service_is_ready_and_nothing_more(caplog):
    async def main():
        async with serving() as address, grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=COORDINATOR)
            answer = await health.Check(request)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health.Watch(request).read()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert len(refusals(caplog)) == 1

    asyncio.run(main())


def test_a_coordinator_with_allowed_urls_has_no_jobs_over_others(caplog):
    async def main():
        allowing = msgspec.structs.replace(TRUSTED, allowed_urls=("s3://b/train",))
        async with serving(security=allowing) as address, client_of(address, TRUSTED) as client:
            await client.join(join(0, urls=("s3://b/train/*.parquet",)))
            for urls in (("s3://b/*.parquet",), ("s3://b/train/x", "file:///etc/passwd"), ()):
                with pytest.raises(AccessDenied, match="allowed_urls do not allow"):
                    await client.join(join(1, urls=urls))
            assert len(refusals(caplog)) == 3
            (job,) = (await client.status(StatusRequest())).jobs
            assert job.missing_dp_ranks == (1,)

    asyncio.run(main())


def test_a_private_socket_asks_for_nothing(tmp_path):
    async def main():
        async with (
            serving(f"unix:{tmp_path}/c.sock", STRANGER) as address,
            client_of(address, STRANGER) as client,
        ):
            assert (await client.join(join(0))).generation == 1

    asyncio.run(main())


def test_without_a_token_nothing_listens_on_tcp():
    async def main():
        with pytest.raises(ConfigError, match="no token to require from them"):
            async with serving(LOCAL, STRANGER):
                pass

    asyncio.run(main())


@pytest.mark.parametrize("address", ["10.0.0.1:7077", "head-node:7077", "[fe80::1]:7077"])
def test_a_client_sends_no_token_over_the_network_in_plain_text(address):
    with pytest.raises(ConfigError, match=r"plain text.*--insecure"):
        CoordinatorClient(address, TRUSTED)


def test_the_log_of_an_open_listener_says_so(caplog):
    async def main():
        async with serving("0.0.0.0:0", Security(TRUSTED.tokens, insecure=True)):
            pass

    asyncio.run(main())
    assert "open to the network without TLS" in caplog.text
    caplog.clear()
