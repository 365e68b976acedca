"""The messages between a node and its fetchers.

Frozen values, used outside this package instead of protobuf classes. Names and fields equal those
of proto/dataplane/rpc/v1/fetcher.proto, whose comments are the specification; a test compares the
two.
"""

from __future__ import annotations

from msgspec import Struct

from dataplane.config import PeerTls
from dataplane.errors import DataplaneError
from dataplane.model import BlockForm, Region, StorePause


class StartFetching(Struct, frozen=True):
    """How a fetcher reaches stores. The two arenas are sent with it."""

    environment: tuple[bytes, ...]
    budget_s: float
    request_timeout_s: float
    log_level: str = "info"
    log_format: str = "text"
    store: str = ""
    is_policed: bool = False
    allowed_urls: tuple[str, ...] = ()
    kept_folder: str = ""
    tls: PeerTls | None = None


class ReadTarget(Struct, frozen=True):
    """More bytes of a shard that are read in one request, and where they go."""

    offset: int
    into: Region


class Neighbour(Struct, frozen=True):
    """The node that owns a block, and which of the block's bytes it is asked for."""

    address: str
    job_id: str
    generation: int
    key: bytes
    own_id: str
    node_id: str
    dataset: bytes
    block: int
    offset: int
    form: BlockForm = BlockForm.RAW

    def __repr__(self) -> str:
        return f"Neighbour({self.node_id!r} at {self.address!r}, block={self.block})"  # no key


class ReadRange(Struct, frozen=True):
    """Read bytes of a shard into an arena. With `neighbour`, that node is asked first: if there is
    something in `more`, for whole blocks, one for each target, from its block on.
    """

    number: int
    url: str
    offset: int
    etag: str
    arena_id: int
    into: Region
    more: tuple[ReadTarget, ...] = ()
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


class CopyPreamble(Struct, frozen=True):
    """Copy a preamble into the block arena."""

    number: int
    kept: Region
    into: Region

    @property
    def length(self) -> int:
        """Bytes that are copied."""
        return self.into.length


class ReadKept(Struct, frozen=True):
    """Read a block from the node's disk into the block arena."""

    number: int
    dataset: bytes
    block: int
    into: Region

    @property
    def length(self) -> int:
        """Bytes that are read."""
        return self.into.length


class KeptName(Struct, frozen=True):
    """A block on disk."""

    dataset: bytes
    block: int


class WriteKept(Struct, frozen=True):
    """Remove blocks from the disk, then write one, unless `source` is empty."""

    number: int
    dataset: bytes
    block: int
    source: Region
    instead_of: tuple[KeptName, ...] = ()

    @property
    def length(self) -> int:
        """Bytes that are written."""
        return self.source.length


class ScanKept(Struct, frozen=True):
    """List the blocks on disk."""

    number: int

    @property
    def length(self) -> int:
        """It reads no block."""
        return 0


class KeptFound(Struct, frozen=True):
    """Some blocks of one dataset that are on disk, and what they take there."""

    dataset: bytes
    blocks: tuple[int, ...]
    disk_bytes: tuple[int, ...]


class ReadEnded(Struct, frozen=True):
    """An order has ended: its memory is no longer read or written. `ends`, if there are any, say
    what the neighbour has answered for each target, as the note about a run in neighbours/wire.py,
    and nothing else was read. Without, all bytes are there, unless there is an error.
    """

    number: int
    error: DataplaneError | None = None
    took_s: float = 0.0
    cpu_s: float = 0.0
    hedged_bytes: int = 0
    neighbour_bytes: int = 0
    disk_bytes: int = 0
    store_bytes: int = 0
    ends: tuple[int, ...] = ()


class HeldDecoded(Struct, frozen=True):
    """The end of a read that has read nothing: the neighbour has only the decoded block."""

    length: int


class PartlyGiven(Struct, frozen=True):
    """The end of a read of several blocks that has read those that the neighbour gave."""

    ends: tuple[int, ...]


class NeighbourGave(Struct, frozen=True):
    """The end of a read: all bytes are there, and so many of them are from a neighbour."""

    length: int


Outcome = DataplaneError | HeldDecoded | PartlyGiven | NeighbourGave | None
"""How an order has ended; None: all bytes are there, and none of them are from a neighbour."""


class StoreSeen(Struct, frozen=True):
    """An outage of a store, as a fetcher sees it."""

    store: str
    since: float
    error: str
    asked: float
    until: float = 0.0


class ShardTrouble(Struct, frozen=True):
    """Why reads of a shard are delayed; no error if they no longer are."""

    url: str
    error: DataplaneError | None = None


class SlabMaker(Struct, frozen=True):
    """A node that makes slabs for this one, and the key with which the two know each other."""

    address: str
    job_id: str
    generation: int
    key: bytes
    own_id: str
    node_id: str

    def __repr__(self) -> str:
        return f"SlabMaker({self.node_id!r} at {self.address!r})"  # no key


class ReadSlab(Struct, frozen=True):
    """Have a maker make a slab, and read it into an arena; `request` and `request_opening` are
    encoded MakeSlabs. If it is late, `hedge` is asked too.
    """

    number: int
    maker: SlabMaker
    hedge: SlabMaker | None
    request: bytes
    request_opening: bytes
    arena_id: int
    into: Region


class EndSlab(Struct, frozen=True):
    """End a ReadSlab: its makers are silent, and others make the slab."""

    number: int


class SlabRead(Struct, frozen=True):
    """The end of a ReadSlab: its memory is no longer written. The maker of this name has sent
    `length` bytes, and an encoded Assembled as a note.
    """

    number: int
    error: DataplaneError | None = None
    note: bytes = b""
    length: int = 0
    took_s: float = 0.0
    node_id: str = ""
    cpu_s: float = 0.0


class AttachDelivery(Struct, frozen=True):
    """Slabs will be read into this delivery arena; its descriptor is sent along."""

    arena_id: int


class DetachDelivery(Struct, frozen=True):
    """No more slabs will."""

    arena_id: int


DiskBody = ReadKept | WriteKept | ScanKept
ReadBody = ReadRange | CopyPreamble | DiskBody
ToFetcherBody = (
    StartFetching | ReadBody | StorePause | ReadSlab | EndSlab | AttachDelivery | DetachDelivery
)  # fmt: skip
FromFetcherBody = ReadEnded | StorePause | StoreSeen | ShardTrouble | SlabRead | KeptFound


class ToFetcher(Struct, frozen=True):
    """The envelope of a node's message to a fetcher."""

    body: ToFetcherBody


class FromFetcher(Struct, frozen=True):
    """The envelope of a fetcher's message."""

    body: FromFetcherBody
