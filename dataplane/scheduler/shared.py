"""Slabs that several consumers want: assembled once, and copied into the slot of each.

    absent ──first who assembles it──> MAKING ──> KEPT ──evicted──> absent
                                          └─ failed, or larger than thought: absent

Streams share if they are of one group, and a group has only what would be equal anyhow: one spec
(seed and transforms are in it), one dp_rank, one dp_size. A kept slab lies in the block arena,
where no trainer sees it: what they write into their own copies stays theirs.

Invariants:
1. A slab is made once at a time. Whoever wants it meanwhile waits for the worker that makes it, and
   for nothing else, least of all for a trainer: one that lags or stops holds up nobody.
2. Kept slabs take half of the block arena at most, those that no consumer is known to be behind of
   a sixteenth, and all of them only what no block needs (blocks.py, 3).
3. The memory of a slab that a worker writes or reads is not given away.
4. What goes first is what no consumer is known to be behind of, oldest first; then what is needed
   last. A slab that is new is not kept where all others are needed sooner.
5. A slab is kept if its group was declared, for others may come, or if somebody is behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from dataplane.arena.allocator import Allocator
from dataplane.model import Region
from dataplane.rpc import tasks
from dataplane.scheduler.dataset import DatasetBlocks
from dataplane.scheduler.next_use import WalkPosition
from dataplane.scheduler.records import Group, Moment, SharedSlab, SlabKey, SlabTask, StreamState
from dataplane.scheduler.streams import StreamTable

_ARENA_PARTS = 2
# Of what nobody is behind of less is kept: memory that is used again and again is warm.
_UNWANTED_PARTS = 16

_Need = tuple[bool, int]


@dataclass(frozen=True, slots=True)
class _Behind:
    """A stream, from the first position on of which it has no slab. `goes_on`: what it will be
    followed by is not open yet.
    """

    epoch: int
    position: int
    cursor: int
    first: int
    span: int
    stride: int
    sample_count: int
    goes_on: bool

    @classmethod
    def of(cls, stream: StreamState, *, goes_on: bool) -> Self:
        walk, at = stream.walk, stream.walk.stream
        first, span = at.first_step * walk.global_batch, at.step_stride * walk.global_batch
        return cls(
            at.epoch, stream.wanted_position, at.cursor, first, span, at.step_stride,
            walk.order.sample_count, goes_on,
        )  # fmt: skip

    def comes_to(self, epoch: int, position: int, stride: int) -> bool:
        """Whether these steps are among those that its consumer will want."""
        is_now = self.epoch == epoch
        is_behind = self.position <= position if is_now else self.epoch < epoch and self.goes_on
        start = self.first + (self.cursor if is_now else 0)
        return is_behind and stride == self.stride and (position - start) % self.span == 0


class SharedSlabs:
    """Those of all groups. `streams` are all that are open on this node."""

    def __init__(self, allocator: Allocator, streams: StreamTable, time: Moment) -> None:
        self._allocator, self.streams, self._time = allocator, streams, time
        self._slabs: dict[tuple[Group, SlabKey], SharedSlab] = {}
        self._bytes = 0
        self._count = 0

    # -- who wants what --------------------------------------------------------------------------

    def find(self, task: SlabTask) -> SharedSlab | None:
        """The slab that this task needs only copy, or wait for."""
        group = task.stream.delivery.group
        if group is None or task.oversize or not self._slabs:
            return None
        return self._slabs.get((group, _key(task)))

    def readings(self, dataset: DatasetBlocks) -> list[WalkPosition]:
        """Who reads this dataset: in which order, and from which position on."""
        found = self.streams.of_dataset(dataset)
        return [
            WalkPosition(
                s.stream_id, s.walk.order, self.position(s), s.delivery.datasets.number(dataset, 0)
            )
            for s in found
        ]

    def position(self, stream: StreamState) -> int:
        """The first position for which the stream needs blocks, as far as it is planned."""
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
        """A slab is about to be assembled: what should be kept of it, if it should, with the length
        of the room that it needs.
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
        """It is kept here as soon as it is made."""
        slab.region = region
        self._bytes += region.length
        self._slabs[slab.group, slab.key] = slab

    def begin_copy(self, slab: SharedSlab) -> None:
        """A worker is about to read it."""
        slab.readers += 1
        slab.group.copied_count += 1

    def ended(
        self, slab: SharedSlab, result: tasks.ResultBody, *, is_kept: bool
    ) -> tasks.ResultBody:
        """The worker that made it, or copied it, has answered: what it is as a slab."""
        if slab.made is None:
            self._made(slab, result, is_kept=is_kept)
            return result
        self._copied(slab)
        return slab.made if isinstance(result, tasks.Done) else result

    def _made(self, slab: SharedSlab, result: tasks.ResultBody, *, is_kept: bool) -> None:
        if isinstance(result, tasks.Assembled) and is_kept:
            slab.made, slab.made_at = dataclasses.replace(result, disk=0), self._time.now
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
        # What nobody wants any more stays as long as there is room: a slab that nobody has asked
        # for yet may lose its slot.
        slab.readers -= 1
        if not slab.readers and slab.group.is_closed:
            self.evict(slab)

    # -- memory ----------------------------------------------------------------------------------

    def spare(self) -> list[SharedSlab]:
        """Which of them may go, the least needed first."""
        return [slab for _, slab in self._ranked()]

    def _ranked(self, before: SharedSlab | None = None) -> list[tuple[_Need, SharedSlab]]:
        """Those that may go; only those that are needed less than `before`, if it is given."""
        behind = {group: self._behind(group) for group in {group for group, _ in self._slabs}}
        idle = [slab for slab in self._slabs.values() if slab.made is not None and not slab.readers]
        ranked = [(_need(slab, behind[slab.group]), slab) for slab in idle]
        if before is not None:
            mine = _need(before, self._behind(before.group))
            ranked = [(need, slab) for need, slab in ranked if need < mine]
        return sorted(ranked, key=lambda each: each[0])

    def evict(self, slab: SharedSlab) -> None:
        """Its memory is free; whoever wants it makes it again."""
        del self._slabs[slab.group, slab.key]
        self._bytes -= slab.region.length
        self._allocator.free(slab.region.offset)

    def close(self, group: Group) -> None:
        """Nobody has it any more: its slabs go."""
        group.is_closed = True
        for slab in self.spare():
            if slab.group is group:
                self.evict(slab)

    def make_way(self, slab: SharedSlab) -> list[SharedSlab] | None:
        """Evict what is needed less than this one and is too much with it: what else may go for
        it, least needed first; None if it would be too much all the same.
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
    """What decides the bytes of a slab beside its group."""
    walk = task.stream.walk
    at = walk.stream
    return at.epoch, walk.position_of(task.plan), at.step_stride, len(task.plan.batches)


def _need(slab: SharedSlab, behind: Sequence[_Behind]) -> _Need:
    """The least comes first."""
    away = _distance(slab, behind)
    return (False, slab.number) if away is None else (True, -away)


def _distance(slab: SharedSlab, behind: Sequence[_Behind]) -> int | None:
    """How many positions away the nearest consumer is that will come to it and has not had it."""
    epoch, position, stride, _ = slab.key
    found = [
        (epoch - one.epoch) * one.sample_count + position - one.position
        for one in behind
        if one.comes_to(epoch, position, stride)
    ]
    return min(found, default=None)
