"""Indexes shards in separate processes, so that no shard can harm the node.

Invariants:
1. No byte of a shard is parsed in the node. Its store reads them, so that retries, outages and
   credentials stay in one place; the indexing process reads local files itself.
2. Every process has a memory limit. If one crashes or runs out of memory, any of its shards may be
   the cause: each then gets a process of its own, one at a time, and if that fails too, the shard
   is blamed.
3. A shard without progress for a while is stuck; time spent reading from a store does not count,
   since stores have their own deadlines.
4. Processes are started when a shard must be indexed, and end with the run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from msgspec import Struct, field

from dataplane.config import NodeConfig
from dataplane.errors import ClosedError, DataplaneError, PeerLost, StoreError
from dataplane.formats.base import Format, ShardIndex
from dataplane.index.indexer import PART_BYTES
from dataplane.index.indexing import Connect, StoredShard, open_dataset
from dataplane.index.journal import decode_index
from dataplane.machine import OwnTime, kill_count_for_memory
from dataplane.model import Region
from dataplane.plan.manifest import Manifest
from dataplane.rpc import local, messages, tasks
from dataplane.store.urls import local_path
from dataplane.trace import Trace
from dataplane.worker.death import Cause, ProcessEnd, WorkerPlace, blame, end_of
from dataplane.worker.forking import fork_server
from dataplane.worker.limits import WorkerBytes
from dataplane.worker.process import WORDS_BYTES_MAX

_PROCESSES_MAX = 4
_TASKS_BEFORE_NEXT = 2
"""Number of shards in each process before another one is started."""
# Indexing a shard is mostly waiting for a few round trips.
_INDEXED_AT_ONCE = 64
_READS_AT_ONCE = 64
_LOOK_S = 0.25
_END_S = 5.0

_trace = Trace("node")


class _Ended(Exception):
    """The process that had the shard has ended."""

    def __init__(self, end: ProcessEnd) -> None:
        super().__init__(end.words)
        self.end = end


class _Task(Struct, eq=False):
    """One shard in a process. `reads` are its reads in flight; `failure` is the error of one of
    them.
    """

    shard: StoredShard
    arrived: queue.SimpleQueue[tasks.FromIndexerBody | None] = field(
        default_factory=queue.SimpleQueue
    )
    reads: int = 0
    failure: BaseException | None = None
    pieces: Iterator[bytes] | None = None
    index: bytes = b""


class IndexProcesses:
    """The processes of one run. Thread-safe. Use as a context: at its end they are killed."""

    def __init__(self, memory: WorkerBytes, task_timeout_s: float, process_count: int) -> None:
        self._memory, self._task_timeout_s = memory, task_timeout_s
        self._process_count = process_count
        self._reads = ThreadPoolExecutor(_READS_AT_ONCE, "dataplane-index-read")
        self._choosing, self._alone = threading.Lock(), threading.Lock()
        self._shared: list[_Process] = []
        self._holding, self._holds = threading.Lock(), False

    @classmethod
    def of(cls, config: NodeConfig) -> Self:
        """With the limits of a node's workers."""
        return cls(
            WorkerBytes.of(config),
            config.task_timeout_s,
            min(len(os.sched_getaffinity(0)), _PROCESSES_MAX),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._shared:
            process.kill()
        self._reads.shutdown(wait=True, cancel_futures=True)
        if self._holds:
            fork_server.release()

    def index(self, format_: Format, shard: StoredShard) -> ShardIndex:
        """As `Format.index`.

        Raises:  as `Format.index` and the shard's reads.  BudgetTooSmall: it takes too much memory.
        CorruptShard: it ends the process.  DataStallError: it is stuck.
        """
        try:
            return self._index(format_, shard, is_local=local_path(shard.url) is not None)
        except StoreError:
            if local_path(shard.url) is None:
                raise
        # The file server is unreachable: the node's own store handles the wait.
        return self._index(format_, shard, is_local=False)

    def _index(self, format_: Format, shard: StoredShard, *, is_local: bool) -> ShardIndex:
        listed = shard.listed
        order = tasks.IndexShard(
            format_.name,
            listed.url,
            listed.size_bytes,
            listed.etag,
            is_local=is_local,
            parts=() if is_local else self._first_parts(format_, shard),
        )
        ends: list[ProcessEnd] = []
        with contextlib.suppress(_Ended), self._one_of_many() as process:
            return process.index(order, shard, ends, self._task_timeout_s)
        with self._alone:
            limit_bytes = self._memory.for_blocks_of(listed.size_bytes)
            process = self._started(limit_bytes)
            try:
                return process.index(order, shard, ends, self._task_timeout_s)
            except _Ended:
                raise blame("indexing it", WorkerPlace(listed.url), ends, limit_bytes) from None
            finally:
                process.kill()

    def _first_parts(self, format_: Format, shard: StoredShard) -> tuple[tasks.ShardPart, ...]:
        """What the process would ask for first: reading it now saves a round trip or two, and the
        messages.
        """
        first_reads = getattr(format_, "first_reads", None)
        places: tuple[Region, ...] = () if first_reads is None else first_reads(shard.size_bytes)
        others = [
            self._reads.submit(shard.read, place.offset, place.length) for place in places[1:]
        ]
        read = [shard.read(place.offset, place.length) for place in places[:1]]
        read += [other.result() for other in others]
        return tuple(
            tasks.ShardPart(place.offset, bytes(memoryview(content)))
            for place, content in zip(places, read, strict=True)
        )

    @contextlib.contextmanager
    def _one_of_many(self) -> Iterator[_Process]:
        """The process with the fewest shards; a new one if all have enough."""
        with self._choosing:
            usable = [process for process in self._shared if not process.has_ended]
            process = min(usable, key=lambda one: one.users, default=None)
            if process is None or (
                process.users >= _TASKS_BEFORE_NEXT and len(usable) < self._process_count
            ):
                process = self._started(self._memory.base)
                self._shared.append(process)
            process.users += 1
        try:
            yield process
        finally:
            with self._choosing:
                process.users -= 1

    def _started(self, memory_bytes: int) -> _Process:
        with self._holding:
            if not self._holds:
                fork_server.acquire()
                self._holds = True
        return _Process(memory_bytes, self._reads)


class _Process:
    """One process, and the thread that receives its messages."""

    def __init__(self, memory_bytes: int, reads: ThreadPoolExecutor) -> None:
        self.users = 0
        self.has_ended = False
        self._reads = reads
        self._tasks: dict[int, _Task] = {}
        self._numbers = itertools.count(1)
        self._changing = threading.Lock()
        self._kill_count = kill_count_for_memory()
        self._end: ProcessEnd | None = None
        self._sock, theirs = local.pair()
        self._stderr = os.memfd_create("dataplane-indexer", os.MFD_CLOEXEC)
        try:
            with theirs:
                self._process = fork_server.start("indexer", theirs, self._stderr, memory_bytes)
        except BaseException:
            self._sock.close()
            os.close(self._stderr)
            raise
        self._receiver = threading.Thread(target=self._receive, name="dataplane-indexer")
        self._receiver.start()

    def index(
        self, order: tasks.IndexShard, shard: StoredShard, ends: list[ProcessEnd], timeout_s: float
    ) -> ShardIndex:
        """The process's answer for a shard.

        Raises:  _Ended: nothing; why is added to `ends`.
        """
        task, number = _Task(shard), next(self._numbers)
        with self._changing:
            self._tasks[number] = task
            if self.has_ended:
                task.arrived.put(None)
        try:
            with contextlib.suppress(PeerLost):  # its end is reported where answers are received
                local.send(self._sock, tasks.ToIndexer(number, order))
            return self._answered(number, task, timeout_s)
        except _Ended as ended:
            ends.append(ended.end)
            raise
        finally:
            with self._changing:
                del self._tasks[number]

    def kill(self) -> None:
        """Kill the process, and fail everything that waits for it. May be called twice."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._process.kill()
        self._receiver.join()

    def _answered(self, number: int, task: _Task, timeout_s: float) -> ShardIndex:
        while True:
            body = self._next(task, timeout_s)
            if isinstance(body, tasks.ReadShard):
                with self._changing:
                    task.reads += 1
                self._reads.submit(self._read, number, task, body)
            elif isinstance(body, tasks.OutOfMemory):
                raise self._ended(ProcessEnd(Cause.OUT_OF_MEMORY, "reached its memory limit"))
            elif isinstance(body, DataplaneError):
                raise task.failure or body
            elif isinstance(body, tasks.ShardIndexed):
                task.index += body.index
                if not body.more:
                    return decode_index(task.index)

    def _next(self, task: _Task, timeout_s: float) -> tasks.FromIndexerBody:
        own: OwnTime | None = None
        while True:
            try:
                body = task.arrived.get(timeout=_LOOK_S)
            except queue.Empty:
                if task.shard.stop.is_set():
                    raise ClosedError("indexing was stopped") from None
                now = time.monotonic()
                if own is None or task.reads:
                    own = OwnTime(self._process.pid, now)
                elif own.exceeds(timeout_s, now):
                    words = f"did not end within {timeout_s:g} s of its own time"
                    raise self._ended(ProcessEnd(Cause.STUCK, words)) from None
                continue
            if body is None:
                raise self._ended(None)
            return body

    def _read(self, number: int, task: _Task, asked: tasks.ReadShard) -> None:
        """In a thread of the node: read for a shard, and send the bytes."""
        try:
            answer = _bytes_for(task, asked)
        except BaseException as error:  # noqa: BLE001 - raised for the shard, also a panic
            task.failure = error
            answer = tasks.ShardBytes(asked.request, has_failed=True)
        with self._changing:
            task.reads -= 1
        with contextlib.suppress(PeerLost):
            local.send(self._sock, tasks.ToIndexer(number, answer))

    def _receive(self) -> None:
        with contextlib.suppress(DataplaneError):  # it is gone, or sent an invalid message
            while True:
                said, descriptors = local.receive(self._sock, tasks.FromIndexer)
                for fd in descriptors:
                    os.close(fd)
                task = self._tasks.get(said.task)
                if task is not None:
                    task.arrived.put(said.body)
        self._process.kill()
        status = self._process.status()
        words = os.pread(self._stderr, WORDS_BYTES_MAX, 0).decode(errors="replace")
        os.close(self._stderr)
        is_machine_short = kill_count_for_memory() > self._kill_count
        with self._changing:
            self._end = end_of(status, words, is_machine_short=is_machine_short)
            self.has_ended = True
            for task in self._tasks.values():
                task.arrived.put(None)
        self._sock.close()

    def _ended(self, end: ProcessEnd | None) -> _Ended:
        """The process has ended: `end` says why, or else its exit status."""
        self.kill()
        end = end or self._end
        assert end is not None
        _trace.failed("index process ended", pid=self._process.pid, how=end.words)
        return _Ended(end)


def open_manifest(config: NodeConfig, connect: Connect, source: messages.DatasetSource) -> Manifest:
    """Open a dataset for a node: shards that are not cached are indexed in processes.

    Raises:  as `open_dataset`.
    """
    with IndexProcesses.of(config) as processes:
        return open_dataset(
            source.urls,
            format_name=source.format,
            cache_dir=config.cache_dir,
            workers=_INDEXED_AT_ONCE,
            connect=connect,
            index_shard=processes.index,
        )


def _bytes_for(task: _Task, asked: tasks.ReadShard) -> tasks.ShardBytes:
    shard, place = task.shard, asked.place
    if place is not None:
        content = bytes(memoryview(shard.read(place.offset, place.length)))
        return tasks.ShardBytes(asked.request, content)
    if task.pieces is None:
        task.pieces = _parts(shard)
    piece = next(task.pieces, None)
    return tasks.ShardBytes(asked.request, piece or b"", is_end=piece is None)


def _parts(shard: StoredShard) -> Iterator[bytes]:
    """The whole shard, in pieces that fit into a message."""
    for piece in shard.stream():
        view = memoryview(piece).cast("B")
        for at in range(0, len(view), PART_BYTES):
            yield bytes(view[at : at + PART_BYTES])
