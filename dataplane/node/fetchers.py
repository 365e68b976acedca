"""The fetchers of a node: processes that read ranges of shards, and slabs from makers, into its
arenas.

Invariants:
1. Each read is reported exactly once, and its memory is not reused before the report: a fetcher
   that closed its connection may still write until the kernel reports its end.
2. The reads of a fetcher that has ended are given to the others, in their old order. A read fails
   when the third fetcher ends during it. All waiting reads fail when three fetchers have ended and
   no read was completed meanwhile.
3. A pause that a store has requested from one process is observed by all: by the other fetchers, by
   fetchers started during the pause, and by all others that have joined the same `Pauses`.
4. Nothing on the event loop waits for a fetcher.
5. Fetchers wait for slabs beside their reads (see the section on slabs): a slab does not count as
   one of the reads that a fetcher may have.
6. A fetcher that has work but reads no messages, because it is stopped or stuck, is ended like a
   fetcher that has closed its connection: 2 applies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct, field
from msgspec.structs import replace

from dataplane.arena.memfd import Arena
from dataplane.base.meters import StoreMeters
from dataplane.base.trace import Trace
from dataplane.model.errors import ClosedError, DataplaneError, NeighbourGone, PeerLost, StoreError
from dataplane.model.records import StorePause
from dataplane.node.stored import CacheFolder
from dataplane.rpc import fetches, local
from dataplane.rpc.fetches import READS_MAX, SLABS_MAX
from dataplane.rpc.membership import NodeReads
from dataplane.scheduler.autoscaler import FetcherCount, FetchLook
from dataplane.store.outage import Outage, Outages, Pauses
from dataplane.worker.death import Cause, ProcessEnd, end_of, nobody_alive
from dataplane.worker.forking import fork_server
from dataplane.worker.process import HUNG_S, WorkerProcess, kill_all

# -- slabs ----------------------------------------------------------------------------------------
#
# The slabs for which the fetchers of a node wait.
#
# Slabs are accounted for separately: a slab that takes a maker ten seconds says nothing about how
# fast blocks are read, and does not count as a read. Only the processor time that a slab takes in a
# fetcher counts as usual.
#
# Invariants:
# 1. Each order is reported exactly once, and its memory is not written after that. The orders of a
#    fetcher that ends are reported once the kernel has reported its end.
# 2. A fetcher has an arena attached before it gets an order to read into it, and gets a message
#    when the arena is no longer needed.

ReportSlab = Callable[[fetches.SlabRead], None]


class SlabOrder(Struct, eq=False):
    """One order, the descriptor of its arena, and the function that reports its end."""

    order: fetches.ReadSlab
    arena_fd: int
    report: ReportSlab

    def end(self, error: DataplaneError) -> None:
        """Report that the order has failed."""
        self.report(fetches.SlabRead(self.order.number, error))


class FetcherSlabs(Struct, eq=False):
    """The slabs that one fetcher waits for, by number; the arenas that it has, and those that it
    must still detach.
    """

    orders: dict[int, SlabOrder] = field(default_factory=dict)
    attached: set[int] = field(default_factory=set)
    unneeded: set[int] = field(default_factory=set)


_Send = Callable[["_Fetcher", fetches.ToFetcherBody, tuple[int, ...]], bool]


class SlabOrders:
    """The orders of all fetchers, and the orders that wait for a fetcher. `send` sends a message
    with descriptors to a fetcher, and returns False if the fetcher is gone or its socket is full.
    """

    def __init__(
        self, send: Callable[[_Fetcher, fetches.ToFetcherBody, tuple[int, ...]], bool]
    ) -> None:
        self._send = send
        self._waiting: deque[SlabOrder] = deque()

    @property
    def waiting(self) -> int:
        """How many orders no fetcher has taken yet."""
        return len(self._waiting)

    def add(self, order: fetches.ReadSlab, arena_fd: int, report: ReportSlab) -> None:
        """Add an order that waits for a fetcher."""
        self._waiting.append(SlabOrder(order, arena_fd, report))

    def dispatch(self, fetchers: Sequence[_Fetcher]) -> None:
        """Send fetchers their pending messages."""
        for fetcher in [fetcher for fetcher in fetchers if fetcher.slabs.unneeded]:
            while fetcher.slabs.unneeded and fetcher.can_hear:
                arena_id = next(iter(fetcher.slabs.unneeded))
                if self._send(fetcher, fetches.DetachDelivery(arena_id), ()):
                    fetcher.slabs.unneeded.discard(arena_id)
        while self._waiting:
            able = [e for e in fetchers if e.can_hear and len(e.slabs.orders) < SLABS_MAX]
            if not able:
                return
            fetcher = min(able, key=lambda other: len(other.slabs.orders))
            if self._give(fetcher, self._waiting[0]):
                self._waiting.popleft()

    def end(self, number: int, fetchers: Sequence[_Fetcher]) -> None:
        """End an order soon, since another node makes the slab. Nothing happens if the order waits
        for a fetcher, or its fetcher has no room for a message.
        """
        for fetcher in fetchers:
            if number in fetcher.slabs.orders and fetcher.can_hear:
                self._send(fetcher, fetches.EndSlab(number), ())

    def heard(self, fetcher: _Fetcher, end: fetches.SlabRead) -> None:
        """Handle the end of an order, reported by a fetcher."""
        slab = fetcher.slabs.orders.pop(end.number, None)
        if slab is not None:
            slab.report(end)

    def ended(self, fetcher: _Fetcher) -> list[SlabOrder]:
        """Take back the orders of a fetcher that is gone, and writes no more."""
        orders = [*fetcher.slabs.orders.values()]
        fetcher.slabs.orders.clear()
        return orders

    def given_up(self) -> list[SlabOrder]:
        """Take back the waiting orders, since no fetcher works."""
        orders = [*self._waiting]
        self._waiting.clear()
        return orders

    def detach(self, arena_id: int, fetchers: Sequence[_Fetcher]) -> None:
        """Stop reading slabs into this arena. Its orders end soon, most of them with ClosedError;
        only then is their memory no longer written.
        """
        dropped = [slab for slab in self._waiting if slab.order.arena_id == arena_id]
        for slab in dropped:
            self._waiting.remove(slab)
            closed = ClosedError(f"the delivery arena {arena_id} was closed")
            asyncio.get_running_loop().call_soon(slab.end, closed)
        for fetcher in fetchers:
            if arena_id in fetcher.slabs.attached:
                fetcher.slabs.attached.discard(arena_id)
                fetcher.slabs.unneeded.add(arena_id)
        self.dispatch(fetchers)

    def _give(self, fetcher: _Fetcher, slab: SlabOrder) -> bool:
        arena_id, slabs = slab.order.arena_id, fetcher.slabs
        if arena_id not in slabs.attached:
            attach = fetches.AttachDelivery(arena_id)
            if not self._send(fetcher, attach, (slab.arena_fd,)):
                return False
            slabs.attached.add(arena_id)
        if not self._send(fetcher, slab.order, ()):
            return False
        slabs.orders[slab.order.number] = slab
        return True


# -- processes -------------------------------------------------------------------------------------

Report = Callable[[fetches.Outcome], None]
OnKept = Callable[[fetches.KeptFound], None]

_DEATHS_MAX = 3
_MESSAGES_A_TURN = 32
_NO_LIMIT = 0
_HUNG_S_MIN = 3.0
_PROBE = fetches.EndSlab(0)
"""Checks whether a fetcher reads messages; has no effect, since no slab has this number."""


class _Read(Struct, eq=False):
    """One order, and the functions that report its end and the blocks that a disk scan finds."""

    order: fetches.ReadBody
    report: Report
    on_kept: OnKept | None = None
    deaths: int = 0

    @property
    def length(self) -> int:
        return self.order.length


class _Fetcher(Struct, eq=False):
    """A process, its reads by number, and its last reports."""

    process: WorkerProcess
    number: int
    reads: dict[int, _Read] = field(default_factory=dict)
    reading_bytes: int = 0
    slabs: FetcherSlabs = field(default_factory=FetcherSlabs)
    trouble: dict[str, StoreError] = field(default_factory=dict)
    cpu_s: float = 0.0
    was_of_use: bool = False
    is_ending: bool = False
    is_surplus: bool = False
    has_room: bool = True
    """False after a message did not fit into the socket, until the fetcher answers or a tick."""

    def scanned(self, kept: fetches.KeptFound) -> None:
        for read in self.reads.values():
            if read.on_kept is not None:
                read.on_kept(kept)

    @property
    def can_hear(self) -> bool:
        return self.has_room and not self.is_ending

    @property
    def can_read(self) -> bool:
        return self.can_hear and len(self.reads) < READS_MAX


class Fetchers:
    """At most `count_max` fetchers, and the reads that wait for them. Fetchers write into the two
    arenas, of blocks and of preambles, and hold the lock on the `folder` of blocks on disk. Use
    this only from the event loop.
    """

    def __init__(
        self,
        count_max: int,
        start: fetches.StartFetching,
        arenas: tuple[Arena, Arena],
        trace: Trace,
        outages: Outages,
        pauses: Pauses | None = None,
        folder: CacheFolder | None = None,
    ) -> None:
        self._count = FetcherCount(count_max)
        self._start = start
        self._arenas = arenas
        self._lock = () if folder is None else (folder.lock,)
        self._trace = trace
        self._outages = outages
        self._pauses = pauses or Pauses()
        self._fetchers: list[_Fetcher] = []
        self._ending: set[_Fetcher] = set()
        self._waiting: deque[_Read] = deque()
        self._slabs = SlabOrders(self._send)
        self._numbers = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._useless = 0
        self.start_count = self.death_count = 0
        self.stores = StoreMeters()
        self._read_bytes = self._hedged_bytes = self._neighbour_bytes = self._disk_bytes = 0
        self._spent_s = 0.0
        self._looked = (time.monotonic(), 0.0)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the fetchers that can read."""
        return tuple(fetcher.process.pid for fetcher in self._fetchers)

    def start(self, store: str = "") -> None:
        """Start fetchers up to the current count; does not wait for them. Fetchers started from now
        on connect to this store at once.
        """
        if self._closed:
            return
        if store:
            self._start = replace(self._start, store=store)
        if self._loop is None:
            fork_server.acquire()
            self._loop = asyncio.get_running_loop()
            self._pauses.join(self._told)
        # Not a while loop: some fetchers may end at once.
        for _ in range(self._count.count - len(self._fetchers)):
            self._spawn()

    def read(self, order: fetches.ReadBody, report: Report, on_kept: OnKept | None = None) -> None:
        """Carry out an order, which gets its number here. `report` is called later, when the
        order's memory is no longer written; before that, `on_kept` gets the blocks that a scan of
        the disk finds.
        """
        self._waiting.append(_Read(replace(order, number=next(self._numbers)), report, on_kept))
        self.start()
        self._dispatch()

    def read_slab(self, order: fetches.ReadSlab, arena_fd: int, report: ReportSlab) -> int:
        """Have a maker make a slab, and read it into this arena; the order gets its number here.
        `report` is called later, when the order's memory is no longer written. The descriptor stays
        the caller's, who keeps it open until `detach_arena`.
        """
        order = replace(order, number=next(self._numbers))
        self._slabs.add(order, arena_fd, report)
        self.start()
        self._dispatch()
        return order.number

    def end_slab(self, number: int) -> None:
        """End this order soon: it is reported with an error, unless the slab has arrived. Does
        nothing while the order's fetcher cannot receive messages.
        """
        self._slabs.end(number, self._fetchers)

    def detach_arena(self, arena_id: int) -> None:
        """Stop reading slabs into this arena. Orders in progress end soon, most of them with
        ClosedError; only then is their memory no longer written.
        """
        self._slabs.detach(arena_id, self._fetchers)

    def trouble(self, url: str) -> StoreError | None:
        """Return why reads of this shard are delayed, according to a fetcher."""
        return next(
            (trouble for fetcher in self._fetchers if (trouble := fetcher.trouble.get(url))), None
        )

    def tick(self) -> None:
        """Add or remove fetchers; call it about twice a second."""
        now = time.monotonic()
        spent_s = self._spent_s + sum(fetcher.cpu_s for fetcher in self._fetchers)
        (then, before_s), self._looked = self._looked, (now, spent_s)
        reading = sum(len(fetcher.reads) + len(fetcher.slabs.orders) for fetcher in self._fetchers)
        processors = (spent_s - before_s) / max(now - then, 1e-6)
        waiting = len(self._waiting) + self._slabs.waiting
        self._count = self._count.after(FetchLook(processors, reading, waiting))
        if self._loop is not None and self._fetchers:
            self._end_hung(now)
            for fetcher in self._fetchers:
                fetcher.has_room = True
            self.start()
            self._retire()
            self._dispatch()

    def statistics(self) -> NodeReads:
        """Return the reads so far, and the number of fetchers that read now."""
        reads = NodeReads(len(self._fetchers), self._read_bytes, self._hedged_bytes)
        return replace(reads, neighbour_bytes=self._neighbour_bytes, disk_bytes=self._disk_bytes)

    def close(self) -> None:
        """Kill all fetchers and wait a few seconds for their end. May be called twice."""
        is_first, self._closed = not self._closed, True
        left = [*self._fetchers, *self._ending]
        for stuck in kill_all(fetcher.process for fetcher in left):
            self._trace.failed("end of fetcher", pid=stuck.pid, why="stuck in kernel")
        self._fetchers.clear()
        self._ending.clear()
        self._waiting.clear()
        if is_first and self._loop is not None:
            self._pauses.leave(self._told)
            fork_server.release()

    def _spawn(self) -> None:
        process = WorkerProcess.start(
            None,
            _NO_LIMIT,
            "fetcher",
            # Soon enough to repeat its reads elsewhere before trainers report a stall.
            hung_s=min(HUNG_S, max(_HUNG_S_MIN, self._start.budget_s / 8)),
        )
        fetcher = _Fetcher(process, next(self._numbers))
        self._fetchers.append(fetcher)
        self.start_count += 1
        process.on_readable(partial(self._on_readable, fetcher))
        blocks, preambles = self._arenas
        self._send(fetcher, self._start, (blocks.fd, preambles.fd, *self._lock))
        for pause in self._pauses.now():
            self._send(fetcher, pause)
        self._trace.started("fetcher started", fetcher_count=len(self._fetchers))

    def _dispatch(self) -> None:
        self._dispatch_reads()
        self._slabs.dispatch(self._fetchers)

    def _dispatch_reads(self) -> None:
        while self._waiting:
            able = [fetcher for fetcher in self._fetchers if fetcher.can_read]
            if not able:
                return
            fetcher = min(able, key=lambda other: (other.reading_bytes, len(other.reads)))
            read = self._waiting[0]
            if self._send(fetcher, read.order):
                self._waiting.popleft()
                fetcher.reads[read.order.number] = read
                fetcher.reading_bytes += read.length

    def _send(
        self, fetcher: _Fetcher, body: fetches.ToFetcherBody, descriptors: tuple[int, ...] = ()
    ) -> bool:
        if fetcher.is_ending:
            return False
        try:
            local.send(fetcher.process.sock, fetches.ToFetcher(body), descriptors)
        except BlockingIOError:
            fetcher.has_room = False
            return False
        except PeerLost:
            self._end(fetcher)
            return False
        return True

    def _on_readable(self, fetcher: _Fetcher) -> None:
        for _ in range(_MESSAGES_A_TURN):
            try:
                said, descriptors = local.receive(fetcher.process.sock, fetches.FromFetcher)
            except BlockingIOError:
                break
            except DataplaneError:  # the fetcher is gone, or sent an invalid message
                self._end(fetcher)
                break
            for fd in descriptors:
                os.close(fd)
            fetcher.has_room = True
            self._hear(fetcher, said.body)
            if fetcher.is_ending or self._closed:
                return
        self._dispatch()

    def _hear(self, fetcher: _Fetcher, body: fetches.FromFetcherBody) -> None:
        if isinstance(body, fetches.ReadEnded):
            fetcher.cpu_s = max(fetcher.cpu_s, body.cpu_s)
            fetcher.was_of_use, self._useless = True, 0
            read = fetcher.reads.pop(body.number, None)
            if read is not None:
                fetcher.reading_bytes -= read.length
                self._count_read(read, body)
                read.report(body.error or _end_of(body))
        elif isinstance(body, fetches.SlabRead):
            fetcher.cpu_s = max(fetcher.cpu_s, body.cpu_s)
            fetcher.was_of_use, self._useless = True, 0
            self._slabs.heard(fetcher, body)
        elif isinstance(body, fetches.KeptFound):
            fetcher.scanned(body)
        elif isinstance(body, StorePause):
            self._pauses.publish(body, self._told)
            self._pause(body, fetcher)
        elif isinstance(body, fetches.StoreSeen):
            seen = Outage(body.store, body.since, body.error, body.asked, body.until)
            self._outages.note(seen, fetcher.number)
        elif isinstance(body, fetches.StoreCounted):
            self.stores.add(body.store, body.counts)
        elif isinstance(body, fetches.ShardTrouble) and isinstance(body.error, StoreError):
            fetcher.trouble[body.url] = body.error
        elif isinstance(body, fetches.ShardTrouble):
            fetcher.trouble.pop(body.url, None)

    def _count_read(self, read: _Read, end: fetches.ReadEnded) -> None:
        self._disk_bytes += end.disk_bytes
        if isinstance(read.order, fetches.DiskBody):
            return
        self._hedged_bytes += end.hedged_bytes
        self._neighbour_bytes += end.neighbour_bytes
        self._read_bytes += end.store_bytes

    def _told(self, pause: StorePause) -> None:
        """Handle a pause that another member of the `Pauses` has published. Thread-safe."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._pause, pause, None)

    def _pause(self, pause: StorePause, source: _Fetcher | None) -> None:
        """Pass a pause on to all fetchers except its source."""
        for fetcher in self._fetchers[:]:
            if fetcher is not source:
                self._send(fetcher, pause)

    def _end_hung(self, now: float) -> None:
        for fetcher in self._fetchers[:]:
            is_busy = fetcher.reads or fetcher.slabs.orders or self._waiting
            if is_busy and fetcher.process.is_hung(now, partial(self._send, fetcher, _PROBE)):
                why = "it reads no messages: it is stopped, or stuck in a system call"
                self._trace.failed("fetcher hung", pid=fetcher.process.pid, why=why)
                self._end(fetcher)

    def _retire(self) -> None:
        for fetcher in self._fetchers[::-1]:
            if len(self._fetchers) <= self._count.count:
                return
            if not fetcher.reads and not fetcher.slabs.orders:
                fetcher.is_surplus = True
                self._end(fetcher)

    def _end(self, fetcher: _Fetcher) -> None:
        if fetcher.is_ending or self._closed:
            return
        fetcher.is_ending = True
        self._fetchers.remove(fetcher)
        self._ending.add(fetcher)
        fetcher.process.end(partial(self._on_end, fetcher))
        # Refill before the process is gone, but not at once: `_refill` may have called this.
        assert self._loop is not None
        self._loop.call_soon(self._refill)

    def _on_end(self, fetcher: _Fetcher, status: int) -> None:
        """Give the reads of a fetcher that has ended to other fetchers, since its threads write no
        more.
        """
        if self._closed:
            return
        self._ending.discard(fetcher)
        self.death_count += not fetcher.is_surplus
        self._spent_s += fetcher.cpu_s
        self._outages.forget(fetcher.number, time.time())
        self._useless += not fetcher.was_of_use
        reads, words = [*fetcher.reads.values()], fetcher.process.last_words
        end = end_of(status, words, has_started=bool(fetcher.process.pid))
        if reads:
            self._trace.failed("fetcher ended", pid=fetcher.process.pid, status=status, said=words)
        for read in reads:
            read.deaths += 1
        slabs = self._slabs.ended(fetcher)
        self._waiting.extendleft(reads[::-1])
        failed = [read for read in self._waiting if read.deaths >= _DEATHS_MAX]
        if self._useless >= _DEATHS_MAX:
            failed, self._useless = [*self._waiting], 0
            slabs.extend(self._slabs.given_up())
        for read in failed:
            self._waiting.remove(read)
        for read in failed:
            read.report(_blamed(read, end, status, words))
        for slab in slabs:
            # Name no peer: the maker is not at fault.
            slab.end(NeighbourGone("the process that waited for a slab has ended", peer=""))
        self._refill()

    def _refill(self) -> None:
        if self._waiting or self._slabs.waiting:
            self.start()
            self._dispatch()


def _end_of(end: fetches.ReadEnded) -> fetches.Outcome:
    """Return the outcome of a read that ended without an error."""
    ends, given = end.ends, end.neighbour_bytes
    if not ends:
        return fetches.NeighbourGave(given) if given else None
    return fetches.HeldDecoded(ends[0]) if len(ends) == 1 else fetches.PartlyGiven(ends)


def _blamed(read: _Read, end: ProcessEnd, status: int, words: str) -> DataplaneError:
    if end.cause is Cause.NOT_STARTED:
        return nobody_alive(end)
    url = read.order.url if isinstance(read.order, fetches.ReadRange) else "a preamble or the disk"
    said = f": {words.strip()[-300:]}" if words.strip() else ""
    return StoreError(
        f"{url}: the processes that read it have ended, the last with status {status}{said}. See "
        "the log of the node, and whether the machine is short of memory",
        shard=url,
    )
