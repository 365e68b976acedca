"""Read slabs from the nodes that make them into the delivery arenas of a fetcher's node.

Invariants:
1. Each order ends with one ReadEnded, whatever happens; nothing writes into its memory after
   that.
2. Slabs are read in threads of their own: slow makers do not delay the reads of blocks.
3. If nobody needs the slab any more, or another node will make it, the request ends at once.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct, field
from msgspec.structs import replace

from dataplane.arena.memfd import BorrowedArenas
from dataplane.base.trace import Trace
from dataplane.model.errors import ClosedError, DataplaneError, NeighbourGone
from dataplane.neighbours.asking import Lines
from dataplane.neighbours.line_tls import LineTls
from dataplane.neighbours.wire import Answer, Outcome
from dataplane.rpc import fetches
from dataplane.rpc.fetches import SLABS_MAX, ReadEnded, ReadSlab
from dataplane.store.reads import Race

_trace = Trace("fetcher")


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
