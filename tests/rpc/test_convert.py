"""Values say what the proto files say, and every value survives the wire."""

import array
import inspect
import os
import socket
import struct
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane import config, errors, model
from dataplane.rpc import (
    convert,
    fetches,
    held,
    index_batches,
    lending,
    local,
    making,
    membership,
    messages,
    sharing,
    sockets,
    tasks,
)
from dataplane.rpc.v1 import (
    coordinator_pb2,
    fetcher_pb2,
    index_batches_pb2,
    local_pb2,
    making_pb2,
    neighbours_pb2,
    sharing_pb2,
    types_pb2,
    worker_pb2,
)

ROOMS = (membership, sharing, held, messages, tasks, fetches, lending, making)
VALUES = [
    cls
    for module in (*ROOMS, index_batches)
    for _, cls in inspect.getmembers(module, inspect.isclass)
    if issubclass(cls, msgspec.Struct) and cls.__module__ == module.__name__
] + [*convert._SHARED.values(), model.StorePause]


def test_every_message_of_the_protos_has_a_value_with_the_same_fields():
    values = {cls.__name__: cls for cls in VALUES}
    files = (types_pb2, coordinator_pb2, local_pb2, worker_pb2, fetcher_pb2, neighbours_pb2)
    for module in (*files, making_pb2, sharing_pb2, index_batches_pb2):
        for name, descriptor in module.DESCRIPTOR.message_types_by_name.items():
            if name in {"Error", "ColumnValue", "ColumnLength", "ColumnDtype", "Steps"}:
                continue
            oneof = {f.name for f in descriptor.fields if f.containing_oneof is not None}
            in_body = {f.name for o in descriptor.oneofs if o.name == "body" for f in o.fields}
            expected = {f.name for f in descriptor.fields} - in_body
            if in_body:
                expected |= {"body"}
            found = set(convert._field_names(values[name]))
            assert found == expected, (name, oneof)


names = st.text(max_size=20)
u63 = st.integers(0, 2**63 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
images = st.builds(
    model.ImageSpec,
    column=names,
    height=u63,
    width=u63,
    cut=st.sampled_from(model.Cut),
    resize=st.lists(u63).map(tuple),
    scale=st.lists(finite).map(tuple),
    flip=finite,
    dtype=names,
    mean=st.lists(finite).map(tuple),
    decode=st.sampled_from(model.Decoding),
)
of_columns = st.builds(
    model.ColumnOptions,
    columns=st.lists(names).map(tuple),
    lists=st.sampled_from(model.ListPolicy),
    fill_null=st.lists(st.tuples(names, finite)).map(tuple),
    pad_value=st.lists(st.tuples(names, finite)).map(tuple),
    pad_value_all=st.none() | finite,
    max_length=st.lists(st.tuples(names, u63)).map(tuple),
    max_length_all=u63,
    truncation_side=st.sampled_from(model.TruncationSide),
    codes=st.lists(names).map(tuple),
    dtype=st.lists(st.tuples(names, names)).map(tuple),
    stack=st.lists(st.builds(model.StackSpec, names, st.lists(names).map(tuple), names)).map(tuple),
)
specs = st.builds(
    config.JobSpec,
    fingerprint=names,
    seed=st.integers(0, 2**64 - 1),
    shuffle=st.booleans(),
    lanes=u63,
    window=u63,
    global_batch=u63,
    end=st.sampled_from(model.End),
    transforms=st.lists(images).map(tuple),
    column_options=of_columns,
)


@given(spec=specs)
def test_a_spec_survives_the_wire_with_its_digest(spec):
    copy = convert.decode(config.JobSpec, convert.encode(spec))
    assert copy == spec
    assert copy.digest() == spec.digest()


@given(lanes=st.none() | u63, steps=st.lists(u63), request_id=u63)
def test_envelopes_keep_their_bodies_and_absent_fields_stay_absent(lanes, steps, request_id):
    job = messages.OpenJob(
        "j", "i", "m", messages.DatasetSource(("u",)), model.Topology(), lanes=lanes
    )
    release = messages.Release("j", tuple(steps))
    for body in (job, release):
        sent = messages.ToNode(request_id, body)
        assert convert.decode(messages.ToNode, convert.encode(sent)) == sent


u32 = st.integers(0, 2**32 - 1)


@given(first=u63, stride=st.integers(1, 2**40), sizes=st.lists(st.tuples(u32, u32), max_size=9))
def test_batches_keep_their_steps_rows_and_padding(first, stride, sizes):
    batches = tuple(messages.Batch(first + i * stride, *size) for i, size in enumerate(sizes))
    slab = messages.Slab(1, 2, model.Region(0, 64), batches, b"")
    assert convert.decode(messages.Slab, convert.encode(slab)) == slab


def test_an_error_crosses_as_class_message_and_nouns():
    sent = messages.FromNode(1, errors.TruncatedRead("short", shard="s3://b/k", expected=7))
    back = convert.decode(messages.FromNode, convert.encode(sent)).body
    assert type(back) is errors.TruncatedRead
    assert str(back) == "short"
    assert back.shard == "s3://b/k"
    assert back.expected == 7


def test_an_error_with_what_utf8_has_not_crosses_as_well():
    sent = messages.FromNode(1, errors.FunctionError("not \udcff", shard="a\udcff"))
    back = convert.decode(messages.FromNode, convert.encode(sent)).body
    assert (str(back), back.shard) == ("not \\udcff", "a\udcff")


def test_bytes_that_are_no_message_are_refused():
    with pytest.raises(errors.ConfigError, match="not a ToNode message"):
        convert.decode(messages.ToNode, b"\xff\xff\xff\xff")
    with pytest.raises(errors.ConfigError, match="empty ToNode"):
        convert.decode(messages.ToNode, b"")


def test_a_descriptor_travels_beside_its_message():
    left, right = sockets.pair()
    read_end, write_end = os.pipe()
    local.send(left, tasks.Task(tasks.AttachArena(3)), (write_end,))
    os.close(write_end)
    task, descriptors = local.receive(right, tasks.Task)
    assert task.body == tasks.AttachArena(3)
    os.write(descriptors[0], b"x")
    assert os.read(read_end, 1) == b"x"
    os.close(descriptors[0])
    os.close(read_end)
    left.close()
    with pytest.raises(errors.PeerLost):
        local.receive(right, tasks.Task)
    right.close()


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_message_that_is_larger_than_a_packet_comes_whole_with_its_descriptors():
    left, right = sockets.pair()
    before = _open_descriptors()
    wide = tasks.Task(tasks.OpenDataset(1, "parquet", os.urandom(10 * sockets.PACKET_BYTES_MAX)))
    read_end, write_end = os.pipe()
    for _ in range(3):
        local.send(left, wide, (write_end,))
        local.send(left, tasks.Task(tasks.AttachArena(3)))
    for _ in range(3):
        found, descriptors = local.receive(right, tasks.Task)
        assert found == wide
        assert len(descriptors) == 1
        os.close(descriptors[0])
        assert local.receive(right, tasks.Task) == (tasks.Task(tasks.AttachArena(3)), ())
    os.close(read_end)
    os.close(write_end)
    assert _open_descriptors() == before
    left.close()
    right.close()


def test_a_large_message_is_read_from_sealed_memory_alone():
    """Reading any other file may block, and unsealed memory may change during the read."""
    left, right = sockets.pair()
    said = struct.pack("<BQ", 0, 8)
    read_end, write_end = os.pipe()
    unsealed = os.memfd_create("unsealed")
    os.write(unsealed, bytes(8))
    before = _open_descriptors()
    for descriptors in ((read_end,), (unsealed,), ()):
        fds = array.array("i", descriptors)
        left.sendmsg([said], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if descriptors else [])
        with pytest.raises(errors.ConfigError, match="large message"):
            local.receive(right, tasks.Task)
    assert _open_descriptors() == before
    for fd in (read_end, write_end, unsealed):
        os.close(fd)
    left.close()
    right.close()


def test_a_message_over_the_limit_is_refused_before_it_is_sent():
    left, right = sockets.pair()
    huge = tasks.Task(tasks.OpenDataset(1, "parquet", bytes(local.MESSAGE_BYTES_MAX)))
    with pytest.raises(errors.ConfigError, match="over the limit"):
        local.send(left, huge)
    left.close()
    right.close()


def test_no_listener_is_a_lost_peer_and_a_taken_name_is_reported():
    with pytest.raises(errors.PeerLost, match="no node listens"):
        sockets.connect("dataplane-test-nobody", 1.0)
    listener = sockets.listen(f"dataplane-test-{os.getpid()}")
    with pytest.raises(FileExistsError):
        sockets.listen(f"dataplane-test-{os.getpid()}")
    client = sockets.connect(f"dataplane-test-{os.getpid()}", 1.0)
    assert sockets.peer_credentials(client)[1] == os.getuid()
    client.close()
    listener.close()


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
    """The main thread of a trainer has nobody to wait for."""
    pauses = []
    monkeypatch.setattr(convert.time, "sleep", pauses.append)
    sources = tuple(
        messages.SourceAsked(f"s{n}", messages.DatasetSource(("x",))) for n in range(1000)
    )
    wire, read = convert.encode(messages.MixtureAsked(sources)), []
    read.append(convert.decode(messages.MixtureAsked, wire))
    assert not pauses
    reader = threading.Thread(
        target=lambda: read.append(convert.decode(messages.MixtureAsked, wire))
    )
    reader.start()
    reader.join()
    assert len(pauses) == 1000 / convert._PARTS_A_TURN
    assert read == [messages.MixtureAsked(sources)] * 2
