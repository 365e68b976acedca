"""Read slabs from the nodes that make them into the delivery arenas of a fetcher's node.

Invariants:
1. Each order ends with one SlabRead, whatever happens; nothing writes into the order's memory after
   that.
2. Slabs are read in threads of their own: slow makers do not delay the reads of blocks. The times
   of slabs decide only which slabs are late.
3. A slab that is late is requested from a second maker, into other memory; the first whole answer
   counts (`store/reads.py`). Second requests have a budget, except where the first maker has
   answered nobody for as long: it may be gone. If one of the two makers fails, the other one
   counts. If nobody needs the slab any more, or another node will make it, both requests end at
   once.
4. At most _SPARE_MAX slabs are in memory of the fetcher itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from msgspec import Struct, field

from dataplane.arena.memfd import BorrowedArenas
from dataplane.base.trace import Trace
from dataplane.fetcher.hedging import Hedging, HedgingRule
from dataplane.fetcher.limits import SLABS_MAX
from dataplane.model.errors import ClosedError, DataplaneError, NeighbourGone
from dataplane.model.records import Region
from dataplane.neighbours.asking import Lines, Place, SlabAsk
from dataplane.neighbours.line_tls import LineTls
from dataplane.neighbours.wire import Answer, Outcome
from dataplane.rpc import fetches
from dataplane.rpc.fetches import ReadSlab, SlabMaker, SlabRead
from dataplane.store.reads import EndedEarlyError, Race, copy_into

RULE = HedgingRule(share=0.05, reads_min=20, late_factor=2.0, late_s_min=0.2)
LATE_S = 5.0
"""The time after which a slab is late while it is unknown how long slabs take."""
_SPARE_MAX = 4
_SPARE_S = 5.0
_END_S = 30.0
_trace = Trace("fetcher")


class _Making(Struct, eq=False):
    """A slab that is being made, and the requests to its one or two makers."""

    order: ReadSlab
    began: float
    first: Race = field(default_factory=Race)
    second: Race = field(default_factory=Race)
    is_hedged: bool = False
    is_hedge_over: bool = False
    why_dropped: DataplaneError | None = None
    """Why nobody waits for the slab any more; None if somebody does."""
    error: DataplaneError | None = None
    """The first maker's error, while the second one may still send the slab."""

    def drop(self, why: DataplaneError) -> None:
        """End both requests that are under way."""
        self.why_dropped = why
        self.first.cut_off()
        self.second.cut_off()


class _Found(Struct, frozen=True):
    """A slab that has arrived."""

    length: int
    note: bytes
    node_id: str


class MadeSlabs:
    """The slabs that one fetcher reads. `tell` sends a message to the node."""

    def __init__(
        self, tell: Callable[[fetches.FromFetcherBody], None], tls: LineTls | None = None
    ) -> None:
        self._tell = tell
        self._arenas = BorrowedArenas()
        self._lines = Lines(tls)
        self._threads = ThreadPoolExecutor(SLABS_MAX, "dataplane-slab")
        self._hedges = ThreadPoolExecutor(SLABS_MAX, "dataplane-slab-hedge")
        self._spare = threading.Semaphore(_SPARE_MAX)
        self._lock = threading.Lock()
        self._hedging = Hedging(RULE)
        self._answered_at: dict[str, float] = {}
        self._making: dict[int, _Making] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no slab is waited for."""
        return not self._making

    def attach(self, arena_id: int, fd: int) -> None:
        """Open an arena into which slabs will be read; it takes over the descriptor."""
        try:
            self._arenas.attach(arena_id, fd)
        except DataplaneError as error:
            _trace.failed("no delivery arena", arena=arena_id, why=str(error))

    def detach(self, arena_id: int) -> None:
        """Close an arena. Slabs that are under way into it end soon, with ClosedError if they still
        wait.
        """
        self._arenas.detach(arena_id)
        with self._lock:
            dropped = [e for e in self._making.values() if e.order.arena_id == arena_id]
        for making in dropped:
            making.drop(ClosedError(f"the delivery arena {arena_id} was closed"))

    def give_up(self, number: int) -> None:
        """End the read of a slab that another node will make, unless the whole slab is here."""
        with self._lock:
            making = self._making.get(number)
        if making is not None:
            peer = making.order.maker.node_id
            silent_s = time.monotonic() - making.began
            why = f"the node {peer} has sent no slab for {silent_s:.1f} s"
            making.drop(NeighbourGone(why, peer=peer))

    def begin(self, order: ReadSlab) -> None:
        """Have this slab made, and read it."""
        making = _Making(order, time.monotonic())
        with self._lock:
            self._making[order.number] = making
        self._threads.submit(self._serve, making)

    def look(self, now: float) -> None:
        """Ask for late slabs again."""
        with self._lock:
            late = [each for each in self._making.values() if self._is_to_hedge(each, now)]
            for making in late:
                making.is_hedged = True
        for making in late:
            self._hedges.submit(self._serve_hedge, making)

    def close(self) -> None:
        """Wait for the slabs under way, then close connections and arenas."""
        self._threads.shutdown()
        self._hedges.shutdown()
        self._lines.close()
        self._arenas.close()

    def _is_to_hedge(self, making: _Making, now: float) -> bool:
        order = making.order
        if order.hedge is None or making.is_hedged or making.why_dropped:
            return False
        late_s = self._hedging.late_s(order.into.length)
        late_s = LATE_S if math.isinf(late_s) else late_s
        if now - making.began < late_s:
            return False
        # Measure the silence from the maker's last answer to any request: the maker may have
        # answered later requests first, and have gone away since then.
        is_silent = now - self._answered_at.get(order.maker.address, -math.inf) >= late_s
        return is_silent or self._hedging.spend(order.into.length)

    def _serve(self, making: _Making) -> None:
        """Ask the first maker, and report the end unless the second one does; runs in a thread."""
        order = making.order
        found = error = None
        with self._memory(order) as memory:
            try:
                found = self._ask(making, order.maker, memory, making.first)
            except EndedEarlyError:
                return
            except BaseException as failure:  # noqa: BLE001 - the node waits
                error = _as_error(order.maker, failure)
        with self._lock:
            if error is not None and making.is_hedged and not making.is_hedge_over:
                making.error = error
                return
            try:
                making.first.claim()  # from now on, a second maker cannot win
            except EndedEarlyError:
                return
        self._end(making, found, error)
        if making.is_hedged:
            with contextlib.suppress(TimeoutError):
                making.second.overtake(_END_S)  # ends the second request

    def _serve_hedge(self, making: _Making) -> None:
        """Ask the second maker, and put its slab in place if it arrives first; runs in a thread."""
        order, spares = making.order, contextlib.ExitStack()
        assert order.hedge is not None
        found = None
        spare = memoryview(b"")

        def place(length: int) -> memoryview:
            nonlocal spare
            if not self._spare.acquire(timeout=_SPARE_S):
                raise TimeoutError
            spares.callback(self._spare.release)
            spare = np.empty(length, np.uint8).data
            return spare

        with spares:
            try:
                found = self._ask(making, order.hedge, place, making.second)
                is_first = making.first.overtake(_END_S)
            except TimeoutError:
                os._exit(1)  # a stuck thread may still write into the node's memory
            except BaseException:  # noqa: BLE001 - only the first maker is left
                is_first = False
            if is_first and found is not None:
                self._put(making, found, spare)
                return
        with self._lock:
            making.is_hedge_over = True
            error = making.error
        if error is not None:
            self._end(making, None, error)

    def _put(self, making: _Making, found: _Found, body: memoryview) -> None:
        """Put the second maker's slab in place, and report the end."""
        try:
            with self._memory(making.order) as memory:
                copy_into(body, memory(found.length))
        except BaseException as failure:  # noqa: BLE001 - the node waits
            self._end(making, None, _as_error(making.order.maker, failure))
        else:
            self._end(making, found, None)

    def _ask(self, making: _Making, maker: SlabMaker, place: Place, race: Race) -> _Found:
        """Request the slab.   Raises:  NeighbourGone, EndedEarlyError, ClosedError; errors of
        `place`.
        """
        order = making.order
        ask = SlabAsk(order.request, order.request_opening, order.into.length)

        def hold(sock: socket.socket) -> None:
            race.hold(sock)
            if making.why_dropped is not None:
                raise making.why_dropped

        try:
            answer = self._lines.read_slab(maker, ask, place, hold, race.claim)
        except NeighbourGone:
            if race.is_over:
                raise EndedEarlyError from None
            if making.why_dropped is not None:
                raise making.why_dropped from None
            raise
        finally:
            race.release()
        with self._lock:
            self._answered_at[maker.address] = time.monotonic()
        return _given(maker, answer)

    @contextlib.contextmanager
    def _memory(self, order: ReadSlab) -> Iterator[Place]:
        """Yield a function that returns the memory for a slab of this order. The arena stays in use
        until the context ends.
        """
        borrowed = self._arenas.use(order.arena_id)
        into: Region = order.into

        def place(length: int) -> memoryview:
            if borrowed is None:
                raise _closed(order)
            view = borrowed.arena.view(into.offset, min(length, into.length))
            borrowed.arena.prepare(into.offset, len(view))
            return view

        try:
            yield place
        finally:
            if borrowed is not None:
                self._arenas.done(borrowed)

    def _end(self, making: _Making, found: _Found | None, error: DataplaneError | None) -> None:
        order, took_s = making.order, time.monotonic() - making.began
        with self._lock:
            del self._making[order.number]
            if found is not None:
                self._hedging.ended(order.into.length, took_s)
        length, note, node_id = (
            (0, b"", "")
            if found is None
            else (
                found.length,
                found.note,
                found.node_id,
            )
        )
        self._tell(
            SlabRead(order.number, error, note, length, took_s, node_id, time.process_time())
        )


def _closed(order: ReadSlab) -> ClosedError:
    return ClosedError(f"the delivery arena {order.arena_id} was closed")


def _given(maker: SlabMaker, answer: Answer) -> _Found:
    if answer.outcome is not Outcome.GIVEN:
        raise NeighbourGone(
            f"the node {maker.node_id} at {maker.address} refused to make a slab",
            peer=maker.node_id,
        )
    return _Found(answer.length, answer.note, maker.node_id)


def _as_error(maker: SlabMaker, failure: BaseException) -> DataplaneError:
    if isinstance(failure, DataplaneError):
        return failure
    return NeighbourGone(
        f"no slab of the node {maker.node_id}: {type(failure).__name__}: {failure}",
        peer=maker.node_id,
    )
