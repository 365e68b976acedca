"""The scheduler's events (inputs) and effects (outputs): its whole interface.

The caller passes each event to `Scheduler.decide` and carries out the returned effects in order.
For each PlanSteps, Fetch, DecodeBlock, AssembleSlab, ExtractRows and CopyKept it reports the end
exactly once, as the event Planned, BlockFetched, BlockDecoded, SlabAssembled or RowsExtracted. All
times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from dataplane.arena.slots import SlotLayout
from dataplane.errors import DataplaneError
from dataplane.model import Region
from dataplane.rpc.messages import FromNodeBody
from dataplane.rpc.tasks import Render, ResultBody
from dataplane.scheduler.dataset import BlockName, DatasetBlocks, DatasetLookup
from dataplane.scheduler.walk import Plan, Walk

# -- events ------------------------------------------------------------------------------------


class DeliveryOpened(Struct, frozen=True):
    """A delivery arena was opened for one dp_rank of a job, whose orders cover these datasets.
    Deliveries of one `group` have equal slabs for equal steps; None shares nothing. In a declared
    group, more jobs are expected to join.
    """

    delivery_id: int
    layout: SlotLayout
    datasets: DatasetLookup
    group: object
    is_declared: bool


class DeliveryClosed(Struct, frozen=True):
    """A delivery arena has no users left."""

    delivery_id: int


class DatasetForgotten(Struct, frozen=True):
    """A dataset has no readers left."""

    dataset: DatasetBlocks


class StreamStarted(Struct, frozen=True):
    """A consumer's stream starts; `holder` will hold its slabs. Until the stream `after` is closed,
    this one has the lowest priority: it gets only resources that the other leaves.
    """

    stream_id: int
    delivery_id: int
    walk: Walk
    holder: int
    after: int | None = None


class StreamAdopted(Struct, frozen=True):
    """The consumer asked for the stream that was opened ahead: it now has normal priority."""

    stream_id: int


class StreamClosed(Struct, frozen=True):
    """The consumer is gone, or has enough."""

    stream_id: int


class StreamRefused(Struct, frozen=True):
    """Requests for slabs of this stream get this error."""

    stream_id: int
    error: DataplaneError


class Requested(Struct, frozen=True):
    """The consumer wants the next slab of its stream."""

    stream_id: int
    request_id: int


class Released(Struct, frozen=True):
    """The holder released these slabs; unknown ones were released before."""

    delivery_id: int
    slab_ids: Sequence[int]


class HolderGone(Struct, frozen=True):
    """A holder is gone; everything it held is free."""

    delivery_id: int
    holder: int


class Planned(Struct, frozen=True):
    """The end of a PlanSteps. Fewer plans than requested mean that the stream ends with them."""

    stream_id: int
    plans: Sequence[Plan] = ()
    error: DataplaneError | None = None


class BlockFetched(Struct, frozen=True):
    """The end of a Fetch. `is_away`: the store cannot be reached now, but may be later."""

    key: int
    error: DataplaneError | None = None
    is_away: bool = False


class BlockDecoded(Struct, frozen=True):
    """The end of a DecodeBlock, on which a worker started at `started`."""

    key: int
    result: ResultBody
    started: float


class SlabAssembled(Struct, frozen=True):
    """The end of an AssembleSlab or a CopyKept. `is_kept`: the copy in `keep`, if one was
    requested, was written too.
    """

    number: int
    result: ResultBody
    started: float
    is_kept: bool = True


class RowsExtracted(Struct, frozen=True):
    """The end of an ExtractRows, on which a worker started at `started`."""

    number: int
    result: ResultBody
    started: float


class Ticked(Struct, frozen=True):
    """Time has passed. Gives the average number of busy workers, and the bytes of slabs made per
    second, since the last tick.
    """

    busy: float
    bytes_per_s: float


class Settled(Struct, frozen=True):
    """All events so far were reported: decide what can be done next."""


Event = (
    DeliveryOpened | DeliveryClosed | DatasetForgotten | StreamStarted | StreamAdopted
    | StreamClosed | StreamRefused | Requested | Released | HolderGone | Planned | BlockFetched
    | BlockDecoded | RowsExtracted | SlabAssembled | Ticked | Settled
)  # fmt: skip

# -- effects -----------------------------------------------------------------------------------


class PlanSteps(Struct, frozen=True):
    """Take the next `count` plans of the walk."""

    stream_id: int
    walk: Walk
    count: int


class Fetch(Struct, frozen=True):
    """Read a block into this part of the block arena. `is_joined`: in one request with the block of
    the Fetch before this one, behind which it lies in the shard.
    """

    key: int
    dataset_id: int
    block: int
    into: Region
    is_joined: bool = False


class DecodeBlock(Struct, frozen=True):
    """Have a worker decode a block; `raw` is where its bytes are, None for a local file."""

    key: int
    dataset_id: int
    block: int
    raw: Region | None
    into: Region


class ClearRestartIndexes(Struct, frozen=True):
    """Zero this part of the block arena, before any later effect is carried out."""

    key: int
    region: Region


class AssembleSlab(Struct, frozen=True):
    """Have a worker gather the rows of a plan into a slab, and copy the slab to `keep`, a part of
    the block arena. Before that, write the row index to its place in the delivery arena. `first` is
    the first of the slab's blocks, None for a batch without rows.

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


class ExcerptRows(Struct, frozen=True):
    """Rows of a block, and where their excerpt goes.

    Shapes:  rows: int32[n], rising.
    """

    into: Region
    rows: npt.NDArray[np.int32]


class ExtractRows(Struct, frozen=True):
    """Copy rows of the block with this key into excerpts."""

    number: int
    key: int
    excerpts: Sequence[ExcerptRows]


class CopyKept(Struct, frozen=True):
    """Have a worker copy the kept copy of an equal slab; `first` is as in AssembleSlab."""

    number: int
    delivery_id: int
    first: BlockName | None
    kept: Region
    slab: Region


class Send(Struct, frozen=True):
    """Send a slab, or an error, to the consumer that requested it."""

    stream_id: int
    request_id: int
    body: FromNodeBody


class Stalled(Struct, frozen=True):
    """Answer a request that has waited too long with the stage of the next slab, and its missing
    blocks in the order in which they are read.
    """

    stream_id: int
    request_id: int
    waited_s: float
    stage: str
    missing: Sequence[BlockName]


class AllPlanned(Struct, frozen=True):
    """The last plan of a stream was made, or planning failed."""

    stream_id: int
    has_failed: bool


class ForgetBlock(Struct, frozen=True):
    """The memory of the block with this key is about to be reused."""

    key: int


class DropDelivery(Struct, frozen=True):
    """Release a delivery arena that is no longer written or read."""

    delivery_id: int


class ResizePool(Struct, frozen=True):
    """Change the number of workers."""

    count: int


class Note(Struct, frozen=True):
    """A line for the log."""

    event: str
    facts: Mapping[str, object] = field(default_factory=dict)
    is_failure: bool = False


Effect = (
    PlanSteps | Fetch | DecodeBlock | ClearRestartIndexes | AssembleSlab | ExtractRows | CopyKept
    | Send | Stalled | AllPlanned | ForgetBlock | DropDelivery | ResizePool | Note
)  # fmt: skip
