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

import contextlib
import itertools
import time
from collections.abc import Sequence

import numpy as np

from dataplane.arena.allocator import Allocator, rounded
from dataplane.arena.memfd import Arena
from dataplane.errors import BudgetTooSmall, DataplaneError
from dataplane.model import Region
from dataplane.node import budgets
from dataplane.node.block import Block, Listener, Phase, Spare
from dataplane.node.columns import Ints
from dataplane.node.dataset import Dataset
from dataplane.node.death import Place
from dataplane.node.eviction import NEVER, uses_of, victims
from dataplane.node.fetch import Fetcher
from dataplane.node.pool import WorkerPool
from dataplane.node.pool_worker import Job
from dataplane.node.read_again import ReadAgain
from dataplane.node.trails import trail_bytes
from dataplane.rpc import tasks
from dataplane.store.unreachable import UNREACHABLE

BLOCK_ARENA_ID = 0
DECODE_URGENCY = 1

# Enough must be on its way for a round trip: of smaller blocks, up to so many times as many.
FETCH_BYTES_MIN = 2 << 20
SMALL_FETCHES = 4

_DIRECT_BLOCKS_MAX = 4096
_STAYING_SHARE = 0.9


class BlockTable:
    """Every block of the node."""

    def __init__(
        self,
        arena: Arena,
        fetcher: Fetcher,
        pool: WorkerPool,
        fetch_count: int,
        listener: Listener,
    ) -> None:
        self._arena = arena
        self._allocator = Allocator(arena.size_bytes)
        self._fetcher = fetcher
        self._pool = pool
        self._fetch_count = fetch_count
        self._listener = listener
        self._blocks: dict[tuple[int, int], Block] = {}
        self._by_key: dict[int, Block] = {}
        self._forgotten: set[int] = set()
        self._again = ReadAgain(self.arena_bytes)
        self._keys = itertools.count(1)
        self._clock = itertools.count(1)
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

    def pin(self, dataset: Dataset, blocks: Ints) -> None:
        """Keep these blocks where they are. All of them are ready, and each is named once."""
        dataset.marks.pins[blocks] += 1
        dataset.marks.touched[blocks] = next(self._clock)

    def unpin(self, dataset: Dataset, blocks: Ints) -> None:
        """One holder fewer of each."""
        dataset.marks.pins[blocks] -= 1
        if dataset.dataset_id in self._forgotten:
            for index in blocks[dataset.marks.pins[blocks] == 0].tolist():
                self._is_forgotten(self._blocks[dataset.dataset_id, index])

    def source(self, key: int) -> tasks.BlockSource:
        """What a worker must know to gather from the block with this key, which is ready."""
        return self._by_key[key].source

    def place(self, key: int) -> Place:
        """Which block of which shard this is, in words for errors."""
        return self._by_key[key].place

    def start(self, dataset: Dataset, index: int, *, greedy: bool) -> bool:
        """See that the block is on its way: False if there is no room for it now.

        `greedy`: somebody waits for it, so whatever is not pinned may be evicted.
        """
        self._forgotten.discard(dataset.dataset_id)
        block = self._blocks.get((dataset.dataset_id, index))
        if block is not None:
            return block.phase is not Phase.FETCHED or self._decode(block, greedy=greedy)
        block = Block(dataset, index, next(self._keys))
        dataset.marks.touched[index] = next(self._clock)
        if dataset.needs_fetch(index):
            return self._fetch(block, greedy=greedy)
        if dataset.needs_decode(index):
            return self._decode(block, greedy=greedy)
        self._blocks[dataset.dataset_id, index] = block
        self._become_ready(block)
        return True

    def drop_unpinned(self) -> None:
        """Evict all that can be evicted: the last resort against gaps."""
        for block in list(self._blocks.values()):
            if block.is_evictable:
                self._evict(block)
        for spare in self._listener.spare():
            self._listener.evict_spare(spare)

    def forget_dataset(self, dataset: Dataset) -> None:
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
        block.raw, block.phase = raw, Phase.FETCHING
        self._blocks[dataset.dataset_id, index] = block
        self._fetching += 1
        self._fetching_bytes += raw.length
        dataset.account.read_began(time.monotonic())
        told = dataset.raw_block(index, raw)
        self._fetcher.fetch(
            told.url,
            told.etag,
            told.preamble_place,
            told.pieces or (told.place,),
            self._arena.view(raw.offset, raw.length),
            lambda error: self._on_fetched(block, error),
        )
        return True

    def _on_fetched(self, block: Block, error: DataplaneError | None) -> None:
        self._fetching -= 1
        assert block.raw is not None
        self._fetching_bytes -= block.raw.length
        dataset, now = block.dataset, time.monotonic()
        dataset.account.read_ended(now, block.raw.length if block.raw is not None else 0)
        dataset.marks.fetched[block.index] = now
        if self._is_forgotten(block):
            return
        if isinstance(error, UNREACHABLE):
            self._evict(block)  # and fetch it again, for as long as the engine has trainers wait
            return
        if error is not None:
            self._fail(block, error)
            return
        if not block.dataset.needs_decode(block.index):
            self._become_ready(block)
            return
        block.phase = Phase.FETCHED
        self._listener.block_gone(block.dataset, block.index)

    def _decode(self, block: Block, *, greedy: bool) -> bool:
        dataset, index = block.dataset, block.index
        decoded = self._room(block, int(dataset.marks.decoded[index]), greedy=greedy)
        if decoded is None:
            return False
        block.decoded, block.phase = decoded, Phase.DECODING
        self._blocks[dataset.dataset_id, index] = block
        self._decoding += 1
        raw = dataset.raw_block(index, block.raw)
        job = Job(
            body=tasks.Decode(dataset.dataset_id, raw, decoded),
            dataset=dataset.message,
            arenas=((BLOCK_ARENA_ID, self._arena.fd),),
            report=lambda result: self._on_decoded(block, job, result),
            place=lambda: block.place,
        )
        self._pool.submit(job, DECODE_URGENCY)
        return True

    def _on_decoded(self, block: Block, job: Job, result: tasks.ResultBody) -> None:
        self._decoding -= 1
        account = block.dataset.account
        account.decoding_s += time.monotonic() - (job.started or time.monotonic())
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
            # The index guessed too low. From now on its true size is known.
            block.dataset.marks.decoded[block.index] = result.bytes
            if result.bytes > self.arena_bytes:
                url = block.dataset.url(block.index)
                need = result.bytes + int(block.dataset.marks.raw[block.index])
                self._fail(block, budgets.block_too_large(url, need, self.arena_bytes))
                return
            self._allocator.free(block.decoded.offset)
            block.decoded = None
            if block.raw is None:
                del self._blocks[block.dataset.dataset_id, block.index]
            else:
                block.phase = Phase.FETCHED
            self._listener.block_gone(block.dataset, block.index)
            return
        self._allocator.shrink(block.decoded.offset, result.bytes)
        block.decoded = Region(block.decoded.offset, result.bytes)
        if block.raw is not None:
            self._allocator.free(block.raw.offset)
            block.raw = None
        self._become_ready(block)

    def _become_ready(self, block: Block) -> None:
        block.phase = Phase.READY
        block.dataset.marks.keys[block.index] = block.key
        self._by_key[block.key] = block
        if not block.regions:
            self._trim(block)
        self._give_trails(block)
        self._listener.block_ready(block.dataset, block.index)

    def _give_trails(self, block: Block) -> None:
        """Where every block stays until it is needed again, its images are cropped again, too."""
        dataset, kept = block.dataset, block.decoded or block.raw
        length = kept.length if kept else int(dataset.manifest.block_length[block.index])
        may_stay = dataset.bytes_with_trails <= self.arena_bytes * _STAYING_SHARE
        if not (may_stay and dataset.has_bytes and self._listener.crops(dataset)):
            return
        length = trail_bytes(length)
        at = self._allocator.allocate(length)
        if at is None:
            return
        with contextlib.suppress(BudgetTooSmall):
            block.trails = self._reserved(at, length)
            view = self._arena.view(at, length)
            np.frombuffer(view, np.uint8)[:] = 0

    def _fail(self, block: Block, error: DataplaneError) -> None:
        self._remove(block)
        self._listener.block_failed(block.dataset, block.index, error)

    # -- memory ----------------------------------------------------------------------------------

    def room_for_slab(self, length: int, going: Sequence[Spare]) -> Region | None:
        """Room for what is no block: what is free, what no block needs, and then `going`."""
        at = self._allocator.allocate(length)
        if at is None:
            unneeded = [block for block, use in self._evictable(None)[0] if use == NEVER]
            at = self._evict_until([*unneeded, *going], length)
        try:
            return None if at is None else self._reserved(at, length)
        except BudgetTooSmall:
            return None

    def shrink(self, region: Region, length: int) -> Region:
        """Only so much of it is needed."""
        self._allocator.shrink(region.offset, length)
        return Region(region.offset, length)

    def free(self, region: Region) -> None:
        """What was no block needs it no more."""
        self._allocator.free(region.offset)

    def _room(self, block: Block, length: int, *, greedy: bool) -> Region | None:
        at = self._allocator.allocate(length)
        if at is None:
            at = self._make_room(block, length, greedy=greedy)
        return None if at is None else self._reserved(at, length)

    def _reserved(self, at: int, length: int) -> Region:
        try:
            self._arena.reserve(min(self._allocator.high_water, self._arena.size_bytes))
        except BudgetTooSmall:
            self._allocator.free(at)
            raise
        return Region(at, length)

    def _make_room(self, block: Block, length: int, *, greedy: bool) -> int | None:
        evictable, limit = self._evictable(block)
        unneeded = [other for other, use in evictable if use == NEVER]
        later = [other for other, use in evictable if use != NEVER and (greedy or use > limit)]
        at = self._evict_until([*unneeded, *self._listener.spare(), *later], length)
        if at is not None:
            # Evicted although their windows are open:
            self._again.note(other for other, use in evictable if not use and not other.regions)
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
        use = uses_of([*found, *([] if block is None else [block])], self._listener.walks)
        touched = np.array([other.touched for other in found], np.int64)
        order = victims(use[: len(found)], touched).tolist()
        return [(found[i], int(use[i])) for i in order], int(use[-1]) if block else NEVER

    def _evict_until(self, going: Sequence[Block | Spare], length: int) -> int | None:
        """Evict the first of these, as many as it takes, or none if that is not enough."""
        # Tried out first: to evict what leaves too little room would be to load it again in vain.
        trial = self._allocator.copy()
        for count, each in enumerate(going, 1):
            if max(trial.free(region.offset) for region in each.regions) >= rounded(length):
                for other in going[:count]:
                    if isinstance(other, Block):
                        self._evict(other)
                    else:
                        self._listener.evict_spare(other)
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
        for i in victims(uses_of(direct, self._listener.walks), touched)[
            : len(direct) // 4
        ].tolist():
            self._evict(direct[i])

    def _evict(self, block: Block) -> None:
        self._remove(block)
        self._listener.block_gone(block.dataset, block.index)

    def _remove(self, block: Block) -> None:
        self._pool.forget_block(block.key)
        for region in block.regions:
            self._allocator.free(region.offset)
        block.raw = block.decoded = block.trails = None
        block.dataset.marks.keys[block.index] = 0
        self._by_key.pop(block.key, None)
        self._blocks.pop((block.dataset.dataset_id, block.index), None)
