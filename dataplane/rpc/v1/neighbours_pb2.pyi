from dataplane.rpc.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToLender(_message.Message):
    __slots__ = ("start_lending", "lending_keys", "give", "give_decoded_only", "refuse", "lend_arena", "return_arena")
    START_LENDING_FIELD_NUMBER: _ClassVar[int]
    LENDING_KEYS_FIELD_NUMBER: _ClassVar[int]
    GIVE_FIELD_NUMBER: _ClassVar[int]
    GIVE_DECODED_ONLY_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    LEND_ARENA_FIELD_NUMBER: _ClassVar[int]
    RETURN_ARENA_FIELD_NUMBER: _ClassVar[int]
    start_lending: StartLending
    lending_keys: LendingKeys
    give: Give
    give_decoded_only: GiveDecodedOnly
    refuse: Refuse
    lend_arena: LendArena
    return_arena: ReturnArena
    def __init__(self, start_lending: _Optional[_Union[StartLending, _Mapping]] = ..., lending_keys: _Optional[_Union[LendingKeys, _Mapping]] = ..., give: _Optional[_Union[Give, _Mapping]] = ..., give_decoded_only: _Optional[_Union[GiveDecodedOnly, _Mapping]] = ..., refuse: _Optional[_Union[Refuse, _Mapping]] = ..., lend_arena: _Optional[_Union[LendArena, _Mapping]] = ..., return_arena: _Optional[_Union[ReturnArena, _Mapping]] = ...) -> None: ...

class FromLender(_message.Message):
    __slots__ = ("asked", "given")
    ASKED_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    asked: Asked
    given: Given
    def __init__(self, asked: _Optional[_Union[Asked, _Mapping]] = ..., given: _Optional[_Union[Given, _Mapping]] = ...) -> None: ...

class StartLending(_message.Message):
    __slots__ = ("node_id", "first_number", "log_level", "log_format", "keys", "tls")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    LOG_FORMAT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    first_number: int
    log_level: str
    log_format: str
    keys: _containers.RepeatedCompositeFieldContainer[LendingKeys]
    tls: _types_pb2.PeerTls
    def __init__(self, node_id: _Optional[str] = ..., first_number: _Optional[int] = ..., log_level: _Optional[str] = ..., log_format: _Optional[str] = ..., keys: _Optional[_Iterable[_Union[LendingKeys, _Mapping]]] = ..., tls: _Optional[_Union[_types_pb2.PeerTls, _Mapping]] = ...) -> None: ...

class LendingKeys(_message.Message):
    __slots__ = ("job_id", "generation", "key", "only_under")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ONLY_UNDER_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    generation: int
    key: bytes
    only_under: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, job_id: _Optional[str] = ..., generation: _Optional[int] = ..., key: _Optional[bytes] = ..., only_under: _Optional[_Iterable[str]] = ...) -> None: ...

class Asked(_message.Message):
    __slots__ = ("number", "job_id", "dataset", "block", "offset", "length", "form", "node_id", "slab", "only_under", "count")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    SLAB_FIELD_NUMBER: _ClassVar[int]
    ONLY_UNDER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    number: int
    job_id: str
    dataset: bytes
    block: int
    offset: int
    length: int
    form: _types_pb2.BlockForm
    node_id: str
    slab: bytes
    only_under: _containers.RepeatedScalarFieldContainer[str]
    count: int
    def __init__(self, number: _Optional[int] = ..., job_id: _Optional[str] = ..., dataset: _Optional[bytes] = ..., block: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., form: _Optional[_Union[_types_pb2.BlockForm, str]] = ..., node_id: _Optional[str] = ..., slab: _Optional[bytes] = ..., only_under: _Optional[_Iterable[str]] = ..., count: _Optional[int] = ...) -> None: ...

class Give(_message.Message):
    __slots__ = ("number", "region", "arena_id", "note", "more")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    number: int
    region: _types_pb2.Region
    arena_id: int
    note: bytes
    more: _containers.RepeatedCompositeFieldContainer[_types_pb2.Region]
    def __init__(self, number: _Optional[int] = ..., region: _Optional[_Union[_types_pb2.Region, _Mapping]] = ..., arena_id: _Optional[int] = ..., note: _Optional[bytes] = ..., more: _Optional[_Iterable[_Union[_types_pb2.Region, _Mapping]]] = ...) -> None: ...

class GiveDecodedOnly(_message.Message):
    __slots__ = ("number", "length")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    number: int
    length: int
    def __init__(self, number: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Refuse(_message.Message):
    __slots__ = ("number", "is_unknown")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    IS_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    number: int
    is_unknown: bool
    def __init__(self, number: _Optional[int] = ..., is_unknown: bool = ...) -> None: ...

class LendArena(_message.Message):
    __slots__ = ("arena_id",)
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    arena_id: int
    def __init__(self, arena_id: _Optional[int] = ...) -> None: ...

class ReturnArena(_message.Message):
    __slots__ = ("arena_id",)
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    arena_id: int
    def __init__(self, arena_id: _Optional[int] = ...) -> None: ...

class Given(_message.Message):
    __slots__ = ("number", "sent_bytes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    number: int
    sent_bytes: int
    def __init__(self, number: _Optional[int] = ..., sent_bytes: _Optional[int] = ...) -> None: ...
