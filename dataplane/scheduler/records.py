"""What the scheduler keeps of each slab in the making, each stream and each delivery arena."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from dataplane.arena.slots import Slots
from dataplane.errors import DataplaneError
from dataplane.model import Region
from dataplane.rpc.tasks import Assembled
from dataplane.scheduler.account import Stamps
from dataplane.scheduler.dataset import BlockName, DatasetLookup, Ints
from dataplane.scheduler.walk import Plan, Walk

NONE = np.empty(0, np.int64)

SlabKey = tuple[int, int, int, int]
"""Epoch, first position, stride of the steps, and how many."""


@dataclass(slots=True)
class Moment:
    """The time of what is being decided, in seconds."""

    now: float = 0.0


class SlabPhase(enum.Enum):
    """How far a slab has come."""

    WAITING = "waiting for blocks"
    ASSEMBLING = "assembling"
    READY = "ready"
    FAILED = "failed"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class SlabTask:
    """One slab in the making, for one stream. `missing` are the blocks that are not ready, and
    `idle` those of them that nobody is loading, as far as is known. While it is assembled `shared`
    is what is kept of it, or what it is a copy of.
    """

    stream: StreamState
    plan: Plan
    number: int
    stamps: Stamps
    phase: SlabPhase = SlabPhase.WAITING
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
        kept = largest = 0
        for dataset, blocks in self.datasets.parts(self.plan.blocks):
            raw, decoded = dataset.marks.raw[blocks], dataset.marks.decoded[blocks]
            kept += int(np.where(decoded > 0, decoded, raw).sum())
            largest = max(largest, int(raw[decoded > 0].max(initial=0)))
        return kept + largest

    @property
    def first_block(self) -> BlockName | None:
        """The first of its blocks; None for a batch without rows."""
        blocks = self.plan.blocks
        return self.datasets.name(int(blocks[0])) if len(blocks) else None

    @property
    def delivery(self) -> Delivery:
        """Where it will lie."""
        return self.stream.delivery

    @property
    def datasets(self) -> DatasetLookup:
        """Where its rows come from."""
        return self.delivery.datasets

    @property
    def is_awaited(self) -> bool:
        """Whether it is the very next slab of a consumer that has asked."""
        return bool(self.stream.requests) and self.stream.tasks[0] is self


@dataclass(slots=True, eq=False)
class Group:
    """Deliveries whose slabs are equal where their steps are: one is made, the others copied. What
    was declared is expected to grow. `is_whole`: its slabs were larger than thought.
    """

    name: object
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
    """The delivery arena of one dp_rank of a job, and the slabs that live in it. Its orders are
    over `datasets`.
    """

    delivery_id: int
    slots: Slots
    datasets: DatasetLookup
    group: Group | None = None
    lent: dict[int, Loan] = field(default_factory=dict)
    streams: list[StreamState] = field(default_factory=list)
    assembling_count: int = 0
    closing: bool = False

    @property
    def is_held_up(self) -> bool:
        """Whether consumers hold more slots than are theirs to hold, all of them together."""
        held = {loan.task.number for loan in self.lent.values() if not loan.task.oversize}
        layout = self.slots.layout
        return len(held) > layout.slot_count - layout.ahead_slots


@dataclass(frozen=True, slots=True)
class Loan:
    """A slab that a trainer has. `holder` is whose end gives it back."""

    task: SlabTask
    holder: int


@dataclass(slots=True, eq=False)
class StreamState:
    """One consumer's stream: the slab tasks ahead of it, in order, and the requests it waits with.

    `after` is the stream that its consumer takes before it. `planned_to` is the position that its
    tasks come to.
    """

    stream_id: int
    delivery: Delivery
    walk: Walk
    holder: int
    planned_to: int
    tasks: deque[SlabTask] = field(default_factory=deque)
    requests: deque[tuple[int, float]] = field(default_factory=deque)
    planning: int = 0
    """How many plans were asked for that are not there yet."""
    planned_all: bool = False
    error: DataplaneError | None = None
    closed: bool = False
    after: StreamState | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether it waits for the end of the stream that it comes after."""
        return self.after is not None and not self.after.closed

    @property
    def tasks_before(self) -> int:
        """How many slabs its consumer takes before the first of it."""
        return len(self.after.tasks) if self.after is not None else 0

    @property
    def position(self) -> int:
        """The first position of the epoch that is still to be made."""
        return self.tasks[0].plan.first_position if self.tasks else self.planned_to

    @property
    def wanted_position(self) -> int:
        """The first position of which it has no slab, and none is being made for it."""
        for task in self.tasks:
            if task.phase is SlabPhase.WAITING:
                return self.walk.position_of(task.plan)
        return self.planned_to

    @property
    def made_count(self) -> int:
        """Slabs of this stream that have a slot."""
        return sum(task.slot is not None for task in self.tasks)
