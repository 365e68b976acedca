"""Every message survives its socket, and whatever else comes is an error of ours."""

import array
import contextlib
import inspect
import os
import random
import socket
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openings import opening

from dataplane.model import config, errors, records
from dataplane.model.changes import TakenDocument
from dataplane.rpc import (
    bounds,
    codec,
    convert,
    fetches,
    lending,
    local,
    membership,
    messages,
    tasks,
)

ROOMS = (messages, tasks, fetches, lending)
MESSAGES = [
    cls
    for module in ROOMS
    for _, cls in inspect.getmembers(module, inspect.isclass)
    if issubclass(cls, msgspec.Struct) and cls.__module__ == module.__name__
]

names = st.text(max_size=20)
u63 = st.integers(0, 2**63 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
images = st.builds(
    records.ImageSpec,
    column=names,
    height=u63,
    width=u63,
    cut=st.sampled_from(records.Cut),
    resize=st.lists(u63).map(tuple),
    scale=st.lists(finite).map(tuple),
    flip=finite,
    dtype=names,
    mean=st.lists(finite).map(tuple),
    decode=st.sampled_from(records.Decoding),
)
of_columns = st.builds(
    records.ColumnOptions,
    columns=st.lists(names).map(tuple),
    lists=st.sampled_from(records.ListPolicy),
    fill_null=st.lists(st.tuples(names, finite)).map(tuple),
    pad_value=st.lists(st.tuples(names, finite)).map(tuple),
    pad_value_all=st.none() | finite,
    max_length=st.lists(st.tuples(names, u63)).map(tuple),
    max_length_all=u63,
    truncation_side=st.sampled_from(records.TruncationSide),
    codes=st.lists(names).map(tuple),
    dtype=st.lists(st.tuples(names, names)).map(tuple),
    stack=st.lists(st.builds(records.StackSpec, names, st.lists(names).map(tuple), names)).map(
        tuple
    ),
)
specs = st.builds(
    config.JobSpec,
    fingerprint=names,
    seed=st.integers(0, 2**64 - 1),
    shuffle=st.booleans(),
    lanes=u63,
    window=u63,
    global_batch=u63,
    end=st.sampled_from(records.End),
    transforms=st.lists(images).map(tuple),
    column_options=of_columns,
)


@given(spec=specs)
def test_a_spec_survives_both_wires_with_its_digest(spec):
    job = membership.JoinRequest("j", "d", spec, records.Topology(), "i", "m", "n", 1)
    call = convert.decode(membership.JoinRequest, convert.encode(job))
    for copy in (codec.decode(config.JobSpec, codec.encode(spec)), call.spec):
        assert copy == spec
        assert copy.digest() == spec.digest()


@given(mixture=st.none() | st.just(messages.MixtureAsked(())), steps=st.lists(u63), request_id=u63)
def test_envelopes_keep_their_bodies_and_absent_fields_stay_absent(mixture, steps, request_id):
    job = opening("u", mixture=mixture)
    release = messages.Release("j", tuple(steps))
    for body in (job, release):
        sent = messages.ToNode(request_id, body)
        assert codec.decode(messages.ToNode, codec.encode(sent)) == sent


u32 = st.integers(0, 2**32 - 1)


@given(first=u63, stride=st.integers(1, 2**40), sizes=st.lists(st.tuples(u32, u32), max_size=9))
def test_batches_keep_their_steps_rows_and_padding(first, stride, sizes):
    batches = tuple(messages.Batch(first + i * stride, *size) for i, size in enumerate(sizes))
    slab = messages.Slab(1, 2, records.Region(0, 64), batches, b"")
    assert codec.decode(messages.Slab, codec.encode(slab)) == slab


def test_an_error_crosses_as_class_message_and_nouns():
    sent = messages.FromNode(1, errors.TruncatedRead("short", shard="s3://b/k", expected=7))
    back = codec.decode(messages.FromNode, codec.encode(sent)).body
    assert type(back) is errors.TruncatedRead
    assert str(back) == "short"
    assert back.shard == "s3://b/k"
    assert back.expected == 7


def test_an_error_with_what_utf8_has_not_crosses_as_well():
    sent = messages.FromNode(1, errors.FunctionError("not \udcff", shard="a\udcff"))
    back = codec.decode(messages.FromNode, codec.encode(sent)).body
    assert (str(back), back.shard) == ("not \\udcff", "a\udcff")


def test_bytes_that_are_no_message_are_refused():
    with pytest.raises(errors.ConfigError, match="not a ToNode message"):
        codec.decode(messages.ToNode, b"\xff\xff\xff\xff")
    with pytest.raises(errors.ConfigError, match="not a ToNode message"):
        codec.decode(messages.ToNode, b"")


def test_a_descriptor_travels_beside_its_message():
    left, right = local.pair()
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
    left, right = local.pair()
    before = _open_descriptors()
    wide = tasks.Task(tasks.OpenDataset(1, "parquet", os.urandom(10 * local.PACKET_BYTES_MAX)))
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
    left, right = local.pair()
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
    left, right = local.pair()
    huge = tasks.Task(tasks.OpenDataset(1, "parquet", bytes(local.MESSAGE_BYTES_MAX)))
    with pytest.raises(errors.ConfigError, match="over the limit"):
        local.send(left, huge)
    left.close()
    right.close()


def test_no_listener_is_a_lost_peer_and_a_taken_name_is_reported():
    with pytest.raises(errors.PeerLost, match="no node listens"):
        local.connect("dataplane-test-nobody", 1.0)
    listener = local.listen(f"dataplane-test-{os.getpid()}")
    with pytest.raises(FileExistsError):
        local.listen(f"dataplane-test-{os.getpid()}")
    client = local.connect(f"dataplane-test-{os.getpid()}", 1.0)
    assert local.peer_credentials(client)[1] == os.getuid()
    client.close()
    listener.close()


def test_every_message_can_be_read():
    for cls in MESSAGES:
        with pytest.raises(errors.ConfigError, match=f"not a {cls.__name__} message"):
            codec.decode(cls, b"\xa1x")


HELLO = b"\x93\xa6ToNode\x01\x94\xa5Hello\xa50.1.0\x06\x07"
WELCOME = b"\x93\xa8FromNode\x01\x95\xa7Welcome\xa50.1.0\x06\xa1n\xa0"
ANOTHER = b'\x93\xa8FromNode\x01\x94\xa9SentError\xafVersionMismatch\xa3old\x81\xa5found\xa7"0.1.0"'


def test_processes_of_all_versions_can_greet_each_other():
    """These bytes never change: fields that a version adds come behind them."""
    hello = messages.ToNode(1, messages.Hello("0.1.0", 6, 7))
    assert codec.encode(hello) == HELLO
    assert codec.decode(messages.ToNode, HELLO) == hello
    welcome = messages.FromNode(1, messages.Welcome("0.1.0", 6, "n"))
    assert codec.encode(welcome) == WELCOME
    assert codec.decode(messages.FromNode, WELCOME) == welcome
    error = errors.VersionMismatch("old", found="0.1.0")
    assert codec.encode(messages.FromNode(1, error)) == ANOTHER
    for wire, name in ((HELLO, b"\x94\xa5Hello"), (WELCOME, b"\x95\xa7Welcome")):
        count = name[:1]
        newer = wire.replace(name, bytes([count[0] + 1]) + name[1:]) + b"\x92\x01\xa3new"
        cls = messages.ToNode if wire is HELLO else messages.FromNode
        assert codec.decode(cls, newer) == codec.decode(cls, wire)
    newer = ANOTHER.replace(b"\x94\xa9", b"\x95\xa9") + b"\xc3"
    got = codec.decode(messages.FromNode, newer).body
    assert isinstance(got, errors.VersionMismatch)
    assert (str(got), got.found) == ("old", "0.1.0")


def _next_slab(*fields):
    return msgspec.msgpack.encode(["ToNode", 5, ["NextSlab", *fields]])


@pytest.mark.parametrize(
    "wire",
    [
        _next_slab(-1),
        _next_slab(1, -(2**63)),
        _next_slab(1.5),
        _next_slab("1"),
        _next_slab(),
        _next_slab(1, 0, 0.0, b"storage"),
        _next_slab(1, 0, 0.0, "s\ufffd").replace(b"\xef\xbf\xbd", b"\xff\xff\xff"),
        _next_slab(1, 0, 0.0, "", 1)[:-1] + b"\x91" * 100_000 + b"\x01",
        b"\x93\xa6ToNode\x05\xdd\xff\xff\xff\xff",
        b"\x93\xa6ToNode\x05\x93\xa7Release\xa1j\xdd\xff\xff\xff\xff\x01",
        b"\x93\xa6ToNode\x05\xdb\xff\xff\xff\xff",
        b"\x93\xa6ToNode\x05\x91\xa6ToNode",
        b"\x93\xa6ToNode\x05\xc0",
        b"\xc1",
    ],
)
def test_numbers_texts_and_counts_that_no_message_has_are_refused(wire):
    with pytest.raises(errors.ConfigError, match="not a ToNode message"):
        codec.decode(messages.ToNode, wire)


def test_whatever_a_message_becomes_on_its_way_is_a_message_or_an_error_of_ours():
    chance = random.Random(3)
    job = opening("u")
    failed = messages.FromNode(1, errors.TruncatedRead("short", shard="s", expected=7))
    valid = [messages.ToNode(1, job), failed, messages.ToNode(2, messages.Release("j", (1, 2**40)))]
    for _ in range(3000):
        sent = chance.choice(valid)
        wire = bytearray(codec.encode(sent))
        for _ in range(chance.randint(1, 4)):
            wire[chance.randrange(len(wire))] = chance.randrange(256)
        with contextlib.suppress(errors.ConfigError):
            codec.decode(type(sent), bytes(wire[: chance.choice((None, chance.randrange(99)))]))


def test_numbers_of_numpy_are_sent_as_what_they_are():
    sent = messages.NextSlab(np.int64(3), np.uint64(2**63), np.float32(0.5))
    assert codec.decode(messages.NextSlab, codec.encode(sent)) == messages.NextSlab(3, 2**63, 0.5)
    document = TakenDocument(1, 2**64 - 1)
    assert codec.decode(TakenDocument, codec.encode(document)) == document


def _packet(wire):
    return local.Packet(wire, array.array("i"))


def test_values_are_counted_before_a_message_is_decoded(monkeypatch):
    """Counting lets other threads run; decoding does not."""
    pauses = []
    monkeypatch.setattr(bounds.time, "sleep", pauses.append)
    columns = messages.DatasetSource(tuple("u" * (n % 40) for n in range(2000)), "x" * 300)
    wire = codec.encode(columns)
    values = 1 + 4 + 2000
    assert _packet(wire).read(messages.DatasetSource, values) == (columns, ())
    assert len(pauses) == values // bounds._VALUES_A_TURN
    with pytest.raises(errors.ConfigError, match="more than 2004 values in its lists"):
        _packet(wire).read(messages.DatasetSource, values - 1)
    few = codec.encode(messages.OpenStream("j" * 70_000, 2**63, 2**15, 2**7, 2**31))
    assert _packet(few).read(messages.OpenStream, 9)[0].cursor == 2**15
    with pytest.raises(errors.ConfigError, match="more than 8 values"):
        _packet(few).read(messages.OpenStream, 8)
    maps = codec.encode({"a": {str(n): None for n in range(20)}, "b": [1.5, -3, -900, b"x"]})
    with pytest.raises(errors.ConfigError, match="not a ToNode"):
        _packet(maps).read(messages.ToNode, 49)
    with pytest.raises(errors.ConfigError, match="more than 48 values"):
        _packet(maps).read(messages.ToNode, 48)


@pytest.mark.parametrize("part", [b"\xc0", b"\x90", b"\xa0", b"\x91" * 50])
def test_a_million_values_cost_the_loop_and_the_memory_nothing(part):
    count = 4 << 20
    wire = b"\x93\xa6ToNode\x05\x93\xa7Release\xa1j\xdd" + struct.pack(">I", count) + part * count
    with pytest.raises(errors.ConfigError, match="more than 1000 values"):
        _packet(wire).read(messages.ToNode, 1000)
    deep = b"\x91" * 5000 + b"\x01"
    with pytest.raises(errors.ConfigError, match="more than 1000 values"):
        _packet(deep).read(messages.ToNode, 1000)
    with pytest.raises(errors.ConfigError, match="begins with the byte 200"):
        _packet(b"\x92\xc8" + bytes(3000)).read(messages.ToNode, 1000)


RACE = """
import sys, threading, types
from dataplane.rpc import codec

def read(cls, wire, start):
    start.wait()
    codec.decode(cls, wire)

sys.setswitchinterval(1e-6)
for turn in range(25):
    name = sys.modules[__name__].__name__ + str(turn)
    module = sys.modules[name] = types.ModuleType(name)
    text = "from __future__ import annotations\\nfrom dataplane.rpc.codec import Message\\n"
    for n in range(20):
        text += f"class P{n}(Message):\\n  x: P{max(n - 1, 0)} | int | None\\n  y: tuple[P0, ...]\\n"
    exec(text, module.__dict__)
    message = 1
    for n in range(20):
        message = getattr(module, f"P{n}")(message, ())
    start = threading.Barrier(2)
    given = (module.P19, codec.encode(message), start)
    threads = [threading.Thread(target=read, args=given) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_two_threads_may_be_the_first_to_read_a_message():
    # Without `typed.complete`, this process dies of SIGSEGV.
    subprocess.run([sys.executable, "-c", RACE], check=True, timeout=120)
