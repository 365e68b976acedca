from dataplane.rpc.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MixUnit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MIX_UNIT_UNSPECIFIED: _ClassVar[MixUnit]
    MIX_UNIT_SAMPLES: _ClassVar[MixUnit]
    MIX_UNIT_TOKENS: _ClassVar[MixUnit]
    MIX_UNIT_BATCH: _ClassVar[MixUnit]
MIX_UNIT_UNSPECIFIED: MixUnit
MIX_UNIT_SAMPLES: MixUnit
MIX_UNIT_TOKENS: MixUnit
MIX_UNIT_BATCH: MixUnit

class ToNode(_message.Message):
    __slots__ = ("request_id", "hello", "open_job", "open_stream", "next_slab", "release", "close_stream", "close_job", "describe_columns", "read_categories", "describe_epoch", "change_weights")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_JOB_FIELD_NUMBER: _ClassVar[int]
    OPEN_STREAM_FIELD_NUMBER: _ClassVar[int]
    NEXT_SLAB_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_STREAM_FIELD_NUMBER: _ClassVar[int]
    CLOSE_JOB_FIELD_NUMBER: _ClassVar[int]
    DESCRIBE_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    READ_CATEGORIES_FIELD_NUMBER: _ClassVar[int]
    DESCRIBE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHANGE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    hello: Hello
    open_job: OpenJob
    open_stream: OpenStream
    next_slab: NextSlab
    release: Release
    close_stream: CloseStream
    close_job: CloseJob
    describe_columns: DescribeColumns
    read_categories: ReadCategories
    describe_epoch: DescribeEpoch
    change_weights: ChangeWeights
    def __init__(self, request_id: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., open_job: _Optional[_Union[OpenJob, _Mapping]] = ..., open_stream: _Optional[_Union[OpenStream, _Mapping]] = ..., next_slab: _Optional[_Union[NextSlab, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., close_stream: _Optional[_Union[CloseStream, _Mapping]] = ..., close_job: _Optional[_Union[CloseJob, _Mapping]] = ..., describe_columns: _Optional[_Union[DescribeColumns, _Mapping]] = ..., read_categories: _Optional[_Union[ReadCategories, _Mapping]] = ..., describe_epoch: _Optional[_Union[DescribeEpoch, _Mapping]] = ..., change_weights: _Optional[_Union[ChangeWeights, _Mapping]] = ...) -> None: ...

class FromNode(_message.Message):
    __slots__ = ("request_id", "error", "welcome", "job_opened", "stream_opened", "slab", "end_of_stream", "columns_described", "categories_read", "epoch_described", "weights_changed", "weights_asked", "working")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    JOB_OPENED_FIELD_NUMBER: _ClassVar[int]
    STREAM_OPENED_FIELD_NUMBER: _ClassVar[int]
    SLAB_FIELD_NUMBER: _ClassVar[int]
    END_OF_STREAM_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_DESCRIBED_FIELD_NUMBER: _ClassVar[int]
    CATEGORIES_READ_FIELD_NUMBER: _ClassVar[int]
    EPOCH_DESCRIBED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_CHANGED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ASKED_FIELD_NUMBER: _ClassVar[int]
    WORKING_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    error: _types_pb2.Error
    welcome: Welcome
    job_opened: JobOpened
    stream_opened: StreamOpened
    slab: Slab
    end_of_stream: EndOfStream
    columns_described: ColumnsDescribed
    categories_read: CategoriesRead
    epoch_described: EpochDescribed
    weights_changed: WeightsChanged
    weights_asked: WeightsAsked
    working: Working
    def __init__(self, request_id: _Optional[int] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., job_opened: _Optional[_Union[JobOpened, _Mapping]] = ..., stream_opened: _Optional[_Union[StreamOpened, _Mapping]] = ..., slab: _Optional[_Union[Slab, _Mapping]] = ..., end_of_stream: _Optional[_Union[EndOfStream, _Mapping]] = ..., columns_described: _Optional[_Union[ColumnsDescribed, _Mapping]] = ..., categories_read: _Optional[_Union[CategoriesRead, _Mapping]] = ..., epoch_described: _Optional[_Union[EpochDescribed, _Mapping]] = ..., weights_changed: _Optional[_Union[WeightsChanged, _Mapping]] = ..., weights_asked: _Optional[_Union[WeightsAsked, _Mapping]] = ..., working: _Optional[_Union[Working, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "protocol", "pid")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    version: str
    protocol: int
    pid: int
    def __init__(self, version: _Optional[str] = ..., protocol: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("version", "protocol", "node_id", "awaited")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    version: str
    protocol: int
    node_id: str
    awaited: str
    def __init__(self, version: _Optional[str] = ..., protocol: _Optional[int] = ..., node_id: _Optional[str] = ..., awaited: _Optional[str] = ...) -> None: ...

class Working(_message.Message):
    __slots__ = ("what", "done", "total", "unit", "left_s")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    what: str
    done: int
    total: int
    unit: str
    left_s: float
    def __init__(self, what: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., unit: _Optional[str] = ..., left_s: _Optional[float] = ...) -> None: ...

class DatasetSource(_message.Message):
    __slots__ = ("urls", "format")
    URLS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    urls: _containers.RepeatedScalarFieldContainer[str]
    format: str
    def __init__(self, urls: _Optional[_Iterable[str]] = ..., format: _Optional[str] = ...) -> None: ...

class OpenJob(_message.Message):
    __slots__ = ("job_id", "incarnation", "member_id", "source", "topology", "seed", "shuffle", "lanes", "window", "global_batch", "end", "transforms", "sharing", "column_options", "view", "mixture", "entries", "follows")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SHUFFLE_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_BATCH_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TRANSFORMS_FIELD_NUMBER: _ClassVar[int]
    SHARING_FIELD_NUMBER: _ClassVar[int]
    COLUMN_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    MIXTURE_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    incarnation: str
    member_id: str
    source: DatasetSource
    topology: _types_pb2.Topology
    seed: int
    shuffle: bool
    lanes: int
    window: int
    global_batch: int
    end: _types_pb2.End
    transforms: _containers.RepeatedCompositeFieldContainer[_types_pb2.ImageSpec]
    sharing: str
    column_options: _types_pb2.ColumnOptions
    view: _types_pb2.View
    mixture: MixtureAsked
    entries: _containers.RepeatedCompositeFieldContainer[_types_pb2.LedgerEntry]
    follows: bool
    def __init__(self, job_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., member_id: _Optional[str] = ..., source: _Optional[_Union[DatasetSource, _Mapping]] = ..., topology: _Optional[_Union[_types_pb2.Topology, _Mapping]] = ..., seed: _Optional[int] = ..., shuffle: bool = ..., lanes: _Optional[int] = ..., window: _Optional[int] = ..., global_batch: _Optional[int] = ..., end: _Optional[_Union[_types_pb2.End, str]] = ..., transforms: _Optional[_Iterable[_Union[_types_pb2.ImageSpec, _Mapping]]] = ..., sharing: _Optional[str] = ..., column_options: _Optional[_Union[_types_pb2.ColumnOptions, _Mapping]] = ..., view: _Optional[_Union[_types_pb2.View, _Mapping]] = ..., mixture: _Optional[_Union[MixtureAsked, _Mapping]] = ..., entries: _Optional[_Iterable[_Union[_types_pb2.LedgerEntry, _Mapping]]] = ..., follows: bool = ...) -> None: ...

class MixtureAsked(_message.Message):
    __slots__ = ("sources", "unit", "exhausted", "length", "temperature", "source_column", "schedule")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_COLUMN_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[SourceAsked]
    unit: MixUnit
    exhausted: _types_pb2.Exhausted
    length: int
    temperature: float
    source_column: str
    schedule: _containers.RepeatedCompositeFieldContainer[ScheduledWeights]
    def __init__(self, sources: _Optional[_Iterable[_Union[SourceAsked, _Mapping]]] = ..., unit: _Optional[_Union[MixUnit, str]] = ..., exhausted: _Optional[_Union[_types_pb2.Exhausted, str]] = ..., length: _Optional[int] = ..., temperature: _Optional[float] = ..., source_column: _Optional[str] = ..., schedule: _Optional[_Iterable[_Union[ScheduledWeights, _Mapping]]] = ...) -> None: ...

class ScheduledWeights(_message.Message):
    __slots__ = ("step", "weights")
    STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    weights: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, step: _Optional[int] = ..., weights: _Optional[_Iterable[float]] = ...) -> None: ...

class SourceAsked(_message.Message):
    __slots__ = ("name", "source", "weight", "passes", "passes_max", "mean_length", "view")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    PASSES_MAX_FIELD_NUMBER: _ClassVar[int]
    MEAN_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: DatasetSource
    weight: float
    passes: float
    passes_max: int
    mean_length: float
    view: _types_pb2.View
    def __init__(self, name: _Optional[str] = ..., source: _Optional[_Union[DatasetSource, _Mapping]] = ..., weight: _Optional[float] = ..., passes: _Optional[float] = ..., passes_max: _Optional[int] = ..., mean_length: _Optional[float] = ..., view: _Optional[_Union[_types_pb2.View, _Mapping]] = ...) -> None: ...

class JobOpened(_message.Message):
    __slots__ = ("spec", "digest", "sample_count", "columns", "arena_bytes", "held_bytes_max", "generation", "stall_timeout_s", "dataset", "pixels", "index_s", "plan_s", "advice", "entries", "mark", "marks")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STALL_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    INDEX_S_FIELD_NUMBER: _ClassVar[int]
    PLAN_S_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    spec: _types_pb2.JobSpec
    digest: str
    sample_count: int
    columns: _containers.RepeatedCompositeFieldContainer[_types_pb2.ColumnSpec]
    arena_bytes: int
    held_bytes_max: int
    generation: int
    stall_timeout_s: float
    dataset: _types_pb2.DatasetIdentity
    pixels: str
    index_s: float
    plan_s: float
    advice: _containers.RepeatedScalarFieldContainer[str]
    entries: _containers.RepeatedCompositeFieldContainer[_types_pb2.LedgerEntry]
    mark: _types_pb2.LedgerMark
    marks: _containers.RepeatedCompositeFieldContainer[_types_pb2.LedgerMark]
    def __init__(self, spec: _Optional[_Union[_types_pb2.JobSpec, _Mapping]] = ..., digest: _Optional[str] = ..., sample_count: _Optional[int] = ..., columns: _Optional[_Iterable[_Union[_types_pb2.ColumnSpec, _Mapping]]] = ..., arena_bytes: _Optional[int] = ..., held_bytes_max: _Optional[int] = ..., generation: _Optional[int] = ..., stall_timeout_s: _Optional[float] = ..., dataset: _Optional[_Union[_types_pb2.DatasetIdentity, _Mapping]] = ..., pixels: _Optional[str] = ..., index_s: _Optional[float] = ..., plan_s: _Optional[float] = ..., advice: _Optional[_Iterable[str]] = ..., entries: _Optional[_Iterable[_Union[_types_pb2.LedgerEntry, _Mapping]]] = ..., mark: _Optional[_Union[_types_pb2.LedgerMark, _Mapping]] = ..., marks: _Optional[_Iterable[_Union[_types_pb2.LedgerMark, _Mapping]]] = ...) -> None: ...

class DescribeColumns(_message.Message):
    __slots__ = ("job_id", "first")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    first: int
    def __init__(self, job_id: _Optional[str] = ..., first: _Optional[int] = ...) -> None: ...

class ColumnsDescribed(_message.Message):
    __slots__ = ("columns", "column_count")
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    COLUMN_COUNT_FIELD_NUMBER: _ClassVar[int]
    columns: _containers.RepeatedCompositeFieldContainer[DescribedColumn]
    column_count: int
    def __init__(self, columns: _Optional[_Iterable[_Union[DescribedColumn, _Mapping]]] = ..., column_count: _Optional[int] = ...) -> None: ...

class DescribedColumn(_message.Message):
    __slots__ = ("spec", "stored_type", "unit", "time_zone", "length_max", "category_count")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    STORED_TYPE_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    TIME_ZONE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_MAX_FIELD_NUMBER: _ClassVar[int]
    CATEGORY_COUNT_FIELD_NUMBER: _ClassVar[int]
    spec: _types_pb2.ColumnSpec
    stored_type: str
    unit: str
    time_zone: str
    length_max: int
    category_count: int
    def __init__(self, spec: _Optional[_Union[_types_pb2.ColumnSpec, _Mapping]] = ..., stored_type: _Optional[str] = ..., unit: _Optional[str] = ..., time_zone: _Optional[str] = ..., length_max: _Optional[int] = ..., category_count: _Optional[int] = ...) -> None: ...

class ReadCategories(_message.Message):
    __slots__ = ("job_id", "column", "first")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    column: str
    first: int
    def __init__(self, job_id: _Optional[str] = ..., column: _Optional[str] = ..., first: _Optional[int] = ...) -> None: ...

class CategoriesRead(_message.Message):
    __slots__ = ("values", "value_count")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    VALUE_COUNT_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    value_count: int
    def __init__(self, values: _Optional[bytes] = ..., value_count: _Optional[int] = ...) -> None: ...

class DescribeEpoch(_message.Message):
    __slots__ = ("job_id", "epoch", "mix")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MIX_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    epoch: int
    mix: _types_pb2.MixHistory
    def __init__(self, job_id: _Optional[str] = ..., epoch: _Optional[int] = ..., mix: _Optional[_Union[_types_pb2.MixHistory, _Mapping]] = ...) -> None: ...

class EpochDescribed(_message.Message):
    __slots__ = ("sample_count",)
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    sample_count: int
    def __init__(self, sample_count: _Optional[int] = ...) -> None: ...

class ChangeWeights(_message.Message):
    __slots__ = ("job_id", "epoch", "cursor", "mix", "weights")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    MIX_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    epoch: int
    cursor: int
    mix: _types_pb2.MixHistory
    weights: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, job_id: _Optional[str] = ..., epoch: _Optional[int] = ..., cursor: _Optional[int] = ..., mix: _Optional[_Union[_types_pb2.MixHistory, _Mapping]] = ..., weights: _Optional[_Iterable[float]] = ...) -> None: ...

class WeightsChanged(_message.Message):
    __slots__ = ("mix", "epoch", "position")
    MIX_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    mix: _types_pb2.MixHistory
    epoch: int
    position: int
    def __init__(self, mix: _Optional[_Union[_types_pb2.MixHistory, _Mapping]] = ..., epoch: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class WeightsAsked(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[_types_pb2.LedgerEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[_types_pb2.LedgerEntry, _Mapping]]] = ...) -> None: ...

class OpenStream(_message.Message):
    __slots__ = ("job_id", "epoch", "cursor", "first_step", "step_stride", "mix", "known_entry")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_STRIDE_FIELD_NUMBER: _ClassVar[int]
    MIX_FIELD_NUMBER: _ClassVar[int]
    KNOWN_ENTRY_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    epoch: int
    cursor: int
    first_step: int
    step_stride: int
    mix: _types_pb2.MixHistory
    known_entry: int
    def __init__(self, job_id: _Optional[str] = ..., epoch: _Optional[int] = ..., cursor: _Optional[int] = ..., first_step: _Optional[int] = ..., step_stride: _Optional[int] = ..., mix: _Optional[_Union[_types_pb2.MixHistory, _Mapping]] = ..., known_entry: _Optional[int] = ...) -> None: ...

class StreamOpened(_message.Message):
    __slots__ = ("stream_id", "step_count")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    step_count: int
    def __init__(self, stream_id: _Optional[int] = ..., step_count: _Optional[int] = ...) -> None: ...

class NextSlab(_message.Message):
    __slots__ = ("stream_id", "cursor", "stall_s", "bound")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    cursor: int
    stall_s: float
    bound: str
    def __init__(self, stream_id: _Optional[int] = ..., cursor: _Optional[int] = ..., stall_s: _Optional[float] = ..., bound: _Optional[str] = ...) -> None: ...

class Slab(_message.Message):
    __slots__ = ("stream_id", "slab_id", "region", "batches", "copy_out", "times", "layout", "bytes_used")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    COPY_OUT_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    slab_id: int
    region: _types_pb2.Region
    batches: Steps
    copy_out: bool
    times: StageTimes
    layout: bytes
    bytes_used: int
    def __init__(self, stream_id: _Optional[int] = ..., slab_id: _Optional[int] = ..., region: _Optional[_Union[_types_pb2.Region, _Mapping]] = ..., batches: _Optional[_Union[Steps, _Mapping]] = ..., copy_out: bool = ..., times: _Optional[_Union[StageTimes, _Mapping]] = ..., layout: _Optional[bytes] = ..., bytes_used: _Optional[int] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("columns",)
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    columns: _containers.RepeatedCompositeFieldContainer[Column]
    def __init__(self, columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ("fetch", "decode", "room", "queue", "assemble", "ready", "read_bytes", "reading", "decoding", "disk", "workers", "disk_bytes", "neighbour_bytes", "memory_bytes")
    FETCH_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    ASSEMBLE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOUR_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    fetch: int
    decode: int
    room: int
    queue: int
    assemble: int
    ready: int
    read_bytes: int
    reading: int
    decoding: int
    disk: int
    workers: int
    disk_bytes: int
    neighbour_bytes: int
    memory_bytes: int
    def __init__(self, fetch: _Optional[int] = ..., decode: _Optional[int] = ..., room: _Optional[int] = ..., queue: _Optional[int] = ..., assemble: _Optional[int] = ..., ready: _Optional[int] = ..., read_bytes: _Optional[int] = ..., reading: _Optional[int] = ..., decoding: _Optional[int] = ..., disk: _Optional[int] = ..., workers: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., neighbour_bytes: _Optional[int] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class Steps(_message.Message):
    __slots__ = ("first", "stride", "rows", "valid")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    VALID_FIELD_NUMBER: _ClassVar[int]
    first: int
    stride: int
    rows: _containers.RepeatedScalarFieldContainer[int]
    valid: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first: _Optional[int] = ..., stride: _Optional[int] = ..., rows: _Optional[_Iterable[int]] = ..., valid: _Optional[_Iterable[int]] = ...) -> None: ...

class Column(_message.Message):
    __slots__ = ("values", "lengths", "width")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    width: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ..., width: _Optional[_Iterable[int]] = ...) -> None: ...

class EndOfStream(_message.Message):
    __slots__ = ("stream_id",)
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    def __init__(self, stream_id: _Optional[int] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("job_id", "slab_ids")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SLAB_IDS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    slab_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job_id: _Optional[str] = ..., slab_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CloseStream(_message.Message):
    __slots__ = ("stream_id", "cursor")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    cursor: int
    def __init__(self, stream_id: _Optional[int] = ..., cursor: _Optional[int] = ...) -> None: ...

class CloseJob(_message.Message):
    __slots__ = ("job_id", "epoch", "cursor", "holds_slabs")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    HOLDS_SLABS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    epoch: int
    cursor: int
    holds_slabs: bool
    def __init__(self, job_id: _Optional[str] = ..., epoch: _Optional[int] = ..., cursor: _Optional[int] = ..., holds_slabs: bool = ...) -> None: ...
