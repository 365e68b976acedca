"""The pool's record of one worker: its state, the packets to send next, and its current task; and
the queue of tasks, which decides what a worker does next.

Before a task, a worker gets everything that the task needs and the worker does not know yet:
arenas, the dataset, the blocks. A worker gets one packet at a time, and answers each.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from dataplane.base.machine import OwnTime, kill_count_for_memory
from dataplane.rpc import tasks
from dataplane.rpc.tasks import Decode
from dataplane.worker.death import Cause, ProcessEnd, WorkerPlace, end_of
from dataplane.worker.process import WorkerProcess

_SCHEMA_PART_BYTES = 128 * 1024
# The sources of this many blocks fit into a packet: a source has a url and a path, and each of them
# has a few thousand bytes at most.
_BLOCKS_A_PACKET = 20
_UNWANTED_S = 1.0
"""How long a function may continue when nobody waits for its result. The worker is not ended at
once, since a new worker would have to import the function again."""
_KEYS_A_PACKET = 10_000
_NO_ARENA = (1 << 64) - 1

Report = Callable[[tasks.ResultBody], None]

_DOING: dict[type, str] = {
    tasks.Decode: "decoding it",
    tasks.Assemble: "reading its rows",
    tasks.Extract: "copying some of its rows",
    tasks.CopySlab: "copying a slab that starts with its rows",
}


class PoolTask(Struct, eq=False):
    """One task for a worker, and the facts that the worker needs for it.

    `dataset` describes the columns. `arenas` are (arena id, descriptor). `source` returns the
    source of a block that `body` names by key, and `dataset_of` its dataset. `place` names the
    block of the task, or the first of several; `place_of` names a block by key.
    """

    body: tasks.Decode | tasks.Assemble | tasks.Extract | tasks.CopySlab
    dataset: tasks.OpenDataset
    arenas: tuple[tuple[int, int], ...]
    report: Report
    place: Callable[[], WorkerPlace]
    source: Callable[[int], tasks.BlockSource] | None = None
    dataset_of: Callable[[int], tasks.OpenDataset] | None = None
    place_of: Callable[[int], WorkerPlace] | None = None
    ends: list[ProcessEnd] = field(default_factory=list)
    """How workers ended during this task."""
    started: float = 0.0
    """When a worker was chosen for the task."""
    sent: float = 0.0
    """When that worker, started up and prepared, was sent the task itself; 0.0: not yet."""
    queued: float = 0.0
    """When the task began to wait for a worker."""
    worker: int = 0
    """The number of the worker that has the task, had it last, or should get it if idle."""
    unwanted_since: float | None = None
    """Since when nobody has wanted the result; None if somebody wants it."""

    @property
    def began(self) -> float:
        """When its worker began with the task itself. The time before, in which a process starts or
        is prepared for the task, counts as waiting for a worker.
        """
        return self.sent or time.monotonic()

    @property
    def calls_function(self) -> bool:
        """Whether the task may call a function of the user, which may hang."""
        if isinstance(self.body, tasks.Decode):
            return bool(self.dataset.view.map)
        return isinstance(self.body, tasks.Assemble) and self.body.collate is not None

    @property
    def block_keys(self) -> tuple[int, ...]:
        """The blocks that the task gathers from."""
        if isinstance(self.body, tasks.Extract):
            return (self.body.block_key,)
        return self.body.block_keys if isinstance(self.body, tasks.Assemble) else ()

    @property
    def doing(self) -> str:
        """The work of the worker on the block at `place`, in words."""
        if isinstance(self.body, tasks.Assemble) and self.body.render is not None:
            return "decoding its images"
        return _DOING[type(self.body)]

    @property
    def attempt_count(self) -> int:
        """How many workers may get stuck at the task before it fails. Two for Assemble, since only
        the second worker reports the block that it reads.
        """
        return 2 if isinstance(self.body, tasks.Assemble) else 1

    def made_bytes(self, result: tasks.ResultBody) -> int:
        """Return how many bytes of a slab the task has made."""
        if not isinstance(result, tasks.Assembled) or not isinstance(self.body, tasks.Assemble):
            return 0
        rows = sum(batch.rows for batch in self.body.batches) if self.body.row_count else 0
        return result.bytes_used * self.body.row_count // rows if rows else result.bytes_used

    def own_s(self, result: tasks.ResultBody, now: float) -> float:
        """Return how long its worker has had the task, without the waits for a processor."""
        queued = getattr(result, "queued", 0) / 1e6
        return max(now - self.began - queued, 0.0)

    def retried(self) -> None:
        """Prepare the task for the next worker, since its worker has ended: the next one reports
        each block and image before it reads it, in case it ends as well.
        """
        if isinstance(self.body, tasks.Assemble):
            self.body = replace(self.body, say_where=True)


class PoolWorker(Struct, eq=False):
    """A worker process, the facts that it knows, and the packets still to be sent to it."""

    process: WorkerProcess
    limit_bytes: int
    number: int
    """The number of this worker, unique among the workers of its pool."""
    task: PoolTask | None = None
    packets: deque[tuple[tasks.TaskBody, tuple[int, ...]]] = field(default_factory=deque)
    arenas: set[int] = field(default_factory=set)
    datasets: set[int] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)
    forget: list[int] = field(default_factory=list)
    jobs_done: int = 0
    waiting: bool = False
    is_up: bool = False
    reading: tasks.Reading | None = None
    """The block, image or step that the worker has reported last."""
    end: ProcessEnd | None = None
    """Why the worker is being ended, if known before its exit status."""
    _watched: tuple[PoolTask, OwnTime] | None = None
    _began: float = 0.0
    _kill_count: int = field(default_factory=kill_count_for_memory)

    @property
    def is_idle(self) -> bool:
        """Whether the worker is free to take a task."""
        return self.task is None and not self.packets and not self.process.is_ending

    def ask_whether_up(self) -> None:
        """Send any request: the answer shows that the worker has started up."""
        self.packets.append((tasks.DetachArena(_NO_ARENA), ()))

    def prepare(self, task: PoolTask) -> None:
        """Queue the packets that prepare a task, and then the task."""
        self.task, self.reading, task.started = task, None, time.monotonic()
        task.sent = 0.0
        task.worker = self.number
        for arena_id, fd in task.arenas:
            if arena_id not in self.arenas:
                self.arenas.add(arena_id)
                self.packets.append((tasks.AttachArena(arena_id), (fd,)))
        self._open_dataset(task.dataset)
        new = [key for key in task.block_keys if key not in self.blocks]
        self.blocks.update(new)
        forget, self.forget = self.forget, []
        for at in range(0, len(forget), _KEYS_A_PACKET):
            some_keys = tuple(forget[at : at + _KEYS_A_PACKET])
            self.packets.append((tasks.OpenBlocks(task.dataset.dataset_id, (), some_keys), ()))
        dataset_of = task.dataset_of or (lambda _: task.dataset)
        for dataset, keys in itertools.groupby(new, dataset_of):
            self._open_dataset(dataset)
            self._open_blocks(task, dataset.dataset_id, list(keys))
        self.packets.append((task.body, ()))

    def _open_dataset(self, dataset: tasks.OpenDataset) -> None:
        if dataset.dataset_id not in self.datasets:
            self.datasets.add(dataset.dataset_id)
            self.limit_bytes = max(self.limit_bytes, dataset.memory_bytes)
            self.packets.extend((part, ()) for part in _in_parts(dataset))

    def _open_blocks(self, task: PoolTask, dataset_id: int, keys: Sequence[int]) -> None:
        # Open blocks one by one if one of them may have crashed a worker, to find out which.
        together = 1 if task.ends else _BLOCKS_A_PACKET
        for at in range(0, len(keys), together):
            assert task.source is not None
            some = tuple(map(task.source, keys[at : at + together]))
            self.packets.append((tasks.OpenBlocks(dataset_id, some), ()))

    def undo(self, task: PoolTask, failed: tasks.TaskBody) -> None:
        """Handle a failed preparation (a block could not be opened): skip the task, and treat its
        blocks as not opened.
        """
        undone = [failed, *(body for body, _ in self.packets)]
        self.packets = deque(p for p in self.packets if isinstance(p[0], tasks.DetachArena))
        self.datasets.discard(task.dataset.dataset_id)
        keys = self.blocks.intersection(task.block_keys)
        self.blocks -= keys
        self.forget.extend(keys)
        for body in undone:
            if isinstance(body, tasks.AttachArena):
                self.arenas.discard(body.arena_id)
            elif isinstance(body, tasks.OpenDataset):
                self.datasets.discard(body.dataset_id)
            elif isinstance(body, tasks.OpenBlocks):
                self.forget.extend(body.forget)

    @property
    def function(self) -> str:
        """The user's function that the worker is calling, as far as known; "" if none."""
        task, reading = self.task, self.reading
        if task is None:
            return ""
        if isinstance(task.body, tasks.Decode):
            return task.dataset.view.map
        collate = task.body.collate if isinstance(task.body, tasks.Assemble) else None
        if collate is None or reading is None or reading.step is None:
            return ""
        return collate.function

    @property
    def place(self) -> WorkerPlace | None:
        """The place at which the worker is working, as far as known."""
        task = self.task
        if task is None:
            return None
        if task.place_of is None or not self.packets:
            return task.place()
        if self.reading is not None:
            place = task.place_of(self.reading.block_key)
            if self.reading.step is not None:
                return place.at_step(self.reading.step)
            return place.at_row(self.reading.row, self.reading.column)
        body = self.packets[0][0]
        if isinstance(body, tasks.OpenBlocks) and body.blocks:
            return task.place_of(body.blocks[0].key)
        return task.place()

    def ended(self, status: int) -> ProcessEnd:
        """Return how the worker ended, given its exit status."""
        is_machine_short = kill_count_for_memory() > self._kill_count
        words, has_started = self.process.last_words, bool(self.process.pid)
        return self.end or end_of(
            status, words, is_machine_short=is_machine_short, has_started=has_started
        )

    def is_stuck(self, now: float, timeout_s: float) -> bool:
        """Whether the worker has worked on its task for longer than `timeout_s`, or nobody has
        wanted the task for longer than a second. Time spent waiting for a processor does not count,
        unless the task calls a function, since those who wait for a function count all time. Call
        this periodically; time counts from the first call.
        """
        task = self.task
        if task is None or self.process.is_ending or not self.process.has_started:
            self._watched = None
            return False
        if self._watched is None or self._watched[0] is not task:
            self._watched, self._began = (task, OwnTime(self.process.pid, now)), now
            return False
        if task.unwanted_since is not None and now - task.unwanted_since > _UNWANTED_S:
            self.end = ProcessEnd(Cause.STUCK, "was ended: nobody waits for its function any more")
            return True
        if task.calls_function:
            is_over, whose = now - self._began > timeout_s, ""
        else:
            is_over, whose = self._watched[1].exceeds(timeout_s, now), " of its own time"
        if is_over:
            self.end = ProcessEnd(Cause.STUCK, f"did not end within {timeout_s:g} s{whose}")
        return is_over


def _in_parts(dataset: tasks.OpenDataset) -> list[tasks.OpenDataset]:
    """Split the message into pieces of its schema, followed by the rest. Sent at once, the schema
    of 100,000 columns, 12 MB, would block the node's event loop for a tenth of a second per worker.
    """
    schema, step = dataset.schema, _SCHEMA_PART_BYTES
    parts = [
        tasks.OpenDataset(dataset.dataset_id, dataset.format, schema[at : at + step], more=True)
        for at in range(0, len(schema), step)
    ]
    return [*parts, replace(dataset, schema=b"", more=False)]


# -- queue of tasks -------------------------------------------------------------------------------
#
# Decide which task runs next, and on which worker. Pure: time is an argument.
#
# Invariants:
# 1. Of the eligible tasks, the most urgent goes first, then the oldest. Exception: the worker that
#    last decoded a block of a shard has the shard open and knows its footer, so it gets the first
#    task of that shard among the AHEAD oldest tasks of the same line and urgency. No task is
#    passed over more than AHEAD times in a row, and no worker stays idle to wait for such a task.
# 2. If there is only one job, its tasks may use all workers.
# 3. If there are several datasets, long tasks leave one worker to the other datasets, so that one
#    job's slab does not wait for another job's blocks to be decoded. If several jobs read one
#    dataset, long slabs of one leave one worker to the slabs of the others: one `collate` may take
#    a thousand times as long as another. This needs at least two workers.
# 4. A task only waits for a worker, or for the end of a running task, so it is enough to take the
#    next task whenever a task arrives or ends, and SPREAD_S after a task was held back (5).
# 5. Slabs that take too little time to be divided are held back for SPREAD_S at most, while enough
#    workers have tasks of their dataset: a further worker would have to map the same blocks,
#    which takes as long as copying their rows.


LONG_S = 0.5
"""Longer tasks count as long. Most tasks take some 10 ms; a block of a table of 100,000 columns
takes seconds."""
SPREAD_S = 0.25
LIVE_S = 10.0
"""For this long after its last task, a dataset that has readers counts as active."""
AHEAD = 16
_NOBODY: frozenset[int] = frozenset()
_FADING = 0.9
MANY = 1 << 30
_SHARDS_MAX = 1 << 14


class _Waiting(Struct, eq=False):
    """Tasks of one line and urgency with their numbers, the oldest first. `passed`: how often
    the oldest was passed over.
    """

    tasks: deque[tuple[int, PoolTask]] = field(default_factory=deque)
    passed: int = 0


class _Line(Struct, eq=False):
    """The waiting tasks of one line; the time when the last one came or ended; and the
    approximate duration of the longest of the last few, if any has ended.
    """

    by_urgency: dict[int, _Waiting] = field(default_factory=dict)
    took_s: float | None = None
    last: float = 0.0

    @property
    def first(self) -> tuple[int, int] | None:
        """Return the urgency and number of the task that goes first, if any waits."""
        oldest = ((urgency, line.tasks[0][0]) for urgency, line in self.by_urgency.items())
        return min(oldest, default=None)

    def is_left_to(self, busy: Sequence[PoolTask], enough: int, now: float) -> bool:
        """Whether the first task is held back for the workers that have the `busy` tasks, although
        another worker is idle: see invariant 5. `enough` workers can do the work.
        """
        task = self.by_urgency[min(self.by_urgency)].tasks[0][1]
        body, dataset_id = task.body, task.dataset.dataset_id
        if not isinstance(body, tasks.Assemble) or body.row_count or task.calls_function:
            return False
        at_work = sum(other.dataset.dataset_id == dataset_id for other in busy)
        return at_work >= enough and now < task.queued + SPREAD_S


_Key = tuple[int, int]
"""The tasks that share a line: a dataset, and the delivery whose slabs they make, 0 for those that
prepare blocks for all its readers."""


class TaskQueue:
    """All waiting tasks, in lines: see _Key."""

    def __init__(self) -> None:
        self._lines: dict[_Key, _Line] = {}
        self._numbers = itertools.count(1)
        self._readers: OrderedDict[str, int] = OrderedDict()
        """The worker that last decoded a block of each recently used shard."""

    def add(self, task: PoolTask, urgency: int, now: float) -> None:
        """Add a task; the smallest urgency goes first."""
        line = self._lines.setdefault(_key_of(task), _Line())
        line.last = task.queued = now
        waiting = line.by_urgency.setdefault(urgency, _Waiting())
        waiting.tasks.append((next(self._numbers), task))

    def ended(self, task: PoolTask, now: float) -> None:
        """Note that a worker has finished the task, which it started at `task.started`."""
        line = self._lines.setdefault(_key_of(task), _Line())
        line.took_s = max(now - task.started, _FADING * (line.took_s or 0.0))
        line.last = now

    @property
    def waiting(self) -> set[int]:
        """The numbers of the datasets that have waiting tasks."""
        return {key[0] for key, line in self._lines.items() if line.by_urgency}

    def forget(self, dataset_id: int, delivery_id: int | None = None) -> None:
        """Forget a dataset without readers, or one of its deliveries: it counts as active only
        while it has tasks.
        """
        for key, line in list(self._lines.items()):
            if key[0] == dataset_id and delivery_id in (None, key[1]) and not line.by_urgency:
                del self._lines[key]

    def take(
        self,
        idle: Sequence[int],
        busy: Mapping[int, PoolTask],
        worker_count: int,
        now: float,
        enough: int = MANY,
    ) -> tuple[PoolTask, int] | None:
        """Take the task to start now, and the idle worker that gets it; None if no task may start.
        `busy` has the tasks of the other workers, of `worker_count` in total; `enough` workers
        could do the work.
        """
        tasks = list(busy.values())
        self._forget(tasks, now)
        candidates = [
            (first, key)
            for key, line in self._lines.items()
            if (first := line.first)
            and self._may_go(key, tasks, worker_count, now)
            and not line.is_left_to(tasks, enough, now)
        ]
        if not candidates:
            return None
        (urgency, _), key = min(candidates)
        waiting = self._lines[key].by_urgency[urgency]
        at, worker = self._choice(waiting, idle, busy)
        waiting.passed = waiting.passed + 1 if at else 0
        task = self._removed(self._lines[key], urgency, at)
        shard = _shard_of(task)
        if shard is not None:
            self._readers[shard] = worker
            self._readers.move_to_end(shard)
            if len(self._readers) > _SHARDS_MAX:
                self._readers.popitem(last=False)
        return task, worker

    def remove(self, dataset_id: int, is_unwanted: Callable[[PoolTask], bool]) -> list[PoolTask]:
        """Remove the waiting tasks of a dataset that nobody wants."""
        removed: list[PoolTask] = []
        for line in [line for key, line in self._lines.items() if key[0] == dataset_id]:
            for urgency, waiting in list(line.by_urgency.items()):
                removed += [task for _, task in waiting.tasks if is_unwanted(task)]
                waiting.tasks = deque(task for task in waiting.tasks if not is_unwanted(task[1]))
                if not waiting.tasks:
                    del line.by_urgency[urgency]
        return removed

    def take_any(self) -> PoolTask | None:
        """Remove any waiting task, regardless of the tasks that run; None if none waits."""
        line = next((line for line in self._lines.values() if line.by_urgency), None)
        return None if line is None else self._removed(line, min(line.by_urgency), 0)

    def _choice(
        self,
        waiting: _Waiting,
        idle: Sequence[int],
        busy: Mapping[int, PoolTask],
    ) -> tuple[int, int]:
        """Return the index of the task to start, and the worker that gets it."""
        ahead = 1 if waiting.passed >= AHEAD else AHEAD
        best = [self._best(task) for _, task in itertools.islice(waiting.tasks, ahead)]
        for at, workers in enumerate(best):
            for worker in idle:
                if worker in workers:
                    return at, worker
        # Leave tasks to the busy workers that know their shards, as long as there are other tasks.
        at = next((at for at, workers in enumerate(best) if workers.isdisjoint(busy)), 0)
        return at, idle[0]

    def _best(self, task: PoolTask) -> frozenset[int]:
        """Return the worker that last decoded a block of the task's shard, if there is one."""
        shard = _shard_of(task)
        reader = None if shard is None else self._readers.get(shard)
        return _NOBODY if reader is None else frozenset((reader,))

    def _removed(self, line: _Line, urgency: int, at: int) -> PoolTask:
        waiting = line.by_urgency[urgency]
        _, task = waiting.tasks[at]
        del waiting.tasks[at]
        if not waiting.tasks:
            del line.by_urgency[urgency]
        return task

    def _may_go(self, key: _Key, tasks: list[PoolTask], worker_count: int, now: float) -> bool:
        others = {other for other in self._lines if _compete(key, other)}
        if not others:
            return True
        long = {_key_of(task) for task in tasks if now - task.started >= LONG_S}
        long |= {at for at, line in self._lines.items() if (line.took_s or 0.0) >= LONG_S}
        if key not in long and self._lines[key].took_s is not None:
            return True
        at_work = [_key_of(task) for task in tasks]
        room = max(worker_count - 1, 1)
        if at_work.count(key) >= room:
            return False
        # The duration of a new line's tasks is unknown: let one run to measure it.
        if key not in long or others <= long:
            return True
        return sum(at in long for at in at_work) < room

    def _forget(self, tasks: list[PoolTask], now: float) -> None:
        """Forget lines that have had no tasks for a while."""
        at_work = set(map(_key_of, tasks))
        for key, line in list(self._lines.items()):
            if not line.by_urgency and key not in at_work and now - line.last > LIVE_S:
                del self._lines[key]


def _key_of(task: PoolTask) -> _Key:
    body = task.body
    delivery_id = body.arena_id if isinstance(body, tasks.Assemble | tasks.CopySlab) else 0
    return task.dataset.dataset_id, delivery_id


def _compete(key: _Key, other: _Key) -> bool:
    """Return whether two lines belong to different jobs. A job's slabs and the blocks that its
    dataset prepares for them do not compete.
    """
    return key[0] != other[0] or (key[1] != other[1] and 0 not in (key[1], other[1]))


def _shard_of(task: PoolTask) -> str | None:
    """Return the shard of the block that the task decodes; None for other tasks."""
    return task.body.raw.url if isinstance(task.body, Decode) else None
