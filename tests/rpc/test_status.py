"""Every error survives a gRPC call: real server, real client."""

import asyncio
import socket
import struct

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trusted import OWN, TRUSTED, client_of, join

from dataplane.model import errors
from dataplane.rpc import status
from dataplane.rpc.calls import CoordinatorClient
from dataplane.rpc.membership import StatusRequest
from dataplane.rpc.serve import GrpcServer
from dataplane.rpc.v1 import types_pb2

CLASSES = sorted(errors._tree(errors.DataplaneError).items())


class Refusing:
    """Refuses every join with the error it was given."""

    def __init__(self):
        self.error = None

    async def join(self, _):
        raise self.error

    register_node = heartbeat = leave = status = ledger = change = share_manifest = join


def refused(every):
    """The errors that a client receives for these errors."""

    async def main():
        service, server, found = Refusing(), GrpcServer("127.0.0.1:0", TRUSTED), []
        client = CoordinatorClient(
            await server.start(service), TRUSTED, patience_s=0.0, identity=OWN
        )
        for error in every:
            service.error = error
            with pytest.raises(errors.DataplaneError) as caught:
                await client.join(join(0))
            found.append(caught.value)
        await client.close()
        await server.stop(0.0)
        return found

    return asyncio.run(main())


def test_every_class_arrives_as_itself():
    sent = [
        cls("what, where, what to do: ü", shard="s3://b/k", offset=2**60, at=None)
        for _, cls in CLASSES
    ]
    for (name, cls), found in zip(CLASSES, refused(sent), strict=True):
        # A service that says it is closed is, for its clients, a peer that went away.
        assert type(found) is (errors.PeerLost if name == "ClosedError" else cls)
        if name != "ClosedError":
            assert str(found) == "what, where, what to do: ü"
            assert found.nouns == {"shard": "s3://b/k", "offset": 2**60, "at": None}


def test_an_error_larger_than_headers_arrives_shortened():
    nouns = {f"noun{number}": "ü" * 5000 for number in range(100)}
    (found,) = refused(
        [errors.SpecMismatch("start " + "x" * 100_000 + " end", field="seed", **nouns)]
    )
    assert type(found) is errors.SpecMismatch
    assert str(found).startswith("start xxx")
    assert str(found).endswith("xxx end")
    assert found.nouns["field"] == "seed"


@given(
    st.text(max_size=3000), st.dictionaries(st.text(max_size=9), st.text(max_size=900), max_size=12)
)
def test_the_trailer_fits_into_headers(message, nouns):
    error = errors.ConfigError(message)
    error.nouns = nouns
    ((key, wire),) = status.trailer_of(error)
    assert key == "dataplane-error-bin"
    assert len(wire) <= 4096
    assert types_pb2.Error.FromString(wire).name == "ConfigError"


def test_codes_say_who_acts():
    codes = {name: status.code_of(cls("")).name for name, cls in CLASSES}
    assert codes["SpecMismatch"] == codes["VersionMismatch"] == "FAILED_PRECONDITION"
    assert codes["LeaseFenced"] == codes["LeaseExpired"] == "ABORTED"
    assert codes["PeerLost"] == codes["StoreUnavailable"] == "UNAVAILABLE"
    assert codes["TruncatedRead"] == codes["SchemaMismatch"] == "DATA_LOSS"
    assert codes["DataplaneError"] == "INTERNAL"


def failure(code, trailer=()):
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailer), "why")


def test_failures_without_an_error_of_ours_are_about_the_peer():
    kinds = {
        grpc.StatusCode.UNAVAILABLE: errors.PeerLost,
        grpc.StatusCode.CANCELLED: errors.PeerLost,
        grpc.StatusCode.DEADLINE_EXCEEDED: errors.PeerLost,
        grpc.StatusCode.UNIMPLEMENTED: errors.VersionMismatch,
        grpc.StatusCode.RESOURCE_EXHAUSTED: errors.ConfigError,
        grpc.StatusCode.INTERNAL: errors.DataplaneError,
    }
    for code, kind in kinds.items():
        found = status.error_of(failure(code, [(status.ERROR_KEY, b"\xff")]), "host:1")
        assert type(found) is kind
        assert "host:1" in str(found)
        assert "why" in str(found)
        assert found.nouns["peer"] == "host:1"


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
def test_a_server_without_places_hangs_up_and_the_error_says_that_too(is_reset):
    """It is a reset if the client was faster, and has sent something."""

    async def hang_up(reader, writer):
        await reader.read(1 << 16)
        if is_reset:
            now = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
        writer.close()

    async def main():
        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        async with server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with client_of(address, TRUSTED) as client:
                with pytest.raises(errors.PeerLost, match="no place for another connection"):
                    await client.status(StatusRequest())

    asyncio.run(main())
