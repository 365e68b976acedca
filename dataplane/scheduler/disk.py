"""Decides which blocks a node keeps on its disk: the blocks that are needed again soonest. Pure.

As in memory (next_use.py), the plan says when a block is needed next. A block that is in memory was
fetched for the epoch that is being read, so the next need after that epoch counts: in the next
epoch, or in a job with another order. If that need comes so soon that memory keeps the block until
then, the block takes no room on a disk that cannot hold everything.

Invariants:
1. All files, including those that are being written or removed, take at most `limit_bytes`
   together, once the files of earlier runs were reported and reduced to that.
2. A block is kept in place of blocks that no job reads, or that are needed later than it.
3. To find blocks that are needed later, at most `_LOOKED_AT` blocks are examined. If there are
   more, different ones are examined each time, spread evenly.
4. No block is chosen before all files of earlier runs are known.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from dataplane.arena.allocator import rounded
from dataplane.plan.windows import distinct
from dataplane.scheduler.dataset import DatasetBlocks, Ints
from dataplane.scheduler.events import DiskName
from dataplane.scheduler.next_use import NEVER, Readings, WalkPosition

PAUSE_S = 60.0
_HEADER_BYTES = 64
_LOOKED_AT = 1024
_REMEMBERED = 32
_GOING_MAX = 64
"""The most blocks that are removed to make room for one."""
_GOLDEN = 0.618
_HELD_SHARE = 0.75
"""The part of the arena that blocks for the next epoch take at least, beside open windows."""


class Faults(Struct):
    """Faults of reads, or of writes: until when the disk is left alone, and for how long after the
    next fault.
    """

    what: str
    until: float = -math.inf
    pause_s: float = PAUSE_S


class Change(Struct, frozen=True):
    """A block to write, and the blocks to remove first to make room for it. `size` is 0 if blocks
    are only removed.
    """

    name: DiskName
    size: int
    going: Sequence[tuple[DiskName, int]]

    @property
    def held_bytes(self) -> int:
        """The most bytes that the files take while this change is in progress."""
        return max(self.size, sum(size for _, size in self.going))


class _Shelf(Struct, eq=False):
    """The blocks of one dataset that are on disk, in any order, and its readers."""

    digest: bytes
    datasets: dict[int, DatasetBlocks] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)
    looked: int = 0
    raw_bytes: int = 0
    kept_bytes: int = 0
    """`raw_bytes` and `kept_bytes`: what the whole dataset takes on disk and in memory."""

    def add(self, block: int, size: int) -> None:
        self.places[block] = len(self.blocks)
        self.blocks.append(block)
        self.sizes.append(size)

    def remove(self, block: int) -> int:
        """Remove a block and return its size."""
        at, last, size = self.places.pop(block), self.blocks.pop(), self.sizes.pop()
        if last == block:
            return size
        removed, self.blocks[at], self.sizes[at] = self.sizes[at], last, size
        self.places[last] = at
        return removed

    def some(self, count: int) -> Ints:
        """Return `count` blocks, different ones at each call; all blocks if there are no more."""
        have = len(self.blocks)
        if have <= count:
            return np.array(self.blocks, np.int64)
        step = max(int(have * _GOLDEN), 1)
        at = (self.looked + np.arange(count) * step) % have
        self.looked = (self.looked + count * step) % have
        return distinct(np.array([self.blocks[each] for each in at.tolist()], np.int64))[0]


class DiskTier:
    """The disk of one node. `readings` returns where the readers of a dataset are; `memory_bytes`
    is the node's memory for blocks.
    """

    def __init__(self, limit_bytes: int, memory_bytes: int, readings: Readings) -> None:
        self.limit_bytes, self._memory_bytes = limit_bytes, memory_bytes
        self._readings = readings
        self._read: dict[bytes, _Shelf] = {}
        self._unread: OrderedDict[bytes, _Shelf] = OrderedDict()
        """Shelves of datasets that no job reads; the datasets that were read last come last."""
        self._changes: dict[DiskName, Change] = {}
        self._farthest: list[tuple[int, DiskName]] = []
        """Blocks whose next use was late when they were written or examined, the latest at
        the end."""
        self.used_bytes = 0
        self.is_scanned = self.is_known = False
        """Whether a scan has ended, and whether it has reported all that earlier runs have left."""
        self.reading = Faults("read")
        self.own_share = 1.0
        """The part of all blocks that this node owns, and keeps for the next epoch."""

    def __len__(self) -> int:
        """Return how many blocks there are."""
        shelves = [*self._read.values(), *self._unread.values()]
        return sum(len(shelf.blocks) for shelf in shelves)

    def is_kept(self, dataset: DatasetBlocks, block: int) -> bool:
        """Whether a block can be read from the disk."""
        if not self.limit_bytes or not dataset.digest:
            return False
        return block in self._shelf(dataset).places

    def may_have(self, dataset: DatasetBlocks, block: int, now: float) -> bool:
        """Whether to try the disk. Until the scan is over, any block may be there: trying costs
        less than reading it elsewhere.
        """
        if not self.limit_bytes or now < self.reading.until:
            return False
        return not self.is_scanned or self.is_kept(dataset, block)

    def found(self, name: DiskName, file_bytes: int) -> None:
        """Note a block of an earlier run."""
        shelf = self._of_digest(name.digest)
        if name.block not in shelf.places and name not in self._changes:
            shelf.add(name.block, rounded(file_bytes))
            self.used_bytes += rounded(file_bytes)

    def lost(self, dataset: DatasetBlocks, block: int) -> bool:
        """Note that a block is not on disk; return whether it was believed to be."""
        shelf = self._of_digest(dataset.digest)
        is_lost = block in shelf.places
        if is_lost:
            self.used_bytes -= shelf.remove(block)
        return is_lost

    def forget_dataset(self, dataset: DatasetBlocks) -> None:
        """Note that a dataset has no readers left. Its blocks stay until there is a better use of
        the room.
        """
        shelf = self._read.get(dataset.digest)
        if shelf is not None:
            shelf.datasets.pop(dataset.dataset_id, None)
            if not shelf.datasets:
                self._unread[dataset.digest] = self._read.pop(dataset.digest)

    def choose(self, dataset: DatasetBlocks, block: int) -> Change | None:
        """Decide how to keep a block that was read into memory from elsewhere; None if it is not
        worth its room. The change counts as in progress until `ended`.
        """
        name = DiskName(dataset.digest, block)
        if not (self.is_known and self.limit_bytes and name.digest) or name in self._changes:
            return None
        shelf = self._shelf(dataset)
        size = rounded(_HEADER_BYTES + dataset.read_bytes(block))
        if block in shelf.places or size > self.limit_bytes:
            return None
        going = self._make_way(self.used_bytes + size - self.limit_bytes, shelf, block)
        return None if going is None else self._begin(Change(name, size, going))

    def reduce(self) -> Change | None:
        """Return the removal that is needed because the disk holds more than is allowed, if any."""
        going: list[tuple[DiskName, int]] = []
        beyond = self.used_bytes - self.limit_bytes
        while beyond > 0 and len(going) < _GOING_MAX:
            victim = self._next(-1)
            if victim is None:
                break
            going.append(victim)
            beyond -= victim[1]
        return self._begin(Change(going[0][0], 0, going)) if going else None

    def ended(self, name: DiskName, *, is_done: bool) -> None:
        """Note the end of a change. If it failed, the blocks to remove may still be there."""
        change = self._changes.pop(name)
        self.used_bytes -= change.held_bytes
        for one, size in () if is_done else change.going:
            self._put(one, size)
        if is_done and change.size:
            self._put(change.name, change.size)

    def _put(self, name: DiskName, size: int) -> None:
        shelf = self._of_digest(name.digest)
        shelf.add(name.block, size)
        self.used_bytes += size
        if self._farthest and shelf.datasets:
            use = self._uses(shelf, np.array([name.block])).item()
            if use > self._farthest[0][0]:
                bisect.insort(self._farthest, (use, name))
                del self._farthest[:-_REMEMBERED]

    def _begin(self, change: Change) -> Change:
        self._changes[change.name] = change
        self.used_bytes += change.held_bytes - sum(size for _, size in change.going)
        return change

    def _shelf(self, dataset: DatasetBlocks) -> _Shelf:
        """Return the shelf of a dataset that is read."""
        shelf = self._read.get(dataset.digest)
        if shelf is None:
            shelf = self._unread.pop(dataset.digest, None) or _Shelf(dataset.digest)
            self._read[dataset.digest] = shelf
        if dataset.dataset_id not in shelf.datasets:
            shelf.datasets[dataset.dataset_id] = dataset
            marks, is_remote = dataset.marks, dataset.marks.is_remote
            kept = np.where(marks.decoded > 0, marks.decoded, marks.raw)
            shelf.raw_bytes = int(marks.raw[is_remote].sum())
            shelf.kept_bytes = int(kept[is_remote].sum())
        return shelf

    def _of_digest(self, digest: bytes) -> _Shelf:
        shelf = self._read.get(digest) or self._unread.get(digest)
        if shelf is None:
            shelf = self._unread[digest] = _Shelf(digest)
        return shelf

    # -- what goes -------------------------------------------------------------------------------

    def _make_way(self, need: int, shelf: _Shelf, block: int) -> list[tuple[DiskName, int]] | None:
        """Choose blocks whose removal gives this block `need` bytes, and take them off their
        shelves; return None if too few blocks are needed later than this one.
        """
        going: list[tuple[DiskName, int]] = []
        if need <= 0:
            return going
        use = self._uses(shelf, np.array([block]), np.ones(1, np.bool_)).item()
        while need > 0:
            victim = self._next(use) if len(going) < _GOING_MAX else None
            if victim is None:
                for name, size in going:
                    self._of_digest(name.digest).add(name.block, size)
                return None
            going.append(victim)
            need -= victim[1]
        return going

    def _next(self, use: int) -> tuple[DiskName, int] | None:
        """Take the block to remove next, in favour of one whose next use is `use` positions away.
        Its bytes count as used until the removal has ended.
        """
        while self._unread:
            digest, shelf = next(iter(self._unread.items()))
            if shelf.blocks:
                block = shelf.blocks[-1]
                return DiskName(digest, block), shelf.remove(block)
            del self._unread[digest]
        name = self._remembered(use)
        if name is None:
            self._look()
            name = self._remembered(use)
        return None if name is None else (name, self._read[name.digest].remove(name.block))

    def _remembered(self, use: int) -> DiskName | None:
        """Return the last of the candidates found earlier, if its next use is later than `use`."""
        while self._farthest and self._farthest[-1][0] > use:
            _, name = self._farthest.pop()
            shelf = self._read.get(name.digest)
            if shelf is not None and name.block in shelf.places:
                now = self._uses(shelf, np.array([name.block])).item()
                if now > use:
                    return name
        return None

    def _look(self) -> None:
        """Search for blocks that are needed late."""
        found = self._farthest
        shelves = [shelf for shelf in self._read.values() if shelf.blocks]
        for shelf in shelves:
            blocks = shelf.some(max(_LOOKED_AT // len(shelves), 1))
            uses = self._uses(shelf, blocks)
            last = np.argsort(uses, kind="stable")[-_REMEMBERED:]
            found += [
                (use, DiskName(shelf.digest, block))
                for use, block in zip(uses[last].tolist(), blocks[last].tolist(), strict=True)
            ]
        self._farthest = sorted(dict.fromkeys(found))[-_REMEMBERED:]

    def _uses(
        self, shelf: _Shelf, blocks: Ints, in_memory: npt.NDArray[np.bool_] | None = None
    ) -> Ints:
        """Return how far away the next use of each block from the disk is. A block that the dataset
        does not have is never used: a file of that name was not written here.
        """
        counts = [len(dataset.stored) for dataset in shelf.datasets.values()]
        has = blocks < min(counts, default=0)
        if in_memory is None and not has.all():
            uses = np.full(len(blocks), NEVER)
            if has.any():
                uses[has] = self._uses(shelf, blocks[has])
            return uses
        if in_memory is None:
            in_memory = np.zeros(len(blocks), np.bool_)
            for dataset in shelf.datasets.values():
                in_memory |= dataset.marks.keys[blocks] != 0
        readings = [one for each in shelf.datasets.values() for one in self._readings(each)]
        return next_uses(readings, blocks, in_memory, self._held_for(readings))

    def _held_for(self, readings: Sequence[WalkPosition]) -> int:
        """Return for how many of an epoch's first positions memory keeps the blocks, if no windows
        were open. 0 if the disk can hold everything, memory or not.
        """
        shelves, share = self._read.values(), self.own_share
        if share * sum(shelf.raw_bytes for shelf in shelves) <= self.limit_bytes or not readings:
            return 0
        kept_bytes = share * sum(shelf.kept_bytes for shelf in shelves)
        epoch = min(reading.order.sample_count for reading in readings)
        return int(epoch * _HELD_SHARE * self._memory_bytes / max(kept_bytes, 1))


def next_uses(
    readings: Sequence[WalkPosition],
    blocks: Ints,
    in_memory: npt.NDArray[np.bool_],
    held_for: int = 0,
) -> Ints:
    """Return in how many positions each block will be read from the disk next, or NEVER if no such
    read is known. A block in memory is not read from the disk in the present epoch, so its next use
    after that epoch counts. The result is NEVER if that use is among the first `held_for` positions
    of its epoch, less the length of two windows: the block is then still in memory.

    Shapes:  blocks, result: int64[n].   in_memory: bool[n].
    """
    of_order: dict[tuple[int, int], Ints] = {}
    held: dict[tuple[int, int], npt.NDArray[np.bool_]] = {}
    is_open: dict[tuple[int, int], bool] = {}
    for reading in readings:
        first, last = reading.order.block_span(blocks + reading.first_block)
        use = np.where(last < reading.position, NEVER, np.maximum(first - reading.position, 0))
        name = reading.name[:2]
        is_open[name] = reading.is_open or is_open.get(name, False)
        known = of_order.get(name)
        of_order[name] = use if known is None else np.minimum(use, known)
        is_held = first - max(reading.position, 0) + 2 * (last - first) < held_for
        held[name] = is_held | held.get(name, False)
    if not of_order:
        return np.full(len(blocks), NEVER)
    uses = np.stack([*of_order.values()])
    each, soonest = np.arange(len(blocks)), uses.argmin(0)
    is_now = in_memory & np.array([*is_open.values()])[soonest]
    uses[soonest[is_now], each[is_now]] = NEVER
    soonest = uses.argmin(0)
    is_held = in_memory & np.stack([*held.values()])[soonest, each]
    return np.where(is_held, NEVER, uses[soonest, each])
