"""Find the causes of a trainer's waits, and the stage that limits a run, from the stage times that
each slab carries.

The stages of a slab follow one another until it is handed over. If a trainer waited for the slab,
it waited during the last of these stages: the wait is attributed to stages from the last one back.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from operator import add
from typing import Any

from msgspec import Struct

from dataplane.rpc.messages import JobOpened, Slab, StageTimes

# -- waits -------------------------------------------------------------------------------------
#
# Divide the wait for a slab by stage.

Waits = tuple[int, int, int, int, int, int]
"""(fetch, decode, room, queue, assemble, other), in microseconds."""


def stages_waited_for(waited: int, times: StageTimes) -> Waits:
    """Return (fetch, decode, room, queue, assemble, other): the wait for this slab, divided by
    stage. If the slab was ready before it was requested, the whole wait counts as other.
    """
    stages = (times.assemble, times.queue, times.room, times.decode, times.fetch)
    ready = min(waited, times.ready)
    left, parts = waited - ready, []
    for stage in stages:
        parts.append(min(left, stage))
        left -= parts[-1]
    assemble, queue, room, decode, fetch = parts
    return fetch, decode, room, queue, assemble, ready + left


# -- first batch -------------------------------------------------------------------------------
#
# Divide the time until a loader's first batch by stage.
#
# The client measures how long the node took to answer and to open the job. The node reports how
# much of that time it spent on the dataset's index and on planning. The other stages come from the
# stage times of the first slab. Later slabs are not measured here.

_US_A_S = 1e6


class FirstBatch(Struct, frozen=True):
    """The duration of each stage of the first batch, in seconds; all 0.0 until it has arrived.

    `node_s` ends when the node has answered, which an embedded node does once it has started.
    `index_s` is for listing and indexing shards, or reading a saved index. `plan_s` is for columns,
    the place in the job, and memory. `connect_s` is everything else until the job was open. The
    rest is the wait for the first slab, as in Statistics: `fetch_s`, `decode_s`, `room_s`,
    `queue_s`, `assemble_s`, and `hand_over_s`, which includes planning its rows and messages.
    `queue_s` is the wait for a worker, including the start of its process, and messages that it
    must receive before the slab.
    """

    node_s: float = 0.0
    connect_s: float = 0.0
    index_s: float = 0.0
    plan_s: float = 0.0
    fetch_s: float = 0.0
    decode_s: float = 0.0
    room_s: float = 0.0
    queue_s: float = 0.0
    assemble_s: float = 0.0
    hand_over_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The time from the first use of the loader to its first batch."""
        return sum(self.stages().values())

    def stages(self) -> dict[str, float]:
        """Return seconds by stage, in order: "node", "connect", …"""
        return {
            "node": self.node_s,
            "connect": self.connect_s,
            "index": self.index_s,
            "plan": self.plan_s,
            "fetch": self.fetch_s,
            "decode": self.decode_s,
            "room": self.room_s,
            "queue": self.queue_s,
            "assemble": self.assemble_s,
            "hand_over": self.hand_over_s,
        }


NOT_YET = FirstBatch()


class Opening(Struct, frozen=True):
    """How long it took to open a job, in seconds; `done_at` is in time.monotonic()."""

    node_s: float
    open_s: float
    done_at: float
    index_s: float
    plan_s: float

    @classmethod
    def of(cls, began: float, reached: float, done: float, job: JobOpened) -> Opening:
        """Make an Opening from three times in time.monotonic()."""
        return cls(reached - began, done - reached, done, job.index_s, job.plan_s)

    def first_batch(self, requested: float, arrived: float, times: StageTimes) -> FirstBatch:
        """Return the stages of the first slab, from the times at which it was requested and
        arrived, in time.monotonic(). If that request opened the job, the wait for the slab began
        only when the job was open.
        """
        waited_s = max(arrived - max(requested, self.done_at), 0.0)
        parts = stages_waited_for(round(waited_s * _US_A_S), times)
        fetch, decode, room, queue, assemble, other = (part / _US_A_S for part in parts)
        connect_s = max(self.open_s - self.index_s - self.plan_s, 0.0)
        return FirstBatch(
            self.node_s, connect_s, self.index_s, self.plan_s,
            fetch, decode, room, queue, assemble, other,
        )  # fmt: skip


class Statistics(Struct, frozen=True):
    """The work of a loader so far, for the slabs that its trainer has finished. Times are in
    seconds.

    The time of the trainer's loop is the sum of `waited_s`, spent in the loader, and `consumed_s`,
    spent between two slabs in the trainer's own work. `waited_s` is the sum of waits for blocks to
    be read from storage (`fetch_wait_s`), for blocks to be decoded (`decode_wait_s`), for a free
    slot in the delivery memory (`room_wait_s`), for a free worker (`queue_wait_s`), for batches to
    be assembled with their images (`assemble_wait_s`), and for everything else: planning, messages,
    opening (`other_wait_s`).

    `reading_s` is the time with at least one read from storage in flight. `worker_count` workers
    spent `decoding_s` and `assembling_s` on blocks and batches of this job, including `disk_wait_s`
    waiting for local files. Of the `read_bytes`, `disk_bytes` came from the node's own disk,
    `neighbour_bytes` from other nodes, and `origin_bytes` from the store. Another `memory_bytes`
    were needed but not read, since another rank or epoch had left them in memory. `copied_slabs`
    counts slabs that were copied out of the delivery memory, since the trainer held too much of it.
    Of the `batches`, `replayed_batches` were handed out before (`replay_first_slab=`): with any,
    this was no real epoch. `first_batch` is not a sum: it belongs to the whole run.
    """

    slabs: int = 0
    batches: int = 0
    samples: int = 0
    read_bytes: int = 0
    copied_slabs: int = 0
    worker_count: int = 0
    consumed_s: float = 0.0
    waited_s: float = 0.0
    fetch_wait_s: float = 0.0
    decode_wait_s: float = 0.0
    room_wait_s: float = 0.0
    queue_wait_s: float = 0.0
    assemble_wait_s: float = 0.0
    other_wait_s: float = 0.0
    reading_s: float = 0.0
    decoding_s: float = 0.0
    assembling_s: float = 0.0
    disk_wait_s: float = 0.0
    disk_bytes: int = 0
    neighbour_bytes: int = 0
    memory_bytes: int = 0
    replayed_batches: int = 0
    first_batch: FirstBatch = NOT_YET

    @property
    def origin_bytes(self) -> int:
        """The bytes that were read from the store itself."""
        return self.read_bytes - self.disk_bytes - self.neighbour_bytes

    @property
    def elapsed_s(self) -> float:
        """The time of the trainer's loop; for several loops, their sum."""
        return self.consumed_s + self.waited_s

    @property
    def samples_per_s(self) -> float:
        """The rate of the loop; 0.0 before the first slab was consumed."""
        return self.samples / self.elapsed_s if self.elapsed_s else 0.0

    def scalars(self) -> dict[str, float]:
        """Return flat numbers, with names for TensorBoard or W&B: "dataplane/waited_s", …"""
        names = (*_SUMMED, "worker_count", "origin_bytes", "elapsed_s", "samples_per_s")
        sums = {f"dataplane/{name}": float(getattr(self, name)) for name in names}
        first = self.first_batch.stages()
        return sums | {f"dataplane/first_batch/{stage}_s": took for stage, took in first.items()}

    def since(self, before: Statistics) -> Statistics:
        """Return the difference to an earlier value of the same loader."""
        return self._with(before, -1)

    def plus(self, other: Statistics) -> Statistics:
        """Add other statistics."""
        return self._with(other, 1)

    def _with(self, other: Statistics, sign: int) -> Statistics:
        sums = {name: getattr(self, name) + sign * getattr(other, name) for name in _SUMMED}
        count = self.worker_count if sign < 0 else max(self.worker_count, other.worker_count)
        first = self.first_batch if self.first_batch != NOT_YET else other.first_batch
        return Statistics(worker_count=count, first_batch=first, **sums)


_SUMMED = tuple(
    name for name in Statistics.__struct_fields__ if name not in ("worker_count", "first_batch")
)


def sum_of(parts: Iterable[Statistics]) -> Statistics:
    """Add up statistics."""
    total = Statistics()
    for part in parts:
        total = total.plus(part)
    return total


_COUNTS = (
    "slabs", "batches", "samples", "read_bytes", "copied_slabs",
    "disk_bytes", "neighbour_bytes", "memory_bytes",
)  # fmt: skip
_WAITS = 6
_TIMES = (
    "fetch_wait_s", "decode_wait_s", "room_wait_s", "queue_wait_s", "assemble_wait_s",
    "other_wait_s", "reading_s", "decoding_s", "assembling_s", "disk_wait_s",
)  # fmt: skip


class Tally:
    """Statistics of one stream; used by one thread at a time."""

    def __init__(self) -> None:
        self.is_closed = False
        self.replayed = 0
        self._consumed_s = 0.0
        self._counts = (0,) * len(_COUNTS)
        self._times = (0,) * len(_TIMES)
        """In microseconds."""
        self._workers = 0
        self._in_hand: tuple[Slab, Waits, bool] | None = None

    def handed_over(self, slab: Slab, waited_s: float, *, was_copied: bool) -> Waits:
        """Note that a slab arrived after this wait; return the wait by stage."""
        waits = stages_waited_for(round(waited_s * _US_A_S), slab.times)
        self._in_hand = (slab, waits, was_copied)
        return waits

    def consumed(self, seconds: float) -> None:
        """Note that the trainer requested the next slab this long after it got the previous one,
        which now counts as consumed.
        """
        if self._in_hand is None:
            return
        (slab, waits, was_copied), self._in_hand = self._in_hand, None
        self._consumed_s += seconds
        times, samples = slab.times, sum([batch.valid for batch in slab.batches])
        counts = (
            1, len(slab.batches), samples, times.read_bytes, was_copied,
            times.disk_bytes, times.neighbour_bytes, times.memory_bytes,
        )  # fmt: skip
        spent = (*waits, times.reading, times.decoding, times.assemble, times.disk)
        self._counts = tuple(map(add, self._counts, counts))
        self._times = tuple(map(add, self._times, spent))
        self._workers = times.workers

    def statistics(self) -> Statistics:
        """Return the statistics up to now."""
        sums: dict[str, Any] = dict(zip(_COUNTS, self._counts, strict=True))
        sums |= {name: us / _US_A_S for name, us in zip(_TIMES, self._times, strict=True)}
        return Statistics(
            worker_count=self._workers, consumed_s=self._consumed_s,
            waited_s=sum(self._times[:_WAITS]) / _US_A_S, replayed_batches=self.replayed, **sums,
        )  # fmt: skip


# -- bound -------------------------------------------------------------------------------------
#
# Find the stage that limits a run, and the rate without that limit. Pure.
#
# If the trainer hardly waits, the bound is the trainer itself. If the workers or storage are busy
# most of the time, they are the bound. Otherwise the bound is the stage that the trainer waited for
# longest.

WAITED_SHARE_MIN = 0.1
"""A trainer that waits for less than this share of its time is the bound itself: without waits, it
would save at most this share.
"""
_BUSY_SHARE = 0.85
_RECENT_S = 2.0


class Stage(enum.Enum):
    """The stages that may limit a run."""

    STORAGE = "storage"
    DECODE = "decode"
    ASSEMBLE = "assemble"
    WORKERS = "workers"
    """Workers are busy with other jobs, or this node has none and no other node makes slabs."""
    ROOM = "delivery memory"
    NODE = "node"
    CONSUMER = "consumer"


class Bound(Struct, frozen=True):
    """The bound of a run. Shares are shares of the loop's time, 0 to 1; `busy` is the share of time
    that each stage was busy, averaged over all workers.

    `samples_per_s_without` is the approximate rate if this stage took no time: the rate of the
    slowest other stage, or None if no other stage was measured.
    """

    stage: Stage
    samples_per_s: float
    samples_per_s_without: float | None
    waited_share: float
    busy: tuple[tuple[Stage, float], ...]


class Recent:
    """The bound of a loader over the last seconds. `statistics` returns the statistics of the whole
    run.
    """

    def __init__(self, statistics: Callable[[], Statistics]) -> None:
        self._statistics = statistics
        self._before = Statistics()
        self._told_at = -math.inf
        self._stage = ""

    def stage(self, now: float) -> str:
        """Return the name of the bound; "" if it is not known yet."""
        if now - self._told_at >= _RECENT_S:
            self._told_at = now
            current = self._statistics()
            bound = bound_of(current.since(self._before))
            self._before = current
            self._stage = self._stage if bound is None else bound.stage.value
        return self._stage


def bound_of(statistics: Statistics) -> Bound | None:
    """Return the bound of a run; None before its first slab is consumed."""
    elapsed_s = statistics.elapsed_s
    if not statistics.samples or elapsed_s <= 0:
        return None
    disk = _disk_part(statistics)
    workers = max(statistics.worker_count, 1)
    seconds = {
        # Divide by the number of workers, which read local files in parallel: all of them may wait
        # for a disk at the same time.
        Stage.STORAGE: statistics.reading_s + statistics.disk_wait_s / workers,
        Stage.DECODE: statistics.decoding_s * (1 - disk) / workers,
        Stage.ASSEMBLE: statistics.assembling_s * (1 - disk) / workers,
        Stage.CONSUMER: statistics.consumed_s,
    }
    busy = {stage: min(spent / elapsed_s, 1.0) for stage, spent in seconds.items()}
    stage = _stage(statistics, seconds, disk)
    return Bound(
        stage,
        statistics.samples_per_s,
        _without(statistics, stage, seconds),
        statistics.waited_s / elapsed_s,
        tuple(busy.items()),
    )


def _disk_part(statistics: Statistics) -> float:
    worked_s = statistics.decoding_s + statistics.assembling_s
    return min(statistics.disk_wait_s / worked_s, 1.0) if worked_s else 0.0


def _stage(statistics: Statistics, seconds: dict[Stage, float], disk: float) -> Stage:
    elapsed_s = statistics.elapsed_s
    if statistics.waited_s < WAITED_SHARE_MIN * elapsed_s:
        return Stage.CONSUMER
    worked_s = (statistics.decoding_s + statistics.assembling_s) / max(statistics.worker_count, 1)
    if worked_s >= _BUSY_SHARE * elapsed_s:
        return _of_workers(seconds, disk)
    if statistics.reading_s >= _BUSY_SHARE * elapsed_s and statistics.fetch_wait_s:
        return Stage.STORAGE
    waits = {
        Stage.STORAGE: statistics.fetch_wait_s,
        Stage.DECODE: statistics.decode_wait_s,
        Stage.ROOM: statistics.room_wait_s,
        Stage.WORKERS: statistics.queue_wait_s,
        Stage.ASSEMBLE: statistics.assemble_wait_s,
        Stage.NODE: statistics.other_wait_s,
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


def _without(statistics: Statistics, stage: Stage, seconds: dict[Stage, float]) -> float | None:
    """Return the rate of the slowest other stage. Decoding and assembly share the workers."""
    left = {other: spent for other, spent in seconds.items() if other is not stage}
    workers_s = left.pop(Stage.DECODE, 0.0) + left.pop(Stage.ASSEMBLE, 0.0)
    # The rate stays limited by messages and planning, which `other_wait_s` includes.
    slowest_s = max(workers_s, statistics.other_wait_s, *left.values())
    return statistics.samples / slowest_s if slowest_s > 0 else None
