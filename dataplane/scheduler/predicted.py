"""Predicts how many blocks a node reads in each epoch, by running the node's own eviction over the
plan, without any bytes. Pure.

Invariants:
1. Blocks are loaded in the order in which the plan needs them, and find room as those of a running
   node do: `Room`, `NextUse` and `Allocator` are its own.
2. The time grows with the blocks that are looked at, which are BLOCKS_MAX at most: of a larger
   dataset every n-th, with an n-th of the arena.
3. Nodes that lend each other blocks are one node, with the memory of all, but for what copies take:
   a block that is lent is on each node that reads it, from when it is read until its window closes,
   and its owner keeps it as it was read. What is read ahead leaves room for others, as in a node.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from dataplane.arena.allocator import Allocator
from dataplane.model import Region
from dataplane.plan.order import SampleOrder
from dataplane.scheduler.block import BlockPhase, CachedBlock
from dataplane.scheduler.dataset import DatasetBlocks, Ints
from dataplane.scheduler.disk import DiskTier
from dataplane.scheduler.holdings import Holdings
from dataplane.scheduler.next_use import NextUse, WalkPosition
from dataplane.scheduler.read_again import ReadAgain
from dataplane.scheduler.records import Moment
from dataplane.scheduler.room import Room
from dataplane.scheduler.shared import SharedSlabs
from dataplane.scheduler.streams import StreamTable

BLOCKS_MAX = 4000
_AHEAD_PARTS = 3
"""Copies that are read ahead take such a part of the memory at most: nodes then read less ahead."""


class Guests(Struct, frozen=True):
    """On how many nodes each block is read that do not own it, and whether its owner reads it.

    Shapes:  counts: int64[n].   is_local: bool[n].
    """

    counts: Ints
    is_local: npt.NDArray[np.bool_]


GuestsOf = Callable[[int, Ints], Guests]
"""Of an epoch and some of its blocks."""


class EpochReads(Struct, frozen=True):
    """How many blocks an epoch needs, how many of those are read from storage, and their bytes; and
    how many from the node's disk.
    """

    blocks_needed: int
    blocks_read: int
    bytes_read: int
    disk_blocks: int = 0
    disk_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """The part of the blocks that is still in memory from an earlier epoch."""
        return 1 - (self.blocks_read + self.disk_blocks) / max(self.blocks_needed, 1)


class Prediction(Struct, frozen=True):
    """The reads of each epoch, from the first one on. `is_sampled`: estimated from a part of the
    blocks. `is_too_small`: the arena cannot hold all open windows, so blocks are read several times
    in an epoch, which is not counted.
    """

    epochs: tuple[EpochReads, ...]
    is_sampled: bool
    is_too_small: bool


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
    """The reads of all but the last of these consecutive epochs, each of which needs these blocks,
    with an arena of this size and so much disk, if blocks are read as many positions `ahead`, and
    so many are being fetched or decoded at any time. `guests`: of nodes that lend blocks.

    Shapes:  needed: int64[n] each, rising.
    """
    count = max(map(len, needed))
    step = -(-count // BLOCKS_MAX)
    some = [blocks[blocks % step == 0] for blocks in needed[:-1]]
    lent = [guests(epoch, blocks) for epoch, blocks in enumerate(some)]
    arena_bytes, cache_bytes = arena_bytes // step, cache_bytes // step
    copies = partial(_copies_bytes, dataset, arena_bytes, ahead)
    arena_bytes = max(arena_bytes - max(map(copies, orders, some, lent), default=0), 0)
    node = _Node(dataset, orders, arena_bytes, cache_bytes, ahead, under_way // step)
    for epoch, blocks in enumerate(some):
        node.read(epoch, blocks, lent[epoch].is_local)
    return Prediction(
        tuple(
            _scaled(dataset, blocks, step, *read)
            for blocks, *read in zip(needed[:-1], node.missed, node.on_disk, strict=True)
        ),
        is_sampled=step > 1,
        is_too_small=node.is_too_small,
    )


def _copies_bytes(
    dataset: DatasetBlocks,
    arena_bytes: int,
    ahead: int,
    order: SampleOrder,
    blocks: Ints,
    guests: Guests,
) -> int:
    """What copies of these blocks take."""
    first, last = order.block_span(blocks)
    taken = guests.counts * dataset.kept(blocks)
    by_time = np.argsort(np.concatenate([first, last + 1]), kind="stable")
    in_windows = int(np.cumsum(np.concatenate([taken, -taken])[by_time]).max(initial=0))
    every = int(taken.sum())
    read_ahead = min(every * ahead // max(order.sample_count, 1), arena_bytes // _AHEAD_PARTS)
    return min(in_windows + read_ahead, every)


def _scaled(
    dataset: DatasetBlocks, blocks: Ints, step: int, missed: Sequence[int], on_disk: Sequence[int]
) -> EpochReads:
    """What is expected of all blocks, if these of every `step`-th are read."""
    times = 1.0 if step == 1 else len(blocks) / max(int((blocks % step == 0).sum()), 1)
    found = [
        round(count * times)
        for read in (missed, on_disk)
        for count in (len(read), sum(map(dataset.read_bytes, read)))
    ]
    return EpochReads(len(blocks), *found)


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
        again = ReadAgain(arena_bytes, lambda _note: None)
        holdings = Holdings(arena_bytes)
        self._room = Room(self._allocator, shared, self._uses, self._evict, again, moment, holdings)
        self._disk = DiskTier(cache_bytes, arena_bytes, lambda _dataset: self._readings)
        self._disk.is_known = True
        self._held: dict[int, CachedBlock] = {}
        self._keys = itertools.count(1)
        self._under_way: deque[Region] = deque()
        self._under_way_max = under_way
        self.missed: list[list[int]] = []
        self.on_disk: list[list[int]] = []
        """The blocks that each epoch has read from storage, and from the disk, so far."""
        self.is_too_small = False

    def read(self, epoch: int, blocks: Ints, is_local: npt.NDArray[np.bool_]) -> None:
        """Load what the next epoch needs, in the order in which it does.

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
                self.is_too_small |= not self._load(index, is_local=is_read_here, greedy=True)
            if (change := self._disk.choose(self._dataset, index)) is not None:
                self._disk.ended(change.name, is_done=True)

    def _go_to(self, epoch: int, position: int) -> None:
        """Where the reader is: before the epoch's first position, it is still in the one before."""
        now = epoch - (position < 0)
        at = position + (epoch - now) * self._orders[now].sample_count
        left = self._orders[now].sample_count - at
        number = now + 1 if now < epoch else -now - 2
        self._readings = [
            WalkPosition(now, self._orders[now], at),
            # Another reader than the one that is open later, as in a node.
            WalkPosition(number, self._orders[now + 1], -left, is_open=now < epoch),
        ]

    def _load(self, index: int, *, is_local: bool, greedy: bool) -> bool:
        """Load a block: False if that takes more than what no open window needs. It is decoded only
        where it is read.
        """
        marks = self._dataset.marks
        block = CachedBlock(self._dataset, index, next(self._keys), BlockPhase.READY)
        block.raw = self._room.of_block(block, marks.raw.item(index), greedy=greedy)
        decoded_bytes = marks.decoded.item(index) if is_local else 0
        if block.raw is not None and decoded_bytes:
            block.decoded = self._room.of_block(block, decoded_bytes, greedy=greedy)
            self._under_way.append(block.raw)
            block.raw = None
            while len(self._under_way) > self._under_way_max:
                self._allocator.free(self._under_way.popleft().offset)
        if not block.regions:
            return False
        marks.touched[index] = marks.keys[index] = block.key
        self._held[index] = block
        self._uses.add(block)
        self._room.became_evictable(block)
        return not greedy

    def _evict(self, block: CachedBlock) -> None:
        for region in block.regions:
            self._allocator.free(region.offset)
        self._uses.remove(block)
        del self._held[block.index]
        self._dataset.marks.keys[block.index] = 0
