"""Predict how many blocks a node reads in each epoch, by running the node's own eviction over the
plan, without any bytes. Pure.

Invariants:
1. Blocks are loaded in the order in which the plan needs them, and find room as in a running node:
   `Room`, `NextUse` and `Allocator` are the node's own.
2. The time grows with the number of simulated blocks, at most BLOCKS_MAX. In a larger dataset these
   are every n-th block, with an n-th of the arena, and each block that is far larger than the
   others, as if it took an n-th of its memory. Results are scaled by bytes, so the first epoch's
   are exact.
3. Nodes that lend each other blocks are simulated as one node with the memory of all, except for
   copies. A lent block is on each node that reads it, from the read until its window closes, and
   its owner keeps the raw block. Blocks read ahead leave room for others, as in a node.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from dataplane.arena.allocator import Allocator
from dataplane.model import Region
from dataplane.plan.order import SampleOrder
from dataplane.scheduler.dataset import BlockPlaces, DatasetBlocks, Ints
from dataplane.scheduler.disk import DiskTier
from dataplane.scheduler.holdings import Holdings, WaitingTasks
from dataplane.scheduler.next_use import NextUse, WalkPosition
from dataplane.scheduler.records import BlockPhase, CachedBlock, Moment
from dataplane.scheduler.room import Room
from dataplane.scheduler.streams import SharedSlabs, StreamTable

BLOCKS_MAX = 4000
_OPEN_BLOCKS_MAX = 1 << 18
"""The most memory that open windows take is computed from so many blocks at most."""
_LARGE_PARTS = 2
"""Blocks count as large from so many times the mean of BLOCKS_MAX on: at most half are large."""
_AHEAD_PARTS = 3
"""Copies that are read ahead take such a part of the memory at most: nodes then read less ahead."""


class Guests(Struct, frozen=True):
    """The number of nodes that read each block without owning it, and whether its owner reads it.

    Shapes:  counts: int64[n].   is_local: bool[n].
    """

    counts: Ints
    is_local: npt.NDArray[np.bool_]


GuestsOf = Callable[[int, Ints], Guests]
"""Returns the guests of an epoch and some of its blocks."""


class EpochReads(Struct, frozen=True):
    """The number of blocks that an epoch needs; of these, the number read from storage, with their
    bytes, and the number read from the node's disk. `bytes_needed`: the bytes to read if nothing
    was kept.
    """

    blocks_needed: int
    bytes_needed: int
    blocks_read: int
    bytes_read: int
    disk_blocks: int = 0
    disk_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of the blocks that is still in memory from an earlier epoch."""
        return 1 - (self.blocks_read + self.disk_blocks) / max(self.blocks_needed, 1)


class Prediction(Struct, frozen=True):
    """The reads of each epoch, from the first one on. `is_sampled`: estimated from some of the
    blocks. Blocks that are read several times in an epoch, since the arena cannot hold all open
    windows, count once.
    """

    epochs: tuple[EpochReads, ...]
    is_sampled: bool


class _Sample(Struct, frozen=True):
    """The simulated blocks of a dataset: all fetched blocks of more than `large_bytes`, and every
    `step`-th of the others.
    """

    dataset: DatasetBlocks
    step: int
    large_bytes: float

    @classmethod
    def of(cls, dataset: DatasetBlocks, needed: Sequence[Ints], blocks_max: int) -> _Sample:
        """Choose at most this many blocks of each kind."""
        if max(map(len, needed)) <= blocks_max:
            return cls(dataset, 1, np.inf)
        raw = dataset.marks.raw
        large_bytes = max(int(raw[blocks].sum()) for blocks in needed) * _LARGE_PARTS / blocks_max
        large = [int((raw[blocks] > large_bytes).sum()) for blocks in needed]
        others = max(len(blocks) - count for blocks, count in zip(needed, large, strict=True))
        step = -(-others // (blocks_max - max(large)))
        return cls(dataset, step, large_bytes if any(large) else np.inf)

    def are_large(self, blocks: Ints) -> npt.NDArray[np.bool_]:
        """Return which of these blocks are large."""
        if np.isinf(self.large_bytes):
            return np.zeros(len(blocks), np.bool_)
        found: npt.NDArray[np.bool_] = self.dataset.marks.raw[blocks] > self.large_bytes
        return found

    def part(self, blocks: Ints) -> Ints:
        """Select the simulated ones of these blocks."""
        if self.step == 1:
            return blocks
        found: Ints = blocks[(blocks % self.step == 0) | self.are_large(blocks)]
        return found

    def thinned(self) -> DatasetBlocks:
        """Return the dataset as a `step`-th of the memory holds it: every simulated block stands
        for `step` blocks, except that large ones stand only for themselves.
        """
        dataset, marks = self.dataset, self.dataset.marks
        if np.isinf(self.large_bytes):
            return dataset
        every = np.arange(len(marks.raw))
        parts = np.where(self.are_large(every), self.step, 1)
        places = dataset.places
        if places is not None:
            read = dataset.all_read_bytes(every) // parts
            places = BlockPlaces(places.shard, places.offset, read)
        marks = replace(marks, raw=-(-marks.raw // parts), decoded=-(-marks.decoded // parts))
        return replace(dataset, marks=marks, places=places)

    def scaled(self, blocks: Ints, missed: Sequence[int], on_disk: Sequence[int]) -> EpochReads:
        """Scale the reads of the simulated blocks to all of these blocks."""
        part, bytes_of = self.part(blocks), self.dataset.all_read_bytes
        needed_bytes, large = int(bytes_of(blocks).sum()), part[self.are_large(part)]
        others = part[~self.are_large(part)]
        large_bytes, other_bytes = int(bytes_of(large).sum()), int(bytes_of(others).sum())
        times = (len(blocks) - len(large)) / max(len(others), 1)
        bytes_times = (needed_bytes - large_bytes) / max(other_bytes, 1)
        found = []
        for read in (np.array(missed, np.int64), np.array(on_disk, np.int64)):
            is_large, sizes = self.are_large(read), bytes_of(read)
            found.append(round(int(is_large.sum()) + int((~is_large).sum()) * times))
            found.append(
                round(int(sizes[is_large].sum()) + int(sizes[~is_large].sum()) * bytes_times)
            )
        return EpochReads(len(blocks), needed_bytes, *found)


def _no_guests(_epoch: int, blocks: Ints) -> Guests:
    return Guests(np.zeros(len(blocks), np.int64), np.ones(len(blocks), np.bool_))


def predicted(
    dataset: DatasetBlocks,
    orders: Sequence[SampleOrder],
    needed: Sequence[Ints],
    arena_bytes: int,
    ahead: int,
    under_way: int,
    cache_bytes: int = 0,
    guests: GuestsOf = _no_guests,
) -> Prediction:
    """Predict the reads of all but the last of these consecutive epochs. Each needs these blocks,
    with an arena of `arena_bytes` and this much disk. Blocks are read `ahead` positions early, and
    a fixed number is being fetched or decoded at any time. `guests`: for nodes that lend blocks.

    Shapes:  needed: int64[n] each, rising.
    """
    sample = _Sample.of(dataset, needed, BLOCKS_MAX)
    step, some = sample.step, [sample.part(blocks) for blocks in needed[:-1]]
    thinned = sample.thinned()
    lent = [guests(epoch, blocks) for epoch, blocks in enumerate(some)]
    arena_bytes, cache_bytes = arena_bytes // step, cache_bytes // step
    copies = partial(_copies_bytes, thinned, arena_bytes, ahead)
    arena_bytes = max(arena_bytes - max(map(copies, orders, some, lent), default=0), 0)
    node = _Node(thinned, orders, arena_bytes, cache_bytes, ahead, under_way // step)
    for epoch, blocks in enumerate(some):
        node.read(epoch, blocks, lent[epoch].is_local)
    return Prediction(
        tuple(
            sample.scaled(blocks, *read)
            for blocks, *read in zip(needed[:-1], node.missed, node.on_disk, strict=True)
        ),
        is_sampled=step > 1,
    )


def open_bytes_max(dataset: DatasetBlocks, order: SampleOrder, blocks: Ints) -> int:
    """Return the largest total size of those blocks whose windows are open at the same time."""
    sample = _Sample.of(dataset, [blocks], _OPEN_BLOCKS_MAX)
    part = sample.part(blocks)
    return sample.step * _open_at_once(order, part, sample.thinned().kept(part))


def _open_at_once(order: SampleOrder, blocks: Ints, taken: Ints) -> int:
    """Return the largest total of `taken` for blocks that are open at the same time. Blocks are
    dropped before others come.
    """
    first, last = order.block_span(blocks)
    by_time = np.argsort(np.concatenate([last + 1, first]), kind="stable")
    return int(np.cumsum(np.concatenate([-taken, taken])[by_time]).max(initial=0))


def _copies_bytes(
    dataset: DatasetBlocks,
    arena_bytes: int,
    ahead: int,
    order: SampleOrder,
    blocks: Ints,
    guests: Guests,
) -> int:
    """Return the memory that copies of these blocks take."""
    taken = guests.counts * dataset.kept(blocks)
    in_windows = _open_at_once(order, blocks, taken)
    every = int(taken.sum())
    read_ahead = min(every * ahead // max(order.sample_count, 1), arena_bytes // _AHEAD_PARTS)
    return min(in_windows + read_ahead, every)


class _Node:
    """The blocks in memory while epochs are read one after the other."""

    def __init__(
        self,
        dataset: DatasetBlocks,
        orders: Sequence[SampleOrder],
        arena_bytes: int,
        cache_bytes: int,
        ahead: int,
        under_way: int,
    ) -> None:
        dataset.marks.keys[:] = 0
        self._dataset, self._orders, self._ahead = dataset, orders, ahead
        self._allocator, moment = Allocator(arena_bytes), Moment()
        shared = SharedSlabs(self._allocator, StreamTable(), moment)
        self._readings: list[WalkPosition] = []
        self._uses = NextUse(lambda _dataset: self._readings)
        waiting = WaitingTasks(moment, Holdings(arena_bytes))
        self._room = Room(self._allocator, shared, self._uses, self._evict, waiting)
        self._disk = DiskTier(cache_bytes, arena_bytes, lambda _dataset: self._readings)
        self._disk.is_known = True
        self._held: dict[int, CachedBlock] = {}
        self._keys = itertools.count(1)
        self._under_way: deque[Region] = deque()
        self._under_way_max = under_way
        self.missed: list[list[int]] = []
        self.on_disk: list[list[int]] = []
        """The blocks that each epoch has read from storage, and from the disk, so far."""

    def read(self, epoch: int, blocks: Ints, is_local: npt.NDArray[np.bool_]) -> None:
        """Load the blocks of the next epoch, in the order of need.

        Shapes:  blocks: int64[n].   is_local: bool[n], whether it is read where it is kept.
        """
        first, _ = self._orders[epoch].block_span(blocks)
        by_first = np.argsort(first, kind="stable")
        self.missed.append([])
        self.on_disk.append([])
        reached = -self._ahead if epoch else 0
        each = (blocks, first, is_local)
        for index, needed, is_read_here in zip(
            *(array[by_first].tolist() for array in each), strict=True
        ):
            reached = max(reached, needed - self._ahead)
            if index in self._held:
                continue
            is_on_disk = self._disk.is_kept(self._dataset, index)
            (self.on_disk if is_on_disk else self.missed)[-1].append(index)
            self._go_to(epoch, reached)
            if not self._load(index, is_local=is_read_here, greedy=False):
                reached = needed
                self._go_to(epoch, reached)
                # A task waits: windows have closed, and what was being decoded has ended by then.
                self._end_all_but(0)
                self._load(index, is_local=is_read_here, greedy=True)
            if (change := self._disk.choose(self._dataset, index)) is not None:
                self._disk.ended(change.name, is_done=True)

    def _go_to(self, epoch: int, position: int) -> None:
        """Move the reader. Before the epoch's first position, it is still in the previous epoch."""
        now = epoch - (position < 0)
        at = position + (epoch - now) * self._orders[now].sample_count
        left = self._orders[now].sample_count - at
        number = now + 1 if now < epoch else -now - 2
        self._readings = [
            WalkPosition(now, self._orders[now], at),
            # As in a node, this is not the reader that is opened later.
            WalkPosition(number, self._orders[now + 1], -left, is_open=now < epoch),
        ]

    def _load(self, index: int, *, is_local: bool, greedy: bool) -> bool:
        """Load a block; return False if there is no room for it. `greedy`: evict any block for it.
        A block is decoded only where it is read.
        """
        marks = self._dataset.marks
        block = CachedBlock(self._dataset, index, next(self._keys), BlockPhase.READY)
        block.raw = self._room.of_block(block, marks.raw.item(index), greedy=greedy)
        if block.raw is None:
            return False
        if decoded_bytes := marks.decoded.item(index) if is_local else 0:
            block.decoded = self._room.of_block(block, decoded_bytes, greedy=greedy)
            if block.decoded is None:
                self._allocator.free(block.raw.offset)
                return False
            self._under_way.append(block.raw)
            block.raw = None
            self._end_all_but(self._under_way_max)
        marks.touched[index] = marks.keys[index] = block.key
        self._held[index] = block
        self._uses.add(block)
        self._room.became_evictable(block)
        return True

    def _end_all_but(self, count: int) -> None:
        """Finish decoding all but the last `count` blocks, oldest first."""
        while len(self._under_way) > count:
            self._allocator.free(self._under_way.popleft().offset)

    def _evict(self, block: CachedBlock) -> None:
        for region in block.regions:
            self._allocator.free(region.offset)
        self._uses.remove(block)
        del self._held[block.index]
        self._dataset.marks.keys[block.index] = 0
