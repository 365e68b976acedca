"""The scheduler's record of each block that is in memory, or being loaded."""

from __future__ import annotations

import enum

from msgspec import Struct

from dataplane.errors import DataplaneError
from dataplane.model import Region
from dataplane.plan.order import SampleOrder
from dataplane.scheduler.dataset import DatasetBlocks


class BlockPhase(enum.Enum):
    """The stages of a block."""

    FETCHING = "fetching"
    FETCHED = "fetched"
    DECODING = "decoding"
    READY = "ready"


class CachedBlock(Struct, eq=False):
    """One block that is in memory or being loaded. Properties that are needed for many blocks at
    once are in its dataset's `Marks`.
    """

    dataset: DatasetBlocks
    index: int
    key: int
    phase: BlockPhase = BlockPhase.FETCHING
    raw: Region | None = None
    decoded: Region | None = None
    restart_indexes: Region | None = None
    lent: int = 0
    """How many times it is being sent to a neighbour."""
    guest_of: tuple[SampleOrder, ...] | None = None
    """If a neighbour owns it, and keeps it for the next epoch: the orders that it is here for."""

    @property
    def is_guest(self) -> bool:
        """Whether a neighbour owns it."""
        return self.guest_of is not None

    def is_here_for(self, order: SampleOrder | None) -> bool:
        """Whether the block is kept for this order, or for that of a stream that is not open."""
        return self.guest_of is None or any(one is order for one in self.guest_of)

    @property
    def touched(self) -> int:
        """When the block was last needed."""
        return int(self.dataset.marks.touched[self.index])

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions of the arena that the block occupies."""
        return tuple(r for r in (self.raw, self.decoded, self.restart_indexes) if r is not None)

    @property
    def raw_bytes(self) -> Region | None:
        """The region of the bytes as they were read, without the shard's preamble, while they are
        in memory.
        """
        places = self.dataset.places
        if self.raw is None or places is None:
            return None
        length = places.read_bytes(self.index)
        return Region(self.raw.offset + self.raw.length - length, length)

    @property
    def kept_bytes(self) -> int:
        """The size of its rows in the arena; 0 if they are gathered from a file."""
        kept = self.decoded or self.raw
        return 0 if kept is None else kept.length

    @property
    def is_wanted(self) -> bool:
        """Whether a waiting task needs rows of the block."""
        return bool(self.dataset.marks.wanted[self.index])

    @property
    def is_evictable(self) -> bool:
        """Whether no task has the block pinned and nothing is writing it."""
        is_pinned = bool(self.dataset.marks.pins[self.index])
        return not is_pinned and self.phase in {BlockPhase.READY, BlockPhase.FETCHED}


class Excerpt(Struct, eq=False):
    """Some rows of a block, in memory on their own. `users` slab tasks need them."""

    dataset: DatasetBlocks
    index: int
    key: int
    decoded: Region
    row_count: int
    users: int = 0


class BlockOutcome(enum.Enum):
    """The outcome of loading a block, for the tasks that wait for it."""

    READY = "rows can be gathered from it"
    GONE = "it must be loaded again, or go on to be loaded"
    FAILED = "it cannot be loaded"


class BlockChange(Struct, frozen=True):
    """A change of one block."""

    change: BlockOutcome
    dataset: DatasetBlocks
    index: int
    error: DataplaneError | None = None
