"""The order of a job from which rows were taken out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataplane.changes import TakenDocument
from dataplane.plan.order import TracedOrder
from dataplane.plan.permute import Words
from dataplane.plan.windows import Int64

if TYPE_CHECKING:
    from dataplane.plan.tombstones import Substitutes


class TombstonedOrder:
    """An order of samples from which rows were taken out."""

    def __init__(self, order: TracedOrder, substitutes: Substitutes) -> None:
        self._order, self._substitutes = order, substitutes

    @property
    def sample_count(self) -> int:
        """How many positions there are: as many as without."""
        return self._order.sample_count

    def locate(self, positions: Int64) -> tuple[Int64, Int64]:
        """As `SampleOrder.locate`."""
        blocks, rows = self._order.locate(positions)
        return blocks, self._substitutes.of(blocks, rows)

    def block_span(self, blocks: Int64) -> tuple[Int64, Int64]:
        """As `SampleOrder.block_span`."""
        return self._order.block_span(blocks)

    def pack_keys(self, positions: Int64, blocks: Int64) -> Words:
        """As `TracedOrder.pack_keys`."""
        return self._order.pack_keys(positions, blocks)

    def taken_out(self, blocks: Int64) -> list[tuple[TakenDocument, ...]]:
        """The rows that were taken out of each block; if samples are packs, these are documents.

        Shapes:  blocks: int64[n].
        """
        return [self._substitutes.documents(block) for block in blocks.tolist()]
