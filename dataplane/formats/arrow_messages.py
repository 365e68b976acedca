"""Find the messages of an Arrow IPC stream or file, and read a file's footer.

Source:  https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.formats.base import ShardReader
from dataplane.formats.faults import corrupt, foreign_faults
from dataplane.formats.flatbuf import (
    RECORDS,
    SCHEMA,
    FooterBatch,
    Head,
    first_offset,
    footer_batches,
    footer_is_big_endian,
    message_head,
)
from dataplane.formats.nulls import children
from dataplane.formats.source import NEAR_BYTES, PROBE_BYTES, ByteSource, Parts, Window

# Decide whether the size of a record batch is enough for its index.
#
# A file's footer lists the size of each batch. If all columns have fixed widths, a batch of the
# same size as a batch without nulls has the same number of rows and no nulls, so its metadata need
# not be read. Decoding checks the rows and nulls of every block anyway.
#
# Source:  https://arrow.apache.org/docs/format/Columnar.html#recordbatch-message

_MULTIPLES = (8, 64)
_NODES_MAX = 8
_NUMBERS_OF_ROWS_MAX = 1 << 14
_ROW_BITS_MAX = 1 << 40
_BITS = 8

_Nodes = tuple[tuple[int, int], ...]
"""For each array, depth first: the number of values per row, and the bits per value (0 if the array
has no buffer of values).
"""


def is_implied_by_size(schema: pa.Schema, head: Head) -> bool:
    """Return whether every batch with a body of the same length has as many rows as this one, and
    no nulls. Assumes that the same writer made both, and so pads all buffers in the same way.
    """
    if head.kind != RECORDS or head.compressed or not head.rows or any(head.nulls):
        return False
    nodes = _nodes(schema)
    if nodes is None or head.rows > head.body_length * _BITS:
        return False
    sizes = _buffer_bytes(nodes, head.rows)
    if not len(sizes) == len(head.sizes) == len(head.starts):
        return False
    ends = [*head.starts[1:], head.body_length]
    places = [end - start for start, end in zip(head.starts, ends, strict=True)]
    for alignment in _MULTIPLES:
        if places == [_padded(size, alignment) for size in sizes]:
            return _is_only_solution(nodes, head.rows, alignment)
    return False


def _nodes(schema: pa.Schema) -> _Nodes | None:
    """Describe the arrays of a schema. None if the size of a column depends on more than its row
    count, or if there are many columns.
    """
    if len(schema) > _NODES_MAX:
        return None
    try:
        nodes = tuple(node for kind in schema.types for node in _nodes_of(kind, 1))
    except ValueError:
        return None
    is_small = sum(count * max(bits, 1) for count, bits in nodes) <= _ROW_BITS_MAX
    return nodes if nodes and len(nodes) <= _NODES_MAX and is_small else None


def _nodes_of(kind: pa.DataType, count: int) -> Iterator[tuple[int, int]]:
    """Raises:  ValueError: a value of this type has no fixed width."""
    if isinstance(kind, pa.BaseExtensionType):
        yield from _nodes_of(kind.storage_type, count)
    elif pa.types.is_fixed_size_list(kind) or pa.types.is_struct(kind):
        yield count, 0
        below = count * (kind.list_size if pa.types.is_fixed_size_list(kind) else 1)
        for child in children(kind):
            yield from _nodes_of(child.type, below)
    elif pa.types.is_nested(kind) or pa.types.is_dictionary(kind) or pa.types.is_null(kind):
        raise ValueError(kind)
    else:
        yield count, kind.bit_width


def _buffer_bytes(nodes: _Nodes, rows: int) -> list[int]:
    """Return the size of each buffer if no array has nulls: for each array a validity buffer, then
    values.
    """
    sizes = []
    for count, bits in nodes:
        sizes += [0, -(-rows * count * bits // 8)] if bits else [0]
    return sizes


@functools.lru_cache(maxsize=1024)
def _is_only_solution(nodes: _Nodes, rows: int, alignment: int) -> bool:
    """Return whether this is the only number of rows of this size, with or without validity."""
    size = int(_body_bytes(nodes, np.array([rows]), alignment)[0])
    if _body_bytes(nodes, np.array([rows + 1]), alignment)[0] == size:
        return False
    with_all = sum(count * (bits + 1) for count, bits in nodes) / 8
    # Fewer rows than `least` cannot fill this size, even if every array has a validity buffer and
    # every buffer the most padding.
    least = max(0, int((size - 2 * alignment * len(nodes)) / with_all) - 1)
    if rows - least > _NUMBERS_OF_ROWS_MAX:
        return False
    others = np.arange(least, rows, dtype=np.int64)
    missing = size - _body_bytes(nodes, others, alignment)
    validity = [_padded(-(-others * count // 8), alignment) for count, _ in nodes]
    for present in range(1 << len(nodes)):
        more = sum(length for at, length in enumerate(validity) if present >> at & 1)
        if (missing == more).any():
            return False
    return True


def _body_bytes(nodes: _Nodes, rows: NDArray[np.int64], alignment: int) -> NDArray[np.int64]:
    """Shapes:  rows: int64[N].   result: int64[N], without validity buffers."""
    totals = np.zeros(len(rows), np.int64)
    for count, bits in nodes:
        totals += _padded(-(-rows * count * bits // 8), alignment)
    return totals


def _padded(size: NDArray[np.int64] | int, alignment: int) -> NDArray[np.int64] | int:
    return -(-size // alignment) * alignment


MAGIC = b"ARROW1"
CONTINUATION = b"\xff\xff\xff\xff"
METADATA_BYTES_MAX = 256 << 20
# The most record batches whose metadata is read in parallel, and the size of a padded end mark.
_TOGETHER_MAX = 1 << 14
_END_BYTES = 64
# The fewest batches of the same size for which comparing sizes saves a read.
_ALIKE_MIN = 2


class Message(Struct, frozen=True):
    """One message of a stream: its place and its metadata."""

    offset: int
    metadata_length: int
    head: Head

    @property
    def end(self) -> int:
        """The place of the next message."""
        return self.offset + self.metadata_length + self.head.body_length


class ArrowFooter(Struct, frozen=True):
    """The content of a file's footer. `start` is the place of the footer, where the messages end;
    `batches` are the record batches in order; `first` is the place of the first record batch or
    dictionary.
    """

    start: int
    first: int
    batches: tuple[FooterBatch, ...]
    schema: pa.Schema
    is_big_endian: bool


def is_legacy(source: ByteSource, at: int, end: int) -> bool:
    """Return whether a stream has the format of Arrow before 0.15, in which the length of the first
    message is not preceded by a continuation mark.
    """
    length = int.from_bytes(source.view(at, 4), "little")
    if not 16 <= length <= min(end - at - 4, METADATA_BYTES_MAX):
        return False
    return _is_schema(source.view(at + 4, length))


def is_bare(source: ByteSource, at: int, end: int) -> bool:
    """Return whether these bytes are the metadata of a schema message without its length. Polars 2
    and later start files this way, since readers of files take the schema from the footer.
    """
    if not 8 <= end - at <= METADATA_BYTES_MAX:
        return False
    if bytes(source.view(at, 4)) == CONTINUATION or is_legacy(source, at, end):
        return False
    return _is_schema(source.view(at, end - at))


def _is_schema(metadata: memoryview) -> bool:
    try:
        return message_head(metadata).kind == SCHEMA
    except ValueError:
        return False


def file_footer(shard: ShardReader) -> ArrowFooter:
    """Read the footer of a file.

    Raises:  CorruptShard: the footer is missing or damaged.
    """
    url, size = shard.url, shard.size_bytes
    # One read of the end of the file gets the whole footer, unless there are very many batches.
    window = Window(shard)
    window.view(max(0, size - PROBE_BYTES), min(PROBE_BYTES, size))
    tail = bytes(window.view(max(0, size - 10), 10))
    if size < 18 or tail[4:] != MAGIC:
        raise corrupt(
            url,
            max(0, size - 6),
            "the Arrow IPC file is truncated, its footer is missing; upload it again",
            expected="ARROW1",
            found=tail[4:].hex(" "),
        )
    length = int.from_bytes(tail[:4], "little", signed=True)
    if not 0 < length <= min(size - 18, METADATA_BYTES_MAX):
        raise corrupt(url, size - 10, "the length of the footer is impossible", found=length)
    start = size - 10 - length
    with foreign_faults(url, start, "the footer of the Arrow IPC file is damaged"):
        footer = window.view(start, length)
        # pyarrow needs only the start and the end of a file to read the schema.
        ends = pa.py_buffer(b"".join((MAGIC, b"\0\0", footer, tail)))
        first = first_offset(footer)
        return ArrowFooter(
            start,
            start if first is None else first,
            tuple(footer_batches(footer)),
            pa.ipc.open_file(ends).schema,
            footer_is_big_endian(footer),
        )


def read_together(shard: ShardReader, window: Window, footer: ArrowFooter) -> ByteSource:
    """Read the metadata of large record batches in parallel, since one such read takes as long as
    the transfer of a MiB. Batches whose metadata must equal the first one's are not read.
    """
    end, same = footer.start, _same_as_first(window, footer)
    rest = [batch for batch in footer.batches if batch.offset not in same]
    if not end > len(rest) * NEAR_BYTES or len(rest) > _TOGETHER_MAX:
        return window
    places = [
        (batch.offset, batch.metadata_length)
        for batch in rest
        if batch.offset >= 0 and 0 < batch.metadata_length <= PROBE_BYTES
    ]
    mark = max(0, end - _END_BYTES)
    return Parts(shard, window, [*places, (mark, end - mark)], same)


def _same_as_first(window: Window, footer: ArrowFooter) -> dict[int, memoryview]:
    """Return the offsets of record batches whose metadata must equal the first one's, with that
    metadata.
    """
    first = footer.batches[0] if footer.batches else None
    if first is None or not 0 < first.offset <= PROBE_BYTES - first.metadata_length:
        return {}
    content = window.view(first.offset, first.metadata_length)
    alike = [batch for batch in footer.batches if batch[1:] == first[1:]]
    if len(alike) < _ALIKE_MIN or content[:4] != CONTINUATION:
        return {}
    try:
        head = message_head(content[8:])
    except ValueError:  # the metadata is damaged: reading all messages raises a precise error
        return {}
    is_implied = head.body_length == first.body_length and is_implied_by_size(footer.schema, head)
    return {batch.offset: content for batch in alike} if is_implied else {}


def file_messages(source: ByteSource, first: int, end: int) -> Iterator[Message]:
    """Yield the messages of a file up to its footer, which starts at `end`. `first` is where the
    footer places the first message after the schema.

    Raises:  CorruptShard: as `messages_of`.
    """
    start = 8
    if is_bare(source, start, first):
        yield Message(start, first - start, message_head(source.view(start, first - start)))
        start = first
    if start < end:
        yield from messages_of(source, start, end, file=True)


def messages_of(source: ByteSource, at: int, end: int, *, file: bool) -> Iterator[Message]:
    """Yield the messages between two offsets, up to the end-of-stream mark.

    Raises:  CorruptShard: damaged, truncated, or more data after the mark.
    """
    url = source.url
    while True:
        prefix = bytes(source.view(at, 8))
        marked = prefix.startswith(CONTINUATION)
        skip = 8 if marked else 4
        if at + skip > end or len(prefix) < skip:
            raise corrupt(
                url,
                at,
                "the Arrow IPC stream is truncated: it was not closed, or not uploaded completely",
                expected="a message or the end-of-stream mark",
                found="the end of the shard",
            )
        length = int.from_bytes(prefix[skip - 4 : skip], "little", signed=True)
        if length == 0:
            break
        if not 8 <= length <= min(METADATA_BYTES_MAX, end - at - skip):
            raise corrupt(url, at, "the length of a message's metadata is impossible", found=length)
        with foreign_faults(url, at, "the metadata of an Arrow message is damaged"):
            head = message_head(source.view(at + skip, length))
        message = Message(at, skip + length, head)
        if message.end > end:
            raise corrupt(
                url,
                at,
                "the Arrow IPC shard is truncated in the middle of a message",
                expected=f"{message.end} bytes",
                found=end,
            )
        yield message
        at = message.end
    if not file and at + skip != end:
        raise corrupt(
            url,
            at + skip,
            "more data follows the end of the Arrow IPC stream; write one stream to a shard",
            expected=f"{at + skip} bytes",
            found=end,
        )


def whole_messages(source: ByteSource, at: int, end: int) -> Iterator[Message]:
    """Yield the messages of a part of a stream that may lack the end-of-stream mark."""
    for message in messages_of(source, at, end, file=True):
        yield message
        if message.end == end:
            return
