"""Allocate extents of an arena: best fit over free extents, lowest address first. Pure.

Invariants:
1. Allocated extents never overlap, and each lies inside the arena.
2. Adjacent free extents are merged at once.
3. `free_bytes` plus the allocated bytes is the arena's size.
4. Among equally good fits, the lowest extent is taken, so that the same warm pages are used again
   and the high-water mark, which decides the memory used, stays low.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from dataplane.model.errors import ClosedError
from dataplane.model.records import Region

GRANULE_BYTES = 4096
_SPARE_PARTS = 8
"""A brief allocation fills the smallest gap if that leaves at most an eighth of its length free;
otherwise it is cut from the largest gap.
"""


def rounded(length: int) -> int:
    """Return the bytes that an allocation of `length` takes."""
    return -(-max(length, 1) // GRANULE_BYTES) * GRANULE_BYTES


class Allocator:
    """Free extents of one arena; sizes are rounded up to whole pages."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // GRANULE_BYTES * GRANULE_BYTES
        self._lengths: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        self._taken: dict[int, int] = {}
        self.free_bytes = self.size_bytes
        self.high_water = 0
        self._insert(0, self.size_bytes)

    def allocate(self, length: int, *, is_brief: bool = False) -> int | None:
        """Return the offset of `length` bytes, or None if no free extent is that long. `is_brief`:
        the bytes will be freed soon, so they are taken from the end of a free extent.
        """
        need = rounded(length)
        where = bisect.bisect_left(self._by_length, (need, 0))
        if where == len(self._by_length):
            return None
        size, at = self._by_length[where]
        if is_brief and size > need + need // _SPARE_PARTS:
            size, at = self._by_length[-1]
        self._remove(at)
        if is_brief:
            self._insert(at, size - need)
            at += size - need
        else:
            self._insert(at + need, size - need)
        self._taken[at] = need
        self.free_bytes -= need
        self.high_water = max(self.high_water, at + need)
        return at

    def trial(self) -> FreeTrial:
        """Return a trial, which shows the extents that would be free if some were freed."""
        return FreeTrial(self._taken, self._lengths, self._starts, self._by_length[-2:])

    def free(self, offset: int) -> None:
        """Give an extent back.

        Raises:  ClosedError: it was not allocated, or was freed before.
        """
        length = self._taken.pop(offset, None)
        if length is None:
            raise ClosedError(f"nothing was allocated at {offset}")
        self.free_bytes += length
        end = offset + length
        if end in self._lengths:
            end += self._remove(end)
        before = self._starts.get(offset)
        if before is not None:
            self._remove(before)
            offset = before
        self._insert(offset, end - offset)

    def shrink(self, offset: int, length: int) -> None:
        """Give back the tail of an extent of which only `length` bytes are needed."""
        keep, had = rounded(length), self._taken[offset]
        if keep >= had:
            return
        self._taken[offset] = keep
        self._taken[offset + keep] = had - keep
        self.free(offset + keep)

    def free_extents(self) -> list[tuple[int, int]]:
        """Return (offset, length) of the free extents, the longest first."""
        return sorted(self._lengths.items(), key=lambda extent: (-extent[1], extent[0]))

    def _remove(self, at: int) -> int:
        length = self._lengths.pop(at)
        del self._starts[at + length]
        del self._by_length[bisect.bisect_left(self._by_length, (length, at))]
        return length

    def _insert(self, at: int, length: int) -> None:
        if length:
            self._lengths[at] = length
            self._starts[at + length] = at
            bisect.insort(self._by_length, (length, at))


class FreeTrial:
    """The free extents of an allocator as if more were free; the allocator is not changed. Invalid
    once the allocator changes.
    """

    def __init__(
        self,
        taken: Mapping[int, int],
        lengths: Mapping[int, int],
        starts: Mapping[int, int],
        largest: Sequence[tuple[int, int]],
    ) -> None:
        """`taken` and `lengths` map starts of extents to lengths; `starts` maps the ends of free
        extents to their starts. `largest` are (length, start) of up to two free extents.
        """
        self._taken, self._lengths, self._starts = taken, lengths, starts
        self._largest = [*largest]
        self._ends_now: dict[int, int] = {}
        self._starts_now: dict[int, int] = {}

    def free(self, offset: int) -> int:
        """Free an extent in the trial; return the length of the free extent that contains
        it then.
        """
        start, end = offset, offset + self._taken[offset]
        while True:
            if end in self._ends_now:
                end = self._ends_now.pop(end)
            elif end in self._lengths:
                end += self._lengths[end]
            else:
                break
        while True:
            if start in self._starts_now:
                start = self._starts_now.pop(start)
            elif start in self._starts:
                start = self._starts[start]
            else:
                break
        self._ends_now[start], self._starts_now[end] = end, start
        apart = [extent for extent in self._largest if not start <= extent[1] < end]
        self._largest = sorted([*apart, (end - start, start)])[-2:]
        return end - start

    def has_room(self, first: int, second: int = 0) -> bool:
        """Whether both lengths would find room at once. May return False wrongly if the two largest
        free extents have become one.
        """
        need, other = rounded(first), rounded(second) if second else 0
        lengths = [length for length, _ in self._largest]
        if not lengths:
            return False
        if lengths[-1] >= need + other:
            return True
        fits = lengths[-1] >= max(need, other) and lengths[0] >= min(need, other)
        return fits and len(lengths) > 1

    def is_in_room(self, regions: Sequence[Region], first: int, second: int = 0) -> bool:
        """Whether one of these regions is in the extents that have room for both lengths, according
        to `has_room`.
        """
        need, other = rounded(first), rounded(second) if second else 0
        largest = self._largest[-1:] if self._largest[-1][0] >= need + other else self._largest
        return any(
            at <= region.offset < at + length for length, at in largest for region in regions
        )
