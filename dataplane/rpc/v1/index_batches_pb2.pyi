from dataplane.rpc.v1 import types_pb2 as _types_pb2
from dataplane.rpc.v1 import fetcher_pb2 as _fetcher_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToReader(_message.Message):
    __slots__ = ("start_fetching", "index_batch", "store_pause")
    START_FETCHING_FIELD_NUMBER: _ClassVar[int]
    INDEX_BATCH_FIELD_NUMBER: _ClassVar[int]
    STORE_PAUSE_FIELD_NUMBER: _ClassVar[int]
    start_fetching: _fetcher_pb2.StartFetching
    index_batch: IndexBatch
    store_pause: _fetcher_pb2.StorePause
    def __init__(self, start_fetching: _Optional[_Union[_fetcher_pb2.StartFetching, _Mapping]] = ..., index_batch: _Optional[_Union[IndexBatch, _Mapping]] = ..., store_pause: _Optional[_Union[_fetcher_pb2.StorePause, _Mapping]] = ...) -> None: ...

class FromIndexReaders(_message.Message):
    __slots__ = ("batch_indexed", "store_pause")
    BATCH_INDEXED_FIELD_NUMBER: _ClassVar[int]
    STORE_PAUSE_FIELD_NUMBER: _ClassVar[int]
    batch_indexed: BatchIndexed
    store_pause: _fetcher_pb2.StorePause
    def __init__(self, batch_indexed: _Optional[_Union[BatchIndexed, _Mapping]] = ..., store_pause: _Optional[_Union[_fetcher_pb2.StorePause, _Mapping]] = ...) -> None: ...

class IndexBatch(_message.Message):
    __slots__ = ("number", "format", "shards", "with_preambles")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    WITH_PREAMBLES_FIELD_NUMBER: _ClassVar[int]
    number: int
    format: str
    shards: _containers.RepeatedCompositeFieldContainer[BatchShard]
    with_preambles: bool
    def __init__(self, number: _Optional[int] = ..., format: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[BatchShard, _Mapping]]] = ..., with_preambles: bool = ...) -> None: ...

class BatchShard(_message.Message):
    __slots__ = ("url", "size_bytes", "etag")
    URL_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    url: str
    size_bytes: int
    etag: str
    def __init__(self, url: _Optional[str] = ..., size_bytes: _Optional[int] = ..., etag: _Optional[str] = ...) -> None: ...

class BatchIndexed(_message.Message):
    __slots__ = ("number", "indexes", "preambles", "unread_count")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    PREAMBLES_FIELD_NUMBER: _ClassVar[int]
    UNREAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    number: int
    indexes: bytes
    preambles: _containers.RepeatedCompositeFieldContainer[BatchPreamble]
    unread_count: int
    def __init__(self, number: _Optional[int] = ..., indexes: _Optional[bytes] = ..., preambles: _Optional[_Iterable[_Union[BatchPreamble, _Mapping]]] = ..., unread_count: _Optional[int] = ...) -> None: ...

class BatchPreamble(_message.Message):
    __slots__ = ("shard", "content")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    shard: int
    content: bytes
    def __init__(self, shard: _Optional[int] = ..., content: _Optional[bytes] = ...) -> None: ...

class ToParser(_message.Message):
    __slots__ = ("index_batch", "batch_parts")
    INDEX_BATCH_FIELD_NUMBER: _ClassVar[int]
    BATCH_PARTS_FIELD_NUMBER: _ClassVar[int]
    index_batch: IndexBatch
    batch_parts: BatchParts
    def __init__(self, index_batch: _Optional[_Union[IndexBatch, _Mapping]] = ..., batch_parts: _Optional[_Union[BatchParts, _Mapping]] = ...) -> None: ...

class BatchParts(_message.Message):
    __slots__ = ("number", "parts")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    number: int
    parts: _containers.RepeatedCompositeFieldContainer[ReadPart]
    def __init__(self, number: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[ReadPart, _Mapping]]] = ...) -> None: ...

class ReadPart(_message.Message):
    __slots__ = ("shard", "offset", "content")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    shard: int
    offset: int
    content: bytes
    def __init__(self, shard: _Optional[int] = ..., offset: _Optional[int] = ..., content: _Optional[bytes] = ...) -> None: ...

class MissingParts(_message.Message):
    __slots__ = ("number", "parts")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    number: int
    parts: _containers.RepeatedCompositeFieldContainer[MissingPart]
    def __init__(self, number: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[MissingPart, _Mapping]]] = ...) -> None: ...

class MissingPart(_message.Message):
    __slots__ = ("shard", "place")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    shard: int
    place: _types_pb2.Region
    def __init__(self, shard: _Optional[int] = ..., place: _Optional[_Union[_types_pb2.Region, _Mapping]] = ...) -> None: ...
