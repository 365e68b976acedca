from dataplane.rpc.v1 import types_pb2 as _types_pb2
from dataplane.rpc.v1 import local_pb2 as _local_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Task(_message.Message):
    __slots__ = ("attach_arena", "detach_arena", "open_dataset", "decode", "assemble", "open_blocks", "copy_slab", "extract")
    ATTACH_ARENA_FIELD_NUMBER: _ClassVar[int]
    DETACH_ARENA_FIELD_NUMBER: _ClassVar[int]
    OPEN_DATASET_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    ASSEMBLE_FIELD_NUMBER: _ClassVar[int]
    OPEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPY_SLAB_FIELD_NUMBER: _ClassVar[int]
    EXTRACT_FIELD_NUMBER: _ClassVar[int]
    attach_arena: AttachArena
    detach_arena: DetachArena
    open_dataset: OpenDataset
    decode: Decode
    assemble: Assemble
    open_blocks: OpenBlocks
    copy_slab: CopySlab
    extract: Extract
    def __init__(self, attach_arena: _Optional[_Union[AttachArena, _Mapping]] = ..., detach_arena: _Optional[_Union[DetachArena, _Mapping]] = ..., open_dataset: _Optional[_Union[OpenDataset, _Mapping]] = ..., decode: _Optional[_Union[Decode, _Mapping]] = ..., assemble: _Optional[_Union[Assemble, _Mapping]] = ..., open_blocks: _Optional[_Union[OpenBlocks, _Mapping]] = ..., copy_slab: _Optional[_Union[CopySlab, _Mapping]] = ..., extract: _Optional[_Union[Extract, _Mapping]] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("error", "done", "decoded", "assembled", "reading", "out_of_memory", "extracted")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    DECODED_FIELD_NUMBER: _ClassVar[int]
    ASSEMBLED_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    OUT_OF_MEMORY_FIELD_NUMBER: _ClassVar[int]
    EXTRACTED_FIELD_NUMBER: _ClassVar[int]
    error: _types_pb2.Error
    done: Done
    decoded: Decoded
    assembled: Assembled
    reading: Reading
    out_of_memory: OutOfMemory
    extracted: Extracted
    def __init__(self, error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., decoded: _Optional[_Union[Decoded, _Mapping]] = ..., assembled: _Optional[_Union[Assembled, _Mapping]] = ..., reading: _Optional[_Union[Reading, _Mapping]] = ..., out_of_memory: _Optional[_Union[OutOfMemory, _Mapping]] = ..., extracted: _Optional[_Union[Extracted, _Mapping]] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Reading(_message.Message):
    __slots__ = ("block_key", "row", "column", "step")
    BLOCK_KEY_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    block_key: int
    row: int
    column: str
    step: int
    def __init__(self, block_key: _Optional[int] = ..., row: _Optional[int] = ..., column: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class OutOfMemory(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachArena(_message.Message):
    __slots__ = ("arena_id",)
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    arena_id: int
    def __init__(self, arena_id: _Optional[int] = ...) -> None: ...

class DetachArena(_message.Message):
    __slots__ = ("arena_id",)
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    arena_id: int
    def __init__(self, arena_id: _Optional[int] = ...) -> None: ...

class OpenDataset(_message.Message):
    __slots__ = ("dataset_id", "format", "schema", "more", "pack", "memory_bytes", "column_options", "view", "finds_columns", "seed")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    PACK_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    COLUMN_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    FINDS_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    dataset_id: int
    format: str
    schema: bytes
    more: bool
    pack: bool
    memory_bytes: int
    column_options: _types_pb2.ColumnOptions
    view: _types_pb2.View
    finds_columns: bool
    seed: int
    def __init__(self, dataset_id: _Optional[int] = ..., format: _Optional[str] = ..., schema: _Optional[bytes] = ..., more: bool = ..., pack: bool = ..., memory_bytes: _Optional[int] = ..., column_options: _Optional[_Union[_types_pb2.ColumnOptions, _Mapping]] = ..., view: _Optional[_Union[_types_pb2.View, _Mapping]] = ..., finds_columns: bool = ..., seed: _Optional[int] = ...) -> None: ...

class RawBlockRef(_message.Message):
    __slots__ = ("url", "index", "rows", "place", "preamble_place", "shard_bytes", "etag", "arena", "path", "pieces", "kept_preamble", "preamble_number", "stored_rows", "first_row", "shard_word", "shard")
    URL_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    PREAMBLE_PLACE_FIELD_NUMBER: _ClassVar[int]
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    KEPT_PREAMBLE_FIELD_NUMBER: _ClassVar[int]
    PREAMBLE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORED_ROWS_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    SHARD_WORD_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    url: str
    index: int
    rows: int
    place: _types_pb2.Region
    preamble_place: _types_pb2.Region
    shard_bytes: int
    etag: str
    arena: _types_pb2.Region
    path: str
    pieces: _containers.RepeatedCompositeFieldContainer[_types_pb2.Region]
    kept_preamble: _types_pb2.Region
    preamble_number: int
    stored_rows: int
    first_row: int
    shard_word: int
    shard: int
    def __init__(self, url: _Optional[str] = ..., index: _Optional[int] = ..., rows: _Optional[int] = ..., place: _Optional[_Union[_types_pb2.Region, _Mapping]] = ..., preamble_place: _Optional[_Union[_types_pb2.Region, _Mapping]] = ..., shard_bytes: _Optional[int] = ..., etag: _Optional[str] = ..., arena: _Optional[_Union[_types_pb2.Region, _Mapping]] = ..., path: _Optional[str] = ..., pieces: _Optional[_Iterable[_Union[_types_pb2.Region, _Mapping]]] = ..., kept_preamble: _Optional[_Union[_types_pb2.Region, _Mapping]] = ..., preamble_number: _Optional[int] = ..., stored_rows: _Optional[int] = ..., first_row: _Optional[int] = ..., shard_word: _Optional[int] = ..., shard: _Optional[int] = ...) -> None: ...

class Decode(_message.Message):
    __slots__ = ("dataset_id", "raw", "into")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    INTO_FIELD_NUMBER: _ClassVar[int]
    dataset_id: int
    raw: RawBlockRef
    into: _types_pb2.Region
    def __init__(self, dataset_id: _Optional[int] = ..., raw: _Optional[_Union[RawBlockRef, _Mapping]] = ..., into: _Optional[_Union[_types_pb2.Region, _Mapping]] = ...) -> None: ...

class Decoded(_message.Message):
    __slots__ = ("bytes", "stored", "disk")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    stored: bool
    disk: int
    def __init__(self, bytes: _Optional[int] = ..., stored: bool = ..., disk: _Optional[int] = ...) -> None: ...

class Origin(_message.Message):
    __slots__ = ("url", "shard", "first_row", "of_view", "pack_count")
    URL_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    OF_VIEW_FIELD_NUMBER: _ClassVar[int]
    PACK_COUNT_FIELD_NUMBER: _ClassVar[int]
    url: str
    shard: int
    first_row: int
    of_view: bool
    pack_count: int
    def __init__(self, url: _Optional[str] = ..., shard: _Optional[int] = ..., first_row: _Optional[int] = ..., of_view: bool = ..., pack_count: _Optional[int] = ...) -> None: ...

class BlockSource(_message.Message):
    __slots__ = ("key", "raw", "decoded", "origin", "restart_indexes", "row_count")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    DECODED_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    RESTART_INDEXES_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    key: int
    raw: RawBlockRef
    decoded: _types_pb2.Region
    origin: Origin
    restart_indexes: _types_pb2.Region
    row_count: int
    def __init__(self, key: _Optional[int] = ..., raw: _Optional[_Union[RawBlockRef, _Mapping]] = ..., decoded: _Optional[_Union[_types_pb2.Region, _Mapping]] = ..., origin: _Optional[_Union[Origin, _Mapping]] = ..., restart_indexes: _Optional[_Union[_types_pb2.Region, _Mapping]] = ..., row_count: _Optional[int] = ...) -> None: ...

class OpenBlocks(_message.Message):
    __slots__ = ("dataset_id", "blocks", "forget")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    dataset_id: int
    blocks: _containers.RepeatedCompositeFieldContainer[BlockSource]
    forget: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dataset_id: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[BlockSource, _Mapping]]] = ..., forget: _Optional[_Iterable[int]] = ...) -> None: ...

class Render(_message.Message):
    __slots__ = ("images", "seed", "epoch")
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    images: _containers.RepeatedCompositeFieldContainer[_types_pb2.ImageSpec]
    seed: int
    epoch: int
    def __init__(self, images: _Optional[_Iterable[_Union[_types_pb2.ImageSpec, _Mapping]]] = ..., seed: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Assemble(_message.Message):
    __slots__ = ("dataset_id", "block_keys", "row_index", "batches", "arena_id", "slab", "render", "keep", "say_where", "pack_keys", "sources", "pack_key_counts", "collate", "taken_out", "taken_out_counts", "names_sources", "first_row", "row_count")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    ROW_INDEX_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    SLAB_FIELD_NUMBER: _ClassVar[int]
    RENDER_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    SAY_WHERE_FIELD_NUMBER: _ClassVar[int]
    PACK_KEYS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    PACK_KEY_COUNTS_FIELD_NUMBER: _ClassVar[int]
    COLLATE_FIELD_NUMBER: _ClassVar[int]
    TAKEN_OUT_FIELD_NUMBER: _ClassVar[int]
    TAKEN_OUT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    NAMES_SOURCES_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    dataset_id: int
    block_keys: _containers.RepeatedScalarFieldContainer[int]
    row_index: _types_pb2.Region
    batches: _local_pb2.Steps
    arena_id: int
    slab: _types_pb2.Region
    render: Render
    keep: _types_pb2.Region
    say_where: bool
    pack_keys: _containers.RepeatedScalarFieldContainer[int]
    sources: _containers.RepeatedScalarFieldContainer[int]
    pack_key_counts: _containers.RepeatedScalarFieldContainer[int]
    collate: Collation
    taken_out: _containers.RepeatedCompositeFieldContainer[TakenDocument]
    taken_out_counts: _containers.RepeatedScalarFieldContainer[int]
    names_sources: bool
    first_row: int
    row_count: int
    def __init__(self, dataset_id: _Optional[int] = ..., block_keys: _Optional[_Iterable[int]] = ..., row_index: _Optional[_Union[_types_pb2.Region, _Mapping]] = ..., batches: _Optional[_Union[_local_pb2.Steps, _Mapping]] = ..., arena_id: _Optional[int] = ..., slab: _Optional[_Union[_types_pb2.Region, _Mapping]] = ..., render: _Optional[_Union[Render, _Mapping]] = ..., keep: _Optional[_Union[_types_pb2.Region, _Mapping]] = ..., say_where: bool = ..., pack_keys: _Optional[_Iterable[int]] = ..., sources: _Optional[_Iterable[int]] = ..., pack_key_counts: _Optional[_Iterable[int]] = ..., collate: _Optional[_Union[Collation, _Mapping]] = ..., taken_out: _Optional[_Iterable[_Union[TakenDocument, _Mapping]]] = ..., taken_out_counts: _Optional[_Iterable[int]] = ..., names_sources: bool = ..., first_row: _Optional[int] = ..., row_count: _Optional[int] = ...) -> None: ...

class TakenDocument(_message.Message):
    __slots__ = ("row", "key")
    ROW_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    row: int
    key: int
    def __init__(self, row: _Optional[int] = ..., key: _Optional[int] = ...) -> None: ...

class Collation(_message.Message):
    __slots__ = ("function", "seed", "epoch", "cursor", "global_batch", "dp_rank", "source_column", "columns", "code")
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_BATCH_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    SOURCE_COLUMN_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    function: str
    seed: int
    epoch: int
    cursor: int
    global_batch: int
    dp_rank: int
    source_column: str
    columns: _containers.RepeatedCompositeFieldContainer[_types_pb2.ColumnSpec]
    code: str
    def __init__(self, function: _Optional[str] = ..., seed: _Optional[int] = ..., epoch: _Optional[int] = ..., cursor: _Optional[int] = ..., global_batch: _Optional[int] = ..., dp_rank: _Optional[int] = ..., source_column: _Optional[str] = ..., columns: _Optional[_Iterable[_Union[_types_pb2.ColumnSpec, _Mapping]]] = ..., code: _Optional[str] = ...) -> None: ...

class Assembled(_message.Message):
    __slots__ = ("batch_count", "bytes_needed", "bytes_used", "disk", "layout", "replaced")
    BATCH_COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTES_NEEDED_FIELD_NUMBER: _ClassVar[int]
    BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    batch_count: int
    bytes_needed: int
    bytes_used: int
    disk: int
    layout: bytes
    replaced: _containers.RepeatedCompositeFieldContainer[_types_pb2.ReplacedRow]
    def __init__(self, batch_count: _Optional[int] = ..., bytes_needed: _Optional[int] = ..., bytes_used: _Optional[int] = ..., disk: _Optional[int] = ..., layout: _Optional[bytes] = ..., replaced: _Optional[_Iterable[_Union[_types_pb2.ReplacedRow, _Mapping]]] = ...) -> None: ...

class Extract(_message.Message):
    __slots__ = ("dataset_id", "block_key", "places")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEY_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    dataset_id: int
    block_key: int
    places: _containers.RepeatedCompositeFieldContainer[ExcerptPlace]
    def __init__(self, dataset_id: _Optional[int] = ..., block_key: _Optional[int] = ..., places: _Optional[_Iterable[_Union[ExcerptPlace, _Mapping]]] = ...) -> None: ...

class ExcerptPlace(_message.Message):
    __slots__ = ("into", "row_count", "pack_keys", "taken_out")
    INTO_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    PACK_KEYS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_OUT_FIELD_NUMBER: _ClassVar[int]
    into: _types_pb2.Region
    row_count: int
    pack_keys: _containers.RepeatedScalarFieldContainer[int]
    taken_out: _containers.RepeatedCompositeFieldContainer[TakenDocument]
    def __init__(self, into: _Optional[_Union[_types_pb2.Region, _Mapping]] = ..., row_count: _Optional[int] = ..., pack_keys: _Optional[_Iterable[int]] = ..., taken_out: _Optional[_Iterable[_Union[TakenDocument, _Mapping]]] = ...) -> None: ...

class Extracted(_message.Message):
    __slots__ = ("bytes", "disk")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    bytes: _containers.RepeatedScalarFieldContainer[int]
    disk: int
    def __init__(self, bytes: _Optional[_Iterable[int]] = ..., disk: _Optional[int] = ...) -> None: ...

class CopySlab(_message.Message):
    __slots__ = ("kept", "arena_id", "slab", "keep")
    KEPT_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    SLAB_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    kept: _types_pb2.Region
    arena_id: int
    slab: _types_pb2.Region
    keep: bool
    def __init__(self, kept: _Optional[_Union[_types_pb2.Region, _Mapping]] = ..., arena_id: _Optional[int] = ..., slab: _Optional[_Union[_types_pb2.Region, _Mapping]] = ..., keep: bool = ...) -> None: ...

class ToIndexer(_message.Message):
    __slots__ = ("task", "index_shard", "shard_bytes", "count_rows")
    TASK_FIELD_NUMBER: _ClassVar[int]
    INDEX_SHARD_FIELD_NUMBER: _ClassVar[int]
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    COUNT_ROWS_FIELD_NUMBER: _ClassVar[int]
    task: int
    index_shard: IndexShard
    shard_bytes: ShardBytes
    count_rows: CountRows
    def __init__(self, task: _Optional[int] = ..., index_shard: _Optional[_Union[IndexShard, _Mapping]] = ..., shard_bytes: _Optional[_Union[ShardBytes, _Mapping]] = ..., count_rows: _Optional[_Union[CountRows, _Mapping]] = ...) -> None: ...

class FromIndexer(_message.Message):
    __slots__ = ("task", "error", "out_of_memory", "read_shard", "still_reading", "shard_indexed")
    TASK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    OUT_OF_MEMORY_FIELD_NUMBER: _ClassVar[int]
    READ_SHARD_FIELD_NUMBER: _ClassVar[int]
    STILL_READING_FIELD_NUMBER: _ClassVar[int]
    SHARD_INDEXED_FIELD_NUMBER: _ClassVar[int]
    task: int
    error: _types_pb2.Error
    out_of_memory: OutOfMemory
    read_shard: ReadShard
    still_reading: StillReading
    shard_indexed: ShardIndexed
    def __init__(self, task: _Optional[int] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., out_of_memory: _Optional[_Union[OutOfMemory, _Mapping]] = ..., read_shard: _Optional[_Union[ReadShard, _Mapping]] = ..., still_reading: _Optional[_Union[StillReading, _Mapping]] = ..., shard_indexed: _Optional[_Union[ShardIndexed, _Mapping]] = ...) -> None: ...

class IndexShard(_message.Message):
    __slots__ = ("format", "url", "size_bytes", "etag", "is_local", "parts")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    IS_LOCAL_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    format: str
    url: str
    size_bytes: int
    etag: str
    is_local: bool
    parts: _containers.RepeatedCompositeFieldContainer[ShardPart]
    def __init__(self, format: _Optional[str] = ..., url: _Optional[str] = ..., size_bytes: _Optional[int] = ..., etag: _Optional[str] = ..., is_local: bool = ..., parts: _Optional[_Iterable[_Union[ShardPart, _Mapping]]] = ...) -> None: ...

class CountRows(_message.Message):
    __slots__ = ("format", "url", "size_bytes", "etag", "schema", "view", "blocks", "is_local", "parts")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IS_LOCAL_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    format: str
    url: str
    size_bytes: int
    etag: str
    schema: bytes
    view: _types_pb2.View
    blocks: _containers.RepeatedCompositeFieldContainer[RawBlockRef]
    is_local: bool
    parts: _containers.RepeatedCompositeFieldContainer[ShardPart]
    def __init__(self, format: _Optional[str] = ..., url: _Optional[str] = ..., size_bytes: _Optional[int] = ..., etag: _Optional[str] = ..., schema: _Optional[bytes] = ..., view: _Optional[_Union[_types_pb2.View, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[RawBlockRef, _Mapping]]] = ..., is_local: bool = ..., parts: _Optional[_Iterable[_Union[ShardPart, _Mapping]]] = ...) -> None: ...

class ShardPart(_message.Message):
    __slots__ = ("offset", "content")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    offset: int
    content: bytes
    def __init__(self, offset: _Optional[int] = ..., content: _Optional[bytes] = ...) -> None: ...

class ReadShard(_message.Message):
    __slots__ = ("request", "place")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    request: int
    place: _types_pb2.Region
    def __init__(self, request: _Optional[int] = ..., place: _Optional[_Union[_types_pb2.Region, _Mapping]] = ...) -> None: ...

class ShardBytes(_message.Message):
    __slots__ = ("request", "content", "is_end", "has_failed")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    IS_END_FIELD_NUMBER: _ClassVar[int]
    HAS_FAILED_FIELD_NUMBER: _ClassVar[int]
    request: int
    content: bytes
    is_end: bool
    has_failed: bool
    def __init__(self, request: _Optional[int] = ..., content: _Optional[bytes] = ..., is_end: bool = ..., has_failed: bool = ...) -> None: ...

class StillReading(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShardIndexed(_message.Message):
    __slots__ = ("index", "more")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    index: bytes
    more: bool
    def __init__(self, index: _Optional[bytes] = ..., more: bool = ...) -> None: ...

class ToForkServer(_message.Message):
    __slots__ = ("start_child", "kill_child")
    START_CHILD_FIELD_NUMBER: _ClassVar[int]
    KILL_CHILD_FIELD_NUMBER: _ClassVar[int]
    start_child: StartChild
    kill_child: KillChild
    def __init__(self, start_child: _Optional[_Union[StartChild, _Mapping]] = ..., kill_child: _Optional[_Union[KillChild, _Mapping]] = ...) -> None: ...

class FromForkServer(_message.Message):
    __slots__ = ("child_started", "child_ended")
    CHILD_STARTED_FIELD_NUMBER: _ClassVar[int]
    CHILD_ENDED_FIELD_NUMBER: _ClassVar[int]
    child_started: ChildStarted
    child_ended: ChildEnded
    def __init__(self, child_started: _Optional[_Union[ChildStarted, _Mapping]] = ..., child_ended: _Optional[_Union[ChildEnded, _Mapping]] = ...) -> None: ...

class StartChild(_message.Message):
    __slots__ = ("number", "role", "memory_bytes", "processors")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROCESSORS_FIELD_NUMBER: _ClassVar[int]
    number: int
    role: str
    memory_bytes: int
    processors: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., role: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., processors: _Optional[_Iterable[int]] = ...) -> None: ...

class KillChild(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class ChildStarted(_message.Message):
    __slots__ = ("number", "pid")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    number: int
    pid: int
    def __init__(self, number: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class ChildEnded(_message.Message):
    __slots__ = ("number", "status")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    number: int
    status: int
    def __init__(self, number: _Optional[int] = ..., status: _Optional[int] = ...) -> None: ...
