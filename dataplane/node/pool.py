"""The worker processes of a node: started by exec, one job at a time each, replaced when they die.

Invariants:
1. A job is reported once: done, or failed.
2. A job whose worker died is given to one that is started then, so that whoever kills all workers
   at once hits a job once; the second death is blamed on the job.
3. Before a job a worker is told whatever it needs and was not told yet; a new worker knows nothing.
4. A worker that was told to open a block is told to forget it before it sees anything else of a
   node that has reused its memory.
5. Workers that are too many end once they have nothing to do; what is one more has to be up before
   it gets a job.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import itertools
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dataplane.errors import ConfigError, CorruptShard, DataplaneError, PeerLost
from dataplane.node.staffing import Look
from dataplane.rpc import local, tasks
from dataplane.trace import Trace

_DEATHS_MAX = 2
_SCHEMA_PART_BYTES = 128 * 1024
# A block's source has its url and its path, of a few thousand bytes each at most.
_BLOCKS_A_PACKET = 20
_KEYS_A_PACKET = 10_000
_QUICK_DEATHS_MAX = 5
_NO_ARENA = (1 << 64) - 1

Report = Callable[[tasks.ResultBody], None]


@dataclass(slots=True, eq=False)
class Job:
    """One order to a worker, and what the worker must know for it.

    `arenas` are (arena id, descriptor); `source` tells of a block that `body` names by key.
    """

    body: tasks.Decode | tasks.Assemble | tasks.CopySlab
    dataset: tasks.OpenDataset
    arenas: tuple[tuple[int, int], ...]
    report: Report
    blame: str
    source: Callable[[int], tasks.BlockSource] | None = None
    deaths: int = 0
    started: float = 0.0
    """When a worker began with it."""

    @property
    def block_keys(self) -> tuple[int, ...]:
        """The blocks that it gathers from."""
        return self.body.block_keys if isinstance(self.body, tasks.Assemble) else ()


@dataclass(slots=True, eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    sock: socket.socket
    job: Job | None = None
    packets: deque[tuple[tasks.TaskBody, tuple[int, ...]]] = field(default_factory=deque)
    arenas: set[int] = field(default_factory=set)
    datasets: set[int] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)
    forget: list[int] = field(default_factory=list)
    jobs_done: int = 0
    waiting: bool = False
    is_up: bool = False


class WorkerPool:
    """`worker_count` processes and one queue, most urgent first."""

    def __init__(self, worker_count: int, trace: Trace, stderr_fd: int | None = None) -> None:
        self._stderr_fd = stderr_fd
        self._worker_count = worker_count
        self._trace = trace
        self._workers: list[_Worker] = []
        self._queue: list[tuple[int, int, Job]] = []
        self._numbers = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._quick_deaths = 0
        self._closed = False
        self._busy_s = 0.0
        self._made_bytes = 0
        self._looked = (time.monotonic(), 0.0, 0)

    def start(self, count: int | None = None) -> None:
        """See that so many processes were started, all by default; does not wait for them. May be
        called again.
        """
        self._loop = asyncio.get_running_loop()
        wanted = self._worker_count if count is None else min(count, self._worker_count)
        while len(self._workers) < wanted:
            self._spawn()

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers' process ids."""
        return tuple(worker.process.pid for worker in self._workers)

    @property
    def worker_count(self) -> int:
        """How many there are, when none has just died."""
        return self._worker_count

    def resize(self, count: int) -> None:
        """Have so many workers: more are started, and those that are too many end when idle."""
        self._worker_count = count
        while self._loop is not None and len(self._workers) < count:
            worker = self._spawn()
            # Whatever it is asked first, its answer says that it is up: jobs do not wait for that.
            worker.packets.append((tasks.DetachArena(_NO_ARENA), ()))
            self._send_next(worker)
        self._retire()

    def look(self, *, is_awaited: bool) -> Look:
        """What the workers did since it was asked last."""
        now, made = time.monotonic(), self._made_bytes
        under_way_s = sum(now - worker.job.started for worker in self._workers if worker.job)
        (then, before_s, made_before), busy_s = self._looked, self._busy_s + under_way_s
        self._looked = (now, busy_s, made)
        seconds = max(now - then, 1e-6)
        return Look((busy_s - before_s) / seconds, (made - made_before) / seconds, is_awaited)

    def submit(self, job: Job, urgency: int) -> None:
        """Queue a job; the smallest urgency goes first, then the oldest."""
        heapq.heappush(self._queue, (urgency, next(self._numbers), job))
        self._refill()
        self._dispatch()

    def forget_block(self, key: int) -> None:
        """The memory of this block is about to hold another one."""
        for worker in self._workers:
            if key in worker.blocks:
                worker.blocks.remove(key)
                worker.forget.append(key)

    def detach_arena(self, arena_id: int) -> None:
        """Nobody needs this arena any more."""
        for worker in list(self._workers):
            if arena_id in worker.arenas:
                worker.arenas.remove(arena_id)
                worker.packets.append((tasks.DetachArena(arena_id), ()))
                self._send_next(worker)

    def close(self) -> None:
        """End all workers and wait for them. May be called twice."""
        self._closed = True
        for worker in self._workers:
            self._forget_socket(worker)
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
        self._workers.clear()

    def _refill(self) -> None:
        """Try workers again, if the last ones were given up."""
        if self._loop is None or self._closed:
            return
        self.start()

    def _retire(self) -> None:
        for worker in self._workers[::-1]:
            if len(self._workers) > self._worker_count and not worker.job and not worker.packets:
                self._forget_socket(worker)
                worker.process.kill()
                worker.process.wait()
                self._workers.remove(worker)

    def _spawn(self) -> _Worker:
        ours, theirs = local.pair()
        ours.setblocking(False)
        command = [
            sys.executable,
            "-P",
            "-m",
            "dataplane.node",
            "--worker-fd",
            str(theirs.fileno()),
        ]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=self._stderr_fd,
            pass_fds=(theirs.fileno(),),
            close_fds=True,
            env={"OPENBLAS_NUM_THREADS": "1", **os.environ},
        )
        theirs.close()
        worker = _Worker(process, ours)
        self._workers.append(worker)
        assert self._loop is not None
        self._loop.add_reader(ours.fileno(), self._on_readable, worker)
        self._trace.started("worker", pid=process.pid)
        return worker

    def _dispatch(self) -> None:
        for worker in list(self._workers):
            if worker.job is not None or worker.packets:
                continue
            job = self._pop()
            if job is None:
                return
            self._give(worker, job)

    def _give(self, worker: _Worker, job: Job) -> None:
        worker.job, job.started = job, time.monotonic()
        self._prepare(worker, job)
        self._send_next(worker)

    def _pop(self) -> Job | None:
        return heapq.heappop(self._queue)[2] if self._queue else None

    def _prepare(self, worker: _Worker, job: Job) -> None:
        for arena_id, fd in job.arenas:
            if arena_id not in worker.arenas:
                worker.arenas.add(arena_id)
                worker.packets.append((tasks.AttachArena(arena_id), (fd,)))
        dataset_id = job.dataset.dataset_id
        if dataset_id not in worker.datasets:
            worker.datasets.add(dataset_id)
            worker.packets.extend((part, ()) for part in _in_parts(job.dataset))
        new = [key for key in job.block_keys if key not in worker.blocks]
        worker.blocks.update(new)
        forget, worker.forget = worker.forget, []
        for at in range(0, len(forget), _KEYS_A_PACKET):
            some_keys = tuple(forget[at : at + _KEYS_A_PACKET])
            worker.packets.append((tasks.OpenBlocks(dataset_id, (), some_keys), ()))
        for at in range(0, len(new), _BLOCKS_A_PACKET):
            assert job.source is not None
            some = tuple(map(job.source, new[at : at + _BLOCKS_A_PACKET]))
            worker.packets.append((tasks.OpenBlocks(dataset_id, some), ()))
        worker.packets.append((job.body, ()))

    def _send_next(self, worker: _Worker) -> None:
        """Send the first packet, unless the worker still owes the answer to it."""
        if worker.waiting:
            return
        worker.waiting = True
        body, descriptors = worker.packets[0]
        try:
            local.send(worker.sock, tasks.Task(body), descriptors)
        except PeerLost:
            self._on_death(worker)
        except ConfigError as error:  # the message is too large, and always will be
            self._on_result(worker, error)

    def _on_readable(self, worker: _Worker) -> None:
        try:
            result, descriptors = local.receive(worker.sock, tasks.Result)
        except BlockingIOError:
            return
        except DataplaneError:  # it is gone, or speaks nonsense
            self._on_death(worker)
            return
        for fd in descriptors:
            os.close(fd)
        if worker.waiting:
            self._on_result(worker, result.body)
        else:
            self._on_death(worker)

    def _on_result(self, worker: _Worker, body: tasks.ResultBody) -> None:
        """The answer to the last packet: the job itself, or what prepares it. An arena that was
        detached meanwhile may be queued behind the job: its answer is not the job's.
        """
        worker.waiting, worker.is_up = False, True
        done, _ = worker.packets.popleft()
        job = worker.job
        if job is not None and done is job.body:
            self._finish(worker, job, body)
        elif job is not None and isinstance(body, DataplaneError):
            self._undo(worker, job, done)
            self._finish(worker, job, body)
        if worker.packets:
            self._send_next(worker)
        else:
            self._dispatch()
            self._retire()

    def _undo(self, worker: _Worker, job: Job, failed: tasks.TaskBody) -> None:
        """Preparing failed (a block could not be opened): skip the job; trust nothing it opened."""
        undone = [failed, *(body for body, _ in worker.packets)]
        worker.packets = deque(p for p in worker.packets if isinstance(p[0], tasks.DetachArena))
        worker.datasets.discard(job.dataset.dataset_id)
        keys = worker.blocks.intersection(job.block_keys)
        worker.blocks -= keys
        worker.forget.extend(keys)
        for body in undone:
            if isinstance(body, tasks.AttachArena):
                worker.arenas.discard(body.arena_id)
            elif isinstance(body, tasks.OpenBlocks):
                worker.forget.extend(body.forget)

    def _finish(self, worker: _Worker, job: Job, body: tasks.ResultBody) -> None:
        worker.job = None
        worker.jobs_done += 1
        self._busy_s += time.monotonic() - job.started
        self._made_bytes += body.bytes_used if isinstance(body, tasks.Assembled) else 0
        self._quick_deaths = 0
        job.report(body)

    def _forget_socket(self, worker: _Worker) -> None:
        if self._loop is not None and worker.sock.fileno() >= 0:
            self._loop.remove_reader(worker.sock.fileno())
        worker.sock.close()

    def _on_death(self, worker: _Worker) -> None:
        """Replace a worker; its job goes to the new one, or is blamed."""
        self._forget_socket(worker)
        worker.process.kill()
        status = worker.process.wait()
        self._workers.remove(worker)
        if self._closed:
            return
        self._trace.failed("worker", pid=worker.process.pid, status=status)
        job = worker.job
        if not worker.jobs_done:
            self._quick_deaths += 1
        if job is not None:
            # A worker that dies before its first answer never came to the job.
            job.deaths += worker.is_up
            if job.deaths >= _DEATHS_MAX:
                job.report(_quarantine(job, status))
                job = None
        if self._quick_deaths > _QUICK_DEATHS_MAX * self._worker_count:
            self._fail_all(job, status)
            return
        if job is not None:
            self._give(self._spawn(), job)
        elif len(self._workers) < self._worker_count:
            self._spawn()
        self._dispatch()

    def _fail_all(self, job: Job | None, status: int) -> None:
        """Report this job and all that wait."""
        self._quick_deaths = 0
        failed = [] if job is None else [job]
        while (job := self._pop()) is not None:
            failed.append(job)
        for job in failed:
            job.report(
                DataplaneError(
                    f"no worker process stays alive (the last ended with status {status}): "
                    "look at the node's output for the reason"
                )
            )


def _quarantine(job: Job, status: int) -> CorruptShard:
    return CorruptShard(
        f"{job.blame}: the worker process died {job.deaths} times at it (last exit status "
        f"{status}): these rows are quarantined",
        shard=job.blame,
    )


def _in_parts(dataset: tasks.OpenDataset) -> list[tasks.OpenDataset]:
    """The schema in pieces, then the rest: neither need leave room for the other."""
    schema, step = dataset.schema, _SCHEMA_PART_BYTES
    parts = [
        tasks.OpenDataset(dataset.dataset_id, dataset.format, schema[at : at + step], more=True)
        for at in range(0, len(schema), step)
    ]
    return [*parts, dataclasses.replace(dataset, schema=b"", more=False)]
