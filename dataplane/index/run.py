"""Indexes the shards of one listing, several at a time, and makes the manifest of their indexes.

1. The manifest depends only on the listing, never on the order in which shards were indexed.
2. The dataset's schema is that of the first shard that has one.
3. Each index is remembered before progress is told (see journal.py).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from typing import Protocol, TypeVar

import pyarrow as pa
from msgspec import Struct
from msgspec.structs import replace
from typing_extensions import Buffer

from dataplane.errors import ClosedError, DatasetChangedError, ShardNotFound
from dataplane.formats.base import Block, Format, ShardIndex
from dataplane.formats.inferred import is_inferred
from dataplane.formats.nulls import aligned, node_count
from dataplane.formats.source import read_in_threads
from dataplane.index.journal import IndexJournal
from dataplane.index.one_schema import check_same
from dataplane.model import ObjectInfo, Region
from dataplane.plan.manifest import Manifest
from dataplane.plan.null_counts import NEVER
from dataplane.plan.shard import IndexedShard
from dataplane.store.base import Store
from dataplane.store.urls import scheme_of

T = TypeVar("T")
Connect = Callable[[str], Store]
IndexShard = Callable[[Format, "StoredShard"], ShardIndex]
BeginBatches = Callable[[Format, Sequence[ObjectInfo]], "ShardBatches | None"]
"""Begins to index these shards in batches; None if they are to be indexed one by one."""
Progress = Callable[["IndexProgress"], None]
_Single = tuple[int, "Future[ShardIndex]"]


class IndexProgress(Struct, frozen=True):
    """How far indexing has come."""

    shard_count: int
    shards_done: int
    bytes_done: int
    bytes_total: int


class StoredShard(Struct, frozen=True):
    """One listed object as formats read it. Once `stop` is set, reading raises ClosedError."""

    listed: ObjectInfo
    store: Store
    stop: threading.Event

    @property
    def url(self) -> str:
        return self.listed.url

    @property
    def size_bytes(self) -> int:
        return self.listed.size_bytes

    def read(self, offset: int, length: int) -> Buffer:
        """As `ShardReader.read`, pinned to the etag that was listed."""
        self._check()
        if length == 0:
            return b""
        return self.store.read(self.url, offset, length, self.listed.etag)

    def read_all(self, places: Sequence[Region]) -> list[Buffer]:
        """As `ShardReader.read_all`, pinned to the etag that was listed."""
        return read_in_threads(self, places)

    def stream(self) -> Iterator[Buffer]:
        """As `ShardReader.stream`, pinned to the etag that was listed."""
        for piece in self.store.stream(self.url, self.listed.etag):
            self._check()
            yield piece

    def _check(self) -> None:
        if self.stop.is_set():
            raise ClosedError("indexing was stopped")


class BatchEnd(Struct, frozen=True):
    """What has become of some shards: the indexes of those that are not left out."""

    shards: Sequence[int]
    indexes: Mapping[int, ShardIndex]


class ShardBatches(Protocol):
    """Indexes many shards at once, and may leave out any of them."""

    @property
    def shards_at_once(self) -> int: ...

    @property
    def has_room(self) -> bool:
        """Whether a batch can be sent now."""

    @property
    def is_over(self) -> bool:
        """Whether there will never be room again."""

    def send(
        self,
        shards: Sequence[int],
        listed: Sequence[ObjectInfo],
        tell: Callable[[BatchEnd], None],
    ) -> None:
        """Index these, and tell their end, once; perhaps from a thread."""

    def close(self) -> None:
        """End all of them."""


class IndexRun:
    """One indexing of one listing."""

    def __init__(
        self,
        chosen: Format,
        listed: Sequence[ObjectInfo],
        progress: Progress | None,
        connect: Connect,
        index_shard: IndexShard,
        begin_batches: BeginBatches | None = None,
    ) -> None:
        self._format = chosen
        self._begin_batches = begin_batches
        self._index_shard = index_shard
        self._listed = listed
        self._progress = progress
        self._connect = connect
        self._stop = threading.Event()
        self._reference: tuple[str, pa.Schema] | None = None
        self._done: dict[int, ShardIndex] = {}
        self._early: dict[int, ShardIndex] = {}
        self._bytes_done = 0
        self._bytes_total = sum(shard.size_bytes for shard in listed)

    def indexed(
        self,
        workers: int,
        remembered: dict[str, ShardIndex],
        keys: Sequence[str],
        journal: IndexJournal | None,
    ) -> list[ShardIndex]:
        """Every shard's index, in the order of the shards."""
        self._report()
        for shard, key in enumerate(keys):
            if key in remembered:
                self._arrived(shard, remembered[key])
        todo = [shard for shard, key in enumerate(keys) if key not in remembered]
        self._in_parallel(workers, todo, keys, journal)
        return [self._done[shard] for shard in range(len(keys))]

    def manifest(self, names: Sequence[str], indexes: Sequence[ShardIndex]) -> Manifest:
        """The manifest of the listing."""
        schema = pa.schema([]) if self._reference is None else self._reference[1]
        nodes = node_count(schema)
        shards = [
            IndexedShard(
                shard, _in_order_of(schema, index), index.preamble, index.zero_copy,
                _nulls_as(schema, nodes, index),
            )
            for shard, index in zip(self._listed, indexes, strict=True)
        ]  # fmt: skip
        return Manifest.build(names, self._format.name, schema.serialize().to_pybytes(), shards)

    def _in_parallel(
        self, workers: int, todo: Sequence[int], keys: Sequence[str], journal: IndexJournal | None
    ) -> None:
        batches = None
        if self._begin_batches is not None:
            batches = self._begin_batches(self._format, [self._listed[shard] for shard in todo])
        work = _Work(self._listed, todo, workers, self._index, batches)
        try:
            while work.begin():
                for shard, found in work.ended():
                    index = found.result() if isinstance(found, Future) else found
                    self._accept_new(shard, keys[shard], index, journal)
        finally:
            self._stop.set()
            work.close()

    def _index(self, shard: int) -> ShardIndex:
        listed = self._listed[shard]
        stored = StoredShard(listed, self._connect(listed.url), self._stop)
        try:
            return self._index_shard(self._format, stored)
        except (ShardNotFound, DatasetChangedError) as error:
            raise _unlike_listed(error, listed.url) from error

    def _accept_new(
        self, shard: int, key: str, index: ShardIndex, journal: IndexJournal | None
    ) -> None:
        if journal is not None:
            journal.remember(key, index)
        self._arrived(shard, index)

    def _arrived(self, shard: int, index: ShardIndex) -> None:
        """Accept it once the first shard is indexed, since all schemas are compared with that
        one.
        """
        self._early[shard] = index
        if 0 in self._early or 0 in self._done:
            for each in sorted(self._early):
                self._accept(each, self._early.pop(each))

    def _accept(self, shard: int, index: ShardIndex) -> None:
        url = self._listed[shard].url
        # Without a sample, no schema could be inferred.
        if len(index.schema) or not is_inferred(index.schema):
            if self._reference is None:
                self._reference = (url, index.schema)
            check_same(index.schema, url, self._reference[1], self._reference[0])
        self._done[shard] = index
        self._bytes_done += self._listed[shard].size_bytes
        self._report()

    def _report(self) -> None:
        if self._progress is not None:
            shards, done = len(self._listed), len(self._done)
            self._progress(IndexProgress(shards, done, self._bytes_done, self._bytes_total))


class _Work:
    """What of a run is to be done, and under way: single shards in threads, others in batches."""

    def __init__(
        self,
        listed: Sequence[ObjectInfo],
        todo: Sequence[int],
        workers: int,
        index: Callable[[int], ShardIndex],
        batches: ShardBatches | None,
    ) -> None:
        self._listed, self._index, self._batches = listed, index, batches
        self._waiting = deque(todo)
        self._left_out: deque[int] = deque()
        self._ended: queue.SimpleQueue[_Single | BatchEnd] = queue.SimpleQueue()
        self._singles_max = 2 * max(1, workers)
        self._pool = ThreadPoolExecutor(max(1, workers), thread_name_prefix="dataplane-index")
        self._singles = self._in_batches = 0

    def begin(self) -> bool:
        """Begin what there is room for; False if all is done."""
        if self._batches is not None:
            self._begin_batches(self._batches)
        is_batched = self._batches is not None and not self._batches.is_over
        while self._singles < self._singles_max:
            if self._left_out:
                shard = self._left_out.popleft()
            elif self._waiting and not (is_batched and self._in_batches):
                shard = self._waiting.popleft()
            else:
                break
            self._pool.submit(self._index, shard).add_done_callback(partial(self._put, shard))
            self._singles += 1
        return bool(self._singles or self._in_batches)

    def ended(self) -> list[tuple[int, Future[ShardIndex] | ShardIndex]]:
        """What has ended since, in the order of the shards: if several fail at once, the error of
        the first one is raised. Waits.
        """
        found: list[tuple[int, Future[ShardIndex] | ShardIndex]] = []
        for end in _all_of(self._ended):
            if isinstance(end, BatchEnd):
                self._in_batches -= 1
                found.extend(end.indexes.items())
                self._left_out.extend(each for each in end.shards if each not in end.indexes)
            else:
                self._singles -= 1
                found.append(end)
        return sorted(found, key=itemgetter(0))

    def close(self) -> None:
        """End what is under way."""
        if self._batches is not None:
            self._batches.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _begin_batches(self, batches: ShardBatches) -> None:
        """None while single shards wait: either they are slow, or a store does not answer."""
        while self._waiting and len(self._left_out) < self._singles_max and batches.has_room:
            count = min(batches.shards_at_once, len(self._waiting))
            shards = [self._waiting.popleft() for _ in range(count)]
            self._in_batches += 1
            batches.send(shards, [self._listed[shard] for shard in shards], self._ended.put)

    def _put(self, shard: int, future: Future[ShardIndex]) -> None:
        self._ended.put((shard, future))


def _unlike_listed(
    error: ShardNotFound | DatasetChangedError, url: str
) -> ShardNotFound | DatasetChangedError:
    """The error for an object that is not what a list said of it. In a bucket that may never
    change: obstore lists keys without the slashes at their start and end.
    """
    if scheme_of(url) in ("file", "http", "https"):
        return error
    advice = (
        "If you get this error again when you index again, the bucket may have an object whose key "
        "is this one with a slash before or after it, which cannot be read: move that object to "
        "another name"
    )
    return type(error)(f"{error}. {advice}", **error.nouns)


def _all_of(waiting: queue.SimpleQueue[T]) -> Iterator[T]:
    """All that is there; waits for the first one."""
    yield waiting.get()
    with contextlib.suppress(queue.Empty):
        while True:
            yield waiting.get_nowait()


def _in_order_of(schema: pa.Schema, index: ShardIndex) -> Sequence[Block]:
    """A shard's blocks, their columns in the order of the dataset's schema, not of the shard's."""
    if index.schema is schema or index.schema.names == schema.names:
        return index.blocks
    places = [3 * index.schema.get_field_index(name) for name in schema.names]
    return [
        replace(
            block,
            columns=[at for place in places for at in block.columns[place : place + 3]],
        )
        for block in index.blocks
    ]


def _nulls_as(schema: pa.Schema, nodes: int, index: ShardIndex) -> Sequence[int]:
    """A shard's null counts in terms of the dataset's schema, which has so many field nodes."""
    rows = sum(block.rows for block in index.blocks)
    if not rows:
        return array("q", [NEVER]) * nodes
    found = index.nulls
    if found and index.schema is not schema and not index.schema.equals(schema):
        found = aligned(schema, index.schema, found, rows)
    return found if len(found) == nodes else ()
