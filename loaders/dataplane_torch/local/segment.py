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
from dataplane.arena.memfd import Arena

_PIECE_BYTES = 64 << 10
"""Pages come and go in pieces of this size."""


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
            self.arena.reserve(size_bytes)
        self.allocator = Allocator(data_bytes(size_bytes))
        self._there = bytearray(b"\1" if whole else b"\0") * -(-size_bytes // _PIECE_BYTES)
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

    def missing_bytes(self, offset: int, length: int) -> int:
        """How much memory `reserve` will take."""
        first, end = _pieces(offset, length)
        return self._there.count(0, first, end) * _PIECE_BYTES

    def reserve(self, offset: int, length: int) -> None:
        """Allocate the pages of an extent.

        Raises:  BudgetTooSmall: the machine, or this container, has no more.
        """
        first, end = _pieces(offset, length)
        start = self._there.find(0, first, end)
        if start < 0:
            return
        stop = self._there.rfind(0, first, end) + 1
        last = min(stop * _PIECE_BYTES, self.arena.size_bytes)
        self.arena.reserve_part(start * _PIECE_BYTES, last - start * _PIECE_BYTES)
        self._there[start:stop] = b"\1" * (stop - start)

    def release(self, wanted_bytes: int) -> int:
        """Give unused pages back until they reach `wanted_bytes`; returns how many bytes."""
        released = 0
        for offset, length in self.allocator.free_extents():
            if released >= wanted_bytes:
                break
            first, end = -(-offset // _PIECE_BYTES), (offset + length) // _PIECE_BYTES
            count = self._there.count(1, first, end) if first < end else 0
            if count:
                self.arena.release(first * _PIECE_BYTES, (end - first) * _PIECE_BYTES)
                self._there[first:end] = bytes(end - first)
                released += count * _PIECE_BYTES
        return released

    def close(self) -> None:
        """Close the segment; the trainer has its own mapping."""
        self._marks.release()
        self.arena.close()

    @property
    def there_bytes(self) -> int:
        """The bytes of pages that are allocated, free or taken."""
        return self._there.count(1) * _PIECE_BYTES


def _pieces(offset: int, length: int) -> tuple[int, int]:
    return offset // _PIECE_BYTES, -(-(offset + length) // _PIECE_BYTES)
