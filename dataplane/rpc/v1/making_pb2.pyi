from dataplane.rpc.v1 import local_pb2 as _local_pb2
from dataplane.rpc.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MakeSlab(_message.Message):
    __slots__ = ("digest", "software", "epoch", "cursor", "dp_rank", "dp_size", "step_stride", "steps", "slot_bytes", "coming", "opening", "mix")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    STEP_STRIDE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMING_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    MIX_FIELD_NUMBER: _ClassVar[int]
    digest: str
    software: str
    epoch: int
    cursor: int
    dp_rank: int
    dp_size: int
    step_stride: int
    steps: StepRange
    slot_bytes: int
    coming: _containers.RepeatedCompositeFieldContainer[StepRange]
    opening: _local_pb2.OpenJob
    mix: _types_pb2.MixHistory
    def __init__(self, digest: _Optional[str] = ..., software: _Optional[str] = ..., epoch: _Optional[int] = ..., cursor: _Optional[int] = ..., dp_rank: _Optional[int] = ..., dp_size: _Optional[int] = ..., step_stride: _Optional[int] = ..., steps: _Optional[_Union[StepRange, _Mapping]] = ..., slot_bytes: _Optional[int] = ..., coming: _Optional[_Iterable[_Union[StepRange, _Mapping]]] = ..., opening: _Optional[_Union[_local_pb2.OpenJob, _Mapping]] = ..., mix: _Optional[_Union[_types_pb2.MixHistory, _Mapping]] = ...) -> None: ...

class StepRange(_message.Message):
    __slots__ = ("first", "count")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...
