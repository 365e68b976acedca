from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ManifestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MANIFEST_STATE_UNSPECIFIED: _ClassVar[ManifestState]
    MANIFEST_STATE_WANTED: _ClassVar[ManifestState]
    MANIFEST_STATE_MAKING: _ClassVar[ManifestState]
    MANIFEST_STATE_HELD: _ClassVar[ManifestState]
    MANIFEST_STATE_FAILED: _ClassVar[ManifestState]

class ManifestTurn(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MANIFEST_TURN_UNSPECIFIED: _ClassVar[ManifestTurn]
    MANIFEST_TURN_MAKE: _ClassVar[ManifestTurn]
    MANIFEST_TURN_WAIT: _ClassVar[ManifestTurn]
    MANIFEST_TURN_FETCH: _ClassVar[ManifestTurn]
    MANIFEST_TURN_KEEP: _ClassVar[ManifestTurn]
    MANIFEST_TURN_ALONE: _ClassVar[ManifestTurn]
MANIFEST_STATE_UNSPECIFIED: ManifestState
MANIFEST_STATE_WANTED: ManifestState
MANIFEST_STATE_MAKING: ManifestState
MANIFEST_STATE_HELD: ManifestState
MANIFEST_STATE_FAILED: ManifestState
MANIFEST_TURN_UNSPECIFIED: ManifestTurn
MANIFEST_TURN_MAKE: ManifestTurn
MANIFEST_TURN_WAIT: ManifestTurn
MANIFEST_TURN_FETCH: ManifestTurn
MANIFEST_TURN_KEEP: ManifestTurn
MANIFEST_TURN_ALONE: ManifestTurn

class NodeWork(_message.Message):
    __slots__ = ("what", "dataset", "done", "total", "unit", "left_s")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    what: str
    dataset: str
    done: int
    total: int
    unit: str
    left_s: float
    def __init__(self, what: _Optional[str] = ..., dataset: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., unit: _Optional[str] = ..., left_s: _Optional[float] = ...) -> None: ...

class ShareManifestRequest(_message.Message):
    __slots__ = ("node_id", "job_id", "incarnation", "name", "urls", "data_address", "state", "fingerprint", "refused_by", "work")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    URLS_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BY_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    job_id: str
    incarnation: str
    name: bytes
    urls: _containers.RepeatedScalarFieldContainer[str]
    data_address: str
    state: ManifestState
    fingerprint: str
    refused_by: str
    work: NodeWork
    def __init__(self, node_id: _Optional[str] = ..., job_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., name: _Optional[bytes] = ..., urls: _Optional[_Iterable[str]] = ..., data_address: _Optional[str] = ..., state: _Optional[_Union[ManifestState, str]] = ..., fingerprint: _Optional[str] = ..., refused_by: _Optional[str] = ..., work: _Optional[_Union[NodeWork, _Mapping]] = ...) -> None: ...

class ShareManifestResponse(_message.Message):
    __slots__ = ("turn", "node_id", "address", "line", "generation", "key", "pause_s", "work")
    TURN_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    turn: ManifestTurn
    node_id: str
    address: str
    line: str
    generation: int
    key: bytes
    pause_s: float
    work: NodeWork
    def __init__(self, turn: _Optional[_Union[ManifestTurn, str]] = ..., node_id: _Optional[str] = ..., address: _Optional[str] = ..., line: _Optional[str] = ..., generation: _Optional[int] = ..., key: _Optional[bytes] = ..., pause_s: _Optional[float] = ..., work: _Optional[_Union[NodeWork, _Mapping]] = ...) -> None: ...
