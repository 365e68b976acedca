"""Finds the block in memory that is needed again last, without looking at all blocks. Pure.

Source:  L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
Systems Journal 5(2), 1966. Caches usually have to guess future use; here the plan tells when each
block is needed.

A reader of this epoch is not the last to need a block: the next epoch reads it again. So the order
of the next epoch is a reader too, at a negative position: minus what is left of this epoch.

The first and the last position at which an order may need a block never change; only readers move.
So each block is in the heaps of one reader: of the readers that have not passed the block's last
position, the reader that reaches the block first. A block is moved to another heap when that reader
has passed it, and when it is about to be evicted but another reader is much closer by now.

Invariants:
1. Every block that was added and not removed is in `never`, or in the heaps of one reader.
2. `farthest` yields each evictable block once: first blocks that no reader needs any more; then
   blocks that are needed later, each at least half as far away as any that follows; last blocks of
   open windows, which may be needed at once, least recently touched first (except for windows
   opened since that order was made).
3. Adding a block and finding the next victim take time logarithmic in the number of blocks. A
   reader that moves back, or is the first of its order, takes a pass over all blocks of its
   dataset; any other that starts, one over the blocks that nobody needed; one that ends, one over
   the blocks in its heaps.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field

from dataplane.plan.order import SampleOrder
from dataplane.scheduler.dataset import DatasetBlocks
from dataplane.scheduler.records import CachedBlock

NEVER = np.iinfo(np.int64).max
_NOWHERE = (np.iinfo(np.int64).min, np.iinfo(np.int64).min)


Name = tuple[int, int, bool]


class WalkPosition(NamedTuple):
    """A reader of a dataset along this order, and the position from which it needs blocks, negative
    if it reads other positions first. `first_block` is the order's number of the dataset's first
    block. `is_open`: its stream is open; otherwise it is expected to be opened.
    """

    number: Hashable
    order: SampleOrder
    position: int
    first_block: int = 0
    is_open: bool = True

    @property
    def name(self) -> Name:
        """A name that is equal for all readers that need the dataset's blocks at the same
        positions.
        """
        return id(self.order), self.first_block, self.is_open

    def spans(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Return the first and the last position at which each block of the dataset may be
        needed.
        """
        numbers = [block + self.first_block for block in blocks]
        first, last = self.order.block_span(np.array(numbers, np.int64))
        return list(zip(first.tolist(), last.tolist(), strict=True))


Readings = Callable[[DatasetBlocks], Sequence[WalkPosition]]
Positions = tuple[tuple[Hashable, int], ...]
"""The number and the position of each reader."""
Spans = dict[int, tuple[int, int]]
"""The first and the last position at which each block may be needed, by key."""


class _Reader(Struct, eq=False):
    """A reader, and the heaps of its blocks: `by_first` has (-first, key, serial) of each block,
    `by_last` (last, key, serial). Stale entries, of blocks that moved to another reader since, are
    skipped.
    """

    position: int
    spans: Spans
    by_first: list[tuple[int, int, int]] = field(default_factory=list)
    by_last: list[tuple[int, int, int]] = field(default_factory=list)

    def use(self, key: int) -> int:
        """Return how many positions away the next use may be."""
        first, last = self.spans[key]
        return NEVER if last < self.position else max(first - self.position, 0)


class _Resident(Struct, eq=False):
    """The blocks of one dataset that are in memory, by key, and the reader that has each, with a
    serial number that marks older heap entries as stale.
    """

    dataset: DatasetBlocks
    blocks: dict[int, CachedBlock] = field(default_factory=dict)
    spans: dict[Name, tuple[WalkPosition, Spans]] = field(default_factory=dict)
    readers: dict[Hashable, _Reader] = field(default_factory=dict)
    never: dict[int, None] = field(default_factory=dict)
    stands: dict[int, tuple[_Reader, int]] = field(default_factory=dict)
    serials: Iterator[int] = field(default_factory=itertools.count)
    horizon: int = 0
    """Uses at least this many positions away are beyond all open streams."""
    has_moved: bool = False
    """Whether examining one reader's blocks has moved some of them to another reader."""

    def use(self, key: int) -> int:
        """Return how many positions away the next use may be, over all readers."""
        return min((reader.use(key) for reader in self.readers.values()), default=NEVER)

    def add(self, block: CachedBlock) -> None:
        """Add a block."""
        self.blocks[block.key] = block
        for reading, spans in self.spans.values():
            _learn(spans, reading, [block])
        self.place(block.key)

    def remove(self, key: int) -> None:
        """Remove a block that is gone."""
        del self.blocks[key]
        self.never.pop(key, None)
        self.stands.pop(key, None)
        for _, spans in self.spans.values():
            del spans[key]

    def place(self, key: int) -> None:
        """Move a block to the reader it now belongs to."""
        self.never.pop(key, None)
        self.stands.pop(key, None)
        soonest = min(self.readers.values(), key=lambda reader: reader.use(key), default=None)
        if soonest is None or soonest.use(key) == NEVER:
            self.never[key] = None
            return
        serial, (first, last) = next(self.serials), soonest.spans[key]
        self.stands[key] = (soonest, serial)
        heapq.heappush(soonest.by_first, (-first, key, serial))
        heapq.heappush(soonest.by_last, (last, key, serial))

    def is_at(self, reader: _Reader, serial: int, key: int) -> bool:
        """Whether this entry in a reader's heap is still valid."""
        return self.stands.get(key) == (reader, serial)

    def move(self, readings: Sequence[WalkPosition]) -> None:
        """Set the readers' positions."""
        now = {reading.number: reading for reading in readings}
        self.horizon = _horizon(readings)
        if any(
            number in now and now[number].position < reader.position
            for number, reader in self.readers.items()
        ):
            self._start_anew(readings)
            return
        for number, reader in self.readers.items():
            if number in now:
                reader.position = now[number].position
        if now.keys() != self.readers.keys():
            self._come_and_go(readings)
        for reader in self.readers.values():
            while reader.by_last and reader.by_last[0][0] < reader.position:
                _, key, serial = heapq.heappop(reader.by_last)
                if self.is_at(reader, serial, key):
                    self.place(key)

    def _come_and_go(self, readings: Sequence[WalkPosition]) -> None:
        """Handle readers that start or end. A block that has a reader is compared with new readers
        only when it is about to be evicted.
        """
        former, known = self.readers, self.readers.keys()
        has_started = any(reading.number not in known for reading in readings)
        self._know(readings)
        self.readers = {
            reading.number: former.get(reading.number)
            or _Reader(reading.position, self.spans[reading.name][1])
            for reading in readings
        }
        left = [
            key
            for number, reader in former.items()
            if number not in self.readers
            for _, key, serial in reader.by_first
            if self.is_at(reader, serial, key)
        ]
        for key in [*left, *(self.never if has_started else ())]:
            self.place(key)

    def _start_anew(self, readings: Sequence[WalkPosition]) -> None:
        self._know(readings)
        self.readers = {
            reading.number: _Reader(reading.position, self.spans[reading.name][1])
            for reading in readings
        }
        for key in self.blocks:
            self.place(key)

    def _know(self, readings: Sequence[WalkPosition]) -> None:
        """Look up where these readers' orders need the blocks, unless it is known."""
        former, self.spans = self.spans, {}
        blocks = list(self.blocks.values())
        for reading in readings:
            name = reading.name
            if name not in self.spans:
                self.spans[name] = former.get(name) or (reading, {})
                if name not in former:
                    _learn(self.spans[name][1], reading, blocks)

    def farthest_of(self, reader: _Reader) -> int:
        """Return the next use of this reader's farthest block; 0 if the reader has no block, or all
        of its blocks may be needed at once.
        """
        while reader.by_first:
            _, key, serial = reader.by_first[0]
            if self.is_at(reader, serial, key):
                use = self.use(key)
                if 2 * use >= reader.use(key):
                    return use
                self.place(key)
                self.has_moved = True
            heapq.heappop(reader.by_first)
        return 0


class NextUse:
    """The blocks in memory, in eviction order."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._residents: dict[int, _Resident] = {}
        self._open: deque[tuple[int, CachedBlock]] = deque()
        self._count = 0

    def __len__(self) -> int:
        """Return how many blocks there are."""
        return self._count

    def add(self, block: CachedBlock) -> None:
        """Add a block that is in memory or being loaded."""
        name = block.dataset.dataset_id
        resident = self._residents.get(name)
        if resident is None:
            resident = self._residents[name] = _Resident(block.dataset)
        resident.add(block)
        self._count += 1

    def remove(self, block: CachedBlock) -> None:
        """Remove a block that is no longer in memory."""
        resident = self._residents[block.dataset.dataset_id]
        resident.remove(block.key)
        self._count -= 1
        if not resident.blocks:
            del self._residents[block.dataset.dataset_id]

    def use_of(self, dataset: DatasetBlocks, index: int) -> int:
        """Return how many positions away the next use of a block may be; NEVER if it has none."""
        spans: dict[Name, tuple[int, int]] = {}
        soonest = NEVER
        for reading in self._readings(dataset):
            span = spans.get(reading.name)
            if span is None:
                (span,) = reading.spans([index])
                spans[reading.name] = span
            if span[1] >= reading.position:
                soonest = min(soonest, max(span[0] - reading.position, 0))
        return soonest

    def orders_now(self, block: CachedBlock) -> tuple[SampleOrder, ...]:
        """Return the orders in which open streams need a block: the orders being read, or else the
        order that needs the block first.
        """
        needs: list[tuple[int, WalkPosition]] = []
        for reading in self._readings(block.dataset):
            ((first, last),) = reading.spans([block.index])
            if reading.is_open and last >= reading.position:
                needs.append((first - reading.position, reading))
        now = [reading for _, reading in needs if reading.position >= 0]
        if needs and not now:
            now.append(min(needs, key=lambda need: need[0])[1])
        return tuple(reading.order for reading in now)

    def is_spare(self, dataset: DatasetBlocks, use: int) -> bool:
        """Whether no open stream needs a block whose next use is this far away, according to the
        last search; the next epoch may need it.
        """
        resident = self._residents.get(dataset.dataset_id)
        known = _horizon(self._readings(dataset)) if resident is None else resident.horizon
        return use == NEVER or use >= known

    def positions(self) -> Positions:
        """Return the positions of the readers of all these blocks: the eviction order changes only
        if a position or the set of blocks does.
        """
        return tuple(
            (reading.number, reading.position)
            for resident in self._residents.values()
            for reading in self._readings(resident.dataset)
        )

    def farthest(self) -> Generator[tuple[CachedBlock, int], None, None]:
        """Yield evictable blocks and how far away their next use is, the farthest first. Close the
        iterator before any block is added or removed.
        """
        for resident in self._residents.values():
            resident.move(self._readings(resident.dataset))
            for key in resident.never:
                if resident.blocks[key].is_evictable:
                    yield resident.blocks[key], NEVER
        yield from self._needed_later()
        yield from self._of_open_windows()

    def _needed_later(self) -> Iterator[tuple[CachedBlock, int]]:
        residents = self._residents.values()
        heads = [(one, reader) for one in residents for reader in one.readers.values()]
        best = _ranked(heads)
        passed: list[tuple[_Resident, int]] = []
        try:
            while best:
                known, at = heapq.heappop(best)
                resident, reader = heads[at]
                use = resident.farthest_of(reader)
                if use == -known:
                    _, key, _ = heapq.heappop(reader.by_first)
                    del resident.stands[key]
                    passed.append((resident, key))
                    if resident.blocks[key].is_evictable:
                        yield resident.blocks[key], use
                    use = resident.farthest_of(reader)
                if resident.has_moved:
                    best = _ranked(heads)
                elif use:
                    heapq.heappush(best, (-use, at))
        finally:
            for resident, key in passed:
                resident.place(key)

    def _of_open_windows(self) -> Iterator[tuple[CachedBlock, int]]:
        """Yield blocks of open windows. A sorted order is used up before a new one is made: blocks
        touched since come after the whole old order.
        """
        passed: list[tuple[int, CachedBlock]] = []
        try:
            yield from self._in_order(passed)
            known = {block.key for _, block in passed}
            self._open.extend(self._in_open_windows(known))
            yield from self._in_order(passed)
        finally:
            self._open.extendleft(reversed(passed))

    def _in_order(self, passed: list[tuple[int, CachedBlock]]) -> Iterator[tuple[CachedBlock, int]]:
        while self._open:
            touched, block = self._open.popleft()
            resident = self._residents.get(block.dataset.dataset_id)
            if resident is None or block.key not in resident.blocks or block.touched != touched:
                continue
            passed.append((touched, block))
            if block.is_evictable and not resident.use(block.key):
                yield block, 0

    def _in_open_windows(self, known: set[int]) -> list[tuple[int, CachedBlock]]:
        found = [
            (block.touched, key, block)
            for resident in self._residents.values()
            for key, block in resident.blocks.items()
            if key not in known and not resident.use(key)
        ]
        return [(touched, block) for touched, _, block in sorted(found, key=lambda each: each[:2])]


def _horizon(readings: Sequence[WalkPosition]) -> int:
    """Return how far away the last position of any open stream is."""
    left = (one.order.sample_count - one.position for one in readings if one.is_open)
    return max(left, default=0)


def _ranked(heads: Sequence[tuple[_Resident, _Reader]]) -> list[tuple[int, int]]:
    """Return a heap of (-use, which) of the farthest block of each of these readers."""
    while True:
        for resident, _ in heads:
            resident.has_moved = False
        found = [(-r.farthest_of(reader), at) for at, (r, reader) in enumerate(heads)]
        if not any(resident.has_moved for resident, _ in heads):
            best = [each for each in found if each[0]]
            heapq.heapify(best)
            return best


def _learn(spans: Spans, reading: WalkPosition, blocks: Sequence[CachedBlock]) -> None:
    """Look up the first and last position of these blocks. A block that a neighbour owns is kept
    only for the epoch for which it was fetched: the neighbour keeps the block for the next epoch.
    """
    if not blocks:
        return
    found = reading.spans([block.index for block in blocks])
    spans.update(zip([block.key for block in blocks], found, strict=True))
    order = reading.order if reading.is_open else None
    spans.update((block.key, _NOWHERE) for block in blocks if not block.is_here_for(order))


# -- eviction orders ---------------------------------------------------------------------------
#
# Keep two eviction orders: one for blocks that occupy memory, one for blocks of local files, of
# which workers only remember the place.

_DIRECT_BLOCKS_MAX = 4096


class EvictionOrders:
    """Both orders. `uses` has the blocks that occupy memory."""

    def __init__(self, readings: Readings) -> None:
        self.uses = NextUse(readings)
        self._direct = NextUse(readings)
        self._uses_of: dict[int, NextUse] = {}

    def add(self, block: CachedBlock) -> None:
        """Add a block, or one that occupies memory from now on."""
        uses = self.uses if block.regions else self._direct
        former = self._uses_of.get(block.key)
        if former is not uses:
            if former is not None:
                former.remove(block)
            uses.add(block)
            self._uses_of[block.key] = uses

    def fetched(self, block: CachedBlock, *, is_guest: bool) -> None:
        """Note a fetched block. A guest, which a neighbour owns, is kept only for its present
        epoch.
        """
        if is_guest:
            uses = self._uses_of[block.key]
            uses.remove(block)
            block.guest_of = uses.orders_now(block)
            uses.add(block)

    def remove(self, block: CachedBlock) -> None:
        """Remove a block that is gone."""
        self._uses_of.pop(block.key).remove(block)

    def spare(self) -> CachedBlock | None:
        """Return a block without memory that must be dropped before another such block comes; None
        if there is room, or if all are in use.
        """
        if len(self._direct) < _DIRECT_BLOCKS_MAX:
            return None
        with contextlib.closing(self._direct.farthest()) as farthest:
            block, _ = next(farthest, (None, 0))
        return block
