"""Requests of nodes and commands to a coordinator, and its answers.

Frozen values, used outside this package instead of protobuf classes. Names and fields equal those
of proto/dataplane/rpc/v1/coordinator.proto, whose comments are the specification; a test compares
the two. Repeated fields are tuples, an absent optional is None.
"""

from __future__ import annotations

from msgspec import Struct, field

from dataplane.config import JobSpec
from dataplane.errors import DataplaneError
from dataplane.model import Topology


class RegisterNodeRequest(Struct, frozen=True):
    """Registers a node."""

    node_id: str
    host: str = ""
    pid: int = 0
    version: str = ""
    protocol: int = 0


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


class JoinResponse(Struct, frozen=True):
    """The place was taken."""

    generation: int
    lease_s: float


class MemberProgress(Struct, frozen=True):
    """What one rank has consumed."""

    job_id: str
    member_id: str
    generation: int = 0
    epoch: int = 0
    cursor: int = 0
    samples_per_s: float = 0.0
    stall_s: float = 0.0
    bound: str = ""


class StoreOutage(Struct, frozen=True):
    """A store that does not answer a node, which keeps retrying."""

    store: str
    away_s: float
    error: str


class NodeReads(Struct, frozen=True):
    """What a node has read from object stores, with how many fetchers now, and how much of it was
    asked for a second time, since the first answer was late.
    """

    fetchers: int = 0
    read_bytes: int = 0
    hedged_bytes: int = 0


class HeartbeatRequest(Struct, frozen=True):
    """A node renews all of its members, and reports the stores it waits for, and how often and how
    long its event loop was held.
    """

    node: RegisterNodeRequest
    members: tuple[MemberProgress, ...] = ()
    stores_away: tuple[StoreOutage, ...] = ()
    loop_holds: int = 0
    longest_hold_s: float = 0.0
    reads: NodeReads = field(default_factory=NodeReads)


class MemberVerdict(Struct, frozen=True):
    """The coordinator's verdict on one member."""

    member_id: str
    error: DataplaneError | None = None
    missing_dp_ranks: tuple[int, ...] = ()
    missing_for_s: float = 0.0


class HeartbeatResponse(Struct, frozen=True):
    """One verdict a member."""

    verdicts: tuple[MemberVerdict, ...] = ()


class LeaveRequest(Struct, frozen=True):
    """A rank left: on purpose, or `lost` because its process ended. `progress` is its last
    progress, if its node knows it.
    """

    job_id: str
    member_id: str
    lost: bool = False
    progress: MemberProgress | None = None


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
    epoch: int = 0
    cursor: int = 0


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


class StatusResponse(Struct, frozen=True):
    """Jobs, ranks and nodes."""

    version: str
    coordinator_id: str
    jobs: tuple[JobStatus, ...] = ()
    nodes: tuple[NodeStatus, ...] = ()
