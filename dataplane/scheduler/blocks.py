"""The blocks of a node: which are on their way, which are ready, which go first.

    absent ──start──> FETCHING ──> FETCHED ──room──> DECODING ──> READY ──evict──> absent
                 local file: straight to DECODING; nothing to decode: straight to READY

Invariants:
1. A block of a dataset is loaded once at a time, whoever waits for it (single flight).
2. The memory of a block that is pinned, or that a fetch or a worker is writing, is not given away.
3. What is evicted is what the plan needs last; to make room for a block that nobody waits for,
   only blocks that are needed later than it are evicted. What else lies in the arena goes before
   any block that is needed at all.
4. A block's key is never used again, so that a worker cannot take a new block for an old one.
5. Trails take what is free. Nothing is evicted for them, and they go with their block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from dataplane.arena.allocator import Allocator, rounded
from dataplane.errors import DataplaneError
from dataplane.model import Region
from dataplane.rpc import tasks
from dataplane.scheduler import budgets
from dataplane.scheduler.block import Block, BlockChange, BlockPhase, Change
from dataplane.scheduler.dataset import DatasetBlocks, Ints
from dataplane.scheduler.events import (
    ClearTrails,
    DecodeBlock,
    Decoded,
    Effect,
    Fetch,
    Fetched,
    ForgetBlock,
)
from dataplane.scheduler.eviction import NEVER, uses_of, victims
from dataplane.scheduler.read_again import ReadAgain
from dataplane.scheduler.records import Moment, SharedSlab
from dataplane.scheduler.shared import SharedSlabs
from dataplane.transforms.trails import trail_bytes

# Enough must be on its way for a round trip: of smaller blocks, up to so many times as many.
FETCH_BYTES_MIN = 2 << 20
SMALL_FETCHES = 4

_DIRECT_BLOCKS_MAX = 4096


class BlockTable:
    """Every block of the node. `do` has an effect carried out; what has happened to blocks
    is in `changes` until somebody takes it.
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
        self._fetch_count = fetch_count
        self._shared = shared
        self._do = do
        self._time = time
        self._changes: list[BlockChange] = []
        self._blocks: dict[tuple[int, int], Block] = {}
        self._by_key: dict[int, Block] = {}
        self._forgotten: set[int] = set()
        self._again = ReadAgain(self.arena_bytes, do)
        self._keys = itertools.count(1)
        self._touches = itertools.count(1)
        self._fetching = 0
        self._fetching_bytes = 0
        self._decoding = 0

    @property
    def arena_bytes(self) -> int:
        """The whole budget."""
        return self._allocator.size_bytes

    @property
    def in_flight_count(self) -> int:
        """Blocks that a fetch or a worker is writing: their end will be reported."""
        return self._fetching + self._decoding

    @property
    def can_fetch(self) -> bool:
        """Whether one more fetch may start."""
        return self._fetching < self._fetch_count or (
            self._fetching < SMALL_FETCHES * self._fetch_count
            and self._fetching_bytes < self._fetch_count * FETCH_BYTES_MIN
        )

    def pin(self, dataset: DatasetBlocks, blocks: Ints) -> None:
        """Keep these blocks where they are. All of them are ready, and each is named once."""
        dataset.marks.pins[blocks] += 1
        dataset.marks.touched[blocks] = next(self._touches)

    def unpin(self, dataset: DatasetBlocks, blocks: Ints) -> None:
        """One holder fewer of each."""
        dataset.marks.pins[blocks] -= 1
        if dataset.dataset_id in self._forgotten:
            for index in blocks[dataset.marks.pins[blocks] == 0].tolist():
                self._is_forgotten(self._blocks[dataset.dataset_id, index])

    def block(self, key: int) -> Block:
        """The block with this key, which is in memory or on its way."""
        return self._by_key[key]

    def take_changes(self) -> list[BlockChange]:
        """What has happened since it was asked last."""
        changes, self._changes = self._changes, []
        return changes

    def _changed(self, change: Change, block: Block, error: DataplaneError | None = None) -> None:
        self._changes.append(BlockChange(change, block.dataset, block.index, error))

    def start(self, dataset: DatasetBlocks, index: int, *, greedy: bool) -> bool:
        """See that the block is on its way: False if there is no room for it now.

        `greedy`: somebody waits for it, so whatever is not pinned may be evicted.
        """
        self._forgotten.discard(dataset.dataset_id)
        block = self._blocks.get((dataset.dataset_id, index))
        if block is not None:
            return block.phase is not BlockPhase.FETCHED or self._decode(block, greedy=greedy)
        block = Block(dataset, index, next(self._keys))
        dataset.marks.touched[index] = next(self._touches)
        if dataset.needs_fetch(index):
            return self._fetch(block, greedy=greedy)
        if dataset.needs_decode(index):
            return self._decode(block, greedy=greedy)
        self._add(block)
        self._become_ready(block)
        return True

    def _add(self, block: Block) -> None:
        self._blocks[block.dataset.dataset_id, block.index] = block
        self._by_key[block.key] = block

    def drop_unpinned(self) -> None:
        """Evict all that can be evicted: the last resort against gaps."""
        for block in list(self._blocks.values()):
            if block.is_evictable:
                self._evict(block)
        for spare in self._shared.spare():
            self._shared.evict(spare)

    def forget_dataset(self, dataset: DatasetBlocks) -> None:
        """Nobody reads this dataset any more: what is in use still goes when it no longer is."""
        self._forgotten.add(dataset.dataset_id)
        self._again.forget(dataset.dataset_id)
        for block in list(self._blocks.values()):
            if block.dataset is dataset and block.is_evictable:
                self._evict(block)

    def _is_forgotten(self, block: Block) -> bool:
        """Whether a block that was on its way is wanted no more; then it is gone."""
        if block.dataset.dataset_id in self._forgotten:
            self._evict(block)
            return True
        return False

    # -- loading ---------------------------------------------------------------------------------

    def _fetch(self, block: Block, *, greedy: bool) -> bool:
        if not self.can_fetch:
            return False
        dataset, index = block.dataset, block.index
        raw = self._room(block, int(dataset.marks.raw[index]), greedy=greedy)
        if raw is None:
            return False
        block.raw, block.phase = raw, BlockPhase.FETCHING
        self._add(block)
        self._fetching += 1
        self._fetching_bytes += raw.length
        dataset.account.read_began(self._time.now)
        self._do(Fetch(block.key, dataset.dataset_id, index, raw))
        return True

    def fetched(self, event: Fetched) -> None:
        """A fetch has ended."""
        block = self._by_key[event.key]
        assert block.raw is not None
        self._fetching -= 1
        self._fetching_bytes -= block.raw.length
        dataset = block.dataset
        dataset.account.read_ended(self._time.now, block.raw.length)
        dataset.marks.fetched[block.index] = self._time.now
        if self._is_forgotten(block):
            return
        if event.is_away:
            self._evict(block)  # and fetch it again, for as long as trainers wait
        elif event.error is not None:
            self._fail(block, event.error)
        elif not dataset.needs_decode(block.index):
            self._become_ready(block)
        else:
            block.phase = BlockPhase.FETCHED
            self._changed(Change.GONE, block)

    def _decode(self, block: Block, *, greedy: bool) -> bool:
        dataset, index = block.dataset, block.index
        decoded = self._room(block, int(dataset.marks.decoded[index]), greedy=greedy)
        if decoded is None:
            return False
        block.decoded, block.phase = decoded, BlockPhase.DECODING
        self._add(block)
        self._decoding += 1
        self._do(DecodeBlock(block.key, dataset.dataset_id, index, block.raw, decoded))
        return True

    def decoded(self, event: Decoded) -> None:
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

    def _grown(self, block: Block, decoded_bytes: int) -> None:
        """The index guessed too low. From now on its true size is known."""
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
        self._changed(Change.GONE, block)

    def _become_ready(self, block: Block) -> None:
        block.phase = BlockPhase.READY
        block.dataset.marks.keys[block.index] = block.key
        if not block.regions:
            self._trim(block)
        self._give_trails(block)
        self._changed(Change.READY, block)

    def _give_trails(self, block: Block) -> None:
        """Where every block stays until it is needed again, its images are cropped again, too."""
        dataset, kept = block.dataset, block.decoded or block.raw
        if not (dataset.keeps_trails and self._shared.streams.crops(dataset)):
            return
        length = trail_bytes(kept.length if kept else int(dataset.stored[block.index]))
        at = self._allocator.allocate(length)
        if at is not None:
            block.trails = Region(at, length)
            self._do(ClearTrails(block.key, block.trails))

    def _fail(self, block: Block, error: DataplaneError) -> None:
        self._remove(block)
        self._changed(Change.FAILED, block, error)

    # -- memory ----------------------------------------------------------------------------------

    def room_for_slab(self, length: int, going: Sequence[SharedSlab]) -> Region | None:
        """Room for what is no block: what is free, what no block needs, and then `going`."""
        at = self._allocator.allocate(length)
        if at is None:
            unneeded = [block for block, use in self._evictable(None)[0] if use == NEVER]
            at = self._evict_until([*unneeded, *going], length)
        return None if at is None else Region(at, length)

    def _room(self, block: Block, length: int, *, greedy: bool) -> Region | None:
        at = self._allocator.allocate(length)
        if at is None:
            at = self._make_room(block, length, greedy=greedy)
        return None if at is None else Region(at, length)

    def _make_room(self, block: Block, length: int, *, greedy: bool) -> int | None:
        evictable, limit = self._evictable(block)
        unneeded = [other for other, use in evictable if use == NEVER]
        later = [other for other, use in evictable if use != NEVER and (greedy or use > limit)]
        at = self._evict_until([*unneeded, *self._shared.spare(), *later], length)
        if at is not None:
            # Evicted although their windows are open:
            again = (other for other, use in evictable if not use and not other.regions)
            self._again.note(again, self._time.now)
        return at

    def _evictable(self, block: Block | None) -> tuple[list[tuple[Block, int]], int]:
        """The blocks that could go, each with its next use, farthest first; and the use of `block`,
        which is none of them.
        """
        found = [
            other
            for other in self._blocks.values()
            if other is not block and other.is_evictable and other.regions
        ]
        use = uses_of([*found, *([] if block is None else [block])], self._shared.walks)
        touched = np.array([other.touched for other in found], np.int64)
        order = victims(use[: len(found)], touched).tolist()
        return [(found[i], int(use[i])) for i in order], int(use[-1]) if block else NEVER

    def _evict_until(self, going: Sequence[Block | SharedSlab], length: int) -> int | None:
        """Evict the first of these, as many as it takes, or none if that is not enough."""
        # Tried out first: to evict what leaves too little room would be to load it again in vain.
        trial = self._allocator.copy()
        for count, each in enumerate(going, 1):
            if max(trial.free(region.offset) for region in each.regions) >= rounded(length):
                for other in going[:count]:
                    if isinstance(other, Block):
                        self._evict(other)
                    else:
                        self._shared.evict(other)
                return self._allocator.allocate(length)
        return None

    def _trim(self, newest: Block) -> None:
        """Blocks that lie in local files take no memory, but a worker remembers each of them."""
        direct = [
            block
            for block in self._blocks.values()
            if block is not newest and block.is_evictable and not block.regions
        ]
        if len(direct) <= _DIRECT_BLOCKS_MAX:
            return
        touched = np.array([block.touched for block in direct], np.int64)
        for i in victims(uses_of(direct, self._shared.walks), touched)[: len(direct) // 4].tolist():
            self._evict(direct[i])

    def _evict(self, block: Block) -> None:
        self._remove(block)
        self._changed(Change.GONE, block)

    def _remove(self, block: Block) -> None:
        self._do(ForgetBlock(block.key))
        for region in block.regions:
            self._allocator.free(region.offset)
        block.raw = block.decoded = block.trails = None
        block.dataset.marks.keys[block.index] = 0
        self._drop(block)

    def _drop(self, block: Block) -> None:
        del self._by_key[block.key]
        del self._blocks[block.dataset.dataset_id, block.index]
