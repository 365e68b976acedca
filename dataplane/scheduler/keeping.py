"""Keeps blocks on the node's disk: which fetches read there, and what is written.

    fetched elsewhere ──worth its room (disk.py)──> borrowed, being written ──> on disk
      └──> not kept: the disk has enough to write, or has failed lately

Invariants:
1. A block is on its way to trainers as if there were no disk: it is written while it is decoded and
   used. Blocks being written hold at most an eighth of the arena, or four blocks if these are no
   more than a quarter, or one block. Blocks that wait to be written hold no memory, and are not
   written if their memory was freed meanwhile.
2. A disk that fails, or does not answer in time, is not used for a pause, longer each time. No task
   fails because of the disk.
3. A scan that fails is repeated after that pause: until a scan has ended well, nothing is written.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping

from msgspec import Struct

from dataplane.model.records import Region
from dataplane.scheduler.asks import Asks, Borrowed
from dataplane.scheduler.blocks import BlockTable
from dataplane.scheduler.disk import PAUSE_S, Change, DiskTier, Faults
from dataplane.scheduler.events import (
    BlockFetched,
    DatasetForgotten,
    DiskFound,
    DiskMissed,
    DiskName,
    DiskScanned,
    Effect,
    KeepBlock,
    KeepingEnded,
    Note,
    ScanDisk,
)
from dataplane.scheduler.records import CachedBlock, Moment

_WRITES_MAX = 16
_WAITING_MAX = 256
_WRITTEN_SHARE = 8
_BLOCKS_LEAST, _SHARE_OF_FEW = 4, 4
_PAUSE_S_MAX = 3600.0


class _Write(Struct, frozen=True):
    """A change that is being made; `block` is the one being written, None if blocks are only
    removed.
    """

    change: Change
    block: CachedBlock | None = None
    region: Region = Region(0, 0)


class Keeping:
    """The blocks that one node keeps on its disk. `do` emits an effect."""

    def __init__(
        self,
        tier: DiskTier,
        blocks: BlockTable,
        asks: Asks,
        borrowed: Borrowed,
        do: Callable[[Effect], None],
        time: Moment,
    ) -> None:
        self._tier, self._blocks, self._asks, self._borrowed = tier, blocks, asks, borrowed
        self._do, self._time = do, time
        self._writes: dict[int, _Write] = {}
        self._waiting: deque[CachedBlock] = deque(maxlen=_WAITING_MAX)
        """Blocks that may be written; their memory may be used for other blocks meanwhile."""
        self._written_bytes = 0
        self._numbers = itertools.count(1)
        self._writing = Faults("written")
        self._lost, self._told_at = 0, -math.inf
        self._guests = [0, 0]
        """How many of the blocks that were read this node owns, and how many other nodes own."""

    def look(self) -> None:
        """Handle a tick: the disk may be scanned again."""
        if self._tier.is_scanned and not self._tier.is_known and not self._has_failed:
            self._tier.is_scanned = False
            self._do(ScanDisk())

    def fetched(self, event: BlockFetched) -> None:
        """Handle the end of a fetch: the block may be written to the disk."""
        block = self._blocks.block(event.key)
        self._blocks.fetched(event)
        if event.is_from_disk:
            block.dataset.account.disk_bytes += block.dataset.read_bytes(block.index)
        self._guests[event.is_guest] += 1
        self._tier.own_share = self._guests[0] / sum(self._guests)
        if block.raw_bytes is not None and not event.is_guest:
            self._waiting.append(block)
            self._write_next()

    def _write_next(self) -> None:
        """Write waiting blocks as far as allowed, if their bytes are still in memory."""
        while self._waiting and self._tier.is_scanned and len(self._writes) < _WRITES_MAX:
            block = self._waiting[0]
            region = block.raw_bytes
            if region is not None and not self._may_write(region.length):
                return
            self._waiting.popleft()
            is_forgotten = block.dataset.dataset_id in self._blocks.forgotten
            if region is None or is_forgotten or self._blocks.is_short or self._has_failed:
                continue
            change = self._tier.choose(block.dataset, block.index)
            if change is not None:
                self._borrowed.borrow(block)
                self._begin(_Write(change, block, region))

    @property
    def _has_failed(self) -> bool:
        return self._time.now < self._writing.until

    def _may_write(self, length: int) -> bool:
        arena = self._blocks.arena_bytes
        most = max(arena // _WRITTEN_SHARE, min(_BLOCKS_LEAST * length, arena // _SHARE_OF_FEW))
        return not self._written_bytes or self._written_bytes + length <= most

    def _begin(self, write: _Write) -> None:
        number, change = next(self._numbers), write.change
        self._writes[number] = write
        self._written_bytes += write.region.length
        going = tuple(name for name, _ in change.going)
        self._do(KeepBlock(number, change.name, write.region, going))

    def ended(self, event: KeepingEnded) -> None:
        """Handle the end of a write."""
        write = self._writes.pop(event.number)
        self._written_bytes -= write.region.length
        if write.block is not None:
            self._borrowed.give_back(write.block)
        self._tier.ended(write.change.name, is_done=not event.trouble)
        if event.trouble:
            self._failed(self._writing, event.trouble)
        else:
            self._writing.pause_s = PAUSE_S
            self._reduce()
        self._write_next()

    def forget_dataset(self, event: DatasetForgotten) -> None:
        """Forget a dataset that has no readers left."""
        self._asks.forget_dataset(event.dataset)
        self._tier.forget_dataset(event.dataset)

    def found(self, event: DiskFound) -> None:
        """Note blocks of an earlier run."""
        for block, size in zip(event.blocks, event.disk_bytes, strict=True):
            self._tier.found(DiskName(event.digest, block), size)

    def scanned(self, event: DiskScanned) -> None:
        """Handle the end of a scan."""
        self._tier.is_scanned = True
        if event.trouble:
            self._failed(self._writing, event.trouble)
            return
        self._tier.is_known, self._writing.pause_s = True, PAUSE_S
        self._reduce()
        self._write_next()

    def _reduce(self) -> None:
        """Remove blocks beyond the limit, which an earlier run may have left."""
        if not self._writes and (change := self._tier.reduce()) is not None:
            self._begin(_Write(change))

    def missed(self, event: DiskMissed) -> None:
        """Note that a block is not on disk, or that the disk failed."""
        if event.trouble:
            self._failed(self._tier.reading, event.trouble)
            return
        if not self._tier.lost(event.dataset, event.block):
            return
        self._lost += 1
        if self._time.now >= self._told_at + PAUSE_S:
            facts = {"dataset": event.dataset.name, "blocks": self._lost}
            self._told_at, self._lost = self._time.now, 0
            self._note("blocks on disk were missing or damaged, and are read elsewhere", facts)

    def _failed(self, faults: Faults, trouble: str) -> None:
        if self._time.now < faults.until:
            return  # this operation began before the disk failed
        faults.until = self._time.now + faults.pause_s
        facts = {"why": trouble, "pause_s": round(faults.pause_s)}
        self._note(f"the disk is not {faults.what} for a while", facts)
        faults.pause_s = min(2 * faults.pause_s, _PAUSE_S_MAX)

    def _note(self, event: str, facts: Mapping[str, object]) -> None:
        self._do(Note(event, facts, is_failure=True))
