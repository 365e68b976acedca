"""Track the purposes for which the block arena is held: blocks that waiting tasks need, blocks
being loaded, and blocks that neighbours may request again. Pure.

Every node of a job reads ahead about as far as the others. If a block is dropped as soon as the
first neighbour has it, the next neighbour causes another read; and if a node's own reading ahead
fills the arena, each neighbour reads for itself.

Invariants:
1. A block is not read ahead if wanted blocks would push it out again. Blocks being loaded take at
   most 1/LOADING_PARTS of the arena, or are at most READS_MIN in number, since nothing can take
   their memory back. If neighbours request blocks, blocks being loaded take at most
   1/ASKED_LOADING_PARTS, or there is only one, and all wanted blocks leave 1/LENT_PARTS of the
   arena free. If each block is read several times, the number is one, too, instead of READS_MIN.
2. The blocks sent last stay for other neighbours, up to 1/LENT_PARTS of the arena.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator

from dataplane.model.errors import DataplaneError
from dataplane.scheduler.dataset import DatasetBlocks, Ints
from dataplane.scheduler.records import BlockChange, BlockOutcome, CachedBlock, Moment, SlabTask

LOADING_PARTS = 5
ASKED_LOADING_PARTS = 8
LENT_PARTS = 4
READS_MIN = 2
"""One block arrives while the next one is requested, even if other blocks are read again because of
that."""
_SEEN_MAX = 64
_LOST_PARTS = 4
"""Losses of blocks count only as far as they exceed 1/_LOST_PARTS of all bytes loaded."""


class Holdings:
    """The holdings of one arena."""

    def __init__(self, arena_bytes: int) -> None:
        self._arena_bytes = arena_bytes
        self._wanted_bytes = 0
        self._loading: dict[int, int] = {}
        self._loading_bytes = 0
        self._lent: dict[int, CachedBlock] = {}
        self._recent: dict[int, int] = {}
        self._recent_bytes = 0
        self.is_asked = False
        """Whether neighbours ask for blocks."""
        self.is_tight = False
        """Whether blocks are read several times. A block is then fetched only if there is room to
        decode it, even if a task waits for it."""
        self.loaded_bytes = 0
        """The bytes of all blocks that have become ready, counted anew each time that a
        block does."""
        self._lost_bytes = self._loaded_before = 0
        self.needs_excerpts = False
        """Whether too many blocks are lost for lack of room, or a batch needs more blocks
        than fit."""

    @property
    def is_idle(self) -> bool:
        """Whether so few blocks are being loaded that the store's latency limits the node. Always
        False where neighbours request blocks, since they keep the store busy, and where each block
        is read several times, since more reading costs more than waiting.
        """
        return not (self.is_asked or self.is_tight) and len(self._loading) < READS_MIN

    def may_read_ahead(self, length: int) -> bool:
        """Whether this many bytes may be taken for a block that delays no task."""
        parts = ASKED_LOADING_PARTS if self.is_asked else LOADING_PARTS
        is_too_much = parts * (self._loading_bytes + length) > self._arena_bytes
        if self._loading and is_too_much and not self.is_idle:
            return False
        left = self._arena_bytes - self._arena_bytes // LENT_PARTS
        return not self.is_asked or self._wanted_bytes + length <= left

    # -- tasks -----------------------------------------------------------------------------------

    def want(self, dataset: DatasetBlocks, blocks: Ints) -> None:
        """Note that one more waiting task needs rows of each of these blocks.

        Shapes:  blocks: int64[n], each once.
        """
        marks = dataset.marks
        self._wanted_bytes += int(marks.held[blocks[marks.wanted[blocks] == 0]].sum())
        marks.wanted[blocks] += 1

    def want_no_more(self, dataset: DatasetBlocks, blocks: Ints) -> None:
        """Note that one waiting task fewer needs rows of each of these blocks."""
        marks = dataset.marks
        marks.wanted[blocks] -= 1
        self._wanted_bytes -= int(marks.held[blocks[marks.wanted[blocks] == 0]].sum())

    # -- blocks ----------------------------------------------------------------------------------

    def changed(self, block: CachedBlock) -> None:
        """Note that the block takes more or less memory than before."""
        held, index = block.dataset.marks.held, block.index
        length = sum(region.length for region in block.regions)
        if block.is_wanted:
            self._wanted_bytes += length - int(held[index])
        held[index] = length

    def loading(self, block: CachedBlock) -> None:
        """Note that the block has memory that cannot be taken back before `loaded`."""
        self._loading[block.key] = length = sum(region.length for region in block.regions)
        self._loading_bytes += length

    def loaded(self, block: CachedBlock) -> None:
        """Note that the block is loaded, or that this failed. May be called twice."""
        self._loading_bytes -= self._loading.pop(block.key, 0)

    def gone(self, block: CachedBlock) -> None:
        """Note that the block is no longer in memory, and has no regions."""
        self.changed(block)
        self.loaded(block)
        self._lent.pop(block.key, None)
        self._recent_bytes -= self._recent.pop(block.key, 0)

    def lose(self, block: CachedBlock) -> None:
        """Count a block that must be read again because others need its room. Excerpts are not
        worth it while only a small part of the reads is lost.
        """
        borne = (self.loaded_bytes - self._loaded_before) // _LOST_PARTS
        self._loaded_before = self.loaded_bytes
        self._lost_bytes = max(0, self._lost_bytes - borne) + block.kept_bytes
        self.needs_excerpts |= self._lost_bytes > self._arena_bytes

    def forget_losses(self) -> None:
        """Note that the memory for excerpts was returned."""
        self.needs_excerpts, self._lost_bytes = False, 0

    # -- neighbours ------------------------------------------------------------------------------

    def sent(self, block: CachedBlock) -> None:
        """Note that a neighbour has got the block: others may request it soon."""
        key = block.key
        self._lent.pop(key, None)
        self._lent[key] = block
        self._recent_bytes -= self._recent.pop(key, 0)
        self._recent[key] = length = block.kept_bytes
        self._recent_bytes += length
        while self._recent_bytes > self._arena_bytes // LENT_PARTS and len(self._recent) > 1:
            self._recent_bytes -= self._recent.pop(next(iter(self._recent)))

    def may_be_asked(self, block: CachedBlock) -> bool:
        """Whether the block is kept for neighbours."""
        return block.key in self._recent

    def lent(self) -> Iterator[CachedBlock]:
        """Yield blocks that were sent and that no task waits for, the oldest first; not all if
        there are many.
        """
        for block in itertools.islice(self._lent.values(), _SEEN_MAX):
            if block.is_evictable and not block.is_wanted:
                yield block


# -- waiting tasks -----------------------------------------------------------------------------
#
# Invariants:
# 1. `missing` has the blocks that a waiting task still needs: those that are not ready and of which
#    the task has no excerpt. `idle` has the blocks of `missing` that are not being loaded.


class WaitingTasks:
    """Every slab task that waits for blocks or a slot, and the blocks that neighbours await."""

    def __init__(self, time: Moment, holdings: Holdings) -> None:
        self._time, self.holdings = time, holdings
        self.requested: dict[tuple[int, int], None] = {}
        """Blocks that neighbours have requested and whose read is to begin, the oldest first."""
        self._waiting: defaultdict[int, set[SlabTask]] = defaultdict(set)

    def of_block(self, dataset: DatasetBlocks, index: int) -> list[SlabTask]:
        """Return the tasks that need rows of a block and have no excerpt of it."""
        found = []
        for task in self._waiting.get(dataset.dataset_id, ()):
            number = task.datasets.number(dataset, index)
            if task.needs(number) and number not in task.excerpts:
                found.append(task)
        return found

    def is_lacked(self, dataset: DatasetBlocks, index: int) -> bool:
        """Whether a task or a neighbour waits for a block to be loaded. Takes a step for
        each task.
        """
        return (dataset.dataset_id, index) in self.requested or any(
            task.datasets.number(dataset, index) in task.idle
            for task in self._waiting.get(dataset.dataset_id, ())
        )

    def block_changed(
        self, changed: BlockChange, fail: Callable[[SlabTask, DataplaneError], None]
    ) -> None:
        """Update the tasks that wait for this block; `fail` those that cannot be made."""
        for task in list(self._waiting.get(changed.dataset.dataset_id, ())):
            number = task.datasets.number(changed.dataset, changed.index)
            if changed.change is BlockOutcome.READY:
                self._block_ready(task, number)
            elif not task.needs(number) or number in task.excerpts:
                continue
            elif changed.error is not None:
                fail(task, changed.error)
            else:
                task.missing.add(number)
                task.idle.add(number)

    def _block_ready(self, task: SlabTask, number: int) -> None:
        if number in task.missing:
            task.missing.discard(number)
            task.idle.discard(number)
            self._stamp(task)

    def add(self, task: SlabTask) -> None:
        """Let the task wait for this plan from now on."""
        datasets, blocks = task.datasets, task.plan.blocks
        for dataset, some in datasets.parts(blocks):
            self._waiting[dataset.dataset_id].add(task)
            self.holdings.want(dataset, some)
        task.blocks = None
        task.missing = set(blocks[task.keys == 0].tolist())
        task.idle = set(task.missing)
        self._stamp(task)

    def _stamp(self, task: SlabTask) -> None:
        if not task.missing:
            task.stamps.gathered_from = self._time.now
            task.stamps.fetched = max(
                (
                    float(dataset.marks.fetched[blocks].max())
                    for dataset, blocks in task.datasets.parts(task.plan.blocks)
                ),
                default=0.0,
            )

    def remove(self, task: SlabTask) -> None:
        """Remove a task that no longer waits."""
        for dataset, some in task.datasets.parts(task.plan.blocks):
            waiting = self._waiting.get(dataset.dataset_id)
            if waiting is not None and task in waiting:
                waiting.remove(task)
                self.holdings.want_no_more(dataset, some)
                if not waiting:
                    del self._waiting[dataset.dataset_id]
        task.missing.clear()
        task.idle.clear()
