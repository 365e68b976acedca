"""The tasks that a node gives to its workers, and their answers.

Frozen values, used outside this package instead of protobuf classes. Names and fields equal those
of proto/dataplane/rpc/v1/worker.proto, whose comments are the specification; a test compares the
two. Repeated fields are tuples, an absent optional is None.
"""

from __future__ import annotations

from msgspec import Struct, field

from dataplane.changes import ReplacedRow, TakenDocument
from dataplane.errors import DataplaneError
from dataplane.model import ColumnOptions, ColumnSpec, ImageSpec, Region, View
from dataplane.rpc.messages import Batch

BLOCK_ARENA, PREAMBLE_ARENA = 0, (1 << 64) - 2
"""The ids of arenas that do not belong to a rank."""


class Done(Struct, frozen=True):
    """The task is done."""


class Reading(Struct, frozen=True):
    """The block or image that a worker is about to read, or the step for whose batch it is about to
    call a function of the user.
    """

    block_key: int
    row: int | None = None
    column: str | None = None
    step: int | None = None


class OutOfMemory(Struct, frozen=True):
    """The task needs more memory than the worker may have."""


class AttachArena(Struct, frozen=True):
    """Map the arena whose descriptor is sent with this message."""

    arena_id: int


class DetachArena(Struct, frozen=True):
    """Unmap an arena."""

    arena_id: int


class OpenDataset(Struct, frozen=True):
    """How the blocks of a dataset become the columns of batches."""

    dataset_id: int
    format: str
    schema: bytes
    more: bool = False
    pack: bool = False
    column_options: ColumnOptions = field(default_factory=ColumnOptions)
    memory_bytes: int = 0
    view: View = field(default_factory=View)
    finds_columns: bool = False
    seed: int = 0


class RawBlockRef(Struct, frozen=True):
    """The bytes of one block: in the block arena (preamble, then body), or in a local file. If only
    some of them are needed, `pieces` lists these. A preamble in the arena of preambles has a
    number; its room in the block arena is then empty. Of a view that has only some of the block's
    rows, `rows` is their number and `stored_rows` that of all, from `first_row` of the shard on;
    `shard_word` stands for the shard in the keys of its rows, and `shard` is its number.
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
    stored_rows: int = 0
    first_row: int = 0
    shard_word: int = 0
    shard: int = 0


class Decode(Struct, frozen=True):
    """Decode a block into the block arena."""

    dataset_id: int
    raw: RawBlockRef
    into: Region


class Decoded(Struct, frozen=True):
    """The decoded block's size, and whether it fitted."""

    bytes: int
    stored: bool
    disk: int = 0


class Origin(Struct, frozen=True):
    """Which samples a block has; `of_view`: rows are counted among those of a view. `pack_count` is
    how many packs its documents made when they were counted, 0 without packs; with packs,
    `first_row` is counted among all rows of the shard, and of a view only those behind it are not.
    """

    url: str
    shard: int
    first_row: int
    of_view: bool = False
    pack_count: int = 0


class BlockSource(Struct, frozen=True):
    """A block to gather from."""

    key: int
    raw: RawBlockRef | None = None
    decoded: Region | None = None
    origin: Origin | None = None
    restart_indexes: Region | None = None
    row_count: int = 0


class OpenBlocks(Struct, frozen=True):
    """Blocks that later Assemble tasks name by key, and blocks to forget."""

    dataset_id: int
    blocks: tuple[BlockSource, ...] = ()
    forget: tuple[int, ...] = ()


class Render(Struct, frozen=True):
    """The image columns of a slab, and the inputs of their random numbers."""

    images: tuple[ImageSpec, ...]
    seed: int
    epoch: int

    @property
    def replaces(self) -> bool:
        """Whether other rows take the places of those whose images cannot be decoded."""
        return any(image.replaces for image in self.images)


class Collation(Struct, frozen=True):
    """A function of the user makes each batch of what was gathered for it: arrays with these
    `columns`, by a function of this `code`. Without any, one column of text says of the first
    batch what it returns, and the code.
    """

    function: str
    seed: int
    epoch: int
    cursor: int
    global_batch: int
    dp_rank: int
    source_column: str = ""
    columns: tuple[ColumnSpec, ...] = ()
    code: str = ""


class Assemble(Struct, frozen=True):
    """Gather the rows of some batches into a slab; `keep` is a second place for it, in the block
    arena. Rows may be packs: `pack_keys` are those of their blocks, `pack_key_counts` of each; none
    if packs are not shuffled. They are without the documents `taken_out` of their blocks,
    `taken_out_counts` of each; none if no document was taken out. Rows that were taken out of a
    job do not stand for those whose images cannot be decoded. If it `names_sources`, the last
    column has the source of each row, int32: that of its block, of which `sources` has one for each
    block. A slab without rows has no blocks, but this column, too. If there is a `row_count`, only
    so many rows from `first_row` on are written, and other tasks write the others.
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
    pack_keys: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    pack_key_counts: tuple[int, ...] = ()
    collate: Collation | None = None
    taken_out: tuple[TakenDocument, ...] = ()
    taken_out_counts: tuple[int, ...] = ()
    names_sources: bool = False
    first_row: int = 0
    row_count: int = 0

    @property
    def part(self) -> slice:
        """The rows of the slab that this task writes."""
        return slice(self.first_row, self.first_row + self.row_count if self.row_count else None)


class ExcerptPlace(Struct, frozen=True):
    """Where some rows of a block go: their numbers, which are there already, and the rows."""

    into: Region
    row_count: int
    pack_keys: tuple[int, ...] = ()
    taken_out: tuple[TakenDocument, ...] = ()


class Extract(Struct, frozen=True):
    """Copy rows of a block into excerpts."""

    dataset_id: int
    block_key: int
    places: tuple[ExcerptPlace, ...]


class Extracted(Struct, frozen=True):
    """The size of each excerpt; one that is larger than its place was not written."""

    bytes: tuple[int, ...]
    disk: int = 0


class CopySlab(Struct, frozen=True):
    """Copy a kept slab into a slot; `keep`: copy what is in the slot to where it is kept."""

    kept: Region
    arena_id: int
    slab: Region
    keep: bool = False


class Assembled(Struct, frozen=True):
    """How many of the batches fitted, and where their columns lie: an encoded Layout. `replaced`
    are rows of the task that have others in their places.
    """

    batch_count: int
    bytes_needed: int = 0
    bytes_used: int = 0
    layout: bytes = b""
    disk: int = 0
    replaced: tuple[ReplacedRow, ...] = ()


TaskBody = (
    AttachArena | DetachArena | OpenDataset | Decode | OpenBlocks | Extract | Assemble | CopySlab
)  # fmt: skip
ResultBody = DataplaneError | Done | Decoded | Extracted | Assembled | Reading | OutOfMemory


class Task(Struct, frozen=True):
    """The envelope of a node's message to a worker."""

    body: TaskBody


class Result(Struct, frozen=True):
    """The envelope of a worker's answer."""

    body: ResultBody


class ShardPart(Struct, frozen=True):
    """Bytes of a shard, from that offset on."""

    offset: int
    content: bytes


class IndexShard(Struct, frozen=True):
    """Index one shard. If it `is_local`, it is a file that the process reads itself. `parts` were
    read already, since it will ask for them first.
    """

    format: str
    url: str
    size_bytes: int
    etag: str
    is_local: bool = False
    parts: tuple[ShardPart, ...] = ()


class CountRows(Struct, frozen=True):
    """Count the rows of each of these blocks of one shard that a view has. `schema` is that of the
    dataset. If it `is_local`, the shard is a file that the process reads itself. `parts` were read
    already.
    """

    format: str
    url: str
    size_bytes: int
    etag: str
    schema: bytes
    view: View
    blocks: tuple[RawBlockRef, ...]
    is_local: bool = False
    parts: tuple[ShardPart, ...] = ()


class ShardBytes(Struct, frozen=True):
    """The bytes that an indexing process has requested."""

    request: int
    content: bytes = b""
    is_end: bool = False
    has_failed: bool = False


class ReadShard(Struct, frozen=True):
    """Requests bytes of a shard, or the next piece of the whole shard."""

    request: int
    place: Region | None = None


class StillReading(Struct, frozen=True):
    """Sent by a process that reads a local file, to show that it is not stuck."""


class ShardIndexed(Struct, frozen=True):
    """The result of indexing or counting, or a part of it."""

    index: bytes
    more: bool = False


ToIndexerBody = IndexShard | CountRows | ShardBytes
FromIndexerBody = DataplaneError | OutOfMemory | ReadShard | StillReading | ShardIndexed


class ToIndexer(Struct, frozen=True):
    """The envelope of a node's message to an indexing process."""

    task: int
    body: ToIndexerBody


class FromIndexer(Struct, frozen=True):
    """The envelope of an indexing process's message."""

    task: int
    body: FromIndexerBody


class StartChild(Struct, frozen=True):
    """Fork a process of this role, such as "worker", with this limit of private memory, bound to
    these processors if any are given.
    """

    number: int
    role: str
    memory_bytes: int
    processors: tuple[int, ...] = ()


class KillChild(Struct, frozen=True):
    """SIGKILL for the process of that number, if it lives."""

    number: int


class ChildStarted(Struct, frozen=True):
    """The process of that number has this process id."""

    number: int
    pid: int


class ChildEnded(Struct, frozen=True):
    """The process of that number is gone; a negative `status` is the signal that ended it."""

    number: int
    status: int


ToForkServerBody = StartChild | KillChild
FromForkServerBody = ChildStarted | ChildEnded


class ToForkServer(Struct, frozen=True):
    """The envelope of a node's messages to its fork server."""

    body: ToForkServerBody


class FromForkServer(Struct, frozen=True):
    """The envelope of the fork server's messages."""

    body: FromForkServerBody
