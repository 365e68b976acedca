"""The slabs for which the fetchers of a node wait.

They are accounted for separately: a slab that takes a maker ten seconds says nothing about how fast
blocks are read, and takes no place of a block. Its processor time in a fetcher counts as usual.

Invariants:
1. Each order is reported exactly once, and its memory is not written after that: for a fetcher that
   ends, when the kernel has reported its end.
2. A fetcher has an arena attached before it gets an order to read into it, and gets a message when
   the arena is no longer needed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from msgspec import Struct, field

from dataplane.fetcher.limits import SLABS_MAX
from dataplane.model.errors import ClosedError, DataplaneError
from dataplane.rpc import fetches

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


class SlabFetcher(Protocol):
    """A fetcher, as far as slabs are concerned."""

    slabs: FetcherSlabs

    @property
    def can_hear(self) -> bool:
        """Whether a message may be sent to it now."""


F = TypeVar("F", bound=SlabFetcher)


class SlabOrders(Generic[F]):
    """The orders of all fetchers, and those that wait for one. `send` sends a fetcher a message
    with descriptors; it returns False if the fetcher is gone, or has no room for it now and so
    cannot receive.
    """

    def __init__(self, send: Callable[[F, fetches.ToFetcherBody, tuple[int, ...]], bool]) -> None:
        self._send = send
        self._waiting: deque[SlabOrder] = deque()

    @property
    def waiting(self) -> int:
        """How many orders no fetcher has taken yet."""
        return len(self._waiting)

    def add(self, order: fetches.ReadSlab, arena_fd: int, report: ReportSlab) -> None:
        """Add an order that waits for a fetcher."""
        self._waiting.append(SlabOrder(order, arena_fd, report))

    def dispatch(self, fetchers: Sequence[F]) -> None:
        """Send fetchers their pending messages."""
        for each in [each for each in fetchers if each.slabs.unneeded]:
            while each.slabs.unneeded and each.can_hear:
                arena_id = next(iter(each.slabs.unneeded))
                if self._send(each, fetches.DetachDelivery(arena_id), ()):
                    each.slabs.unneeded.discard(arena_id)
        while self._waiting:
            able = [e for e in fetchers if e.can_hear and len(e.slabs.orders) < SLABS_MAX]
            if not able:
                return
            fetcher = min(able, key=lambda each: len(each.slabs.orders))
            if self._give(fetcher, self._waiting[0]):
                self._waiting.popleft()

    def end(self, number: int, fetchers: Sequence[F]) -> None:
        """End an order soon, since another node makes the slab. Nothing happens if the order waits
        for a fetcher, or its fetcher has no room for a message.
        """
        for each in fetchers:
            if number in each.slabs.orders and each.can_hear:
                self._send(each, fetches.EndSlab(number), ())

    def heard(self, fetcher: F, end: fetches.SlabRead) -> None:
        """Handle the end of an order, reported by a fetcher."""
        slab = fetcher.slabs.orders.pop(end.number, None)
        if slab is not None:
            slab.report(end)

    def ended(self, fetcher: F) -> list[SlabOrder]:
        """Take back the orders of a fetcher that is gone, and writes no more."""
        orders = [*fetcher.slabs.orders.values()]
        fetcher.slabs.orders.clear()
        return orders

    def given_up(self) -> list[SlabOrder]:
        """Take back the waiting orders, since no fetcher works."""
        orders = [*self._waiting]
        self._waiting.clear()
        return orders

    def detach(self, arena_id: int, fetchers: Sequence[F]) -> None:
        """Stop reading slabs into this arena. Its orders end soon, most of them with ClosedError;
        only then is their memory no longer written.
        """
        dropped = [each for each in self._waiting if each.order.arena_id == arena_id]
        for slab in dropped:
            self._waiting.remove(slab)
            closed = ClosedError(f"the delivery arena {arena_id} was closed")
            asyncio.get_running_loop().call_soon(slab.end, closed)
        for each in fetchers:
            if arena_id in each.slabs.attached:
                each.slabs.attached.discard(arena_id)
                each.slabs.unneeded.add(arena_id)
        self.dispatch(fetchers)

    def _give(self, fetcher: F, slab: SlabOrder) -> bool:
        arena_id, told = slab.order.arena_id, fetcher.slabs
        if arena_id not in told.attached:
            attach = fetches.AttachDelivery(arena_id)
            if not self._send(fetcher, attach, (slab.arena_fd,)):
                return False
            told.attached.add(arena_id)
        if not self._send(fetcher, slab.order, ()):
            return False
        told.orders[slab.order.number] = slab
        return True
