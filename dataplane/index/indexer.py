"""A process that indexes shards for a node. It parses untrusted bytes, with a memory limit.

Invariants:
1. The process has no credentials and opens no connection: the node reads for it, except local
   files.
2. Several shards, or batches of shards, are indexed at once, each in a thread, since most of the
   time goes into waiting for bytes. While a shard waits for a thread, only the parts that came with
   its task are held. If the process crashes or runs out of memory, any shard may be the cause: the
   node finds out which. The answer about a batch leaves out shards that cannot be indexed: the node
   indexes those one by one, and reports what is wrong.
3. The process exits when its socket closes.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import queue
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
from msgspec import Struct, field
from typing_extensions import Buffer

from dataplane.base.machine import collect_rarely, limit_memory
from dataplane.formats import registry
from dataplane.formats.base import ShardIndex
from dataplane.formats.faults import is_out_of_memory
from dataplane.formats.source import read_in_threads
from dataplane.index.journal import IndexFrames, encode_index
from dataplane.index.unindexed import PartsOfShard, Unindexed
from dataplane.model.errors import ConfigError, CorruptShard, DataplaneError, PeerLost
from dataplane.model.records import Region
from dataplane.rpc import local, tasks
from dataplane.store.local import LocalStore

PART_BYTES = 8 << 20
"""Maximum bytes of a read, or of an index, in one message."""
_SHARDS_AT_ONCE = 16
"""Each may take memory; others wait for them."""
_STACK_BYTES = 4 << 20  # per thread, since it counts against the limit
_TELL_S = 1.0


class _Over(Exception):
    """Raised to stop a shard whose failure the node already knows."""


class _AskedShard(Struct, eq=False, weakref=True):
    """A shard that the node reads for this process."""

    sock: socket.socket
    task: int
    url: str
    size_bytes: int
    parts: tuple[tasks.ShardPart, ...]
    _asked: dict[int, queue.SimpleQueue[tasks.ShardBytes]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def read(self, offset: int, length: int) -> Buffer:
        held = self._held(Region(offset, length))
        if held is not None:
            return held
        parts = [
            self._answer(self._ask(Region(at, min(PART_BYTES, offset + length - at)))).content
            for at in range(offset, offset + length, PART_BYTES)
        ]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_all(self, places: Sequence[Region]) -> list[Buffer]:
        found = [self._held(place) for place in places]
        asked = [
            self._ask(place) for place, held in zip(places, found, strict=True) if held is None
        ]
        answers = map(self._answer, asked)
        return [next(answers).content if held is None else held for held in found]

    def stream(self) -> Iterator[Buffer]:
        request = self._ask(None)
        while not (piece := self._answer(request)).is_end:
            request = self._ask(None)  # it is read while this one is parsed
            yield piece.content

    def arrived(self, body: tasks.ShardBytes) -> None:
        """Store bytes that have arrived; called by the receiving thread."""
        self._asked[body.request].put(body)

    def _held(self, place: Region) -> Buffer | None:
        """Return the bytes of this range, if they came with the task."""
        for part in self.parts:
            at = place.offset - part.offset
            if at >= 0 and at + place.length <= len(part.content):
                return memoryview(part.content)[at : at + place.length]
        return None

    def _ask(self, place: Region | None) -> int:
        request = next(self._numbers)
        self._asked[request] = queue.SimpleQueue()
        told = tasks.FromIndexer(self.task, tasks.ReadShard(request, place))
        local.send(self.sock, told)
        return request

    def _answer(self, request: int) -> tasks.ShardBytes:
        answer = self._asked[request].get()
        del self._asked[request]
        if answer.has_failed:
            raise _Over
        return answer


class _LocalShard(Struct, eq=False):
    """A local file. The node is told periodically that reading makes progress."""

    sock: socket.socket
    task: int
    url: str
    size_bytes: int
    etag: str
    _told: float = field(default_factory=time.monotonic)

    def read(self, offset: int, length: int) -> Buffer:
        self._tell()
        return LocalStore().read(self.url, offset, length, self.etag) if length else b""

    def read_all(self, places: Sequence[Region]) -> list[Buffer]:
        return read_in_threads(self, places)

    def stream(self) -> Iterator[Buffer]:
        for piece in LocalStore().stream(self.url, self.etag):
            self._tell()
            yield piece

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told > _TELL_S:
            self._told = now
            local.send(self.sock, tasks.FromIndexer(self.task, tasks.StillReading()))


class _Batch:
    """A batch of shards, and the answer collected so far."""

    def __init__(self, order: tasks.IndexBatch) -> None:
        self._indexes: list[bytes] = []
        self._preambles: list[tasks.BatchPreamble] = []
        self._shards = Unindexed(registry.by_name(order.format), self._take)
        self._with_preambles = order.with_preambles
        self._frames = IndexFrames()
        for number, shard in enumerate(order.shards):
            self._shards.append(number, PartsOfShard(shard.url, shard.size_bytes, []))

    def go_on(
        self, body: tasks.IndexBatch | tasks.BatchParts
    ) -> tasks.MissingParts | tasks.BatchIndexed:
        """Index what can be indexed with these parts; return the requests of the others, if any.

        Raises:  MemoryError.
        """
        for part in body.parts:
            self._shards.add(part.shard, part.offset, part.content)
        missing = self._shards.index()
        if missing:
            return tasks.MissingParts(tuple(tasks.MissingPart(*part) for part in missing))
        preambles, unread_count = tuple(self._preambles), self._shards.unread_count
        return tasks.BatchIndexed(b"".join(self._indexes), preambles, unread_count)

    def _take(self, number: int, index: ShardIndex, reader: PartsOfShard) -> None:
        """Add a shard's index and preamble to the answer.

        Raises:  NotReadError: the preamble was not read.
        """
        place = index.preamble
        if place.length and self._with_preambles:
            content = bytes(memoryview(reader.read(place.offset, place.length)))
            self._preambles.append(tasks.BatchPreamble(number, content))
        self._indexes.append(self._frames.of(str(number), index))


def run(sock: socket.socket, memory_bytes: int) -> None:
    """Index the shards that the node names, within this memory limit, until the node goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    threading.stack_size(_STACK_BYTES)
    limit_memory(memory_bytes)
    collect_rarely()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    asked: weakref.WeakValueDictionary[int, _AskedShard] = weakref.WeakValueDictionary()
    batches: dict[int, _Batch] = {}
    threads = ThreadPoolExecutor(_SHARDS_AT_ONCE)
    while True:
        try:
            order, _ = local.receive(sock, tasks.ToIndexer)
        except PeerLost:
            return
        body = order.body
        if isinstance(body, tasks.ShardBytes):
            waiting = asked.get(order.task)
            if waiting is not None:  # it may have failed before it got all that it asked for
                waiting.arrived(body)
            continue
        if isinstance(body, tasks.IndexBatch | tasks.BatchParts):
            threads.submit(_go_on, sock, order.task, batches, body)
            continue
        shard: _AskedShard | _LocalShard
        if body.is_local:
            shard = _LocalShard(sock, order.task, body.url, body.size_bytes, body.etag)
        else:
            shard = _AskedShard(sock, order.task, body.url, body.size_bytes, body.parts)
            asked[order.task] = shard
        threads.submit(_index, shard, body)


def _index(shard: _AskedShard | _LocalShard, order: tasks.IndexShard | tasks.CountRows) -> None:
    try:
        for body in _outcome(shard, order):
            local.send(shard.sock, tasks.FromIndexer(shard.task, body))
    except PeerLost:
        os._exit(0)


def _go_on(
    sock: socket.socket,
    task: int,
    batches: dict[int, _Batch],
    body: tasks.IndexBatch | tasks.BatchParts,
) -> None:
    """Index a batch as far as its parts allow, and answer."""
    answer: tasks.FromIndexerBody
    try:
        batch = batches.pop(task, None)
        if isinstance(body, tasks.IndexBatch):
            batch = _Batch(body)
        assert batch is not None
        answer = batch.go_on(body)
        if isinstance(answer, tasks.MissingParts):
            batches[task] = batch
    except MemoryError:
        answer = tasks.OutOfMemory()
    except Exception as error:  # noqa: BLE001 - a task is answered, whatever went wrong
        answer = tasks.OutOfMemory() if is_out_of_memory(error) else DataplaneError(str(error))
    try:
        local.send(sock, tasks.FromIndexer(task, answer))
    except ConfigError as error:  # it is too large
        local.send(sock, tasks.FromIndexer(task, error))
    except PeerLost:
        os._exit(0)


def _outcome(
    shard: _AskedShard | _LocalShard, order: tasks.IndexShard | tasks.CountRows
) -> Iterator[tasks.FromIndexerBody]:
    try:
        if isinstance(order, tasks.CountRows):
            # A late import: most indexing processes count no rows.
            from dataplane.index.block_counts import counts_of

            wire = counts_of(shard, order)
        else:
            wire = encode_index(registry.by_name(order.format).index(shard))
        for at in range(0, len(wire), PART_BYTES):
            is_last = at + PART_BYTES >= len(wire)
            yield tasks.ShardIndexed(wire[at : at + PART_BYTES], more=not is_last)
    except PeerLost:
        raise
    except _Over as over:
        yield DataplaneError(f"{shard.url}: reading failed{over}")
    except DataplaneError as error:
        yield error
    except Exception as error:  # noqa: BLE001 - a task is answered, whatever went wrong
        if is_out_of_memory(error):
            yield tasks.OutOfMemory()
        else:
            done = "indexed" if isinstance(order, tasks.IndexShard) else "counted"
            what = f"{shard.url}: cannot be {done}: {type(error).__name__}: {error}"
            yield CorruptShard(what, shard=shard.url)


def main(descriptor: int, memory_bytes: int) -> None:
    """Run the process: its socket is an inherited descriptor. Its threads do not keep it alive."""
    with socket.socket(fileno=descriptor) as sock:
        try:
            run(sock, memory_bytes)
        except MemoryError:
            sys.stderr.write("MemoryError\n")
            sys.stderr.flush()
            os._exit(1)
    os._exit(0)
