"""Find the columns of an Arrow record batch from its metadata, and read only some of them.

A batch lists its buffers in order, without names; the schema determines how many belong to each
column. The number of buffers of a union depends on the metadata version, and for some types it is
not known: shards with such columns are read whole.

Source:  https://arrow.apache.org/docs/format/Columnar.html#recordbatch-message
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np
import pyarrow as pa
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.formats.arrow_messages import CONTINUATION, Message, messages_of
from dataplane.formats.base import RawBlock
from dataplane.formats.faults import corrupt, foreign_faults
from dataplane.formats.flatbuf import RECORDS, Head, move_buffers
from dataplane.formats.nulls import children, node_count
from dataplane.formats.source import Memory

# Estimate the decoded size of a compressed record batch from its metadata alone.

# Values of variable length (text, binary) are assumed to compress by this factor at most.
VARIABLE_RATIO = 8
_NUMBERS = frozenset(
    kind.id
    for kind in (
        *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32()),
        *(pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.bool_()),
    )
)
"""Types whose width follows from their id. A fast path: wide tables have tens of thousands of such
columns."""


def decoded_estimate(schema: pa.Schema, nodes: Sequence[int], body_length: int) -> int:
    """Estimate the bytes of a decoded batch: exact for fixed-width types, a generous guess for
    others.

    Shapes:  nodes: the lengths of the batch's arrays, depth first, as its metadata lists them.
    """
    sizes = column_sizes(schema, nodes)
    is_variable = any(variable for _, variable in sizes)
    return sum(size for size, _ in sizes) + is_variable * VARIABLE_RATIO * body_length


def column_sizes(schema: pa.Schema, nodes: Sequence[int]) -> list[tuple[int, bool]]:
    """Return, per column, the bytes of its fixed-width values, and whether it has other values.

    Shapes:  nodes: as in `decoded_estimate`.
    """
    lengths = iter(nodes)
    known: dict[tuple[int, int], tuple[int, bool]] = {}
    sizes = []
    for kind in schema.types:
        if kind.id not in _NUMBERS:
            sizes.append(_size(kind, lengths))
            continue
        length = next(lengths, 0)
        size = known.get((kind.id, length))
        if size is None:
            size = known[kind.id, length] = _size(kind, iter((length,)))
        sizes.append(size)
    return sizes


def _size(kind: pa.DataType, lengths: Iterator[int]) -> tuple[int, bool]:
    """Return the bytes of fixed-width values of a type, and whether it has other values."""
    if isinstance(kind, pa.BaseExtensionType):
        return _size(kind.storage_type, lengths)
    length = next(lengths, 0)
    validity = length // 8 + 64
    if pa.types.is_dictionary(kind):
        return length * kind.index_type.bit_width // 8 + validity, False
    if pa.types.is_nested(kind):
        size, variable = 8 * length + validity, False
        for i in range(kind.num_fields):
            inner, more = _size(kind.field(i).type, lengths)
            size, variable = size + inner, variable or more
        return size, variable
    try:
        return length * kind.bit_width // 8 + validity, False
    except ValueError:
        return 16 * length + validity, True


Int64 = NDArray[np.int64]
Bools = NDArray[np.bool_]

# The places of columns are noted only if a shard has a block of this size or more. In smaller
# blocks, leaving out columns saves less than an additional request costs (see index/projection.py),
# and a dataset may have millions of such blocks.
PLACED_BYTES_MIN = 512 << 10
# One text column is assumed to compress by this factor at most. For the sum of all columns,
# VARIABLE_RATIO remains the limit.
COLUMN_RATIO = 32
_SHARES_MAX = 1 << 62
_VIEWS = frozenset({pa.string_view().id, pa.binary_view().id})
_NESTED = {
    pa.struct([]).id: 1,
    pa.list_(pa.null(), 1).id: 1,
    pa.list_(pa.null()).id: 2,
    pa.large_list(pa.null()).id: 2,
    pa.map_(pa.string(), pa.null()).id: 2,
    pa.list_view(pa.null()).id: 3,
    pa.large_list_view(pa.null()).id: 3,
    pa.run_end_encoded(pa.int32(), pa.null()).id: 0,
}
_FLAT = {
    pa.null().id: 0,
    **dict.fromkeys((pa.string().id, pa.large_string().id, pa.binary().id), 3),
    **dict.fromkeys((pa.large_binary().id,), 3),
    **dict.fromkeys(_VIEWS, 2),
    pa.dictionary(pa.int8(), pa.null()).id: 2,
    pa.bool_().id: 2,
    pa.month_day_nano_interval().id: 2,
}
"""The number of buffers of an array without its children, by type."""


class BufferCounts(Struct, frozen=True, eq=False):
    """The number of buffers of each of F columns. Arrays of views have additional buffers, whose
    number each batch states.

    Shapes:  own: int64[F].   views: int64[F], arrays of views.   has_dictionary: bool[F].
    """

    own: Int64
    views: Int64
    has_dictionary: Bools

    @classmethod
    def of(cls, schema: pa.Schema) -> Self | None:
        """Count the buffers by schema; None if a column has a type whose buffers are not known."""
        known: dict[int, tuple[int, int, bool]] = {}
        by_column = []
        for kind in schema.types:
            counts = known.get(kind.id)
            if counts is None:
                counts = _counted(kind)
                if counts is None:
                    return None
                if not (pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType)):
                    known[kind.id] = counts
            by_column.append(counts)
        table = np.array(by_column, np.int64).reshape(-1, 3)
        return cls(table[:, 0].copy(), table[:, 1].copy(), table[:, 2] > 0)

    def starts(self, head: Head) -> Int64 | None:
        """Return the first buffer of each column, and the end of the last column's; None if the
        batch has another number of buffers.

        Shapes:  result: int64[F + 1].
        """
        buffers_of_views, total = np.asarray(head.views, np.int64), len(head.sizes)
        if (
            len(buffers_of_views) != self.views.sum()
            or (buffers_of_views < 0).any()
            or (buffers_of_views > total).any()
        ):
            return None
        ends, before = np.cumsum(self.views), np.concatenate(([0], np.cumsum(buffers_of_views)))
        counts = self.own + before[ends] - before[ends - self.views]
        starts = np.concatenate(([0], np.cumsum(counts)))
        return starts if starts[-1] == total else None


def _counted(kind: pa.DataType) -> tuple[int, int, bool] | None:
    """Return a type's number of buffers and of view arrays, and whether it has a dictionary."""
    if isinstance(kind, pa.BaseExtensionType):
        return _counted(kind.storage_type)
    if kind.id not in _NESTED:
        own = _FLAT.get(kind.id)
        if own is None and _has_fixed_width(kind):
            own = 2
        is_view, is_dictionary = kind.id in _VIEWS, pa.types.is_dictionary(kind)
        return None if own is None else (own, int(is_view), is_dictionary)
    own, views, has_dictionary = _NESTED[kind.id], 0, False
    for child in children(kind):
        below = _counted(child.type)
        if below is None:
            return None
        own, views, has_dictionary = (
            own + below[0], views + below[1], has_dictionary or below[2],
        )  # fmt: skip
    return own, views, has_dictionary


def _has_fixed_width(kind: pa.DataType) -> bool:
    is_number = pa.types.is_primitive(kind) or pa.types.is_decimal(kind)
    return bool(is_number or pa.types.is_fixed_size_binary(kind))


def column_places(
    schema: pa.Schema, batches: Sequence[Message], shared: int
) -> list[Sequence[int]] | None:
    """Return `Block.columns` for each batch, as if it were a block of its own. None if a batch does
    not state its places, or if leaving out columns would save little. `shared` is the decoded size
    of the dictionaries.
    """
    large = max((batch.end - batch.offset for batch in batches), default=0)
    if large < PLACED_BYTES_MIN or len(schema) < 2:
        return None
    counts, nodes = BufferCounts.of(schema), node_count(schema)
    if counts is None or any(len(batch.head.nodes) != nodes for batch in batches):
        return None
    places: list[Sequence[int]] = []
    for batch in batches:
        placed = _placed(schema, counts, batch, shared)
        if placed is None:
            return None
        places.append(array("q", placed.tobytes()))
    return places


def _placed(schema: pa.Schema, counts: BufferCounts, message: Message, shared: int) -> Int64 | None:
    head = message.head
    starts = counts.starts(head)
    if starts is None or not are_within(head):
        return None
    begin, size = np.asarray(head.starts, np.int64), np.asarray(head.sizes, np.int64)
    column, is_used = np.repeat(np.arange(len(starts) - 1), np.diff(starts)), size > 0
    first, last = np.full(len(schema), head.body_length), np.zeros(len(schema), np.int64)
    np.minimum.at(first, column[is_used], begin[is_used])
    np.maximum.at(last, column[is_used], (begin + size)[is_used])
    # A column without bytes is placed where the previous one ends.
    first = np.where(last == 0, np.maximum.accumulate(last), first)
    length = np.maximum(last - first, 0)
    share = length
    if head.compressed:
        share = _decoded_shares(schema, head, length)
    if shared:
        share = share + np.where(counts.has_dictionary, min(shared, _SHARES_MAX), 0)
    share = np.clip(share, 0, _SHARES_MAX // len(schema))
    return np.stack((message.metadata_length + first, length, share), axis=1).reshape(-1)


def are_within(head: Head) -> bool:
    """Return whether all buffers of a batch lie in its body."""
    begin, size = np.asarray(head.starts, np.int64), np.asarray(head.sizes, np.int64)
    is_outside = (begin < 0) | (size < 0) | (size > head.body_length)
    is_outside |= begin > head.body_length - size
    return not is_outside.any()


def _decoded_shares(schema: pa.Schema, head: Head, length: Int64) -> Int64:
    sizes = column_sizes(schema, head.nodes)
    fixed = np.array([min(size, _SHARES_MAX // 2) for size, _ in sizes], np.int64)
    is_variable = np.array([variable for _, variable in sizes], np.bool_)
    return fixed + np.where(is_variable, COLUMN_RATIO * length, 0)


# Make a record batch that pyarrow can read from some columns of a stored one.
#
# pyarrow takes the body of a batch as one piece of memory, but only some pieces of it were read,
# and they are adjacent in memory. So a copy of the batch's metadata is changed: each buffer of a
# requested column gets its new place, and all others become empty. The body is not copied, and the
# new metadata can refer only to bytes that were read.
#
# Source:  https://arrow.apache.org/docs/format/Columnar.html#recordbatch-message


class PartialBatch(Struct, frozen=True):
    """One record batch: its changed message, and the part of its body that was read."""

    head: Head
    metadata: memoryview
    body: memoryview


def partial_batch(block: RawBlock, columns: Sequence[str]) -> PartialBatch:
    """Make a batch of the requested columns that this shard has, from the bytes in `block.pieces`.

    Raises:  CorruptShard: its buffers do not lie in these pieces.
    """
    url, start, first = block.url, block.place.offset, block.pieces[0]
    with foreign_faults(url, block.preamble_place.offset, "the schema of the shard is damaged"):
        stored = pa.ipc.open_stream(pa.py_buffer(block.preamble)).schema
    begun = block.body[: first.length] if first.offset == start else block.body[:0]
    source = Memory(url, begun, start)
    message = next(messages_of(source, start, start + block.place.length, file=True), None)
    if message is None or message.head.kind != RECORDS or message.end != start + block.place.length:
        raise corrupt(url, start, "the block is not one record batch")
    wanted = frozenset(columns)
    is_wanted = np.array([name in wanted for name in stored.names], np.bool_)
    starts, sizes = _moved(block, message, _of_columns(block, stored, message.head, is_wanted))
    body = block.body[message.metadata_length :]
    with foreign_faults(url, start, "the metadata of the record batch is damaged"):
        metadata = memoryview(bytearray(begun[: message.metadata_length]))
        skip = 8 if bytes(metadata[:4]) == CONTINUATION else 4
        head = move_buffers(metadata[skip:], starts.tobytes(), sizes.tobytes(), len(body))
        return PartialBatch(head, metadata.toreadonly(), body)


def _of_columns(block: RawBlock, stored: pa.Schema, head: Head, is_wanted: Bools) -> Bools:
    """Select the buffers that belong to the wanted columns.

    Shapes:  is_wanted: bool[columns].   result: bool[buffers].
    """
    counts = BufferCounts.of(stored)
    starts = None if counts is None else counts.starts(head)
    if starts is None or not are_within(head):
        raise corrupt(block.url, block.place.offset, "the buffers of the record batch do not fit")
    return np.repeat(is_wanted, np.diff(starts))


def _moved(block: RawBlock, message: Message, is_wanted: Bools) -> tuple[Int64, Int64]:
    """Return the place and size of each wanted buffer within the bytes that were read; all other
    buffers are empty.
    """
    shift = block.place.offset + message.metadata_length
    piece_at = np.array([piece.offset for piece in block.pieces], np.int64) - shift
    piece_size = np.array([piece.length for piece in block.pieces], np.int64)
    read_at = np.cumsum(piece_size) - piece_size - message.metadata_length
    begin, size = (
        np.asarray(numbers, np.int64) for numbers in (message.head.starts, message.head.sizes)
    )
    is_kept = is_wanted & (size > 0)
    piece = np.maximum(np.searchsorted(piece_at, begin, side="right") - 1, 0)
    is_there = begin + size <= piece_at[piece] + piece_size[piece]
    if not is_there[is_kept].all():
        at = int(np.flatnonzero(is_kept & ~is_there)[0])
        raise corrupt(
            block.url,
            shift + int(begin[at]),
            "a buffer of a requested column lies outside of its column",
            expected="the place that indexing recorded",
            found=f"{size[at]} bytes",
        )
    moved = begin - piece_at[piece] + read_at[piece]
    return np.where(is_kept, moved, 0), np.where(is_kept, size, 0)
