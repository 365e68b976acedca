"""Index many remote shards in batches, by pairs of processes: one reads, the other one parses.

For the node, a message about a whole batch costs about as much as one about a single shard.

Invariants:
1. Every batch that is sent ends exactly once: with the indexes of all or some of its shards, or
   with none if its pair has ended. No shard is blamed here: `IndexProcesses` indexes those that are
   left out one by one, and reports what is wrong with them.
2. A pair that has batches and answers none of them for a while is killed.
3. A pair that has ended is replaced only if it has indexed something. So if no pair ever does, no
   more are started.
4. Each pair has a few batches at a time. Of their bytes, the node gets only indexes, and preambles
   if it wants them.
5. If a store asks a pair for a pause, the whole host keeps it, and pairs keep the host's pauses. No
   pair can make a pause longer than a store would, nor report one of a store that it does not read.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from dataplane.base.trace import Trace
from dataplane.formats.base import Format, ShardIndex
from dataplane.index.journal import decode_indexes
from dataplane.index.run import BatchEnd
from dataplane.model.errors import DataplaneError, PeerLost
from dataplane.model.records import ObjectInfo, Region, StorePause
from dataplane.rpc import fetches, local, sockets
from dataplane.rpc import index_batches as messages
from dataplane.store.outage import Pauses
from dataplane.store.retry import SLOW_DOWN
from dataplane.store.urls import base_of, normalise
from dataplane.worker.forking import fork_server

KeepPreamble = Callable[[str, str, Region, bytes], None]
"""Gets the url, etag, place and bytes of a shard's preamble. Called in threads."""
TellEnd = Callable[[BatchEnd], None]

_SHARDS_MAX = 64
"""In a batch. Built-in formats read at most 8 MiB of so many at first."""
_BATCHES_A_PAIR = 4
_USELESS_MAX = 256
"""When shards that were left out, though they could be read, outnumber the others by this, no more
batches are made.
"""
_LOOK_S = 0.25
_SEND_S = 10.0
_END_S = 2.0
_WORDS_BYTES_MAX = 256
_LEVEL_MAX = 8
"""Pauses grow no further."""

_trace = Trace("node")


class _Sent(Struct, frozen=True):
    """A batch that was sent to a pair."""

    shards: Sequence[int]
    listed: Sequence[ObjectInfo]
    tell: TellEnd


class _Pair:
    """Two processes, their batches, and the thread that receives their answers."""

    def __init__(
        self,
        start: fetches.StartFetching,
        memory_bytes: int,
        silent_s: float,
        pauses: Pauses,
        hear: Callable[[_Pair, messages.FromIndexReadersBody], None],
        lost: Callable[[_Pair], None],
    ) -> None:
        self.batches: dict[int, _Sent] = {}
        self.was_of_use = self.is_closed = False
        self._silent_s, self._pauses, self._hear, self._lost = silent_s, pauses, hear, lost
        self._progress = time.monotonic()
        self._sock, theirs = sockets.pair()
        self._sock.settimeout(_SEND_S)
        self._sock_now = self._sock.dup()
        self._sock_now.settimeout(0)
        self._stderr = os.memfd_create("dataplane-index-reader", os.MFD_CLOEXEC)
        try:
            with theirs:
                self._process = fork_server.start(
                    "index_reader", theirs, self._stderr, memory_bytes
                )
            self.send(start)
            pauses.join(self.slow_down)
            self._receiver = threading.Thread(target=self._receive, name="dataplane-index-batches")
            self._receiver.start()
        except BaseException:
            self._close()
            raise

    def take(self, number: int, batch: _Sent) -> None:
        """Note that the pair has this batch, which is sent next."""
        if not self.batches:
            self._progress = time.monotonic()
        self.batches[number] = batch

    def send(self, body: messages.ToReaderBody) -> None:
        """Send this to the processes. If they are gone, or do not read it, the pair ends."""
        try:
            local.send(self._sock, messages.ToReader(body))
        except (PeerLost, TimeoutError):
            self._shut()

    def slow_down(self, pause: StorePause) -> None:
        """Tell the processes of a store's pause. Does not wait: if their socket is full of unread
        orders, they send no requests either.
        """
        with contextlib.suppress(OSError, PeerLost):
            local.send(self._sock_now, messages.ToReader(pause))

    def close(self) -> None:
        """Kill the processes, without waiting for their end. May be called twice."""
        self.is_closed = True
        self._shut()

    def join(self) -> None:
        """Wait until the processes have ended."""
        self._receiver.join()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> None:
        why = ""
        try:
            self._hear_all()
            why = f"had nothing to say for {self._silent_s:g} s"
        except DataplaneError:  # it is gone, or sent an invalid message
            pass
        except Exception as error:  # noqa: BLE001 - after what it has parsed, it may say anything
            why = f"sent nonsense: {error!r}"
        self._lost(self)
        self._shut()
        if not self._process.wait(_END_S):
            self._process.kill()
            self._process.wait(_END_S)
        if not self.is_closed:
            said = os.pread(self._stderr, _WORDS_BYTES_MAX, 0).decode(errors="replace")
            why = why or said.strip().partition("\n")[0] or f"status {self._process.status()}"
            _trace.failed("index readers ended", how=why)
        self._close()

    def _close(self) -> None:
        self._pauses.leave(self.slow_down)
        os.close(self._stderr)
        self._sock_now.close()
        self._sock.close()

    def _hear_all(self) -> None:
        """Receive answers, until the processes have batches and stay silent for too long.

        Raises:  DataplaneError: the processes are gone.
        """
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while not self.batches or time.monotonic() - self._progress < self._silent_s:
            if poll.poll(1e3 * _LOOK_S):
                said, descriptors = local.receive(self._sock, messages.FromIndexReaders)
                for fd in descriptors:
                    os.close(fd)
                self._hear(self, said.body)
                if isinstance(said.body, messages.BatchIndexed):
                    self._progress = time.monotonic()


class IndexBatches:
    """The pairs of one run, for a list of this many shards of one format: as many pairs as the list
    is worth, up to `pair_count`.
    """

    def __init__(
        self,
        format_: Format,
        shard_count: int,
        start: fetches.StartFetching,
        memory_bytes: int,
        silent_s: float,
        pair_count: int,
        keep: KeepPreamble | None,
        pauses: Pauses,
    ) -> None:
        self._format, self._start, self._memory_bytes = format_, start, memory_bytes
        self._silent_s, self._keep = silent_s, keep
        self._pair_count = min(pair_count, -(-shard_count // _SHARDS_MAX))
        self._changing = threading.Lock()
        self._pairs: list[_Pair] = []
        self._numbers = itertools.count(1)
        self._useless = 0
        self._is_closed = False
        self._pauses = pauses

    @property
    def has_room(self) -> bool:
        """Whether a pair can be given a batch now."""
        with self._changing:
            return self._can_start() or any(self._can_take(pair) for pair in self._pairs)

    @property
    def is_over(self) -> bool:
        """Whether no pair will be given another batch."""
        return not self._pair_count or self._useless > _USELESS_MAX or self._is_closed

    @property
    def shards_at_once(self) -> int:
        """Return the largest number of shards in a batch."""
        return _SHARDS_MAX

    def send(self, shards: Sequence[int], listed: Sequence[ObjectInfo], tell: TellEnd) -> None:
        """Index these shards, given by number. `tell` is called later, perhaps from a thread, with
        the result.
        """
        number, sent = next(self._numbers), _Sent(shards, listed, tell)
        with self._changing:
            pair = self._with_room()
            if pair is not None:
                pair.take(number, sent)
        if pair is None:
            tell(BatchEnd(shards, {}))
            return
        told = tuple(messages.BatchShard(one.url, one.size_bytes, one.etag) for one in listed)
        with_preambles = self._keep is not None
        pair.send(messages.IndexBatch(number, self._format.name, told, with_preambles))

    def close(self) -> None:
        """End all processes; batches end without indexes. May be called twice."""
        with self._changing:
            self._is_closed, pairs = True, self._pairs[:]
        for pair in pairs:
            pair.close()
        for pair in pairs:
            pair.join()

    def _can_take(self, pair: _Pair) -> bool:
        return len(pair.batches) < _BATCHES_A_PAIR

    def _can_start(self) -> bool:
        return len(self._pairs) < self._pair_count and not self.is_over

    def _with_room(self) -> _Pair | None:
        """Return the pair with the fewest batches; a new one if all have some."""
        pair = min(self._pairs, key=lambda one: len(one.batches), default=None)
        if (pair is None or pair.batches) and self._can_start():
            try:
                pair = _Pair(
                    self._start, self._memory_bytes, self._silent_s, self._pauses,
                    self._hear, self._lose,
                )  # fmt: skip
                self._pairs.append(pair)
            except (OSError, RuntimeError, DataplaneError) as error:
                # The machine starts no more processes or threads, or descriptors are short.
                self._pair_count -= 1
                _trace.failed("start of index readers", error=str(error))
        return pair

    def _hear(self, pair: _Pair, said: messages.FromIndexReadersBody) -> None:
        """Handle a message of a pair; called in the pair's thread."""
        if isinstance(said, StorePause):
            self._hear_pause(pair, said)
        else:
            self._hear_end(pair, said)

    def _hear_pause(self, pair: _Pair, said: StorePause) -> None:
        with self._changing:
            listed = [one for sent in pair.batches.values() for one in sent.listed]
        if any(base_of(normalise(one.url)) == said.store for one in listed):
            left_s = min(max(0.0, said.left_s), SLOW_DOWN.cap_s)
            pause = StorePause(said.store, min(said.level, _LEVEL_MAX), left_s)
            self._pauses.publish(pause, pair.slow_down)

    def _hear_end(self, pair: _Pair, said: messages.BatchIndexed) -> None:
        with self._changing:
            sent = pair.batches.get(said.number)
        if sent is None:
            return
        indexes = {int(key): index for key, index in decode_indexes(said.indexes).items()}
        for preamble in said.preambles:
            self._hand_on(sent.listed[preamble.shard], indexes[preamble.shard], preamble.content)
        end = BatchEnd(sent.shards, {sent.shards[at]: index for at, index in indexes.items()})
        with self._changing:
            del pair.batches[said.number]
            pair.was_of_use = pair.was_of_use or bool(indexes)
            needing_more = len(sent.shards) - len(indexes) - said.unread_count
            self._useless = max(0, self._useless + needing_more - len(indexes))
        sent.tell(end)

    def _hand_on(self, listed: ObjectInfo, index: ShardIndex, content: bytes) -> None:
        place = index.preamble
        if self._keep is not None and len(content) == place.length:
            self._keep(listed.url, listed.etag, place, content)

    def _lose(self, pair: _Pair) -> None:
        """Handle the end of a pair; called in its thread."""
        with self._changing:
            self._pairs.remove(pair)
            self._pair_count -= not pair.was_of_use
            lost, pair.batches = [*pair.batches.values()], {}
        for sent in lost:
            sent.tell(BatchEnd(sent.shards, {}))
