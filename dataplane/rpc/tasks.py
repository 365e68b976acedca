"""What a node orders from its workers, and their answers.

Frozen values, what leaves this room in place of protobuf. Names and fields equal those of
proto/dataplane/rpc/v1/worker.proto, whose comments are the specification; a test holds the two
against each other. Repeated fields are tuples, an absent optional is None.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dataplane.errors import DataplaneError
from dataplane.model import ColumnOptions, ImageSpec, Region
from dataplane.rpc.messages import Batch

BLOCK_ARENA, PREAMBLE_ARENA = 0, (1 << 64) - 2
"""The ids of arenas that are not of a rank."""


@dataclass(frozen=True, slots=True)
class Done:
    """It is done."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a worker is about to read."""

    block_key: int
    row: int | None = None
    column: str | None = None


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The task needs more memory than the worker may have."""


@dataclass(frozen=True, slots=True)
class AttachArena:
    """Map the arena whose descriptor comes along."""

    arena_id: int


@dataclass(frozen=True, slots=True)
class DetachArena:
    """Unmap an arena."""

    arena_id: int


@dataclass(frozen=True, slots=True)
class OpenDataset:
    """How the blocks of a dataset become the columns of batches."""

    dataset_id: int
    format: str
    schema: bytes
    more: bool = False
    pack: bool = False
    column_options: ColumnOptions = field(default_factory=ColumnOptions)
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RawBlockRef:
    """The bytes of one block: in the block arena (preamble, then body), or in a local file. Where
    not all of them are needed, `pieces` are what is. A preamble that lies in the arena of preambles
    has a number, and nothing is where it would be in the block arena.
    """

    url: str
    index: int
    rows: int
    place: Region
    preamble_place: Region
    shard_bytes: int
    etag: str = ""
    arena: Region | None = None
    path: str | None = None
    pieces: tuple[Region, ...] = ()
    kept_preamble: Region | None = None
    preamble_number: int = 0


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode a block into the block arena."""

    dataset_id: int
    raw: RawBlockRef
    into: Region


@dataclass(frozen=True, slots=True)
class Decoded:
    """The decoded block's size, and whether it fitted."""

    bytes: int
    stored: bool
    disk: int = 0


@dataclass(frozen=True, slots=True)
class Origin:
    """Which samples a block has."""

    url: str
    shard: int
    first_row: int


@dataclass(frozen=True, slots=True)
class BlockSource:
    """A block to gather from."""

    key: int
    raw: RawBlockRef | None = None
    decoded: Region | None = None
    origin: Origin | None = None
    trails: Region | None = None


@dataclass(frozen=True, slots=True)
class OpenBlocks:
    """Blocks that later Assembles name by key, and those to forget."""

    dataset_id: int
    blocks: tuple[BlockSource, ...] = ()
    forget: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Render:
    """Which columns of a slab are images, and what their random numbers depend on."""

    images: tuple[ImageSpec, ...]
    seed: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Assemble:
    """Gather the rows of some batches into a slab; `keep` is a second place for it, in the block
    arena.
    """

    dataset_id: int
    block_keys: tuple[int, ...]
    row_index: Region
    batches: tuple[Batch, ...]
    arena_id: int
    slab: Region
    render: Render | None = None
    keep: Region | None = None
    say_where: bool = False


@dataclass(frozen=True, slots=True)
class CopySlab:
    """Fill a slab with one that was kept."""

    kept: Region
    arena_id: int
    slab: Region


@dataclass(frozen=True, slots=True)
class Assembled:
    """How many of the batches fitted, and where their columns lie: an encoded Layout."""

    batch_count: int
    bytes_needed: int = 0
    bytes_used: int = 0
    layout: bytes = b""
    disk: int = 0


TaskBody = AttachArena | DetachArena | OpenDataset | Decode | OpenBlocks | Assemble | CopySlab
ResultBody = DataplaneError | Done | Decoded | Assembled | Reading | OutOfMemory


@dataclass(frozen=True, slots=True)
class Task:
    """The envelope of a node's order to a worker."""

    body: TaskBody


@dataclass(frozen=True, slots=True)
class Result:
    """The envelope of a worker's answer."""

    body: ResultBody


@dataclass(frozen=True, slots=True)
class IndexShard:
    """Index one shard, which is a file that the process may read if it `is_local`."""

    format: str
    url: str
    size_bytes: int
    etag: str
    is_local: bool = False


@dataclass(frozen=True, slots=True)
class ShardBytes:
    """What a process that indexes has asked for."""

    request: int
    content: bytes = b""
    is_end: bool = False
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class ReadShard:
    """Asks for bytes of a shard, or for the next piece of all of it."""

    request: int
    place: Region | None = None


@dataclass(frozen=True, slots=True)
class StillReading:
    """A process that reads a file by itself is not stuck."""


@dataclass(frozen=True, slots=True)
class ShardIndexed:
    """What indexing gave, or a part of that."""

    index: bytes
    more: bool = False


ToIndexerBody = IndexShard | ShardBytes
FromIndexerBody = DataplaneError | OutOfMemory | ReadShard | StillReading | ShardIndexed


@dataclass(frozen=True, slots=True)
class ToIndexer:
    """The envelope of what a node says to a process that indexes."""

    task: int
    body: ToIndexerBody


@dataclass(frozen=True, slots=True)
class FromIndexer:
    """The envelope of what such a process says."""

    task: int
    body: FromIndexerBody
