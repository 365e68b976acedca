"""What the engine keeps of each slab in the making, each stream and each delivery arena."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dataplane.arena.memfd import Arena
from dataplane.arena.slots import Slots
from dataplane.errors import DataplaneError
from dataplane.model import Region
from dataplane.node.account import Stamps
from dataplane.node.columns import Ints
from dataplane.node.dataset import Dataset
from dataplane.node.walk import Plan, Walk
from dataplane.rpc.messages import FromNodeBody
from dataplane.rpc.tasks import Assembled

NONE = np.empty(0, np.int64)

Send = Callable[[int, FromNodeBody], None]
SlabKey = tuple[int, int, int, int]
"""Epoch, first position, stride of the steps, and how many."""


class Phase(enum.Enum):
    """How far a slab has come."""

    WAITING = "waiting for blocks"
    ASSEMBLING = "assembling"
    READY = "ready"
    FAILED = "failed"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Work:
    """One slab in the making, for one stream. `missing` are the blocks that are not ready, and
    `idle` those of them that nobody is loading, as far as is known. While it is assembled `shared`
    is what is kept of it, or what it is a copy of.
    """

    stream: StreamState
    plan: Plan
    number: int
    stamps: Stamps
    phase: Phase = Phase.WAITING
    missing: set[int] = field(default_factory=set)
    idle: set[int] = field(default_factory=set)
    pinned: Ints = field(default_factory=lambda: NONE)
    slot: Region | None = None
    oversize: bool = False
    assembled: Assembled | None = None
    error: DataplaneError | None = None
    blocks: frozenset[int] | None = None
    shared: SharedSlab | None = None

    def needs(self, block: int) -> bool:
        """Whether rows of it are gathered from that block."""
        if self.blocks is None:
            self.blocks = frozenset(self.plan.blocks.tolist())
        return block in self.blocks

    @property
    def memory_needed(self) -> int:
        """Bytes of block arena that its blocks take together, as far as is known."""
        marks, blocks = self.dataset.marks, self.plan.blocks
        raw, decoded = marks.raw[blocks], marks.decoded[blocks]
        kept = np.where(decoded > 0, decoded, raw).sum()
        return int(kept + raw[decoded > 0].max(initial=0))

    @property
    def delivery(self) -> Delivery:
        """Where it will lie."""
        return self.stream.delivery

    @property
    def dataset(self) -> Dataset:
        """Where its rows come from."""
        return self.delivery.dataset


@dataclass(slots=True, eq=False)
class Group:
    """Deliveries whose slabs are equal where their steps are: one is made, the others copied. What
    was declared is expected to grow. `is_whole`: its slabs were larger than thought.
    """

    is_declared: bool = False
    users: int = 0
    is_closed: bool = False
    is_whole: bool = False
    made_count: int = 0
    copied_count: int = 0


@dataclass(slots=True, eq=False)
class SharedSlab:
    """A slab of a group, kept in the block arena, or about to be while it is not `made`. `number`
    tells the older one.
    """

    group: Group
    key: SlabKey
    number: int
    region: Region
    made: Assembled | None = None
    made_at: float = 0.0
    readers: int = 0

    @property
    def regions(self) -> tuple[Region, ...]:
        """What it takes of the arena."""
        return (self.region,)


@dataclass(slots=True, eq=False)
class Delivery:
    """The delivery arena of one dp_rank of a job, and the slabs that live in it."""

    arena_id: int
    arena: Arena
    slots: Slots
    dataset: Dataset
    lent: dict[int, Loan] = field(default_factory=dict)
    streams: list[StreamState] = field(default_factory=list)
    users: int = 0
    assembling_count: int = 0
    closing: bool = False
    group: Group | None = None

    @property
    def is_held_up(self) -> bool:
        """Whether consumers hold more slots than are theirs to hold, all of them together."""
        held = {loan.work.number for loan in self.lent.values() if not loan.work.oversize}
        layout = self.slots.layout
        return len(held) > layout.slot_count - layout.ahead_slots


@dataclass(frozen=True, slots=True)
class Loan:
    """A slab that a trainer has. `holder` is whose end gives it back."""

    work: Work
    holder: object


@dataclass(slots=True, eq=False)
class StreamState:
    """One consumer's stream: the works ahead of it, in order, and the requests it waits with.

    `after` is the stream that its consumer takes before it; `when_planned` is called once, when the
    last work is planned. `planned_to` is the position that its works come to.
    """

    stream_id: int
    delivery: Delivery
    walk: Walk
    send: Send
    holder: object
    planned_to: int
    works: deque[Work] = field(default_factory=deque)
    requests: deque[tuple[int, float]] = field(default_factory=deque)
    planning: bool = False
    planned_all: bool = False
    error: DataplaneError | None = None
    closed: bool = False
    after: StreamState | None = None
    when_planned: Callable[[], None] | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether it waits for the end of the stream that it comes after."""
        return self.after is not None and not self.after.closed

    @property
    def position(self) -> int:
        """The first position of the epoch that is still to be made."""
        return self.works[0].plan.first_position if self.works else self.planned_to

    @property
    def wanted_position(self) -> int:
        """The first position of which it has no slab, and none is being made for it."""
        for work in self.works:
            if work.phase is Phase.WAITING:
                return self.walk.position_of(work.plan)
        return self.planned_to

    @property
    def made_count(self) -> int:
        """Slabs of this stream that have a slot."""
        return sum(work.slot is not None for work in self.works)
