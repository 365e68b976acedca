"""Other orders than the shipped one, to show that no reader of an order depends on it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataplane.model.errors import ConfigError
from dataplane.plan.order import SampleOrder
from dataplane.plan.windows import Int64


class Backwards:
    """Another order, reversed."""

    def __init__(self, order: SampleOrder) -> None:
        self._order = order
        self.sample_count = order.sample_count

    def locate(self, positions: Int64) -> tuple[Int64, Int64]:
        return self._order.locate(self.sample_count - 1 - positions)

    def block_span(self, blocks: Int64) -> tuple[Int64, Int64]:
        first, last = self._order.block_span(blocks)
        return self.sample_count - 1 - last, self.sample_count - 1 - first


class Concatenated:
    """Orders of several datasets, one after the other, with consecutive block numbers."""

    def __init__(self, orders: Sequence[SampleOrder], block_counts: Sequence[int]) -> None:
        self._orders = orders
        self._positions = np.cumsum([0, *(order.sample_count for order in orders)])
        self._blocks = np.cumsum([0, *block_counts])
        self.sample_count = int(self._positions[-1])

    def locate(self, positions: Int64) -> tuple[Int64, Int64]:
        if len(positions) and positions.max() >= self.sample_count:
            raise ConfigError("there is no such position")
        blocks, rows = np.empty_like(positions), np.empty_like(positions)
        for at, order in enumerate(self._orders):
            mine = self._mine(self._positions, at, positions)
            found, rows[mine] = order.locate(positions[mine] - self._positions[at])
            blocks[mine] = found + self._blocks[at]
        return blocks, rows

    def block_span(self, blocks: Int64) -> tuple[Int64, Int64]:
        first, last = np.empty_like(blocks), np.empty_like(blocks)
        for at, order in enumerate(self._orders):
            mine = self._mine(self._blocks, at, blocks)
            begin, end = order.block_span(blocks[mine] - self._blocks[at])
            first[mine], last[mine] = begin + self._positions[at], end + self._positions[at]
        return first, last

    def _mine(self, starts: Int64, at: int, numbers: Int64) -> np.ndarray:
        return (numbers >= starts[at]) & (numbers < starts[at + 1])
