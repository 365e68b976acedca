"""A peer without a token can make a coordinator do next to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket

import grpc
import psutil
import pytest
from certificates import Authority
from fleet import Service
from grpc_health.v1 import health_pb2
from membership import VERSION
from trusted import STRANGER, TOKEN, TRUSTED, client_of, refusals, serving

from dataplane.base.trace import LINES_A_MINUTE
from dataplane.model import config
from dataplane.model.errors import AccessDenied
from dataplane.rpc.calls import CoordinatorClient
from dataplane.rpc.membership import StatusRequest
from dataplane.rpc.services import COORDINATOR, REQUEST_BYTES_MAX
from dataplane.security.security import Security, security_of
from dataplane.security.tls import Certificates

FLOOD = 10_000
SMALL_FLOOD, SMALL_FILES = 600, 320
NOTHING = dict.fromkeys(
    ("token_file", "tls_cert", "tls_key", "tls_ca", "tls_peers", "jwt_key", "allowed_urls"), ""
) | {"insecure": False}
BIG = (("grpc.max_send_message_length", -1), ("grpc.max_metadata_size", 1 << 24))


def test_a_message_of_a_stranger_is_not_received(caplog):
    """It could be of any size: the answer comes without it."""

    async def main():
        async with (
            serving() as address,
            grpc.aio.insecure_channel(address, options=BIG) as channel,
        ):
            call = channel.unary_unary(f"/{COORDINATOR}/Join")
            body = bytes(2 * REQUEST_BYTES_MAX)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(body, timeout=30)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            # With the token its size counts.
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(body, timeout=30, metadata=TRUSTED.metadata())
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert len(refusals(caplog)) == 1

    asyncio.run(main())


def test_a_token_of_a_megabyte_and_frames_of_nonsense_disturb_nobody(caplog):
    async def main():
        async with (
            serving() as address,
            grpc.aio.insecure_channel(address, options=BIG) as channel,
            client_of(address, TRUSTED) as owner,
        ):
            call = channel.unary_unary(f"/{COORDINATOR}/Status")
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"", timeout=30, metadata=(("authorization", "x" * (1 << 20)),))
            host, _, port = address.rpartition(":")
            preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            frame = b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"  # of 16 MiB
            for nonsense in (os.urandom(5000), preface + frame + bytes(50_000), b"GET / HTTP/1.1"):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(nonsense)
                if nonsense.startswith(b"GET"):
                    writer.write_eof()
                async with asyncio.timeout(60):
                    with contextlib.suppress(ConnectionError):
                        while await reader.read(1 << 16):
                            pass
                writer.close()
            assert (await owner.status(StatusRequest())).version == VERSION

    asyncio.run(main())
    caplog.clear()


def test_a_health_check_needs_no_message_and_none_is_received(tmp_path, monkeypatch):
    """Of 3 MiB each, so that a hundred would take 300 MiB; and what is no message is as good."""
    served = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))

    async def checked(address, process):
        async with grpc.aio.insecure_channel(address, options=BIG) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            before = process.memory_info().rss
            big = bytes(3 << 20)
            answers = await asyncio.gather(*(check(big, timeout=60) for _ in range(100)))
            answers += [await check(b"\xff" * 100, timeout=30)]
            assert set(answers) == {served.SerializeToString()}
            assert process.memory_info().rss - before < 64 << 20

    log = tmp_path / "log"
    with Service("--coordinator", "--listen", "127.0.0.1:0", log=log) as service:
        asyncio.run(checked(service.address, psutil.Process(service.process.pid)))
        assert service.stop() == 0
    assert len(log.read_text().splitlines()) == 1  # it drains


def test_messages_that_are_none_write_few_lines_that_name_the_peer(caplog):
    """From peers with a token, too; and a message of a million empty parts takes no gigabyte."""

    async def main():
        async with (
            serving() as address,
            grpc.aio.insecure_channel(address, options=BIG) as channel,
            client_of(address, TRUSTED) as owner,
        ):
            for name in ("Status", "Ledger", "Change", "Join"):
                call = channel.unary_unary(f"/{COORDINATOR}/{name}")
                for _ in range(50):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call(b"\xff" * 100, timeout=30, metadata=TRUSTED.metadata())
                    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            lines = [one.getMessage() for one in caplog.records]
            assert len(lines) == LINES_A_MINUTE
            assert all(line.startswith("malformed message peer=ipv4:127.0.0.1:") for line in lines)
            call = channel.unary_unary(f"/{COORDINATOR}/Heartbeat")
            empty_members = b"\x12\x00" * (1 << 18)
            with pytest.raises(grpc.aio.AioRpcError, match="more than 131072 elements"):
                await call(empty_members, timeout=60, metadata=TRUSTED.metadata())
            assert (await owner.status(StatusRequest())).version == VERSION

    asyncio.run(main())
    assert "Traceback" not in caplog.text


def test_failed_tls_handshakes_are_told_with_their_peer_and_their_number(tmp_path, caplog):
    tls = Certificates(Authority.made().write(tmp_path, "server"))

    async def main():
        async with serving(security=Security(TRUSTED.tokens, tls=tls)) as address:
            host, _, port = address.rpartition(":")
            ports = set()
            for _ in range(60):
                reader, writer = await asyncio.open_connection(host, int(port))
                ports.add(writer.get_extra_info("sockname")[1])
                writer.write(b"no handshake at all " * 20)
                with contextlib.suppress(ConnectionError):
                    while await reader.read(1 << 16):
                        pass
                writer.close()
            await asyncio.wait_for(line_written.wait(), 60)
            return ports

    class Written(logging.Handler):
        def emit(self, _):
            loop.call_soon_threadsafe(line_written.set)

    with asyncio.Runner() as runner:
        loop, line_written, written = runner.get_loop(), asyncio.Event(), Written()
        logging.getLogger("dataplane.security").addHandler(written)
        try:
            ports = runner.run(main())
        finally:
            logging.getLogger("dataplane.security").removeHandler(written)
    line = caplog.records[0].getMessage()
    assert line.startswith("connection without a call peer=127.0.0.1:")
    facts = dict(part.partition("=")[::2] for part in line.split())
    assert int(facts["peer"].rpartition(":")[2]) in ports
    assert 20 < int(facts["count"]) <= 60
    assert "TLS handshake failed" in line


def test_a_peer_that_is_refused_a_thousand_times_writes_few_lines(caplog):
    async def main():
        async with (
            serving() as address,
            client_of(address, STRANGER) as stranger,
            client_of(address, TRUSTED) as owner,
        ):
            for _ in range(300):
                with pytest.raises(AccessDenied):
                    await stranger.status(StatusRequest())
            assert (await owner.status(StatusRequest())).version == VERSION
            assert len(refusals(caplog)) == LINES_A_MINUTE

    asyncio.run(main())


def test_silent_and_slow_connections_keep_nobody_from_a_call():
    """Some send nothing, some the beginning of a connection, one byte at a time."""

    async def main():
        async with serving() as address, client_of(address, TRUSTED) as owner:
            host, _, port = address.rpartition(":")
            with contextlib.ExitStack() as stack:
                slow = [
                    stack.enter_context(socket.create_connection((host, int(port))))
                    for _ in range(200)
                ]
                for byte in b"PRI * HT":
                    for sock in slow[::2]:
                        sock.send(bytes([byte]))
                    assert (await owner.status(StatusRequest())).version == VERSION

    asyncio.run(main())


def test_a_flood_of_connections_costs_those_that_are_connected_nothing(tmp_path, monkeypatch):
    """As many as take all the places, of one host. A small version of the next test: it does not
    wait until the coordinator closes them.
    """
    limited = ("sh", "-c", f'ulimit -n {SMALL_FILES}; exec "$@"', "sh")
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("DATAPLANE_TOKEN", TOKEN)
    given = ("--coordinator", "--listen", "127.0.0.1:0")
    with (
        Service(*given, log=tmp_path / "log", within=limited) as service,
        contextlib.ExitStack() as stack,
    ):
        process = psutil.Process(service.process.pid)
        host, _, port = service.address.rpartition(":")

        async def main():
            async with client_of(service.address, TRUSTED) as owner:
                assert (await owner.status(StatusRequest())).version == config.VERSION
                before = process.memory_info().rss
                for _ in range(SMALL_FLOOD):
                    stack.enter_context(socket.create_connection((host, int(port)), 60))
                for _ in range(20):
                    await owner.status(StatusRequest())
                assert process.num_fds() < SMALL_FILES - 32
                assert process.memory_info().rss - before < 64 << 20
                stack.close()
            # Once they are gone, everybody is let in.
            async with client_of(service.address, TRUSTED) as another:
                await another._patiently("status", StatusRequest(), 60.0)

        asyncio.run(main())
        assert service.stop() == 0
    assert len((tmp_path / "log").read_text()) < 20_000


@pytest.mark.slow
def test_ten_thousand_connections_keep_no_node_away_for_long(tmp_path, monkeypatch):
    """Of one host, all at once; and the coordinator does not grow with them. While they take all
    the places, a new call may have to be repeated, as nodes do.
    """
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < FLOOD + 1000:
        pytest.skip("this machine allows too few open files")
    with (
        Service("--coordinator", "--listen", "127.0.0.1:0", log=tmp_path / "log") as service,
        contextlib.ExitStack() as stack,
    ):
        resource.setrlimit(resource.RLIMIT_NOFILE, (FLOOD + 1000, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        process = psutil.Process(service.process.pid)
        host, _, port = service.address.rpartition(":")
        before = process.memory_info().rss
        for _ in range(FLOOD):
            stack.enter_context(socket.create_connection((host, int(port)), 60))
        given = {**NOTHING, "state_dir": str(tmp_path / "state")}
        found = security_of(given, {}, listens=False)

        async def asked():
            client = CoordinatorClient(service.address, found, patience_s=120.0)
            try:
                await client._patiently("status", StatusRequest(), 120.0)
            finally:
                await client.close()

        asyncio.run(asked())
        assert process.memory_info().rss - before < 1 << 30
    assert len((tmp_path / "log").read_text()) < 20_000
