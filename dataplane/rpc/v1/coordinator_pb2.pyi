from dataplane.rpc.v1 import sharing_pb2 as _sharing_pb2
from dataplane.rpc.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterNodeRequest(_message.Message):
    __slots__ = ("node_id", "host", "pid", "version", "protocol", "data_address", "arena_bytes", "worker_count", "only_job", "disk_id", "only_under")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKER_COUNT_FIELD_NUMBER: _ClassVar[int]
    ONLY_JOB_FIELD_NUMBER: _ClassVar[int]
    DISK_ID_FIELD_NUMBER: _ClassVar[int]
    ONLY_UNDER_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    host: str
    pid: int
    version: str
    protocol: int
    data_address: str
    arena_bytes: int
    worker_count: int
    only_job: str
    disk_id: str
    only_under: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_id: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., version: _Optional[str] = ..., protocol: _Optional[int] = ..., data_address: _Optional[str] = ..., arena_bytes: _Optional[int] = ..., worker_count: _Optional[int] = ..., only_job: _Optional[str] = ..., disk_id: _Optional[str] = ..., only_under: _Optional[_Iterable[str]] = ...) -> None: ...

class RegisterNodeResponse(_message.Message):
    __slots__ = ("lease_s", "coordinator_id")
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_ID_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    coordinator_id: str
    def __init__(self, lease_s: _Optional[float] = ..., coordinator_id: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("job_id", "dataset", "spec", "topology", "incarnation", "member_id", "node_id", "sample_count", "pixels", "urls", "format", "identity")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    URLS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    dataset: str
    spec: bytes
    topology: _types_pb2.Topology
    incarnation: str
    member_id: str
    node_id: str
    sample_count: int
    pixels: str
    urls: _containers.RepeatedScalarFieldContainer[str]
    format: str
    identity: _types_pb2.DatasetIdentity
    def __init__(self, job_id: _Optional[str] = ..., dataset: _Optional[str] = ..., spec: _Optional[bytes] = ..., topology: _Optional[_Union[_types_pb2.Topology, _Mapping]] = ..., incarnation: _Optional[str] = ..., member_id: _Optional[str] = ..., node_id: _Optional[str] = ..., sample_count: _Optional[int] = ..., pixels: _Optional[str] = ..., urls: _Optional[_Iterable[str]] = ..., format: _Optional[str] = ..., identity: _Optional[_Union[_types_pb2.DatasetIdentity, _Mapping]] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("generation", "lease_s", "nodes", "entries", "mark", "marks", "is_complete", "ended_count")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ENDED_COUNT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    lease_s: float
    nodes: JobNodes
    entries: _containers.RepeatedCompositeFieldContainer[_types_pb2.LedgerEntry]
    mark: _types_pb2.LedgerMark
    marks: _containers.RepeatedCompositeFieldContainer[_types_pb2.LedgerMark]
    is_complete: bool
    ended_count: int
    def __init__(self, generation: _Optional[int] = ..., lease_s: _Optional[float] = ..., nodes: _Optional[_Union[JobNodes, _Mapping]] = ..., entries: _Optional[_Iterable[_Union[_types_pb2.LedgerEntry, _Mapping]]] = ..., mark: _Optional[_Union[_types_pb2.LedgerMark, _Mapping]] = ..., marks: _Optional[_Iterable[_Union[_types_pb2.LedgerMark, _Mapping]]] = ..., is_complete: bool = ..., ended_count: _Optional[int] = ...) -> None: ...

class NeighbourNode(_message.Message):
    __slots__ = ("node_id", "address", "arena_bytes", "worker_count", "disk_id")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKER_COUNT_FIELD_NUMBER: _ClassVar[int]
    DISK_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    address: str
    arena_bytes: int
    worker_count: int
    disk_id: str
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ..., arena_bytes: _Optional[int] = ..., worker_count: _Optional[int] = ..., disk_id: _Optional[str] = ...) -> None: ...

class JobNodes(_message.Message):
    __slots__ = ("job_id", "generation", "version", "key", "nodes", "only_under")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    ONLY_UNDER_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    generation: int
    version: int
    key: bytes
    nodes: _containers.RepeatedCompositeFieldContainer[NeighbourNode]
    only_under: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, job_id: _Optional[str] = ..., generation: _Optional[int] = ..., version: _Optional[int] = ..., key: _Optional[bytes] = ..., nodes: _Optional[_Iterable[_Union[NeighbourNode, _Mapping]]] = ..., only_under: _Optional[_Iterable[str]] = ...) -> None: ...

class KnownNodes(_message.Message):
    __slots__ = ("job_id", "version")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    version: int
    def __init__(self, job_id: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class MemberProgress(_message.Message):
    __slots__ = ("job_id", "member_id", "generation", "epoch", "cursor", "samples_per_s", "stall_s", "bound", "began", "mix", "mix_from", "promise", "known_entry", "replaced")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    MIX_FIELD_NUMBER: _ClassVar[int]
    MIX_FROM_FIELD_NUMBER: _ClassVar[int]
    PROMISE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_ENTRY_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    member_id: str
    generation: int
    epoch: int
    cursor: int
    samples_per_s: float
    stall_s: float
    bound: str
    began: _types_pb2.LedgerPosition
    mix: _types_pb2.MixHistory
    mix_from: _types_pb2.LedgerPosition
    promise: MixPromise
    known_entry: int
    replaced: _containers.RepeatedCompositeFieldContainer[_types_pb2.ReplacedRow]
    def __init__(self, job_id: _Optional[str] = ..., member_id: _Optional[str] = ..., generation: _Optional[int] = ..., epoch: _Optional[int] = ..., cursor: _Optional[int] = ..., samples_per_s: _Optional[float] = ..., stall_s: _Optional[float] = ..., bound: _Optional[str] = ..., began: _Optional[_Union[_types_pb2.LedgerPosition, _Mapping]] = ..., mix: _Optional[_Union[_types_pb2.MixHistory, _Mapping]] = ..., mix_from: _Optional[_Union[_types_pb2.LedgerPosition, _Mapping]] = ..., promise: _Optional[_Union[MixPromise, _Mapping]] = ..., known_entry: _Optional[int] = ..., replaced: _Optional[_Iterable[_Union[_types_pb2.ReplacedRow, _Mapping]]] = ...) -> None: ...

class StoreOutage(_message.Message):
    __slots__ = ("store", "away_s", "error")
    STORE_FIELD_NUMBER: _ClassVar[int]
    AWAY_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    store: str
    away_s: float
    error: str
    def __init__(self, store: _Optional[str] = ..., away_s: _Optional[float] = ..., error: _Optional[str] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("node", "members", "stores_away", "loop_holds", "longest_hold_s", "reads", "known", "is_short", "held", "work")
    NODE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    STORES_AWAY_FIELD_NUMBER: _ClassVar[int]
    LOOP_HOLDS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_HOLD_S_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    IS_SHORT_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    node: RegisterNodeRequest
    members: _containers.RepeatedCompositeFieldContainer[MemberProgress]
    stores_away: _containers.RepeatedCompositeFieldContainer[StoreOutage]
    loop_holds: int
    longest_hold_s: float
    reads: NodeReads
    known: _containers.RepeatedCompositeFieldContainer[KnownNodes]
    is_short: bool
    held: HeldBlocks
    work: _containers.RepeatedCompositeFieldContainer[_sharing_pb2.NodeWork]
    def __init__(self, node: _Optional[_Union[RegisterNodeRequest, _Mapping]] = ..., members: _Optional[_Iterable[_Union[MemberProgress, _Mapping]]] = ..., stores_away: _Optional[_Iterable[_Union[StoreOutage, _Mapping]]] = ..., loop_holds: _Optional[int] = ..., longest_hold_s: _Optional[float] = ..., reads: _Optional[_Union[NodeReads, _Mapping]] = ..., known: _Optional[_Iterable[_Union[KnownNodes, _Mapping]]] = ..., is_short: bool = ..., held: _Optional[_Union[HeldBlocks, _Mapping]] = ..., work: _Optional[_Iterable[_Union[_sharing_pb2.NodeWork, _Mapping]]] = ...) -> None: ...

class HeldBlocks(_message.Message):
    __slots__ = ("memory_bytes", "memory_limit_bytes", "disk_bytes", "disk_limit_bytes", "disk_blocks")
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    memory_bytes: int
    memory_limit_bytes: int
    disk_bytes: int
    disk_limit_bytes: int
    disk_blocks: int
    def __init__(self, memory_bytes: _Optional[int] = ..., memory_limit_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., disk_limit_bytes: _Optional[int] = ..., disk_blocks: _Optional[int] = ...) -> None: ...

class NodeReads(_message.Message):
    __slots__ = ("fetchers", "read_bytes", "hedged_bytes", "neighbour_bytes", "lent_bytes", "disk_bytes", "memory_bytes", "made_slabs", "made_bytes")
    FETCHERS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEDGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOUR_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MADE_SLABS_FIELD_NUMBER: _ClassVar[int]
    MADE_BYTES_FIELD_NUMBER: _ClassVar[int]
    fetchers: int
    read_bytes: int
    hedged_bytes: int
    neighbour_bytes: int
    lent_bytes: int
    disk_bytes: int
    memory_bytes: int
    made_slabs: int
    made_bytes: int
    def __init__(self, fetchers: _Optional[int] = ..., read_bytes: _Optional[int] = ..., hedged_bytes: _Optional[int] = ..., neighbour_bytes: _Optional[int] = ..., lent_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., made_slabs: _Optional[int] = ..., made_bytes: _Optional[int] = ...) -> None: ...

class MemberVerdict(_message.Message):
    __slots__ = ("member_id", "error", "missing_dp_ranks", "missing_for_s", "proposal", "entries", "missing_count", "replaced_count")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MISSING_DP_RANKS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FOR_S_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    MISSING_COUNT_FIELD_NUMBER: _ClassVar[int]
    REPLACED_COUNT_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    error: _types_pb2.Error
    missing_dp_ranks: _containers.RepeatedScalarFieldContainer[int]
    missing_for_s: float
    proposal: MixProposal
    entries: _containers.RepeatedCompositeFieldContainer[_types_pb2.LedgerEntry]
    missing_count: int
    replaced_count: int
    def __init__(self, member_id: _Optional[str] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., missing_dp_ranks: _Optional[_Iterable[int]] = ..., missing_for_s: _Optional[float] = ..., proposal: _Optional[_Union[MixProposal, _Mapping]] = ..., entries: _Optional[_Iterable[_Union[_types_pb2.LedgerEntry, _Mapping]]] = ..., missing_count: _Optional[int] = ..., replaced_count: _Optional[int] = ...) -> None: ...

class MixProposal(_message.Message):
    __slots__ = ("request", "at", "sources", "weights")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    request: str
    at: _types_pb2.LedgerPosition
    sources: _containers.RepeatedScalarFieldContainer[str]
    weights: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, request: _Optional[str] = ..., at: _Optional[_Union[_types_pb2.LedgerPosition, _Mapping]] = ..., sources: _Optional[_Iterable[str]] = ..., weights: _Optional[_Iterable[float]] = ...) -> None: ...

class MixPromise(_message.Message):
    __slots__ = ("request", "position", "is_late", "refusal")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    IS_LATE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    request: str
    position: _types_pb2.LedgerPosition
    is_late: bool
    refusal: str
    def __init__(self, request: _Optional[str] = ..., position: _Optional[_Union[_types_pb2.LedgerPosition, _Mapping]] = ..., is_late: bool = ..., refusal: _Optional[str] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("verdicts", "jobs", "left")
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    verdicts: _containers.RepeatedCompositeFieldContainer[MemberVerdict]
    jobs: _containers.RepeatedCompositeFieldContainer[JobNodes]
    left: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, verdicts: _Optional[_Iterable[_Union[MemberVerdict, _Mapping]]] = ..., jobs: _Optional[_Iterable[_Union[JobNodes, _Mapping]]] = ..., left: _Optional[_Iterable[str]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("job_id", "member_id", "lost", "progress", "node_id")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    member_id: str
    lost: bool
    progress: MemberProgress
    node_id: str
    def __init__(self, job_id: _Optional[str] = ..., member_id: _Optional[str] = ..., lost: bool = ..., progress: _Optional[_Union[MemberProgress, _Mapping]] = ..., node_id: _Optional[str] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("member_id", "topology", "node_id", "state", "epoch", "cursor", "samples_per_s", "stall_s", "lease_left_s", "bound")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    topology: _types_pb2.Topology
    node_id: str
    state: str
    epoch: int
    cursor: int
    samples_per_s: float
    stall_s: float
    lease_left_s: float
    bound: str
    def __init__(self, member_id: _Optional[str] = ..., topology: _Optional[_Union[_types_pb2.Topology, _Mapping]] = ..., node_id: _Optional[str] = ..., state: _Optional[str] = ..., epoch: _Optional[int] = ..., cursor: _Optional[int] = ..., samples_per_s: _Optional[float] = ..., stall_s: _Optional[float] = ..., lease_left_s: _Optional[float] = ..., bound: _Optional[str] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job_id", "dataset", "spec", "digest", "generation", "state", "sample_count", "dp_size", "missing_dp_ranks", "members", "epoch", "cursor", "nodes", "nodes_version", "missing_count", "member_count", "node_count", "joined_dp_rank_count")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    MISSING_DP_RANKS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    NODES_VERSION_FIELD_NUMBER: _ClassVar[int]
    MISSING_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMBER_COUNT_FIELD_NUMBER: _ClassVar[int]
    NODE_COUNT_FIELD_NUMBER: _ClassVar[int]
    JOINED_DP_RANK_COUNT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    dataset: str
    spec: bytes
    digest: str
    generation: int
    state: str
    sample_count: int
    dp_size: int
    missing_dp_ranks: _containers.RepeatedScalarFieldContainer[int]
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    epoch: int
    cursor: int
    nodes: _containers.RepeatedCompositeFieldContainer[NeighbourNode]
    nodes_version: int
    missing_count: int
    member_count: int
    node_count: int
    joined_dp_rank_count: int
    def __init__(self, job_id: _Optional[str] = ..., dataset: _Optional[str] = ..., spec: _Optional[bytes] = ..., digest: _Optional[str] = ..., generation: _Optional[int] = ..., state: _Optional[str] = ..., sample_count: _Optional[int] = ..., dp_size: _Optional[int] = ..., missing_dp_ranks: _Optional[_Iterable[int]] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., epoch: _Optional[int] = ..., cursor: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NeighbourNode, _Mapping]]] = ..., nodes_version: _Optional[int] = ..., missing_count: _Optional[int] = ..., member_count: _Optional[int] = ..., node_count: _Optional[int] = ..., joined_dp_rank_count: _Optional[int] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node_id", "host", "pid", "version", "last_seen_s", "stores_away", "loop_holds", "longest_hold_s", "reads", "data_address", "known", "worker_count", "is_short", "held", "work")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_S_FIELD_NUMBER: _ClassVar[int]
    STORES_AWAY_FIELD_NUMBER: _ClassVar[int]
    LOOP_HOLDS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_HOLD_S_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    WORKER_COUNT_FIELD_NUMBER: _ClassVar[int]
    IS_SHORT_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    host: str
    pid: int
    version: str
    last_seen_s: float
    stores_away: _containers.RepeatedCompositeFieldContainer[StoreOutage]
    loop_holds: int
    longest_hold_s: float
    reads: NodeReads
    data_address: str
    known: _containers.RepeatedCompositeFieldContainer[KnownNodes]
    worker_count: int
    is_short: bool
    held: HeldBlocks
    work: _containers.RepeatedCompositeFieldContainer[_sharing_pb2.NodeWork]
    def __init__(self, node_id: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., version: _Optional[str] = ..., last_seen_s: _Optional[float] = ..., stores_away: _Optional[_Iterable[_Union[StoreOutage, _Mapping]]] = ..., loop_holds: _Optional[int] = ..., longest_hold_s: _Optional[float] = ..., reads: _Optional[_Union[NodeReads, _Mapping]] = ..., data_address: _Optional[str] = ..., known: _Optional[_Iterable[_Union[KnownNodes, _Mapping]]] = ..., worker_count: _Optional[int] = ..., is_short: bool = ..., held: _Optional[_Union[HeldBlocks, _Mapping]] = ..., work: _Optional[_Iterable[_Union[_sharing_pb2.NodeWork, _Mapping]]] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("version", "coordinator_id", "jobs", "nodes", "node_count", "job_count")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_ID_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    NODE_COUNT_FIELD_NUMBER: _ClassVar[int]
    JOB_COUNT_FIELD_NUMBER: _ClassVar[int]
    version: str
    coordinator_id: str
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    node_count: int
    job_count: int
    def __init__(self, version: _Optional[str] = ..., coordinator_id: _Optional[str] = ..., jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., node_count: _Optional[int] = ..., job_count: _Optional[int] = ...) -> None: ...

class LedgerRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class LedgerResponse(_message.Message):
    __slots__ = ("job_id", "urls", "format", "spec", "sample_count", "dp_size", "epoch", "cursor", "identity", "entries")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    URLS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    urls: _containers.RepeatedScalarFieldContainer[str]
    format: str
    spec: bytes
    sample_count: int
    dp_size: int
    epoch: int
    cursor: int
    identity: _types_pb2.DatasetIdentity
    entries: _containers.RepeatedCompositeFieldContainer[_types_pb2.LedgerEntry]
    def __init__(self, job_id: _Optional[str] = ..., urls: _Optional[_Iterable[str]] = ..., format: _Optional[str] = ..., spec: _Optional[bytes] = ..., sample_count: _Optional[int] = ..., dp_size: _Optional[int] = ..., epoch: _Optional[int] = ..., cursor: _Optional[int] = ..., identity: _Optional[_Union[_types_pb2.DatasetIdentity, _Mapping]] = ..., entries: _Optional[_Iterable[_Union[_types_pb2.LedgerEntry, _Mapping]]] = ...) -> None: ...

class StepsSkipped(_message.Message):
    __slots__ = ("first", "stop", "epoch")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    first: int
    stop: int
    epoch: int
    def __init__(self, first: _Optional[int] = ..., stop: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class RowsTaken(_message.Message):
    __slots__ = ("rows", "layout", "known")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[_types_pb2.Tombstone]
    layout: str
    known: int
    def __init__(self, rows: _Optional[_Iterable[_Union[_types_pb2.Tombstone, _Mapping]]] = ..., layout: _Optional[str] = ..., known: _Optional[int] = ...) -> None: ...

class MixAsked(_message.Message):
    __slots__ = ("request", "sources", "weights", "step", "epoch")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request: str
    sources: _containers.RepeatedScalarFieldContainer[str]
    weights: _containers.RepeatedScalarFieldContainer[float]
    step: int
    epoch: int
    def __init__(self, request: _Optional[str] = ..., sources: _Optional[_Iterable[str]] = ..., weights: _Optional[_Iterable[float]] = ..., step: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class ChangeRequest(_message.Message):
    __slots__ = ("job_id", "by", "skip", "tombstones", "mix")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONES_FIELD_NUMBER: _ClassVar[int]
    MIX_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    by: str
    skip: StepsSkipped
    tombstones: RowsTaken
    mix: MixAsked
    def __init__(self, job_id: _Optional[str] = ..., by: _Optional[str] = ..., skip: _Optional[_Union[StepsSkipped, _Mapping]] = ..., tombstones: _Optional[_Union[RowsTaken, _Mapping]] = ..., mix: _Optional[_Union[MixAsked, _Mapping]] = ...) -> None: ...

class ChangeResponse(_message.Message):
    __slots__ = ("entry", "is_running", "epoch", "cursor", "global_batch", "awaited_ranks")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    IS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_BATCH_FIELD_NUMBER: _ClassVar[int]
    AWAITED_RANKS_FIELD_NUMBER: _ClassVar[int]
    entry: _types_pb2.LedgerEntry
    is_running: bool
    epoch: int
    cursor: int
    global_batch: int
    awaited_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, entry: _Optional[_Union[_types_pb2.LedgerEntry, _Mapping]] = ..., is_running: bool = ..., epoch: _Optional[int] = ..., cursor: _Optional[int] = ..., global_batch: _Optional[int] = ..., awaited_ranks: _Optional[_Iterable[int]] = ...) -> None: ...
