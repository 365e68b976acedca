"""Every error survives a gRPC call: real server, real client."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

import grpc
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trusted import OWN, TRUSTED, client_of, join

from dataplane.model import errors
from dataplane.model.config import JobSpec
from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnOptions, Topology
from dataplane.rpc import convert, grpc_errors, membership, sharing
from dataplane.rpc.bounds import VALUES_MAX
from dataplane.rpc.calls import CoordinatorClient
from dataplane.rpc.membership import StatusRequest
from dataplane.rpc.serve import GrpcServer
from dataplane.rpc.v1 import coordinator_pb2, sharing_pb2, types_pb2

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
    ((key, wire),) = grpc_errors.trailer_of(error)
    assert key == "dataplane-error-bin"
    assert len(wire) <= 4096
    assert types_pb2.Error.FromString(wire).name == "ConfigError"


def test_codes_say_who_acts():
    codes = {name: grpc_errors.code_of(cls("")).name for name, cls in CLASSES}
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
        found = grpc_errors.error_of(failure(code, [(grpc_errors.ERROR_KEY, b"\xff")]), "host:1")
        assert type(found) is kind
        assert "host:1" in str(found)
        assert "why" in str(found)
        assert found.nouns["peer"] == "host:1"


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
async def test_a_server_without_places_hangs_up_and_the_error_says_that_too(is_reset):
    """The connection is reset if the client was faster, and has sent something."""

    async def hang_up(reader, writer):
        try:
            await reader.read(1 << 16)
            if is_reset:
                now = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
        finally:
            writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with client_of(address, TRUSTED) as client:
            with pytest.raises(errors.PeerLost, match="no place for another connection"):
                await client.status(StatusRequest())


VALUES = [
    cls
    for module in (membership, sharing)
    for cls in vars(module).values()
    if isinstance(cls, type)
    and issubclass(cls, msgspec.Struct)
    and cls.__module__ == module.__name__
] + [*convert._SHARED.values()]


def test_every_message_of_the_protos_has_a_value_with_the_same_fields():
    values = {cls.__name__: cls for cls in VALUES}
    for module in (types_pb2, coordinator_pb2, sharing_pb2):
        for name, descriptor in module.DESCRIPTOR.message_types_by_name.items():
            if name == "Error":
                continue
            expected = {field.name for field in descriptor.fields}
            assert set(convert._field_names(values[name])) == expected, name


def test_a_spec_of_too_many_values_is_refused_before_it_is_made():
    columns = ColumnOptions(("",) * (VALUES_MAX + 1))
    spec = JobSpec("f", column_options=columns)
    job = membership.JoinRequest("j", "d", spec, Topology(), "i", "m", "n", 1)
    with pytest.raises(ConfigError, match="a JobSpec message has more than 262144 values"):
        convert.decode(membership.JoinRequest, convert.encode(job))


def test_the_nodes_of_a_job_survive_the_wire_and_show_no_key():
    nodes = (membership.NeighbourNode("n0", "10.0.0.1:7078", 1 << 40),)
    told = membership.JobNodes("j", 3, 2**64 - 1, b"\xffkey" * 8, nodes)
    for message in (
        membership.JoinResponse(3, 1.0, told),
        membership.HeartbeatResponse((), (told,)),
        membership.JoinResponse(3, 1.0),
    ):
        assert convert.decode(type(message), convert.encode(message)) == message
        assert "key" not in f"{message!r} {message}"


def test_the_nodes_of_a_job_are_put_into_a_message_once_for_all_who_get_them():
    told = [membership.JobNodes("j", 1, number) for number in range(convert._FOR_MANY_MAX + 1)]
    for _ in range(2):
        for one in (*told, membership.JobNodes("j", 1, 0)):
            answer = membership.HeartbeatResponse((), (one, one))
            assert convert.decode(type(answer), convert.encode(answer)) == answer


def test_a_thread_that_reads_a_long_list_lets_others_run(monkeypatch) -> None:
    """The main thread has nobody to wait for."""
    pauses = []
    monkeypatch.setattr(convert.time, "sleep", pauses.append)
    members = tuple(
        membership.MemberStatus(f"m{n}", Topology(), "n", "joined") for n in range(1000)
    )
    job = membership.JobStatus("j", "d", JobSpec("f"), "", 1, "running", 1, 1, (), members)
    wire, read = convert.encode(job), []
    read.append(convert.decode(membership.JobStatus, wire))
    assert not pauses
    reader = threading.Thread(
        target=lambda: read.append(convert.decode(membership.JobStatus, wire))
    )
    reader.start()
    reader.join()
    assert len(pauses) == 1000 / convert._PARTS_A_TURN
    assert read == [job] * 2
