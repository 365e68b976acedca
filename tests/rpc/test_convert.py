"""Values say what the proto files say, and every value survives a call of the coordinator."""

import threading

import msgspec
import pytest

from dataplane.model.config import JobSpec
from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnOptions, Topology
from dataplane.rpc import convert, held, membership, sharing
from dataplane.rpc.bounds import VALUES_MAX
from dataplane.rpc.v1 import coordinator_pb2, sharing_pb2, types_pb2

VALUES = [
    cls
    for module in (membership, sharing, held)
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
