"""Decide which task runs next, and on which worker. Pure: time is an argument.

Invariants:
1. Of the eligible tasks, the most urgent goes first, then the oldest. Exception: the worker that
   last decoded a block of a shard has the shard open and knows its footer, so it gets the first
   task of that shard among the AHEAD oldest tasks of the same dataset and urgency. No task is
   passed over more than AHEAD times in a row, and no worker stays idle to wait for such a task.
2. A dataset alone has all workers.
3. If there are several datasets, long tasks leave one worker to the others, so that one job's slab
   does not wait for another job's blocks to be decoded. This needs at least two workers.
4. A task only waits for a worker, or for the end of a running task, so it is enough to take the
   next task whenever one arrives or ends.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, field

from dataplane.node.pool_worker import PoolTask
from dataplane.rpc.tasks import Decode

LONG_S = 0.5
"""Most tasks take some 10 ms. A block of a table of 100,000 columns takes seconds."""
LIVE_S = 10.0
"""For this long after its last task, a dataset that has readers counts as active."""
AHEAD = 16
_NOBODY: frozenset[int] = frozenset()
_FADING = 0.9
_SHARDS_MAX = 1 << 14


class _Waiting(Struct, eq=False):
    """Tasks of one dataset and urgency with their numbers, the oldest first. `passed`: how often
    the oldest was passed over.
    """

    tasks: deque[tuple[int, PoolTask]] = field(default_factory=deque)
    passed: int = 0


class _Line(Struct, eq=False):
    """The waiting tasks of one dataset; the time when the last one came or ended; and the
    approximate duration of the longest of the last few, if any has ended.
    """

    by_urgency: dict[int, _Waiting] = field(default_factory=dict)
    took_s: float | None = None
    last: float = 0.0

    @property
    def first(self) -> tuple[int, int] | None:
        """Return the urgency and number of the task that goes first, if any waits."""
        found = ((urgency, each.tasks[0][0]) for urgency, each in self.by_urgency.items())
        return min(found, default=None)


class TaskQueue:
    """All waiting tasks, by dataset."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}
        self._numbers = itertools.count(1)
        self._readers: OrderedDict[str, int] = OrderedDict()
        """For recently used shards: the worker that last decoded a block of each."""

    def add(self, task: PoolTask, urgency: int, now: float) -> None:
        """Add a task; the smallest urgency goes first."""
        line = self._lines.setdefault(task.dataset.dataset_id, _Line())
        line.last = now
        waiting = line.by_urgency.setdefault(urgency, _Waiting())
        waiting.tasks.append((next(self._numbers), task))

    def ended(self, task: PoolTask, now: float) -> None:
        """Note that a worker has finished the task, which it started at `task.started`."""
        line = self._lines.setdefault(task.dataset.dataset_id, _Line())
        line.took_s = max(now - task.started, _FADING * (line.took_s or 0.0))
        line.last = now

    @property
    def waiting(self) -> set[int]:
        """The numbers of the datasets that have waiting tasks."""
        return {dataset_id for dataset_id, line in self._lines.items() if line.by_urgency}

    def forget(self, dataset_id: int) -> None:
        """Forget a dataset without readers: it counts as active only while it has tasks."""
        line = self._lines.get(dataset_id)
        if line is not None and not line.by_urgency:
            del self._lines[dataset_id]

    def take(
        self,
        idle: Sequence[int],
        busy: Mapping[int, PoolTask],
        worker_count: int,
        now: float,
    ) -> tuple[PoolTask, int] | None:
        """The task to start now, if there is one, and the idle worker that gets it. `busy` has the
        tasks of the other workers, of `worker_count` in total.
        """
        tasks = list(busy.values())
        self._forget(tasks, now)
        candidates = [
            (first, key)
            for key, line in self._lines.items()
            if (first := line.first) and self._may_go(key, tasks, worker_count, now)
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
        line = self._lines.get(dataset_id)
        removed: list[PoolTask] = []
        for urgency, waiting in [] if line is None else list(line.by_urgency.items()):
            left = deque(one for one in waiting.tasks if not is_unwanted(one[1]))
            removed += [task for _, task in waiting.tasks if is_unwanted(task)]
            waiting.tasks = left
            if line is not None and not left:
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
        """Which of these tasks goes to which worker."""
        ahead = 1 if waiting.passed >= AHEAD else AHEAD
        best = [self._best(task) for _, task in itertools.islice(waiting.tasks, ahead)]
        for at, workers in enumerate(best):
            for worker in idle:
                if worker in workers:
                    return at, worker
        # Leave to other workers what is best done by them, as long as there is other work.
        at = next((at for at, workers in enumerate(best) if workers.isdisjoint(busy)), 0)
        return at, idle[0]

    def _best(self, task: PoolTask) -> frozenset[int]:
        """The worker that last decoded a block of the task's shard, if there is one."""
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

    def _may_go(self, key: int, tasks: list[PoolTask], worker_count: int, now: float) -> bool:
        others = self._lines.keys() - {key}
        if not others:
            return True
        long = {task.dataset.dataset_id for task in tasks if now - task.started >= LONG_S}
        long |= {at for at, line in self._lines.items() if (line.took_s or 0.0) >= LONG_S}
        if key not in long and self._lines[key].took_s is not None:
            return True
        at_work = [task.dataset.dataset_id for task in tasks]
        room = max(worker_count - 1, 1)
        if at_work.count(key) >= room:
            return False
        # The duration of a new dataset's tasks is unknown: let one run to measure it.
        if key not in long or others <= long:
            return True
        return sum(at in long for at in at_work) < room

    def _forget(self, tasks: list[PoolTask], now: float) -> None:
        """Forget datasets that have had no tasks for a while."""
        at_work = {task.dataset.dataset_id for task in tasks}
        for key, line in list(self._lines.items()):
            if not line.by_urgency and key not in at_work and now - line.last > LIVE_S:
                del self._lines[key]


def _shard_of(task: PoolTask) -> str | None:
    """The shard of the block that the task decodes."""
    return task.body.raw.url if isinstance(task.body, Decode) else None
