"""The blocks of a node: which are being loaded, which are ready, which are evicted first.

    absent ──start──> FETCHING ──> FETCHED ──room──> DECODING ──> READY ──evict──> absent
                 local file: straight to DECODING; nothing to decode: straight to READY

Invariants:
1. A block is never loaded twice at the same time, however many tasks wait for it (single flight).
2. The memory of a block is not reused while the block is pinned, or while a fetch or a worker
   writes it.
3. The block evicted first is the one that the plan needs last. To make room for a block that no
   task waits for, only blocks that are needed later are evicted. Everything else in the arena is
   evicted before any block that is still needed.
4. A block's key is never used again, so that a worker cannot take a new block for an old one.
5. Restart indexes only use free memory: nothing is evicted for them, and they are evicted with
   their block. None are added while the arena `is_short` of room for a task.
6. A block is read in one request with another only if a task lacks it, and has room as one that no
   task waits for. Where room is scarce, each is read by itself.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

from dataplane.arena.allocator import Allocator
from dataplane.errors import DataplaneError
from dataplane.model import Region
from dataplane.rpc import tasks
from dataplane.scheduler import budgets
from dataplane.scheduler.block import BlockChange, BlockOutcome, BlockPhase, CachedBlock
from dataplane.scheduler.dataset import DatasetBlocks, Ints
from dataplane.scheduler.events import (
    BlockDecoded,
    BlockFetched,
    ClearRestartIndexes,
    DecodeBlock,
    Effect,
    Fetch,
    ForgetBlock,
)
from dataplane.scheduler.in_flight import FetchesInFlight
from dataplane.scheduler.next_use import NextUse
from dataplane.scheduler.read_again import ReadAgain
from dataplane.scheduler.records import Moment
from dataplane.scheduler.room import Room
from dataplane.scheduler.shared import SharedSlabs
from dataplane.transforms.restart_indexes import restart_index_bytes

_DIRECT_BLOCKS_MAX = 4096


class BlockTable:
    """Every block of the node. `do` emits an effect. Changes of blocks are collected in `changes`
    until `take_changes`.
    """

    def __init__(
        self,
        allocator: Allocator,
        fetch_count: int,
        shared: SharedSlabs,
        do: Callable[[Effect], None],
        time: Moment,
    ) -> None:
        self._allocator = allocator
        self.fetches = FetchesInFlight(fetch_count)
        self._shared = shared
        self._do = do
        self._time = time
        self._changes: list[BlockChange] = []
        self._blocks: dict[tuple[int, int], CachedBlock] = {}
        self._by_key: dict[int, CachedBlock] = {}
        self._uses = NextUse(shared.readings)
        self._direct = NextUse(shared.readings)
        self._uses_of: dict[int, NextUse] = {}
        """Which of the two eviction orders each block is in, by key: one for blocks that occupy
        memory, one for blocks that do not."""
        self._forgotten: set[int] = set()
        self._again = ReadAgain(self.arena_bytes, do)
        self.room = Room(allocator, shared, self._uses, self.evict, self._again, time)
        self._keys = itertools.count(1)
        self._touches = itertools.count(1)
        self._fetching = 0
        self._decoding = 0
        self.loaded_bytes = 0
        """What all blocks took that have become ready, each time."""
        self.is_short = False
        """Whether one task needs the whole arena."""
        self.is_lacked: Callable[[DatasetBlocks, int], bool] = lambda _dataset, _index: False
        """Whether a task waits for a block to be loaded."""
        self.is_tight = False
        """Whether there is little room: a block is fetched only if it can be decoded, too."""

    @property
    def arena_bytes(self) -> int:
        """The whole budget."""
        return self._allocator.size_bytes

    @property
    def in_flight_count(self) -> int:
        """Blocks that a fetch or a worker is writing; an event will report the end of each."""
        return self._fetching + self._decoding

    def pin(self, dataset: DatasetBlocks, blocks: Ints) -> None:
        """Pin these blocks. All of them are ready, and none is listed twice."""
        dataset.marks.pins[blocks] += 1
        dataset.marks.touched[blocks] = next(self._touches)

    def unpin(self, dataset: DatasetBlocks, blocks: Ints) -> None:
        """Remove one pin from each."""
        dataset.marks.pins[blocks] -= 1
        self.room.unpinned()
        if dataset.dataset_id in self._forgotten:
            for index in blocks[dataset.marks.pins[blocks] == 0].tolist():
                self._is_forgotten(self._blocks[dataset.dataset_id, index])

    def block(self, key: int) -> CachedBlock:
        """The block with this key, which is in memory or being loaded."""
        return self._by_key[key]

    def find(self, dataset: DatasetBlocks, index: int) -> CachedBlock | None:
        """A block, if it is in memory or being loaded."""
        return self._blocks.get((dataset.dataset_id, index))

    def new_key(self) -> int:
        """A key for an excerpt, which workers know as they know blocks."""
        return next(self._keys)

    def take_changes(self) -> list[BlockChange]:
        """The changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def _changed(
        self, change: BlockOutcome, block: CachedBlock, error: DataplaneError | None = None
    ) -> None:
        self._changes.append(BlockChange(change, block.dataset, block.index, error))

    def start(self, dataset: DatasetBlocks, index: int, *, greedy: bool) -> bool:
        """Start loading the block: False if there is no room for it now.

        `greedy`: a task waits for it, so every block that is not pinned may be evicted.
        """
        self._forgotten.discard(dataset.dataset_id)
        self.room.is_full = False
        block = self._blocks.get((dataset.dataset_id, index))
        if block is not None:
            return block.phase is not BlockPhase.FETCHED or self._decode(block, greedy=greedy)
        block = CachedBlock(dataset, index, next(self._keys))
        dataset.marks.touched[index] = next(self._touches)
        if dataset.needs_fetch(index):
            return self._fetch(block, greedy=greedy)
        if dataset.needs_decode(index):
            return self._decode(block, greedy=greedy)
        self._trim()
        self._add(block)
        self._become_ready(block)
        return True

    def _add(self, block: CachedBlock) -> None:
        self._blocks[block.dataset.dataset_id, block.index] = block
        self._by_key[block.key] = block
        self._stand_in(self._uses if block.regions else self._direct, block)

    def _stand_in(self, uses: NextUse, block: CachedBlock) -> None:
        """Put the block into this eviction order."""
        former = self._uses_of.pop(block.key, None)
        if former is not None:
            former.remove(block)
        uses.add(block)
        self._uses_of[block.key] = uses

    def drop_unpinned(self) -> None:
        """Evict everything evictable: the last resort against fragmentation."""
        for block in list(self._blocks.values()):
            if block.is_evictable:
                self.evict(block)
        for spare in self._shared.spare():
            self._shared.evict(spare)

    def forget_dataset(self, dataset: DatasetBlocks) -> None:
        """The dataset has no readers left: drop its blocks, those in use as soon as they are
        unused.
        """
        self._forgotten.add(dataset.dataset_id)
        self._again.forget(dataset.dataset_id)
        for block in list(self._blocks.values()):
            if block.dataset is dataset and block.is_evictable:
                self.evict(block)

    def _is_forgotten(self, block: CachedBlock) -> bool:
        """Drop a block that finished loading if its dataset was forgotten; whether it was."""
        if block.dataset.dataset_id in self._forgotten:
            self.evict(block)
            return True
        return False

    # -- loading ---------------------------------------------------------------------------------

    def _fetch(self, block: CachedBlock, *, greedy: bool) -> bool:
        if not self.fetches.may_begin() or not self._read(block, greedy=greedy):
            return False
        self._read_following(block)
        return True

    def _read_following(self, first: CachedBlock) -> None:
        """Read the blocks behind it in the same request."""
        dataset = first.dataset
        if dataset.places is None or self.is_short or self.is_tight:
            return
        for index in dataset.places.following(first.index):
            if (dataset.dataset_id, index) in self._blocks or not self.is_lacked(dataset, index):
                return
            block = CachedBlock(dataset, index, next(self._keys))
            dataset.marks.touched[index] = next(self._touches)
            if not self._read(block, greedy=False, joined_to=first.key):
                return

    def _read(self, block: CachedBlock, *, greedy: bool, joined_to: int | None = None) -> bool:
        dataset, index = block.dataset, block.index
        raw = self.room.of_block(block, int(dataset.marks.raw[index]), greedy=greedy)
        if raw is None:
            return False
        if self.is_tight and dataset.needs_decode(index):
            length = int(dataset.marks.decoded[index])
            block.decoded = self.room.of_block(block, length, greedy=greedy)
            if block.decoded is None:
                self._allocator.free(raw.offset)
                return False
        block.raw, block.phase = raw, BlockPhase.FETCHING
        self._add(block)
        self._fetching += 1
        read_count = 1 if dataset.places is None else dataset.places.read_count(index)
        self.fetches.began(block.key, raw.length, read_count, joined_to)
        dataset.account.read_began(self._time.now)
        self._do(Fetch(block.key, dataset.dataset_id, index, raw, joined_to is not None))
        return True

    def fetched(self, event: BlockFetched) -> None:
        """A fetch has ended."""
        block = self._by_key[event.key]
        assert block.raw is not None
        self._fetching -= 1
        self.fetches.ended(block.key, block.raw.length)
        dataset = block.dataset
        dataset.account.read_ended(self._time.now, block.raw.length)
        dataset.marks.fetched[block.index] = self._time.now
        if self._is_forgotten(block):
            return
        if event.is_away:
            self.evict(block)  # and it is fetched again, for as long as trainers wait
        elif event.error is not None:
            self._fail(block, event.error)
        elif not dataset.needs_decode(block.index):
            self._become_ready(block)
        else:
            block.phase = BlockPhase.FETCHED
            self.room.became_evictable(block)
            self._changed(BlockOutcome.GONE, block)

    def _decode(self, block: CachedBlock, *, greedy: bool) -> bool:
        dataset, index = block.dataset, block.index
        decoded = block.decoded
        if decoded is None:
            length = int(dataset.marks.decoded[index])
            decoded = self.room.of_block(block, length, greedy=greedy)
        if decoded is None:
            return False
        block.decoded, block.phase = decoded, BlockPhase.DECODING
        if block.key not in self._by_key:
            self._add(block)
        self._decoding += 1
        self._do(DecodeBlock(block.key, dataset.dataset_id, index, block.raw, decoded))
        return True

    def decoded(self, event: BlockDecoded) -> None:
        """A worker has decoded a block, or could not."""
        block, result = self._by_key[event.key], event.result
        self._decoding -= 1
        account = block.dataset.account
        account.decoding_s += self._time.now - (event.started or self._time.now)
        if isinstance(result, tasks.Decoded):
            account.disk_us += result.disk
        if self._is_forgotten(block):
            return
        assert block.decoded is not None
        if isinstance(result, DataplaneError):
            self._fail(block, result)
            return
        assert isinstance(result, tasks.Decoded)
        if not result.stored:
            self._grown(block, result.bytes)
            return
        self._allocator.shrink(block.decoded.offset, result.bytes)
        block.decoded = Region(block.decoded.offset, result.bytes)
        if block.raw is not None:
            self._allocator.free(block.raw.offset)
            block.raw = None
        self._become_ready(block)

    def _grown(self, block: CachedBlock, decoded_bytes: int) -> None:
        """The index underestimated the block's decoded size. Remember its true size."""
        assert block.decoded is not None
        block.dataset.marks.decoded[block.index] = decoded_bytes
        if decoded_bytes > self.arena_bytes:
            url = block.dataset.url(block.index)
            need = decoded_bytes + int(block.dataset.marks.raw[block.index])
            self._fail(block, budgets.block_too_large(url, need, self.arena_bytes))
            return
        self._allocator.free(block.decoded.offset)
        block.decoded = None
        if block.raw is None:
            self._drop(block)
        else:
            block.phase = BlockPhase.FETCHED
            self.room.became_evictable(block)
        self._changed(BlockOutcome.GONE, block)

    def _become_ready(self, block: CachedBlock) -> None:
        block.phase = BlockPhase.READY
        self.room.became_evictable(block)
        self.loaded_bytes += block.kept_bytes
        block.dataset.marks.keys[block.index] = block.key
        self._give_restart_indexes(block)
        self._changed(BlockOutcome.READY, block)

    def _give_restart_indexes(self, block: CachedBlock) -> None:
        """If all blocks stay in memory, the images of this block will be cropped again, so restart
        indexes pay off.
        """
        dataset = block.dataset
        if self.is_short or not (
            dataset.keeps_restart_indexes and self._shared.streams.crops(dataset)
        ):
            return
        length = restart_index_bytes(block.kept_bytes or int(dataset.stored[block.index]))
        at = self._allocator.allocate(length)
        if at is not None:
            block.restart_indexes = Region(at, length)
            self._do(ClearRestartIndexes(block.key, block.restart_indexes))
            if self._uses_of[block.key] is self._direct:
                self._stand_in(self._uses, block)

    def _fail(self, block: CachedBlock, error: DataplaneError) -> None:
        self._remove(block)
        self._changed(BlockOutcome.FAILED, block, error)

    # -- memory ----------------------------------------------------------------------------------

    def _trim(self) -> None:
        """Blocks in local files take no arena memory, but workers remember each of them."""
        while len(self._direct) >= _DIRECT_BLOCKS_MAX:
            with contextlib.closing(self._direct.farthest()) as farthest:
                block, _ = next(farthest, (None, 0))
            if block is None:
                return
            self.evict(block)

    def evict(self, block: CachedBlock) -> None:
        """Drop a block that nothing uses."""
        self._remove(block)
        self._changed(BlockOutcome.GONE, block)

    def _remove(self, block: CachedBlock) -> None:
        self._do(ForgetBlock(block.key))
        for region in block.regions:
            self._allocator.free(region.offset)
        block.raw = block.decoded = block.restart_indexes = None
        block.dataset.marks.keys[block.index] = 0
        self._drop(block)

    def _drop(self, block: CachedBlock) -> None:
        self._uses_of.pop(block.key).remove(block)
        del self._by_key[block.key]
        del self._blocks[block.dataset.dataset_id, block.index]
