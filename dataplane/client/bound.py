"""Which stage bounds a run, and how fast it could be without it. Pure.

A stage that works all the time while the trainer waits is the bound: workers, or storage. Where
none does, it is the one that the trainer waited for longest. A trainer that hardly waits is the
bound itself.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

from dataplane.client.statistics import Statistics

WAITED_SHARE_MIN = 0.1
"""A trainer that waits for a smaller part of its time would gain no more than that."""
_BUSY_SHARE = 0.85
_RECENT_S = 2.0


class Stage(enum.Enum):
    """What a run may be bound by."""

    STORAGE = "storage"
    DECODE = "decode"
    ASSEMBLE = "assemble"
    WORKERS = "workers"
    """They are busy with other jobs."""
    ROOM = "delivery memory"
    NODE = "node"
    CONSUMER = "consumer"


@dataclass(frozen=True, slots=True)
class Bound:
    """What bounds a run. Shares are of the loop's time, 0 to 1; `busy` says for how much of it each
    stage was at work: of workers, all of them together.

    `samples_per_s_without` is about what would be reached if this stage took no time at all: what
    the slowest of the others can do. None: no other stage did anything to measure.
    """

    stage: Stage
    samples_per_s: float
    samples_per_s_without: float | None
    waited_share: float
    busy: tuple[tuple[Stage, float], ...]


class Recent:
    """What bounds a loader, by its last seconds. `statistics` are all of it so far."""

    def __init__(self, statistics: Callable[[], Statistics]) -> None:
        self._statistics = statistics
        self._before = Statistics()
        self._told_at = -math.inf
        self._stage = ""

    def stage(self, now: float) -> str:
        """The name of a stage; "" before there is one."""
        if now - self._told_at >= _RECENT_S:
            self._told_at = now
            found = self._statistics()
            bound = bound_of(found.since(self._before))
            self._before = found
            self._stage = self._stage if bound is None else bound.stage.value
        return self._stage


def bound_of(found: Statistics) -> Bound | None:
    """What bounds the run that these statistics are of; None before its first slab is consumed."""
    elapsed_s = found.elapsed_s
    if not found.samples or elapsed_s <= 0:
        return None
    disk = _disk_part(found)
    workers = max(found.worker_count, 1)
    seconds = {
        # Local files are read by workers, as many at a time as there are.
        Stage.STORAGE: found.reading_s + found.disk_wait_s / workers,
        Stage.DECODE: found.decoding_s * (1 - disk) / workers,
        Stage.ASSEMBLE: found.assembling_s * (1 - disk) / workers,
        Stage.CONSUMER: found.consumed_s,
    }
    busy = {stage: min(spent / elapsed_s, 1.0) for stage, spent in seconds.items()}
    stage = _stage(found, seconds, disk)
    return Bound(
        stage,
        found.samples_per_s,
        _without(found, stage, seconds),
        found.waited_s / elapsed_s,
        tuple(busy.items()),
    )


def _disk_part(found: Statistics) -> float:
    worked_s = found.decoding_s + found.assembling_s
    return min(found.disk_wait_s / worked_s, 1.0) if worked_s else 0.0


def _stage(found: Statistics, seconds: dict[Stage, float], disk: float) -> Stage:
    elapsed_s = found.elapsed_s
    if found.waited_s < WAITED_SHARE_MIN * elapsed_s:
        return Stage.CONSUMER
    worked_s = (found.decoding_s + found.assembling_s) / max(found.worker_count, 1)
    if worked_s >= _BUSY_SHARE * elapsed_s:
        return _of_workers(seconds, disk)
    if found.reading_s >= _BUSY_SHARE * elapsed_s and found.fetch_wait_s:
        return Stage.STORAGE
    waits = {
        Stage.STORAGE: found.fetch_wait_s,
        Stage.DECODE: found.decode_wait_s,
        Stage.ROOM: found.room_wait_s,
        Stage.WORKERS: found.queue_wait_s,
        Stage.ASSEMBLE: found.assemble_wait_s,
        Stage.NODE: found.other_wait_s,
    }
    longest = max(waits, key=lambda stage: waits[stage])
    if longest is Stage.WORKERS and worked_s >= elapsed_s / 2:
        return _of_workers(seconds, disk)
    if longest in {Stage.DECODE, Stage.ASSEMBLE} and disk > 1 / 2:
        return Stage.STORAGE
    return longest


def _of_workers(seconds: dict[Stage, float], disk: float) -> Stage:
    if disk > 1 / 2:
        return Stage.STORAGE
    return max((Stage.DECODE, Stage.ASSEMBLE), key=lambda stage: seconds[stage])


def _without(found: Statistics, stage: Stage, seconds: dict[Stage, float]) -> float | None:
    """What the slowest of the other stages could do. Decoding and assembly share the workers."""
    left = {other: spent for other, spent in seconds.items() if other is not stage}
    workers_s = left.pop(Stage.DECODE, 0.0) + left.pop(Stage.ASSEMBLE, 0.0)
    # What is waited for in vain, in messages and planning, remains.
    slowest_s = max(workers_s, found.other_wait_s, *left.values())
    return found.samples / slowest_s if slowest_s > 0 else None
