from dataplane.rpc.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToFetcher(_message.Message):
    __slots__ = ("start_fetching", "read_range", "copy_preamble", "store_pause", "read_slab", "attach_delivery", "detach_delivery", "read_kept", "write_kept", "scan_kept", "end_slab")
    START_FETCHING_FIELD_NUMBER: _ClassVar[int]
    READ_RANGE_FIELD_NUMBER: _ClassVar[int]
    COPY_PREAMBLE_FIELD_NUMBER: _ClassVar[int]
    STORE_PAUSE_FIELD_NUMBER: _ClassVar[int]
    READ_SLAB_FIELD_NUMBER: _ClassVar[int]
    ATTACH_DELIVERY_FIELD_NUMBER: _ClassVar[int]
    DETACH_DELIVERY_FIELD_NUMBER: _ClassVar[int]
    READ_KEPT_FIELD_NUMBER: _ClassVar[int]
    WRITE_KEPT_FIELD_NUMBER: _ClassVar[int]
    SCAN_KEPT_FIELD_NUMBER: _ClassVar[int]
    END_SLAB_FIELD_NUMBER: _ClassVar[int]
    start_fetching: StartFetching
    read_range: ReadRange
    copy_preamble: CopyPreamble
    store_pause: StorePause
    read_slab: ReadSlab
    attach_delivery: AttachDelivery
    detach_delivery: DetachDelivery
    read_kept: ReadKept
    write_kept: WriteKept
    scan_kept: ScanKept
    end_slab: EndSlab
    def __init__(self, start_fetching: _Optional[_Union[StartFetching, _Mapping]] = ..., read_range: _Optional[_Union[ReadRange, _Mapping]] = ..., copy_preamble: _Optional[_Union[CopyPreamble, _Mapping]] = ..., store_pause: _Optional[_Union[StorePause, _Mapping]] = ..., read_slab: _Optional[_Union[ReadSlab, _Mapping]] = ..., attach_delivery: _Optional[_Union[AttachDelivery, _Mapping]] = ..., detach_delivery: _Optional[_Union[DetachDelivery, _Mapping]] = ..., read_kept: _Optional[_Union[ReadKept, _Mapping]] = ..., write_kept: _Optional[_Union[WriteKept, _Mapping]] = ..., scan_kept: _Optional[_Union[ScanKept, _Mapping]] = ..., end_slab: _Optional[_Union[EndSlab, _Mapping]] = ...) -> None: ...

class FromFetcher(_message.Message):
    __slots__ = ("read_ended", "store_pause", "store_seen", "shard_trouble", "slab_read", "kept_found")
    READ_ENDED_FIELD_NUMBER: _ClassVar[int]
    STORE_PAUSE_FIELD_NUMBER: _ClassVar[int]
    STORE_SEEN_FIELD_NUMBER: _ClassVar[int]
    SHARD_TROUBLE_FIELD_NUMBER: _ClassVar[int]
    SLAB_READ_FIELD_NUMBER: _ClassVar[int]
    KEPT_FOUND_FIELD_NUMBER: _ClassVar[int]
    read_ended: ReadEnded
    store_pause: StorePause
    store_seen: StoreSeen
    shard_trouble: ShardTrouble
    slab_read: SlabRead
    kept_found: KeptFound
    def __init__(self, read_ended: _Optional[_Union[ReadEnded, _Mapping]] = ..., store_pause: _Optional[_Union[StorePause, _Mapping]] = ..., store_seen: _Optional[_Union[StoreSeen, _Mapping]] = ..., shard_trouble: _Optional[_Union[ShardTrouble, _Mapping]] = ..., slab_read: _Optional[_Union[SlabRead, _Mapping]] = ..., kept_found: _Optional[_Union[KeptFound, _Mapping]] = ...) -> None: ...

class StartFetching(_message.Message):
    __slots__ = ("environment", "budget_s", "request_timeout_s", "log_level", "log_format", "store", "is_policed", "allowed_urls", "kept_folder", "tls")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    BUDGET_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    LOG_FORMAT_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    IS_POLICED_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_URLS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FOLDER_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    environment: _containers.RepeatedScalarFieldContainer[bytes]
    budget_s: float
    request_timeout_s: float
    log_level: str
    log_format: str
    store: str
    is_policed: bool
    allowed_urls: _containers.RepeatedScalarFieldContainer[str]
    kept_folder: str
    tls: _types_pb2.PeerTls
    def __init__(self, environment: _Optional[_Iterable[bytes]] = ..., budget_s: _Optional[float] = ..., request_timeout_s: _Optional[float] = ..., log_level: _Optional[str] = ..., log_format: _Optional[str] = ..., store: _Optional[str] = ..., is_policed: bool = ..., allowed_urls: _Optional[_Iterable[str]] = ..., kept_folder: _Optional[str] = ..., tls: _Optional[_Union[_types_pb2.PeerTls, _Mapping]] = ...) -> None: ...

class ReadRange(_message.Message):
    __slots__ = ("number", "url", "offset", "etag", "arena_id", "into", "more", "neighbour")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    INTO_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOUR_FIELD_NUMBER: _ClassVar[int]
    number: int
    url: str
    offset: int
    etag: str
    arena_id: int
    into: _types_pb2.Region
    more: _containers.RepeatedCompositeFieldContainer[ReadTarget]
    neighbour: Neighbour
    def __init__(self, number: _Optional[int] = ..., url: _Optional[str] = ..., offset: _Optional[int] = ..., etag: _Optional[str] = ..., arena_id: _Optional[int] = ..., into: _Optional[_Union[_types_pb2.Region, _Mapping]] = ..., more: _Optional[_Iterable[_Union[ReadTarget, _Mapping]]] = ..., neighbour: _Optional[_Union[Neighbour, _Mapping]] = ...) -> None: ...

class Neighbour(_message.Message):
    __slots__ = ("address", "job_id", "generation", "key", "own_id", "node_id", "dataset", "block", "offset", "form")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    OWN_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    address: str
    job_id: str
    generation: int
    key: bytes
    own_id: str
    node_id: str
    dataset: bytes
    block: int
    offset: int
    form: _types_pb2.BlockForm
    def __init__(self, address: _Optional[str] = ..., job_id: _Optional[str] = ..., generation: _Optional[int] = ..., key: _Optional[bytes] = ..., own_id: _Optional[str] = ..., node_id: _Optional[str] = ..., dataset: _Optional[bytes] = ..., block: _Optional[int] = ..., offset: _Optional[int] = ..., form: _Optional[_Union[_types_pb2.BlockForm, str]] = ...) -> None: ...

class ReadTarget(_message.Message):
    __slots__ = ("offset", "into")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    INTO_FIELD_NUMBER: _ClassVar[int]
    offset: int
    into: _types_pb2.Region
    def __init__(self, offset: _Optional[int] = ..., into: _Optional[_Union[_types_pb2.Region, _Mapping]] = ...) -> None: ...

class CopyPreamble(_message.Message):
    __slots__ = ("number", "kept", "into")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    INTO_FIELD_NUMBER: _ClassVar[int]
    number: int
    kept: _types_pb2.Region
    into: _types_pb2.Region
    def __init__(self, number: _Optional[int] = ..., kept: _Optional[_Union[_types_pb2.Region, _Mapping]] = ..., into: _Optional[_Union[_types_pb2.Region, _Mapping]] = ...) -> None: ...

class ReadKept(_message.Message):
    __slots__ = ("number", "dataset", "block", "into")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    INTO_FIELD_NUMBER: _ClassVar[int]
    number: int
    dataset: bytes
    block: int
    into: _types_pb2.Region
    def __init__(self, number: _Optional[int] = ..., dataset: _Optional[bytes] = ..., block: _Optional[int] = ..., into: _Optional[_Union[_types_pb2.Region, _Mapping]] = ...) -> None: ...

class WriteKept(_message.Message):
    __slots__ = ("number", "dataset", "block", "source", "instead_of")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    INSTEAD_OF_FIELD_NUMBER: _ClassVar[int]
    number: int
    dataset: bytes
    block: int
    source: _types_pb2.Region
    instead_of: _containers.RepeatedCompositeFieldContainer[KeptName]
    def __init__(self, number: _Optional[int] = ..., dataset: _Optional[bytes] = ..., block: _Optional[int] = ..., source: _Optional[_Union[_types_pb2.Region, _Mapping]] = ..., instead_of: _Optional[_Iterable[_Union[KeptName, _Mapping]]] = ...) -> None: ...

class KeptName(_message.Message):
    __slots__ = ("dataset", "block")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    dataset: bytes
    block: int
    def __init__(self, dataset: _Optional[bytes] = ..., block: _Optional[int] = ...) -> None: ...

class ScanKept(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class KeptFound(_message.Message):
    __slots__ = ("dataset", "blocks", "disk_bytes")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    dataset: bytes
    blocks: _containers.RepeatedScalarFieldContainer[int]
    disk_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dataset: _Optional[bytes] = ..., blocks: _Optional[_Iterable[int]] = ..., disk_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadEnded(_message.Message):
    __slots__ = ("number", "error", "took_s", "cpu_s", "hedged_bytes", "neighbour_bytes", "disk_bytes", "store_bytes", "ends")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    HEDGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOUR_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    error: _types_pb2.Error
    took_s: float
    cpu_s: float
    hedged_bytes: int
    neighbour_bytes: int
    disk_bytes: int
    store_bytes: int
    ends: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., took_s: _Optional[float] = ..., cpu_s: _Optional[float] = ..., hedged_bytes: _Optional[int] = ..., neighbour_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., store_bytes: _Optional[int] = ..., ends: _Optional[_Iterable[int]] = ...) -> None: ...

class StorePause(_message.Message):
    __slots__ = ("store", "level", "left_s")
    STORE_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    store: str
    level: int
    left_s: float
    def __init__(self, store: _Optional[str] = ..., level: _Optional[int] = ..., left_s: _Optional[float] = ...) -> None: ...

class StoreSeen(_message.Message):
    __slots__ = ("store", "since", "error", "asked", "until")
    STORE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    store: str
    since: float
    error: str
    asked: float
    until: float
    def __init__(self, store: _Optional[str] = ..., since: _Optional[float] = ..., error: _Optional[str] = ..., asked: _Optional[float] = ..., until: _Optional[float] = ...) -> None: ...

class ShardTrouble(_message.Message):
    __slots__ = ("url", "error")
    URL_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    url: str
    error: _types_pb2.Error
    def __init__(self, url: _Optional[str] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ...) -> None: ...

class ReadSlab(_message.Message):
    __slots__ = ("number", "maker", "hedge", "request", "request_opening", "arena_id", "into")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MAKER_FIELD_NUMBER: _ClassVar[int]
    HEDGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REQUEST_OPENING_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    INTO_FIELD_NUMBER: _ClassVar[int]
    number: int
    maker: SlabMaker
    hedge: SlabMaker
    request: bytes
    request_opening: bytes
    arena_id: int
    into: _types_pb2.Region
    def __init__(self, number: _Optional[int] = ..., maker: _Optional[_Union[SlabMaker, _Mapping]] = ..., hedge: _Optional[_Union[SlabMaker, _Mapping]] = ..., request: _Optional[bytes] = ..., request_opening: _Optional[bytes] = ..., arena_id: _Optional[int] = ..., into: _Optional[_Union[_types_pb2.Region, _Mapping]] = ...) -> None: ...

class SlabMaker(_message.Message):
    __slots__ = ("address", "job_id", "generation", "key", "own_id", "node_id")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    OWN_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    address: str
    job_id: str
    generation: int
    key: bytes
    own_id: str
    node_id: str
    def __init__(self, address: _Optional[str] = ..., job_id: _Optional[str] = ..., generation: _Optional[int] = ..., key: _Optional[bytes] = ..., own_id: _Optional[str] = ..., node_id: _Optional[str] = ...) -> None: ...

class SlabRead(_message.Message):
    __slots__ = ("number", "error", "note", "length", "took_s", "node_id", "cpu_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    error: _types_pb2.Error
    note: bytes
    length: int
    took_s: float
    node_id: str
    cpu_s: float
    def __init__(self, number: _Optional[int] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., note: _Optional[bytes] = ..., length: _Optional[int] = ..., took_s: _Optional[float] = ..., node_id: _Optional[str] = ..., cpu_s: _Optional[float] = ...) -> None: ...

class EndSlab(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class AttachDelivery(_message.Message):
    __slots__ = ("arena_id",)
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    arena_id: int
    def __init__(self, arena_id: _Optional[int] = ...) -> None: ...

class DetachDelivery(_message.Message):
    __slots__ = ("arena_id",)
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    arena_id: int
    def __init__(self, arena_id: _Optional[int] = ...) -> None: ...
