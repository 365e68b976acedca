"""The coordinator's state as frozen records, and the writes that persist them."""

from __future__ import annotations

import enum

from msgspec import Struct, field, structs

from dataplane.model.config import JobSpec
from dataplane.model.errors import DataplaneError
from dataplane.model.ledger import LedgerEntry, LedgerMark, LedgerPosition
from dataplane.model.records import DatasetIdentity, MixHistory, Topology
from dataplane.rpc.membership import (
    ChangeRequest,
    ChangeResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    HeldBlocks,
    JoinRequest,
    JoinResponse,
    KnownNodes,
    LeaveRequest,
    LeaveResponse,
    LedgerRequest,
    LedgerResponse,
    MemberProgress,
    NodeReads,
    RegisterNodeRequest,
    RegisterNodeResponse,
    StatusRequest,
    StatusResponse,
    StoreOutage,
)
from dataplane.rpc.sharing import NodeWork


class Phase(enum.StrEnum):
    """The state of a member.

    JOINED   the member has its place, as long as its lease is renewed
    LEFT     the member left on purpose; its rank does not count as missing
    EXPIRED  its lease was not renewed in time, or its process ended; it may join again
    """

    JOINED = "joined"
    LEFT = "left"
    EXPIRED = "expired"


class Job(Struct, frozen=True):
    """One job in its present generation.

    `epoch` and `cursor` are the furthest that any member of this generation has reported.
    `active_at` is when a member last came or went. `pixels` names the software that decodes images
    on every node of the job, "" without images. `urls`, `format` and `identity` are the dataset as
    the first member declared it. `mix` has the weights of a mixture with which members read from
    `mix_from` on, the furthest place that any member has reported. `last_change` is the number of
    the last ledger entry whose change applies to the generation; `mark` is the length of the ledger
    when the generation began.
    """

    job_id: str
    dataset: str
    spec: JobSpec
    sample_count: int
    dp_size: int
    generation: int
    incarnation: str
    epoch: int = 0
    cursor: int = 0
    active_at: float = 0.0
    pixels: str = ""
    urls: tuple[str, ...] = ()
    format: str = ""
    identity: DatasetIdentity | None = None
    mix: MixHistory | None = None
    mix_from: LedgerPosition | None = None
    last_change: int = 0
    mark: LedgerMark | None = None

    def has_other_weights(self, progress: MemberProgress) -> bool:
        """Return whether a member reads with weights that came after these; the other members will
        use them when they reach that place. Of two lists of changes at one place, the longer one is
        the later one, so that members do not alternate.
        """
        if progress.mix is None or progress.mix_from is None or progress.mix == self.mix:
            return False
        if self.mix is None or self.mix_from is None:
            return True
        return (progress.mix_from, len(progress.mix.changes)) > (
            self.mix_from,
            len(self.mix.changes),
        )

    @property
    def present_spec(self) -> JobSpec:
        """The job's spec, with the weights with which its members read."""
        mixture = self.spec.mixture
        if mixture is None or self.mix is None:
            return self.spec
        return structs.replace(self.spec, mixture=mixture.with_history(self.mix))


class Member(Struct, frozen=True):
    """One member of a job's present generation. `deadline` is in lease time and is not stored:
    after a restart every member gets a full lease. `order` grows with every change of phase.
    """

    job_id: str
    member_id: str
    topology: Topology
    node_id: str
    phase: Phase
    order: int
    epoch: int = 0
    cursor: int = 0
    samples_per_s: float = 0.0
    stall_s: float = 0.0
    bound: str = ""
    deadline: float = 0.0

    @property
    def place(self) -> tuple[int, int]:
        """(dp_rank, rank): its place, possibly shared with other members."""
        return place_of(self.topology)


def place_of(topology: Topology) -> tuple[int, int]:
    """Return (dp_rank, rank), the place of a member. Without a launcher, all ranks are rank 0."""
    return topology.dp_rank, topology.rank


class Incarnation(Struct, frozen=True):
    """One launch of a job, and the generation that it began most recently."""

    job_id: str
    name: str
    generation: int


class LedgerRecord(Struct, frozen=True):
    """One entry of a job's ledger; its name is the entry's number."""

    job_id: str
    name: str
    entry: LedgerEntry


class NodeRecord(Struct, frozen=True):
    """A node as it registered, with the time and the contents of its last heartbeat. `is_short`
    means that the node lacks workers, so that its jobs want makers.
    """

    request: RegisterNodeRequest
    seen_at: float
    stores_away: tuple[StoreOutage, ...] = ()
    loop_holds: int = 0
    longest_hold_s: float = 0.0
    reads: NodeReads = field(default_factory=NodeReads)
    known: tuple[KnownNodes, ...] = ()
    is_short: bool = False
    held: HeldBlocks = field(default_factory=HeldBlocks)
    work: tuple[NodeWork, ...] = ()


Record = Job | Member | Incarnation | LedgerRecord


class Keep(Struct, frozen=True):
    """Store this record, replacing the one with the same key."""

    record: Record


class Forget(Struct, frozen=True):
    """Remove the record with this key, if it exists."""

    cls: type[Record]
    job_id: str
    name: str = ""


Write = Keep | Forget
Key = tuple[type[Record], str, str]


def key_of(write: Write) -> Key:
    """Return the key of the record that a write changes. Of two writes with the same key, only the
    later one counts.
    """
    if isinstance(write, Forget):
        return (write.cls, write.job_id, write.name)
    match write.record:
        case Job(job_id=job_id):
            return (Job, job_id, "")
        case Member(job_id=job_id, member_id=member_id):
            return (Member, job_id, member_id)
        case Incarnation(job_id=job_id, name=name):
            return (Incarnation, job_id, name)
        case LedgerRecord(job_id=job_id, name=name):
            return (LedgerRecord, job_id, name)


class Tick(Struct, frozen=True):
    """An event that says only that time has passed."""


Event = (
    RegisterNodeRequest
    | JoinRequest
    | HeartbeatRequest
    | LeaveRequest
    | StatusRequest
    | LedgerRequest
    | ChangeRequest
    | Tick
)
Answer = (
    RegisterNodeResponse
    | JoinResponse
    | HeartbeatResponse
    | LeaveResponse
    | StatusResponse
    | LedgerResponse
    | ChangeResponse
    | DataplaneError
    | None
)


class Claim(Struct, frozen=True):
    """A refused claim of a node about a member that has joined through another node."""

    node_id: str
    member: Member


class Decision(Struct, frozen=True):
    """The result of an event. If it is `durable`, the answer may be sent only when all writes up to
    and including these are on disk; other writes may wait and be merged. `claims` lists refused
    claims.
    """

    answer: Answer
    writes: tuple[Write, ...] = ()
    durable: bool = False
    claims: tuple[Claim, ...] = ()
