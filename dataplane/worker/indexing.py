"""Index shards in a worker, and count rows of their blocks. This parses untrusted bytes.

Invariants:
1. The worker has no credentials and opens no connection: the node reads for it, except local files.
2. Several shards, or batches of shards, are indexed at once, each in a thread, since most of the
   time goes into waiting for bytes. While a shard waits for a thread, only the parts that came with
   its task are held. If the process crashes or runs out of memory, any shard may be the cause: the
   node finds out which.
3. For a shard of a batch, more bytes are requested only a few times, never the same bytes twice,
   and only up to a total size. The answer about a batch leaves out shards that cannot be indexed
   within these limits, or at all: the node indexes those one by one, and reports what is wrong.
"""

from __future__ import annotations

import itertools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

# Arrow and numpy use numpy.ma, which numpy imports at first use. If several threads come first, the
# lookup of the half-imported module may recurse without end, and a sound shard looks damaged.
import numpy.ma
import pyarrow as pa
from msgspec import Struct, field
from typing_extensions import Buffer

from dataplane.formats import folders, registry
from dataplane.formats.base import ColumnBounds, Format, RawBlock, ShardReader
from dataplane.formats.faults import is_out_of_memory
from dataplane.formats.index_frames import IndexFrames, encode_index
from dataplane.formats.source import read_in_threads
from dataplane.model.errors import CorruptShard, DataplaneError, PeerLost
from dataplane.model.records import Region
from dataplane.rpc import local, tasks
from dataplane.store.local import LocalStore
from dataplane.transforms.row_filter import BlockRows, RowFilter
from dataplane.worker.salvaging import view_mask

PART_BYTES = 8 << 20
"""Maximum bytes of a read, or of an index, in one message."""
BYTES_MAX = 16 << 20
"""Bytes that a batch requests at once. Shards that need more are left out."""
_ROUNDS_MAX = 4
"""How often a batch requests more: a large footer, then the bytes that the footer names."""
_SHARD_BYTES_MAX = 1 << 20
_SHARDS_AT_ONCE = 16
"""Further shards wait for a thread, since each shard may take memory."""
_STACK_BYTES = 4 << 20  # small: each thread's stack counts against the memory limit
_REPORT_S = 1.0
# Decode at most two blocks at once while counting: decoding takes memory, and reading takes most of
# the time anyway.
_decoding = threading.BoundedSemaphore(2)


class Indexing:
    """The indexing tasks of this worker, and the threads that do them. Answers go to this socket,
    each with the number of its task.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reading: dict[int, _RequestedShard] = {}
        self._batches: dict[int, Batch] = {}
        threading.stack_size(_STACK_BYTES)
        self._threads = ThreadPoolExecutor(_SHARDS_AT_ONCE)

    def accept(self, task: int, body: tasks.IndexingTask) -> None:
        """Begin a task, or pass bytes on to the task that requested them."""
        if isinstance(body, tasks.ShardBytes):
            waiting = self._reading.get(task)
            if waiting is not None:  # else the task failed while it waited for bytes
                waiting.arrived(body)
        elif isinstance(body, tasks.IndexBatch | tasks.BatchParts):
            self._threads.submit(self._answer, task, body, partial(self._of_batch, task, body))
        else:
            answers = partial(_of_shard, self._shard(task, body), body)
            self._threads.submit(self._answer, task, body, answers)

    def _shard(self, task: int, order: tasks.IndexShard | tasks.CountRows) -> ShardReader:
        if order.is_local:
            report = partial(self._send, task, tasks.StillReading())
            return _LocalShard(report, order.url, order.size_bytes, order.etag)
        send = partial(self._send, task)
        shard = _RequestedShard(send, order.url, order.size_bytes, order.parts)
        self._reading[task] = shard
        return shard

    def _of_batch(
        self, task: int, body: tasks.IndexBatch | tasks.BatchParts
    ) -> Iterator[tasks.ResultBody]:
        """Index a batch as far as its parts allow, and answer."""
        if isinstance(body, tasks.IndexBatch):
            self._batches[task] = Batch(body)
        answer = self._batches[task].go_on(body.parts)
        if isinstance(answer, tasks.BatchIndexed):
            del self._batches[task]
        yield answer

    def _answer(
        self, task: int, body: tasks.IndexingTask, answers: Callable[[], Iterator[tasks.ResultBody]]
    ) -> None:
        """Send the answers about a task; runs in a thread."""
        try:
            try:
                for answer in answers():
                    self._send(task, answer)
            except PeerLost:
                raise
            except DataplaneError as error:
                self._send(task, error)
            except Exception as error:  # noqa: BLE001 - a task is answered, whatever went wrong
                self._send(task, _fault(body, error))
            self._reading.pop(task, None)
        except PeerLost:
            os._exit(0)

    def _send(self, task: int, body: tasks.ResultBody) -> None:
        local.send(self._sock, tasks.Result(body, task))


class _RequestedShard(Struct, eq=False):
    """A shard that the node reads for this process. `parts` came with the task, in advance."""

    send: Callable[[tasks.ReadShard], None]
    url: str
    size_bytes: int
    parts: Sequence[tasks.ShardPart]
    _requested: dict[int, queue.SimpleQueue[tasks.ShardBytes]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def read(self, offset: int, length: int) -> Buffer:
        held = _held(self.parts, Region(offset, length))
        if held is not None:
            return held
        parts = [
            self._answer(self._request(part)).content for part in _parts(Region(offset, length))
        ]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_all(self, places: Sequence[Region]) -> list[Buffer]:
        held = [_held(self.parts, place) for place in places]
        requests = [
            self._request(place)
            for place, content in zip(places, held, strict=True)
            if content is None
        ]
        answers = map(self._answer, requests)
        return [next(answers).content if content is None else content for content in held]

    def stream(self) -> Iterator[Buffer]:
        request = self._request(None)
        while not (piece := self._answer(request)).is_end:
            request = self._request(None)  # the next piece is read while this one is parsed
            yield piece.content

    def arrived(self, body: tasks.ShardBytes) -> None:
        """Store bytes that have arrived; called by the receiving thread."""
        self._requested[body.request].put(body)

    def _request(self, place: Region | None) -> int:
        request = next(self._numbers)
        self._requested[request] = queue.SimpleQueue()
        self.send(tasks.ReadShard(request, place))
        return request

    def _answer(self, request: int) -> tasks.ShardBytes:
        answer = self._requested[request].get()
        del self._requested[request]
        if answer.has_failed:
            raise _NotReadError
        return answer


class _LocalShard(Struct, eq=False):
    """A local file. The node gets periodic reports that reading makes progress."""

    report: Callable[[], None]
    url: str
    size_bytes: int
    etag: str
    _reported: float = field(default_factory=time.monotonic)

    def read(self, offset: int, length: int) -> Buffer:
        self._report()
        return LocalStore().read(self.url, offset, length, self.etag) if length else b""

    def read_all(self, places: Sequence[Region]) -> list[Buffer]:
        return read_in_threads(self, places)

    def stream(self) -> Iterator[Buffer]:
        for piece in LocalStore().stream(self.url, self.etag):
            self._report()
            yield piece

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported > _REPORT_S:
            self._reported = now
            self.report()


def _of_shard(
    shard: ShardReader, order: tasks.IndexShard | tasks.CountRows
) -> Iterator[tasks.ResultBody]:
    if isinstance(order, tasks.CountRows):
        wire = counts_of(shard, order)
    else:
        wire = encode_index(registry.by_name(order.format).index(shard))
    for at in range(0, len(wire), PART_BYTES):
        is_last = at + PART_BYTES >= len(wire)
        yield tasks.ShardIndexed(wire[at : at + PART_BYTES], more=not is_last)


def _fault(body: tasks.IndexingTask, error: Exception) -> tasks.ResultBody:
    if is_out_of_memory(error):
        return tasks.OutOfMemory()
    if isinstance(error, _NotReadError) or not isinstance(body, tasks.IndexShard | tasks.CountRows):
        # The node failed to read the bytes, or will index the shards of the batch one by one.
        return DataplaneError(f"indexing failed: {error}")
    done = "indexed" if isinstance(body, tasks.IndexShard) else "counted"
    what = f"{body.url}: cannot be {done}: {type(error).__name__}: {error}"
    return CorruptShard(what, shard=body.url)


class _NotReadError(Exception):
    """The bytes of a shard at these `places` have not been read. Without `places`, the whole shard
    is needed, or the node could not read it.
    """

    def __init__(self, *places: Region) -> None:
        super().__init__(*places)
        self.places = places


class _PartsOfShard(Struct, eq=False):
    """A shard of a batch: the parts that were read, and the places that were requested."""

    url: str
    size_bytes: int
    requested: set[Region]
    parts: list[tasks.BatchPart] = field(default_factory=list)

    def read(self, offset: int, length: int) -> Buffer:
        """Implement `ShardReader.read`.   Raises:  _NotReadError."""
        return self.read_all([Region(offset, length)])[0]

    def read_all(self, places: Sequence[Region]) -> list[Buffer]:
        """Implement `ShardReader.read_all`.   Raises:  _NotReadError: names all missing parts."""
        contents = [(place, _held(self.parts, place)) for place in places]
        missing = [place for place, content in contents if content is None]
        if missing:
            raise _NotReadError(*missing)
        return [content for _, content in contents if content is not None]

    def stream(self) -> Iterator[Buffer]:
        """Always fail: only parts are here.   Raises:  _NotReadError."""
        raise _NotReadError


class Batch:
    """A batch of shards, and the answer collected so far."""

    def __init__(self, order: tasks.IndexBatch) -> None:
        self._format = registry.by_name(order.format)
        self._with_preambles = order.with_preambles
        self._indexes: list[bytes] = []
        self._preambles: list[tasks.BatchPreamble] = []
        self._frames = IndexFrames()
        self._unread_count = self._rounds = 0
        self._waiting = {
            number: _PartsOfShard(
                shard.url, shard.size_bytes, {*first_reads(self._format, shard.size_bytes)}
            )
            for number, shard in enumerate(order.shards)
        }

    def go_on(self, parts: Iterable[tasks.BatchPart]) -> tasks.MissingParts | tasks.BatchIndexed:
        """Index the shards whose bytes are here; return the requests of the other shards, if any.

        Raises:  MemoryError.
        """
        for part in parts:
            if part.shard in self._waiting:
                self._waiting[part.shard].parts.append(part)
        self._rounds += 1
        missing: list[tasks.MissingPart] = []
        left_bytes = BYTES_MAX
        for number, shard in [*self._waiting.items()]:
            places = self._index(number, shard)
            size_bytes = sum(place.length for place in places)
            is_requested = places and size_bytes <= min(left_bytes, _SHARD_BYTES_MAX)
            if is_requested and self._rounds <= _ROUNDS_MAX:
                left_bytes -= size_bytes
                shard.requested.update(places)
                missing.extend(tasks.MissingPart(number, place) for place in places)
            else:
                del self._waiting[number]
        if missing:
            return tasks.MissingParts(tuple(missing))
        indexes, preambles = b"".join(self._indexes), tuple(self._preambles)
        return tasks.BatchIndexed(indexes, preambles, self._unread_count)

    def _index(self, number: int, shard: _PartsOfShard) -> tuple[Region, ...]:
        """Index a shard, and add its index and preamble to the answer. Return the places that must
        be read first; nothing if the shard was indexed, or cannot be.
        """
        try:
            index = self._format.index(shard)
            place = index.preamble
            if place.length and self._with_preambles:
                content = bytes(memoryview(shard.read(place.offset, place.length)))
                self._preambles.append(tasks.BatchPreamble(number, content))
            self._indexes.append(self._frames.of(str(number), index))
        except _NotReadError as error:
            if shard.requested.intersection(error.places):
                self._unread_count += 1
                return ()
            return error.places
        except DataplaneError:
            return ()
        except Exception as error:
            if is_out_of_memory(error):
                raise MemoryError from error
        return ()


def first_reads(format_: Format, size_bytes: int) -> tuple[Region, ...]:
    """Return the ranges of a shard of this size that are read before it is parsed."""
    named = getattr(format_, "first_reads", None)
    places: tuple[Region, ...] = () if named is None else named(size_bytes)
    return tuple(place for place in places if place.length)


def _held(parts: Iterable[tasks.ShardPart | tasks.BatchPart], place: Region) -> memoryview | None:
    """Return the bytes of this range, if they are in one of these parts."""
    for part in parts:
        at = place.offset - part.offset
        if at >= 0 and at + place.length <= len(part.content):
            return memoryview(part.content)[at : at + place.length]
    return None


def counts_of(shard: ShardReader, order: tasks.CountRows) -> bytes:
    """Count the rows of each block that belong to the view, as little-endian int64. A block is not
    read if its statistics decide the condition for all of its rows; of other blocks, only the
    columns that the view needs are read.

    Raises:  CorruptShard.  ConfigError: the condition cannot be evaluated.
    """
    schema = pa.ipc.read_schema(pa.py_buffer(order.schema))
    format_, rows = registry.by_name(order.format), RowFilter.of(order.view, schema)
    assert rows is not None
    place = order.blocks[0].preamble_place
    preamble = memoryview(bytes(shard.read(place.offset, place.length) if place.length else b""))
    shard_of = (order.format, order.url, order.etag)
    known = _bounds(format_, order, preamble, rows, schema)
    counts = np.zeros(len(order.blocks), "<i8")
    for at, block in enumerate(order.blocks):
        stored = rows.stored(shard_of, block.stored_rows, block.first_row, block.shard_word)
        count = rows.count_known(known[at], stored)
        if count is None:
            count = _counted(shard, order, block, preamble, rows, stored)
        counts[at] = count
    return counts.tobytes()


def _bounds(
    format_: Format,
    order: tasks.CountRows,
    preamble: memoryview,
    rows: RowFilter,
    schema: pa.Schema,
) -> list[Mapping[str, ColumnBounds]]:
    """Return the bounds that the shard and its folders state for each block's columns, if any."""
    if rows.condition is None:
        return [{}] * len(order.blocks)
    bounds: Sequence[Mapping[str, ColumnBounds]] = [{}] * len(order.blocks)
    column_bounds = getattr(format_, "column_bounds", None)
    names = rows.condition.fields
    if column_bounds is not None:
        blocks = [block.index for block in order.blocks]
        bounds = column_bounds(order.url, preamble, blocks, names)
    return [
        {**own, **folders.known_bounds(order.url, schema, names, block.stored_rows)}
        for own, block in zip(bounds, order.blocks, strict=True)
    ]


def _counted(
    shard: ShardReader,
    order: tasks.CountRows,
    block: tasks.RawBlockRef,
    preamble: memoryview,
    rows: RowFilter,
    stored: BlockRows,
) -> int:
    pieces = [part for piece in block.pieces or (block.place,) for part in _parts(piece)]
    body = memoryview(b"".join(map(memoryview, shard.read_all(pieces))))
    raw = RawBlock(
        order.url, block.index, block.stored_rows, block.place, order.size_bytes,
        block.preamble_place, preamble, body, block.pieces,
    )  # fmt: skip
    schema = pa.ipc.read_schema(pa.py_buffer(order.schema))
    with _decoding:
        format_ = registry.by_name(order.format)
        if order.view.bad_max:
            return int(np.count_nonzero(view_mask(format_, raw, schema, rows, stored)))
        batch = folders.decoded(format_, raw, schema, rows.columns)
        if batch.num_rows != block.stored_rows:
            raise CorruptShard(
                f"{order.url}: block {block.index} has {batch.num_rows} rows, its index says "
                f"{block.stored_rows}",
                shard=order.url,
                expected=block.stored_rows,
                found=batch.num_rows,
            )
        return int(np.count_nonzero(rows.mask(batch, stored)))


def _parts(piece: Region) -> Iterator[Region]:
    """Cut a region into pieces that fit into a message."""
    end = piece.offset + piece.length
    for at in range(piece.offset, end, PART_BYTES):
        yield Region(at, min(PART_BYTES, end - at))
