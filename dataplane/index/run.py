"""Index the shards of one listing, several at a time, and make the manifest of their indexes.

1. The manifest depends only on the listing, never on the order in which shards were indexed.
2. The dataset's schema follows from those of all shards (see shared_schema.py).
3. Each index is remembered before progress is reported (see journal.py).
4. A shard that cannot be indexed has no blocks in the manifest, and an etag that says why, if the
   caller leaves such shards out; but not if they are most of the dataset.
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
from typing import Protocol, Self, TypeVar

import numpy as np
import pyarrow as pa
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray
from typing_extensions import Buffer

from dataplane.formats.base import Block, Format, ShardIndex
from dataplane.formats.faults import MANY_MIN, MANY_SHARE, REASON_MAX, reason_of
from dataplane.formats.joint_types import is_inferred, same_type
from dataplane.formats.nulls import aligned, alignment, node_count
from dataplane.formats.source import read_in_threads
from dataplane.index.journal import IndexJournal
from dataplane.index.shared_schema import SharedSchema
from dataplane.model.errors import ClosedError, CorruptShard, DatasetChangedError, ShardNotFound
from dataplane.model.records import ObjectInfo, Region
from dataplane.plan.columns import NEVER, UNKNOWN
from dataplane.plan.manifest import Manifest
from dataplane.plan.shards import LEFT_OUT, IndexedShard
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
    """The progress of indexing."""

    shard_count: int
    shards_done: int
    bytes_done: int
    bytes_total: int


class StoredShard(Struct, frozen=True):
    """One listed object, with the interface that formats read. Once `stop` is set, reading raises
    ClosedError.
    """

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
        """Implement `ShardReader.read`, pinned to the etag that was listed."""
        self._check()
        if length == 0:
            return b""
        return self.store.read(self.url, offset, length, self.listed.etag)

    def read_all(self, places: Sequence[Region]) -> list[Buffer]:
        """Implement `ShardReader.read_all`, pinned to the etag that was listed."""
        return read_in_threads(self, places)

    def stream(self) -> Iterator[Buffer]:
        """Implement `ShardReader.stream`, pinned to the etag that was listed."""
        for piece in self.store.stream(self.url, self.listed.etag):
            self._check()
            yield piece

    def _check(self) -> None:
        if self.stop.is_set():
            raise ClosedError("indexing was stopped")


class BatchEnd(Struct, frozen=True):
    """The result of a batch of shards: the indexes of those that are not left out."""

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
        """Whether no batch can be sent any more."""

    def send(
        self,
        shards: Sequence[int],
        listed: Sequence[ObjectInfo],
        tell: Callable[[BatchEnd], None],
    ) -> None:
        """Index these shards, and call `tell` once with the result, perhaps from a thread."""

    def close(self) -> None:
        """End all batches."""


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
        *,
        leaves_out: bool = False,
    ) -> None:
        self._leaves_out = leaves_out
        self.left_out: dict[int, CorruptShard] = {}
        """The shards that cannot be indexed."""
        self._format = chosen
        self._begin_batches = begin_batches
        self._index_shard = index_shard
        self._listed = listed
        self._progress = progress
        self._connect = connect
        self._stop = threading.Event()
        self._schemas = SharedSchema(lambda shard: listed[shard].url)
        self._done: dict[int, ShardIndex] = {}
        self._bytes_done = 0
        self._bytes_total = sum(shard.size_bytes for shard in listed)

    def indexed(
        self,
        workers: int,
        remembered: dict[str, ShardIndex],
        keys: Sequence[str],
        journal: IndexJournal | None,
    ) -> list[ShardIndex]:
        """Return every shard's index, in the order of the shards."""
        self._report()
        for shard, key in enumerate(keys):
            if key in remembered:
                self._arrived(shard, remembered[key])
        todo = [shard for shard, key in enumerate(keys) if key not in remembered]
        self._in_parallel(workers, todo, keys, journal)
        if len(self.left_out) == len(keys):
            raise next(iter(self.left_out.values()))
        return [self._done[shard] for shard in range(len(keys))]

    def manifest(self, names: Sequence[str], indexes: Sequence[ShardIndex]) -> Manifest:
        """Make the manifest of the listing."""
        schema = self._schemas.merged()
        shapes: dict[int, _Shape] = {}
        shards = []
        for number, (shard, index) in enumerate(zip(self._listed, indexes, strict=True)):
            if number in self.left_out:
                reason = reason_of(self.left_out[number], shard.url)
                shard = replace(shard, etag=f"{LEFT_OUT}{reason:.{REASON_MAX}}")  # noqa: PLW2901
            shape = shapes.get(id(index.schema))
            if shape is None:
                shape = shapes[id(index.schema)] = _Shape.of(schema, index.schema)
            shards.append(
                IndexedShard(
                    shard, shape.blocks(index), index.preamble,
                    index.zero_copy and shape.is_as_stored, shape.nulls(index),
                )
            )  # fmt: skip
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
                    try:
                        index = found.result() if isinstance(found, Future) else found
                    except CorruptShard as error:
                        self._leave_out(shard, error)
                    else:
                        if journal is not None:
                            journal.remember(keys[shard], index)
                        self._arrived(shard, index)
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

    def _leave_out(self, shard: int, error: CorruptShard) -> None:
        """Leave out a shard that cannot be indexed.   Raises:  CorruptShard: most shards cannot."""
        self.left_out[shard] = error
        bad, done = len(self.left_out), len(self._done) + 1
        if not self._leaves_out or bad > max(MANY_MIN, done // MANY_SHARE):
            raise error
        self._note_done(shard, ShardIndex(pa.schema([]), (), Region(0, 0), zero_copy=False))

    def _arrived(self, shard: int, index: ShardIndex) -> None:
        # Skip an inferred schema without columns: the shard has no sample to infer columns from.
        if len(index.schema) or not is_inferred(index.schema):
            has_rows = any(block.rows for block in index.blocks)
            schema = self._schemas.note(shard, index.schema, has_rows=has_rows)
            index = index if schema is index.schema else replace(index, schema=schema)
        self._note_done(shard, index)

    def _note_done(self, shard: int, index: ShardIndex) -> None:
        self._done[shard] = index
        self._bytes_done += self._listed[shard].size_bytes
        self._report()

    def _report(self) -> None:
        if self._progress is not None:
            shards, done = len(self._listed), len(self._done)
            self._progress(IndexProgress(shards, done, self._bytes_done, self._bytes_total))


class _Work:
    """The shards of a run that wait or are in progress: single ones in threads, others in
    batches.
    """

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
        """Begin as many shards as there is room for; return False if all are done."""
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
        """Wait, and return the results that have arrived, in the order of the shards: if several
        shards fail at once, the error of the first one is raised.
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
        """Stop everything in progress."""
        if self._batches is not None:
            self._batches.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _begin_batches(self, batches: ShardBatches) -> None:
        """Send batches, but none while many shards that batches left out wait: these are slow, or
        a store does not answer.
        """
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
    """Return the error for an object that differs from its listing. For buckets, add advice: since
    obstore lists keys without the slashes at their start and end, the difference may be permanent.
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
    """Wait for the first result, and yield all that are queued."""
    yield waiting.get()
    with contextlib.suppress(queue.Empty):
        while True:
            yield waiting.get_nowait()


class _Shape(Struct, frozen=True, eq=False):
    """A mapping from the columns of shards with one schema to the columns of the dataset.

    Shapes:  columns: int64[columns], the place of each in the shard, -1 if the shard lacks it, or
    None if all have the same place. nodes: int64[field nodes], as nulls.alignment; or None.
    """

    is_as_stored: bool
    own_node_count: int
    node_count: int
    columns: Sequence[int] | None
    nodes: NDArray[np.int64] | None

    @classmethod
    def of(cls, schema: pa.Schema, own: pa.Schema) -> Self:
        """Return the mapping for shards with their `own` schema."""
        names = schema.names
        places = None if own.names == names else [own.get_field_index(name) for name in names]
        is_equal = own.equals(schema)
        nodes = None if is_equal else np.array(alignment(schema, own), np.int64)
        is_as_stored = is_equal or all(
            at < 0 or same_type(kind, own.field(at).type)
            for at, kind in zip(places or range(len(names)), schema.types, strict=True)
        )
        return cls(is_as_stored, node_count(own), node_count(schema), places, nodes)

    def blocks(self, index: ShardIndex) -> Sequence[Block]:
        """Return a shard's blocks, with columns in the order of the dataset's schema."""
        if self.columns is None or not any(block.columns for block in index.blocks):
            return index.blocks
        return [
            replace(block, columns=[number for at in self.columns for number in _column(block, at)])
            for block in index.blocks
        ]

    def nulls(self, index: ShardIndex) -> Sequence[int]:
        """Return a shard's null counts in terms of the dataset's schema."""
        rows = sum(block.rows for block in index.blocks)
        if not rows:
            return array("q", [NEVER]) * self.node_count
        found = index.nulls
        if found and self.nodes is not None:
            is_whole = len(found) == self.own_node_count
            counts = found if is_whole else array("q", [UNKNOWN]) * self.own_node_count
            found = array("q", aligned(self.nodes, counts, rows).tobytes())
        return found if len(found) == self.node_count else ()


def _column(block: Block, at: int) -> Sequence[int]:
    """Return the three numbers of one column; a column that the shard lacks has no bytes."""
    return (0, 0, 0) if at < 0 else block.columns[3 * at : 3 * at + 3]
