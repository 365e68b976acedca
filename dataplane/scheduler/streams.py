"""The open streams of a node, and the slabs that several of them share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from dataplane.arena.allocator import Allocator
from dataplane.model.changes import NO_GAPS, Gaps
from dataplane.model.records import Region
from dataplane.rpc import tasks
from dataplane.scheduler.dataset import DatasetBlocks
from dataplane.scheduler.events import NextOrderKnown
from dataplane.scheduler.next_use import WalkPosition
from dataplane.scheduler.records import (
    Group,
    Moment,
    SharedSlab,
    SlabKey,
    SlabPhase,
    SlabTask,
    StreamState,
)


class StreamTable:
    """Every open stream, by number."""

    def __init__(self) -> None:
        self._streams: dict[int, StreamState] = {}

    def __iter__(self) -> Iterator[StreamState]:
        """Yield the streams that are open now; the table may change during iteration."""
        return iter(list(self._streams.values()))

    def find(self, stream_id: int | None) -> StreamState | None:
        """Return the stream; None if it was closed."""
        return None if stream_id is None else self._streams.get(stream_id)

    def add(self, stream: StreamState) -> None:
        """Add an open stream."""
        self._streams[stream.stream_id] = stream
        stream.delivery.streams.append(stream)

    def remove(self, stream: StreamState) -> None:
        """Remove a closed stream."""
        stream.closed = True
        del self._streams[stream.stream_id]
        stream.delivery.streams.remove(stream)

    def expect_next(self, event: NextOrderKnown) -> None:
        """Note the order that a stream's consumer will read next; nothing if the stream
        was closed.
        """
        stream = self.find(event.stream_id)
        if stream is not None:
            stream.next_order = event.order

    def waiting_tasks(self) -> list[SlabTask]:
        """Return the tasks without a slab, in the order of need, and number them in this order."""
        ranked = [
            (depth, task.number, task)
            for stream in self._streams.values()
            for depth, task in enumerate(stream.tasks, stream.tasks_before)
            if task.phase is SlabPhase.WAITING
        ]
        ranked.sort(key=lambda rank: (rank[0], not rank[2].is_awaited, rank[1]))
        for depth, number, task in ranked:
            task.rank = depth, number
        return [task for _, _, task in ranked]

    def of_dataset(self, dataset: DatasetBlocks) -> list[StreamState]:
        """Return the streams that read this dataset."""
        return [s for s in self._streams.values() if dataset in s.datasets]

    def of_group(self, group: Group) -> list[StreamState]:
        """Return the streams that share slabs in this group."""
        return [s for s in self._streams.values() if s.delivery.group is group]

    def crops(self, dataset: DatasetBlocks) -> bool:
        """Whether a stream crops images of this dataset."""
        return any(stream.walk.crops for stream in self.of_dataset(dataset))

    @property
    def is_awaited(self) -> bool:
        """Whether a trainer has asked for a slab that is not ready."""
        return any(stream.requests for stream in self._streams.values())

    def to_read_now(self, lacking: Sequence[SlabTask]) -> Sequence[SlabTask]:
        """Select the ranked tasks whose blocks may be read. Until a trainer has got a slab, only
        the first awaited task counts: the others would share bandwidth and processors with it.
        """
        streams = self._streams.values()
        if not self.is_awaited or any(stream.delivery.has_lent for stream in streams):
            return lacking
        first = [task for task in lacking if not task.rank[0]]
        is_gathered = any(stream.tasks and _is_gathered(stream.tasks[0]) for stream in streams)
        return first if first or is_gathered else lacking


def _is_gathered(task: SlabTask) -> bool:
    """Whether the task's slab is being gathered, which takes only a moment: no image is rendered
    and no function called.
    """
    walk = task.stream.walk
    return task.phase is SlabPhase.ASSEMBLING and walk.render is None and walk.collate is None


# -- shared ------------------------------------------------------------------------------------
#
# Slabs that several consumers need: assembled once, and copied into the slot of each.
#
#     absent ──a consumer assembles it──> MAKING ──> KEPT ──evicted──> absent
#                                            └─ failed, or larger than expected: absent
#
# Streams of one group share slabs. Their slabs are equal, since a group has one spec (with seed and
# transforms), one dp_rank and one dp_size. A kept slab is in the block arena, which trainers do not
# map, so a trainer's writes change only its own copy.
#
# Invariants:
# 1. A slab is never made twice at the same time. Other consumers of the slab wait only for the
#    worker that makes it, never for a trainer: a trainer that lags or stops delays no other
#    trainer.
# 2. Kept slabs take at most half of the block arena; slabs that no known consumer still needs take
#    at most a sixteenth. All kept slabs take only memory that no block needs (blocks.py, 3).
# 3. The memory of a slab is not reused while a worker writes or reads it.
# 4. Slabs that no known consumer still needs are evicted first, oldest first; then the slabs that
#    are needed last. A new slab is not kept if all others are needed sooner.
# 5. A slab is kept if its group was declared (more consumers may come), or if a known consumer
#    still needs it.

_ARENA_PARTS = 2
# Slabs without a known consumer get less: memory that is reused often stays warm in the cache.
_UNWANTED_PARTS = 16

_Need = tuple[bool, int]


class _Behind(Struct, frozen=True):
    """The steps that a stream still needs: from the first position for which it has no slab.
    `goes_on`: the stream that will follow it is not open yet.
    """

    epoch: int
    position: int
    cursor: int
    first: int
    span: int
    stride: int
    sample_count: int
    goes_on: bool
    gaps: Gaps = NO_GAPS

    @classmethod
    def of(cls, stream: StreamState, *, goes_on: bool) -> Self:
        walk, at = stream.walk, stream.walk.stream
        first, span = at.first_step * walk.global_batch, at.step_stride * walk.global_batch
        return cls(
            at.epoch, stream.wanted_position, at.cursor, first, span, at.step_stride,
            walk.order.sample_count, goes_on, walk.gaps,
        )  # fmt: skip

    def comes_to(self, epoch: int, position: int, stride: int) -> bool:
        """Whether the stream's consumer will need these steps."""
        is_now = self.epoch == epoch
        is_behind = self.position <= position if is_now else self.epoch < epoch and self.goes_on
        away = self.gaps.live(position) - self.gaps.live(self.cursor) if is_now else position
        return is_behind and stride == self.stride and (away - self.first) % self.span == 0


class SharedSlabs:
    """The shared slabs of all groups. `streams` are all open streams of this node."""

    def __init__(self, allocator: Allocator, streams: StreamTable, time: Moment) -> None:
        self._allocator, self.streams, self._time = allocator, streams, time
        self._slabs: dict[tuple[Group, SlabKey], SharedSlab] = {}
        self._bytes = 0
        self._count = 0

    # -- who wants what --------------------------------------------------------------------------

    @property
    def kept_bytes(self) -> int:
        """The memory of the slabs that are kept."""
        return self._bytes

    def find(self, task: SlabTask) -> SharedSlab | None:
        """Return the shared slab that this task can copy, or wait for."""
        group = task.stream.delivery.group
        if group is None or task.oversize or not self._slabs:
            return None
        return self._slabs.get((group, _key(task)))

    def readings(self, dataset: DatasetBlocks) -> list[WalkPosition]:
        """Return the readers of this dataset, with order and position: one for all streams of a
        holder with one order, and one for each order that streams are expected to read next. If
        several streams are one reader, the one that is first in the order counts.
        """
        readers: dict[tuple[int, int], WalkPosition] = {}
        following: dict[int, WalkPosition] = {}
        for stream in self.streams.of_dataset(dataset):
            walk, first_block = stream.walk, stream.datasets.number(dataset, 0)
            start, reader = self._start(stream), stream.reader
            if reader not in readers or start < readers[reader].position:
                readers[reader] = WalkPosition(reader, walk.order, start, first_block)
            order = stream.next_order
            if order is not None:
                left = self._left(stream)
                known = following.get(id(order))
                if known is None or known.position < -left:
                    name = -1, id(order)
                    following[id(order)] = WalkPosition(name, order, -left, first_block, False)
        return [*readers.values(), *following.values()]

    def away(self, task: SlabTask) -> int:
        """Return how many positions the reader of the task's stream is before the task."""
        return max(task.plan.first_position - self._start(task.stream), 0)

    def _start(self, stream: StreamState) -> int:
        """Return where the reader of a stream is. As long as its consumer reads another stream
        first, what is left of that stream is subtracted.
        """
        before = stream.after if stream.is_ahead else None
        return self.position(stream) - (0 if before is None else self._left(before))

    def _left(self, stream: StreamState) -> int:
        """Return how many positions of its epoch a stream has not reached."""
        return max(stream.walk.order.sample_count - self.position(stream), 0)

    def position(self, stream: StreamState) -> int:
        """Return the first position for which the stream needs blocks, as far as it is planned."""
        if stream.delivery.group is None:
            return stream.position
        for task in stream.tasks:
            if self.find(task) is None:
                return task.plan.first_position
        return stream.planned_to

    def _behind(self, group: Group) -> list[_Behind]:
        mine = self.streams.of_group(group)
        followed = {id(stream.after) for stream in mine}
        return [_Behind.of(stream, goes_on=id(stream) not in followed) for stream in mine]

    def _is_wanted(self, slab: SharedSlab) -> bool:
        return _distance(slab, self._behind(slab.group)) is not None

    # -- making ----------------------------------------------------------------------------------

    def wanted(self, task: SlabTask, slab_bytes: int) -> SharedSlab | None:
        """Note that a slab is about to be assembled. Return a record with the bytes that its kept
        copy needs; None if no copy is kept.
        """
        group = task.delivery.group
        if group is None or task.oversize:
            return None
        self._count += 1
        expected = task.stream.walk.sizes.batch_bytes * len(task.plan.batches)
        if expected and not group.is_whole:
            slab_bytes = min(slab_bytes, expected)
        slab = SharedSlab(group, _key(task), self._count, Region(0, slab_bytes))
        group.made_count += 1
        return slab if group.is_declared or self._is_wanted(slab) else None

    def begin(self, slab: SharedSlab, region: Region) -> None:
        """Reserve this room for the slab; it counts as kept once it is made."""
        slab.region = region
        self._bytes += region.length
        self._slabs[slab.group, slab.key] = slab

    def begin_copy(self, slab: SharedSlab) -> None:
        """Note that a worker is about to copy from the slab."""
        slab.readers += 1
        slab.group.copied_count += 1

    def ended(
        self, slab: SharedSlab, result: tasks.ResultBody, *, is_kept: bool
    ) -> tasks.ResultBody:
        """Handle the answer of the worker that made or copied the slab. Return the result for the
        task: after a copy, that of the kept slab.
        """
        if slab.made is None:
            self._made(slab, result, is_kept=is_kept)
            return result
        self._copied(slab)
        return slab.made if isinstance(result, tasks.Done) else result

    def _made(self, slab: SharedSlab, result: tasks.ResultBody, *, is_kept: bool) -> None:
        if isinstance(result, tasks.Assembled) and is_kept:
            slab.made, slab.made_at = replace(result, disk=0), self._time.now
        used = 0 if slab.made is None else slab.made.bytes_used
        if not used or used > slab.region.length or slab.group.is_closed:
            slab.group.is_whole |= used > slab.region.length
            self.evict(slab)
            return
        self._bytes -= slab.region.length
        self._allocator.shrink(slab.region.offset, used)
        slab.region = Region(slab.region.offset, used)
        self._bytes += slab.region.length

    def _copied(self, slab: SharedSlab) -> None:
        # Keep the slab even if nobody needs it now: a copy that was not requested yet may lose its
        # slot, and is then made again.
        slab.readers -= 1
        if not slab.readers and slab.group.is_closed:
            self.evict(slab)

    # -- memory ----------------------------------------------------------------------------------

    def spare(self) -> list[SharedSlab]:
        """Return the slabs that may be evicted, least needed first."""
        return [slab for _, slab in self._ranked()]

    def _ranked(self, before: SharedSlab | None = None) -> list[tuple[_Need, SharedSlab]]:
        """Return the slabs that may be evicted; if `before` is given, only slabs needed less than
        it.
        """
        behind = {group: self._behind(group) for group in {group for group, _ in self._slabs}}
        idle = [slab for slab in self._slabs.values() if slab.made is not None and not slab.readers]
        ranked = [(_need(slab, behind[slab.group]), slab) for slab in idle]
        if before is not None:
            mine = _need(before, self._behind(before.group))
            ranked = [(need, slab) for need, slab in ranked if need < mine]
        return sorted(ranked, key=lambda each: each[0])

    def evict(self, slab: SharedSlab) -> None:
        """Free the memory of a slab; a consumer that needs the slab has it made again."""
        del self._slabs[slab.group, slab.key]
        self._bytes -= slab.region.length
        self._allocator.free(slab.region.offset)

    def close(self, group: Group) -> None:
        """Drop the slabs of a group that has no members left."""
        group.is_closed = True
        for slab in self.spare():
            if slab.group is group:
                self.evict(slab)

    def make_way(self, slab: SharedSlab) -> list[SharedSlab] | None:
        """Evict slabs that are needed less than this one until the limits allow it. Return the
        slabs that may still be evicted to get its room, least needed first; None if the limits do
        not allow it anyway.
        """
        ranked, length = self._ranked(slab), slab.region.length
        unwanted = sum(other.region.length for (is_wanted, _), other in ranked if not is_wanted)
        arena = self._allocator.size_bytes
        for place, ((is_wanted, _), other) in enumerate(ranked):
            is_beyond = not is_wanted and unwanted > arena // _UNWANTED_PARTS
            if not is_beyond and self._bytes + length <= arena // _ARENA_PARTS:
                return [other for _, other in ranked[place:]]
            self.evict(other)
            unwanted -= other.region.length
        return [] if self._bytes + length <= arena // _ARENA_PARTS else None


def _key(task: SlabTask) -> SlabKey:
    """Return everything that determines the bytes of a slab, besides its group."""
    walk = task.stream.walk
    at = walk.stream
    begin, count = walk.position_of(task.plan), len(task.plan.batches)
    return at.epoch, begin, at.step_stride, count, at.mix, at.gone


def _need(slab: SharedSlab, behind: Sequence[_Behind]) -> _Need:
    """Return a sort key with which the least needed slab comes first."""
    away = _distance(slab, behind)
    return (False, slab.number) if away is None else (True, -away)


def _distance(slab: SharedSlab, behind: Sequence[_Behind]) -> int | None:
    """Return the distance in positions to the nearest consumer that still needs the slab;
    None if there is no such consumer.
    """
    epoch, position, stride, *_ = slab.key
    found = [
        (epoch - one.epoch) * one.sample_count + position - one.position
        for one in behind
        if one.comes_to(epoch, position, stride)
    ]
    return min(found, default=None)
