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
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Self, TypeVar

import numpy as np
from msgspec.structs import replace
from typing_extensions import Buffer

from dataplane.config import NodeConfig
from dataplane.errors import StoreError
from dataplane.formats.base import Format, ShardIndex
from dataplane.index.found import FoundDataset
from dataplane.index.indexer_process import IndexerEnded, IndexerProcess, Order
from dataplane.index.indexing import open_dataset
from dataplane.index.journal import decode_index
from dataplane.index.run import Connect, StoredShard
from dataplane.model import ObjectInfo, Region
from dataplane.plan.manifest import Int64, Manifest
from dataplane.rpc import messages, tasks
from dataplane.store.urls import local_path
from dataplane.worker.death import ProcessEnd, WorkerPlace, blame
from dataplane.worker.forking import fork_server
from dataplane.worker.limits import WorkerBytes

_PROCESSES_MAX = 4
_TASKS_BEFORE_NEXT = 2
"""Number of shards in each process before another one is started."""
# Indexing a shard is mostly waiting for a few round trips.
_INDEXED_AT_ONCE = 64
_READS_AT_ONCE = 64

Answer = TypeVar("Answer")
KeepPreamble = Callable[[str, str, Region, bytes], None]
"""Gets the url, etag, place and bytes of a shard's preamble. Called in threads."""
_Part = tuple[int, "Future[Buffer]"]
"""Where bytes of a shard start, and the bytes."""


def _keep_nothing(_url: str, _etag: str, _place: Region, _content: bytes) -> None: ...


class IndexProcesses:
    """The processes of one run. Thread-safe. Use as a context: at its end they are killed."""

    def __init__(
        self,
        memory: WorkerBytes,
        task_timeout_s: float,
        process_count: int,
        keep: KeepPreamble = _keep_nothing,
    ) -> None:
        self._memory, self._task_timeout_s, self._keep = memory, task_timeout_s, keep
        self._process_count = process_count
        self._reads = ThreadPoolExecutor(_READS_AT_ONCE, "dataplane-index-read")
        self._choosing, self._alone = threading.Lock(), threading.Lock()
        self._shared: list[IndexerProcess] = []
        self._holding, self._holds = threading.Lock(), False

    @classmethod
    def of(cls, config: NodeConfig, keep: KeepPreamble = _keep_nothing) -> Self:
        """With the limits of a node's workers."""
        return cls(
            WorkerBytes.of(config),
            config.task_timeout_s,
            min(len(os.sched_getaffinity(0)), _PROCESSES_MAX),
            keep,
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
        return _locally_first(shard, partial(self._index, format_, shard))

    def count(self, shard: StoredShard, order: tasks.CountRows, decoded_bytes: int) -> Int64:
        """How many rows the view has of each of these blocks. The largest of them decodes to this
        size.

        Shapes:  result: int64[blocks].
        Raises:  as `index`.  ConfigError: a condition cannot be evaluated.
        """

        def counted(*, is_local: bool) -> bytes:
            asked, doing = replace(order, is_local=is_local), "counting its rows"
            return self._answer(lambda: asked, shard, doing, decoded_bytes)

        return np.frombuffer(_locally_first(shard, counted), "<i8").astype(np.int64)

    def _index(self, format_: Format, shard: StoredShard, *, is_local: bool) -> ShardIndex:
        parts = [] if is_local else self._first_parts(format_, shard)

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

    def _first_parts(self, format_: Format, shard: StoredShard) -> list[_Part]:
        """What the process would ask for first: reading it now, while the process starts, saves a
        round trip or two, and the messages.
        """
        first_reads = getattr(format_, "first_reads", None)
        places: tuple[Region, ...] = () if first_reads is None else first_reads(shard.size_bytes)
        return [
            (place.offset, self._reads.submit(shard.read, place.offset, place.length))
            for place in places
        ]

    def _kept(self, listed: ObjectInfo, parts: Sequence[_Part], index: ShardIndex) -> ShardIndex:
        """The index. The preamble is handed on if it came with the first parts."""
        place = index.preamble
        for offset, part in parts if place.length else ():
            at, content = place.offset - offset, memoryview(part.result())
            if 0 <= at <= len(content) - place.length:
                found = bytes(content[at : at + place.length])
                self._keep(listed.url, listed.etag, place, found)
                break
        return index

    @contextlib.contextmanager
    def _one_of_many(self) -> Iterator[IndexerProcess]:
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

    def _started(self, memory_bytes: int) -> IndexerProcess:
        with self._holding:
            if not self._holds:
                fork_server.acquire()
                self._holds = True
        return IndexerProcess(memory_bytes, self._reads)


def _locally_first(shard: StoredShard, asked: Callable[..., Answer]) -> Answer:
    """The answer of a process that reads a local file itself."""
    try:
        return asked(is_local=local_path(shard.url) is not None)
    except StoreError:
        if local_path(shard.url) is None:
            raise
    # The file server is unreachable: the node's own store handles the wait.
    return asked(is_local=False)


def open_manifest(
    config: NodeConfig,
    connect: Connect,
    source: messages.DatasetSource,
    keep: KeepPreamble = _keep_nothing,
    found: FoundDataset | None = None,
) -> Manifest:
    """Open a dataset for a node: shards that are not cached are indexed in processes, unless they
    were `found`. `keep` gets the preambles that were read for that.

    Raises:  as `open_dataset`.
    """
    with IndexProcesses.of(config, keep) as processes:
        return open_dataset(
            source.urls,
            format_name=source.format,
            cache_dir=config.cache_dir,
            workers=_INDEXED_AT_ONCE,
            connect=connect,
            index_shard=processes.index,
            found=found,
        )


def _order(
    format_: Format, listed: ObjectInfo, parts: Sequence[_Part], *, is_local: bool
) -> tasks.IndexShard:
    """Waits for the parts."""
    read = tuple(
        tasks.ShardPart(offset, bytes(memoryview(part.result()))) for offset, part in parts
    )
    name, url, size, etag = format_.name, listed.url, listed.size_bytes, listed.etag
    return tasks.IndexShard(name, url, size, etag, is_local=is_local, parts=read)
