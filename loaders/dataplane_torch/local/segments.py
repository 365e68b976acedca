"""The delivery arena of one DataLoader worker: the worker enlarges it, and the trainer maps it.

A worker writes its batches into extents of sealed memfds (segments), each of which the trainer maps
when the worker announces it. An extent is one tensor's memory, so that a trainer that keeps the
labels of an epoch does not keep its images.

Invariants:
1. An extent that was handed over is written again only after the trainer gave it back.
2. The trainer gives an extent back once: when no view of it is alive, here or in a child that was
   forked since, and no device reads it.
3. A worker without a free extent of the needed length makes a new segment; it never waits for the
   training loop.
4. Both sides give up a segment that has not been needed for a while.
5. In a forked child of the trainer nothing is given back, since the parent owns everything. The
   child keeps only the memory of the extents that were alive.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.arena import forks
from dataplane.arena.allocator import GRANULE_BYTES, Allocator, rounded
from dataplane.arena.memfd import PIECE_BYTES, Arena
from dataplane.client.mount import NoDevice, Pinning

# One segment of a worker's memory: taken extents, allocated pages, and dead extents.
#
# Behind the extents there is one mark byte for every possible start of an extent. The trainer sets
# the mark when the extent dies, so that the worker can find dead extents at any time. The trainer
# sets a mark once, and the worker clears it once. Another byte, before all marks, says whether any
# mark is set.
#
# Pages of a taken extent are allocated. Pages of free extents stay allocated only until the worker
# needs the memory elsewhere.


def data_bytes(size_bytes: int) -> int:
    """Return the number of bytes of a segment that are for extents. The marks follow them."""
    return size_bytes - rounded(1 + size_bytes // GRANULE_BYTES)


def mark_dead(arena: Arena, offset: int) -> None:
    """Mark the extent that begins at `offset` as no longer needed by the trainer."""
    memory, marks = arena.buffer, data_bytes(arena.size_bytes)
    memory[marks + 1 + offset // GRANULE_BYTES] = 1
    memory[marks] = 1


class Segment:
    """The worker's side of a segment, with room for `length` bytes. With `whole`, all of its pages
    are allocated from the start and stay allocated, as pinning requires.

    Raises:  BudgetTooSmall: the machine, or this container, has no more memory.
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
        """Return the starts of the extents that the trainer marked since the last call."""
        if not self._marks[0]:
            return []
        self._marks[0] = 0
        # Work on a copy: the trainer may set more marks meanwhile, which the next call finds.
        marks = bytes(self._marks[1 : 2 + self.allocator.high_water // GRANULE_BYTES])
        numbers: list[int] = np.flatnonzero(np.frombuffer(marks, np.uint8)).tolist()
        for number in numbers:
            self._marks[1 + number] = 0
        return [number * GRANULE_BYTES for number in numbers]

    def release(self, wanted_bytes: int) -> int:
        """Release pages of free extents until `wanted_bytes` are released. Return the number of
        released bytes.
        """
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


Bytes = npt.NDArray[np.uint8]

_SMALLEST_BYTES = 1 << 20
_WINDOW = 64
# How much memory to keep in segments, relative to the recent peak use.
_SLACK = 1.5


class Extent(NamedTuple):
    """Bytes [offset, offset + length) of a segment."""

    segment: int
    offset: int
    length: int


class Segments:
    """All segments of a worker. `announce(id, fd, size_bytes)` tells the trainer of a new segment,
    and `retire(id)` of a segment that the worker gave up. With `whole`, all pages of a segment are
    allocated at once, as pinning requires.
    """

    def __init__(
        self,
        announce: Callable[[int, int, int], None],
        retire: Callable[[int], None],
        *,
        whole: bool,
    ) -> None:
        self._announce, self._retire, self._whole = announce, retire, whole
        self._segments: dict[int, Segment] = {}
        self._next_id = 0
        self._used = self._peak = self._peak_before = self._there = 0
        self._allocations = 0
        self._unheld: deque[tuple[int, int]] = deque()

    def allocate(self, length: int) -> Extent:
        """Allocate memory of `length` bytes.

        Raises:  BudgetTooSmall: the machine, or this container, has no more memory.
        """
        self._free_dead()
        self._count(rounded(length))
        extent = self._found(length)
        if extent is None:
            self._grow(length)
            extent = self._found(length)
            assert extent is not None
        try:
            self._reserve(extent)
        except BaseException:
            self.free(extent.segment, extent.offset)
            raise
        return extent

    def memory(self, extent: Extent) -> memoryview:
        """Return the bytes of an extent, writable."""
        return self._segments[extent.segment].arena.view(extent.offset, extent.length)

    def free(self, segment_id: int, offset: int) -> None:
        """Give an extent back."""
        segment = self._segments[segment_id]
        before = segment.allocator.free_bytes
        segment.allocator.free(offset)
        self._used -= segment.allocator.free_bytes - before
        if segment.is_empty:
            self._give_up(segment_id, segment)

    def free_soon(self, segment_id: int, offset: int) -> None:
        """Give an extent back at the next allocation. For finalizers, which may run at any time."""
        self._unheld.append((segment_id, offset))

    def release_unused(self) -> bool:
        """Release unused memory to the machine. Return whether more memory may become unused later.
        Call this when idle, since allocating the memory again takes time.
        """
        self._free_dead()
        if not self._whole and self._there > self._used + _SMALLEST_BYTES:
            self._release(self._there - self._used)
        return not self._whole and self._there > _SMALLEST_BYTES

    def _free_dead(self) -> None:
        while self._unheld:
            self.free(*self._unheld.popleft())
        for segment_id, segment in list(self._segments.items()):
            for offset in segment.dead():
                self.free(segment_id, offset)

    def _found(self, length: int) -> Extent | None:
        for segment_id, segment in self._segments.items():
            offset = segment.allocator.allocate(length)
            if offset is not None:
                return Extent(segment_id, offset, length)
        return None

    def _reserve(self, extent: Extent) -> None:
        """Allocate the pages of an extent, and release others, so that no more pages are allocated
        than were recently in use at once.
        """
        segment = self._segments[extent.segment]
        missing = segment.arena.missing_bytes(extent.offset, extent.length)
        if missing:
            most = max(self._peak, self._peak_before)
            self._release(self._there + missing - most - max(_SMALLEST_BYTES, most // 16))
            segment.arena.reserve(extent.offset, extent.length)
            self._there += missing

    def _release(self, wanted_bytes: int) -> None:
        for segment in self._segments.values():
            if wanted_bytes <= 0 or self._whole:
                return
            released = segment.release(wanted_bytes)
            wanted_bytes -= released
            self._there -= released

    def _give_up(self, segment_id: int, segment: Segment) -> None:
        """Retire an empty segment, unless it may be needed."""
        every = self._segments.values()
        rest = sum(other.arena.size_bytes for other in every) - segment.arena.size_bytes
        if rest >= _SLACK * max(self._peak, self._peak_before, _SMALLEST_BYTES):
            del self._segments[segment_id]
            self._there -= segment.arena.reserved_bytes
            segment.close()
            self._retire(segment_id)

    def _grow(self, length: int) -> None:
        """Add a segment as large as all others together, so that there are never many."""
        total = sum(segment.arena.size_bytes for segment in self._segments.values())
        segment = Segment(max(2 * rounded(length), total, _SMALLEST_BYTES), whole=self._whole)
        segment_id, self._next_id = self._next_id, self._next_id + 1
        self._segments[segment_id] = segment
        self._there += segment.arena.reserved_bytes
        self._announce(segment_id, segment.arena.fd, segment.arena.size_bytes)

    def _count(self, length: int) -> None:
        self._allocations += 1
        if self._allocations % _WINDOW == 0:
            self._peak_before, self._peak = self._peak, self._used
            for segment_id, segment in reversed(list(self._segments.items())):
                if segment.is_empty:
                    self._give_up(segment_id, segment)
        self._used += length
        self._peak = max(self._peak, self._used)


class MappedSegments:
    """The trainer's side of one worker's segments."""

    def __init__(self, pinning: Pinning | None) -> None:
        self._pinning = pinning or NoDevice()
        self._segments: dict[int, _Mapping] = {}
        self._kept: forks.Kept[tuple[_Mapping, int]] = forks.Kept()
        self._pid = os.getpid()
        self._is_closed = False

    def attach(self, segment_id: int, fd: int, size_bytes: int) -> None:
        """Map a segment that the worker announced.

        Raises:  ClosedError: the descriptor is not the segment that the worker announced.
        """
        arena = Arena.attach(fd, size_bytes)
        try:
            self._segments[segment_id] = _Mapping(arena, self._pinning)
        except BaseException:  # torch's SIGCHLD handler may raise here
            arena.close()
            raise

    def detach(self, segment_id: int) -> None:
        """Forget a segment that the worker gave up; its mapping ends with the last view of it."""
        del self._segments[segment_id]

    def take(self, extent: Extent) -> Bytes:
        """Return the memory of an extent, which lives as long as this object or a view of it.

        Shapes:  result: uint8[extent.length], writable.
        """
        mapping = self._segments[extent.segment]
        memory: Bytes = np.frombuffer(mapping.arena.view(extent.offset, extent.length), np.uint8)
        # Let the finalizer refer to the mapping, so that the mapping lives, and stays pinned, as
        # long as its extents.
        number = forks.born()
        died = weakref.finalize(memory, self._died, mapping, extent, number)
        died.atexit = False
        mapping.alive[number] = extent.offset, extent.length
        return memory

    def give_back(self, extent: Extent) -> None:
        """Mark the extent as no longer needed by this process."""
        self._segments[extent.segment].mark_dead(extent.offset)

    def let_go(self) -> None:
        """Give back extents that no forked child can read any more."""
        for mapping, offset in self._kept.let_go():
            self._unused(mapping, offset)

    def close(self) -> None:
        """Forget the segments of a worker that has ended. A mapping ends with the last view of it.
        Extents that children may read need no marks now, since no worker overwrites them. May be
        called twice.
        """
        self._segments.clear()
        self._is_closed, self._kept = True, forks.Kept()
        forks.lasting_forks()

    def _died(self, mapping: _Mapping, extent: Extent, number: int) -> None:
        if os.getpid() != self._pid:
            return
        mapping.alive.pop(number, None)
        children = forks.died(number)
        if children and not self._is_closed:
            self._kept.add(children, (mapping, extent.offset))
        else:
            self._unused(mapping, extent.offset)

    def _unused(self, mapping: _Mapping, offset: int) -> None:
        # Keep the mapping, and thereby keep it pinned, until no device can read the extent.
        self._pinning.when_unread(partial(mapping.mark_dead, offset))


class _Mapping:
    """One segment as the trainer maps it; unpinned and unmapped when no reference is left."""

    def __init__(self, arena: Arena, pinning: Pinning) -> None:
        self.arena = arena
        self.alive: dict[int, tuple[int, int]] = {}  # (offset, length) of live extents, by number
        _mappings.add(self)
        unpin = pinning.pin(np.frombuffer(arena.view(0, arena.size_bytes), np.uint8))
        weakref.finalize(self, _unpin_and_close, arena, unpin).atexit = False

    def mark_dead(self, offset: int) -> None:
        """Mark the extent that begins at `offset` as no longer needed by this process."""
        mark_dead(self.arena, offset)


def _unpin_and_close(arena: Arena, unpin: Callable[[], None]) -> None:
    unpin()
    arena.close()


_mappings: weakref.WeakSet[_Mapping] = weakref.WeakSet()


def _keep_what_lives() -> None:
    for mapping in list(_mappings):
        mapping.arena.keep_only(mapping.alive.values())
    _mappings.clear()


os.register_at_fork(after_in_child=_keep_what_lives)
