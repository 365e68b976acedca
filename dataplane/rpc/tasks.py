"""The tasks that a node gives to its workers, and their answers; likewise for other children.

Over Unix SOCK_SEQPACKET pairs, one message per packet. A worker has one task at a time, and every
task has one result; arenas are sent as file descriptors. Only a worker that indexes has several
tasks at once, each with a number chosen by the node. It has no credentials: it requests bytes from
the node.
"""

from __future__ import annotations

from msgspec import field

from dataplane.model.changes import ReplacedRow, TakenDocument
from dataplane.model.records import ColumnOptions, ColumnSpec, ImageSpec, Region, Unsigned, View
from dataplane.rpc.codec import Envelope, Failure, Message
from dataplane.rpc.messages import Batch

BLOCK_ARENA, PREAMBLE_ARENA = 0, (1 << 64) - 2
"""The ids of arenas that do not belong to a rank."""


class Done(Message, frozen=True):
    """The task is done."""


class Reading(Message, frozen=True):
    """The block or image that a worker is about to read, or the step for whose batch it is about to
    call a function of the user. Sent during a task with `say_where`.
    """

    block_key: Unsigned
    row: Unsigned | None = None  # of the block
    column: str | None = None
    step: Unsigned | None = None  # of the epoch


class OutOfMemory(Message, frozen=True):
    """The task needs more memory than the worker may have, which may be unusable from then on."""


class AttachArena(Message, frozen=True):
    """Map the arena whose descriptor is sent with this message."""

    arena_id: Unsigned  # 0 is the block arena


class DetachArena(Message, frozen=True):
    """Unmap an arena."""

    arena_id: Unsigned


class OpenDataset(Message, frozen=True):
    """How the blocks of a dataset become the columns of batches."""

    dataset_id: Unsigned
    format: str
    # Arrow IPC schema of the shards. A large one is split over several messages, so that it does
    # not block an event loop.
    schema: bytes
    more: bool = False  # the schema continues in the next message
    pack: bool = False  # small columns lie side by side in decoded blocks
    column_options: ColumnOptions = field(default_factory=ColumnOptions)
    memory_bytes: Unsigned = 0  # limit on the worker's private memory, if larger than before
    view: View = field(default_factory=View)  # its collate belongs to slabs, and is not set
    finds_columns: bool = False  # each block is one column, which says what view.map makes of it
    seed: Unsigned = 0  # of the random numbers of view.map; 0 if it takes none


class RawBlockRef(Message, frozen=True):
    """The bytes of one block: in the block arena (preamble, then body), or in a local file. If only
    some of them are needed, `pieces` lists these. A preamble in the arena of preambles has a
    number; its room in the block arena is then empty. Of a view that has only some of the block's
    rows, `rows` is their number and `stored_rows` that of all, from `first_row` of the shard on;
    `shard_word` stands for the shard in the keys of its rows, and `shard` is its number.
    """

    url: str
    index: Unsigned  # of the shard's blocks
    rows: Unsigned
    place: Region  # in the shard
    preamble_place: Region  # in the shard
    shard_bytes: Unsigned
    etag: str = ""
    arena: Region | None = None
    path: str | None = None
    pieces: tuple[Region, ...] = ()  # the only parts of `place` that are there; none: all of it
    kept_preamble: Region | None = None  # where the preamble is in the arena of preambles
    preamble_number: Unsigned = 0  # never reused. Absent: the preamble is in `arena`
    stored_rows: Unsigned = 0  # of the whole block; 0: as `rows`, which are all of them
    first_row: Unsigned = 0  # of the whole block, in the shard; also without a view
    shard_word: Unsigned = 0  # the shard in the keys of its rows (docs/order.md)
    shard: Unsigned = 0  # its number in the dataset


class BadBlock(Message, frozen=True):
    """Why a block cannot be decoded at all, and another block of its dataset, whose rows take the
    places of its own, with that block's preamble and bytes.
    """

    reason: str
    other: RawBlockRef
    preamble: bytes
    content: bytes


class Decode(Message, frozen=True):
    """Decode a block into the block arena; if it is `bad`, another one instead."""

    dataset_id: Unsigned
    raw: RawBlockRef
    into: Region  # in the block arena
    bad: BadBlock | None = None


class Decoded(Message, frozen=True):
    """The decoded block's size, and whether it fitted."""

    bytes: Unsigned  # of the decoded block
    stored: bool  # false: it does not fit into `into`; retry with more room
    disk: Unsigned = 0  # waited for local files, microseconds
    queued: Unsigned = 0  # waited for a processor, microseconds


class Origin(Message, frozen=True):
    """Which samples a block has; `of_view`: rows are counted among those of a view. `pack_count` is
    how many packs its documents made when they were counted, 0 without packs; with packs,
    `first_row` is counted among all rows of the shard, and of a view only those behind it are not.
    """

    url: str  # of the shard
    shard: Unsigned  # its index in the manifest
    first_row: Unsigned  # of the shard's samples; with packs, of all of its rows
    of_view: bool = False
    pack_count: Unsigned = 0


class BlockSource(Message, frozen=True):
    """A block to gather from."""

    key: Unsigned  # unique while the node lives
    raw: RawBlockRef | None = None  # needs no decoding
    decoded: Region | None = None  # in the block arena
    origin: Origin | None = None  # of a block with bytes, which may be images
    # In the block arena, if crops of its images leave any there.
    restart_indexes: Region | None = None
    row_count: Unsigned = 0  # not 0: `decoded` is an excerpt with so many rows of the block


class OpenBlocks(Message, frozen=True):
    """Blocks that later Assemble tasks name by key, and blocks to forget: a worker looks at none of
    those, since their memory may hold other ones by then.
    """

    dataset_id: Unsigned
    blocks: tuple[BlockSource, ...] = ()
    forget: tuple[Unsigned, ...] = ()


class Render(Message, frozen=True):
    """The image columns of a slab, and the inputs of their random numbers."""

    images: tuple[ImageSpec, ...]
    seed: Unsigned
    epoch: Unsigned

    @property
    def replaces(self) -> bool:
        """Whether other rows take the places of those whose images cannot be decoded."""
        return any(image.replaces for image in self.images)


class Collation(Message, frozen=True):
    """A function of the user makes each batch of what was gathered for it: arrays with these
    `columns`, by a function of this `code`. Without any, one column of text says of the first
    batch what it returns, and the code.
    """

    function: str  # package.module:function
    seed: Unsigned  # of its random numbers, with epoch, position and dp_rank
    epoch: Unsigned
    cursor: Unsigned  # step s begins at position cursor + s * global_batch of the epoch
    global_batch: Unsigned
    dp_rank: Unsigned
    source_column: str = ""  # the name of the column of sources, if there is one
    columns: tuple[ColumnSpec, ...] = ()
    code: str = ""  # of the function with which the job was opened, if it has columns


class Assemble(Message, frozen=True):
    """Gather the rows of some batches into a slab; `keep` is a second place for it, in the block
    arena. Rows may be packs: `pack_keys` are those of their blocks, `pack_key_counts` of each; none
    if packs are not shuffled. They are without the documents `taken_out` of their blocks,
    `taken_out_counts` of each; none if no document was taken out. Rows that were taken out of a
    job do not stand for those whose images cannot be decoded. If it `names_sources`, the last
    column has the source of each row, int32: that of its block, of which `sources` has one for each
    block. A slab without rows has no blocks, but this column, too. `row_index` is int32[rows, 2] in
    the arena of the slab, outside of it: (index into `block_keys`, row of that block), batch after
    batch. If there is a `row_count`, only
    so many rows from `first_row` on are written, and other tasks write the others.
    """

    dataset_id: Unsigned
    block_keys: tuple[Unsigned, ...]
    row_index: Region
    batches: tuple[Batch, ...]
    arena_id: Unsigned
    slab: Region
    render: Render | None = None  # absent: nothing is rendered
    keep: Region | None = None  # in the block arena: as much of the slab as fits is copied here
    say_where: bool = False  # first read block by block, and send a Reading for each
    pack_keys: tuple[Unsigned, ...] = ()
    sources: tuple[Unsigned, ...] = ()  # of each block: its source, if names_sources
    pack_key_counts: tuple[Unsigned, ...] = ()
    collate: Collation | None = None  # absent: batches are what was gathered
    # The rows are packs without these documents of each block. Of samples with images that may be
    # replaced: rows that must not take the place of another one.
    taken_out: tuple[TakenDocument, ...] = ()
    taken_out_counts: tuple[Unsigned, ...] = ()
    names_sources: bool = False  # a last column of int32 has the source of each row
    # Only these rows of the slab are written, others by other tasks; 0 rows: all.
    first_row: Unsigned = 0
    row_count: Unsigned = 0

    @property
    def part(self) -> slice:
        """The rows of the slab that this task writes."""
        return slice(self.first_row, self.first_row + self.row_count if self.row_count else None)


class ExcerptPlace(Message, frozen=True):
    """Where some rows of a block go. The node has written their numbers in the block there, int32,
    rising; the rows follow, as a block has them, from a multiple of 64 bytes on.
    """

    into: Region  # in the block arena
    row_count: Unsigned
    pack_keys: tuple[Unsigned, ...] = ()  # the rows are packs, drawn with these keys
    taken_out: tuple[TakenDocument, ...] = ()  # without these documents


class Extract(Message, frozen=True):
    """Copy rows of a block into excerpts."""

    dataset_id: Unsigned
    block_key: Unsigned
    places: tuple[ExcerptPlace, ...]


class Extracted(Message, frozen=True):
    """The size of each excerpt; one that is larger than its place was not written."""

    bytes: tuple[Unsigned, ...]
    disk: Unsigned = 0  # waited for local files, microseconds
    queued: Unsigned = 0  # waited for a processor, microseconds


class CopySlab(Message, frozen=True):
    """Copy a kept slab into a slot; `keep`: copy what is in the slot to where it is kept."""

    kept: Region  # in the block arena
    arena_id: Unsigned
    slab: Region  # of the same length
    keep: bool = False


class Assembled(Message, frozen=True):
    """How many of the batches fitted, and where their columns lie: an encoded Layout. `replaced`
    are rows of the task that have others in their places.
    """

    batch_count: Unsigned  # 0: not even one
    bytes_needed: Unsigned = 0  # for the first batch, if it did not fit
    bytes_used: Unsigned = 0
    layout: bytes = b""  # an encoded Layout; empty if nothing fitted
    disk: Unsigned = 0  # waited for local files, microseconds
    queued: Unsigned = 0  # waited for a processor, microseconds
    replaced: tuple[ReplacedRow, ...] = ()


class ShardPart(Message, frozen=True):
    """Bytes of a shard, from that offset on."""

    offset: Unsigned
    content: bytes


class IndexShard(Message, frozen=True):
    """Index one shard. If it `is_local`, it is a file that the process reads itself. `parts` were
    read already, since it will ask for them first.
    """

    format: str
    url: str
    size_bytes: Unsigned
    etag: str
    is_local: bool = False
    parts: tuple[ShardPart, ...] = ()


class CountRows(Message, frozen=True):
    """Count the rows of each of these blocks of one shard that a view has. `schema` is that of the
    dataset. If it `is_local`, the shard is a file that the process reads itself. `parts` were read
    already.
    """

    format: str
    url: str
    size_bytes: Unsigned
    etag: str
    schema: bytes  # the dataset's, serialised
    view: View
    blocks: tuple[RawBlockRef, ...]  # of this shard
    is_local: bool = False
    parts: tuple[ShardPart, ...] = ()  # the preamble of a shard in a store


class ShardBytes(Message, frozen=True):
    """The bytes that a worker has requested to index a shard."""

    request: Unsigned
    content: bytes = b""
    is_end: bool = False  # of the whole shard: there are no more pieces
    has_failed: bool = False  # the read failed, and the node knows why: stop the task


class ReadShard(Message, frozen=True):
    """Requests bytes of a shard, or the next piece of the whole shard."""

    request: Unsigned
    place: Region | None = None  # absent: the next piece of the whole shard


class StillReading(Message, frozen=True):
    """Sent by a process that reads a local file, to show that it is not stuck."""


class ShardIndexed(Message, frozen=True):
    """The result of indexing or counting, or a part of it."""

    # As in the node's index journal, or int64 counts; may be split over several messages.
    index: bytes
    more: bool = False  # it continues in the next message


class BatchShard(Message, frozen=True):
    """A shard of a batch, as it was listed."""

    url: str
    size_bytes: Unsigned


class BatchPart(Message, frozen=True):
    """Bytes of a shard of a batch, from that offset on."""

    shard: Unsigned  # its number in the batch
    offset: Unsigned  # in the shard
    content: bytes


class IndexBatch(Message, frozen=True):
    """Index these shards of one format from `parts` of them, which lack what could not be read. The
    process may request more with MissingParts.
    """

    format: str
    shards: tuple[BatchShard, ...]
    parts: tuple[BatchPart, ...]
    with_preambles: bool = False  # the node wants them, too


class MissingPart(Message, frozen=True):
    """Bytes of a shard of a batch that are to be read, too."""

    shard: Unsigned  # its number in the batch
    place: Region  # in the shard


class MissingParts(Message, frozen=True):
    """The parts of a batch that must be read, too."""

    parts: tuple[MissingPart, ...]


class BatchParts(Message, frozen=True):
    """The parts that were requested, without those that could not be read."""

    parts: tuple[BatchPart, ...]


class BatchPreamble(Message, frozen=True):
    """The bytes of the preamble of a shard, which is named by its number in the batch."""

    shard: Unsigned  # its number in the batch
    content: bytes


class BatchIndexed(Message, frozen=True):
    """The end of a batch: the indexes of those of its shards that are not left out, as
    `IndexFrames` makes them. `unread_count` shards are left out since they could not be read. The
    node indexes those that are left out one by one, and finds out why.
    """

    indexes: bytes  # as in the node's index journal, each under its number in the batch
    preambles: tuple[BatchPreamble, ...] = ()
    unread_count: Unsigned = 0


TaskBody = (
    AttachArena | DetachArena | OpenDataset | Decode | OpenBlocks | Extract | Assemble | CopySlab
)  # fmt: skip
IndexingTask = IndexShard | CountRows | ShardBytes | IndexBatch | BatchParts
ResultBody = (
    Failure | Done | Decoded | Extracted | Assembled | Reading | OutOfMemory
    | ReadShard | StillReading | ShardIndexed | MissingParts | BatchIndexed
)  # fmt: skip


class Task(Message, frozen=True):
    """The envelope of a node's message to a worker. Indexing tasks have a number, other than 0."""

    body: TaskBody | IndexingTask
    number: Unsigned = 0


class Result(Envelope, frozen=True):
    """The envelope of a worker's answer, with the number of its task."""

    body: ResultBody
    number: Unsigned = 0


class StartChild(Message, frozen=True):
    """Fork a process of this role, such as "worker", with this limit of private memory."""

    number: Unsigned  # the node's, by which it is meant from now on
    role: str  # "worker", "fetcher" or "lender"
    memory_bytes: Unsigned  # that it may have of its own


class KillChild(Message, frozen=True):
    """SIGKILL for the process of that number, if it lives."""

    number: Unsigned


class ChildStarted(Message, frozen=True):
    """The process of that number has this process id."""

    number: Unsigned
    pid: Unsigned


class ChildEnded(Message, frozen=True):
    """The process of that number is gone; a negative `status` is the signal that ended it."""

    number: Unsigned
    status: int  # what it returned, or the negative number of the signal


ToForkServerBody = StartChild | KillChild
FromForkServerBody = ChildStarted | ChildEnded


class ToForkServer(Message, frozen=True):
    """The envelope of a node's messages to its fork server."""

    body: ToForkServerBody


class FromForkServer(Message, frozen=True):
    """The envelope of the fork server's messages."""

    body: FromForkServerBody
