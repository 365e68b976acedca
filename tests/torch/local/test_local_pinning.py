"""Memory of workers that devices read: pinned once, and not written while a copy may be under way.

Numbers in brackets are invariants of dataplane_torch.local.segments.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dataplane_torch.local import frames
from dataplane_torch.local.crew import Crew
from dataplane_torch.local.parcel import Arrived, Parcel
from dataplane_torch.local.segments import Extent, MappedSegments, Segments
from dataplane_torch.local.worker import Setup
from dataplane_torch.pinning import DevicePinning
from hypothesis import given, settings
from hypothesis import strategies as st
from local_datasets import LONG, Samples
from torch.utils.data import default_collate


class FakeDevice:
    """A device whose queue of work ends when the test says so."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.pinned_count = self.unpinned_count = 0
        self.is_busy = True
        self.done = threading.Event()

    def register(self, address: int, size_bytes: int) -> None:
        assert address not in self.registered
        self.registered[address] = size_bytes
        self.pinned_count += 1

    def unregister(self, address: int) -> None:
        del self.registered[address]
        self.unpinned_count += 1

    def is_used(self) -> bool:
        return self.is_busy

    def synchronize(self) -> None:
        assert self.done.wait(60)

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is entirely in registered memory."""
        first, length = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        return any(
            start <= first and first + length <= start + size
            for start, size in self.registered.items()
        )


class Each(Samples):
    """A long tensor, a short one and a number."""

    def __getitem__(self, i: int) -> Any:
        return torch.full((LONG,), i, dtype=torch.int16), torch.tensor([i, i]), i


class Walk:
    """A crew of one worker, and its batches one by one."""

    def __init__(self, device: FakeDevice) -> None:
        def setup(worker_id: int, parent_pid: int) -> Setup:
            return Setup(
                is_iterable=False,
                dataset=Each("", 1000),
                auto_collation=True,
                collate_fn=default_collate,
                drop_last=False,
                batch_size=1,
                base_seed=0,
                init_fn=None,
                worker_id=worker_id,
                worker_count=1,
                shared_seed=None,
                is_pinned=True,
                state_every=1,
                parent_pid=parent_pid,
            )

        context = torch.multiprocessing.get_context("fork")
        self.crew = Crew(1, context, setup, DevicePinning(device))
        self.crew.send(0, frames.Begin(0, None, None, anew=False))
        self.task = 0

    def next(self) -> Any:
        self.crew.send(0, frames.Make(0, self.task, [self.task]))
        self.task += 1
        while True:
            for _, frame in self.crew.heard(self.crew.wait(None)):
                if isinstance(frame, frames.Made):
                    return Arrived(frame.parcel, self.crew.mapped[0]).unpack()


@pytest.fixture
def walk() -> Iterator[tuple[Walk, FakeDevice]]:
    """A crew whose memory a fake device reads."""
    device = FakeDevice()
    walk = Walk(device)
    try:
        yield walk, device
    finally:
        device.done.set()
        walk.crew.close()
        walk.crew.processes.clear()  # pytest keeps what a fixture gave


def ends(device: FakeDevice) -> None:
    """Wait until nothing is registered any more."""
    pause = threading.Event()
    gc.collect()
    for _ in range(3000):
        if not device.registered:
            return
        pause.wait(0.01)
    pytest.fail(f"still registered: {device.registered}")


def test_dead_batches_are_not_written_while_the_device_works(walk) -> None:
    walk, device = walk
    addresses = set()
    for step in range(30):
        batch = walk.next()
        assert batch[0].unique().tolist() == [step]
        assert batch[1].tolist() == [[step, step]]
        assert all(device.covers(tensor) for tensor in batch)
        memory = {tensor.data_ptr() for tensor in batch}
        assert not memory & addresses  # (2): a copy to the device may still read those
        addresses |= memory
        del batch
    device.done.set()
    device.is_busy = False
    again = set()
    for step in range(30, 90):
        batch = walk.next()
        assert batch[0].unique().tolist() == [step]
        again |= {tensor.data_ptr() for tensor in batch}
        del batch
    assert again & addresses
    walk.crew.close()
    ends(device)
    assert device.pinned_count == device.unpinned_count


def test_batches_that_are_held_stay_pinned_after_their_worker_ends(walk) -> None:
    walk, device = walk
    device.is_busy = False
    held = [walk.next() for _ in range(5)]
    device.is_busy = True
    walk.crew.close()
    assert all(device.covers(tensor) for batch in held for tensor in batch)
    last = held.pop()
    held.clear()
    assert device.covers(last[0])
    assert last[0].unique().tolist() == [4]
    del last
    gc.collect()
    assert device.registered  # a copy may be under way
    device.done.set()
    ends(device)


def test_a_refused_parcel_gives_its_memory_back() -> None:
    mapped, segments = pair()
    extent = segments.allocate(100)
    broken = Parcel(b"not a pickle", [extent, extent])
    with pytest.raises(Exception, match=r"."):
        Arrived(broken, mapped).unpack()
    gc.collect()
    again = segments.allocate(100)
    assert again == extent
    close(segments)


def close(segments: Segments) -> None:
    for segment in segments._segments.values():
        segment.close()


def pair() -> tuple[MappedSegments, Segments]:
    """Both sides of a worker's memory, in one process."""
    import os

    mapped = MappedSegments(None)

    def announce(segment_id: int, fd: int, size_bytes: int) -> None:
        mapped.attach(segment_id, os.dup(fd), size_bytes)

    return mapped, Segments(announce, mapped.detach, whole=False)


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 4096, 5000, 1 << 20, 3 << 20]), st.integers(0, 30)),
        max_size=150,
    )
)
@settings(max_examples=25)
def test_held_extents_never_change_and_segments_are_given_up(steps) -> None:
    """(1), (2), (4), for any order in which extents are taken and die."""
    mapped, segments = pair()
    held: list[tuple[Extent, Any, int]] = []
    for mark, (length, dies) in enumerate(steps):
        extent = segments.allocate(length)
        segments.memory(extent)[0] = segments.memory(extent)[length - 1] = mark % 251
        held.append((extent, mapped.take(extent), mark % 251))
        if dies < len(held):
            del held[dies]
        for one, memory, value in held:
            assert memory[0] == memory[one.length - 1] == value
    held.clear()
    for _ in range(3 * 64):
        mapped.give_back(segments.allocate(1))
    assert len(segments._segments) == len(mapped._segments) <= 2
    close(segments)
