"""Requests of nodes and commands to a coordinator, and its answers.

All are frozen values, used outside this package instead of protobuf classes. Their names and fields
are those of proto/dataplane/rpc/v1/coordinator.proto, whose comments are the specification; a test
compares the two. Repeated fields are tuples, an absent optional field is None.
"""

from __future__ import annotations

from msgspec import Struct, field

from dataplane.model.changes import ReplacedRow
from dataplane.model.config import JobSpec
from dataplane.model.errors import DataplaneError
from dataplane.model.ledger import LedgerEntry, LedgerMark, LedgerPosition
from dataplane.model.records import DatasetIdentity, MixHistory, Tombstone, Topology
from dataplane.rpc.sharing import NodeWork


class RegisterNodeRequest(Struct, frozen=True):
    """Register a node, which other nodes reach at `data_address`, if it has one. `worker_count` is
    the maximum number of its workers. `disk_id` identifies the disk on which the node keeps blocks;
    "" if it keeps none.

    The coordinator sets two fields when it checks the node's token: `only_job` is the only job that
    the token allows, "" for any job; `only_under` are the url prefixes that the token allows, ()
    for all urls.
    """

    node_id: str
    host: str = ""
    pid: int = 0
    version: str = ""
    protocol: int = 0
    data_address: str = ""
    arena_bytes: int = 0
    worker_count: int = 0
    only_job: str = ""
    disk_id: str = ""
    only_under: tuple[str, ...] = ()


class RegisterNodeResponse(Struct, frozen=True):
    """The duration of a lease, and the id of the answering coordinator, new after every start."""

    lease_s: float
    coordinator_id: str


class JoinRequest(Struct, frozen=True):
    """Take the place of a rank in a job."""

    job_id: str
    dataset: str
    spec: JobSpec
    topology: Topology
    incarnation: str
    member_id: str
    node_id: str
    sample_count: int
    pixels: str = ""
    urls: tuple[str, ...] = ()
    format: str = ""
    identity: DatasetIdentity | None = None


class NeighbourNode(Struct, frozen=True):
    """A node that lends its blocks to the other nodes of a job. A maker, which makes slabs for
    these nodes and has no members of its own, has a `worker_count` of more than 0. Blocks are
    assigned to a node by its `disk_id`, if it has one, and otherwise by its `node_id`.
    """

    node_id: str
    address: str
    arena_bytes: int = 0
    worker_count: int = 0
    disk_id: str = ""


class JobNodes(Struct, frozen=True):
    """The nodes of a job that lend each other blocks, then the job's makers, and the key for
    connections between these nodes. The key is secret, and therefore not in the repr. For
    connections with this key, nodes lend only data whose urls are `only_under` these prefixes; ()
    for all data.
    """

    job_id: str
    generation: int
    version: int
    key: bytes = b""
    nodes: tuple[NeighbourNode, ...] = ()
    only_under: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return (
            f"JobNodes(job_id={self.job_id!r}, generation={self.generation}, "
            f"version={self.version}, nodes={self.nodes}, only_under={self.only_under})"
        )


class KnownNodes(Struct, frozen=True):
    """The version of the JobNodes that a node has of a job."""

    job_id: str
    version: int


class JoinResponse(Struct, frozen=True):
    """The rank has its place. `nodes` is None if the node already has other members in this job, or
    if it is too early; heartbeats then bring the nodes. `entries` are the changes of the launch.
    `mark` is the ledger's last entry when the generation began, `marks` are the last entries now.
    `is_complete`: no dp rank of the launch is missing. `ended_count` ranks of an older launch were
    ended by this join.
    """

    generation: int
    lease_s: float
    nodes: JobNodes | None = None
    entries: tuple[LedgerEntry, ...] = ()
    mark: LedgerMark | None = None
    marks: tuple[LedgerMark, ...] = ()
    is_complete: bool = False
    ended_count: int = 0

    @property
    def knows_all_nodes(self) -> bool:
        """Whether `nodes` has the nodes of all ranks of the launch."""
        return self.is_complete and self.nodes is not None


class MixProposal(Struct, frozen=True):
    """A proposal of other weights of a mixture, one per source, from the place `at` on; without a
    place, as soon as possible.
    """

    request: str
    at: LedgerPosition | None = None
    sources: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()


class MixPromise(Struct, frozen=True):
    """A rank's answer to a proposal: the rank reads nothing beyond `position` before the proposal
    is decided. `is_late`: the rank has already read beyond the proposed place. `refusal`: why the
    rank cannot use the weights, "" if it can.
    """

    request: str
    position: LedgerPosition
    is_late: bool = False
    refusal: str = ""


REPLACED_MAX = 256
"""The most replaced rows in one message, so that it can always be sent."""


class MemberProgress(Struct, frozen=True):
    """The progress of one rank. `began` is the place where the rank began to read, None before
    that. `mix` are the weights of its last stream over a mixture, which began at `mix_from`.
    `promise` is its answer to the present proposal of other weights, and `known_entry` the last
    ledger entry of other weights that its node knows. `replaced` are rows of the job that were
    replaced by other rows, as far as its node has found them, REPLACED_MAX at most.
    """

    job_id: str
    member_id: str
    generation: int = 0
    epoch: int = 0
    cursor: int = 0
    samples_per_s: float = 0.0
    stall_s: float = 0.0
    bound: str = ""
    began: LedgerPosition | None = None
    mix: MixHistory | None = None
    mix_from: LedgerPosition | None = None
    promise: MixPromise | None = None
    known_entry: int = 0
    replaced: tuple[ReplacedRow, ...] = ()


class StoreOutage(Struct, frozen=True):
    """A store that does not answer a node, which keeps retrying."""

    store: str
    away_s: float
    error: str


class NodeReads(Struct, frozen=True):
    """The bytes that a node has received and sent since it started.

    It has received blocks from object stores (`read_bytes`; `hedged_bytes` of these were requested
    a second time, since the first answer was late), from neighbours, and from its own disk.
    `memory_bytes` were already in memory, where another stream or epoch had left them. It has sent
    `lent_bytes` of blocks and slabs to neighbours, and made `made_slabs` of `made_bytes` for other
    nodes. `fetchers` is the present number of fetchers.
    """

    fetchers: int = 0
    read_bytes: int = 0
    hedged_bytes: int = 0
    neighbour_bytes: int = 0
    lent_bytes: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    made_slabs: int = 0
    made_bytes: int = 0


class HeldBlocks(Struct, frozen=True):
    """The memory allocated for a node's blocks, and the bytes of its `disk_blocks` files on disk,
    each with its limit. A `disk_limit_bytes` of 0: the node keeps no blocks on disk.
    """

    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    disk_bytes: int = 0
    disk_limit_bytes: int = 0
    disk_blocks: int = 0


class HeartbeatRequest(Struct, frozen=True):
    """Renew all members of a node, and report the stores that the node waits for, how often and how
    long its event loop was held, and the nodes of its jobs that it knows. A node that `is_short` of
    workers wants other nodes to make slabs.
    """

    node: RegisterNodeRequest
    members: tuple[MemberProgress, ...] = ()
    stores_away: tuple[StoreOutage, ...] = ()
    loop_holds: int = 0
    longest_hold_s: float = 0.0
    reads: NodeReads = field(default_factory=NodeReads)
    known: tuple[KnownNodes, ...] = ()
    is_short: bool = False
    held: HeldBlocks = field(default_factory=HeldBlocks)
    work: tuple[NodeWork, ...] = ()


class MemberVerdict(Struct, frozen=True):
    """The coordinator's verdict on one member, with the present `proposal` of other weights, and
    the ledger `entries` of other weights that the member's node does not know. `replaced_count`:
    how many rows all nodes together have replaced in this launch.
    """

    member_id: str
    error: DataplaneError | None = None
    missing_dp_ranks: tuple[int, ...] = ()
    missing_for_s: float = 0.0
    proposal: MixProposal | None = None
    entries: tuple[LedgerEntry, ...] = ()
    missing_count: int = 0
    replaced_count: int = 0


class HeartbeatResponse(Struct, frozen=True):
    """One verdict per member; the nodes of each job that differ from the nodes that were known; and
    the known jobs that the node has `left`: it has no members of them, and is not their maker.
    """

    verdicts: tuple[MemberVerdict, ...] = ()
    jobs: tuple[JobNodes, ...] = ()
    left: tuple[str, ...] = ()


class LeaveRequest(Struct, frozen=True):
    """Report that a rank left: on purpose, or `lost` because its process ended. `progress` is the
    rank's last progress, if known. `node_id` is the reporting node.
    """

    job_id: str
    member_id: str
    lost: bool = False
    progress: MemberProgress | None = None
    node_id: str = ""


class LeaveResponse(Struct, frozen=True):
    """The rank has left."""


class StatusRequest(Struct, frozen=True):
    """Request the status of a job; "" for all jobs."""

    job_id: str = ""


class MemberStatus(Struct, frozen=True):
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
    bound: str = ""


class JobStatus(Struct, frozen=True):
    """One job, for people: some of its members, nodes and missing dp ranks, and the total number of
    each.
    """

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
    epoch: int = 0
    cursor: int = 0
    nodes: tuple[NeighbourNode, ...] = ()
    nodes_version: int = 0
    missing_count: int = 0
    member_count: int = 0
    node_count: int = 0
    joined_dp_rank_count: int = 0


class NodeStatus(Struct, frozen=True):
    """One node, for people."""

    node_id: str
    host: str
    pid: int
    version: str
    last_seen_s: float
    stores_away: tuple[StoreOutage, ...] = ()
    loop_holds: int = 0
    longest_hold_s: float = 0.0
    reads: NodeReads = field(default_factory=NodeReads)
    data_address: str = ""
    known: tuple[KnownNodes, ...] = ()
    worker_count: int = 0
    is_short: bool = False
    held: HeldBlocks = field(default_factory=HeldBlocks)
    work: tuple[NodeWork, ...] = ()


class StatusResponse(Struct, frozen=True):
    """The jobs that run or were active last, out of `job_count`, and the nodes whose heartbeats
    came last, out of `node_count`.
    """

    version: str
    coordinator_id: str
    jobs: tuple[JobStatus, ...] = ()
    nodes: tuple[NodeStatus, ...] = ()
    node_count: int = 0
    job_count: int = 0


class LedgerRequest(Struct, frozen=True):
    """Request the ledger of a job."""

    job_id: str


class LedgerResponse(Struct, frozen=True):
    """A job, its progress, and the entries of its ledger."""

    job_id: str
    urls: tuple[str, ...]
    format: str
    spec: JobSpec
    sample_count: int
    dp_size: int
    epoch: int
    cursor: int
    identity: DatasetIdentity | None = None
    entries: tuple[LedgerEntry, ...] = ()


class StepsSkipped(Struct, frozen=True):
    """The steps of an epoch from `first` up to, but without, `stop`. Without an epoch, the job's
    present epoch.
    """

    first: int
    stop: int
    epoch: int | None = None


class RowsTaken(Struct, frozen=True):
    """Rows to leave out of a dataset with this layout. `known` is the last ledger entry of left-out
    rows that the sender had read when it checked these rows; 0 if there was none.
    """

    rows: tuple[Tombstone, ...]
    layout: str
    known: int = 0


class MixAsked(Struct, frozen=True):
    """Other weights of a mixture, from a step on; without a step, as soon as possible. Repeated
    calls have the same `request`.
    """

    request: str
    sources: tuple[str, ...]
    weights: tuple[float, ...]
    step: int | None = None
    epoch: int | None = None


class ChangeRequest(Struct, frozen=True):
    """Leave steps or rows out of a job, from its next start on, or give a mixture other weights.
    `by` names the author of the change.
    """

    job_id: str
    by: str
    skip: StepsSkipped | None = None
    tombstones: RowsTaken | None = None
    mix: MixAsked | None = None


class ChangeResponse(Struct, frozen=True):
    """The new ledger entry, or an existing entry of the same change; and the progress of the job,
    which `is_running` if it has members now. Without an entry, repeat the call: `awaited_ranks`
    have not answered yet.
    """

    entry: LedgerEntry | None
    is_running: bool
    epoch: int
    cursor: int
    global_batch: int
    awaited_ranks: tuple[int, ...] = ()
