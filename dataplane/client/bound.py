"""Finds the stage that limits a run, and the rate without that limit. Pure.

If a stage (workers or storage) is busy all the time while the trainer waits, it is the bound.
Otherwise the bound is the stage that the trainer waited for longest. If the trainer hardly waits,
it is the bound itself.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable

from msgspec import Struct

from dataplane.client.statistics import Statistics

WAITED_SHARE_MIN = 0.1
"""A trainer that waits for less than this share of its time could gain no more than that."""
_BUSY_SHARE = 0.85
_RECENT_S = 2.0


class Stage(enum.Enum):
    """The stages that may limit a run."""

    STORAGE = "storage"
    DECODE = "decode"
    ASSEMBLE = "assemble"
    WORKERS = "workers"
    """The workers are busy with other jobs, or no other node makes slabs for one without any."""
    ROOM = "delivery memory"
    NODE = "node"
    CONSUMER = "consumer"


class Bound(Struct, frozen=True):
    """The bound of a run. Shares are of the loop's time, 0 to 1; `busy` is the share of time that
    each stage was busy, averaged over all workers.

    `samples_per_s_without` is the approximate rate if this stage took no time at all: the rate of
    the slowest other stage. None: there was no other stage to measure.
    """

    stage: Stage
    samples_per_s: float
    samples_per_s_without: float | None
    waited_share: float
    busy: tuple[tuple[Stage, float], ...]


class Recent:
    """The bound of a loader over its last seconds. `statistics` cover its whole run so far."""

    def __init__(self, statistics: Callable[[], Statistics]) -> None:
        self._statistics = statistics
        self._before = Statistics()
        self._told_at = -math.inf
        self._stage = ""

    def stage(self, now: float) -> str:
        """The name of the stage; "" if none is known yet."""
        if now - self._told_at >= _RECENT_S:
            self._told_at = now
            found = self._statistics()
            bound = bound_of(found.since(self._before))
            self._before = found
            self._stage = self._stage if bound is None else bound.stage.value
        return self._stage


def bound_of(found: Statistics) -> Bound | None:
    """The bound of the run with these statistics; None before its first slab is consumed."""
    elapsed_s = found.elapsed_s
    if not found.samples or elapsed_s <= 0:
        return None
    disk = _disk_part(found)
    workers = max(found.worker_count, 1)
    seconds = {
        # Workers read local files, so all of them may wait for a disk at once.
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
    """Return the rate of the slowest other stage. Decoding and assembly share the workers."""
    left = {other: spent for other, spent in seconds.items() if other is not stage}
    workers_s = left.pop(Stage.DECODE, 0.0) + left.pop(Stage.ASSEMBLE, 0.0)
    # The time for messages and planning remains.
    slowest_s = max(workers_s, found.other_wait_s, *left.values())
    return found.samples / slowest_s if slowest_s > 0 else None
