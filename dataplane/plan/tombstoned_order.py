"""The order of a job from which rows were removed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataplane.changes import TakenDocument
from dataplane.plan.order import TracedOrder
from dataplane.plan.permute import Words
from dataplane.plan.windows import Int64

if TYPE_CHECKING:
    from dataplane.plan.tombstones import Substitutes


class TombstonedOrder:
    """An order of samples from which rows were removed."""

    def __init__(self, order: TracedOrder, substitutes: Substitutes) -> None:
        self._order, self._substitutes = order, substitutes

    @property
    def sample_count(self) -> int:
        """The number of positions: the same as without removals."""
        return self._order.sample_count

    def locate(self, positions: Int64) -> tuple[Int64, Int64]:
        """Implement `SampleOrder.locate`."""
        blocks, rows = self._order.locate(positions)
        return blocks, self._substitutes.of(blocks, rows)

    def block_span(self, blocks: Int64) -> tuple[Int64, Int64]:
        """Implement `SampleOrder.block_span`."""
        return self._order.block_span(blocks)

    def pack_keys(self, positions: Int64, blocks: Int64) -> Words:
        """Implement `TracedOrder.pack_keys`."""
        return self._order.pack_keys(positions, blocks)

    def taken_out(self, blocks: Int64) -> list[tuple[TakenDocument, ...]]:
        """Return the rows that were removed from each block; if samples are packs, these are
        documents.

        Shapes:  blocks: int64[n].
        """
        return [self._substitutes.documents(block) for block in blocks.tolist()]
