"""The messages between a node and the processes that index many shards for it, in batches.

Frozen values, used outside this package instead of protobuf classes. Names and fields equal those
of proto/dataplane/rpc/v1/index_batches.proto, whose comments are the specification; a test compares
the two.
"""

from __future__ import annotations

from msgspec import Struct

from dataplane.model import Region, StorePause
from dataplane.rpc.fetches import StartFetching


class BatchShard(Struct, frozen=True):
    """A shard of a batch, as it was listed."""

    url: str
    size_bytes: int
    etag: str


class IndexBatch(Struct, frozen=True):
    """Index these shards of one format; the node wants their preambles, too, or not."""

    number: int
    format: str
    shards: tuple[BatchShard, ...]
    with_preambles: bool = False


class BatchPreamble(Struct, frozen=True):
    """The bytes of the preamble of a shard, which is named by its number in the batch."""

    shard: int
    content: bytes


class BatchIndexed(Struct, frozen=True):
    """The end of a batch: the indexes of those of its shards that are not left out, as
    `IndexFrames` makes them. `unread_count` shards are left out since they could not be read.
    """

    number: int
    indexes: bytes = b""
    preambles: tuple[BatchPreamble, ...] = ()
    unread_count: int = 0


class ReadPart(Struct, frozen=True):
    """Bytes of a shard of a batch, from that offset on."""

    shard: int
    offset: int
    content: bytes


class BatchParts(Struct, frozen=True):
    """What was read of a batch."""

    number: int
    parts: tuple[ReadPart, ...]


class MissingPart(Struct, frozen=True):
    """Bytes of a shard of a batch that are to be read, too."""

    shard: int
    place: Region


class MissingParts(Struct, frozen=True):
    """What is to be read, too; nothing if the batch is over."""

    number: int
    parts: tuple[MissingPart, ...] = ()


ToReaderBody = StartFetching | IndexBatch | StorePause
ToParserBody = IndexBatch | BatchParts
FromIndexReadersBody = BatchIndexed | StorePause


class ToReader(Struct, frozen=True):
    """The envelope of a node's message to the process that reads."""

    body: ToReaderBody


class ToParser(Struct, frozen=True):
    """The envelope of a message to the process that parses."""

    body: ToParserBody


class FromIndexReaders(Struct, frozen=True):
    """The envelope of a message to the node: of the process that parses, or of the one that
    reads.
    """

    body: FromIndexReadersBody
