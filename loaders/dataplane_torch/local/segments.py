"""The delivery arena of one DataLoader worker: grown by it, mapped by the trainer, never named.

A worker writes its batches into extents of sealed memfds (segments), which the trainer maps when
the first extent of one arrives. An extent is one tensor's memory, so that a trainer that keeps the
labels of an epoch does not keep its images.

Invariants:
1. An extent that was handed over is written again only after the trainer gave it back.
2. The trainer gives an extent back once: when no view of it is alive, here or in a child that was
   forked since, and no device reads it.
3. A worker that has no free extent of some length grows; it never waits for the trainer's user.
4. A segment that has not been needed for a while is given up by both sides.
5. In a forked child of the trainer nothing is given back: the parent owns it all. The child has the
   memory of the extents that were alive, and no other.
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
from dataplane.arena.allocator import Allocator, rounded
from dataplane.arena.memfd import Arena
from dataplane.client.mount import NoDevice, Pinning

Bytes = npt.NDArray[np.uint8]

_SMALLEST_BYTES = 1 << 20
_WINDOW = 64
# What both sides leave free beside the most that was in use at once lately.
_SLACK = 1.5


class Extent(NamedTuple):
    """Bytes [offset, offset + length) of a segment."""

    segment: int
    offset: int
    length: int


class Segments:
    """A worker's side. `announce(id, fd, size_bytes)` tells the trainer of a new segment,
    `retire(id)` of one that is gone. With `whole` a segment is allocated at once, as memory that is
    pinned must be.
    """

    def __init__(
        self,
        announce: Callable[[int, int, int], None],
        retire: Callable[[int], None],
        *,
        whole: bool,
    ) -> None:
        self._announce, self._retire, self._whole = announce, retire, whole
        self._segments: dict[int, tuple[Arena, Allocator]] = {}
        self._next_id = 0
        self._used = self._peak = self._peak_before = 0
        self._allocations = 0
        self._unheld: deque[tuple[int, int]] = deque()

    def allocate(self, length: int) -> Extent:
        """Memory for `length` bytes.

        Raises:  BudgetTooSmall: the machine, or this container, has no more.
        """
        while self._unheld:
            self.free(*self._unheld.popleft())
        self._count(rounded(length))
        for segment_id in self._segments:
            extent = self._allocated(segment_id, length)
            if extent is not None:
                return extent
        extent = self._allocated(self._grow(length), length)
        assert extent is not None
        return extent

    def memory(self, extent: Extent) -> memoryview:
        """Its bytes, writable."""
        return self._segments[extent.segment][0].view(extent.offset, extent.length)

    def free(self, segment_id: int, offset: int) -> None:
        """Give an extent back."""
        arena, allocator = self._segments[segment_id]
        before = allocator.free_bytes
        allocator.free(offset)
        self._used -= allocator.free_bytes - before
        if allocator.free_bytes == allocator.size_bytes:
            self._give_up(segment_id, arena)

    def free_soon(self, segment_id: int, offset: int) -> None:
        """The same for finalizers, which run in the middle of anything."""
        self._unheld.append((segment_id, offset))

    def _allocated(self, segment_id: int, length: int) -> Extent | None:
        arena, allocator = self._segments[segment_id]
        offset = allocator.allocate(length)
        if offset is None:
            return None
        arena.reserve(allocator.high_water)
        return Extent(segment_id, offset, length)

    def _give_up(self, segment_id: int, arena: Arena) -> None:
        """Retire a segment that nothing lies in, unless it may be needed."""
        rest = sum(each.size_bytes for each, _ in self._segments.values()) - arena.size_bytes
        if rest >= _SLACK * max(self._peak, self._peak_before, _SMALLEST_BYTES):
            del self._segments[segment_id]
            arena.close()
            self._retire(segment_id)

    def _grow(self, length: int) -> int:
        """A segment as large as all that are there, so that there are never many."""
        total = sum(arena.size_bytes for arena, _ in self._segments.values())
        size_bytes = max(2 * rounded(length), total, _SMALLEST_BYTES)
        segment_id, self._next_id = self._next_id, self._next_id + 1
        arena = Arena.create(f"dataplane-worker-{os.getpid()}", size_bytes)
        if self._whole:
            arena.reserve(size_bytes)
        self._segments[segment_id] = arena, Allocator(size_bytes)
        self._announce(segment_id, arena.fd, size_bytes)
        return segment_id

    def _count(self, length: int) -> None:
        self._allocations += 1
        if self._allocations % _WINDOW == 0:
            self._peak_before, self._peak = self._peak, self._used
            for segment_id, (arena, allocator) in reversed(list(self._segments.items())):
                if allocator.free_bytes == allocator.size_bytes:
                    self._give_up(segment_id, arena)
        self._used += length
        self._peak = max(self._peak, self._used)


class Mapped:
    """The trainer's side of one worker's segments."""

    def __init__(self, pinning: Pinning | None) -> None:
        self._pinning = pinning or NoDevice()
        self._segments: dict[int, _Mapping] = {}
        self._dead: deque[tuple[int, int]] = deque()
        self._kept: forks.Kept[tuple[_Mapping, int, int]] = forks.Kept()
        self._pid = os.getpid()
        self._is_closed = False

    def attach(self, segment_id: int, fd: int, size_bytes: int) -> None:
        """Map a segment that the worker announced.

        Raises:  ClosedError: it is not what the worker said.
        """
        arena = Arena.attach(fd, size_bytes)
        self._segments[segment_id] = _Mapping(arena, self._pinning)

    def detach(self, segment_id: int) -> None:
        """Forget a segment that the worker gave up; its mapping ends with its last view."""
        del self._segments[segment_id]

    def take(self, extent: Extent) -> Bytes:
        """The memory of an extent. Whoever keeps this very object, or a view of it, keeps it.

        Shapes:  result: uint8[extent.length], writable.
        """
        mapping = self._segments[extent.segment]
        memory: Bytes = np.frombuffer(mapping.arena.view(extent.offset, extent.length), np.uint8)
        # The mapping is an argument so that it stays, and stays pinned, as long as its extents.
        number = forks.born()
        died = weakref.finalize(memory, self._died, mapping, extent, number)
        died.atexit = False
        mapping.alive[number] = extent.offset, extent.length
        return memory

    def peek(self, extent: Extent) -> memoryview:
        """Its bytes, for a moment: whoever peeks gives the extent back with `give_back`."""
        return self._segments[extent.segment].arena.view(extent.offset, extent.length)

    def give_back(self, extent: Extent) -> None:
        """Nobody here needs this extent."""
        self._dead.append((extent.segment, extent.offset))

    def given_back(self) -> list[tuple[int, int]]:
        """(segment, offset) of the extents that died since the last call."""
        for mapping, segment_id, offset in self._kept.let_go():
            self._unused(mapping, segment_id, offset)
        dead: list[tuple[int, int]] = []
        while self._dead:
            dead.append(self._dead.popleft())
        return dead

    def close(self) -> None:
        """The worker is gone: mappings end with their last views, and nobody writes what children
        may read. May be called twice.
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
            self._kept.add(children, (mapping, extent.segment, extent.offset))
        else:
            self._unused(mapping, extent.segment, extent.offset)

    def _unused(self, mapping: _Mapping, segment_id: int, offset: int) -> None:
        self._pinning.when_unread(partial(self._give_back_read, mapping, segment_id, offset))

    def _give_back_read(self, mapping: _Mapping, segment_id: int, offset: int) -> None:
        del mapping  # it was kept, pinned, until no device could read the extent
        self._dead.append((segment_id, offset))


class _Mapping:
    """One segment as the trainer has it; unpinned and unmapped when nobody knows it any more."""

    def __init__(self, arena: Arena, pinning: Pinning) -> None:
        self.arena = arena
        self.alive: dict[int, tuple[int, int]] = {}  # the extents of it, by number
        _mappings.add(self)
        unpin = pinning.pin(np.frombuffer(arena.view(0, arena.size_bytes), np.uint8))
        weakref.finalize(self, _unpin_and_close, arena, unpin).atexit = False


def _unpin_and_close(arena: Arena, unpin: Callable[[], None]) -> None:
    unpin()
    arena.close()


_mappings: weakref.WeakSet[_Mapping] = weakref.WeakSet()


def _keep_what_lives() -> None:
    for mapping in list(_mappings):
        mapping.arena.keep_only(mapping.alive.values())
    _mappings.clear()


os.register_at_fork(after_in_child=_keep_what_lives)
