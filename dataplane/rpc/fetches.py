"""The messages between a node and its fetchers, which read shards into the node's arenas.

Messages travel over a Unix SOCK_SEQPACKET pair, one message per packet. Many reads are under way at
once; each read ends with exactly one message.
"""

from __future__ import annotations

from dataplane.base.meters import RequestCounts
from dataplane.model.config import PeerTls
from dataplane.model.errors import DataplaneError
from dataplane.model.records import BlockForm, Region, StorePause, Unsigned
from dataplane.rpc.codec import Message
from dataplane.rpc.tasks import AttachArena, DetachArena


class StartFetching(Message, frozen=True):
    """How a fetcher reaches stores. The two arenas are sent with it."""

    environment: tuple[bytes, ...]  # NAME=value
    budget_s: float  # how long to retry a failing read
    request_timeout_s: float
    log_level: str = "info"
    log_format: str = "text"
    store: str = ""  # connect to this store before the first read, "s3://bucket"; "": do not
    is_policed: bool = False  # whether to check urls, and the addresses of http servers
    allowed_urls: tuple[str, ...] = ()  # prefixes of allowed urls; (): every url is allowed
    kept_folder: str = ""  # folder of blocks on disk, whose lock is sent along; "": no folder
    tls: PeerTls | None = None  # for connections with neighbours; absent: plain text


class ReadTarget(Message, frozen=True):
    """More bytes of a shard that are read in the same request, and where they go. Bytes between two
    targets are read too, and dropped.
    """

    offset: Unsigned  # in the shard
    into: Region


class Peer(Message, frozen=True):
    """Another node of a job, and the key for connections between it and this node."""

    address: str  # "host:port" of its data connections
    job_id: str
    generation: Unsigned  # of the job
    key: bytes  # 32 bytes, for this generation of the job
    own_id: str  # of this node
    node_id: str

    def __repr__(self) -> str:
        return f"Peer({self.node_id!r} at {self.address!r})"  # no key


class Neighbour(Message, frozen=True):
    """The node that owns a block, and the bytes of the block to request from that node. If the node
    does not send them, RAW bytes are read from the store, and a read of DECODED bytes ends with
    NeighbourGone.
    """

    peer: Peer
    dataset: bytes  # 16 bytes: digest of the manifest and of the way in which shards are read
    block: Unsigned  # number of the block within the dataset
    offset: Unsigned = 0  # in the block
    form: BlockForm = BlockForm.RAW


class ReadRange(Message, frozen=True):
    """Read bytes of a shard into an arena. With `neighbour`, the bytes are requested from that node
    first; with `more` too, each target is a whole block, and the blocks are consecutive, starting
    with the block of `neighbour`. The fetcher writes only into these regions, and only until it
    reports the end of the read.
    """

    number: Unsigned  # chosen by the node, never reused
    url: str
    offset: Unsigned  # in the shard
    etag: str
    arena_id: Unsigned  # the same ids as in messages to workers
    into: Region  # in that arena; as long as the range
    more: tuple[ReadTarget, ...] = ()  # further targets, in rising order of offsets
    neighbour: Neighbour | None = None

    @property
    def targets(self) -> tuple[ReadTarget, ...]:
        """All targets, in the order of the shard."""
        return (ReadTarget(self.offset, self.into), *self.more)

    @property
    def length(self) -> int:
        """Bytes that are read from the shard, including the bytes between targets."""
        last = self.more[-1] if self.more else ReadTarget(self.offset, self.into)
        return last.offset + last.into.length - self.offset


class ReadKept(Message, frozen=True):
    """Read a block from the node's disk into the block arena. After an error, the content of `into`
    is undefined.
    """

    number: Unsigned
    dataset: bytes  # 16 bytes, as in Neighbour
    block: Unsigned
    into: Region  # as long as the block's pieces, without the shard's preamble

    @property
    def length(self) -> int:
        """Bytes that are read."""
        return self.into.length


class KeptName(Message, frozen=True):
    """A block on disk."""

    dataset: bytes
    block: Unsigned


class WriteKept(Message, frozen=True):
    """Remove blocks from the disk, then write one, unless `source` is empty."""

    number: Unsigned
    dataset: bytes
    block: Unsigned
    source: Region  # in the block arena; the bytes do not change before the write has ended
    instead_of: tuple[KeptName, ...] = ()

    @property
    def length(self) -> int:
        """Bytes that are written."""
        return self.source.length


class ScanKept(Message, frozen=True):
    """List the blocks on disk, and remove files that a crash has left. The list is sent in
    KeptFound messages, before ReadEnded. Nothing is written to the disk before a scan.
    """

    number: Unsigned

    @property
    def length(self) -> int:
        """Always 0: no block is read."""
        return 0


class KeptFound(Message, frozen=True):
    """Some blocks of one dataset that are on disk, and how many bytes each block takes there.
    Datasets are sent in the order of their last use, the most recently used dataset last.
    """

    dataset: bytes
    blocks: tuple[Unsigned, ...]
    disk_bytes: tuple[Unsigned, ...]  # size of each block on disk


class ReadEnded(Message, frozen=True):
    """An order has ended: its memory is no longer read or written. If `ends` is empty and there is
    no error, all bytes were read or written. If `ends` is not empty, it has the neighbour's answer
    for each target (see `ends` in neighbours/wire.py), and only the targets that the neighbour gave
    were read. A maker has sent `neighbour_bytes` of a slab, and a note.
    """

    number: Unsigned
    error: DataplaneError | None = None
    took_s: float = 0.0  # from the start of the read to its end
    cpu_s: float = 0.0  # processor time of the fetcher since its start
    hedged_bytes: Unsigned = 0  # read a second time from the store, because the read was late
    neighbour_bytes: Unsigned = 0  # sent by the neighbour
    disk_bytes: Unsigned = 0  # read from the disk
    store_bytes: Unsigned = 0  # read from the store, without `hedged_bytes`
    ends: tuple[Unsigned, ...] = ()
    note: bytes = b""  # of a slab: an encoded FromNode


class HeldDecoded(Message, frozen=True):
    """The end of a read without bytes: the neighbour has only the decoded block of this length."""

    length: Unsigned


class PartlyGiven(Message, frozen=True):
    """The end of a read of several blocks: only the blocks that the neighbour gave were read."""

    ends: tuple[Unsigned, ...]


class NeighbourGave(Message, frozen=True):
    """The end of a read of all bytes, `length` of which were sent by a neighbour."""

    length: Unsigned


Outcome = DataplaneError | HeldDecoded | PartlyGiven | NeighbourGave | None
"""How an order has ended; None: all bytes are there, and no byte was sent by a neighbour."""


class StoreSeen(Message, frozen=True):
    """An outage of a store, as a fetcher sees it."""

    store: str  # url of the store, without secrets
    since: float  # start of the outage, in seconds since 1970, like the other times
    error: str
    asked: float  # time of the last failed request
    until: float = 0.0  # end of the outage; 0 while the store does not answer


class StoreCounted(Message, frozen=True):
    """Requests of this fetcher to a store since its previous StoreCounted."""

    store: str  # url of the store, without secrets
    counts: RequestCounts


class ShardTrouble(Message, frozen=True):
    """The error that delays reads of a shard."""

    url: str
    error: DataplaneError | None = None  # absent: the reads are no longer delayed


class ShardPlace(Message, frozen=True):
    """A range of a listed shard."""

    url: str
    etag: str
    place: Region


class ReadParts(Message, frozen=True):
    """Read ranges of shards that are being indexed, and send the bytes."""

    number: Unsigned  # chosen by the node, never reused
    places: tuple[ShardPlace, ...]


class PartsRead(Message, frozen=True):
    """The bytes of each range; None if the range could not be read within the budget."""

    number: Unsigned
    contents: tuple[bytes | None, ...]


class ReadSlab(Message, frozen=True):
    """Have a maker make a slab, and read the slab into an arena."""

    number: Unsigned  # chosen by the node, never reused
    maker: Peer
    request: bytes  # an encoded MakeSlab
    arena_id: Unsigned  # an arena of AttachArena
    into: Region  # the room for the slab

    @property
    def length(self) -> int:
        """The bytes of the room for the slab."""
        return self.into.length


class EndSlab(Message, frozen=True):
    """End a ReadSlab whose maker does not answer: the slab will be made elsewhere."""

    number: Unsigned


DiskBody = ReadKept | WriteKept | ScanKept
ReadBody = ReadRange | DiskBody
ToFetcherBody = (
    StartFetching | ReadBody | StorePause | ReadSlab | EndSlab | AttachArena | DetachArena
    | ReadParts
)  # fmt: skip
FromFetcherBody = (
    ReadEnded | StorePause | StoreSeen | StoreCounted | ShardTrouble | KeptFound
    | PartsRead
)  # fmt: skip


class ToFetcher(Message, frozen=True):
    """The envelope of a node's message to a fetcher."""

    body: ToFetcherBody


class FromFetcher(Message, frozen=True):
    """The envelope of a fetcher's message."""

    body: FromFetcherBody


# -- limits on which node and fetcher agree --------------------------------------------------------

READS_MAX = 64
"""Reads that one fetcher has under way at once: each has a thread."""
SLABS_MAX = 64
"""Slabs that one fetcher waits for or receives at once: each has a thread, apart from those of
reads."""
