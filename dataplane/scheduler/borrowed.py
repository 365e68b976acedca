"""Blocks whose bytes are read by others than workers: sent to a neighbour, or written to the disk.

Invariants:
1. A borrowed block is neither freed nor written until every borrower has given it back.
"""

from __future__ import annotations

import numpy as np

from dataplane.scheduler.block import CachedBlock
from dataplane.scheduler.blocks import BlockTable


class Borrowed:
    """The borrowed blocks of one node."""

    def __init__(self, blocks: BlockTable) -> None:
        self._blocks = blocks
        self._borrowed: dict[int, CachedBlock] = {}

    @property
    def count(self) -> int:
        """The number of borrowed blocks; events will report the end of each loan."""
        return len(self._borrowed)

    def borrow(self, block: CachedBlock) -> None:
        """Keep a block's bytes in place."""
        self._borrowed[block.key] = block
        block.lent += 1
        self._blocks.pin(block.dataset, np.array([block.index]))

    def give_back(self, block: CachedBlock) -> None:
        """End one loan of a block."""
        block.lent -= 1
        if not block.lent:
            del self._borrowed[block.key]
            self._blocks.free_lent(block)
        self._blocks.unpin(block.dataset, np.array([block.index]))
