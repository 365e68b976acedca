"""One segment of a worker's memory: taken extents, allocated pages, and dead extents.

Behind the extents lies one mark byte for every possible start of an extent. The trainer sets it
when the extent dies, so that the worker can see this at any time; a first byte says whether any
mark is set.

Invariants:
1. Pages of a taken extent are allocated; those of free ones only until somebody needs the memory.
2. A mark is made once by the trainer, and taken once by the worker.
"""

from __future__ import annotations

import os

import numpy as np

from dataplane.arena.allocator import GRANULE_BYTES, Allocator, rounded
from dataplane.arena.memfd import PIECE_BYTES, Arena


def data_bytes(size_bytes: int) -> int:
    """The bytes of a segment that extents lie in; behind them are the marks."""
    return size_bytes - rounded(1 + size_bytes // GRANULE_BYTES)


def mark_dead(arena: Arena, offset: int) -> None:
    """The trainer no longer needs the extent that begins there."""
    memory, marks = arena.buffer, data_bytes(arena.size_bytes)
    memory[marks + 1 + offset // GRANULE_BYTES] = 1
    memory[marks] = 1


class Segment:
    """The worker's side, with room for `length` bytes. With `whole` all of its pages are there from
    the start, and stay, as memory that is pinned must.

    Raises:  BudgetTooSmall: the machine, or this container, has no more.
    """

    def __init__(self, length: int, *, whole: bool) -> None:
        size_bytes = rounded(length)
        while data_bytes(size_bytes) < length:
            size_bytes += rounded(length - data_bytes(size_bytes))
        self.arena = Arena.create(f"dataplane-worker-{os.getpid()}", size_bytes)
        if whole:
            self.arena.reserve(0, size_bytes)
        self.allocator = Allocator(data_bytes(size_bytes))
        at = data_bytes(size_bytes)
        self._marks = self.arena.view(at, size_bytes - at)

    @property
    def is_empty(self) -> bool:
        """Whether no extent is taken."""
        return self.allocator.free_bytes == self.allocator.size_bytes

    def dead(self) -> list[int]:
        """The starts of the extents that the trainer marked since the last call."""
        if not self._marks[0]:
            return []
        self._marks[0] = 0
        # A copy, since the trainer may mark others meanwhile; those are found the next time.
        marks = bytes(self._marks[1 : 2 + self.allocator.high_water // GRANULE_BYTES])
        found: list[int] = np.flatnonzero(np.frombuffer(marks, np.uint8)).tolist()
        for each in found:
            self._marks[1 + each] = 0
        return [each * GRANULE_BYTES for each in found]

    def release(self, wanted_bytes: int) -> int:
        """Give unused pages back until they reach `wanted_bytes`; returns how many bytes."""
        released = 0
        for offset, length in self.allocator.free_extents():
            if released >= wanted_bytes:
                break
            start, end = -(-offset // PIECE_BYTES), (offset + length) // PIECE_BYTES
            start, whole = start * PIECE_BYTES, (end - start) * PIECE_BYTES
            present = whole - self.arena.missing_bytes(start, whole) if whole > 0 else 0
            if present:
                self.arena.release(start, whole)
                released += present
        return released

    def close(self) -> None:
        """Close the segment; the trainer has its own mapping."""
        self._marks.release()
        self.arena.close()
