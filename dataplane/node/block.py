"""What the block table keeps of each block that is in memory, or on its way there, and what it asks
of whoever uses it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dataplane.errors import DataplaneError
from dataplane.model import Region
from dataplane.node.dataset import Dataset
from dataplane.node.death import Place
from dataplane.plan.order import Order
from dataplane.rpc import tasks


class Phase(enum.Enum):
    """How far a block has come."""

    FETCHING = "fetching"
    FETCHED = "fetched"
    DECODING = "decoding"
    READY = "ready"


@dataclass(slots=True, eq=False)
class Block:
    """One block that is in memory, or on its way. What is asked of many at once is in the marks
    of its dataset.
    """

    dataset: Dataset
    index: int
    key: int
    phase: Phase = Phase.FETCHING
    raw: Region | None = None
    decoded: Region | None = None
    trails: Region | None = None
    told: tasks.BlockSource | None = None

    @property
    def touched(self) -> int:
        """When it was needed last."""
        return int(self.dataset.marks.touched[self.index])

    @property
    def regions(self) -> tuple[Region, ...]:
        """What it takes of the arena."""
        return tuple(r for r in (self.raw, self.decoded, self.trails) if r is not None)

    @property
    def is_evictable(self) -> bool:
        """Whether nobody needs it just now, and nobody is writing it."""
        is_pinned = bool(self.dataset.marks.pins[self.index])
        return not is_pinned and self.phase in {Phase.READY, Phase.FETCHED}

    @property
    def place(self) -> Place:
        """Where it is in its shard, for errors."""
        return self.dataset.place(self.index)

    @property
    def source(self) -> tasks.BlockSource:
        """What a worker must know to gather from it, once it is ready."""
        if self.told is None:
            is_raw = self.decoded is None
            raw = self.dataset.raw_block(self.index, self.raw) if is_raw else None
            origin = self.dataset.origin(self.index)
            self.told = tasks.BlockSource(self.key, raw, self.decoded, origin, self.trails)
        return self.told


class Listener(Protocol):
    """Who uses the table: told whatever changes, in the event loop."""

    def walks(self, dataset: Dataset) -> Sequence[tuple[Order, int]]:
        """The walks over this dataset: order, and the position each has come to."""

    def crops(self, dataset: Dataset) -> bool:
        """Whether anybody wants parts of its images."""

    def block_ready(self, dataset: Dataset, index: int) -> None:
        """Rows can be gathered from it now."""

    def block_gone(self, dataset: Dataset, index: int) -> None:
        """It was evicted, or must be loaded again: its memory is free."""

    def block_failed(self, dataset: Dataset, index: int, error: DataplaneError) -> None:
        """It cannot be loaded."""

    def spare(self) -> Sequence[Spare]:
        """What else is in the arena and may go, least needed first."""

    def evict_spare(self, spare: Spare) -> None:
        """It must go now: have its memory freed."""


class Spare(Protocol):
    """Something that lies in the arena as long as no block needs the room."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """What it takes of the arena."""
