"""A fetcher: a process that reads ranges of shards from object stores, and slabs from makers, into
the node's arenas.

Reading from a store takes processor time, most of it for TLS, in threads that share one interpreter
lock. In processes of their own, reads take none of the node's time, and use as many processors as
their rate needs.

Invariants:
1. A fetcher writes only into the regions of a read, whose memory it allocates first, and only until
   it reports the end of that read.
2. A fetcher parses none of the bytes that it reads. It has the node's credentials, since it opens
   the same stores as the node; it gets them over a socket that nobody else can open.
3. Each read ends with one message, whatever the store raises.
4. A read that takes much longer than others is requested a second time, over another connection and
   into other memory. The first answer counts (`store/reads.py`). No read is requested again while
   its store does not answer or has asked to slow down. The second request always goes to the store,
   even if the first one went to a neighbour. A decoded block is only at a neighbour, not in the
   store: if the neighbour is late, the read is ended, and the node has the raw block read from the
   store.
5. A fetcher exits when its socket closes, so fetchers do not outlive their node.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from msgspec import Struct

from dataplane.arena.memfd import Arena
from dataplane.base.machine import collect_rarely
from dataplane.base.trace import configure, tell_suppressed
from dataplane.fetcher.disk import Disk
from dataplane.fetcher.neighbours import Hedging, MadeSlabs, NeighbourReads
from dataplane.model.config import PeerTls
from dataplane.model.errors import (
    DataplaneError,
    NeighbourGone,
    PeerLost,
    ShardNotFound,
    StoreError,
)
from dataplane.model.records import BlockForm, StorePause
from dataplane.neighbours.line_tls import LineTls
from dataplane.neighbours.wire import GIVEN_WHOLE, NOT_GIVEN
from dataplane.rpc import fetches, local, tasks
from dataplane.rpc.fetches import READS_MAX

# Import these here, so that the fork server imports them once for all fetchers.
from dataplane.store import connections, obstore_store  # noqa: F401
from dataplane.store.connect import Stores
from dataplane.store.outage import Observe, Outage
from dataplane.store.reads import EndedEarlyError, Race, Sink, copy_into, fill, raced
from dataplane.store.retry import SLOW_DOWN

_LOOK_S = 0.05
"""The interval at which reads under way are checked: which of them are late, and why."""
_COUNT_S = 1.0
_HEDGES_MAX = 4
_PARTS_AT_ONCE = 128
"""Parts are small, and their threads only wait for the store, so there may be many."""
_END_S = 30.0


MakeStores = Callable[[Observe], Stores]


def views(order: fetches.ReadRange, arena: Arena, stack: contextlib.ExitStack) -> list[memoryview]:
    """Return the memory for the bytes of each target."""
    regions = [target.into for target in order.targets]
    return [stack.enter_context(arena.view(each.offset, each.length)) for each in regions]


def spaced(
    targets: Sequence[fetches.ReadTarget], into: Sequence[memoryview]
) -> Iterator[memoryview]:
    """Yield the memory for the bytes of a read, part by part. Bytes between targets go into memory
    that is dropped.
    """
    at = targets[0].offset
    for target, each in zip(targets, into, strict=True):
        if target.offset > at:
            yield memoryview(bytearray(target.offset - at))
        yield each
        at = target.offset + len(each)


def outcome(name: str, work: Callable[[], None]) -> DataplaneError | None:
    """Return the error of `work`, which performs the read called `name`; None if it succeeds.

    Raises:  EndedEarlyError: another request has read the bytes.
    """
    try:
        work()
    except EndedEarlyError:
        raise
    except ShardNotFound as error:
        return ShardNotFound(
            f"{error}; it was there when the dataset was indexed: restore it,"
            ' or pass on_bad="replace", which reads other rows in its place',
            **error.nouns,
        )
    except DataplaneError as error:
        return error
    except BaseException as error:  # noqa: BLE001 - also a library's panic: the node waits
        return StoreError(f"{name}: {type(error).__name__}: {error}", shard=name)
    return None


class _Read(Struct, eq=False):
    """A read in progress."""

    order: fetches.ReadRange
    race: Race
    started: float = math.inf
    began: float = math.inf
    """When the request that is under way began, to the neighbour or to the store."""
    is_asking: bool = False
    """Whether the request under way is to the neighbour."""
    is_hedged: bool = False
    ends: tuple[int, ...] = ()
    """The neighbour's answer for each target, as in `wire`, if that answer ends the first
    request."""
    store_bytes: int = 0
    """The bytes that the first request asks the store for."""
    hedge_bytes: int = 0

    @property
    def asks_for_decoded(self) -> bool:
        """Whether the read is for a decoded block, which only a neighbour has."""
        neighbour = self.order.neighbour
        return neighbour is not None and neighbour.form is BlockForm.DECODED


class _Parts(Struct, eq=False):
    """Ranges of shards that are read for indexing, and the bytes so far."""

    order: fetches.ReadParts
    contents: list[bytes | None]
    left: int


class Reads:
    """The reads of this process. `make_stores` gets the function to which stores report outages."""

    def __init__(
        self,
        sock: socket.socket,
        arenas: dict[int, Arena],
        make_stores: MakeStores,
        kept_folder: str = "",
        tls: PeerTls | None = None,
    ) -> None:
        self._sock = sock
        self._arenas = arenas
        self._stores = make_stores(self._observe)
        self._stores.pauses.join(self._share)
        self._threads = ThreadPoolExecutor(READS_MAX, "dataplane-fetch")
        self._part_threads = ThreadPoolExecutor(_PARTS_AT_ONCE, "dataplane-part")
        self._hedges = ThreadPoolExecutor(_HEDGES_MAX, "dataplane-hedge")
        self._hedging = Hedging()
        line_tls = None if tls is None else LineTls(tls)
        self._neighbours = NeighbourReads(line_tls)
        self._slabs = MadeSlabs(self._tell, line_tls)
        self._disk = Disk(kept_folder, arenas[tasks.BLOCK_ARENA], self._tell)
        self._lock = threading.Lock()
        self._reading: dict[int, _Read] = {}
        self._trouble: dict[str, str] = {}
        self._slow_until = self._counted_at = 0.0

    def prepare(self, store: str) -> None:
        """Open this store while the first order is on its way."""
        self._threads.submit(self._stores.connect, store)

    def serve(self) -> None:
        """Carry out the node's orders.   Raises:  PeerLost: the node is gone."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        looked = 0.0
        while True:
            with self._lock:
                is_idle = not self._reading and not self._trouble and self._slabs.is_idle
            is_idle = is_idle and self._disk.is_idle
            wait_s = tell_suppressed() - time.monotonic() if is_idle else _LOOK_S
            is_asked = bool(poll.poll(max(wait_s, 0.0) * 1000 if wait_s < math.inf else None))
            if (now := time.monotonic()) - looked >= _LOOK_S:
                looked = now
                tell_suppressed()
                self._look()
                self._disk.look()
            if is_asked:
                said, descriptors = local.receive(self._sock, fetches.ToFetcher)
                self._begin(said.body, *descriptors)

    def close(self) -> None:
        """Wait for the reads in progress."""
        self._threads.shutdown()
        self._part_threads.shutdown()
        self._hedges.shutdown()
        self._disk.close()
        self._neighbours.close()
        self._slabs.close()

    def _begin(self, body: fetches.ToFetcherBody, *descriptors: int) -> None:
        if isinstance(body, fetches.ReadRange):
            read = _Read(body, Race(partial(self._prepare, body), self._sink(body)))
            with self._lock:
                self._reading[body.number] = read
            self._threads.submit(self._serve, read)
        elif isinstance(body, fetches.ReadParts):
            count = len(body.places)
            parts = _Parts(body, [None] * count, count)
            for at in range(count):
                self._part_threads.submit(self._read_part, parts, at)
        elif isinstance(body, fetches.DiskBody):
            self._disk.begin(body)
        elif isinstance(body, StorePause):
            self._note(body)
            self._stores.pauses.publish(body, self._share)
        else:
            self._begin_slab(body, *descriptors)

    def _begin_slab(self, body: fetches.ToFetcherBody, *descriptors: int) -> None:
        if isinstance(body, fetches.ReadSlab):
            self._slabs.begin(body)
        elif isinstance(body, fetches.EndSlab):
            self._slabs.give_up(body.number)
        elif isinstance(body, tasks.AttachArena):
            self._slabs.attach(body.arena_id, *descriptors)
        elif isinstance(body, tasks.DetachArena):
            self._slabs.detach(body.arena_id)

    def _serve(self, read: _Read) -> None:
        """Perform a read, and report its end unless a second request did; runs in a thread."""
        order = read.order
        read.started = read.began = time.monotonic()
        arena = self._arenas[order.arena_id]

        def work() -> None:
            if order.neighbour is not None:
                read.race.sent()
            with contextlib.ExitStack() as stack, raced(read.race):
                into = views(order, arena, stack)
                if order.neighbour is None or not self._ask(read, order.neighbour, into):
                    self._fill(read, *spaced(order.targets, into))

        try:
            error = outcome(order.url, work)
            read.race.claim()
        except EndedEarlyError:
            return
        self._ended(read, error)

    def _read_part(self, parts: _Parts, at: int) -> None:
        """Read one part. The last read that ends sends all parts. Runs in a thread."""
        wanted = parts.order.places[at]
        # Ignore any failure: the node reads the shard itself later, and reports the error.
        with contextlib.suppress(Exception):
            store, place = self._stores.connect(wanted.url), wanted.place
            content = store.read(wanted.url, place.offset, place.length, wanted.etag)
            parts.contents[at] = bytes(memoryview(content))
        with self._lock:
            parts.left -= 1
            is_last = not parts.left
        if is_last:
            self._tell(fetches.PartsRead(parts.order.number, tuple(parts.contents)))

    def _prepare(self, order: fetches.ReadRange) -> None:
        """Allocate and map the memory of a read, while the store looks for its bytes."""
        arena = self._arenas[order.arena_id]
        for target in order.targets:
            arena.prepare(target.into.offset, target.into.length)

    def _sink(self, order: fetches.ReadRange) -> Callable[[memoryview], Sink | None] | None:
        """Return the sink that a read writes through, if that costs less than prepared memory."""
        arena, regions = self._arenas[order.arena_id], [each.into for each in order.targets]
        is_new = order.neighbour is None and all(
            arena.is_new(region.offset, region.length) for region in regions
        )
        return arena.new_memory if is_new else None

    def _ask(self, read: _Read, neighbour: fetches.Neighbour, into: Sequence[memoryview]) -> bool:
        """Request the bytes from the neighbour; return whether its answer ends this read. If not,
        the store must be read.

        Raises:  NeighbourGone: only a neighbour has these bytes.
        """
        read.is_asking = True
        try:
            ends = self._neighbours.read(neighbour, into, read.race)
        except NeighbourGone:
            if read.asks_for_decoded:
                raise
            return False
        finally:
            read.began, read.is_asking = time.monotonic(), False
        if ends != (NOT_GIVEN,):
            read.ends = ends
            return True
        if read.asks_for_decoded:
            who = neighbour.peer.node_id
            raise NeighbourGone(f"the node {who} refused the decoded block", peer=who)
        return False

    def _hedge(self, read: _Read) -> None:
        """Read the same bytes into other memory, and copy them into place if they arrive first;
        runs in a thread.
        """
        order = read.order
        body = memoryview(bytearray(order.length))

        def work() -> None:
            self._fill(read, body, is_hedge=True)
            # Prepare the memory here, too: the first request may still wait for a connection, and
            # prepares its memory only later.
            self._prepare(order)

        if outcome(order.url, work):
            return  # the first request reports the error
        try:
            is_first = read.race.overtake(_END_S)
        except TimeoutError:
            os._exit(1)  # a thread is stuck: another fetcher repeats all reads
        if is_first:
            with contextlib.ExitStack() as stack:
                into = views(order, self._arenas[order.arena_id], stack)
                copy_into(body, *spaced(order.targets, into))
            self._ended(read, None, is_hedge=True)

    def _ended(self, read: _Read, error: DataplaneError | None, *, is_hedge: bool = False) -> None:
        """Report the end of a read. `is_hedge`: the second request has read all bytes from the
        store.
        """
        now, order = time.monotonic(), read.order
        ends = () if is_hedge else read.ends
        given = [
            target.into.length
            for target, end in zip(order.targets, ends, strict=bool(ends))
            if end == GIVEN_WHOLE
        ]
        with self._lock:
            del self._reading[order.number]
            if error is None and not ends:
                self._hedging.ended(order.length, now - read.began)
            store_bytes = order.length if is_hedge else read.store_bytes
            hedged_bytes = read.store_bytes + read.hedge_bytes - store_bytes
        self._tell(
            fetches.ReadEnded(
                order.number,
                error,
                now - read.started,
                time.process_time(),
                hedged_bytes=hedged_bytes,
                neighbour_bytes=sum(given),
                store_bytes=store_bytes,
                ends=ends if any(ends) else (),
            )
        )
        self._tell_counts(now)

    def _tell_counts(self, now: float) -> None:
        """Report requests once in a while, and when the last read has ended."""
        if self._reading and now < self._counted_at + _COUNT_S:
            return
        self._counted_at = now
        for store, counts in self._stores.take_counts():
            self._tell(fetches.StoreCounted(store, counts))

    def _fill(self, read: _Read, *into: memoryview, is_hedge: bool = False) -> None:
        order, length = read.order, sum(map(len, into))
        with self._lock:
            if is_hedge:
                read.hedge_bytes += length
            else:
                read.store_bytes += length
        fill(self._stores.connect(order.url), order.url, order.offset, order.etag, *into)

    def _look(self) -> None:
        """Report new reasons of delayed reads to the node, and request late reads again."""
        with self._lock:
            reads = [*self._reading.values()]
        urls = {read.order.url for read in reads}
        found = {url: error for url in urls if (error := self._stores.trouble(url)) is not None}
        for url, error in found.items():
            if self._trouble.get(url) != str(error):
                self._trouble[url] = str(error)
                self._tell(fetches.ShardTrouble(url, error))
        for url in self._trouble.keys() - found.keys():
            del self._trouble[url]
            self._tell(fetches.ShardTrouble(url))
        now = time.monotonic()
        self._tell_counts(now)
        for read in reads:
            if read.order.url not in found and self._is_to_hedge(read, now):
                read.is_hedged = True
                if not read.asks_for_decoded:
                    self._hedges.submit(self._hedge, read)
            if read.is_hedged and read.asks_for_decoded:
                read.race.cut_off()  # at every look: the read may have reconnected

    def _is_to_hedge(self, read: _Read, now: float) -> bool:
        length, neighbour = read.order.length, read.order.neighbour
        if read.is_hedged or now < self._slow_until:
            return False
        if neighbour is not None and read.is_asking:
            return self._neighbours.is_to_hedge(neighbour, length, read.began, now)
        with self._lock:
            is_late = now - read.began >= self._hedging.late_s(length)
            return is_late and self._hedging.spend(length)

    def _observe(self, outage: Outage) -> None:
        seen = (outage.store, outage.since, outage.error, outage.last_request_at, outage.until)
        self._tell(fetches.StoreSeen(*seen))

    def _note(self, pause: StorePause) -> None:
        # Request nothing again until calls have resumed: after the pause, they resume at random
        # moments within `span_s`.
        until = time.monotonic() + pause.left_s + SLOW_DOWN.span_s(pause.level)
        self._slow_until = max(self._slow_until, until)

    def _share(self, pause: StorePause) -> None:
        self._note(pause)
        self._tell(pause)

    def _tell(self, body: fetches.FromFetcherBody) -> None:
        try:
            local.send(self._sock, fetches.FromFetcher(body))
        except PeerLost:
            os._exit(0)


def run(sock: socket.socket) -> None:
    """Carry out the node's orders until it goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    collect_rarely()
    try:
        first, descriptors = local.receive(sock, fetches.ToFetcher)
        start = first.body
        assert isinstance(start, fetches.StartFetching)
        configure(start.log_level, start.log_format)
        os.environb.clear()
        os.environb.update(entry.partition(b"=")[::2] for entry in start.environment)
        ids = (tasks.BLOCK_ARENA, tasks.PREAMBLE_ARENA)
        arenas = {
            number: Arena.attach(fd, os.fstat(fd).st_size)
            for number, fd in zip(ids, descriptors, strict=False)
        }  # a third descriptor locks the folder of blocks on disk while this process lives

        def stores(observe: Observe) -> Stores:
            policy = None
            if start.is_policed:
                from dataplane.store.url_policy import UrlPolicy

                policy = UrlPolicy(start.allowed_urls)
            return Stores(
                start.budget_s, start.request_timeout_s, observe, policy=policy, is_settled=True
            )

        reads = Reads(sock, arenas, stores, start.kept_folder, start.tls)
        if start.store:
            reads.prepare(start.store)
        reads.serve()
    except PeerLost:
        tell_suppressed(is_last=True)


def main(descriptor: int, _memory_bytes: int) -> None:
    """Run the process: its socket is an inherited descriptor. Threads do not keep the process
    alive.
    """
    with socket.socket(fileno=descriptor) as sock:
        run(sock)
    os._exit(0)
