"""A process that reads the bytes from which batches of shards are indexed, and passes them to a
child process, the parser.

For single shards the node reads itself. All of its threads share one interpreter lock, so it reads
about 1,500 shards a second at most, on any number of processors. Here, two processes do all of the
work on a shard, and the node sends and receives one message a batch.

Invariants:
1. This process parses none of the bytes that it reads. It has the node's credentials, since it
   reads as the node's own stores do. The parser was forked before the credentials came, and has
   none.
2. Bytes that cannot be read within the budget of its stores are left out. The node reads them
   later, and waits for the store as long as its own budget allows.
3. It holds only parts of the batches in progress, and the node sends it a few batches at a time.
4. It keeps the pauses that the node reports, and reports to the node those that stores ask it for.
5. It ends when its socket closes or the parser ends, and the parser ends with it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import select
import signal
import socket
import sys
import threading
import traceback
from typing import NamedTuple

from msgspec import Struct

from dataplane.base import machine
from dataplane.formats import registry
from dataplane.index.batch_parser import parse
from dataplane.index.unindexed import BYTES_MAX, first_reads
from dataplane.model.errors import DataplaneError, PeerLost
from dataplane.model.records import Region, StorePause
from dataplane.rpc import fetches, local, sockets
from dataplane.rpc import index_batches as messages

# Imported here, so that the fork server does it once.
from dataplane.store import obstore_store  # noqa: F401
from dataplane.store.connect import Stores

_READS_AT_ONCE = 128


class _Round(Struct, eq=False):
    """Parts of a batch that are being read. In a batch's first round, the parser gets its `order`
    before the parts.
    """

    number: int
    left: int
    parts: list[messages.ReadPart]
    order: messages.IndexBatch | None = None


class _Place(NamedTuple):
    round: _Round
    number: int
    shard: messages.BatchShard
    place: Region


class _Reads:
    """The threads that read. The thread that finishes a round passes its parts on."""

    def __init__(self, parser: socket.socket, stores: Stores) -> None:
        self._parser, self._stores = parser, stores
        self._lock = threading.Lock()
        self._orders: dict[int, messages.IndexBatch] = {}
        self._places: queue.SimpleQueue[_Place] = queue.SimpleQueue()
        for _ in range(_READS_AT_ONCE):
            threading.Thread(target=self._read, name="dataplane-index-read", daemon=True).start()

    def begin(self, order: messages.IndexBatch) -> None:
        """Read the bytes that indexing these shards needs first."""
        self._orders[order.number] = order
        format_ = registry.by_name(order.format)
        places, left_bytes = [], BYTES_MAX
        for number, shard in enumerate(order.shards):
            for place in first_reads(format_, shard.size_bytes):
                left_bytes -= place.length
                if left_bytes >= 0:
                    places.append((number, place))
        self._begin(order, places, is_first=True)

    def go_on(self, missing: messages.MissingParts) -> None:
        """Read the bytes that the parser requests in addition."""
        if not missing.parts:
            del self._orders[missing.number]
            return
        places = [(part.shard, part.place) for part in missing.parts]
        self._begin(self._orders[missing.number], places, is_first=False)

    def _begin(
        self, order: messages.IndexBatch, places: list[tuple[int, Region]], *, is_first: bool
    ) -> None:
        begun = _Round(order.number, len(places), [], order if is_first else None)
        if not places:
            self._hand_on(begun)
        for number, place in places:
            self._places.put(_Place(begun, number, order.shards[number], place))

    def _read(self) -> None:
        """Read until there is no more to read; runs in a thread."""
        while True:
            begun, number, shard, place = self._places.get()
            content = None
            # Any failure: the node reads the shard itself later, and reports the error.
            with contextlib.suppress(Exception):
                store = self._stores.connect(shard.url)
                read = store.read(shard.url, place.offset, place.length, shard.etag)
                content = bytes(memoryview(read))
            with self._lock:
                if content is not None:
                    begun.parts.append(messages.ReadPart(number, place.offset, content))
                begun.left -= 1
                is_last = not begun.left
            if is_last:
                self._hand_on(begun)

    def _hand_on(self, begun: _Round) -> None:
        try:
            if begun.order is not None:
                local.send(self._parser, messages.ToParser(begun.order))
            parts = messages.BatchParts(begun.number, tuple(begun.parts))
            local.send(self._parser, messages.ToParser(parts))
        except PeerLost:  # `run` sees that, too
            pass
        except DataplaneError:
            traceback.print_exc()
            os._exit(1)


def run(node: socket.socket, parser: socket.socket) -> None:
    """Read what the node and the parser request, until the parser ends.

    Raises:  PeerLost: the node has gone away.
    """
    first = local.receive(node, messages.ToReader)[0].body
    assert isinstance(first, fetches.StartFetching)
    os.environb.clear()
    os.environb.update(entry.partition(b"=")[::2] for entry in first.environment)
    stores = _stores(first)

    def share(pause: StorePause) -> None:
        """Report to the node that a store has asked this process to slow down."""
        with contextlib.suppress(PeerLost, TimeoutError):  # the node has gone
            local.send(node, messages.FromIndexReaders(pause))

    stores.pauses.join(share)
    reads = _Reads(parser, stores)
    poll = select.poll()
    for sock in (node, parser):
        poll.register(sock, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if parser.fileno() in ready:
            try:
                missing = local.receive(parser, messages.MissingParts)[0]
            except PeerLost:
                return
            reads.go_on(missing)
        if node.fileno() in ready:
            body = local.receive(node, messages.ToReader)[0].body
            if isinstance(body, StorePause):
                stores.pauses.publish(body, share)
            else:
                assert isinstance(body, messages.IndexBatch)
                reads.begin(body)


def _stores(start: fetches.StartFetching) -> Stores:
    policy = None
    if start.is_policed:
        from dataplane.store.policy import UrlPolicy

        policy = UrlPolicy(start.allowed_urls)
    return Stores(start.budget_s, start.request_timeout_s, policy=policy, is_settled=True)


def _forked(node: socket.socket, memory_bytes: int) -> tuple[int, socket.socket]:
    """Fork the parser while this process has one thread; return its process id, and our end of its
    socket.
    """
    parent, (ours, theirs) = os.getpid(), sockets.pair()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    try:
        machine.set_process("dp-index_parser", dies_with_parent=True)
        machine.close_descriptors(keep=(node.fileno(), theirs.fileno()))
        if os.getppid() == parent:
            parse(node, theirs, memory_bytes)
    except BaseException:  # noqa: BLE001 - the child must not continue as a second reader
        traceback.print_exc()
    finally:
        os._exit(1)


def main(descriptor: int, memory_bytes: int) -> None:
    """Run both processes; their socket is an inherited descriptor, and the limit is the
    parser's.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    machine.collect_rarely()
    machine.raise_descriptor_limit()
    with socket.socket(fileno=descriptor) as node:
        pid, parser = _forked(node, memory_bytes)
        try:
            run(node, parser)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            sys.stderr.write(f"their parser ended with status {status}\n")
            sys.stderr.flush()
        except PeerLost:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    os._exit(0)
