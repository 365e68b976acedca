"""Index many remote shards in batches: fetchers read parts of them, and workers parse these.

If shards are indexed one by one, the node itself reads them. All of its threads share one
interpreter lock, so it reads about 1,500 shards a second at most, on any number of processors. A
message about a whole batch costs the node about as much as a message about a single shard.

Invariants:
1. Every batch that is sent ends exactly once: with the indexes of all or some of its shards, or
   with no index if a process has ended. No shard is blamed here: `IndexProcesses` indexes the
   shards that are left out one by one, and reports their errors.
2. A fetcher that finishes none of its reads for a while is killed. A fetcher that has ended is
   replaced only if it has read something.
3. A fetcher leaves out parts that it cannot read within the budget of its stores. The node reads
   these later, and waits for the store as long as its own budget allows.
4. If a store asks a fetcher for a pause, all processes of the host keep the pause; fetchers also
   keep the pauses of the host's other processes.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

from dataplane.arena.memfd import Arena
from dataplane.base.trace import Trace
from dataplane.formats.base import Format, ShardIndex
from dataplane.formats.index_frames import decode_indexes
from dataplane.index.indexer_process import Child, IndexerEnded, IndexerProcess
from dataplane.index.run import BatchEnd
from dataplane.model.errors import ClosedError, DataplaneError, PeerLost
from dataplane.model.records import ObjectInfo, Region, StorePause
from dataplane.rpc import fetches, tasks
from dataplane.store.outage import Pauses
from dataplane.worker.indexing import BYTES_MAX, first_reads

KeepPreamble = Callable[[str, str, Region, bytes], None]
"""Gets the url, etag, place and bytes of a shard's preamble. Called in threads."""
TellEnd = Callable[[BatchEnd], None]
OneOfMany = Callable[[], AbstractContextManager[IndexerProcess]]

_SHARDS_MAX = 64
"""The most shards in a batch. Of this many shards, built-in formats first read 8 MiB at most."""
_BATCHES_A_FETCHER = 4
_USELESS_MAX = 256
"""No more batches are made once the shards that were left out although they could be read outnumber
the indexed ones by more than this.
"""
_LOOK_S = 0.25
_ARENA_BYTES = 4096
_NO_LIMIT = 0

_trace = Trace("node")


class PartsFetcher:
    """A fetcher that reads parts of shards. Thread-safe."""

    def __init__(self, start: fetches.StartFetching, silent_s: float, pauses: Pauses) -> None:
        self.reads = 0
        self.was_of_use = self.has_ended = self._is_closed = False
        self._silent_s, self._pauses = silent_s, pauses
        self._progress = time.monotonic()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[tuple[bytes | None, ...]]] = {}
        self._child = Child("fetcher", _NO_LIMIT, fetches.FromFetcher, self._hear, self._lost)
        # A fetcher must be given an arena, but this one writes nothing into it.
        arena = Arena.create("dataplane-index", _ARENA_BYTES)
        try:
            self._child.send(fetches.ToFetcher(start), (arena.fd, arena.fd))
        finally:
            arena.close()
        pauses.join(self._slow_down)

    def read(self, places: Sequence[fetches.ShardPlace]) -> Sequence[bytes | None]:
        """Return the bytes of these places; None for those that cannot be read.

        Raises:  PeerLost: the process has ended.
        """
        if not places:
            return ()
        number, parts = next(self._numbers), Future[tuple[bytes | None, ...]]()
        with self._lock:
            if self.has_ended:
                raise PeerLost("the fetcher has ended", peer="")
            self._waiting[number] = parts
        began = time.monotonic()
        self._child.send(fetches.ToFetcher(fetches.ReadParts(number, tuple(places))))
        while True:
            try:
                return parts.result(_LOOK_S)
            except TimeoutError:
                if time.monotonic() - max(began, self._progress) > self._silent_s:
                    self._child.begin_end()

    def begin_end(self) -> None:
        """Kill the process without waiting for its end. May be called twice."""
        self._is_closed = True
        self._child.begin_end()

    def kill(self) -> None:
        """Kill the process and wait for its end. May be called twice."""
        self._is_closed = True
        self._child.kill()

    def _slow_down(self, pause: StorePause) -> None:
        """Report a store's pause to the process, without waiting. If the socket is full of unread
        orders, the pause is not reported: such a process sends no requests, either.
        """
        self._child.send_now(fetches.ToFetcher(pause))

    def _hear(self, said: fetches.FromFetcher) -> None:
        body = said.body
        if isinstance(body, StorePause):
            self._pauses.publish(body, self._slow_down)
        elif isinstance(body, fetches.PartsRead):
            self._progress = time.monotonic()
            with self._lock:
                parts = self._waiting.pop(body.number)
            self.was_of_use = self.was_of_use or any(body.contents)
            parts.set_result(body.contents)

    def _lost(self, status: int, words: str, _: object) -> None:
        self._pauses.leave(self._slow_down)
        if not self._is_closed:
            why = words.strip().partition("\n")[0] or f"status {status}"
            _trace.failed("a fetcher that reads for indexing ended", how=why)
        with self._lock:
            self.has_ended = True
            lost, self._waiting = self._waiting, {}
        for parts in lost.values():
            parts.set_exception(PeerLost("the fetcher has ended", peer=""))


class IndexBatches:
    """The batches of one run, for a list of `shard_count` shards of one format. One fetcher for
    each batch, but at most `fetcher_count`, read for the processes that `one_of_many` gives.
    """

    def __init__(
        self,
        format_: Format,
        shard_count: int,
        start: fetches.StartFetching,
        one_of_many: OneOfMany,
        silent_s: float,
        fetcher_count: int,
        keep: KeepPreamble | None,
        pauses: Pauses,
    ) -> None:
        self._format, self._start, self._one_of_many = format_, start, one_of_many
        self._silent_s, self._keep, self._pauses = silent_s, keep, pauses
        self._fetcher_count = min(fetcher_count, -(-shard_count // _SHARDS_MAX))
        self._changing = threading.Lock()
        self._fetchers: list[PartsFetcher] = []
        self._batches = self._useless = 0
        self._stop = threading.Event()
        at_once = _BATCHES_A_FETCHER * self._fetcher_count
        self._threads = ThreadPoolExecutor(at_once, "dataplane-index-batch")

    @property
    def has_room(self) -> bool:
        """Whether a batch can be sent now."""
        return not self.is_over and self._batches < _BATCHES_A_FETCHER * self._fetcher_count

    @property
    def is_over(self) -> bool:
        """Whether no batch can be sent any more."""
        return not self._fetcher_count or self._useless > _USELESS_MAX or self._stop.is_set()

    @property
    def shards_at_once(self) -> int:
        """Return the largest number of shards in a batch."""
        return _SHARDS_MAX

    def send(self, shards: Sequence[int], listed: Sequence[ObjectInfo], tell: TellEnd) -> None:
        """Index these shards, given by number. `tell` is called later, from a thread, with the
        result.
        """
        with self._changing:
            self._batches += 1
        self._threads.submit(self._run, shards, listed, tell)

    def close(self) -> None:
        """End all fetchers; batches end without indexes. May be called twice."""
        with self._changing:
            self._stop.set()
            fetchers = self._fetchers[:]
        for fetcher in fetchers:
            fetcher.begin_end()
        self._threads.shutdown(wait=True)
        for fetcher in fetchers:
            fetcher.kill()

    def _run(self, shards: Sequence[int], listed: Sequence[ObjectInfo], tell: TellEnd) -> None:
        """Index a batch, and report its end; runs in a thread."""
        indexes: Mapping[int, ShardIndex] = {}
        try:
            indexes = self._indexed(listed)
        except (IndexerEnded, DataplaneError):  # `IndexProcesses` indexes these shards one by one
            pass
        except Exception as error:  # noqa: BLE001 - a hostile shard may have corrupted the worker
            _trace.failed("a worker that indexes sent an invalid answer", error=repr(error))
        with self._changing:
            self._batches -= 1
        tell(BatchEnd(shards, {shards[at]: index for at, index in indexes.items()}))

    def _indexed(self, listed: Sequence[ObjectInfo]) -> Mapping[int, ShardIndex]:
        """Index these shards. Return the indexes of those that are not left out, by their place in
        the list.

        Raises:  IndexerEnded, DataplaneError: a process has ended, or could not be started.
        """
        fetcher = self._fetcher()

        def read(places: Sequence[tuple[int, Region]]) -> tuple[tasks.BatchPart, ...]:
            wanted = [
                fetches.ShardPlace(listed[at].url, listed[at].etag, place) for at, place in places
            ]
            return tuple(
                tasks.BatchPart(at, place.offset, content)
                for (at, place), content in zip(places, fetcher.read(wanted), strict=True)
                if content is not None
            )

        def read_missing(missing: tasks.MissingParts) -> tasks.BatchParts:
            places = [(part.shard, part.place) for part in missing.parts]
            return tasks.BatchParts(read(_limited(places)))

        try:
            parts = read(self._first_places(listed))
            named = tuple(tasks.BatchShard(shard.url, shard.size_bytes) for shard in listed)
            wants_preambles = self._keep is not None
            order = tasks.IndexBatch(self._format.name, named, parts, wants_preambles)
            with self._one_of_many() as process:
                said = process.batch(order, read_missing, self._stop, self._silent_s)
        except IndexerEnded:
            with self._changing:
                self._useless += len(listed)
            raise
        finally:
            with self._changing:
                fetcher.reads -= 1
        return self._accept(listed, said)

    def _accept(
        self, listed: Sequence[ObjectInfo], said: tasks.BatchIndexed
    ) -> Mapping[int, ShardIndex]:
        indexes = {int(key): index for key, index in decode_indexes(said.indexes).items()}
        for preamble in said.preambles:
            shard, place = listed[preamble.shard], indexes[preamble.shard].preamble
            if self._keep is not None and len(preamble.content) == place.length:
                self._keep(shard.url, shard.etag, place, preamble.content)
        needing_more = len(listed) - len(indexes) - said.unread_count
        with self._changing:
            self._useless = max(0, self._useless + needing_more - len(indexes))
        return indexes

    def _first_places(self, listed: Sequence[ObjectInfo]) -> list[tuple[int, Region]]:
        return _limited(
            [
                (at, place)
                for at, shard in enumerate(listed)
                for place in first_reads(self._format, shard.size_bytes)
            ]
        )

    def _fetcher(self) -> PartsFetcher:
        """Return the fetcher with the fewest batches, or a new fetcher if all are busy.

        Raises:  DataplaneError: there is no fetcher, and none can be started.
        """
        with self._changing:
            if self._stop.is_set():
                raise ClosedError("indexing was stopped")
            for fetcher in [one for one in self._fetchers if one.has_ended]:
                self._fetchers.remove(fetcher)
                self._fetcher_count -= not fetcher.was_of_use
            least = min(self._fetchers, key=lambda one: one.reads, default=None)
            if (least is None or least.reads) and len(self._fetchers) < self._fetcher_count:
                try:
                    least = PartsFetcher(self._start, self._silent_s, self._pauses)
                    self._fetchers.append(least)
                except (OSError, RuntimeError, DataplaneError) as error:
                    # The machine starts no more processes or threads, or descriptors are short.
                    self._fetcher_count -= 1
                    _trace.failed("start of a fetcher for indexing", error=str(error))
            if least is None:
                raise PeerLost("there is no fetcher for indexing", peer="")
            least.reads += 1
            return least


def _limited(places: Sequence[tuple[int, Region]]) -> list[tuple[int, Region]]:
    """Return the first of these places, with no more than `BYTES_MAX` bytes."""
    sizes = itertools.accumulate(place.length for _, place in places)
    return [wanted for wanted, size in zip(places, sizes, strict=True) if size <= BYTES_MAX]
