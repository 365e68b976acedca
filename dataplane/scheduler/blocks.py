"""The blocks of a node: which are being loaded, which are ready, which are evicted first.

    absent ──start──> FETCHING ──> FETCHED ──room──> DECODING ──> READY ──evict──> absent
                 local file: straight to DECODING; nothing to decode: straight to READY

Invariants:
1. A block is never loaded twice at the same time, however many tasks wait for it (single flight).
2. The memory of a block is not reused while the block is pinned, or while a fetch or a worker
   writes it.
3. Of the blocks whose memory helps, those that nobody needs are evicted first, then those that the
   plan needs last (`room.py`). For a block that is read ahead, no block is evicted that is needed
   sooner or that neighbours may request; nor, unless the store is idle (`holdings.py`), one that a
   task needs.
4. A block's key is never used again, so that a worker cannot take a new block for an old one.
5. Restart indexes only use free memory: nothing is evicted for them, and they are evicted with
   their block. None are added while the arena `is_short` of room for a task.
6. A block joins the request of the block before it only if a task or a neighbour lacks it, and if
   there is room for it as for a block that is read ahead. Where room is scarce, each block is read
   by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from msgspec import Struct

from dataplane.arena.allocator import Allocator
from dataplane.model.errors import DataplaneError
from dataplane.model.records import Region
from dataplane.rpc import tasks
from dataplane.scheduler import budgets
from dataplane.scheduler.dataset import DatasetBlocks, Ints
from dataplane.scheduler.disk import DiskTier
from dataplane.scheduler.events import (
    BlockDecoded,
    BlockFetched,
    BlocksInherited,
    ClearRestartIndexes,
    DecodeBlock,
    Effect,
    Fetch,
    ForgetBlock,
    Note,
)
from dataplane.scheduler.holdings import WaitingTasks
from dataplane.scheduler.in_flight import FetchesInFlight
from dataplane.scheduler.next_use import EvictionOrders
from dataplane.scheduler.records import BlockChange, BlockOutcome, BlockPhase, CachedBlock, Moment
from dataplane.scheduler.room import ReadMode, Room
from dataplane.scheduler.streams import SharedSlabs
from dataplane.transforms.restart_indexes import restart_index_bytes

# -- read again --------------------------------------------------------------------------------
#
# Report blocks that are read more than once in an epoch because the block arena cannot hold all
# open windows. This costs only bandwidth and time, so it is logged, less and less often.

_FIRST_S = 10.0
_PERIOD_S_MAX = 3600.0


class _Count(Struct):
    """The count of one dataset's blocks since the last line in the log."""

    since: float
    period_s: float = _FIRST_S
    blocks: int = 0
    bytes: int = 0


class ReadAgain:
    """Counts blocks that are evicted although their windows are open, and logs a line now
    and then.
    """

    def __init__(self, arena_bytes: int, do: Callable[[Note], None]) -> None:
        self._arena_bytes = arena_bytes
        self._do = do
        self._counts: dict[int, _Count] = {}

    def note(self, block: CachedBlock, now: float) -> None:
        """Note the eviction of a block whose window is open."""
        dataset = block.dataset
        count = self._counts.setdefault(dataset.dataset_id, _Count(now))
        count.blocks += 1
        count.bytes += int(dataset.stored[block.index])
        if now - count.since >= count.period_s:
            self._tell(dataset.name, count, now)

    def forget(self, dataset_id: int) -> None:
        """Forget a dataset that has no readers left."""
        self._counts.pop(dataset_id, None)

    def _tell(self, dataset: str, count: _Count, now: float) -> None:
        facts = {
            "dataset": dataset,
            "blocks": count.blocks,
            "bytes": count.bytes,
            "seconds": round(now - count.since),
            "block_arena_bytes": self._arena_bytes,
        }
        event = "blocks are read again: block_arena_bytes is too small for all open windows"
        self._do(Note(event, facts, is_failure=True))
        count.since, count.blocks, count.bytes = now, 0, 0
        count.period_s = min(_PERIOD_S_MAX, max(60.0, 2 * count.period_s))


class BlockTable:
    """Every block of the node. `do` emits an effect. Changes of blocks are collected until
    `take_changes`.
    """

    def __init__(
        self,
        allocator: Allocator,
        fetch_count: int,
        shared: SharedSlabs,
        waiting: WaitingTasks,
        disk: DiskTier,
        do: Callable[[Effect], None],
        time: Moment,
    ) -> None:
        self._allocator, self.arena_bytes = allocator, allocator.size_bytes
        self.fetches = FetchesInFlight(fetch_count)
        self._shared, self._do, self._time = shared, do, time
        self._waiting, self._disk, self.holdings = waiting, disk, waiting.holdings
        self._changes: list[BlockChange] = []
        self._blocks: dict[tuple[int, int], CachedBlock] = {}
        self._by_key: dict[int, CachedBlock] = {}
        self._orders = EvictionOrders(shared.readings)
        self.forgotten: set[int] = set()
        """Datasets whose readers are gone."""
        self._lent_raw: dict[int, Region] = {}
        """Raw bytes that are still being sent to neighbours, although their block no longer needs
        them, by the block's key."""
        self._elsewhere: dict[tuple[int, int], int] = {}
        """Blocks that a neighbour has, but only decoded, and their sizes."""
        self._again = ReadAgain(self.arena_bytes, do)
        self.evicted_count = self.evicted_open_count = 0
        """The number of blocks that made way for others, and how many of these will be
        read again."""
        self.room = Room(allocator, shared, self._orders.uses, self.give_way, waiting)
        self._keys = itertools.count(1)
        self._touches = itertools.count(1)
        self._fetching = self._decoding = 0
        self.is_short = False
        """Whether one task needs the whole arena."""

    @property
    def in_flight_count(self) -> int:
        """The number of blocks that a fetch or a worker is writing; an event will report the end of
        each.
        """
        return self._fetching + self._decoding

    def pin(self, dataset: DatasetBlocks, blocks: Ints) -> None:
        """Pin these blocks, which are all ready and listed once."""
        dataset.marks.pins[blocks] += 1
        dataset.marks.touched[blocks] = next(self._touches)

    def unpin(self, dataset: DatasetBlocks, blocks: Ints) -> None:
        """Remove one pin from each of these blocks."""
        dataset.marks.pins[blocks] -= 1
        self.room.unpinned()
        if dataset.dataset_id in self.forgotten:
            for index in blocks[dataset.marks.pins[blocks] == 0].tolist():
                block = self._blocks.get((dataset.dataset_id, index))
                if block is not None and block.is_evictable:
                    self.evict(block)

    def block(self, key: int) -> CachedBlock:
        """Return the block with this key, which is in memory or being loaded."""
        return self._by_key[key]

    def find(self, dataset: DatasetBlocks, index: int) -> CachedBlock | None:
        """Return a block that is in memory or being loaded; None if it is neither."""
        return self._blocks.get((dataset.dataset_id, index))

    def new_key(self) -> int:
        """Return a key for an excerpt, which workers treat like a block."""
        return next(self._keys)

    def take_changes(self) -> list[BlockChange]:
        """Return the changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def _changed(
        self, change: BlockOutcome, block: CachedBlock, error: DataplaneError | None = None
    ) -> None:
        self._changes.append(BlockChange(change, block.dataset, block.index, error))

    def start(self, dataset: DatasetBlocks, index: int, *, greedy: bool, away: int = 0) -> bool:
        """Start loading the block; return False if there is no room for it now.

        `greedy`: a task waits for it, so every block that is not pinned may be evicted. Otherwise
        the task that needs it is `away` positions from now.
        """
        self.forgotten.discard(dataset.dataset_id)
        self.room.is_full = False
        block = self._blocks.get((dataset.dataset_id, index))
        if block is not None:
            is_begun = block.phase is not BlockPhase.FETCHED
            return is_begun or self._decode(block, greedy=greedy, away=away)
        block = self._new(dataset, index)
        if dataset.needs_fetch(index):
            return self._fetch(block, ReadMode(greedy, False, away, self.holdings.is_idle))
        if dataset.needs_decode(index):
            return self._decode(block, greedy=greedy, away=away)
        while (spare := self._orders.spare()) is not None:
            self.evict(spare)
        self._add(block)
        self._become_ready(block)
        return True

    def read(self, dataset: DatasetBlocks, index: int) -> bool:
        """Start reading a block for a neighbour, without decoding it; return False if there is no
        room.
        """
        if self.is_short or (dataset.dataset_id, index) in self._blocks:
            return not self.is_short
        return self._fetch(self._new(dataset, index), ReadMode(is_lent=True))

    def free_lent(self, block: CachedBlock) -> None:
        """Free a block of which no part is being sent any more."""
        if (region := self._lent_raw.pop(block.key, None)) is not None:
            self._allocator.free(region.offset)

    def _new(self, dataset: DatasetBlocks, index: int) -> CachedBlock:
        dataset.marks.touched[index] = next(self._touches)
        return CachedBlock(dataset, index, next(self._keys))

    def _add(self, block: CachedBlock) -> None:
        self._blocks[block.dataset.dataset_id, block.index] = block
        self._by_key[block.key] = block
        self._orders.add(block)
        self.holdings.changed(block)

    def drop_unpinned(self) -> None:
        """Evict everything evictable: the last resort against fragmentation."""
        for block in [each for each in self._blocks.values() if each.is_evictable]:
            self.give_way(block)
        for spare in self._shared.spare():
            self._shared.evict(spare)

    def forget_dataset(self, dataset: DatasetBlocks) -> None:
        """Drop the blocks of a dataset that has no readers left, as soon as they are unused."""
        self.forgotten.add(dataset.dataset_id)
        self._again.forget(dataset.dataset_id)
        self._elsewhere = {k: v for k, v in self._elsewhere.items() if k[0] != dataset.dataset_id}
        own = (each for each in self._blocks.values() if each.dataset is dataset)
        for block in [each for each in own if each.is_evictable]:
            self.evict(block)

    def inherit(self, event: BlocksInherited) -> None:
        """Turn the blocks of one dataset into blocks of another, under new keys: workers know the
        old keys as blocks of the former dataset.
        """
        heir, former = event.heir, event.former
        self.forgotten.discard(heir.dataset_id)
        for index, number in zip(event.blocks.tolist(), event.formers.tolist(), strict=True):
            if former.marks.is_exact[number]:
                heir.was_decoded(index, former.marks.decoded.item(number))
            block = self._blocks.get((former.dataset_id, number))
            is_known = (heir.dataset_id, index) in self._blocks
            if block is None or is_known or not block.is_evictable or block.lent:
                continue
            if block.phase is not BlockPhase.READY or block.raw is not None:
                continue
            region, block.decoded = block.decoded, None
            self._remove(block)
            own = self._new(heir, index)
            own.decoded, own.phase = region, BlockPhase.READY
            self._add(own)
            self._become_ready(own)

    def _drop_forgotten(self, block: CachedBlock) -> bool:
        """Drop a block that finished loading if its dataset was forgotten, and return whether it
        was. A block that is being sent is dropped later.
        """
        if block.dataset.dataset_id in self.forgotten and not block.lent:
            self.evict(block)
            return True
        return False

    # -- loading ---------------------------------------------------------------------------------

    def _fetch(self, block: CachedBlock, how: ReadMode) -> bool:
        if not (self.fetches.may_begin() and self._read(block, how)):
            return False
        self._read_following(block, how.away)
        return True

    def _read_following(self, first: CachedBlock, away: int) -> None:
        """Read the blocks that follow in the shard in the same request."""
        dataset = first.dataset
        if dataset.places is None or self.is_short or self.holdings.is_tight:
            return
        for index in dataset.places.following(first.index):
            is_known = (dataset.dataset_id, index) in self._blocks
            if is_known or not self._waiting.is_lacked(dataset, index):
                return
            block = self._new(dataset, index)
            how = ReadMode(is_lent=not self.room.is_wanted(block), away=away)
            if not self._read(block, how, joined_to=first.key):
                return

    def _read(self, block: CachedBlock, how: ReadMode, joined_to: int | None = None) -> bool:
        dataset, index = block.dataset, block.index
        elsewhere = 0 if how.is_lent else self._elsewhere.get((dataset.dataset_id, index), 0)
        length = elsewhere or dataset.marks.raw.item(index)
        decoded = 0 if elsewhere else dataset.decoded_bytes(index)
        if not (how.greedy or how.is_lent or self.holdings.may_read_ahead(length + decoded)):
            self.room.is_full = True
            return False
        found = self.room.of_read(block, length, decoded, how)
        if found is None:
            return False
        into, block.decoded = found
        if elsewhere:
            block.decoded = into
            del self._elsewhere[dataset.dataset_id, index]
        block.raw, block.phase = None if elsewhere else into, BlockPhase.FETCHING
        self._add(block)
        self.holdings.loading(block)
        self._fetching += 1
        self.fetches.began(block.key, into.length, dataset.read_count(index), joined_to)
        dataset.account.read_began(self._time.now)
        is_on_disk = self._disk.may_have(dataset, index, self._time.now)
        places = joined_to is not None, elsewhere > 0, how.is_lent, is_on_disk
        self._do(Fetch(block.key, dataset.dataset_id, index, into, *places))
        return True

    def fetched(self, event: BlockFetched) -> None:
        """Handle the end of a fetch."""
        block = self._by_key[event.key]
        into = block.raw or block.decoded
        assert into is not None
        self._fetching -= 1
        self.fetches.ended(block.key, into.length)
        dataset = block.dataset
        read = dataset.read_bytes(block.index) if block.raw is not None else into.length
        dataset.account.read_ended(self._time.now, 0 if event.decoded_bytes else read)
        dataset.account.neighbour_bytes += event.neighbour_bytes
        dataset.marks.fetched[block.index] = self._time.now
        if self._drop_forgotten(block):
            return
        self._orders.fetched(block, is_guest=event.is_guest)
        if event.decoded_bytes:
            self._elsewhere[dataset.dataset_id, block.index] = event.decoded_bytes
        if event.decoded_bytes or event.is_away:
            self.evict(block)  # the block is fetched again as long as trainers wait for it
        elif event.is_lost:
            block.lost = event.error
            self._drop_raw(block)  # so that no neighbour gets it
            self._wait_for_room(block)
        elif event.error is not None:
            self._fail(block, event.error)
        else:
            dataset.account.advanced(self._time.now)
            self._go_on(block)

    def _go_on(self, block: CachedBlock) -> None:
        """Continue with a block that was read."""
        if block.raw is None or not block.dataset.needs_decode(block.index):
            self._become_ready(block)
        else:
            self._wait_for_room(block)

    def _decode(self, block: CachedBlock, *, greedy: bool, away: int) -> bool:
        dataset, index = block.dataset, block.index
        length = dataset.decoded_bytes(index)
        decoded = block.decoded or self.room.of_block(block, length, greedy=greedy, away=away)
        if decoded is None:
            return False
        block.decoded, block.phase = decoded, BlockPhase.DECODING
        if block.key not in self._by_key:
            self._add(block)
        self.holdings.changed(block)
        self._decoding += 1
        self._do(DecodeBlock(block.key, dataset.dataset_id, index, block.raw, decoded, block.lost))
        return True

    def decoded(self, event: BlockDecoded) -> None:
        """Handle the end of a block's decoding, or its failure."""
        block, result = self._by_key[event.key], event.result
        self._decoding -= 1
        account = block.dataset.account
        account.decoding_s += self._time.now - (event.started or self._time.now)
        if isinstance(result, tasks.Decoded):
            account.disk_us += result.disk
        if self._drop_forgotten(block):
            return
        assert block.decoded is not None
        if isinstance(result, DataplaneError):
            self._fail(block, result)
            return
        assert isinstance(result, tasks.Decoded)
        account.advanced(self._time.now)
        if not result.stored:
            self._grown(block, result.bytes)
            return
        block.dataset.was_decoded(block.index, result.bytes)
        self._allocator.shrink(block.decoded.offset, result.bytes)
        block.decoded = Region(block.decoded.offset, result.bytes)
        self._drop_raw(block)
        self._become_ready(block)

    def _grown(self, block: CachedBlock, decoded_bytes: int) -> None:
        """Handle a block that is larger than predicted: remember its true size."""
        assert block.decoded is not None
        block.dataset.was_decoded(block.index, decoded_bytes)
        if decoded_bytes > self.arena_bytes:
            url, raw = block.dataset.url(block.index), int(block.dataset.marks.raw[block.index])
            self._fail(block, budgets.block_too_large(url, decoded_bytes + raw, self.arena_bytes))
            return
        self._allocator.free(block.decoded.offset)
        block.decoded = None
        # Decode at once if there is room: the worker that has decoded the block still has it in
        # memory.
        if self._decode(block, greedy=False, away=0):
            return
        if block.raw is None:
            self._drop(block)
            self._changed(BlockOutcome.GONE, block)
        else:
            self._wait_for_room(block)

    def _wait_for_room(self, block: CachedBlock) -> None:
        """Decode a block at once if it has room for that, since a decoded block takes less memory;
        else let it wait.
        """
        block.phase = BlockPhase.FETCHED
        if block.decoded is not None:
            self._decode(block, greedy=False, away=0)
            return
        self.holdings.loaded(block)
        self.holdings.changed(block)
        self.room.became_evictable(block)
        self._changed(BlockOutcome.GONE, block)

    def _become_ready(self, block: CachedBlock) -> None:
        block.phase = BlockPhase.READY
        self.holdings.loaded(block)
        self.holdings.changed(block)
        self.room.became_evictable(block)
        self.holdings.loaded_bytes += block.kept_bytes
        block.dataset.marks.keys[block.index] = block.key
        self._give_restart_indexes(block)
        self._changed(BlockOutcome.READY, block)

    def _give_restart_indexes(self, block: CachedBlock) -> None:
        """Reserve restart indexes if all blocks stay in memory, since the block's images will then
        be cropped again.
        """
        dataset = block.dataset
        is_of_use = dataset.keeps_restart_indexes and self._shared.streams.crops(dataset)
        if self.is_short or not is_of_use:
            return
        length = restart_index_bytes(block.kept_bytes or int(dataset.stored[block.index]))
        if (at := self._allocator.allocate(length)) is not None:
            block.restart_indexes = Region(at, length)
            self._do(ClearRestartIndexes(block.key, block.restart_indexes))
            self._orders.add(block)

    def _fail(self, block: CachedBlock, error: DataplaneError) -> None:
        self._remove(block)
        self._changed(BlockOutcome.FAILED, block, error)

    # -- memory ----------------------------------------------------------------------------------

    def give_way(self, block: CachedBlock) -> None:
        """Evict a block because others need its room. If its window is open, it will be
        read again.
        """
        self.evicted_count += 1
        if not self._orders.uses.use_of(block.dataset, block.index):
            self.evicted_open_count += 1
            self._again.note(block, self._time.now)
        self.evict(block)

    def evict(self, block: CachedBlock) -> None:
        """Drop a block that nothing uses."""
        self._remove(block)
        self._changed(BlockOutcome.GONE, block)

    def _remove(self, block: CachedBlock) -> None:
        self._do(ForgetBlock(block.key))
        self._drop_raw(block)
        for region in block.regions:
            self._allocator.free(region.offset)
        block.raw = block.decoded = block.restart_indexes = None
        block.dataset.marks.keys[block.index] = 0
        self._drop(block)

    def _drop_raw(self, block: CachedBlock) -> None:
        """Free a block's bytes as they were read, since they are no longer needed here."""
        raw, block.raw = block.raw, None
        if raw is not None and block.lent:
            self._lent_raw[block.key] = raw
        elif raw is not None:
            self._allocator.free(raw.offset)

    def _drop(self, block: CachedBlock) -> None:
        self._orders.remove(block)
        self.holdings.gone(block)
        del self._by_key[block.key]
        del self._blocks[block.dataset.dataset_id, block.index]
