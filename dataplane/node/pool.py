"""The worker processes of a node: forked, each with one task at a time, replaced when they die.

Invariants:
1. Each task is reported exactly once, as done or failed.
2. If a worker died or ran out of memory, its task is given to a worker started afterwards, so that
   killing all workers at once hits each task only once. The second death is blamed on the task. A
   stuck worker is killed; its task is tried again only if that can tell which block is to blame.
3. Before a task, a worker gets everything that the task needs and the worker does not know yet; a
   new worker knows nothing.
4. A worker that has opened a block is told to forget it before it gets any other message after the
   block's memory was reused.
5. Surplus workers exit once they are idle; an additional worker gets tasks only after it has
   started up.
6. Nothing on the event loop waits for a process to die: a process blocked in the kernel, in a read
   from an unreachable file server, dies only when that read ends. Until then it keeps its place and
   its task, since it might still write into the task's memory.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Self

from dataplane.base.trace import Trace
from dataplane.model.config import NodeConfig
from dataplane.model.errors import ClosedError, ConfigError, DataplaneError
from dataplane.node.pool_worker import MANY, SPREAD_S, PoolTask, PoolWorker, TaskQueue
from dataplane.rpc import tasks
from dataplane.worker.death import Cause, ProcessEnd, blame, nobody_alive
from dataplane.worker.forking import fork_server
from dataplane.worker.kernel import kernel
from dataplane.worker.process import MEMORY_BYTES, WorkerProcess, kill_all

_DEATHS_MAX = 2
_QUICK_DEATHS_MAX = 5
_WATCH_S = 0.5
_BUSY_SHARE = 0.4
"""Short tasks go to so few workers that each of these is busy for about this share of its time."""


class WorkerPool:
    """`worker_count` processes and one queue. Each process may take `memory_bytes` of private
    memory, more if the dataset of its task allows it; a task may keep a worker busy for
    `task_timeout_s`.
    """

    def __init__(
        self,
        worker_count: int,
        trace: Trace,
        stderr_fd: int | None = None,
        *,
        memory_bytes: int = MEMORY_BYTES,
        task_timeout_s: float = math.inf,
    ) -> None:
        self._stderr_fd = stderr_fd
        self._memory_bytes = memory_bytes
        self._worker_count = worker_count
        self._task_timeout_s = task_timeout_s
        self._trace = trace
        self._workers: list[PoolWorker] = []
        self._retired: set[PoolWorker] = set()
        self._queue = TaskQueue()
        self._numbers = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._quick_deaths = 0
        self.start_count = self.death_count = 0
        self._watching: asyncio.TimerHandle | None = None
        self._spreading: asyncio.TimerHandle | None = None
        self._closed = False
        self._busy_s = 0.0
        self._made_bytes = 0
        self._looked = (time.monotonic(), 0.0, 0)
        self._own_s, self._enough = 0.0, MANY

    @classmethod
    def of(cls, config: NodeConfig, trace: Trace, stderr_fd: int | None = None) -> Self:
        """Create the pool of a node."""
        return cls(
            config.worker_count,
            trace,
            stderr_fd,
            memory_bytes=config.worker_memory_bytes,
            task_timeout_s=config.task_timeout_s,
        )

    def start(self, count: int | None = None) -> None:
        """Start processes until there are this many, by default all; does not wait for them. May be
        called again.
        """
        if self._loop is None:
            fork_server.acquire(self._stderr_fd)
            self._loop = asyncio.get_running_loop()
            kernel()  # load the compiled loops now: without them, each slab would fail
        wanted = self._worker_count if count is None else min(count, self._worker_count)
        while len(self._workers) < wanted:
            self._spawn()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the workers that can work."""
        return tuple(worker.process.pid for worker in self._workers if not worker.process.is_ending)

    @property
    def worker_count(self) -> int:
        """The number of workers, including those that are being replaced."""
        return self._worker_count

    def resize(self, count: int) -> None:
        """Change the number of workers: start more, or let surplus ones exit when idle."""
        self._worker_count = count
        while self._loop is not None and len(self._workers) < count:
            worker = self._spawn()
            worker.ask_whether_up()  # it gets tasks only after its answer
            self._send_next(worker)
        self._retire()

    def tick(self) -> tuple[float, float]:
        """Return, since the last call: how many workers were busy on average, and how many bytes of
        slabs they made per second.
        """
        now, made = time.monotonic(), self._made_bytes
        under_way_s = sum(now - worker.task.started for worker in self._workers if worker.task)
        (then, before_s, made_before), busy_s = self._looked, self._busy_s + under_way_s
        self._looked = (now, busy_s, made)
        seconds = max(now - then, 1e-6)
        own_s, self._own_s = self._own_s, 0.0
        self._enough = max(1, math.ceil(own_s / seconds / _BUSY_SHARE))
        return (busy_s - before_s) / seconds, (made - made_before) / seconds

    @property
    def at_work(self) -> frozenset[int]:
        """The numbers of the datasets with tasks that are certain to end: the tasks of workers,
        which are killed if they hang, and the tasks that wait for these workers. Workers that are
        being ended do not count, since they may hang in the kernel for ever.
        """
        tasks_now = [
            worker.task for worker in self._workers if worker.task and not worker.process.is_ending
        ]
        dataset_ids = {task.dataset.dataset_id for task in tasks_now}
        return frozenset(dataset_ids | self._queue.waiting) if dataset_ids else frozenset()

    def submit(self, task: PoolTask, urgency: int) -> None:
        """Queue a task. The smallest urgency goes first, then the oldest, except for long tasks:
        see TaskQueue. If the task names a worker that is idle now, that worker gets it at once,
        since the worker has already done most of the work.
        """
        able = task.worker and [worker for worker in self._workers if worker.number == task.worker]
        if able and able[0].is_idle:
            self._give(able[0], task)
            return
        self._queue.add(task, urgency, time.monotonic())
        self._refill()
        self._dispatch()

    def forget_block(self, key: int) -> None:
        """Have workers forget this block, since its memory is about to be reused."""
        for worker in self._workers:
            if key in worker.blocks:
                worker.blocks.remove(key)
                worker.forget.append(key)

    def forget_dataset(self, dataset_id: int) -> None:
        """Forget a dataset that has no readers left, so that others may have all workers."""
        # Keep decodes without a function: they end by themselves, and later readers may use them.
        self._drop(
            dataset_id, lambda task: isinstance(task.body, tasks.Decode) and task.calls_function
        )
        self._queue.forget(dataset_id)
        self._dispatch()

    def forget_slabs(self, dataset_id: int, arena_id: int) -> None:
        """Drop tasks that make slabs of this dataset in this arena, since nobody wants them."""

        def is_of_arena(task: PoolTask) -> bool:
            return isinstance(task.body, tasks.Assemble) and task.body.arena_id == arena_id

        # Drop tasks without a function, too: a loader that is opened again would wait for them.
        self._drop(dataset_id, is_of_arena)
        self._queue.forget(dataset_id, arena_id)

    def _drop(self, dataset_id: int, is_unwanted: Callable[[PoolTask], bool]) -> None:
        """Drop tasks of a dataset whose results nobody wants. Waiting tasks fail. A running task
        that calls a user's function has a short time to end before its worker is killed, since the
        function could hang and keep the worker from later tasks.
        """
        now = time.monotonic()
        for worker in self._workers:
            task = worker.task
            if task is None or task.dataset.dataset_id != dataset_id:
                continue
            if task.calls_function and is_unwanted(task) and task.unwanted_since is None:
                task.unwanted_since = now
                self._watch_soon()
        for task in self._queue.remove(dataset_id, is_unwanted):
            task.report(_unwanted())

    def detach_arena(self, arena_id: int) -> None:
        """Have workers detach an arena that is no longer needed."""
        for worker in list(self._workers):
            if arena_id in worker.arenas:
                worker.arenas.remove(arena_id)
                worker.packets.append((tasks.DetachArena(arena_id), ()))
                self._send_next(worker)

    def close(self) -> None:
        """Kill all workers and wait a few seconds for them to end. May be called twice."""
        is_first, self._closed = not self._closed, True
        for timer in (self._watching, self._spreading):
            if timer is not None:
                timer.cancel()
        left = [*self._workers, *self._retired]
        kill_all((worker.process for worker in left), self._trace)
        self._workers.clear()
        self._retired.clear()
        if is_first and self._loop is not None:
            fork_server.release()

    def _refill(self) -> None:
        """Start workers again, if the last ones were given up."""
        if self._loop is None or self._closed:
            return
        self.start()

    def _retire(self) -> None:
        for worker in self._workers[::-1]:
            if worker.is_idle and len(self._workers) > self._worker_count:
                self._workers.remove(worker)
                self._retired.add(worker)
                self._end(worker)

    def _spawn(self) -> PoolWorker:
        assert self._loop is not None
        process = WorkerProcess.start(self._stderr_fd, self._memory_bytes)
        worker = PoolWorker(process, self._memory_bytes, next(self._numbers))
        self._workers.append(worker)
        self.start_count += 1
        process.listen(tasks.Result, partial(self._hear, worker), partial(self._end, worker))
        self._trace.started("worker started", worker_count=len(self._workers))
        return worker

    def _dispatch(self) -> None:
        # Use numbers, not process ids: reading those waits while the fork server is starting.
        while idle := {worker.number: worker for worker in self._workers if worker.is_idle}:
            able = [worker for worker in self._workers if not worker.process.is_ending]
            busy = {worker.number: worker.task for worker in able if worker.task is not None}
            now = time.monotonic()
            next_task = self._queue.take(list(idle), busy, len(able), now, self._enough)
            if next_task is None:
                self._dispatch_later()
                return
            task, number = next_task
            self._give(idle[number], task)

    def _dispatch_later(self) -> None:
        """Look again soon if tasks were left to busy workers."""
        if self._loop is None or self._spreading is not None or not self._queue.waiting:
            return

        def look_again() -> None:
            self._spreading = None
            self._dispatch()

        self._spreading = self._loop.call_later(SPREAD_S, look_again)

    def _give(self, worker: PoolWorker, task: PoolTask) -> None:
        worker.prepare(task)
        self._send_next(worker)
        self._watch_soon()

    def _send_next(self, worker: PoolWorker) -> None:
        """Send the first queued packet, unless the worker still owes an answer."""
        if worker.waiting or worker.process.is_ending:
            return
        worker.waiting = True
        body, descriptors = worker.packets[0]
        if worker.task is not None and body is worker.task.body:
            worker.task.sent = time.monotonic()
        try:
            worker.process.send(tasks.Task(body), descriptors)
        except ConfigError as error:  # the message is too large, and always will be
            self._on_result(worker, error)

    def _hear(self, worker: PoolWorker, result: tasks.Result) -> None:
        if not worker.waiting:
            self._end(worker)
        elif isinstance(result.body, tasks.Reading):
            worker.reading = result.body
        elif isinstance(result.body, tasks.OutOfMemory):
            worker.end = ProcessEnd(Cause.OUT_OF_MEMORY, "reached its memory limit")
            self._end(worker)
        else:
            self._on_result(worker, result.body)

    def _on_result(self, worker: PoolWorker, body: tasks.ResultBody) -> None:
        """Handle the answer to the last packet: the task, or a packet that prepares it. The message
        to detach an arena may be queued behind the task; its answer is not the task's.
        """
        worker.waiting, worker.is_up = False, True
        done, _ = worker.packets.popleft()
        task = worker.task
        if task is not None and done is task.body:
            self._finish(worker, task, body)
        elif task is not None and isinstance(body, DataplaneError):
            worker.undo(task, done)
            self._finish(worker, task, body)
        if worker.packets:
            self._send_next(worker)
        else:
            self._dispatch()
            self._retire()

    def _finish(self, worker: PoolWorker, task: PoolTask, body: tasks.ResultBody) -> None:
        worker.task = None
        worker.jobs_done += 1
        now = time.monotonic()
        self._busy_s += now - task.started
        self._own_s += task.own_s(body, now)
        self._queue.ended(task, now)
        self._made_bytes += task.made_bytes(body)
        self._quick_deaths = 0
        task.report(body)

    def _end(self, worker: PoolWorker) -> None:
        """End a worker that is gone, sent an invalid message, cannot continue, or is surplus."""
        worker.process.end(partial(self._on_end, worker))

    def _on_end(self, worker: PoolWorker, status: int) -> None:
        """Replace a worker; its task goes to the new one, or is blamed."""
        if self._closed:
            return
        if worker in self._retired:
            self._retired.remove(worker)
            return
        self._workers.remove(worker)
        self.death_count += 1
        end = worker.ended(status)
        self._tell(worker, end)
        task = worker.task
        if not worker.jobs_done:
            self._quick_deaths += 1
        if task is not None and task.unwanted_since is not None:
            task.report(_unwanted())
            task = None
        # Do not blame the task if the worker died before its first answer: it never got the task.
        if task is not None and worker.is_up and self._is_blamed(task, worker, end):
            task = None
        if self._quick_deaths > _QUICK_DEATHS_MAX * self._worker_count:
            self._fail_all(task, end)
            return
        if task is not None:
            self._give(self._spawn(), task)
        elif len(self._workers) < self._worker_count:
            self._spawn()
        self._dispatch()

    def _tell(self, worker: PoolWorker, end: ProcessEnd) -> None:
        place, task = worker.place, worker.task
        at = {
            name: noun for name, noun in (place.nouns if place else {}).items() if noun is not None
        }
        doing = {} if task is None else {"task": type(task.body).__name__}
        self._trace.failed("worker ended", pid=worker.process.pid, how=end.words, **doing, **at)

    def _is_blamed(self, task: PoolTask, worker: PoolWorker, end: ProcessEnd) -> bool:
        """Report a task, and return True, if enough workers have ended at it; otherwise prepare it
        for another worker.
        """
        task.ends.append(end)
        most = task.attempt_count if end.cause is Cause.STUCK else _DEATHS_MAX
        if len(task.ends) < most:
            task.retried()
            return False
        place = worker.place or task.place()
        task.report(blame(task.doing, place, task.ends, worker.limit_bytes, worker.function))
        return True

    def _watch_soon(self) -> None:
        """Check the workers periodically while any of them has a task."""
        if self._loop is not None and self._watching is None:
            self._watching = self._loop.call_later(_WATCH_S, self._watch)

    def _watch(self) -> None:
        self._watching = None
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.task is None:
                continue
            if worker.is_stuck(now, self._task_timeout_s / worker.task.attempt_count):
                self._end(worker)
            self._watch_soon()

    def _fail_all(self, task: PoolTask | None, end: ProcessEnd) -> None:
        """Report this task and all waiting ones as failed."""
        self._quick_deaths = 0
        failed = [] if task is None else [task]
        while (task := self._queue.take_any()) is not None:
            failed.append(task)
        for task in failed:
            task.report(nobody_alive(end))


def _unwanted() -> ClosedError:
    return ClosedError("the job that wanted this block or batch is gone")
