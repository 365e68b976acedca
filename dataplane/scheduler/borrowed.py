"""Blocks whose bytes are read by others than workers: sent to a neighbour, or written to the disk.

Invariants:
1. What is borrowed is neither freed nor written until it was given back as often.
"""

from __future__ import annotations

import numpy as np

from dataplane.scheduler.block import CachedBlock
from dataplane.scheduler.blocks import BlockTable


class Borrowed:
    """Those of one node."""

    def __init__(self, blocks: BlockTable) -> None:
        self._blocks = blocks
        self._borrowed: dict[int, CachedBlock] = {}

    @property
    def count(self) -> int:
        """How many blocks are borrowed; events will report that they are given back."""
        return len(self._borrowed)

    def borrow(self, block: CachedBlock) -> None:
        """Keep its bytes where they are."""
        self._borrowed[block.key] = block
        block.lent += 1
        self._blocks.pin(block.dataset, np.array([block.index]))

    def give_back(self, block: CachedBlock) -> None:
        """They are no longer read."""
        block.lent -= 1
        if not block.lent:
            del self._borrowed[block.key]
            self._blocks.free_lent(block)
        self._blocks.unpin(block.dataset, np.array([block.index]))
