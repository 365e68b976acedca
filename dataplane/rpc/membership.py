"""Requests of nodes and commands to a coordinator, and its answers.

Frozen values, used outside this package instead of protobuf classes. Names and fields equal those
of proto/dataplane/rpc/v1/coordinator.proto, whose comments are the specification; a test compares
the two. Repeated fields are tuples, an absent optional is None.
"""

from __future__ import annotations

from msgspec import Struct, field

from dataplane.model.changes import ReplacedRow, Tombstone
from dataplane.model.config import JobSpec
from dataplane.model.errors import DataplaneError
from dataplane.model.ledger import LedgerEntry, LedgerMark, LedgerPosition
from dataplane.model.records import DatasetIdentity, MixHistory, Topology
from dataplane.rpc.sharing import NodeWork


class RegisterNodeRequest(Struct, frozen=True):
    """Registers a node, which other nodes reach at `data_address`, if it has one. `worker_count` is
    the most workers that it may have. `only_job` is the only job that its token allows, "" for any;
    the coordinator sets it when it checks the token, and `only_under`, the prefixes of urls that
    its token allows, () for all. `disk_id` identifies the disk on which the node keeps blocks, ""
    without one.
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
    """The duration of a lease, and which start of the coordinator answered."""

    lease_s: float
    coordinator_id: str


class JoinRequest(Struct, frozen=True):
    """A rank takes its place in a job."""

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
    """A node that lends its blocks to the other nodes of a job. `worker_count` is more than 0 if it
    makes slabs for them, too, and has no members of its own. With a `disk_id`, it owns blocks by
    that name.
    """

    node_id: str
    address: str
    arena_bytes: int = 0
    worker_count: int = 0
    disk_id: str = ""


class JobNodes(Struct, frozen=True):
    """The nodes of a job that lend each other blocks, then its makers, and the key with which they
    know each other, which is in no log: not in a repr either. With this key nodes lend only what is
    `only_under` these urls; () for all.
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
    """Which JobNodes of a job a node has."""

    job_id: str
    version: int


class JoinResponse(Struct, frozen=True):
    """The place was taken. `nodes`: None if the node has other members in this job, so that it has
    been told, or if it is too early to tell. `entries` are the changes of the launch. `mark` is the
    last entry of the ledger when the generation began, and `marks` are the last ones now.
    `is_complete`: no dp rank of the launch is missing.
    """

    generation: int
    lease_s: float
    nodes: JobNodes | None = None
    entries: tuple[LedgerEntry, ...] = ()
    mark: LedgerMark | None = None
    marks: tuple[LedgerMark, ...] = ()
    is_complete: bool = False

    @property
    def knows_all_nodes(self) -> bool:
        """Whether `nodes` has those of all ranks of the launch."""
        return self.is_complete and self.nodes is not None


class MixProposal(Struct, frozen=True):
    """Somebody wants other weights of a mixture: `at` a place, or as soon as possible. Each source
    has one.
    """

    request: str
    at: LedgerPosition | None = None
    sources: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()


class MixPromise(Struct, frozen=True):
    """The answer to a proposal: nothing beyond this place is read before it is decided. `is_late`:
    something beyond the place that was asked for has been. `refusal`: why it cannot follow, "" if
    it can.
    """

    request: str
    position: LedgerPosition
    is_late: bool = False
    refusal: str = ""


class MemberProgress(Struct, frozen=True):
    """The progress of one rank, from where it `began`: None until it has. `mix` are the weights
    of its last stream over a mixture, which began at `mix_from`. `promise` is its answer to the
    present proposal of others, and `known_entry` the last entry of such that its node knows.
    `replaced` are rows of the job that have others in their places, as its node has found them.
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
    """Where a node's blocks have come from: object stores (with how many fetchers now, and how much
    was asked for a second time, since the first answer was late), neighbours, memory, where another
    stream or epoch had left them, and its own disk. And how much it has sent to neighbours: blocks,
    and the slabs that it has made for them.
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
    each with its limit. A limit of 0: the node has no disk for blocks.
    """

    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    disk_bytes: int = 0
    disk_limit_bytes: int = 0
    disk_blocks: int = 0


class HeartbeatRequest(Struct, frozen=True):
    """A node renews all of its members, and reports the stores it waits for, how often and how long
    its event loop was held, and which nodes of its jobs it knows. If it `is_short`, it wants slabs
    from elsewhere.
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
    the `entries` of those that its node does not know.
    """

    member_id: str
    error: DataplaneError | None = None
    missing_dp_ranks: tuple[int, ...] = ()
    missing_for_s: float = 0.0
    proposal: MixProposal | None = None
    entries: tuple[LedgerEntry, ...] = ()
    missing_count: int = 0


class HeartbeatResponse(Struct, frozen=True):
    """One verdict a member; the nodes of those jobs where they differ from what was known; and the
    known jobs that this node has `left`: it has no members of them, and makes nothing for them.
    """

    verdicts: tuple[MemberVerdict, ...] = ()
    jobs: tuple[JobNodes, ...] = ()
    left: tuple[str, ...] = ()


class LeaveRequest(Struct, frozen=True):
    """A rank left: on purpose, or `lost` because its process ended. `progress` is its last
    progress, if its node knows it. `node_id` is the node that says so.
    """

    job_id: str
    member_id: str
    lost: bool = False
    progress: MemberProgress | None = None
    node_id: str = ""


class LeaveResponse(Struct, frozen=True):
    """The rank has left."""


class StatusRequest(Struct, frozen=True):
    """Which job; "" for all."""

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
    """One job, for people: some of its members, nodes and missing dp ranks, and how many there are
    of each.
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
    """The jobs, of `job_count`, that run or were active last, and the nodes, of `node_count`, that
    were heard of last.
    """

    version: str
    coordinator_id: str
    jobs: tuple[JobStatus, ...] = ()
    nodes: tuple[NodeStatus, ...] = ()
    node_count: int = 0
    job_count: int = 0


class LedgerRequest(Struct, frozen=True):
    """Whose ledger."""

    job_id: str


class LedgerResponse(Struct, frozen=True):
    """A job, how far it is, and the entries of its ledger."""

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
    """The steps of an epoch from `first` up to `stop`; without an epoch, of the present one."""

    first: int
    stop: int
    epoch: int | None = None


class RowsTaken(Struct, frozen=True):
    """Rows of a dataset with this layout. `known` is the number of the ledger's last entry of rows
    with which they were checked, 0 without one.
    """

    rows: tuple[Tombstone, ...]
    layout: str
    known: int = 0


class MixAsked(Struct, frozen=True):
    """Other weights of a mixture: from a step on, or as soon as possible. Repeated calls have the
    same `request`.
    """

    request: str
    sources: tuple[str, ...]
    weights: tuple[float, ...]
    step: int | None = None
    epoch: int | None = None


class ChangeRequest(Struct, frozen=True):
    """Leave steps or rows out of a job, from its next start on, or give a mixture other weights.
    `by` says who wants it.
    """

    job_id: str
    by: str
    skip: StepsSkipped | None = None
    tombstones: RowsTaken | None = None
    mix: MixAsked | None = None


class ChangeResponse(Struct, frozen=True):
    """The entry that was made, or one that says the same already; and how far the job is, if it has
    members now or not. None: `awaited_ranks` have not answered yet, so the call is to be repeated.
    """

    entry: LedgerEntry | None
    is_running: bool
    epoch: int
    cursor: int
    global_batch: int
    awaited_ranks: tuple[int, ...] = ()
