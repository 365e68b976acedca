"""Index shards in workers, so that no shard can harm the node.

Invariants:
1. No byte of a shard is parsed in the node. The node's store reads single shards, so that retries,
   outages and credentials stay in one place; the worker reads local files itself.
2. Every process has a memory limit. If one crashes or runs out of memory, any of its shards may be
   the cause. Each of them then gets a process of its own, one at a time, and if that fails too, the
   shard is blamed.
3. A shard without progress for a while is stuck. Time spent reading from a store does not count,
   since stores have their own deadlines.
4. Processes are started when a shard must be indexed, and end with the run.
5. Long lists of remote shards are indexed in batches (batches.py). Shards that a batch leaves out,
   for any reason, are indexed here, so that errors, retries and blame are those of one shard.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Self, TypeVar

import numpy as np
from msgspec.structs import replace
from typing_extensions import Buffer

from dataplane.base.machine import this_machine
from dataplane.formats.base import Format, ShardIndex
from dataplane.formats.index_frames import decode_index
from dataplane.index.batches import IndexBatches, KeepPreamble
from dataplane.index.indexer_process import IndexerEnded, IndexerProcess, Order
from dataplane.index.run import StoredShard
from dataplane.model.config import NodeConfig
from dataplane.model.errors import StoreError
from dataplane.model.records import ObjectInfo
from dataplane.plan.manifest import Int64
from dataplane.rpc import fetches, tasks
from dataplane.store.outage import Pauses
from dataplane.store.urls import local_path, prefixes_of
from dataplane.worker.death import ProcessEnd, WorkerBytes, WorkerPlace, blame
from dataplane.worker.forking import fork_server
from dataplane.worker.indexing import first_reads

_PROCESSES_MAX = 4
_TASKS_BEFORE_NEXT = 2
"""Number of shards in each process before another one is started."""
_READS_AT_ONCE = 64

# Indexing fewer shards in batches is not worth starting more processes.
_BATCHED_MIN = 256
_FETCHERS_MAX = 4
_FETCHER_BUDGET_S = 5.0
"""The time that a fetcher has for reading a shard. It leaves out slower shards: the node then reads
these, and reports that it waits for a store."""

Answer = TypeVar("Answer")
_FirstParts = list[tuple[int, "Future[Buffer]"]]
"""Where bytes of a shard start, and the bytes."""


class IndexProcesses:
    """The processes of one run. Thread-safe. Use as a context, whose end kills the processes.
    `keep` gets the preambles that are read. `reading` says how processes reach stores, if they may;
    `pauses` are the stores' pauses, which processes keep and report.
    """

    def __init__(
        self,
        memory: WorkerBytes,
        task_timeout_s: float,
        process_count: int,
        keep: KeepPreamble | None = None,
        reading: fetches.StartFetching | None = None,
        pauses: Pauses | None = None,
    ) -> None:
        self._memory, self._task_timeout_s, self._keep = memory, task_timeout_s, keep
        self._process_count, self._reading = process_count, reading
        self._pauses = pauses or Pauses()
        self._reads = ThreadPoolExecutor(_READS_AT_ONCE, "dataplane-index-read")
        self._choosing, self._alone = threading.Lock(), threading.Lock()
        self._shared: list[IndexerProcess] = []
        self._holding, self._holds = threading.Lock(), False

    @classmethod
    def of(
        cls,
        config: NodeConfig,
        keep: KeepPreamble | None = None,
        pauses: Pauses | None = None,
        *,
        is_policed: bool = False,
    ) -> Self:
        """Make processes with the limits of a node's workers, and its policy if they work for a
        node.
        """
        return cls(
            WorkerBytes.of(config),
            config.task_timeout_s,
            min(this_machine().cpu_count, _PROCESSES_MAX),
            keep,
            fetches.StartFetching(
                tuple(b"%s=%s" % entry for entry in os.environb.items()),
                _FETCHER_BUDGET_S,
                config.fetch_timeout_s,
                is_policed=is_policed,
                allowed_urls=prefixes_of(config.allowed_urls) if is_policed else (),
            ),
            pauses,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._shared:
            process.begin_end()
        for process in self._shared:
            process.kill()
        self._reads.shutdown(wait=True, cancel_futures=True)
        if self._holds:
            fork_server.release()

    def index(self, format_: Format, shard: StoredShard) -> ShardIndex:
        """Implement `Format.index`.

        Raises:  as `Format.index` and the shard's reads.  BudgetTooSmall: the shard takes too much
        memory.  CorruptShard: the shard crashes the process.  DataStallError: the shard is stuck.
        """
        return _locally_first(shard, partial(self._index, format_, shard))

    def begin_batches(self, format_: Format, listed: Sequence[ObjectInfo]) -> IndexBatches | None:
        """Implement `BeginBatches`, for many shards in a store, of a format with `first_reads`."""
        reading, is_able = self._reading, hasattr(format_, "first_reads")
        if reading is None or not is_able or len(listed) < _BATCHED_MIN:
            return None
        if local_path(listed[0].url) is not None:
            return None
        self._hold_fork_server()
        return IndexBatches(
            format_,
            len(listed),
            reading,
            self._one_of_many,
            self._task_timeout_s,
            min(max(1, this_machine().cpu_count // 2), _FETCHERS_MAX),
            self._keep,
            self._pauses,
        )

    def count(self, shard: StoredShard, order: tasks.CountRows, decoded_bytes: int) -> Int64:
        """Count the rows of each of these blocks that belong to the view. The largest block decodes
        to `decoded_bytes`.

        Shapes:  result: int64[blocks].
        Raises:  as `index`.  ConfigError: a condition cannot be evaluated.
        """

        def counted(*, is_local: bool) -> bytes:
            asked, doing = replace(order, is_local=is_local), "counting its rows"
            return self._answer(lambda: asked, shard, doing, decoded_bytes)

        return np.frombuffer(_locally_first(shard, counted), "<i8").astype(np.int64)

    def _index(self, format_: Format, shard: StoredShard, *, is_local: bool) -> ShardIndex:
        # Start reading the first parts now, while the worker starts: this saves one or two round
        # trips.
        places = () if is_local else first_reads(format_, shard.size_bytes)
        parts = [
            (place.offset, self._reads.submit(shard.read, place.offset, place.length))
            for place in places
        ]

        def order() -> tasks.IndexShard:
            return _order(format_, shard.listed, parts, is_local=is_local)

        answer = self._answer(order, shard, "indexing it", shard.size_bytes)
        return self._kept(shard.listed, parts, decode_index(answer))

    def _answer(
        self, order: Callable[[], Order], shard: StoredShard, doing: str, size_bytes: int
    ) -> bytes:
        ends: list[ProcessEnd] = []
        with contextlib.suppress(IndexerEnded), self._one_of_many() as process:
            return process.answer(order(), shard, ends, self._task_timeout_s)
        with self._alone:
            limit_bytes = self._memory.for_blocks_of(size_bytes)
            process = self._started(limit_bytes)
            try:
                return process.answer(order(), shard, ends, self._task_timeout_s)
            except IndexerEnded:
                raise blame(doing, WorkerPlace(shard.url), ends, limit_bytes) from None
            finally:
                process.kill()

    def _kept(self, listed: ObjectInfo, parts: _FirstParts, index: ShardIndex) -> ShardIndex:
        """Return the index. The preamble is passed to `keep` if it came with the first parts."""
        place = index.preamble
        if self._keep is None or not place.length:
            return index
        for offset, part in parts:
            at, content = place.offset - offset, memoryview(part.result())
            if 0 <= at <= len(content) - place.length:
                self._keep(listed.url, listed.etag, place, bytes(content[at : at + place.length]))
                break
        return index

    @contextlib.contextmanager
    def _one_of_many(self) -> Iterator[IndexerProcess]:
        """Yield the process with the fewest shards, or a new process if all have enough shards."""
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

    def _started(self, memory_bytes: int) -> IndexerProcess:
        self._hold_fork_server()
        return IndexerProcess(memory_bytes, self._reads)

    def _hold_fork_server(self) -> None:
        with self._holding:
            if not self._holds:
                fork_server.acquire()
                self._holds = True


def _locally_first(shard: StoredShard, asked: Callable[..., Answer]) -> Answer:
    """Return the answer of a process that reads a local file itself. If the process cannot read
    the file, the node reads for it.
    """
    try:
        return asked(is_local=local_path(shard.url) is not None)
    except StoreError:
        if local_path(shard.url) is None:
            raise
    # The file server is unreachable: let the node's own store read, which waits for it.
    return asked(is_local=False)


def _order(
    format_: Format, listed: ObjectInfo, parts: _FirstParts, *, is_local: bool
) -> tasks.IndexShard:
    """Build the order for a process; waits for the parts."""
    read = tuple(
        tasks.ShardPart(offset, bytes(memoryview(part.result()))) for offset, part in parts
    )
    name, url, size, etag = format_.name, listed.url, listed.size_bytes, listed.etag
    return tasks.IndexShard(name, url, size, etag, is_local=is_local, parts=read)
