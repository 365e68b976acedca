"""The messages between a node and the processes that index many shards for it, in batches.

One of them reads, with the credentials of the node, and the other one parses what was read. They
use Unix SOCK_SEQPACKET pairs, one message per packet.
"""

from __future__ import annotations

from dataplane.model.records import Region, StorePause, Unsigned
from dataplane.rpc.codec import Message
from dataplane.rpc.fetches import StartFetching


class BatchShard(Message, frozen=True):
    """A shard of a batch, as it was listed."""

    url: str
    size_bytes: Unsigned
    etag: str


class IndexBatch(Message, frozen=True):
    """Index these shards of one format; the node wants their preambles, too, or not."""

    number: Unsigned  # chosen by the node, never reused
    format: str
    shards: tuple[BatchShard, ...]
    with_preambles: bool = False  # the node wants them, too


class BatchPreamble(Message, frozen=True):
    """The bytes of the preamble of a shard, which is named by its number in the batch."""

    shard: Unsigned  # its number in the batch
    content: bytes


class BatchIndexed(Message, frozen=True):
    """The end of a batch: the indexes of those of its shards that are not left out, as
    `IndexFrames` makes them. `unread_count` shards are left out since they could not be read. The
    node indexes those that are left out one by one, and finds out why.
    """

    number: Unsigned
    indexes: bytes = b""  # as in the node's index journal, each under its number in the batch
    preambles: tuple[BatchPreamble, ...] = ()
    unread_count: Unsigned = 0


class ReadPart(Message, frozen=True):
    """Bytes of a shard of a batch, from that offset on."""

    shard: Unsigned  # its number in the batch
    offset: Unsigned  # in the shard
    content: bytes


class BatchParts(Message, frozen=True):
    """The bytes that were read of a batch: first those that its format names as its first reads,
    then those that the parser has asked for. Bytes that could not be read are left out.
    """

    number: Unsigned
    parts: tuple[ReadPart, ...]


class MissingPart(Message, frozen=True):
    """Bytes of a shard of a batch that are to be read, too."""

    shard: Unsigned  # its number in the batch
    place: Region  # in the shard


class MissingParts(Message, frozen=True):
    """The parts that must be read, too; none if the batch is over."""

    number: Unsigned
    parts: tuple[MissingPart, ...] = ()


ToReaderBody = StartFetching | IndexBatch | StorePause
ToParserBody = IndexBatch | BatchParts
FromIndexReadersBody = BatchIndexed | StorePause


class ToReader(Message, frozen=True):
    """The envelope of a node's message to the process that reads."""

    body: ToReaderBody


class ToParser(Message, frozen=True):
    """The envelope of a message to the process that parses."""

    body: ToParserBody


class FromIndexReaders(Message, frozen=True):
    """The envelope of a message to the node: of the process that parses, or of the one that
    reads.
    """

    body: FromIndexReadersBody
