"""Which task a worker gets next. Pure: time is an argument.

Invariants:
1. Of the tasks that may go, the most urgent goes first, then the oldest.
2. A dataset alone has all workers.
3. Where there are several, long tasks leave one worker to the others: nobody's slab waits until
   somebody else's blocks are decoded. With a single worker there is none to leave.
4. A task waits for a worker, or for the end of a task that is being done: so it is enough to ask
   whenever a task ends or comes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from dataplane.node.pool_worker import PoolTask

LONG_S = 0.5
"""Most tasks take some 10 ms. A block of a table of 100,000 columns takes seconds."""
LIVE_S = 10.0
"""So long after its last task a dataset may have another one at any moment."""
_FADING = 0.9


@dataclass(slots=True, eq=False)
class _Line:
    """The tasks of one dataset that wait, and what is known of those before: when the last one came
    or ended, and how long about the longest of the last few took, if any has ended.
    """

    waiting: list[tuple[int, int, PoolTask]] = field(default_factory=list)
    took_s: float | None = None
    last: float = 0.0


class TaskQueue:
    """All tasks that wait, by dataset."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}
        self._numbers = itertools.count(1)

    def add(self, task: PoolTask, urgency: int, now: float) -> None:
        """It waits from now on; the smallest urgency goes first."""
        line = self._lines.setdefault(task.dataset.dataset_id, _Line())
        line.last = now
        heapq.heappush(line.waiting, (urgency, next(self._numbers), task))

    def ended(self, task: PoolTask, now: float) -> None:
        """A worker is done with it, and has begun with it at `task.started`."""
        line = self._lines.setdefault(task.dataset.dataset_id, _Line())
        line.took_s = max(now - task.started, _FADING * (line.took_s or 0.0))
        line.last = now

    def take(self, under_way: Iterable[PoolTask], worker_count: int, now: float) -> PoolTask | None:
        """The task to begin now, if there is one, beside those that are under way."""
        tasks = list(under_way)
        self._forget(tasks, now)
        candidates = [
            (line.waiting[0][:2], key)
            for key, line in self._lines.items()
            if line.waiting and self._may_go(key, tasks, worker_count, now)
        ]
        if not candidates:
            return None
        return heapq.heappop(self._lines[min(candidates)[1]].waiting)[2]

    def take_any(self) -> PoolTask | None:
        """One of those that wait, whatever is under way."""
        line = next((line for line in self._lines.values() if line.waiting), None)
        return None if line is None else heapq.heappop(line.waiting)[2]

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
        # Of one that is new nobody knows how long its tasks take: it may find out.
        if key not in long or others <= long:
            return True
        return sum(at in long for at in at_work) < room

    def _forget(self, tasks: list[PoolTask], now: float) -> None:
        """Datasets that have no tasks, and had none for a while."""
        at_work = {task.dataset.dataset_id for task in tasks}
        for key, line in list(self._lines.items()):
            if not line.waiting and key not in at_work and now - line.last > LIVE_S:
                del self._lines[key]
