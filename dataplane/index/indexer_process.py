"""The node's side of the workers that index, and of other child processes with a thread each.

Invariants:
1. Every task given to a worker ends: with its answer, its error, or the way the process ended.
2. A worker reads no store: threads of the node read for it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from msgspec import Struct, field

from dataplane.base.machine import OwnTime, kill_count_for_memory
from dataplane.base.trace import Trace
from dataplane.index.run import StoredShard
from dataplane.model.errors import ClosedError, DataplaneError, PeerLost
from dataplane.rpc import local, tasks
from dataplane.worker.death import WORDS_BYTES_MAX, Cause, ProcessEnd, end_of
from dataplane.worker.forking import fork_server
from dataplane.worker.indexing import PART_BYTES

_LOOK_S = 0.25

_trace = Trace("node")

T = TypeVar("T")
Order = tasks.IndexShard | tasks.CountRows


class Child:
    """A process of this role, our end of its socket, and the thread that receives its messages. In
    this thread, `hear` is called with each message, and `lost` once, with the exit status of the
    process, its last words, and whether it was started.
    """

    def __init__(
        self,
        role: str,
        memory_bytes: int,
        envelope: type[T],
        hear: Callable[[T], None],
        lost: Callable[[int, str, bool], None],
    ) -> None:
        self._envelope, self._hear, self._lost = envelope, hear, lost
        self._sock, theirs = local.pair()
        self._stderr = os.memfd_create(f"dataplane-{role}", os.MFD_CLOEXEC)
        try:
            with theirs:
                self._process = fork_server.start(role, theirs, self._stderr, memory_bytes)
        except BaseException:
            self._sock.close()
            os.close(self._stderr)
            raise
        self._receiver = threading.Thread(target=self._receive, name=f"dataplane-{role}")
        self._receiver.start()

    @property
    def pid(self) -> int:
        """The process id, once it is known."""
        return self._process.pid

    def send(self, value: object, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message. If the process is gone, `lost` reports it."""
        with contextlib.suppress(PeerLost):
            local.send(self._sock, value, descriptors)

    def send_now(self, value: object) -> None:
        """Send a message, unless the process is gone or reads none of its messages."""
        poll = select.poll()
        with contextlib.suppress(OSError, ValueError, PeerLost):  # raised if the socket is closed
            poll.register(self._sock, select.POLLOUT)
            if poll.poll(0):
                local.send(self._sock, value)

    def begin_end(self) -> None:
        """Kill the process without waiting for its end. May be called twice."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._process.kill()

    def kill(self) -> None:
        """Kill the process and wait until `lost` was called. May be called twice."""
        self.begin_end()
        self._receiver.join()

    def _receive(self) -> None:
        # Stop receiving when the process is gone, or has sent an invalid message.
        with contextlib.suppress(DataplaneError):
            while True:
                said, descriptors = local.receive(self._sock, self._envelope)
                for fd in descriptors:
                    os.close(fd)
                self._hear(said)
        self._process.kill()
        status = self._process.status()
        words = os.pread(self._stderr, WORDS_BYTES_MAX, 0).decode(errors="replace")
        os.close(self._stderr)
        self._lost(status, words, bool(self._process.pid))
        self._sock.close()


class IndexerEnded(Exception):
    """The worker has ended before it answered about its shard."""

    def __init__(self, end: ProcessEnd) -> None:
        super().__init__(end.words)
        self.end = end


class _Task(Struct, eq=False):
    """One shard, or a batch, in a process, until `stop`. `reads` counts the task's reads in flight;
    `failure` is the error of a read.
    """

    stop: threading.Event
    arrived: queue.SimpleQueue[tasks.ResultBody | None] = field(default_factory=queue.SimpleQueue)
    reads: int = 0
    failure: BaseException | None = None
    pieces: Iterator[bytes] | None = None
    index: bytes = b""


class IndexerProcess:
    """One process that indexes shards, and its tasks. Thread-safe."""

    def __init__(self, memory_bytes: int, reads: ThreadPoolExecutor) -> None:
        self.users = 0
        self.has_ended = False
        self._reads = reads
        self._tasks: dict[int, _Task] = {}
        self._numbers = itertools.count(1)
        self._changing = threading.Lock()
        self._kill_count = kill_count_for_memory()
        self._end: ProcessEnd | None = None
        self._child = Child("worker", memory_bytes, tasks.Result, self._hear, self._lost)

    def answer(
        self, order: Order, shard: StoredShard, ends: list[ProcessEnd], timeout_s: float
    ) -> bytes:
        """Return the process's answer about a shard.

        Raises:  IndexerEnded: the process ended without an answer; the reason is added to `ends`.
        """
        task = _Task(shard.stop)
        try:
            with self._task(task) as number:
                self._child.send(tasks.Task(order, number))
                return self._answered(number, task, shard, timeout_s)
        except IndexerEnded as ended:
            ends.append(ended.end)
            raise

    def batch(
        self,
        order: tasks.IndexBatch,
        read: Callable[[tasks.MissingParts], tasks.BatchParts],
        stop: threading.Event,
        timeout_s: float,
    ) -> tasks.BatchIndexed:
        """Return the process's answer about a batch; `read` reads the parts that the process
        requests.

        Raises:  IndexerEnded: the process ended without an answer.  ClosedError: `stop` is set.
        """
        task = _Task(stop)
        with self._task(task) as number:
            self._child.send(tasks.Task(order, number))
            while not isinstance(body := self._next(task, timeout_s), tasks.BatchIndexed):
                if not isinstance(body, tasks.MissingParts):
                    raise self._ended(ProcessEnd(Cause.CRASHED, f"sent {type(body).__name__}"))
                self._child.send(tasks.Task(read(body), number))
            return body

    def begin_end(self) -> None:
        """Kill the process without waiting for its end. May be called twice."""
        self._child.begin_end()

    def kill(self) -> None:
        """Kill the process, and fail all calls that wait for it. May be called twice."""
        self._child.kill()

    @contextlib.contextmanager
    def _task(self, task: _Task) -> Iterator[int]:
        """Yield the number of a new task."""
        number = next(self._numbers)
        with self._changing:
            self._tasks[number] = task
            if self.has_ended:
                task.arrived.put(None)
        try:
            yield number
        finally:
            with self._changing:
                del self._tasks[number]

    def _answered(self, number: int, task: _Task, shard: StoredShard, timeout_s: float) -> bytes:
        while True:
            body = self._next(task, timeout_s)
            if isinstance(body, tasks.ReadShard):
                with self._changing:
                    task.reads += 1
                self._reads.submit(self._read, number, task, shard, body)
            elif isinstance(body, DataplaneError):
                raise task.failure or body
            elif isinstance(body, tasks.ShardIndexed):
                task.index += body.index
                if not body.more:
                    return task.index

    def _next(self, task: _Task, timeout_s: float) -> tasks.ResultBody:
        own: OwnTime | None = None
        while True:
            try:
                body = task.arrived.get(timeout=_LOOK_S)
            except queue.Empty:
                if task.stop.is_set():
                    raise ClosedError("indexing was stopped") from None
                now = time.monotonic()
                if own is None or task.reads:
                    own = OwnTime(self._child.pid, now)
                elif own.exceeds(timeout_s, now):
                    words = f"did not end within {timeout_s:g} s of its own time"
                    raise self._ended(ProcessEnd(Cause.STUCK, words)) from None
                continue
            if body is None:
                raise self._ended(None)
            if isinstance(body, tasks.OutOfMemory):
                raise self._ended(ProcessEnd(Cause.OUT_OF_MEMORY, "reached its memory limit"))
            return body

    def _read(self, number: int, task: _Task, shard: StoredShard, asked: tasks.ReadShard) -> None:
        """Read for a shard, and send the bytes; runs in a thread of the node."""
        try:
            answer = _bytes_for(task, shard, asked)
        except BaseException as error:  # noqa: BLE001 - raised where the shard waits, even a panic
            task.failure = error
            answer = tasks.ShardBytes(asked.request, has_failed=True)
        with self._changing:
            task.reads -= 1
        self._child.send(tasks.Task(answer, number))

    def _hear(self, said: tasks.Result) -> None:
        task = self._tasks.get(said.number)
        if task is not None:
            task.arrived.put(said.body)

    def _lost(self, status: int, words: str, has_started: bool) -> None:
        is_machine_short = kill_count_for_memory() > self._kill_count
        end = end_of(status, words, is_machine_short=is_machine_short, has_started=has_started)
        with self._changing:
            self._end = end
            self.has_ended = True
            for task in self._tasks.values():
                task.arrived.put(None)

    def _ended(self, end: ProcessEnd | None) -> IndexerEnded:
        """Return the error for the end of the process. The reason is `end`, or else the exit
        status.
        """
        self.kill()
        end = end or self._end
        assert end is not None
        _trace.failed("a worker that indexes ended", pid=self._child.pid, how=end.words)
        return IndexerEnded(end)


def _bytes_for(task: _Task, shard: StoredShard, asked: tasks.ReadShard) -> tasks.ShardBytes:
    place = asked.place
    if place is not None:
        content = bytes(memoryview(shard.read(place.offset, place.length)))
        return tasks.ShardBytes(asked.request, content)
    if task.pieces is None:
        task.pieces = _parts(shard)
    piece = next(task.pieces, None)
    return tasks.ShardBytes(asked.request, piece or b"", is_end=piece is None)


def _parts(shard: StoredShard) -> Iterator[bytes]:
    """Yield the whole shard, in pieces that fit into a message."""
    for piece in shard.stream():
        view = memoryview(piece).cast("B")
        for at in range(0, len(view), PART_BYTES):
            yield bytes(view[at : at + PART_BYTES])
