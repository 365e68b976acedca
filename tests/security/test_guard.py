"""Who may make which call over TCP, and what a refused one leaves behind: one line, nothing else."""

from __future__ import annotations

import asyncio

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
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

from dataplane.coordinator.front import CoordinatorConfig
from dataplane.model.errors import AccessDenied, ConfigError, VersionMismatch
from dataplane.rpc.calls import CoordinatorClient
from dataplane.rpc.membership import LedgerRequest, StatusRequest
from dataplane.rpc.services import COORDINATOR, coordinator_methods
from dataplane.rpc.status import error_of
from dataplane.security.calls import CALLS
from dataplane.security.security import Security
from dataplane.security.tokens import TokenSource

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
