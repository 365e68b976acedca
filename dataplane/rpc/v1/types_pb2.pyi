from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Error(_message.Message):
    __slots__ = ("name", "message", "nouns")
    class NounsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NOUNS_FIELD_NUMBER: _ClassVar[int]
    name: str
    message: str
    nouns: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., message: _Optional[str] = ..., nouns: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ReplacedRow(_message.Message):
    __slots__ = ("url", "shard", "row", "instead", "reason")
    URL_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    INSTEAD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    url: str
    shard: int
    row: int
    instead: int
    reason: str
    def __init__(self, url: _Optional[str] = ..., shard: _Optional[int] = ..., row: _Optional[int] = ..., instead: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ShareChange(_message.Message):
    __slots__ = ("epoch", "position", "shares")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    position: int
    shares: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., position: _Optional[int] = ..., shares: _Optional[_Iterable[int]] = ...) -> None: ...

class MixHistory(_message.Message):
    __slots__ = ("changes", "length")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[ShareChange]
    length: int
    def __init__(self, changes: _Optional[_Iterable[_Union[ShareChange, _Mapping]]] = ..., length: _Optional[int] = ...) -> None: ...

class DatasetIdentity(_message.Message):
    __slots__ = ("content", "layout")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    content: str
    layout: str
    def __init__(self, content: _Optional[str] = ..., layout: _Optional[str] = ...) -> None: ...

class LedgerPosition(_message.Message):
    __slots__ = ("epoch", "cursor")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    cursor: int
    def __init__(self, epoch: _Optional[int] = ..., cursor: _Optional[int] = ...) -> None: ...

class LedgerEntry(_message.Message):
    __slots__ = ("seq", "kind", "position", "payload", "by", "at", "previous")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    kind: str
    position: LedgerPosition
    payload: str
    by: str
    at: float
    previous: str
    def __init__(self, seq: _Optional[int] = ..., kind: _Optional[str] = ..., position: _Optional[_Union[LedgerPosition, _Mapping]] = ..., payload: _Optional[str] = ..., by: _Optional[str] = ..., at: _Optional[float] = ..., previous: _Optional[str] = ...) -> None: ...

class LedgerMark(_message.Message):
    __slots__ = ("seq", "hash")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    seq: int
    hash: str
    def __init__(self, seq: _Optional[int] = ..., hash: _Optional[str] = ...) -> None: ...

class Tombstone(_message.Message):
    __slots__ = ("shard", "row", "source", "of_view")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    OF_VIEW_FIELD_NUMBER: _ClassVar[int]
    shard: int
    row: int
    source: int
    of_view: int
    def __init__(self, shard: _Optional[int] = ..., row: _Optional[int] = ..., source: _Optional[int] = ..., of_view: _Optional[int] = ...) -> None: ...

class Topology(_message.Message):
    __slots__ = ("dp_rank", "dp_size", "rank", "world_size", "local_rank", "local_world_size", "pp_rank", "pp_size", "cp_rank", "cp_size", "source")
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    CP_RANK_FIELD_NUMBER: _ClassVar[int]
    CP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    dp_rank: int
    dp_size: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    source: str
    def __init__(self, dp_rank: _Optional[int] = ..., dp_size: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., local_rank: _Optional[int] = ..., local_world_size: _Optional[int] = ..., pp_rank: _Optional[int] = ..., pp_size: _Optional[int] = ..., cp_rank: _Optional[int] = ..., cp_size: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...
