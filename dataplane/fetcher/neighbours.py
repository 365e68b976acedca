"""Reads of blocks and slabs from other nodes in a fetcher: which neighbour gets requests, and which
one is late.

Invariants:
1. A neighbour that fails FAILURES_MAX times in a row is left alone for a while, and longer each
   time; then one read tries it. The requests that it has not answered are cut off together, so that
   the store serves all of them at the same time.
2. A late read from a neighbour is requested from the store, too, within a budget, like a late read
   from a store. No budget applies if the neighbour has answered nobody since: it may be gone, and
   all reads wait for it. By the same rule a late decoded block is cut off; the raw block is then
   read from the store.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct, field
from msgspec.structs import replace

from dataplane.arena.memfd import BorrowedArenas
from dataplane.base.trace import Trace
from dataplane.model.errors import ClosedError, DataplaneError, NeighbourGone
from dataplane.neighbours.asking import Lines
from dataplane.neighbours.line_tls import LineTls
from dataplane.neighbours.wire import NOT_GIVEN, Answer, Outcome
from dataplane.rpc import fetches
from dataplane.rpc.fetches import SLABS_MAX, Neighbour, ReadEnded, ReadSlab
from dataplane.store.reads import EndedEarlyError, Race

# -- late reads ------------------------------------------------------------------------------------
#
# Decide which reads are requested a second time, because they take much longer than others. Pure.
#
# Stores answer a few requests in a hundred very late; a batch waits for the last of its blocks.
#
# Invariants:
# 1. At most `HEDGED_SHARE` of all bytes are requested twice.
# 2. A read is late only in comparison with at least `READS_MIN` recent ones of its size.
#
# Source: J. Dean and L. A. Barroso, "The Tail at Scale", CACM 56(2), 2013.


HEDGED_SHARE = 0.02
READS_MIN = 50
LATE_FACTOR = 3.0
"""How many times the 95th percentile a late read takes. The 99th percentile would not do: where one
read in a hundred is late, it is the time of the late reads themselves."""
LATE_S_MIN = 0.05
_RECENT = 256


class Hedging:
    """The times of recent reads by size, and the budget."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._late_s: dict[int, float] = {}
        self._read_bytes = 0
        self._hedged_bytes = 0

    def ended(self, length: int, took_s: float) -> None:
        """Note the end of a read of this length."""
        self._read_bytes += length
        size = length.bit_length()
        self._recent.setdefault(size, deque(maxlen=_RECENT)).append(took_s)
        self._late_s.pop(size, None)

    def late_s(self, length: int) -> float:
        """Return the time after which a read of this length is late; infinite if unknown."""
        size = length.bit_length()
        late_s = self._late_s.get(size)
        if late_s is None:
            recent = sorted(self._recent.get(size, ()))
            is_known = len(recent) >= READS_MIN
            late_s = LATE_FACTOR * recent[len(recent) * 95 // 100] if is_known else math.inf
            late_s = self._late_s[size] = max(late_s, LATE_S_MIN)
        return late_s

    def spend(self, length: int) -> bool:
        """Whether this many bytes may be requested twice; if so, charge them to the budget."""
        if self._hedged_bytes + length > HEDGED_SHARE * self._read_bytes:
            return False
        self._hedged_bytes += length
        return True


FAILURES_MAX = 3
PAUSE_S, PAUSE_S_MAX = 2.0, 60.0
LATE_S = 1.0
"""The time after which a read is late while it is unknown how long neighbours take."""

_trace = Trace("fetcher")


class _Health(Struct):
    """The state of one neighbour, by its address."""

    answered_at: float = -math.inf
    failures: int = 0
    pause_s: float = 0.0
    until: float = -math.inf
    is_tried: bool = False


class NeighbourHealth:
    """Which neighbours are worth asking. Pure: the time is an argument."""

    def __init__(self) -> None:
        self._by_address: dict[str, _Health] = {}

    def may_ask(self, address: str, now: float) -> bool:
        """Whether to send the neighbour a request now. After a pause, this is true once, until that
        read has ended.
        """
        health = self._of(address)
        if health.failures < FAILURES_MAX:
            return True
        if now < health.until:
            return False
        health.until, health.is_tried = now + PAUSE_S_MAX, True
        return True

    def answered(self, address: str, now: float) -> None:
        """Note that the neighbour sent or refused a block."""
        self._by_address[address] = _Health(now)

    def failed(self, address: str, now: float) -> bool:
        """Note that the neighbour neither sent nor refused a block, or was too late. Return True if
        it is left alone from now on.
        """
        health = self._of(address)
        if now < health.until and not health.is_tried:
            return False
        health.failures, health.is_tried = health.failures + 1, False
        if health.failures < FAILURES_MAX:
            return False
        health.pause_s = min(max(2 * health.pause_s, PAUSE_S), PAUSE_S_MAX)
        health.until = now + health.pause_s
        return True

    def is_silent(self, address: str, since: float) -> bool:
        """Whether the neighbour has answered nobody since then."""
        return self._of(address).answered_at < since

    def _of(self, address: str) -> _Health:
        return self._by_address.setdefault(address, _Health())


class NeighbourReads:
    """The reads of one fetcher. Thread-safe."""

    def __init__(self, tls: LineTls | None = None) -> None:
        self._lines = Lines(tls)
        self._lock = threading.Lock()
        self._health = NeighbourHealth()
        self._hedging = Hedging()

    def read(self, neighbour: Neighbour, into: Sequence[memoryview], race: Race) -> tuple[int, ...]:
        """Request bytes from this neighbour, as the first request of this race: a part that fills
        the only buffer, or whole blocks that fill all of them. Return how the request for each
        buffer has ended, with the codes of `wire`.

        Raises:  NeighbourGone.  EndedEarlyError.
        """
        began, peer = time.monotonic(), neighbour.peer
        address = peer.address
        with self._lock:
            if not self._health.may_ask(address, began):
                raise NeighbourGone(
                    f"the node {peer.node_id} is left alone: it failed several times",
                    peer=peer.node_id,
                )
        try:
            answer = self._lines.read(neighbour, into, race.hold, race.claim)
        except (NeighbourGone, EndedEarlyError) as error:
            with self._lock:
                is_left_alone = self._health.failed(address, time.monotonic())
            if is_left_alone:
                why = "it was too late" if race.is_over or race.is_cut_off else str(error)
                _trace.failed("neighbour left alone", node=peer.node_id, address=address, why=why)
                self._lines.cut_off(address)
            if race.is_over:
                raise EndedEarlyError from None
            raise
        finally:
            race.release()
        now = time.monotonic()
        with self._lock:
            self._health.answered(address, now)
            if answer.length:
                self._hedging.ended(answer.length, now - began)
        return answer.ends or (NOT_GIVEN,) * len(into)

    def is_to_hedge(self, neighbour: Neighbour, length: int, began: float, now: float) -> bool:
        """Whether to read from the store as well; if so, charge the read to the budget."""
        with self._lock:
            late_s = self._hedging.late_s(length)
            if now - began < (LATE_S if math.isinf(late_s) else late_s):
                return False
            is_silent = self._health.is_silent(neighbour.peer.address, began)
            return is_silent or self._hedging.spend(length)

    def close(self) -> None:
        """Close idle connections. May be called twice."""
        self._lines.close()


# -- slabs of makers -------------------------------------------------------------------------------
#
# Read slabs from the nodes that make them into the delivery arenas of a fetcher's node.
#
# Invariants:
# 1. Each order ends with one ReadEnded, whatever happens; nothing writes into its memory after
#    that.
# 2. Slabs are read in threads of their own: slow makers do not delay the reads of blocks.
# 3. If nobody needs the slab any more, or another node will make it, the request ends at once.


class _Making(Struct, eq=False):
    """A slab that is being made, and the request to its maker."""

    order: ReadSlab
    began: float
    request: Race = field(default_factory=Race)
    is_dropped: bool = False
    """Whether nobody waits for the slab any more."""

    def hold(self, sock: socket.socket) -> None:
        """Note the socket of the request.   Raises:  NeighbourGone: nobody waits for it."""
        self.request.hold(sock)
        if self.is_dropped:
            raise self.silence()

    def silence(self) -> NeighbourGone:
        """Return the error of a slab that comes too late."""
        peer, silent_s = self.order.maker.node_id, time.monotonic() - self.began
        return NeighbourGone(f"the node {peer} has sent no slab for {silent_s:.1f} s", peer=peer)


class MadeSlabs:
    """The slabs that one fetcher reads. `tell` sends a message to the node."""

    def __init__(
        self, tell: Callable[[fetches.FromFetcherBody], None], tls: LineTls | None
    ) -> None:
        self._tell = tell
        self._arenas = BorrowedArenas()
        self._lines = Lines(tls)
        self._threads = ThreadPoolExecutor(SLABS_MAX, "dataplane-slab")
        self._lock = threading.Lock()
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
        """Close an arena."""
        self._arenas.detach(arena_id)

    def give_up(self, number: int) -> None:
        """End the read of a slab that another node will make, unless the whole slab is here."""
        with self._lock:
            making = self._making.get(number)
        if making is not None:
            making.is_dropped = True
            making.request.cut_off()

    def begin(self, order: ReadSlab) -> None:
        """Have this slab made, and read it."""
        making = _Making(order, time.monotonic())
        with self._lock:
            self._making[order.number] = making
        self._threads.submit(self._serve, making)

    def close(self) -> None:
        """Wait for the slabs under way, then close connections and arenas."""
        self._threads.shutdown()
        self._lines.close()
        self._arenas.close()

    def _serve(self, making: _Making) -> None:
        """Request the slab, and report the end; runs in a thread."""
        order = making.order
        number, maker = order.number, order.maker
        try:
            answer = self._answer(making)
        except DataplaneError as error:
            end = ReadEnded(number, error)
        except BaseException as error:  # noqa: BLE001 - the node waits
            why = f"no slab of the node {maker.node_id}: {type(error).__name__}: {error}"
            end = ReadEnded(number, NeighbourGone(why, peer=maker.node_id))
        else:
            end = ReadEnded(number, neighbour_bytes=answer.length, note=answer.note)
        with self._lock:
            del self._making[number]
        took_s = time.monotonic() - making.began
        self._tell(replace(end, took_s=took_s, cpu_s=time.process_time()))

    def _answer(self, making: _Making) -> Answer:
        """Request the slab.   Raises:  NeighbourGone, ClosedError."""
        order = making.order
        borrowed = self._arenas.use(order.arena_id)
        if borrowed is None:
            raise ClosedError(f"the delivery arena {order.arena_id} was closed")

        def place(length: int) -> memoryview:
            borrowed.arena.prepare(order.into.offset, length)
            return borrowed.arena.view(order.into.offset, length)

        try:
            answer = self._lines.read_slab(order, place, making.hold)
        except NeighbourGone:
            if making.is_dropped:
                raise making.silence() from None
            raise
        finally:
            making.request.release()
            self._arenas.done(borrowed)
        if answer.outcome is not Outcome.GIVEN:
            peer = order.maker.node_id
            why = f"the node {peer} at {order.maker.address} refused to make a slab"
            raise NeighbourGone(why, peer=peer)
        return answer
