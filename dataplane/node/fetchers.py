"""The fetchers of a node: processes that read ranges of shards, and slabs from makers, into its
arenas.

Invariants:
1. Each read is reported exactly once, and its memory is not reused before the report: a fetcher
   that closed its connection may still write until the kernel reports its end.
2. The reads of a fetcher that has ended are given to the others, in their old order; its slabs
   fail, since they may be made elsewhere. A read fails when the third fetcher ends during it. All
   waiting reads and slabs fail when three fetchers have ended and no read was completed meanwhile.
3. A pause that a store has requested from one process is observed by all: by the other fetchers, by
   fetchers started during the pause, and by all others that have joined the same `Pauses`.
4. Nothing on the event loop waits for a fetcher.
5. A slab does not count as one of the reads that a fetcher may have: a slab that takes a maker ten
   seconds says nothing about how fast blocks are read. A fetcher has the slab's arena attached
   before it gets the order, and gets a message when the arena is no longer needed.
6. A fetcher that has work but reads no messages, because it is stopped or stuck, is ended like a
   fetcher that has closed its connection: 2 applies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from msgspec import Struct, field
from msgspec.structs import replace

from dataplane.arena.memfd import Arena
from dataplane.base.meters import StoreMeters
from dataplane.base.trace import Trace
from dataplane.model.errors import DataplaneError, NeighbourGone, StoreError
from dataplane.model.records import StorePause
from dataplane.node.stored import CacheFolder
from dataplane.rpc import fetches, tasks
from dataplane.rpc.fetches import READS_MAX, SLABS_MAX
from dataplane.rpc.membership import NodeReads
from dataplane.scheduler.autoscaler import FetcherCount, FetchLook
from dataplane.store.outage import Outage, Outages, Pauses
from dataplane.worker.death import Cause, ProcessEnd, end_of, nobody_alive
from dataplane.worker.forking import fork_server
from dataplane.worker.process import HUNG_S, WorkerProcess, kill_all

Report = Callable[[fetches.Outcome], None]
ReportEnd = Callable[[fetches.ReadEnded], None]
OnKept = Callable[[fetches.KeptFound], None]

_DEATHS_MAX = 3
_NO_LIMIT = 0
_HUNG_S_MIN = 3.0
_PROBE = fetches.ToFetcher(fetches.EndSlab(0))
"""Checks whether a fetcher reads messages; has no effect, since no slab has this number."""


class _Read(Struct, eq=False):
    """One order, the functions that report its end and the blocks that a disk scan finds, and the
    descriptor of a slab's arena.
    """

    order: fetches.ReadBody | fetches.ReadSlab
    report: ReportEnd
    on_kept: OnKept | None = None
    arena_fd: int = -1
    deaths: int = 0

    def fail(self, error: DataplaneError) -> None:
        self.report(fetches.ReadEnded(self.order.number, error))


class _Fetcher(Struct, eq=False):
    """A process, its reads and slabs by number, the delivery arenas that it has, and its last
    reports.
    """

    process: WorkerProcess
    number: int
    reads: dict[int, _Read] = field(default_factory=dict)
    reading_bytes: int = 0
    slabs: dict[int, _Read] = field(default_factory=dict)
    attached: set[int] = field(default_factory=set)
    trouble: dict[str, StoreError] = field(default_factory=dict)
    cpu_s: float = 0.0
    was_of_use: bool = False
    is_surplus: bool = False

    def scanned(self, kept: fetches.KeptFound) -> None:
        for read in self.reads.values():
            if read.on_kept is not None:
                read.on_kept(kept)

    def send(self, body: fetches.ToFetcherBody, descriptors: tuple[int, ...] = ()) -> None:
        self.process.send(fetches.ToFetcher(body), descriptors)


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
        self._waiting_slabs: deque[_Read] = deque()
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

        def ended(end: fetches.ReadEnded) -> None:
            report(end.error or _end_of(end))

        self._waiting.append(_Read(replace(order, number=next(self._numbers)), ended, on_kept))
        self.start()
        self._dispatch()

    def read_slab(self, order: fetches.ReadSlab, arena_fd: int, report: ReportEnd) -> int:
        """Have a maker make a slab, and read it into this arena; the order gets its number here.
        `report` is called later, when the order's memory is no longer written. The descriptor stays
        the caller's, who keeps it open until `detach_arena`.
        """
        order = replace(order, number=next(self._numbers))
        self._waiting_slabs.append(_Read(order, report, arena_fd=arena_fd))
        self.start()
        self._dispatch()
        return order.number

    def end_slab(self, number: int) -> None:
        """End this order soon: it is reported with an error, unless the slab has arrived. Does
        nothing while the order waits for a fetcher.
        """
        for fetcher in self._fetchers:
            if number in fetcher.slabs:
                fetcher.send(fetches.EndSlab(number))

    def detach_arena(self, arena_id: int) -> None:
        """Have fetchers unmap this arena, into which no slab is read."""
        for fetcher in self._fetchers:
            if arena_id in fetcher.attached:
                fetcher.attached.discard(arena_id)
                fetcher.send(tasks.DetachArena(arena_id))

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
        reading = sum(len(fetcher.reads) + len(fetcher.slabs) for fetcher in self._fetchers)
        processors = (spent_s - before_s) / max(now - then, 1e-6)
        waiting = len(self._waiting) + len(self._waiting_slabs)
        self._count = self._count.after(FetchLook(processors, reading, waiting))
        if self._loop is not None and self._fetchers:
            for fetcher in self._fetchers[:]:
                is_busy = fetcher.reads or fetcher.slabs or self._waiting
                if is_busy and fetcher.process.is_hung(now, _PROBE, self._trace):
                    self._end(fetcher)
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
        kill_all((fetcher.process for fetcher in left), self._trace)
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
        hear, lost = partial(self._hear, fetcher), partial(self._end, fetcher)
        process.listen(fetches.FromFetcher, hear, lost)
        blocks, preambles = self._arenas
        fetcher.send(self._start, (blocks.fd, preambles.fd, *self._lock))
        for pause in self._pauses.now():
            fetcher.send(pause)
        self._trace.started("fetcher started", fetcher_count=len(self._fetchers))

    def _dispatch(self) -> None:
        """Give orders that wait to fetchers with room for them."""
        while self._waiting:
            able = [other for other in self._fetchers if len(other.reads) < READS_MAX]
            if not able:
                break
            fetcher = min(able, key=lambda other: (other.reading_bytes, len(other.reads)))
            read = self._waiting.popleft()
            fetcher.reads[read.order.number] = read
            fetcher.reading_bytes += read.order.length
            fetcher.send(read.order)
        while self._waiting_slabs:
            able = [other for other in self._fetchers if len(other.slabs) < SLABS_MAX]
            if not able:
                break
            fetcher = min(able, key=lambda other: len(other.slabs))
            slab = self._waiting_slabs.popleft()
            order = slab.order
            assert isinstance(order, fetches.ReadSlab)
            if order.arena_id not in fetcher.attached:
                fetcher.attached.add(order.arena_id)
                fetcher.send(tasks.AttachArena(order.arena_id), (slab.arena_fd,))
            fetcher.slabs[order.number] = slab
            fetcher.send(order)

    def _hear(self, fetcher: _Fetcher, said: fetches.FromFetcher) -> None:
        body = said.body
        if isinstance(body, fetches.ReadEnded):
            fetcher.cpu_s = max(fetcher.cpu_s, body.cpu_s)
            fetcher.was_of_use, self._useless = True, 0
            read = fetcher.reads.pop(body.number, None)
            if read is not None:
                fetcher.reading_bytes -= read.order.length
                self._count_read(read, body)
            read = read or fetcher.slabs.pop(body.number, None)
            if read is not None:
                read.report(body)
            self._dispatch()
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
        for fetcher in self._fetchers:
            if fetcher is not source:
                fetcher.send(pause)

    def _retire(self) -> None:
        for fetcher in self._fetchers[::-1]:
            if len(self._fetchers) <= self._count.count:
                return
            if not fetcher.reads and not fetcher.slabs:
                fetcher.is_surplus = True
                self._end(fetcher)

    def _end(self, fetcher: _Fetcher) -> None:
        if fetcher.process.is_ending or self._closed:
            return
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
        slabs = [*fetcher.slabs.values()]
        self._waiting.extendleft(reads[::-1])
        failed = [read for read in self._waiting if read.deaths >= _DEATHS_MAX]
        if self._useless >= _DEATHS_MAX:
            failed, self._useless = [*self._waiting], 0
            slabs += self._waiting_slabs
            self._waiting_slabs.clear()
        for read in failed:
            self._waiting.remove(read)
        for read in failed:
            read.fail(_blamed(read, end, status, words))
        for slab in slabs:
            # Name no peer: the maker is not at fault.
            slab.fail(NeighbourGone("the process that waited for a slab has ended", peer=""))
        self._refill()

    def _refill(self) -> None:
        if self._waiting or self._waiting_slabs:
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
