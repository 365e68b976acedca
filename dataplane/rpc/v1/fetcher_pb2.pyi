from dataplane.rpc.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToFetcher(_message.Message):
    __slots__ = ("start_fetching", "read_range", "copy_preamble", "store_pause")
    START_FETCHING_FIELD_NUMBER: _ClassVar[int]
    READ_RANGE_FIELD_NUMBER: _ClassVar[int]
    COPY_PREAMBLE_FIELD_NUMBER: _ClassVar[int]
    STORE_PAUSE_FIELD_NUMBER: _ClassVar[int]
    start_fetching: StartFetching
    read_range: ReadRange
    copy_preamble: CopyPreamble
    store_pause: StorePause
    def __init__(self, start_fetching: _Optional[_Union[StartFetching, _Mapping]] = ..., read_range: _Optional[_Union[ReadRange, _Mapping]] = ..., copy_preamble: _Optional[_Union[CopyPreamble, _Mapping]] = ..., store_pause: _Optional[_Union[StorePause, _Mapping]] = ...) -> None: ...

class FromFetcher(_message.Message):
    __slots__ = ("read_ended", "store_pause", "store_seen", "shard_trouble")
    READ_ENDED_FIELD_NUMBER: _ClassVar[int]
    STORE_PAUSE_FIELD_NUMBER: _ClassVar[int]
    STORE_SEEN_FIELD_NUMBER: _ClassVar[int]
    SHARD_TROUBLE_FIELD_NUMBER: _ClassVar[int]
    read_ended: ReadEnded
    store_pause: StorePause
    store_seen: StoreSeen
    shard_trouble: ShardTrouble
    def __init__(self, read_ended: _Optional[_Union[ReadEnded, _Mapping]] = ..., store_pause: _Optional[_Union[StorePause, _Mapping]] = ..., store_seen: _Optional[_Union[StoreSeen, _Mapping]] = ..., shard_trouble: _Optional[_Union[ShardTrouble, _Mapping]] = ...) -> None: ...

class StartFetching(_message.Message):
    __slots__ = ("environment", "budget_s", "request_timeout_s", "log_level", "log_format", "store", "is_policed", "allowed_urls")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    BUDGET_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    LOG_FORMAT_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    IS_POLICED_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_URLS_FIELD_NUMBER: _ClassVar[int]
    environment: _containers.RepeatedScalarFieldContainer[bytes]
    budget_s: float
    request_timeout_s: float
    log_level: str
    log_format: str
    store: str
    is_policed: bool
    allowed_urls: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, environment: _Optional[_Iterable[bytes]] = ..., budget_s: _Optional[float] = ..., request_timeout_s: _Optional[float] = ..., log_level: _Optional[str] = ..., log_format: _Optional[str] = ..., store: _Optional[str] = ..., is_policed: bool = ..., allowed_urls: _Optional[_Iterable[str]] = ...) -> None: ...

class ReadRange(_message.Message):
    __slots__ = ("number", "url", "offset", "etag", "arena_id", "into", "more")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    INTO_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    number: int
    url: str
    offset: int
    etag: str
    arena_id: int
    into: _types_pb2.Region
    more: _containers.RepeatedCompositeFieldContainer[ReadTarget]
    def __init__(self, number: _Optional[int] = ..., url: _Optional[str] = ..., offset: _Optional[int] = ..., etag: _Optional[str] = ..., arena_id: _Optional[int] = ..., into: _Optional[_Union[_types_pb2.Region, _Mapping]] = ..., more: _Optional[_Iterable[_Union[ReadTarget, _Mapping]]] = ...) -> None: ...

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

class ReadEnded(_message.Message):
    __slots__ = ("number", "error", "took_s", "cpu_s", "hedged_bytes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    HEDGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    number: int
    error: _types_pb2.Error
    took_s: float
    cpu_s: float
    hedged_bytes: int
    def __init__(self, number: _Optional[int] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., took_s: _Optional[float] = ..., cpu_s: _Optional[float] = ..., hedged_bytes: _Optional[int] = ...) -> None: ...

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
