"""The messages between a node and its fetchers, which read shards into the node's arenas.

Over a Unix SOCK_SEQPACKET pair, one message per packet. Many reads are under way at once; each has
one end.
"""

from __future__ import annotations

from dataplane.base.meters import RequestCounts
from dataplane.model.config import PeerTls
from dataplane.model.errors import DataplaneError
from dataplane.model.records import BlockForm, Region, StorePause, Unsigned
from dataplane.rpc.codec import Message


class StartFetching(Message, frozen=True):
    """How a fetcher reaches stores. The two arenas are sent with it."""

    environment: tuple[bytes, ...]  # NAME=value
    budget_s: float  # after which a read that always fails is given up
    request_timeout_s: float
    log_level: str = "info"
    log_format: str = "text"
    store: str = ""  # reads will follow: connect to it meanwhile, "s3://bucket"
    is_policed: bool = False  # check urls, and the addresses that http servers have
    allowed_urls: tuple[str, ...] = ()  # prefixes; none: every url
    kept_folder: str = ""  # of blocks on disk; a lock on it is sent, too. "": none
    tls: PeerTls | None = None  # of connections with neighbours; none: plain text


class ReadTarget(Message, frozen=True):
    """More bytes of a shard that are read in one request, and where they go. What lies between them
    and the bytes before is read too, and dropped.
    """

    offset: Unsigned  # in the shard
    into: Region


class Neighbour(Message, frozen=True):
    """The node that owns a block, and which of the block's bytes it is asked for. If it does not
    send them, the store is read for RAW; DECODED ends with NeighbourGone.
    """

    address: str  # "host:port" of its data connections
    job_id: str
    generation: Unsigned  # of the job
    key: bytes  # 32 bytes, for this generation of the job
    own_id: str  # of this node
    node_id: str  # of the neighbour
    dataset: bytes  # 16 bytes: digest of the manifest and of how it is read
    block: Unsigned  # its number in the dataset
    offset: Unsigned  # in the block
    form: BlockForm = BlockForm.RAW

    def __repr__(self) -> str:
        return f"Neighbour({self.node_id!r} at {self.address!r}, block={self.block})"  # no key


class ReadRange(Message, frozen=True):
    """Read bytes of a shard into an arena. With `neighbour`, that node is asked first: if there is
    something in `more`, for whole blocks, one for each target, from its block on. The fetcher
    writes into these regions alone, and until it reports the end of the read.
    """

    number: Unsigned  # chosen by the node, never reused
    url: str
    offset: Unsigned  # in the shard
    etag: str
    arena_id: Unsigned  # as for workers
    into: Region  # in that arena; as long as the range
    more: tuple[ReadTarget, ...] = ()  # what follows; each lies behind the one before in the shard
    neighbour: Neighbour | None = None

    @property
    def targets(self) -> tuple[ReadTarget, ...]:
        """All that is read, in the order of the shard."""
        return (ReadTarget(self.offset, self.into), *self.more)

    @property
    def length(self) -> int:
        """Bytes that are read of the shard, with those between the targets."""
        last = self.more[-1] if self.more else ReadTarget(self.offset, self.into)
        return last.offset + last.into.length - self.offset


class ReadKept(Message, frozen=True):
    """Read a block from the node's disk into the block arena. After an error, nothing counts that
    was written there.
    """

    number: Unsigned
    dataset: bytes  # 16 bytes, as in Neighbour
    block: Unsigned
    into: Region  # as long as its pieces, without the shard's preamble

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
    source: Region  # in the block arena; it stays as it is until the end
    instead_of: tuple[KeptName, ...] = ()

    @property
    def length(self) -> int:
        """Bytes that are written."""
        return self.source.length


class ScanKept(Message, frozen=True):
    """List the blocks on disk, in KeptFound messages before its end, and remove what a crash has
    left. Nothing is written to the disk before.
    """

    number: Unsigned

    @property
    def length(self) -> int:
        """Always 0: no block is read."""
        return 0


class KeptFound(Message, frozen=True):
    """Some blocks of one dataset that are on disk, and how many bytes each takes there. Datasets
    are sent in the order of their last use, the most recently used one last.
    """

    dataset: bytes
    blocks: tuple[Unsigned, ...]
    disk_bytes: tuple[Unsigned, ...]  # what each of them takes


class ReadEnded(Message, frozen=True):
    """An order has ended: its memory is no longer read or written. If `ends` is not empty, it
    has the neighbour's answer for each target (as for a run of blocks, see neighbours/wire.py),
    and nothing else was read. If it is empty and there is no error, all bytes are there.
    """

    number: Unsigned
    error: DataplaneError | None = None  # absent: all bytes are there
    took_s: float = 0.0  # from the start of the read to its end
    cpu_s: float = 0.0  # processor time of the fetcher since its start
    hedged_bytes: Unsigned = 0  # read from the store besides, because the read was late
    neighbour_bytes: Unsigned = 0  # sent by the neighbour
    disk_bytes: Unsigned = 0  # read from the disk
    store_bytes: Unsigned = 0  # read from the store, but those of `hedged_bytes`
    ends: tuple[Unsigned, ...] = ()


class HeldDecoded(Message, frozen=True):
    """The end of a read that has read nothing: the neighbour has only the decoded block."""

    length: Unsigned


class PartlyGiven(Message, frozen=True):
    """The end of a read of several blocks that has read those that the neighbour gave."""

    ends: tuple[Unsigned, ...]


class NeighbourGave(Message, frozen=True):
    """The end of a read: all bytes are there, and so many of them are from a neighbour."""

    length: Unsigned


Outcome = DataplaneError | HeldDecoded | PartlyGiven | NeighbourGave | None
"""How an order has ended; None: all bytes are there, and none of them are from a neighbour."""


class StoreSeen(Message, frozen=True):
    """An outage of a store, as a fetcher sees it."""

    store: str  # its url, without secrets
    since: float  # seconds since 1970, as the other times
    error: str
    asked: float  # the last request that failed
    until: float = 0.0  # 0 while it does not answer


class StoreCounted(Message, frozen=True):
    """Requests of this fetcher to a store since its last such message."""

    store: str  # its url, without secrets
    counts: RequestCounts


class ShardTrouble(Message, frozen=True):
    """Why reads of a shard are delayed; no error if they no longer are."""

    url: str
    error: DataplaneError | None = None  # absent: they no longer are


class ShardPlace(Message, frozen=True):
    """A range of a shard, as it was listed."""

    url: str
    etag: str
    place: Region


class ReadParts(Message, frozen=True):
    """Read ranges of shards, which are being indexed, and send the bytes."""

    number: Unsigned  # chosen by the node, never reused
    places: tuple[ShardPlace, ...]


class PartsRead(Message, frozen=True):
    """The bytes of each range; absent if it could not be read within the budget."""

    number: Unsigned
    contents: tuple[bytes | None, ...]


class SlabMaker(Message, frozen=True):
    """A node that makes slabs for this one, and the key with which the two know each other."""

    address: str  # "host:port" of its data connections
    job_id: str
    generation: Unsigned  # of the job
    key: bytes  # 32 bytes, for this generation of the job
    own_id: str  # of this node
    node_id: str  # of the maker

    def __repr__(self) -> str:
        return f"SlabMaker({self.node_id!r} at {self.address!r})"  # no key


class ReadSlab(Message, frozen=True):
    """Have a maker make a slab, and read it into an arena; `request` and `request_opening` are
    encoded MakeSlabs. If it is late, `hedge` is asked too, and the first whole answer counts.
    """

    number: Unsigned  # chosen by the node, never reused
    maker: SlabMaker
    hedge: SlabMaker | None  # absent: there is no other
    request: bytes  # an encoded MakeSlab, without `opening`
    request_opening: bytes  # the same with `opening`
    arena_id: Unsigned  # that was attached before
    into: Region  # the room for the slab


class EndSlab(Message, frozen=True):
    """End a ReadSlab: its makers are silent, and others make the slab."""

    number: Unsigned


class SlabRead(Message, frozen=True):
    """The end of a ReadSlab: its memory is no longer written. The maker of this name has sent
    `length` bytes, and an encoded Assembled as a note.
    """

    number: Unsigned
    error: DataplaneError | None = None  # NeighbourGone: no maker sent it
    note: bytes = b""  # an encoded Assembled
    length: Unsigned = 0  # of the slab
    took_s: float = 0.0
    node_id: str = ""  # of the maker that sent it
    cpu_s: float = 0.0  # processor time of the fetcher since its start


class AttachDelivery(Message, frozen=True):
    """Slabs will be read into this delivery arena; its descriptor is sent along."""

    arena_id: Unsigned


class DetachDelivery(Message, frozen=True):
    """No more slabs will."""

    arena_id: Unsigned


DiskBody = ReadKept | WriteKept | ScanKept
ReadBody = ReadRange | DiskBody
ToFetcherBody = (
    StartFetching | ReadBody | StorePause | ReadSlab | EndSlab | AttachDelivery | DetachDelivery
    | ReadParts
)  # fmt: skip
FromFetcherBody = (
    ReadEnded | StorePause | StoreSeen | StoreCounted | ShardTrouble | SlabRead | KeptFound
    | PartsRead
)  # fmt: skip


class ToFetcher(Message, frozen=True):
    """The envelope of a node's message to a fetcher."""

    body: ToFetcherBody


class FromFetcher(Message, frozen=True):
    """The envelope of a fetcher's message."""

    body: FromFetcherBody
