"""The scheduler's events (inputs) and effects (outputs): its whole interface.

The caller passes each event to `Scheduler.decide` and carries out the returned effects in order. It
reports the end of each PlanSteps, Fetch, DecodeBlock, AssembleSlab, MakeElsewhere, ExtractRows,
CopyKept, LendBlock and KeepBlock exactly once, as the event Planned, BlockFetched, BlockDecoded,
SlabAssembled, RowsExtracted, SendingEnded or KeepingEnded. Times are monotonic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from dataplane.arena.slots import SlotLayout
from dataplane.model.errors import DataplaneError
from dataplane.model.records import Region, Stream
from dataplane.plan.order import SampleOrder
from dataplane.rpc.lending import StepRange
from dataplane.rpc.messages import FromNodeBody
from dataplane.rpc.tasks import Collation, Render, ResultBody
from dataplane.scheduler.dataset import BlockName, DatasetBlocks, DatasetLookup
from dataplane.scheduler.records import BlockPhase
from dataplane.scheduler.walk import NO_PACKS, BlockPacks, Plan, Walk

# -- disk events -------------------------------------------------------------------------------
#
# The scheduler's events and effects about the node's disk.
#
# The caller answers each KeepBlock with one KeepingEnded. The caller reports the blocks that it
# finds on the disk before anything is written there, and again after each ScanDisk.


class DiskName(NamedTuple):
    """A block on disk: the digest of its dataset, and its number there."""

    digest: bytes
    block: int


class DiskFound(Struct, frozen=True):
    """Report blocks on disk from an earlier run, with their sizes. Datasets that were written last
    come last.
    """

    digest: bytes
    blocks: Sequence[int]
    disk_bytes: Sequence[int]


class DiskScanned(Struct, frozen=True):
    """Report the end of a scan: all blocks on disk were reported, or `trouble` says why they cannot
    be.
    """

    trouble: str = ""


class DiskMissed(Struct, frozen=True):
    """Report that a Fetch did not get a block from the disk, and continues elsewhere: the file is
    missing, or `trouble` says why the disk cannot be read.
    """

    dataset: DatasetBlocks
    block: int
    trouble: str = ""


class KeepingEnded(Struct, frozen=True):
    """Report the end of a KeepBlock: it is done, or `trouble` says why not. The block's memory is
    no longer read.
    """

    number: int
    trouble: str = ""


DiskEvent = DiskFound | DiskScanned | DiskMissed | KeepingEnded


class KeepBlock(Struct, frozen=True):
    """Remove the blocks `instead_of` from the disk, then write `region` of the block arena as the
    block `name`; write nothing if the region is empty.
    """

    number: int
    name: DiskName
    region: Region
    instead_of: Sequence[DiskName] = ()


class ScanDisk(Struct, frozen=True):
    """Report the blocks on disk again, since the last scan failed."""


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


class BlocksInherited(Struct, frozen=True):
    """The dataset `heir` takes over equal blocks of the dataset `former`, which nobody reads any
    more: the facts about them, and their copies in memory.

    Shapes:  blocks, formers: int64[n], the numbers of the blocks in `heir` and in `former`.
    """

    heir: DatasetBlocks
    former: DatasetBlocks
    blocks: npt.NDArray[np.int64]
    formers: npt.NDArray[np.int64]


class StreamStarted(Struct, frozen=True):
    """A consumer's stream starts; `holder` will hold its slabs. Until the stream `after` is closed,
    this one has the lowest priority: it gets only resources that the other leaves unused. It reads
    these `datasets`, or those of the delivery arena.
    """

    stream_id: int
    delivery_id: int
    walk: Walk
    holder: int
    after: int | None = None
    datasets: DatasetLookup | None = None


class StreamAdopted(Struct, frozen=True):
    """The consumer asked for a stream that was opened ahead: the stream now has normal priority."""

    stream_id: int


class NextOrderKnown(Struct, frozen=True):
    """The order that this stream's consumer is expected to read next: blocks are kept for it."""

    stream_id: int
    order: SampleOrder


class StreamClosed(Struct, frozen=True):
    """The consumer of a stream is gone, or wants no more slabs."""

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
    """The end of a Fetch. `is_away`: the store cannot be reached now, but may be later. `is_lost`:
    the shard is gone, and rows of other blocks replace those of the block.
    `decoded_bytes`: nothing was read, since the neighbour has the block only decoded, in this size.
    `is_guest`: a neighbour owns it, and sent `neighbour_bytes`. `is_from_disk`: the node's disk had
    it.
    """

    key: int
    error: DataplaneError | None = None
    is_away: bool = False
    decoded_bytes: int = 0
    is_guest: bool = False
    is_from_disk: bool = False
    neighbour_bytes: int = 0
    is_lost: bool = False


class BlockDecoded(Struct, frozen=True):
    """The end of a DecodeBlock, on which a worker started at `started`."""

    key: int
    result: ResultBody
    started: float


class SlabAssembled(Struct, frozen=True):
    """The end of an AssembleSlab, a CopyKept or a MakeElsewhere. `is_kept`: the copy in `keep`, if
    one was requested, was written too. NeighbourGone: the slab must be made again. `worker_s` is
    the total time of the node's own workers.
    """

    number: int
    result: ResultBody
    started: float
    is_kept: bool = True
    worker_s: float = 0.0


class MakersKnown(Struct, frozen=True):
    """The nodes that can make slabs of this delivery, by name."""

    delivery_id: int
    makers: tuple[str, ...]


class RowsExtracted(Struct, frozen=True):
    """The end of an ExtractRows, on which a worker started at `started`."""

    number: int
    result: ResultBody
    started: float


class NeighbourAsked(Struct, frozen=True):
    """Another node wants part of a block: of its bytes as read without the preamble, or decoded.
    `is_of_run`: the request is one of several with a joint answer; it is refused unless the block
    is here or its read begins at once.
    """

    number: int
    dataset: DatasetBlocks
    block: int
    part: Region
    is_decoded: bool = False
    is_of_run: bool = False


class SendingEnded(Struct, frozen=True):
    """The end of a LendBlock: the region is no longer read."""

    number: int


class Ticked(Struct, frozen=True):
    """Time has passed. Has the average number of busy workers and the bytes of slabs made per
    second, both since the last tick; and the numbers of datasets that have tasks `at_work`: with a
    worker, or waiting for one that is busy.
    """

    busy: float
    bytes_per_s: float
    at_work: frozenset[int] = frozenset()


class Settled(Struct, frozen=True):
    """All events so far were reported: decide what can be done next."""


Event = (
    DeliveryOpened | DeliveryClosed | DatasetForgotten | BlocksInherited | StreamStarted
    | StreamAdopted | NextOrderKnown | StreamClosed | StreamRefused | Requested | Released
    | HolderGone | Planned | BlockFetched | BlockDecoded | RowsExtracted | SlabAssembled
    | MakersKnown | NeighbourAsked | SendingEnded | Ticked | Settled | DiskEvent
)  # fmt: skip

# -- effects -----------------------------------------------------------------------------------


class PlanSteps(Struct, frozen=True):
    """Take the next `count` plans of the walk."""

    stream_id: int
    walk: Walk
    count: int


class Fetch(Struct, frozen=True):
    """Read a block into this part of the block arena. `is_joined`: in one request with the block of
    the Fetch before this one, which precedes it in the shard. `is_decoded`: get the decoded block,
    from the neighbour that has it. `is_lent`: a neighbour waits for the block, so do not request it
    from neighbours. `is_on_disk`: try the node's disk first.
    """

    key: int
    dataset_id: int
    block: int
    into: Region
    is_joined: bool = False
    is_decoded: bool = False
    is_lent: bool = False
    is_on_disk: bool = False


class DecodeBlock(Struct, frozen=True):
    """Have a worker decode a block; `raw` is where its bytes are, None for a local file. `lost`:
    there are no bytes, and another block is decoded in place of this one.
    """

    key: int
    dataset_id: int
    block: int
    raw: Region | None
    into: Region
    lost: DataplaneError | None = None


class ClearRestartIndexes(Struct, frozen=True):
    """Zero this part of the block arena, before any later effect is carried out."""

    key: int
    region: Region


class AssembleSlab(Struct, frozen=True):
    """Have workers gather the rows of a plan into a slab, in this many `pieces` in parallel, and
    copy the slab to `keep`, a part of the block arena. Before that, write the row index to its
    place in the delivery arena. `first` is the first of the slab's blocks, None for a batch without
    rows.

    Shapes:  keys: the key of each block of plan.blocks.
    """

    number: int
    delivery_id: int
    first: BlockName | None
    plan: Plan
    keys: tuple[int, ...]
    row_index: Region
    slab: Region
    render: Render | None
    collate: Collation | None
    keep: Region | None
    pieces: int = 1


class MakeElsewhere(Struct, frozen=True):
    """Have a maker make the slab of these steps, and read it into this part of the delivery arena.
    The maker will be asked for the steps `coming` next.
    """

    number: int
    delivery_id: int
    stream: Stream
    steps: StepRange
    coming: tuple[StepRange, ...]
    slab: Region
    slot_bytes: int
    maker: str


class ExcerptRows(Struct, frozen=True):
    """Rows of a block in rising order, the place of their excerpt, and, if rows are packs, these
    packs.
    """

    into: Region
    rows: npt.NDArray[np.int32]
    packs: BlockPacks = NO_PACKS


class ExtractRows(Struct, frozen=True):
    """Copy rows of the block with this key into excerpts."""

    number: int
    key: int
    excerpts: Sequence[ExcerptRows]


class CopyKept(Struct, frozen=True):
    """Have a worker copy an equal slab, which is kept, into this slab; `first` is as in
    AssembleSlab.
    """

    number: int
    delivery_id: int
    first: BlockName | None
    kept: Region
    slab: Region


class LendBlock(Struct, frozen=True):
    """Send this part of the block arena to the neighbour that requested it."""

    number: int
    region: Region


class OnlyDecoded(Struct, frozen=True):
    """Tell the neighbour that the block is here only decoded, in this size."""

    number: int
    length: int


class RefuseAsk(Struct, frozen=True):
    """Tell the neighbour to read the block itself."""

    number: int


class Send(Struct, frozen=True):
    """Send a slab, or an error, to the consumer that requested it."""

    stream_id: int
    request_id: int
    body: FromNodeBody


class SlabProgress(Struct, frozen=True):
    """The progress of a slab: its stage, for people, and how many of its blocks are ready. If the
    slab waits for blocks, `phase` is the phase of some of these blocks; None if they wait for
    memory.
    """

    stage: str
    done: int = 0
    total: int = 0
    phase: BlockPhase | None = None


class Advanced(Struct, frozen=True):
    """Tell the consumer the progress of the slab that this request waits for; the answer comes
    later.
    """

    stream_id: int
    request_id: int
    progress: SlabProgress


class Stalled(Struct, frozen=True):
    """Answer a request that has made no progress for too long, with the state of the next slab and
    its missing blocks in the order in which they are read.
    """

    stream_id: int
    request_id: int
    waited_s: float
    progress: SlabProgress
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


class GiveUpSlab(Struct, frozen=True):
    """End a MakeElsewhere soon, with NeighbourGone unless the slab is here by then."""

    number: int


Effect = (
    PlanSteps | Fetch | DecodeBlock | ClearRestartIndexes | AssembleSlab | MakeElsewhere
    | ExtractRows | CopyKept | LendBlock | OnlyDecoded | RefuseAsk | Send | Advanced | Stalled
    | AllPlanned | ForgetBlock | DropDelivery | ResizePool | Note | KeepBlock | ScanDisk
    | GiveUpSlab
)  # fmt: skip
