"""Every message as a frozen value: what leaves this room in place of protobuf.

Names and fields equal those of proto/dataplane/rpc/v1, whose comments are the specification; a test
holds the two against each other. Repeated fields are tuples, an absent optional is None.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dataplane.config import JobSpec
from dataplane.errors import DataplaneError
from dataplane.model import ColumnSpec, End, ListPolicy, Region, Topology

FillNull = tuple[str, float]

# -- coordinator.proto ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RegisterNodeRequest:
    """A node says it is there."""

    node_id: str
    host: str = ""
    pid: int = 0
    version: str = ""
    protocol: int = 0


@dataclass(frozen=True, slots=True)
class RegisterNodeResponse:
    """How long a lease lives, and which start of the coordinator answered."""

    lease_s: float
    coordinator_id: str


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A rank takes its place in a job."""

    job_id: str
    dataset: str
    spec: JobSpec
    topology: Topology
    incarnation: str
    member_id: str
    node_id: str
    sample_count: int


@dataclass(frozen=True, slots=True)
class JoinResponse:
    """The place was taken."""

    generation: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class MemberProgress:
    """What one rank has consumed."""

    job_id: str
    member_id: str
    generation: int = 0
    epoch: int = 0
    cursor: int = 0
    samples_per_s: float = 0.0
    stall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HeartbeatRequest:
    """A node renews its members together."""

    node: RegisterNodeRequest
    members: tuple[MemberProgress, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberVerdict:
    """What the coordinator says of one member."""

    member_id: str
    error: DataplaneError | None = None
    missing_dp_ranks: tuple[int, ...] = ()
    missing_for_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HeartbeatResponse:
    """One verdict a member."""

    verdicts: tuple[MemberVerdict, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaveRequest:
    """A rank left: on purpose, or `lost`, because its process ended."""

    job_id: str
    member_id: str
    lost: bool = False


@dataclass(frozen=True, slots=True)
class LeaveResponse:
    """It is gone."""


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Which job; "" for all."""

    job_id: str = ""


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One rank, for people."""

    member_id: str
    topology: Topology
    node_id: str
    state: str
    epoch: int = 0
    cursor: int = 0
    samples_per_s: float = 0.0
    stall_s: float = 0.0
    lease_left_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One job, for people."""

    job_id: str
    dataset: str
    spec: JobSpec
    digest: str
    generation: int
    state: str
    sample_count: int
    dp_size: int
    missing_dp_ranks: tuple[int, ...] = ()
    members: tuple[MemberStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node, for people."""

    node_id: str
    host: str
    pid: int
    version: str
    last_seen_s: float


@dataclass(frozen=True, slots=True)
class StatusResponse:
    """Jobs, ranks and nodes."""

    version: str
    coordinator_id: str
    jobs: tuple[JobStatus, ...] = ()
    nodes: tuple[NodeStatus, ...] = ()


# -- local.proto ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """A trainer's first words."""

    version: str
    protocol: int
    pid: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """The node's first words."""

    version: str
    protocol: int
    node_id: str


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """A dataset as the user names it."""

    urls: tuple[str, ...]
    format: str = ""


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A rank asks its node to open a job."""

    job_id: str
    incarnation: str
    member_id: str
    source: DatasetSource
    topology: Topology
    seed: int = 0
    shuffle: bool = False
    lanes: int | None = None
    window: int | None = None
    global_batch: int = 1
    end: End = End.RAGGED
    columns: tuple[str, ...] = ()
    lists: ListPolicy = ListPolicy.PADDED
    fill_null: tuple[FillNull, ...] = ()


@dataclass(frozen=True, slots=True)
class JobOpened:
    """The job as every rank has it; the delivery arena's descriptor comes along."""

    spec: JobSpec
    digest: str
    sample_count: int
    columns: tuple[ColumnSpec, ...]
    arena_bytes: int
    held_bytes_max: int
    generation: int
    stall_timeout_s: float


@dataclass(frozen=True, slots=True)
class OpenStream:
    """A walk over the steps of this rank's slice that remain at `cursor`."""

    job_id: str
    epoch: int
    cursor: int
    first_step: int = 0
    step_stride: int = 1


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """The stream's name and its length in steps."""

    stream_id: int
    step_count: int


@dataclass(frozen=True, slots=True)
class NextSlab:
    """Asks for one more slab, and tells how far the trainer has come."""

    stream_id: int
    cursor: int = 0
    stall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of a slab."""

    step: int
    rows: int
    valid: int


@dataclass(frozen=True, slots=True)
class Column:
    """Where each batch's piece of one column lies, in bytes from the slab's start."""

    values: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    width: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Slab:
    """Consecutive batches of one stream, in the delivery arena."""

    stream_id: int
    slab_id: int
    region: Region
    batches: tuple[Batch, ...]
    columns: tuple[Column, ...]
    copy_out: bool = False


@dataclass(frozen=True, slots=True)
class EndOfStream:
    """No step remains."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class Release:
    """Nobody holds a tensor of these slabs any more."""

    job_id: str
    slab_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CloseStream:
    """The trainer stopped walking."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class CloseJob:
    """The trainer closed its loader."""

    job_id: str


ToNodeBody = Hello | OpenJob | OpenStream | NextSlab | Release | CloseStream | CloseJob
FromNodeBody = DataplaneError | Welcome | JobOpened | StreamOpened | Slab | EndOfStream


@dataclass(frozen=True, slots=True)
class ToNode:
    """The envelope of a trainer's message; request 0 wants no answer."""

    request_id: int
    body: ToNodeBody


@dataclass(frozen=True, slots=True)
class FromNode:
    """The envelope of a node's answer."""

    request_id: int
    body: FromNodeBody


# -- worker.proto --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Done:
    """It is done."""


@dataclass(frozen=True, slots=True)
class AttachArena:
    """Map the arena whose descriptor comes along."""

    arena_id: int


@dataclass(frozen=True, slots=True)
class DetachArena:
    """Unmap an arena."""

    arena_id: int


@dataclass(frozen=True, slots=True)
class OpenDataset:
    """How the blocks of a dataset become the columns of batches."""

    dataset_id: int
    format: str
    schema: bytes
    more: bool = False
    columns: tuple[str, ...] = ()
    lists: ListPolicy = ListPolicy.PADDED
    fill_null: tuple[FillNull, ...] = ()


@dataclass(frozen=True, slots=True)
class RawBlock:
    """The bytes of one block: in the block arena (preamble, then body), or in a local file."""

    url: str
    index: int
    rows: int
    place: Region
    preamble_place: Region
    shard_bytes: int
    etag: str = ""
    arena: Region | None = None
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode a block into the block arena."""

    dataset_id: int
    raw: RawBlock
    into: Region


@dataclass(frozen=True, slots=True)
class Decoded:
    """The decoded block's size, and whether it fitted."""

    bytes: int
    stored: bool


@dataclass(frozen=True, slots=True)
class BlockSource:
    """A block to gather from."""

    key: int
    raw: RawBlock | None = None
    decoded: Region | None = None


@dataclass(frozen=True, slots=True)
class OpenBlocks:
    """Blocks that later Assembles name by key, and those to forget."""

    dataset_id: int
    blocks: tuple[BlockSource, ...] = ()
    forget: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Assemble:
    """Gather the rows of some batches into a slab."""

    dataset_id: int
    block_keys: tuple[int, ...]
    row_index: Region
    batches: tuple[Batch, ...]
    arena_id: int
    slab: Region


@dataclass(frozen=True, slots=True)
class Assembled:
    """How many of the batches fitted, and where their columns lie."""

    batch_count: int
    bytes_needed: int = 0
    bytes_used: int = 0
    columns: tuple[Column, ...] = field(default=())


TaskBody = AttachArena | DetachArena | OpenDataset | Decode | OpenBlocks | Assemble
ResultBody = DataplaneError | Done | Decoded | Assembled


@dataclass(frozen=True, slots=True)
class Task:
    """The envelope of a node's order to a worker."""

    body: TaskBody


@dataclass(frozen=True, slots=True)
class Result:
    """The envelope of a worker's answer."""

    body: ResultBody
