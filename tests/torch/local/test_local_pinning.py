"""Memory of workers that devices read: pinned once, and not written while a copy may be under way.

Numbers in brackets are invariants of dataplane_torch.local.segments.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dataplane_torch import DataLoader
from dataplane_torch.local import frames
from dataplane_torch.local.crew import Crew
from dataplane_torch.local.parcel import Arrived, Parcel
from dataplane_torch.local.segments import MappedSegments, Segments
from dataplane_torch.local.worker import Setup
from dataplane_torch.pinning import DevicePinning
from fake_device import LateDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from local_datasets import LONG, Samples
from torch.utils.data import default_collate

from dataplane.arena.memfd import Arena


class Each(Samples):
    """A long tensor, a short one and a number."""

    def __getitem__(self, i: int) -> Any:
        return torch.full((LONG,), i, dtype=torch.int16), torch.tensor([i, i]), i


class Walk:
    """A crew of one worker, and its batches one by one."""

    def __init__(self, device: LateDevice) -> None:
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
def walk() -> Iterator[tuple[Walk, LateDevice]]:
    """A crew whose memory a fake device reads."""
    device = LateDevice()
    walk = Walk(device)
    try:
        yield walk, device
    finally:
        device.done.set()
        walk.crew.close()
        walk.crew.processes.clear()  # pytest keeps what a fixture gave


def ends(device: LateDevice) -> None:
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
    device.used = False
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
    device.used = False
    held = [walk.next() for _ in range(5)]
    device.used = True
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
    mapped = MappedSegments(None)

    def announce(segment_id: int, fd: int, size_bytes: int) -> None:
        mapped.attach(segment_id, os.dup(fd), size_bytes)

    return mapped, Segments(announce, mapped.detach, whole=False)


_MIB = 1 << 20
_PIECE = 64 << 10


def allocated_bytes(segments: Any) -> int:
    """Pages that the kernel has allocated for segments, of a worker or of a trainer."""
    return sum(os.fstat(each.arena.fd).st_blocks * 512 for each in segments.values())


def slack(live: int, count: int) -> int:
    """The memory that may be used in addition: pieces at the ends of extents, and the marks."""
    return _MIB + live // 16 + (2 * count + 4) * _PIECE


@given(
    steps=st.lists(st.tuples(st.integers(1, 6 * _MIB), st.integers(0, 12)), max_size=60),
)
@settings(max_examples=20)
def test_a_segment_never_has_more_pages_than_were_in_use_at_once(steps) -> None:
    """(1), (2), (4), for any order of allocations and releases."""
    mapped, segments = pair()
    held: list[tuple[Any, int]] = []
    most = count = 0
    try:
        for mark, (length, dies) in enumerate(steps):
            extent = segments.allocate(length)
            np.frombuffer(segments.memory(extent), np.uint8)[:: _PIECE // 16] = mark % 251
            held.append((mapped.take(extent), mark % 251))
            live = sum(memory.nbytes for memory, _ in held)
            most, count = max(most, live), max(count, len(held))
            assert allocated_bytes(segments._segments) <= most + slack(most, count)
            if dies < len(held):
                del held[dies]
            for memory, value in held:
                assert bool((memory[:: _PIECE // 16] == value).all())
        segments.release_unused()
        live = sum(memory.nbytes for memory, _ in held)
        assert allocated_bytes(segments._segments) <= live + slack(live, len(held))
        for memory, value in held:
            assert bool((memory[:: _PIECE // 16] == value).all())
        held.clear()
        memory = None
        for _ in range(3 * 64):
            mapped.give_back(segments.allocate(1))
        assert len(segments._segments) == len(mapped._segments) <= 2
    finally:
        close(segments)


def test_what_the_trainer_drops_is_free_at_once() -> None:
    """(2): no message reports it."""
    mapped, segments = pair()
    taken = segments.allocate(3 * _MIB)
    memory = mapped.take(taken)
    assert segments.allocate(3 * _MIB) != taken
    del memory
    assert segments.allocate(3 * _MIB) == taken
    close(segments)


class Uneven(Samples):
    """From one MiB to ten a sample."""

    def __init__(self, count: int) -> None:
        super().__init__("", count)
        chance = random.Random(3)
        self.sizes = [chance.randint(1, 10) * _MIB for _ in range(count)]

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((self.sizes[i],), i, dtype=torch.uint8)


def loaders_bytes(loader: DataLoader) -> int:
    """Pages of all workers, as the trainer sees them."""
    crew = loader._iterator._crew
    found = [mapping for mapped in crew.mapped for mapping in mapped._segments.values()]
    return allocated_bytes(dict(enumerate(found)))


def test_uneven_batches_take_the_memory_of_those_that_live_at_once() -> None:
    dataset = Uneven(40)
    loader = DataLoader(dataset, 1, num_workers=1, persistent_workers=True)
    # The loop holds one batch and receives the next, while `prefetch_factor` more are requested.
    together = 2 + loader.prefetch_factor
    most = max(sum(dataset.sizes[i : i + together]) for i in range(40 - together))
    for i, batch in enumerate(loader):
        assert batch[0, ::_PIECE].unique().tolist() == [i]
        assert loaders_bytes(loader) <= most + slack(most, together)
    loader.close()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_idle_workers_keep_what_is_held_and_no_more() -> None:
    loader = DataLoader(Uneven(8), 1, num_workers=2, persistent_workers=True)
    held = list(loader)
    assert loaders_bytes(loader) >= sum(batch.nbytes for batch in held)
    last = held.pop()
    held.clear()
    deadline, pause = time.monotonic() + 60, threading.Event()
    while loaders_bytes(loader) > last.nbytes + 2 * slack(last.nbytes, 2):
        assert time.monotonic() < deadline
        pause.wait(0.01)
    assert last[0, ::_PIECE].unique().tolist() == [7]
    assert [int(batch[0, 0]) for batch in loader] == list(range(8))
    loader.close()


def test_a_segment_whose_mapping_is_interrupted_leaves_nothing() -> None:
    class Interrupted:
        def pin(self, _memory: Any) -> Any:
            raise RuntimeError("a signal handler raises")

    mapped = MappedSegments(Interrupted())  # type: ignore[arg-type]
    arena = Arena.create("test", 1 << 20)
    with pytest.raises(RuntimeError, match="handler"):
        mapped.attach(1, os.dup(arena.fd), 1 << 20)
    arena.close()
    mapped.close()
