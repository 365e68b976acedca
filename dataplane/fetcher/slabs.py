"""Read slabs from the nodes that make them into the delivery arenas of a fetcher's node.

Invariants:
1. Each order ends with one SlabRead, whatever happens; nothing writes into the order's memory after
   that.
2. Slabs are read in threads of their own: slow makers do not delay the reads of blocks.
3. If nobody needs the slab any more, or another node will make it, the request ends at once.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct, field
from msgspec.structs import replace

from dataplane.arena.memfd import BorrowedArenas
from dataplane.base.trace import Trace
from dataplane.model.errors import ClosedError, DataplaneError, NeighbourGone
from dataplane.neighbours.asking import Lines, Place
from dataplane.neighbours.line_tls import LineTls
from dataplane.neighbours.wire import Answer, Outcome
from dataplane.rpc import fetches
from dataplane.rpc.fetches import SLABS_MAX, ReadSlab, SlabRead
from dataplane.store.reads import Race

_trace = Trace("fetcher")


class _Making(Struct, eq=False):
    """A slab that is being made, and the request to its maker."""

    order: ReadSlab
    began: float
    request: Race = field(default_factory=Race)
    why_dropped: DataplaneError | None = None
    """Why nobody waits for the slab any more; None if somebody does."""

    def drop(self, why: DataplaneError) -> None:
        """End the request."""
        self.why_dropped = why
        self.request.cut_off()

    def hold(self, sock: socket.socket) -> None:
        """Note the socket of the request.   Raises:  `why_dropped`."""
        self.request.hold(sock)
        if self.why_dropped is not None:
            raise self.why_dropped


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
        """Close an arena. Slabs that are under way into it end soon, with ClosedError if they still
        wait.
        """
        self._arenas.detach(arena_id)
        with self._lock:
            dropped = [e for e in self._making.values() if e.order.arena_id == arena_id]
        for making in dropped:
            making.drop(_closed(making.order))

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
            end = SlabRead(number, error)
        except BaseException as error:  # noqa: BLE001 - the node waits
            why = f"no slab of the node {maker.node_id}: {type(error).__name__}: {error}"
            end = SlabRead(number, NeighbourGone(why, peer=maker.node_id))
        else:
            end = SlabRead(number, None, answer.note, answer.length)
        with self._lock:
            del self._making[number]
        took_s = time.monotonic() - making.began
        self._tell(replace(end, took_s=took_s, cpu_s=time.process_time()))

    def _answer(self, making: _Making) -> Answer:
        """Request the slab.   Raises:  NeighbourGone, ClosedError."""
        order = making.order
        try:
            with self._memory(order) as place:
                answer = self._lines.read_slab(order, place, making.hold)
        except NeighbourGone:
            if making.why_dropped is not None:
                raise making.why_dropped from None
            raise
        finally:
            making.request.release()
        if answer.outcome is not Outcome.GIVEN:
            peer = order.maker.node_id
            why = f"the node {peer} at {order.maker.address} refused to make a slab"
            raise NeighbourGone(why, peer=peer)
        return answer

    @contextlib.contextmanager
    def _memory(self, order: ReadSlab) -> Iterator[Place]:
        """Yield a function that returns the memory for a slab of this order. The arena stays in use
        until the context ends.
        """
        borrowed, into = self._arenas.use(order.arena_id), order.into

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


def _closed(order: ReadSlab) -> ClosedError:
    return ClosedError(f"the delivery arena {order.arena_id} was closed")
