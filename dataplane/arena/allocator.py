"""Who has which part of an arena: best fit over free extents, lowest address first. Pure.

Invariants:
1. Extents that were given out never overlap, and every one lies inside the arena.
2. Two free extents are never neighbours: they are merged at once.
3. `free_bytes` plus the bytes given out is the arena's size.
4. The lowest of the extents that fit best is taken, so that the same warm pages are used again
   and again and the high-water mark, which is what costs memory, stays low.
"""

from __future__ import annotations

import bisect

from dataplane.errors import ClosedError

GRANULE_BYTES = 4096


def rounded(length: int) -> int:
    """The bytes that an allocation of `length` takes."""
    return -(-max(length, 1) // GRANULE_BYTES) * GRANULE_BYTES


class Allocator:
    """Free extents of one arena; sizes are rounded up to whole pages."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // GRANULE_BYTES * GRANULE_BYTES
        self._starts = [0]
        self._lengths = {0: self.size_bytes}
        self._taken: dict[int, int] = {}
        self.free_bytes = self.size_bytes
        self.high_water = 0

    def allocate(self, length: int) -> int | None:
        """The offset of `length` bytes, or None where no free extent is that long."""
        need = rounded(length)
        fitting = [(size, at) for at, size in self._lengths.items() if size >= need]
        if not fitting:
            return None
        size, at = min(fitting)
        self._remove(at)
        if size > need:
            self._insert(at + need, size - need)
        self._taken[at] = need
        self.free_bytes -= need
        self.high_water = max(self.high_water, at + need)
        return at

    def copy(self) -> Allocator:
        """Another one in the same state, to try things out."""
        twin = Allocator(self.size_bytes)
        twin._starts = self._starts.copy()
        twin._lengths = self._lengths.copy()
        twin._taken = self._taken.copy()
        twin.free_bytes, twin.high_water = self.free_bytes, self.high_water
        return twin

    def free(self, offset: int) -> int:
        """Give an extent back: the length of the free extent that it is part of now.

        Raises:  ClosedError: it was not given out, or was given back before.
        """
        length = self._taken.pop(offset, None)
        if length is None:
            raise ClosedError(f"nothing was allocated at {offset}")
        self.free_bytes += length
        where = bisect.bisect_left(self._starts, offset)
        if where < len(self._starts) and self._starts[where] == offset + length:
            length += self._remove(self._starts[where])
        if where > 0:
            before = self._starts[where - 1]
            if before + self._lengths[before] == offset:
                length += self._remove(before)
                offset = before
        self._insert(offset, length)
        return length

    def shrink(self, offset: int, length: int) -> None:
        """Give back the tail of an extent of which only `length` bytes are needed."""
        keep, had = rounded(length), self._taken[offset]
        if keep >= had:
            return
        self._taken[offset] = keep
        self._taken[offset + keep] = had - keep
        self.free(offset + keep)

    def free_extents(self) -> list[tuple[int, int]]:
        """(offset, length) of what is not given out, the longest first."""
        return sorted(self._lengths.items(), key=lambda each: (-each[1], each[0]))

    @property
    def largest_free(self) -> int:
        """The longest extent that could be allocated now, in bytes."""
        return max(self._lengths.values(), default=0)

    def _remove(self, at: int) -> int:
        del self._starts[bisect.bisect_left(self._starts, at)]
        return self._lengths.pop(at)

    def _insert(self, at: int, length: int) -> None:
        bisect.insort(self._starts, at)
        self._lengths[at] = length
