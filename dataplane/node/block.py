"""What the block table keeps of each block that is in memory, or on its way there."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dataplane.model import Region
from dataplane.node.dataset import Dataset
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
    told: tasks.BlockSource | None = None

    @property
    def touched(self) -> int:
        """When it was needed last."""
        return int(self.dataset.marks.touched[self.index])

    @property
    def regions(self) -> tuple[Region, ...]:
        """What it takes of the arena."""
        return tuple(region for region in (self.raw, self.decoded) if region is not None)

    @property
    def is_evictable(self) -> bool:
        """Whether nobody needs it just now, and nobody is writing it."""
        is_pinned = bool(self.dataset.marks.pins[self.index])
        return not is_pinned and self.phase in {Phase.READY, Phase.FETCHED}

    @property
    def source(self) -> tasks.BlockSource:
        """What a worker must know to gather from it, once it is ready."""
        if self.told is None:
            is_raw = self.decoded is None
            raw = self.dataset.raw_block(self.index, self.raw) if is_raw else None
            origin = self.dataset.origin(self.index)
            self.told = tasks.BlockSource(self.key, raw, self.decoded, origin)
        return self.told
