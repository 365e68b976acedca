"""Workers keep no more memory than was recently in use at once, and idle ones only memory in use."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from dataplane_torch import DataLoader
from dataplane_torch.local.segments import MappedSegments, Segments
from hypothesis import given, settings
from hypothesis import strategies as st
from local_datasets import Samples

from dataplane.arena.memfd import Arena

_MIB = 1 << 20
_PIECE = 64 << 10


def allocated_bytes(segments: Any) -> int:
    """Pages that the kernel has allocated for segments, of a worker or of a trainer."""
    return sum(os.fstat(each.arena.fd).st_blocks * 512 for each in segments.values())


def pair() -> tuple[MappedSegments, Segments]:
    """Both sides of a worker's memory, in one process."""
    mapped = MappedSegments(None)

    def announce(segment_id: int, fd: int, size_bytes: int) -> None:
        mapped.attach(segment_id, os.dup(fd), size_bytes)

    return mapped, Segments(announce, mapped.detach, whole=False)


def close(segments: Segments) -> None:
    for segment in segments._segments.values():
        segment.close()


def slack(live: int, count: int) -> int:
    """The memory that may be used in addition: pieces at the ends of extents, and the marks."""
    return _MIB + live // 16 + (2 * count + 4) * _PIECE


@given(
    steps=st.lists(st.tuples(st.integers(1, 6 * _MIB), st.integers(0, 12)), max_size=60),
)
@settings(max_examples=20)
def test_a_segment_never_has_more_pages_than_were_in_use_at_once(steps) -> None:
    """(1), (2), for any order of allocations and releases."""
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
