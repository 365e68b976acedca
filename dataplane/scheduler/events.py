"""What happens to a scheduler, and what it wants done: the whole traffic with the outside.

Events are told with `Scheduler.decide`; the effects that it returns are to be carried out in their
order. Whoever carries out a PlanSteps, Fetch, DecodeBlock, AssembleSlab or CopyKept tells its end,
once, as an event: Planned, BlockFetched, BlockDecoded or SlabAssembled. All times are seconds of
one clock, which never goes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dataplane.arena.slots import SlotLayout
from dataplane.errors import DataplaneError
from dataplane.model import Region
from dataplane.rpc.messages import FromNodeBody
from dataplane.rpc.tasks import Render, ResultBody
from dataplane.scheduler.dataset import BlockName, DatasetBlocks, DatasetLookup
from dataplane.scheduler.walk import Plan, Walk

# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeliveryOpened:
    """There is a delivery arena for one dp_rank of a job, whose orders are over these datasets.
    `group` names those whose slabs are equal where their steps are; None shares nothing. A declared
    group expects others to come.
    """

    delivery_id: int
    layout: SlotLayout
    datasets: DatasetLookup
    group: object = None
    is_declared: bool = False


@dataclass(frozen=True, slots=True)
class DeliveryClosed:
    """Nobody uses this delivery arena any more."""

    delivery_id: int


@dataclass(frozen=True, slots=True)
class DatasetForgotten:
    """Nobody reads this dataset any more."""

    dataset: DatasetBlocks


@dataclass(frozen=True, slots=True)
class StreamStarted:
    """A consumer starts to walk; `holder` will have its slabs. Until the stream `after` is closed
    this one comes last: it is made of what that one leaves.
    """

    stream_id: int
    delivery_id: int
    walk: Walk
    holder: int
    after: int | None = None


@dataclass(frozen=True, slots=True)
class StreamAdopted:
    """The consumer asks for the stream that was opened ahead: it comes last no longer."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The consumer is gone, or has enough."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class StreamRefused:
    """Whoever waits for a slab of this stream gets this error."""

    stream_id: int
    error: DataplaneError


@dataclass(frozen=True, slots=True)
class Requested:
    """The consumer wants the next slab of its stream."""

    stream_id: int
    request_id: int


@dataclass(frozen=True, slots=True)
class Released:
    """Nobody holds these slabs any more; unknown ones were released before."""

    delivery_id: int
    slab_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class HolderGone:
    """Whatever this holder had is free."""

    delivery_id: int
    holder: int


@dataclass(frozen=True, slots=True)
class Planned:
    """The end of a PlanSteps: fewer plans than asked for are the last ones of the stream."""

    stream_id: int
    plans: Sequence[Plan] = ()
    error: DataplaneError | None = None


@dataclass(frozen=True, slots=True)
class BlockFetched:
    """The end of a Fetch. `is_away`: the store cannot be reached now, and may be later."""

    key: int
    error: DataplaneError | None = None
    is_away: bool = False


@dataclass(frozen=True, slots=True)
class BlockDecoded:
    """The end of a DecodeBlock, on which a worker started at `started`."""

    key: int
    result: ResultBody
    started: float


@dataclass(frozen=True, slots=True)
class SlabAssembled:
    """The end of an AssembleSlab or a CopyKept. `is_kept`: the second place, if one was asked for,
    has it, too.
    """

    number: int
    result: ResultBody
    started: float
    is_kept: bool = True


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed. Since the last tick so many workers were at work on average, and made so
    many bytes of slabs a second.
    """

    busy: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Settled:
    """Everything that has happened so far was told: look for what can be done next."""


Event = (
    DeliveryOpened | DeliveryClosed | DatasetForgotten | StreamStarted | StreamAdopted
    | StreamClosed | StreamRefused | Requested | Released | HolderGone | Planned | BlockFetched
    | BlockDecoded | SlabAssembled | Ticked | Settled
)  # fmt: skip

# -- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanSteps:
    """Take the next `count` plans of the walk."""

    stream_id: int
    walk: Walk
    count: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read a block into this part of the block arena."""

    key: int
    dataset_id: int
    block: int
    into: Region


@dataclass(frozen=True, slots=True)
class DecodeBlock:
    """Have a worker decode a block; `raw` is where its bytes are, None in a local file."""

    key: int
    dataset_id: int
    block: int
    raw: Region | None
    into: Region


@dataclass(frozen=True, slots=True)
class ClearTrails:
    """Zero this part of the block arena, before anything that comes after it is done."""

    key: int
    region: Region


@dataclass(frozen=True, slots=True)
class AssembleSlab:
    """Have a worker gather the rows of a plan into a slab, and the same into `keep`, a part of the
    block arena. The row index goes to its place in the delivery arena before. `first` is the first
    of its blocks, None for a batch without rows.

    Shapes:  keys: the block of each of plan.blocks.
    """

    number: int
    delivery_id: int
    first: BlockName | None
    plan: Plan
    keys: tuple[int, ...]
    row_index: Region
    slab: Region
    render: Render | None
    keep: Region | None


@dataclass(frozen=True, slots=True)
class CopyKept:
    """Have a worker copy what was kept of an equal slab; `first` is as in AssembleSlab."""

    number: int
    delivery_id: int
    first: BlockName | None
    kept: Region
    slab: Region


@dataclass(frozen=True, slots=True)
class Send:
    """Answer a request of a stream's consumer."""

    stream_id: int
    request_id: int
    body: FromNodeBody


@dataclass(frozen=True, slots=True)
class Stalled:
    """Answer a request that has waited too long with what it waits for: the stage of the next slab,
    and those of its blocks that are not there, in the order's order.
    """

    stream_id: int
    request_id: int
    waited_s: float
    stage: str
    missing: Sequence[BlockName]


@dataclass(frozen=True, slots=True)
class AllPlanned:
    """The last plan of a stream is there, or planning has failed."""

    stream_id: int
    has_failed: bool


@dataclass(frozen=True, slots=True)
class ForgetBlock:
    """The memory of the block with this key is about to hold another one."""

    key: int


@dataclass(frozen=True, slots=True)
class DropDelivery:
    """No worker writes into this delivery arena any more, and nobody reads it."""

    delivery_id: int


@dataclass(frozen=True, slots=True)
class ResizePool:
    """Have so many workers."""

    count: int


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log."""

    event: str
    facts: Mapping[str, object] = field(default_factory=dict)
    is_failure: bool = False


Effect = (
    PlanSteps | Fetch | DecodeBlock | ClearTrails | AssembleSlab | CopyKept | Send | Stalled
    | AllPlanned | ForgetBlock | DropDelivery | ResizePool | Note
)  # fmt: skip
