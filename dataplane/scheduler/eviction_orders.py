"""Keep two eviction orders: one for blocks that occupy memory, one for blocks of local files, of
which workers only remember the place.
"""

from __future__ import annotations

import contextlib

from dataplane.scheduler.block import CachedBlock
from dataplane.scheduler.next_use import NextUse, Readings

_DIRECT_BLOCKS_MAX = 4096


class EvictionOrders:
    """Both orders. `uses` has the blocks that occupy memory."""

    def __init__(self, readings: Readings) -> None:
        self.uses = NextUse(readings)
        self._direct = NextUse(readings)
        self._uses_of: dict[int, NextUse] = {}

    def add(self, block: CachedBlock) -> None:
        """Add a block, or one that occupies memory from now on."""
        uses = self.uses if block.regions else self._direct
        former = self._uses_of.get(block.key)
        if former is not uses:
            if former is not None:
                former.remove(block)
            uses.add(block)
            self._uses_of[block.key] = uses

    def fetched(self, block: CachedBlock, *, is_guest: bool) -> None:
        """Note a fetched block. A guest, which a neighbour owns, is kept only for its present
        epoch.
        """
        if is_guest:
            uses = self._uses_of[block.key]
            uses.remove(block)
            block.guest_of = uses.orders_now(block)
            uses.add(block)

    def remove(self, block: CachedBlock) -> None:
        """Remove a block that is gone."""
        self._uses_of.pop(block.key).remove(block)

    def spare(self) -> CachedBlock | None:
        """Return a block without memory that must be dropped before another such block comes; None
        if there is room, or if all are in use.
        """
        if len(self._direct) < _DIRECT_BLOCKS_MAX:
            return None
        with contextlib.closing(self._direct.farthest()) as farthest:
            block, _ = next(farthest, (None, 0))
        return block
