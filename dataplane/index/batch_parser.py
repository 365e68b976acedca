"""A process that indexes batches of shards from bytes that its parent has read: it parses untrusted
bytes, with a memory limit.

Invariants:
1. It has no credentials, opens no connection and has one thread. It asks its parent for bytes, and
   answers the node.
2. Each batch gets one answer. A shard that cannot be indexed here is left out of it: the node
   indexes it alone, and says what is wrong. If the process crashes or runs out of memory, the node
   does so with all shards of its batches.
3. It asks for more bytes of a shard only a few times, and for a limited number of bytes.
4. It exits when its parent does.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pyarrow as pa
from msgspec import Struct, field

from dataplane import machine
from dataplane.errors import ConfigError, DataplaneError, PeerLost
from dataplane.formats import registry
from dataplane.formats.base import Format, ShardIndex
from dataplane.formats.faults import is_out_of_memory
from dataplane.index.journal import IndexFrames
from dataplane.index.parts import NotReadError, PartsOfShard
from dataplane.model import Region
from dataplane.rpc import index_batches as messages
from dataplane.rpc import local

_ROUNDS_MAX = 4
"""How often more of a shard is asked for: a large footer, then what the footer names."""
_SHARD_BYTES_MAX = 1 << 20
BATCH_BYTES_MAX = 16 << 20
"""That are read at once. Shards that need more are left out."""


class _Shard(Struct, eq=False):
    """A shard that has no index yet: the parts that are there, and what was asked for."""

    reader: PartsOfShard
    asked: set[Region]


class _Batch(Struct, eq=False):
    """A batch, and what its answer will have."""

    number: int
    format: Format
    with_preambles: bool
    waiting: dict[int, _Shard]
    frames: IndexFrames = field(default_factory=IndexFrames)
    indexes: list[bytes] = field(default_factory=list)
    preambles: list[messages.BatchPreamble] = field(default_factory=list)
    unread_count: int = 0
    rounds: int = 0

    def add(self, parts: tuple[messages.ReadPart, ...]) -> None:
        """These parts are there now."""
        for part in parts:
            shard = self.waiting.get(part.shard)
            if shard is not None:
                shard.reader.parts.append((part.offset, part.content))

    def index(self) -> list[messages.MissingPart]:
        """Index what can be indexed. The result is what must be read for the rest."""
        self.rounds += 1
        missing: list[messages.MissingPart] = []
        left_bytes = BATCH_BYTES_MAX
        for number, shard in [*self.waiting.items()]:
            places = self._try(number, shard)
            size_bytes = sum(place.length for place in places)
            is_asked_for = places and size_bytes <= min(left_bytes, _SHARD_BYTES_MAX)
            if is_asked_for and self.rounds <= _ROUNDS_MAX:
                left_bytes -= size_bytes
                shard.asked.update(places)
                missing.extend(messages.MissingPart(number, place) for place in places)
            else:
                del self.waiting[number]
        return missing

    def _try(self, number: int, shard: _Shard) -> tuple[Region, ...]:
        """Index a shard. The result is what must be read first; nothing if there is an index, or
        will be none.

        Raises:  MemoryError.
        """
        try:
            index = self.format.index(shard.reader)
            preamble = [*self._preamble(number, index, shard.reader)]
        except NotReadError as error:
            if shard.asked.intersection(error.places):
                self.unread_count += 1
                return ()
            return error.places
        except DataplaneError:
            return ()  # the node says what is wrong
        except Exception as error:
            if is_out_of_memory(error):
                raise MemoryError from error
            return ()
        self.indexes.append(self.frames.of(str(number), index))
        self.preambles.extend(preamble)
        return ()

    def _preamble(
        self, number: int, index: ShardIndex, reader: PartsOfShard
    ) -> Iterator[messages.BatchPreamble]:
        """Raises:  NotReadError: it is not there."""
        place = index.preamble
        if place.length and self.with_preambles:
            content = bytes(memoryview(reader.read(place.offset, place.length)))
            yield messages.BatchPreamble(number, content)


def parse(node: socket.socket, reader: socket.socket, memory_bytes: int) -> None:
    """Index the batches that the reader hands on, until it goes away, with this memory limit.

    Raises:  MemoryError: this process may be unusable.
    """
    machine.limit_memory(memory_bytes)
    machine.collect_rarely()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    batches: dict[int, _Batch] = {}
    try:
        while True:
            body = local.receive(reader, messages.ToParser)[0].body
            if isinstance(body, messages.IndexBatch):
                batches[body.number] = _begun(body)
                continue
            batch = batches[body.number]
            batch.add(body.parts)
            missing = batch.index()
            if not missing:
                del batches[body.number]
                _answer(node, batch)
            local.send(reader, messages.MissingParts(body.number, tuple(missing)))
    except PeerLost:
        return


def _begun(order: messages.IndexBatch) -> _Batch:
    format_ = registry.by_name(order.format)
    waiting = {
        number: _Shard(
            PartsOfShard(shard.url, shard.size_bytes, []), set(first_reads(format_, shard))
        )
        for number, shard in enumerate(order.shards)
    }
    return _Batch(order.number, format_, order.with_preambles, waiting)


def first_reads(format_: Format, shard: messages.BatchShard) -> tuple[Region, ...]:
    """What is read of a shard before it is parsed."""
    named = getattr(format_, "first_reads", None)
    places: tuple[Region, ...] = () if named is None else named(shard.size_bytes)
    return tuple(place for place in places if place.length)


def _answer(node: socket.socket, batch: _Batch) -> None:
    content = b"".join(batch.indexes)
    told = messages.BatchIndexed(batch.number, content, tuple(batch.preambles), batch.unread_count)
    try:
        local.send(node, messages.FromIndexReaders(told))
    except ConfigError:  # it is too large
        local.send(node, messages.FromIndexReaders(messages.BatchIndexed(batch.number)))
