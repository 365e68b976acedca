"""The tasks that a node gives to its workers, and their answers; and the messages between a node
and its other child processes.

Messages travel over Unix SOCK_SEQPACKET pairs, one message per packet. A worker has one task at a
time, and every task has one result; arenas are sent as file descriptors. Only a worker that indexes
has several tasks at once, each with a number chosen by the node. Such a worker has no credentials:
it requests bytes from the node.
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
    """The block or image that a worker is about to read, or the step for whose batch the worker is
    about to call a function of the user. Sent during a task with `say_where`.
    """

    block_key: Unsigned
    row: Unsigned | None = None  # number of the row within the block
    column: str | None = None
    step: Unsigned | None = None  # number of the step within the epoch


class OutOfMemory(Message, frozen=True):
    """The task needs more memory than the worker may have. The worker may now be unusable."""


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
    # Arrow IPC schema of the shards. A large schema is split over several messages, so that it does
    # not block an event loop.
    schema: bytes
    more: bool = False  # the schema continues in the next message
    pack: bool = False  # small columns lie side by side in decoded blocks
    column_options: ColumnOptions = field(default_factory=ColumnOptions)
    memory_bytes: Unsigned = 0  # limit on the worker's private memory, if larger than before
    view: View = field(default_factory=View)  # without view.collate, which belongs to slabs
    # Decode each block to a single column that describes the columns which view.map returns for it.
    finds_columns: bool = False
    # Decode each block to a list of one token for each row that view.map makes.
    counts_rows: bool = False
    seed: Unsigned = 0  # seed of the random numbers of view.map; 0 if view.map takes none
    epoch: int | None = None  # the epoch for which view.map draws; None: the same for all
    images: tuple[ImageSpec, ...] = ()  # a block of which none can be decoded is bad as a whole


class RawBlockRef(Message, frozen=True):
    """The bytes of one block: in the block arena (preamble, then body), or in a local file. If only
    some of the bytes are needed, `pieces` lists them. A preamble in the arena of preambles has a
    number, and no room is taken for the preamble in the block arena. If a view has only some of the
    block's rows, `rows` counts the rows of the view and `stored_rows` all rows of the block. If a
    map makes another number of rows of them, `made_rows` is that number, once it is known.
    """

    url: str
    index: Unsigned  # number of the block within the shard
    rows: Unsigned
    place: Region  # in the shard
    preamble_place: Region  # in the shard
    shard_bytes: Unsigned
    etag: str = ""
    arena: Region | None = None
    path: str | None = None
    pieces: tuple[Region, ...] = ()  # the only parts of `place` with bytes; (): all of `place`
    kept_preamble: Region | None = None  # where the preamble is in the arena of preambles
    preamble_number: Unsigned = 0  # never reused; 0: the preamble is in `arena`
    stored_rows: Unsigned = 0  # rows of the whole block; 0: the same number as `rows`
    first_row: Unsigned = 0  # number, within the shard, of the first row of the whole block
    shard_word: Unsigned = 0  # stands for the shard in the keys of the rows (docs/order.md)
    shard: Unsigned = 0  # number of the shard within the dataset
    made_rows: Unsigned = 0


class BadBlock(Message, frozen=True):
    """The reason why a block cannot be decoded at all, and the `other` block of the same dataset
    whose rows replace the rows of the bad block. `preamble` and `content` belong to `other`.
    """

    reason: str
    other: RawBlockRef
    preamble: bytes
    content: bytes


class Decode(Message, frozen=True):
    """Decode a block into the block arena; with `bad`, decode the other block instead."""

    dataset_id: Unsigned
    raw: RawBlockRef
    into: Region  # in the block arena
    bad: BadBlock | None = None


class Decoded(Message, frozen=True):
    """The decoded block's size, and whether it fitted."""

    bytes: Unsigned  # size of the decoded block
    stored: bool  # false: the decoded block does not fit into `into`; retry with more room
    disk: Unsigned = 0  # time waited for local files, in microseconds
    queued: Unsigned = 0  # time waited for a processor, in microseconds


class Origin(Message, frozen=True):
    """The samples that a block has. `of_view`: row numbers count only the rows of a view; but with
    packs, `first_row` always counts all rows of the shard.
    """

    url: str  # of the shard
    shard: Unsigned  # index of the shard in the manifest
    first_row: Unsigned  # number of the block's first row within the shard
    of_view: bool = False
    pack_count: Unsigned = 0  # packs of the block's documents, when these were counted; 0: no packs


class BlockSource(Message, frozen=True):
    """A block to gather from."""

    key: Unsigned  # unique while the node lives
    raw: RawBlockRef | None = None  # set if the block needs no decoding
    decoded: Region | None = None  # in the block arena
    # Set if the block has bytes, which may be images, or packs, or if its rows may be replaced.
    origin: Origin | None = None
    # In the block arena; absent unless crops of the block's images store restart indexes.
    restart_indexes: Region | None = None
    row_count: Unsigned = 0  # not 0: `decoded` is an excerpt with this many rows of the block


class OpenBlocks(Message, frozen=True):
    """Blocks that later Assemble tasks name by key, and blocks to forget. A worker does not read
    the memory of a forgotten block, which may hold another block by then.
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
        """Whether rows whose images cannot be decoded are replaced by other rows."""
        return any(image.replaces for image in self.images)


class Collation(Message, frozen=True):
    """The function of the user that makes each batch from the gathered rows. The batches have these
    `columns`. Without columns, the slab has one column of text, which describes what the function
    returns for the first batch, and its code.
    """

    function: str  # package.module:function
    seed: Unsigned  # seed of the function's random numbers, with epoch, position and dp_rank
    epoch: Unsigned
    cursor: Unsigned  # step s begins at position cursor + s * global_batch of the epoch
    global_batch: Unsigned
    dp_rank: Unsigned
    source_column: str = ""  # the name of the column of sources; "": no such column
    columns: tuple[ColumnSpec, ...] = ()
    code: str = ""  # hash of the function's code when the job was opened; "" without `columns`


class Assemble(Message, frozen=True):
    """Gather the rows of some batches into a slab.

    `row_index` is int32[rows, 2], batch after batch: (index into `block_keys`, row of that block).
    The row index is in the arena of the slab, but outside the slab.

    Rows may be packs. `pack_keys` has the keys of all blocks, block after block, and
    `pack_key_counts` how many belong to each block; both are empty if packs are not shuffled.
    `taken_out` has the documents that packs leave out, block after block, and `taken_out_counts`
    how many belong to each block; both are empty if no document was removed from the job.

    With `names_sources`, the last column (int32) has the source of each row, which is the source of
    its block; a slab without rows has this column too.
    """

    dataset_id: Unsigned
    block_keys: tuple[Unsigned, ...]
    row_index: Region
    batches: tuple[Batch, ...]
    arena_id: Unsigned
    slab: Region
    render: Render | None = None  # absent: nothing is rendered
    keep: Region | None = None  # in the block arena: as much of the slab as fits is copied here
    say_where: bool = False  # first read the rows block by block, and send a Reading for each block
    pack_keys: tuple[Unsigned, ...] = ()
    sources: tuple[Unsigned, ...] = ()  # the source of each block, with `names_sources`
    pack_key_counts: tuple[Unsigned, ...] = ()
    collate: Collation | None = None  # absent: batches are delivered as gathered
    # Without packs, if rows may be replaced in slabs: rows that must not replace another row.
    taken_out: tuple[TakenDocument, ...] = ()
    taken_out_counts: tuple[Unsigned, ...] = ()
    names_sources: bool = False
    # Write only `row_count` rows of the slab from `first_row` on; other tasks write the other rows.
    # A `row_count` of 0 means all rows.
    first_row: Unsigned = 0
    row_count: Unsigned = 0

    @property
    def part(self) -> slice:
        """The rows of the slab that this task writes."""
        return slice(self.first_row, self.first_row + self.row_count if self.row_count else None)


class ExcerptPlace(Message, frozen=True):
    """The place of an excerpt: some rows of a block. The node has written the numbers of these rows
    (int32, rising) at the start of `into`. The worker writes the rows behind the numbers, in the
    form of a decoded block, from the next multiple of 64 bytes on.
    """

    into: Region  # in the block arena
    row_count: Unsigned
    pack_keys: tuple[Unsigned, ...] = ()  # the rows are packs, drawn with these keys
    taken_out: tuple[TakenDocument, ...] = ()  # documents that the packs leave out


class Extract(Message, frozen=True):
    """Copy rows of a block into excerpts."""

    dataset_id: Unsigned
    block_key: Unsigned
    places: tuple[ExcerptPlace, ...]


class Extracted(Message, frozen=True):
    """The size of each excerpt. An excerpt that is larger than its place was not written."""

    bytes: tuple[Unsigned, ...]
    disk: Unsigned = 0  # time waited for local files, in microseconds
    queued: Unsigned = 0  # time waited for a processor, in microseconds


class CopySlab(Message, frozen=True):
    """Copy a kept slab into a slot; with `keep`, copy the slab from the slot to `kept`."""

    kept: Region  # in the block arena
    arena_id: Unsigned
    slab: Region  # the slot; as long as `kept`
    keep: bool = False


class Assembled(Message, frozen=True):
    """The number of batches that fitted, and the places of their columns: an encoded Layout.
    `replaced` are the rows of the task that were replaced by other rows.
    """

    batch_count: Unsigned  # 0: not even the first batch fitted
    bytes_needed: Unsigned = 0  # size of the first batch, if it did not fit
    bytes_used: Unsigned = 0
    layout: bytes = b""  # an encoded Layout; empty if nothing fitted
    disk: Unsigned = 0  # time waited for local files, in microseconds
    queued: Unsigned = 0  # time waited for a processor, in microseconds
    replaced: tuple[ReplacedRow, ...] = ()


class ShardPart(Message, frozen=True):
    """Bytes of a shard, from `offset` on."""

    offset: Unsigned
    content: bytes


class IndexShard(Message, frozen=True):
    """Index one shard. If it `is_local`, the process reads the file itself. `parts` are the
    bytes that indexing needs first, which the node has already read.
    """

    format: str
    url: str
    size_bytes: Unsigned
    etag: str
    is_local: bool = False
    parts: tuple[ShardPart, ...] = ()


class CountRows(Message, frozen=True):
    """Count, for each of these blocks of one shard, the rows that a view has. If the shard
    `is_local`, the process reads the file itself. The node has already read `parts`.
    """

    format: str
    url: str
    size_bytes: Unsigned
    etag: str
    schema: bytes  # serialised schema of the dataset
    view: View
    blocks: tuple[RawBlockRef, ...]
    is_local: bool = False
    parts: tuple[ShardPart, ...] = ()  # the preamble of a shard in a store


class ShardBytes(Message, frozen=True):
    """The bytes that a worker has requested to index a shard."""

    request: Unsigned
    content: bytes = b""
    is_end: bool = False  # the whole shard was sent: there are no more pieces
    has_failed: bool = False  # the read failed, and the node knows why: stop the task


class ReadShard(Message, frozen=True):
    """Request bytes of a shard, or the next piece of the whole shard."""

    request: Unsigned
    place: Region | None = None  # absent: the next piece of the whole shard


class StillReading(Message, frozen=True):
    """Sent by a process that reads a local file, to show that it is not stuck."""


class ShardIndexed(Message, frozen=True):
    """The result of indexing or counting, or a part of it."""

    # The index in the form of the node's index journal, or the row counts as int64. Large results
    # are split over several messages.
    index: bytes
    more: bool = False  # the result continues in the next message


class BatchShard(Message, frozen=True):
    """A shard of a batch, with its size as listed."""

    url: str
    size_bytes: Unsigned


class BatchPart(Message, frozen=True):
    """Bytes of a shard of a batch, from `offset` on."""

    shard: Unsigned  # number of the shard within the batch
    offset: Unsigned  # in the shard
    content: bytes


class IndexBatch(Message, frozen=True):
    """Index these shards of one format from `parts` of them. Parts that could not be read are left
    out. The process may request more parts with MissingParts.
    """

    format: str
    shards: tuple[BatchShard, ...]
    parts: tuple[BatchPart, ...]
    with_preambles: bool = False  # whether to send the preambles of the shards too


class MissingPart(Message, frozen=True):
    """Bytes of a shard of a batch that the process needs too."""

    shard: Unsigned  # number of the shard within the batch
    place: Region  # in the shard


class MissingParts(Message, frozen=True):
    """Request more parts of a batch."""

    parts: tuple[MissingPart, ...]


class BatchParts(Message, frozen=True):
    """The requested parts, except the parts that could not be read."""

    parts: tuple[BatchPart, ...]


class BatchPreamble(Message, frozen=True):
    """The bytes of the preamble of a shard."""

    shard: Unsigned  # number of the shard within the batch
    content: bytes


class BatchIndexed(Message, frozen=True):
    """The end of a batch: the indexes of its shards, as `IndexFrames` makes them. Shards that could
    not be indexed are left out, `unread_count` of them because they could not be read. The node
    then indexes each of these shards by itself, which shows what is wrong with it.
    """

    indexes: bytes  # as in the node's index journal, each under the shard's number in the batch
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
    """The envelope of a node's message to a worker. The number of an indexing task is never 0."""

    body: TaskBody | IndexingTask
    number: Unsigned = 0


class Result(Envelope, frozen=True):
    """The envelope of a worker's answer, with the number of its task."""

    body: ResultBody
    number: Unsigned = 0


class StartChild(Message, frozen=True):
    """Fork a process of this role."""

    number: Unsigned  # chosen by the node; later messages name the process by this number
    role: str  # "worker", "fetcher" or "lender"
    memory_bytes: Unsigned  # limit on the private memory of the process


class KillChild(Message, frozen=True):
    """Send SIGKILL to the process with this number, if it is alive."""

    number: Unsigned


class ChildStarted(Message, frozen=True):
    """The process with this number has started, and has this process id."""

    number: Unsigned
    pid: Unsigned


class ChildEnded(Message, frozen=True):
    """The process with this number has ended."""

    number: Unsigned
    status: int  # exit status, or the negative number of the signal that ended the process


ToForkServerBody = StartChild | KillChild
FromForkServerBody = ChildStarted | ChildEnded


class ToForkServer(Message, frozen=True):
    """The envelope of a node's messages to its fork server."""

    body: ToForkServerBody


class FromForkServer(Message, frozen=True):
    """The envelope of the fork server's messages."""

    body: FromForkServerBody
