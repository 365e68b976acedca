"""The interface that reads ranges of shards for a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dataplane.model.errors import StoreError
from dataplane.node.fetchers import OnKept, Report
from dataplane.rpc import fetches
from dataplane.rpc.membership import NodeReads


class RangeSource(Protocol):
    """A source of ranges that no cache has. `Fetchers` implements it."""

    def start(self, store: str = "") -> None:
        """Get ready: reads will follow, of this store if one is named."""

    def read(self, order: fetches.ReadBody, report: Report, on_kept: OnKept | None = None) -> None:
        """Implement `Fetchers.read`."""

    def read_slab(
        self, order: fetches.ReadSlab, arena_fd: int, report: Callable[[fetches.SlabRead], None]
    ) -> int:
        """Implement `SlabReads.read_slab`."""

    def end_slab(self, number: int) -> None:
        """Implement `SlabReads.end_slab`."""

    def detach_arena(self, arena_id: int) -> None:
        """Implement `SlabReads.detach_arena`."""

    def trouble(self, url: str) -> StoreError | None:
        """Why reads of this shard are delayed; None if no reason is known."""

    def look(self) -> None:
        """Handle a tick."""

    def statistics(self) -> NodeReads:
        """The reads so far."""

    def close(self) -> None:
        """Stop all reads. Nothing is written after this returns."""
