"""A process that indexes batches of shards from bytes that its parent reads. The bytes are
untrusted, so it has a memory limit.

Invariants:
1. The process has no credentials, opens no connection and has one thread. It requests bytes from
   its parent, and sends answers to the node.
2. Each batch gets one answer, which leaves out shards that cannot be indexed here. The node indexes
   those one by one, and reports what is wrong. If this process crashes or runs out of memory, the
   node does so with all shards of its batches.
3. The process exits when its parent does.
"""

from __future__ import annotations

import socket

import pyarrow as pa

from dataplane.base import machine
from dataplane.formats import registry
from dataplane.formats.base import ShardIndex
from dataplane.index.journal import IndexFrames
from dataplane.index.parts import PartsOfShard
from dataplane.index.unindexed import Unindexed
from dataplane.model.errors import ConfigError, PeerLost
from dataplane.rpc import index_batches as messages
from dataplane.rpc import local


class _Batch:
    """A batch of shards, and the answer collected so far."""

    def __init__(self, order: messages.IndexBatch) -> None:
        self.number = order.number
        self.indexes: list[bytes] = []
        self.preambles: list[messages.BatchPreamble] = []
        self.shards = Unindexed(registry.by_name(order.format), self._take)
        self._with_preambles = order.with_preambles
        self._frames = IndexFrames()
        for number, shard in enumerate(order.shards):
            self.shards.append(number, PartsOfShard(shard.url, shard.size_bytes, []))

    def _take(self, number: int, index: ShardIndex, reader: PartsOfShard) -> None:
        """Add a shard's index and preamble to the answer.

        Raises:  NotReadError: the preamble was not read.
        """
        place = index.preamble
        if place.length and self._with_preambles:
            content = bytes(memoryview(reader.read(place.offset, place.length)))
            self.preambles.append(messages.BatchPreamble(number, content))
        self.indexes.append(self._frames.of(str(number), index))


def parse(node: socket.socket, reader: socket.socket, memory_bytes: int) -> None:
    """Index the batches that the reader passes on, within this memory limit, until the reader ends.

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
                batches[body.number] = _Batch(body)
                continue
            batch = batches[body.number]
            for part in body.parts:
                batch.shards.add(part.shard, part.offset, part.content)
            missing = batch.shards.index()
            if not missing:
                del batches[body.number]
                _answer(node, batch)
            parts = tuple(messages.MissingPart(number, place) for number, place in missing)
            local.send(reader, messages.MissingParts(body.number, parts))
    except PeerLost:
        return


def _answer(node: socket.socket, batch: _Batch) -> None:
    content = b"".join(batch.indexes)
    unread_count = batch.shards.unread_count
    told = messages.BatchIndexed(batch.number, content, tuple(batch.preambles), unread_count)
    try:
        local.send(node, messages.FromIndexReaders(told))
    except ConfigError:  # it is too large
        local.send(node, messages.FromIndexReaders(messages.BatchIndexed(batch.number)))
