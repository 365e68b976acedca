"""Excerpts: rows of blocks that must leave memory although planned slabs still need them.

If the block arena is smaller than the open windows, blocks are evicted while planned slabs need
rows of them. A worker then first copies those rows: for each of these slabs, the worker makes one
*excerpt*, a small block. Slabs are assembled from excerpts and whole blocks alike. So a slab whose
blocks do not fit into the arena together is made in several passes, and one read of a block serves
all slabs for whose rows there is room.

Invariants:
1. An excerpt stays in memory as long as a task that waits or is being assembled needs it.
2. All excerpts are in one extent of the arena, so that they leave no gaps between blocks. It exists
   only if blocks were lost for lack of room, or one batch needs more blocks than fit.
3. For the rows of a task, only excerpts of tasks that are needed later are dropped; for the rows of
   the head, excerpts of any other task that waits.
4. A block is pinned while rows of it are copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from dataplane.arena.allocator import GRANULE_BYTES, Allocator, rounded
from dataplane.arena.slab_layout import NUMBER_BYTES, row_numbers_bytes
from dataplane.model.errors import DataplaneError
from dataplane.model.records import Region
from dataplane.rpc import tasks
from dataplane.scheduler.blocks import BlockTable
from dataplane.scheduler.dataset import DatasetBlocks
from dataplane.scheduler.events import Effect, ExcerptRows, ExtractRows, ForgetBlock, RowsExtracted
from dataplane.scheduler.holdings import WaitingTasks
from dataplane.scheduler.records import CachedBlock, Excerpt, SlabPhase, SlabTask

# Give an excerpt an eighth more room than its rows take on average, since rows may differ in size.
# An excerpt that does not fit is made again, with the room that it needs.
_SPREAD_PARTS = 8
# The most rows that are searched at once for the rows of one block: the search takes time on the
# event loop.
_SEARCHED_ROWS_MAX = 1 << 20


class _Part(Struct, frozen=True):
    """An excerpt in progress, for one task."""

    task: SlabTask
    excerpt: Excerpt


class _Copying(Struct, frozen=True):
    """A block from which a worker copies rows."""

    block: CachedBlock
    parts: Sequence[_Part]


class Failure(Struct, frozen=True):
    """The rows of a task cannot be read."""

    task: SlabTask
    error: DataplaneError


class Excerpts:
    """Every excerpt of the node. `do` emits an effect."""

    def __init__(
        self,
        blocks: BlockTable,
        allocator: Allocator,
        waiting: WaitingTasks,
        do: Callable[[Effect], None],
    ) -> None:
        self._blocks, self._arena, self._waiting, self._do = blocks, allocator, waiting, do
        self._pool: Allocator | None = None
        self._pool_at = 0
        self._by_key: dict[int, Excerpt] = {}
        self._holders: dict[SlabTask, None] = {}
        self._copying: dict[int, _Copying] = {}
        self._suspects: set[int] = set()
        self._numbers = itertools.count(1)

    @property
    def is_open(self) -> bool:
        """Whether there is room for excerpts."""
        return self._pool is not None

    @property
    def pool_bytes(self) -> int:
        """The memory for excerpts."""
        return 0 if self._pool is None else self._pool.size_bytes

    @property
    def copying_count(self) -> int:
        """The number of blocks from which workers copy rows; an event will report the end
        of each.
        """
        return len(self._copying)

    def awaited(self) -> tuple[DatasetBlocks, ...]:
        """Return the datasets of waiting tasks that have or get excerpts."""
        getting = (part.task for copying in self._copying.values() for part in copying.parts)
        using = (task for task in (*self._holders, *getting) if task.phase is SlabPhase.WAITING)
        return tuple({dataset for task in using for dataset in task.datasets.datasets})

    def find(self, key: int) -> Excerpt | None:
        """Return the excerpt with this key; None if there is none."""
        return self._by_key.get(key)

    # -- the pool --------------------------------------------------------------------------------

    def open(self, length: int) -> bool:
        """Take this many bytes of the arena; return False if blocks in use are in the way."""
        region = self._blocks.room.of_excerpts(length)
        if region is None:
            return False
        self._pool, self._pool_at = Allocator(region.length), region.offset
        self._blocks.holdings.is_tight = True
        return True

    def close(self) -> None:
        """Drop the excerpts of all tasks that wait, and give the memory back if no excerpt is in
        use.
        """
        for task in list(self._holders):
            if task.phase is SlabPhase.WAITING:
                for number in list(task.excerpts):
                    self._drop(task, number)
        if self._pool is not None and not self._by_key and not self._copying:
            self._arena.free(self._pool_at)
            self._pool, self._blocks.holdings.is_tight = None, False
            self._blocks.holdings.forget_losses()

    # -- making ----------------------------------------------------------------------------------

    def need_of(self, task: SlabTask) -> int:
        """Return the bytes that excerpts for all rows of a task would take, as far as known."""
        plan, need, first = task.plan, 0, 0
        counts = plan.rows_by_block()
        for dataset, blocks in task.datasets.parts(plan.blocks):
            some = counts[first : first + len(blocks)]
            whole = dataset.kept(blocks)
            sizes = whole * some // np.maximum(dataset.rows[blocks], 1) + dataset.stream_bytes
            sizes += sizes // _SPREAD_PARTS + row_numbers_bytes(1) + some * NUMBER_BYTES
            need += int((-(-sizes // GRANULE_BYTES) * GRANULE_BYTES)[whole > 0].sum())
            first += len(blocks)
        return max(need, sum(map(rounded, task.excerpt_bytes.values())))

    def copy_rows(self, block: CachedBlock, head: SlabTask) -> bool:
        """Have a worker copy the rows of this block that waiting tasks need; return False if there
        is no room for any of them.
        """
        assert self._pool is not None
        wanting = sorted(
            self._waiting.of_block(block.dataset, block.index), key=lambda task: task.rank
        )
        if head in wanting:  # the head's rows are copied first, whatever its rank
            wanting = [head, *(task for task in wanting if task is not head)]
        parts: list[_Part] = []
        copied: list[ExcerptRows] = []
        searched = 0
        for task in wanting:
            searched += len(task.plan.row_index)
            if parts and (searched > _SEARCHED_ROWS_MAX or block.key in self._suspects):
                break
            number = task.datasets.number(block.dataset, block.index)
            own = task.plan.rows_of(number)
            into = self._room(self._size(task, block, number, len(own)), task, head)
            if into is None:
                break
            key = self._blocks.new_key()
            parts.append(_Part(task, Excerpt(block.dataset, block.index, key, into, len(own))))
            copied.append(ExcerptRows(into, own, task.plan.packs_of(number)))
        if not parts:
            return False
        self._blocks.pin(block.dataset, np.array([block.index]))
        number = next(self._numbers)
        self._copying[number] = _Copying(block, parts)
        self._do(ExtractRows(number, block.key, copied))
        return True

    def is_copied(self, block: CachedBlock) -> bool:
        """Whether rows of this block are being copied."""
        return any(copying.block is block for copying in self._copying.values())

    def _size(self, task: SlabTask, block: CachedBlock, number: int, row_count: int) -> int:
        known = task.excerpt_bytes.get(number)
        if known is not None:
            return known
        size = block.kept_bytes * row_count // max(int(block.dataset.rows[block.index]), 1)
        size += size // _SPREAD_PARTS + block.dataset.stream_bytes
        return row_numbers_bytes(row_count) + size

    def _room(self, length: int, task: SlabTask, head: SlabTask) -> Region | None:
        assert self._pool is not None
        while True:
            at = self._pool.allocate(length)
            if at is not None:
                return Region(self._pool_at + at, length)
            others = (
                other
                for other in self._holders
                if other.phase is SlabPhase.WAITING
                and other is not task
                and (task is head or (other.rank > task.rank and other is not head))
            )
            last = max(others, key=lambda other: other.rank, default=None)
            if last is None:
                return None
            self._drop(last, next(reversed(last.excerpts)))

    def copied(self, event: RowsExtracted) -> list[Failure]:
        """Handle the end of a copy, or its failure; return the tasks that fail for that reason."""
        copying, result = self._copying.pop(event.number), event.result
        block, parts, is_done = copying.block, copying.parts, False
        failures = list[Failure]()
        if isinstance(result, tasks.Extracted):
            block.dataset.account.disk_us += result.disk
            self._suspects.discard(block.key)
            made = [self._made(*each) for each in zip(parts, result.bytes, strict=True)]
            is_done = all(made)
        else:
            assert isinstance(result, DataplaneError)
            for part in parts:
                self._free(part.excerpt)
            # Copy the rows of one task at a time from now on: only one of the tasks may be at
            # fault.
            self._suspects.add(block.key)
            if len(parts) == 1 and parts[0].task.phase is SlabPhase.WAITING:
                failures.append(Failure(parts[0].task, result))
        self._blocks.unpin(block.dataset, np.array([block.index]))
        if is_done and block.is_evictable and self._is_there(block):
            self._blocks.give_way(block)
        return failures

    def _is_there(self, block: CachedBlock) -> bool:
        return self._blocks.find(block.dataset, block.index) is block

    def _made(self, part: _Part, size: int) -> bool:
        """Note the size of an excerpt; return False if it exceeds its room."""
        assert self._pool is not None
        task, excerpt = part.task, part.excerpt
        number, length = (
            task.datasets.number(excerpt.dataset, excerpt.index),
            excerpt.decoded.length,
        )
        is_wanted = task.phase is SlabPhase.WAITING and task.needs(number)
        if size > length:
            task.excerpt_bytes[number] = size
        if size > length or not is_wanted or number in task.excerpts:
            self._free(excerpt)
            return size <= length
        at = excerpt.decoded.offset
        self._pool.shrink(at - self._pool_at, size)
        excerpt.decoded = Region(at, size)
        self._by_key[excerpt.key] = excerpt
        self._give(excerpt, task, number)
        task.missing.discard(number)
        task.idle.discard(number)
        return True

    # -- use -------------------------------------------------------------------------------------

    def _give(self, excerpt: Excerpt, task: SlabTask, number: int) -> None:
        excerpt.users += 1
        task.excerpts[number] = excerpt
        self._holders[task] = None

    def share(self, task: SlabTask, after: SlabTask) -> None:
        """Give excerpts to both parts of a task that was cut in two."""
        for number, excerpt in list(task.excerpts.items()):
            if after.needs(number):
                self._give(excerpt, after, number)
            task.blocks = None
            if not task.needs(number):
                self._take(task, number)

    def release(self, task: SlabTask) -> None:
        """Free the excerpts of a task that no longer needs them."""
        for number in list(task.excerpts):
            self._take(task, number)

    def _drop(self, task: SlabTask, number: int) -> None:
        """Drop an excerpt whose room is needed more for another one."""
        excerpt = task.excerpts[number]
        self._take(task, number)
        if not excerpt.dataset.marks.keys[excerpt.index]:
            task.missing.add(number)
            task.idle.add(number)

    def _take(self, task: SlabTask, number: int) -> None:
        excerpt = task.excerpts.pop(number)
        if not task.excerpts:
            del self._holders[task]
        excerpt.users -= 1
        if not excerpt.users:
            del self._by_key[excerpt.key]
            self._do(ForgetBlock(excerpt.key))
            self._free(excerpt)

    def _free(self, excerpt: Excerpt) -> None:
        assert self._pool is not None
        self._pool.free(excerpt.decoded.offset - self._pool_at)
