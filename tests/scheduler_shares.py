"""The shares of a scheduler's streams: plans ahead, slots, and memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from msgspec.structs import replace

from dataplane.scheduler import events
from dataplane.scheduler.records import SlabPhase, SlabTask, StreamState
from dataplane.scheduler.scheduler import Scheduler

PLANNED_AHEAD = 16
"""Slabs planned for each stream in addition to those that may have slots."""
_MEMORY_SHARE = 0.9
_EXCERPTS_SHARE = 0.25


def is_ahead(stream: StreamState) -> bool:
    """Whether the stream that its consumer reads before it is still open."""
    return stream.after is not None and stream.after in stream.after.delivery.streams


def planned_together(task_count: int) -> int:
    """How many plans a stream with this many tasks requests at once."""
    return min(max(task_count, 1), 8)


def count_of_slots(stream: StreamState) -> int:
    """Slots of slabs that the consumer of a stream has not received yet."""
    count = sum(task.slot is not None for task in stream.tasks)
    if stream.after is not None and is_ahead(stream):
        count += sum(task.slot is not None for task in stream.after.tasks)
    return count


def share_of_slots(stream: StreamState) -> int:
    """How many of them a stream may have, if its first slab is among them."""
    sharing = [each for each in stream.delivery.streams if not is_ahead(each)]
    return max(1, stream.delivery.ahead // max(len(sharing), 1))


def memory_needed(task: SlabTask) -> int:
    """Bytes that the blocks of a task take while the last of them is decoded."""
    blocks = [task.datasets.find(number) for number in task.plan.blocks.tolist()]
    raw = [int(dataset.marks.raw[block]) for dataset, block in blocks]
    decoded = [dataset.decoded_bytes(block) for dataset, block in blocks]
    on_the_way = [a for a, b in zip(raw, decoded, strict=True) if b]
    return sum(b or a for a, b in zip(raw, decoded, strict=True)) + max(on_the_way, default=0)


def depth_of(task: SlabTask) -> tuple[int, int]:
    """How many slabs its consumer reads before it; of equals, the older comes first."""
    stream = task.stream
    before = len(stream.after.tasks) if stream.after is not None else 0
    return before + stream.tasks.index(task), task.number


def _depth_before(task: SlabTask, now: float) -> tuple[int, bool, int]:
    """The same without those of its stream that were cut off others at this moment; of equal ones,
    those that are requested come first.
    """
    depth, number = depth_of(task)
    earlier = itertools.takewhile(lambda each: each is not task, task.stream.tasks)
    return depth - sum(each.stamps.planned == now for each in earlier), not task.is_awaited, number


def check_fits(scheduler: Scheduler, event: events.Planned, now: float) -> None:
    """Plans are split only if the arena could not hold their blocks, or excerpts if those are made.

    Raises:  AssertionError: one was not split, or was.
    """
    stream = scheduler._streams.find(event.stream_id)
    if stream is None:
        return
    arena_bytes = scheduler._blocks.arena_bytes
    new = [each for each in stream.tasks if each.stamps.planned == now]
    for task in new:
        need, is_one = memory_needed(task), len(task.plan.batches) == 1
        rows_need = scheduler._excerpts.need_of(task)
        is_too_much = need > arena_bytes and rows_need + task.largest_cost > arena_bytes
        assert (task.phase is SlabPhase.FAILED) == (is_one and is_too_much)
        fits = need <= _MEMORY_SHARE * arena_bytes
        fits |= (
            scheduler._blocks.holdings.needs_excerpts and rows_need <= _EXCERPTS_SHARE * arena_bytes
        )
        assert is_one or fits, "a plan that the arena cannot hold"
    whole = {each.batches for each in event.plans}
    split = [each for each in new if each.plan.batches not in whole]
    needs = [memory_needed(replace(each, plan=plan)) for each in split[:1] for plan in event.plans]
    assert not split or max(needs) > _MEMORY_SHARE * arena_bytes, "a plan was split for nothing"


def check_makes(scheduler: Scheduler, effects: Sequence[events.Effect]) -> None:
    """Slabs that are needed first are made first, and no stream exceeds its share of slots.

    Raises:  AssertionError: one does.
    """
    making = scheduler._tasks._assembling
    kinds = (events.AssembleSlab, events.CopyKept, events.MakeElsewhere)
    makes = [e for e in effects if isinstance(e, kinds)]
    tasks = [making[each.number] for each in makes]
    depths = [_depth_before(task, scheduler._time.now) for task in tasks]
    assert depths == sorted(depths), "what is needed later is made first"
    for task in tasks:
        stream = task.stream
        is_first = task is stream.tasks[0] and not is_ahead(stream)
        if stream.after is None or not is_ahead(stream.after):
            assert is_first or count_of_slots(stream) <= share_of_slots(stream)
