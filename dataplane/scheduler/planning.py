"""Decide when the next plans of a stream are made: several at once, as the stream's slabs, and the
loading of their blocks, need them. Decide when rows are copied into excerpts before their blocks
are evicted.
"""

from __future__ import annotations

from collections.abc import Callable

from dataplane.arena.allocator import GRANULE_BYTES
from dataplane.scheduler.blocks import BlockTable
from dataplane.scheduler.dataset import DatasetBlocks
from dataplane.scheduler.events import AllPlanned, Effect, Note, Planned, PlanSteps
from dataplane.scheduler.excerpts import Excerpts
from dataplane.scheduler.records import CachedBlock, SlabTask, StreamState
from dataplane.scheduler.slab_tasks import SlabTasks
from dataplane.scheduler.streams import StreamTable

# -- passes ------------------------------------------------------------------------------------
#
# Decide when rows are copied into excerpts, for slabs whose blocks do not fit into memory
# together.
#
# Invariants:
# 1. No rows are copied as long as no blocks are lost for lack of room, and the blocks of each batch
#    fit into the arena together.
# 2. The memory for excerpts leaves room for the largest block that a task lacks.

# The number of slabs that are planned beyond those being made, so that their blocks are fetched
# meanwhile. If each block is read several times, more are planned: one read of a block then serves
# all planned slabs.
PLANS_AHEAD = 16
_PLANS_AHEAD_MAX = 128
# The number of slabs, beyond those that have slots, for which blocks are loaded ahead while there
# are excerpts.
_NEAR_TASKS = 2
# The number of blocks from which rows are copied at once.
_COPYING_MAX = 2
# The part of the arena that excerpts may take, and how many of the largest blocks fit beside them.
_POOL_SHARE = 0.75
_BLOCKS_BESIDE = 4
# How many times the pool's bytes may be planned as excerpts: rows that were not copied yet take no
# room.
_PLANNED_PARTS = 2


class Passes:
    """The passes of one node."""

    def __init__(
        self,
        blocks: BlockTable,
        excerpts: Excerpts,
        streams: StreamTable,
        do: Callable[[Effect], None],
    ) -> None:
        self._blocks, self._excerpts, self._streams, self._do = blocks, excerpts, streams, do
        self._opened_for: tuple[DatasetBlocks, ...] = ()
        self._told: set[int] = set()

    def plans_ahead(self, stream: StreamState) -> int:
        """Return how many slabs of a stream are planned beyond those that have slots."""
        if not self._excerpts.is_open:
            return PLANS_AHEAD
        slot_bytes = stream.delivery.slots.layout.slot_bytes * max(self._stream_count, 1)
        fitting = _PLANNED_PARTS * self._excerpts.pool_bytes // slot_bytes
        return max(PLANS_AHEAD, min(fitting, _PLANS_AHEAD_MAX))

    @property
    def _stream_count(self) -> int:
        return sum(not stream.is_ahead for stream in self._streams)

    def is_near(self, task: SlabTask) -> bool:
        """Whether blocks are loaded ahead of time for a task. A block that is read several times is
        read as late as possible, to serve as many planned slabs as possible.
        """
        near = task.delivery.ahead + _NEAR_TASKS
        return not self._excerpts.is_open or task.rank[0] <= near

    def look(self, head: SlabTask | None) -> bool:
        """Take memory for excerpts if they are needed, and give it back after the last reader.
        Return whether blocks may have been evicted.
        """
        if self._excerpts.is_open:
            if not any(map(self._streams.of_dataset, self._opened_for)):
                self._opened_for = self._excerpts.awaited()  # datasets of other tasks with excerpts
                if not self._opened_for:
                    self._excerpts.close()
            return False
        is_needed = self._blocks.holdings.needs_excerpts
        return is_needed and head is not None and self.open_for(head)

    def open_for(self, head: SlabTask) -> bool:
        """Take memory for excerpts, enough for this task; return False if there is too little, if
        blocks in use are in the way, or if excerpts have their memory already.
        """
        if self._excerpts.is_open:
            return False
        arena_bytes, need = self._blocks.arena_bytes, self._excerpts.need_of(head)
        largest = head.largest_cost + 2 * GRANULE_BYTES
        planned = sum(
            _PLANS_AHEAD_MAX * stream.delivery.slots.layout.slot_bytes for stream in self._streams
        )
        length = min(
            planned, int(arena_bytes * _POOL_SHARE), arena_bytes - _BLOCKS_BESIDE * largest
        )
        length = min(max(length, need + need // 4), arena_bytes - largest)
        length = length // GRANULE_BYTES * GRANULE_BYTES
        if length < need or not self._excerpts.open(length):
            return False
        self._opened_for = head.datasets.datasets
        self._tell(head, length)
        return True

    def _tell(self, head: SlabTask, length: int) -> None:
        """Log the use of excerpts, once for each dataset."""
        dataset = head.datasets.datasets[0]
        if dataset.dataset_id in self._told:
            return
        self._told.add(dataset.dataset_id)
        facts = {
            "dataset": dataset.name,
            "block_arena_bytes": self._blocks.arena_bytes,
            "for_excerpts": length,
            "blocks_of_one_slab_bytes": head.memory_needed,
        }
        event = "the block arena is smaller than the open windows: blocks are read several times"
        self._do(Note(event, facts, is_failure=True))

    def copy_rows_for(self, head: SlabTask) -> bool:
        """Handle a block of the head that found no room: have rows copied from blocks that could
        make room, first from blocks that the head does not need. Return whether something was
        evicted.
        """
        has_evicted = False
        if not self._excerpts.is_open or not self._blocks.room.is_full:
            return has_evicted
        for block in self._blocks.room.leaving or self._pinned_by(head):
            if self._excerpts.copying_count >= _COPYING_MAX:
                break
            if not self._excerpts.copy_rows(block, head) and block.is_evictable:
                self._blocks.give_way(block)
                has_evicted = True
        return has_evicted

    def _pinned_by(self, head: SlabTask) -> list[CachedBlock]:
        """Return the first of the head's own blocks whose rows are not being copied."""
        for number in head.pinned.tolist():
            block = self._blocks.find(*head.datasets.find(number))
            if block is not None and block.regions and not self._excerpts.is_copied(block):
                return [block]
        return []


PLANS_TOGETHER = 8


class Planning:
    """The planning of all streams of a node. `do` emits an effect."""

    def __init__(
        self,
        streams: StreamTable,
        tasks: SlabTasks,
        passes: Passes,
        do: Callable[[Effect], None],
    ) -> None:
        self._streams, self._tasks, self._passes, self._do = streams, tasks, passes, do

    def plan_more(self, stream: StreamState) -> None:
        """Request plans, if the stream needs some."""
        if stream.planning or stream.planned_all:
            return
        room = self._passes.plans_ahead(stream) - len(stream.tasks)
        room += stream.delivery.ahead
        # Request several plans per call, since each call wakes two threads. Request the first plans
        # one by one, so that the first batch is early.
        count = min(max(len(stream.tasks), 1), PLANS_TOGETHER)
        if room >= count:
            stream.planning = count
            self._do(PlanSteps(stream.stream_id, stream.walk, count))

    def planned(self, event: Planned) -> None:
        """Handle plans that were made, or could not be made."""
        stream = self._streams.find(event.stream_id)
        if stream is None:
            return
        stream.planning, stream.error = 0, event.error
        stream.planned_all = event.error is not None or stream.walk.is_planned
        for plan in event.plans:
            self._tasks.add(stream, plan)
        stream.planned_to = stream.walk.position
        if stream.planned_all:
            self._do(AllPlanned(stream.stream_id, has_failed=event.error is not None))
