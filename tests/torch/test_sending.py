"""Batches on their way to a device: nothing is read too early, overwritten, or used again.

Numbers in brackets are invariants of dataplane_torch.sending.
"""

from __future__ import annotations

import collections
import os
import threading
import weakref
from collections import UserDict, deque
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from dataplane_torch.pinning import DevicePinning, cuda_pinning
from dataplane_torch.sending import Sending
from dataplane_torch.tensors import tensor_over
from fake_device import FakeCopyStream, FakeDevice, LateDevice, Stream
from fake_node import open_job
from hypothesis import given
from hypothesis import strategies as st

from dataplane.client.endpoint import find_endpoint
from dataplane.client.session import Session
from dataplane.client.stream import SlabStream
from dataplane.rpc.messages import Release

ROWS, SLOTS, STEPS = 3, 3, 25


class Pair(NamedTuple):
    first: Any
    second: Any


class Slots:
    """Pinned memory of the host. What dies is overwritten at once, or `when_unread`: then as soon
    as the copy stream has done what it was given.
    """

    def __init__(self, device: FakeDevice, *, when_unread: bool = True) -> None:
        self.device, self.when_unread = device, when_unread
        self.slots = [np.zeros(8 * ROWS, np.uint8) for _ in range(SLOTS)]
        self.free = deque(range(SLOTS))
        for slot in self.slots:
            device.pinned[slot.ctypes.data] = slot.nbytes

    def batch(self, step: int) -> dict[str, Any]:
        while not self.free:  # like a thread that waits for the node
            assert self.device.copy_stream.step(), "nobody will give a slot back"
        at = self.free.popleft()
        self.slots[at][:] = step
        memory = np.frombuffer(self.slots[at].data, np.uint8)
        weakref.finalize(memory, self._died, at).atexit = False
        return {
            "x": tensor_over(memory, torch.int16, (ROWS, 2)),
            "more": [Pair(tensor_over(memory, torch.int32, (ROWS,), 4 * ROWS), "text"), step],
        }

    def _died(self, at: int) -> None:
        if self.when_unread:
            self.device.copy_stream.add(partial(self._overwrite, at))
        else:
            self._overwrite(at)

    def _overwrite(self, at: int) -> bool:
        self.slots[at][:] = 0xEE
        self.free.append(at)
        return True


def train(seed: int, stream_of: Any = FakeCopyStream, *, when_unread: bool = True) -> FakeDevice:
    """Steps of a loop that drops or holds batches, changes streams and leaves passes early, and
    whose next batch has arrived or not. The seed decides all of it.
    """
    device = FakeDevice(seed)
    draw, copy_stream = device.random, stream_of(device)
    host = Slots(device, when_unread=when_unread)
    ahead: Sending | None = None
    held: list[Any] = []
    for step in range(STEPS):
        device.current = draw.choice(device.streams[1:])
        batch = (ahead or Sending(copy_stream, partial(host.batch, step)))()
        ahead = None
        if host.free and draw.random() < 0.8:
            ahead = Sending(copy_stream, partial(host.batch, step + 1))
            ahead.begin()
        pair, number = batch["more"]
        assert (number, pair.second) == (step, "text")
        for tensor in (batch["x"], pair.first):
            device.read(tensor, bytes([step]) * tensor.nbytes)
        held.append(batch)
        del batch, pair, tensor
        if draw.random() < 0.7:
            held.clear()
        if draw.random() < 0.1:
            ahead = None
        device.tick()
    ahead = None
    held.clear()
    device.finish()
    assert len(host.free) == SLOTS
    assert not device.live
    return device


@given(st.integers(0, 1 << 32))
def test_every_step_reads_its_own_batch_however_late_the_device_is(seed) -> None:
    """(1), (3)"""
    device = train(seed)
    assert not device.failures
    assert (device.copies >= 2 * STEPS, device.pageable) == (True, 0)


class Waitless(FakeCopyStream):
    def wait_for(self, mark: Any) -> Stream:
        return self.fake.current


class Recordless(FakeCopyStream):
    def record(self, copied: Any, stream: Stream) -> None:
        pass


@pytest.mark.parametrize(
    ("copy_stream", "when_unread"), [(Waitless, True), (Recordless, True), (FakeCopyStream, False)]
)
def test_the_fake_finds_a_missing_wait_a_missing_record_and_a_source_written_early(
    copy_stream, when_unread
) -> None:
    assert any(train(seed, copy_stream, when_unread=when_unread).failures for seed in range(10))


def sent(batch: Any, device: FakeDevice | None = None) -> Any:
    return Sending(FakeCopyStream(device or FakeDevice()), lambda: batch)()


class Graph:
    """A user's batch that can be copied in any stream."""

    def __init__(self, nodes: torch.Tensor, recorded: Any = None) -> None:
        self.nodes, self.recorded = nodes, recorded

    def to(self, copy_stream: FakeCopyStream) -> Graph:
        assert copy_stream.fake.current is copy_stream.fake.copy_stream
        return Graph(copy_stream.fake.copied(self.nodes))

    def record_stream(self, stream: Stream) -> None:
        self.recorded = stream


class Sample:
    """A user's batch that is copied in the stream it is used in."""

    def __init__(self, device: FakeDevice, *, takes_all: bool) -> None:
        self.device, self.takes_all, self.seen = device, takes_all, None

    def to(self, where: Any, **given: Any) -> Any:
        if given and not self.takes_all:
            raise TypeError("to() takes a device")
        self.seen = (where, given, self.device.current)
        return None if self.takes_all else self  # some forget to return what they changed


class Frozen(collections.abc.Mapping):
    def __init__(self, values: Any) -> None:
        self.values_ = dict(values)

    def __getitem__(self, key: Any) -> Any:
        return self.values_[key]

    def __iter__(self) -> Any:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


def test_structure_is_kept_and_objects_that_are_not_tensors_stay_the_same() -> None:
    device = FakeDevice()
    texts, marks = ["a", None, 3], [{"deep": b"x"}, range(3)]
    tensor, array = torch.arange(6.0), np.arange(3)
    batch = {
        "plain": tensor,
        "ordered": collections.OrderedDict(a=tensor),
        "default": collections.defaultdict(int, a=tensor),
        "user": UserDict(a=tensor),
        "frozen": Frozen({"a": tensor}),
        "pair": Pair(tensor, "b"),
        "tuple": (tensor, 1),
        "list": [tensor, [tensor]],
        "deque": deque([tensor]),
        "texts": texts,
        "marks": marks,
        "array": array,
        "type": torch.Tensor,
        "empty": torch.empty(0, 3, dtype=torch.int16),
    }
    out = sent(batch, device)
    device.finish()
    assert {name: type(value) for name, value in out.items()} == {
        name: type(value) for name, value in batch.items()
    }
    assert out["texts"] is texts
    assert out["marks"] is marks
    assert out["array"] is array
    assert out["default"].default_factory is int
    assert (out["empty"].shape, out["empty"].dtype) == ((0, 3), torch.int16)
    found = [out["plain"], out["ordered"]["a"], out["default"]["a"], out["user"]["a"]]
    found += [out["frozen"]["a"], out["pair"].first, out["tuple"][0], out["list"][0]]
    found += [out["list"][1][0], out["deque"][0]]
    assert all(one is not tensor and torch.equal(one, tensor) for one in found)
    assert batch["plain"] is tensor
    assert batch["user"]["a"] is tensor


LEAVES = st.sampled_from([torch.arange(3), torch.zeros(0, 2), 1, 2.5, "x", b"y", None, np.ones(2)])
ANY_BATCH = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.lists(inner, max_size=3).map(deque),
    ),
    max_leaves=12,
)


@given(ANY_BATCH)
def test_only_the_tensors_of_a_structure_are_replaced(batch) -> None:
    device = FakeDevice()
    out = sent(batch, device)
    device.finish()
    same_but_tensors(batch, out)


def same_but_tensors(before: Any, after: Any) -> bool:
    """Whether there is no tensor in it; then it is the very object."""
    assert type(before) is type(after)
    if isinstance(before, torch.Tensor):
        assert after is not before
        assert torch.equal(after, before)
        return False
    parts: list[bool] = []  # of all, since each is looked at
    if isinstance(before, dict):
        assert list(before) == list(after)
        parts = [same_but_tensors(before[key], after[key]) for key in before]
    elif isinstance(before, list | tuple | deque):
        both = zip(before, after, strict=True)
        parts = [same_but_tensors(one, other) for one, other in both]
    assert (before is after) is all(parts)
    return all(parts)


def test_objects_that_record_streams_go_ahead_and_others_when_they_are_due() -> None:
    device = FakeDevice()
    copy_stream = FakeCopyStream(device)
    some, other = Sample(device, takes_all=True), Sample(device, takes_all=False)
    sending = Sending(copy_stream, lambda: [Graph(torch.ones(3)), some, other])
    sending.begin()
    assert some.seen is None
    device.current = device.streams[2]
    graph, *samples = sending()
    device.finish()
    assert graph.recorded is device.streams[2]
    assert graph.nodes.tolist() == [1, 1, 1]
    assert samples == [some, other]
    assert some.seen == (copy_stream.device, {"non_blocking": True}, device.streams[2])
    assert other.seen == (copy_stream.device, {}, device.streams[2])


def test_what_cannot_be_recorded_is_moved_in_the_stream_of_the_taker() -> None:
    device = FakeDevice()
    (out,) = sent([torch.eye(3).to_sparse()], device)
    assert out.to_dense().tolist() == torch.eye(3).tolist()
    assert not device.copy_stream.given


def test_what_goes_wrong_ahead_is_raised_when_it_is_due_and_tried_again() -> None:
    """(2)"""
    device, made = FakeDevice(), []

    def make() -> Any:
        made.append(1)
        return [torch.ones(2), torch.ones(3)]

    device.refuses = 2
    sending = Sending(FakeCopyStream(device), make)
    sending.begin()
    with pytest.raises(RuntimeError, match="out of memory"):
        sending()
    assert [one.numel() for one in sending()] == [2, 3]
    assert made == [1]
    device.finish()


def released(node) -> list[int]:
    return [slab for one in node.seen if isinstance(one, Release) for slab in one.slab_ids]


def test_a_dead_slab_waits_for_the_device(fake) -> None:
    node, device = fake(), LateDevice()
    session = Session(
        find_endpoint(os.environ["DATAPLANE_SERVICE"], ""),
        open_job(),
        pinning=DevicePinning(device),
    )
    stream = SlabStream(session, 0, 0)
    stream.batches_from(0)
    assert list(device.registered.values()) == [node.arena.size_bytes]
    assert device.asked.acquire(timeout=60)
    stream.batches_from(1)  # a round trip in which a release would have gone along
    assert released(node) == []
    assert session.mount().held_bytes == 0  # it is returned without any action of the trainer
    device.done.set()
    stream.close()
    session.close()
    stopped = threading.Event()
    while device.registered:
        stopped.wait(0.01)
    assert node.free_count <= node.slots.layout.slot_count


def test_without_device_work_a_slab_goes_back_at_once() -> None:
    device, seen = LateDevice(used=False), []
    pinning = DevicePinning(device)
    pinning.when_unread(lambda: seen.append(1))
    assert seen == [1]


def test_many_dead_slabs_wait_together_and_a_capture_only_delays_them() -> None:
    device, seen = LateDevice(), []
    device.failures = 1
    pinning = DevicePinning(device)
    unpin = pinning.pin(np.zeros(10, np.uint8))
    last = threading.Event()
    for i in range(5):
        pinning.when_unread(lambda i=i: seen.append(i))
    pinning.when_unread(last.set)
    assert device.asked.acquire(timeout=60)
    assert device.asked.acquire(timeout=60)
    assert seen == []
    device.done.set()
    assert last.wait(60)
    assert seen == [0, 1, 2, 3, 4]
    unpin()
    assert device.registered == {}


def test_memory_that_cannot_be_pinned_is_a_warning() -> None:
    pinning = DevicePinning(LateDevice(refuses=True))
    with pytest.warns(RuntimeWarning, match="ulimit -l"):
        unpin = pinning.pin(np.zeros(10, np.uint8))
    unpin()


def test_without_a_device_pinning_is_nothing() -> None:
    assert cuda_pinning(wanted=False) is None
