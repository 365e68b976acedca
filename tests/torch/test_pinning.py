"""Slabs go back only when no device can read them any more."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from dataplane_torch.pinning import DevicePinning, cuda_pinning
from fake_node import open_job

from dataplane.client.endpoint import find_endpoint
from dataplane.client.session import Session
from dataplane.client.stream import SlabStream
from dataplane.rpc.messages import Release


class FakeDevice:
    """A device whose queue of work ends when the test says so."""

    def __init__(self, *, used: bool = True, refuses: bool = False) -> None:
        self.used, self.refuses = used, refuses
        self.registered: dict[int, int] = {}
        self.done = threading.Event()
        self.asked = threading.Semaphore(0)
        self.failures = 0

    def register(self, address: int, size_bytes: int) -> None:
        if self.refuses:
            raise RuntimeError("out of locked memory")
        self.registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def is_used(self) -> bool:
        return self.used

    def synchronize(self) -> None:
        self.asked.release()
        if self.failures:
            self.failures -= 1
            raise RuntimeError("a graph is being captured")
        assert self.done.wait(60)


def released(node) -> list[int]:
    return [slab for one in node.seen if isinstance(one, Release) for slab in one.slab_ids]


def test_a_dead_slab_waits_for_the_device(fake) -> None:
    node, device = fake(), FakeDevice()
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
    device, seen = FakeDevice(used=False), []
    pinning = DevicePinning(device)
    pinning.when_unread(lambda: seen.append(1))
    assert seen == [1]


def test_many_dead_slabs_wait_together_and_a_capture_only_delays_them() -> None:
    device, seen = FakeDevice(), []
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
    pinning = DevicePinning(FakeDevice(refuses=True))
    with pytest.warns(RuntimeWarning, match="ulimit -l"):
        unpin = pinning.pin(np.zeros(10, np.uint8))
    unpin()


def test_without_a_device_pinning_is_nothing() -> None:
    assert cuda_pinning(wanted=False) is None
