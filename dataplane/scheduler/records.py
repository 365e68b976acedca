"""The scheduler's records of blocks, slab tasks, streams and delivery arenas."""

from __future__ import annotations

import enum
from collections import deque

import numpy as np
from msgspec import Struct, field

from dataplane.arena.slots import AHEAD_SLOTS_MIN, Slots
from dataplane.model.errors import DataplaneError
from dataplane.model.records import MixHistory, Region, TakenMidway
from dataplane.plan.order import SampleOrder
from dataplane.rpc.tasks import Assembled
from dataplane.scheduler.dataset import BlockName, DatasetBlocks, DatasetLookup, Ints, Stamps
from dataplane.scheduler.walk import Plan, Walk

# -- block -------------------------------------------------------------------------------------
#
# The scheduler's record of each block that is in memory, or being loaded.


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
    lost: DataplaneError | None = None
    """The error of its read, if its shard is gone and rows of other blocks replace its rows."""
    lent: int = 0
    """How many times the block is being sent to a neighbour."""
    guest_of: tuple[SampleOrder, ...] | None = None
    """The orders for which the block is here, if a neighbour owns it and keeps it for the next
    epoch."""

    @property
    def is_guest(self) -> bool:
        """Whether a neighbour owns the block."""
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
        """The size of the block's rows in the arena; 0 if they are gathered from a file."""
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


NONE = np.empty(0, np.int64)

SlabKey = tuple[int, int, int, int, MixHistory | None, tuple[TakenMidway, ...]]
"""Epoch, first position, stride and number of the steps, the weights of a mixture, and the rows
that were removed since the launch began.
"""


class Moment(Struct):
    """The time of the current event, in seconds."""

    now: float = 0.0


class SlabPhase(enum.Enum):
    """The state of a slab task."""

    WAITING = "waiting for blocks"
    ASSEMBLING = "assembling"
    READY = "ready"
    FAILED = "failed"
    GONE = "gone"


_IN_TIME = 64
"""After this many slabs in a row that were in time, one fewer is made ahead."""
_NOT_AHEAD = 3
"""Slots that slabs made ahead do not take: for what a trainer holds, and for the slab that it waits
for. Otherwise, the rest of a slab that was cut would have to take the slot of a finished slab,
which would have to be made again.
"""
_PAUSE_S, _PAUSE_S_MAX = 0.25, 10.0
_WEIGHT = 0.25
"""The weight of the newest slab in the average time that a maker takes for a batch."""
_SLOWER_MOST = 8.0
"""The time of one slab counts as at most this many times the estimate for its maker."""
_AWAITED = 0.5
_EARLIER, _FASTER = 0.95, 0.125
"""After a slab that its maker had ready early, the estimate for the maker is multiplied by the
first number, but not below the second number times the time since the maker's previous slab.
"""
_FADING_S = 10.0
"""After this long without work, half of what made a maker seem slow is forgotten."""


class KnownMaker(Struct, eq=False):
    """A node that makes slabs; an empty name stands for the node's own workers. The maker has
    `batches` still to make, and takes `seconds` for one, 0 if unknown. If it is another node, it
    knows of `told` of its batches, and has been asked for `asked` of those.
    """

    name: str
    batches: int = 0
    told: int = 0
    asked: int = 0
    seconds: float = 0.0
    since: float = 0.0
    """When the maker last finished a slab, or got work after having none."""
    failures: int = 0
    left_alone_until: float = 0.0
    has_made: bool = False
    why: str = ""
    """The last failure of the maker."""

    def begin(self, count: int, now: float) -> None:
        """Add batches that the maker has to make."""
        if not self.batches:
            self.since = now
        self.batches += count

    def tell(self, count: int, now: float) -> None:
        """Note that the maker can begin with this many more of its batches."""
        if not self.told:
            self.since = now
        self.told += count

    def ended(self, count: int, now: float, waited_s: float) -> None:
        """Note that the maker has made this many batches. If they were awaited only for a small
        part of the time since the previous batches, the maker had them ready early, and may be
        faster than its rate suggests. Its first slab says nothing, since the maker opens and reads
        the dataset for that slab. A single late slab says little: a maker that gets no requests
        because it seems slow could never prove otherwise.
        """
        took = max(now - self.since, 0.0) / count
        took = min(took, _SLOWER_MOST * self.seconds) if self.seconds else took
        if not self.has_made:
            self.has_made = True
        elif not self.seconds or waited_s >= _AWAITED * took * count:
            self.seconds += (took - self.seconds) * (_WEIGHT if self.seconds else 1.0)
        else:
            least = min(self.seconds, took * _FASTER)
            self.seconds = max(self.seconds * _EARLIER, least)
        self.since = now
        self.failures, self.why = 0, ""

    def expected_s(self, usual_s: float, now: float) -> float:
        """Return the seconds that the next batch should take. A slow maker is tried again later."""
        if self.seconds <= usual_s or self.batches:
            return self.seconds or usual_s
        left = 2.0 ** -(max(now - self.since, 0.0) / _FADING_S)
        return usual_s + (self.seconds - usual_s) * float(left)

    def may_be_asked(self, now: float) -> bool:
        """Whether the maker may get a request: none while it is left alone; after that, one slab at
        a time until one has come.
        """
        return now >= self.left_alone_until and not (self.failures and self.asked)

    def failed(self, now: float, why: str) -> None:
        """Note that the maker sent no slab, and leave it alone, longer each time. Slabs that fail
        together count as one failure.
        """
        self.why = why
        if now >= self.left_alone_until:
            self.failures += 1
            pause_s = min(_PAUSE_S * 2.0 ** min(self.failures - 1, 16), _PAUSE_S_MAX)
            self.left_alone_until = now + pause_s


class SlabTask(Struct, eq=False):
    """A slab in progress for one stream. `missing` are its blocks that are not ready; `idle` are
    the missing blocks that are not being loaded, as far as known. A block is not needed if
    `excerpts` has an excerpt of it; `excerpt_bytes` are the sizes of excerpts that proved too large
    for their room. `rank` is the task's place in the order of need among all tasks. During
    assembly, `shared` is the copy of the slab that will be kept, or the kept slab that is copied.
    `maker` makes the slab, once that is decided; `is_told` says whether that node knows. If the
    node's own workers make the slab, they do so in `pieces`.
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
    excerpts: dict[int, Excerpt] = field(default_factory=dict)
    excerpt_bytes: dict[int, int] = field(default_factory=dict)
    rank: tuple[int, int] = (1 << 60, 0)
    maker: KnownMaker | None = None
    is_told: bool = False
    pieces: int = 0

    @property
    def is_light(self) -> bool:
        """Whether only other nodes can make the slab: its plan names no blocks."""
        return self.stream.walk.is_light

    def needs(self, block: int) -> bool:
        """Whether the slab has rows of that block."""
        if self.blocks is None:
            self.blocks = frozenset(self.plan.blocks.tolist())
        return block in self.blocks

    @property
    def keys(self) -> Ints:
        """The key of an excerpt or block for each of the slab's blocks, 0 for a block that is not
        ready.
        """
        blocks = self.plan.blocks
        found = self.datasets.keys(blocks)
        if self.excerpts:
            numbers = np.fromiter(self.excerpts, np.int64, len(self.excerpts))
            known = [excerpt.key for excerpt in self.excerpts.values()]
            found = found.copy()
            found[blocks.searchsorted(numbers)] = known
        return found

    @property
    def whole_blocks(self) -> Ints:
        """The blocks of which the task has no excerpt."""
        if not self.excerpts:
            return self.plan.blocks
        return np.setdiff1d(self.plan.blocks, [*self.excerpts], assume_unique=True)

    @property
    def largest_cost(self) -> int:
        """The arena bytes that the slab's largest block takes while it is decoded."""
        parts = self.datasets.parts(self.plan.blocks)
        return max((int(dataset.cost(blocks).max()) for dataset, blocks in parts), default=0)

    @property
    def memory_needed(self) -> int:
        """The bytes of the block arena that the slab's blocks need together, as far as known."""
        kept = largest = 0
        for dataset, blocks in self.datasets.parts(self.plan.blocks):
            marks = dataset.marks
            kept += int(dataset.kept(blocks).sum())
            largest = max(largest, int(marks.raw[blocks][marks.decoded[blocks] > 0].max(initial=0)))
        return kept + largest

    @property
    def first_block(self) -> BlockName | None:
        """The first of the slab's blocks; None for a batch without rows."""
        blocks = self.plan.blocks
        return self.datasets.name(int(blocks[0])) if len(blocks) else None

    @property
    def delivery(self) -> Delivery:
        """The delivery arena in which the slab will be."""
        return self.stream.delivery

    @property
    def datasets(self) -> DatasetLookup:
        """The datasets of the slab's rows."""
        return self.stream.datasets

    @property
    def is_awaited(self) -> bool:
        """Whether a consumer has requested exactly this slab next."""
        return bool(self.stream.requests) and self.stream.tasks[0] is self


class Group(Struct, eq=False):
    """Deliveries whose slabs are equal for equal steps: each slab is made once and copied for the
    other deliveries. A declared group is expected to grow. `is_whole`: its slabs were larger than
    expected.
    """

    name: object
    is_declared: bool
    users: int = 0
    is_closed: bool = False
    is_whole: bool = False
    made_count: int = 0
    copied_count: int = 0


class SharedSlab(Struct, eq=False):
    """A slab of a group that is kept in the block arena, or will be once it is `made`. The older of
    two has the smaller `number`.
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
        """The regions of the arena that the slab occupies."""
        return (self.region,)


class Delivery(Struct, eq=False):
    """The delivery arena of one dp_rank of a job, and its slabs. Its orders cover `datasets`."""

    delivery_id: int
    slots: Slots
    datasets: DatasetLookup
    group: Group | None = None
    lent: dict[int, Loan] = field(default_factory=dict)
    streams: list[StreamState] = field(default_factory=list)
    assembling_count: int = 0
    closing: bool = False
    has_lent: bool = False
    """Whether a slab was handed over."""
    ahead: int = AHEAD_SLOTS_MIN
    """How many slabs may be ready or being made: more while a trainer waits."""
    in_time: int = 0
    """Slabs in a row that were ready when they were requested."""

    @property
    def is_held_up(self) -> bool:
        """Whether the delivery's consumers together hold more slots than they may."""
        held = {loan.task.number for loan in self.lent.values() if not loan.task.oversize}
        return len(held) > self.slots.layout.held_slots

    def was_late(self, others: int, *, are_free: bool) -> None:
        """Note that a trainer waits for a slab: from now on, more are made ahead if workers
        `are_free`, and otherwise as many as for other trainers, `others`.
        """
        self.in_time = 0
        most = max(self.slots.layout.slot_count - _NOT_AHEAD, AHEAD_SLOTS_MIN)
        # Workers make pieces in the order of their slabs' starts, so trainers that wait get slabs
        # at rates in proportion to how many are made ahead.
        self.ahead = max(self.ahead, min(2 * self.ahead if are_free else others, most))

    def was_in_time(self) -> None:
        """Note that a slab was ready when it was requested: after many such slabs, fewer are made
        ahead.
        """
        self.in_time += 1
        if self.in_time >= _IN_TIME and self.ahead > AHEAD_SLOTS_MIN:
            self.in_time, self.ahead = 0, self.ahead - 1


class Loan(Struct, frozen=True):
    """A slab that a trainer holds. The slab is returned, at the latest, when `holder` is gone."""

    task: SlabTask
    holder: int


class StreamState(Struct, eq=False):
    """One consumer's stream: its slab tasks in order, and its unanswered requests.

    `after` is the stream that its consumer reads before it. `next_order` is the order of the stream
    that its consumer should read next, once it is known. `planned_to` is the position where its
    tasks end.
    """

    stream_id: int
    delivery: Delivery
    walk: Walk
    holder: int
    planned_to: int
    own_datasets: DatasetLookup | None = None
    tasks: deque[SlabTask] = field(default_factory=deque)
    requests: deque[tuple[int, float]] = field(default_factory=deque)
    planning: int = 0
    """Number of plans that were requested and have not arrived."""
    planned_all: bool = False
    error: DataplaneError | None = None
    closed: bool = False
    after: StreamState | None = None
    next_order: SampleOrder | None = None
    advanced_at: float = 0.0
    """When one of its slabs was last planned or made."""
    heard_at: float = 0.0
    """When its consumer was last told the progress of a slab."""

    @property
    def datasets(self) -> DatasetLookup:
        """The datasets that it reads: its own, or those of its delivery arena."""
        return self.own_datasets or self.delivery.datasets

    @property
    def reader(self) -> tuple[int, int]:
        """The name of the consumer that reads the walk's order, perhaps in several streams."""
        return self.holder, id(self.walk.order)

    @property
    def is_ahead(self) -> bool:
        """Whether the stream before it is still open."""
        return self.after is not None and not self.after.closed

    @property
    def tasks_before(self) -> int:
        """How many slabs the consumer reads before this stream's first one."""
        return len(self.after.tasks) if self.after is not None else 0

    @property
    def position(self) -> int:
        """The first position of the epoch that has not been made yet."""
        return self.tasks[0].plan.first_position if self.tasks else self.planned_to

    @property
    def wanted_position(self) -> int:
        """The first position for which the stream has no slab, finished or being made."""
        for task in self.tasks:
            if task.phase is SlabPhase.WAITING:
                return self.walk.position_of(task.plan)
        return self.planned_to

    @property
    def made_count(self) -> int:
        """Slabs of this stream that have a slot."""
        return sum(task.slot is not None for task in self.tasks)
