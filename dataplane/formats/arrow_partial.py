"""Make a record batch that pyarrow can read from some columns of a stored one.

The pieces that were read lie one after the other in memory. A copy of the batch's metadata is
changed: each buffer of a requested column gets its new place, and all others become empty. The body
is not copied, and the new metadata refers only to bytes that were read.

Source:  https://arrow.apache.org/docs/format/Columnar.html#recordbatch-message
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from msgspec import Struct

from dataplane.formats.arrow_columns import Bools, BufferCounts, Int64, are_within
from dataplane.formats.arrow_messages import CONTINUATION, Message, messages_of
from dataplane.formats.base import RawBlock
from dataplane.formats.faults import corrupt, foreign_faults
from dataplane.formats.flatbuf import RECORDS, Head, move_buffers
from dataplane.formats.source import Memory


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
            expected="a place as it was indexed",
            found=f"{size[at]} bytes",
        )
    moved = begin - piece_at[piece] + read_at[piece]
    return np.where(is_kept, moved, 0), np.where(is_kept, size, 0)
