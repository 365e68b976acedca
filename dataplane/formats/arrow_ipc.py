"""Arrow IPC, file and stream, distinguished by their first bytes and not by name.

A block is one record batch, or several adjacent small ones. The preamble is the schema and the
dictionaries before the first record batch, so preamble and body together are a valid IPC stream. If
dictionaries come later, or a file's footer lists its batches in another order than they are stored,
the whole shard is one block.

Source:  https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from dataplane.base.suffixes import BY_FORMAT
from dataplane.formats import nulls
from dataplane.formats.arrays import joined
from dataplane.formats.arrow_columns import (
    PartialBatch,
    column_places,
    decoded_estimate,
    partial_batch,
)
from dataplane.formats.arrow_messages import (
    CONTINUATION,
    MAGIC,
    ArrowFooter,
    Message,
    file_footer,
    file_messages,
    is_bare,
    is_legacy,
    messages_of,
    read_together,
    whole_messages,
)
from dataplane.formats.base import Block, RawBlock, ShardIndex, ShardReader
from dataplane.formats.conform import (
    batch_of,
    check_rows,
    check_shard,
    dataset_schema,
    is_as_stored,
    validated,
)
from dataplane.formats.faults import corrupt, describe, foreign_faults, require_bytes
from dataplane.formats.flatbuf import DICTIONARY, RECORDS, SCHEMA, Head, first_offset
from dataplane.formats.source import PROBE_BYTES, ByteSource, Memory, Window, spliced
from dataplane.formats.unsupported import refusal
from dataplane.model.errors import DataplaneError
from dataplane.model.records import Region
from dataplane.plan.columns import NEVER, UNKNOWN

# Record batches smaller than SMALL_BYTES are grouped into blocks of at most GROUP_BYTES.
SMALL_BYTES = 256 << 10
GROUP_BYTES = 4 << 20
# A compressed buffer states its size after decompression. All buffers of a block together may claim
# this multiple of the block's size, or CLAIM_FLOOR_BYTES if that is more.
CLAIM_RATIO_MAX = 1024
CLAIM_FLOOR_BYTES = 64 << 20
_FILE_START = MAGIC + b"\0\0"
_KEPT_PREAMBLES, _KEPT_PREAMBLE_BYTES_MAX = 64, 64 << 10
"""The number of parsed schemas that a process caches, and the largest preamble that it caches."""


# The null counts of an Arrow IPC shard, from the counts that each record batch states.
#
# Values below a null are undefined: writers may count them as nulls or not. So if a list column has
# nulls, the number of nulls among its items is unknown. The same holds for items of list views,
# since some of their values may belong to no list.

_LIST_VIEWS = frozenset({pa.list_view(pa.null()).id, pa.large_list_view(pa.null()).id})


def null_counts(schema: pa.Schema, heads: Sequence[Head]) -> array[int]:
    """Return the null count of each field node of the shard's own schema, UNKNOWN, or NEVER."""
    declared = np.array(nulls.declared(schema, otherwise=0), np.int64)
    totals = np.zeros(len(declared), np.int64)
    for head in heads:
        if head.kind == RECORDS:
            if not _is_possible(head, len(totals)):
                return array("q", nulls.declared(schema))
            totals += np.array(head.nulls, np.int64)
    counts = np.where(totals > 0, totals, declared).tolist()
    if nulls.is_flat(schema):
        return array("q", counts)
    # A null may be in the dictionary instead of the indices.
    of_values = any(head.kind == DICTIONARY and any(head.nulls) for head in heads)
    _settle(schema, counts, 0, of_values=of_values)
    return array("q", counts)


def _is_possible(head: Head, node_count: int) -> bool:
    null_counts, lengths = np.array(head.nulls, np.int64), np.array(head.nodes, np.int64)
    return len(null_counts) == node_count and bool(
        ((null_counts >= 0) & (null_counts <= lengths)).all()
    )


def _settle(
    fields: Sequence[pa.Field] | pa.Schema,
    counts: list[int],
    at: int,
    *,
    of_values: bool,
    below_null: bool = False,
    in_list: bool = False,
) -> int:
    """Replace counts that are not reliable by UNKNOWN. Return the index of the node after these
    fields.
    """
    for field in fields:
        node, at = at, at + 1
        is_struct = pa.types.is_struct(field.type)
        if in_list and below_null and counts[node] > 0:
            counts[node] = UNKNOWN
        if of_values and counts[node] == 0 and pa.types.is_dictionary(field.type):
            counts[node] = UNKNOWN
        at = _settle(
            nulls.children(field.type),
            counts,
            at,
            of_values=of_values,
            below_null=below_null or counts[node] not in {0, NEVER} or field.type.id in _LIST_VIEWS,
            in_list=in_list or not is_struct,
        )
    return at


class ArrowIpc:
    """The Arrow IPC format, file and stream."""

    name = "arrow"
    suffixes = BY_FORMAT["arrow"]
    index_version = 2  # raised when indexes got places of columns, and a joint estimate for texts

    def first_reads(self, size_bytes: int) -> tuple[Region, ...]:
        """Return the ranges that `index` reads first: the start and, of a file, the end."""
        if size_bytes <= 2 * PROBE_BYTES:
            return (Region(0, size_bytes),)
        return Region(0, PROBE_BYTES), Region(size_bytes - PROBE_BYTES, PROBE_BYTES)

    def index(self, shard: ShardReader) -> ShardIndex:
        """Implement `Format.index`: read the metadata of each message, and skip bodies where
        possible.
        """
        require_bytes(shard.url, shard.size_bytes, "Arrow IPC")
        window = Window(shard)
        start = bytes(window.view(0, 512))
        footer: ArrowFooter | None = None
        source: ByteSource = window
        if start.startswith(MAGIC):
            footer = file_footer(shard)
            source = read_together(shard, window, footer)
        elif not start.startswith(CONTINUATION) and not is_legacy(window, 0, shard.size_bytes):
            raise corrupt(
                shard.url,
                0,
                "not an Arrow IPC file or stream",
                found=describe(start),
                expected="ARROW1",
            )
        if footer is None:
            arriving = messages_of(source, 0, shard.size_bytes, file=False)
        else:
            arriving = file_messages(source, footer.first, footer.start)
        first = next(arriving, None)
        # Read the schema before the other messages, since the source only reads forward.
        schema = b""
        if first is not None:
            metadata = source.view(first.offset, first.metadata_length)
            schema = bytes(_with_length(shard.url, metadata))
        messages = [first, *arriving] if first is not None else []
        return _shard_index(schema, shard, messages, footer)

    def decode(self, block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
        """Implement `Format.decode`."""
        url, start = block.url, block.place.offset
        block = replace(block, preamble=_with_length(url, block.preamble))
        part = partial_batch(block, columns) if block.pieces else None
        if part is not None and not columns:
            check_rows(url, start, block.rows, part.head.rows)
            return batch_of({}, schema, columns, block)
        with foreign_faults(url, start, "the record batch cannot be decoded"):
            batches = _read_alone(block, part, schema, columns)
            if batches is None:
                _check_claims(block, part)
                batches = _read(block, part, schema, columns)
        # Validate the batches before joining them: joining follows their offsets without a check.
        batches = [validated(batch, url, start) for batch in batches]
        rows = sum(batch.num_rows for batch in batches)
        check_rows(url, start, block.rows, rows)
        if len(batches) == 1 and is_as_stored(batches[0].schema, schema, columns):
            return batches[0]
        with foreign_faults(url, start, "the record batches cannot be joined"):
            present = [name for name in batches[0].schema.names if name in set(columns)]
            arrays = {
                name: _joined([b.column(name) for b in batches], name, url) for name in present
            }
            return batch_of(arrays, schema, columns, block)


def _with_length(url: str, schema: memoryview) -> memoryview:
    """Return a schema message as a stream has it: some file writers leave out its length."""
    if not is_bare(Memory(url, schema, 0), 0, len(schema)):
        return schema
    return memoryview(b"".join((CONTINUATION, len(schema).to_bytes(4, "little"), schema)))


def _joined(pieces: list[pa.Array], name: str, url: str) -> pa.Array:
    """Join the pieces of one column of a block.

    Raises:  ConfigError: Arrow cannot join arrays of this type, such as dictionaries of structs.
    """
    try:
        return joined(pieces)
    except pa.ArrowNotImplementedError as fault:
        reason = f"is of type {pieces[0].type}, whose batches cannot be joined ({fault})"
        raise refusal({name: reason}, url=url) from fault


def _shard_index(
    schema_message: bytes,
    shard: ShardReader,
    messages: list[Message],
    footer: ArrowFooter | None,
) -> ShardIndex:
    is_alone = len(schema_message) > (messages[0].metadata_length if messages else 0)
    stored = _schema(shard.url, schema_message, messages)
    if footer is not None:
        _check_footer(shard.url, footer, stored, messages)
    schema = dataset_schema(stored, shard.url)
    nulls = null_counts(stored, [m.head for m in messages])
    batches = [m for m in messages if m.head.kind == RECORDS]
    start = batches[0].offset if batches else messages[-1].end
    before = [m for m in messages if m.offset < start]
    dictionaries = any(m.head.kind == DICTIONARY for m in messages)
    # A schema message without a length can only be read if it ends with the preamble. So a shard
    # with such a message and dictionaries must be one block, as if the dictionaries came late.
    late = any(m.head.kind == DICTIONARY and (is_alone or m.offset > start) for m in messages)
    one_block = functools.partial(_one_block, shard, schema, messages, nulls)
    if footer is not None and [batch.offset for batch in footer.batches] != [
        m.offset for m in batches
    ]:
        rows_at = {m.offset: m.head.rows for m in batches}
        return one_block(sum(rows_at[batch.offset] for batch in footer.batches))
    if late:
        return one_block(sum(m.head.rows for m in batches))
    shared = sum(_decoded(schema, m) for m in before)
    runs = list(_runs([m for m in batches if m.head.rows]))
    places: list[Sequence[int]] | None = None
    if all(len(run) == 1 for run in runs):
        places = column_places(stored, [m for run in runs for m in run], shared)
    blocks = tuple(
        Block(
            sum(m.head.rows for m in run),
            Region(run[0].offset, run[-1].end - run[0].offset),
            shared + sum(_decoded(schema, m) for m in run),
            () if places is None else places[at],
        )
        for at, run in enumerate(runs)
    )
    preamble = Region(messages[0].offset, start - messages[0].offset)
    plain = not dictionaries and not any(m.head.compressed for m in batches)
    zero_copy = plain and all(len(run) == 1 for run in runs)
    return ShardIndex(schema, blocks, preamble, zero_copy, nulls)


def _one_block(
    shard: ShardReader,
    schema: pa.Schema,
    messages: list[Message],
    nulls: Sequence[int],
    rows: int,
) -> ShardIndex:
    decoded = shard.size_bytes + sum(_decoded(schema, m) for m in messages)
    whole = Block(rows, Region(0, shard.size_bytes), decoded)
    alone = (whole,) if rows else ()
    return ShardIndex(schema, alone, Region(0, 0), zero_copy=False, nulls=nulls)


def _schema(url: str, first: bytes, messages: list[Message]) -> pa.Schema:
    """Read the schema, which is the first message.

    Raises:  CorruptShard: also if a later message is neither a dictionary nor a record batch.
    """
    if not messages or messages[0].head.kind != SCHEMA:
        raise corrupt(url, 0, "an Arrow IPC shard starts with a schema message")
    for message in messages[1:]:
        if message.head.kind not in {DICTIONARY, RECORDS}:
            raise corrupt(
                url,
                message.offset,
                "a message is neither a dictionary nor a record batch",
                expected=f"{DICTIONARY} or {RECORDS}",
                found=message.head.kind,
            )
    with foreign_faults(url, messages[0].offset, "the schema of the shard is damaged"):
        schema = pa.ipc.open_stream(first).schema
    for message in messages[1:]:
        # Refuse a batch without arrays, which would seem to have no rows and would be skipped.
        if len(schema) and not message.head.nodes:
            raise corrupt(url, message.offset, "a batch of columns has no arrays")
    return schema


def _check_footer(
    url: str, footer: ArrowFooter, schema: pa.Schema, messages: list[Message]
) -> None:
    """Refuse a file whose footer contradicts its messages: either may be wrong."""
    is_same = footer.is_big_endian == messages[0].head.is_big_endian
    if not is_same or not footer.schema.equals(schema):
        raise corrupt(url, footer.start, "the footer and the first message have different schemas")
    there = {m.offset for m in messages if m.head.kind == RECORDS}
    for at in (batch.offset for batch in footer.batches):
        if at not in there:
            raise corrupt(url, footer.start, f"the footer names a record batch at byte {at}")


def _decoded(schema: pa.Schema, message: Message) -> int:
    head = message.head
    if not head.compressed:
        return head.body_length
    if head.kind == DICTIONARY:
        return 8 * head.body_length
    return decoded_estimate(schema, head.nodes, head.body_length)


def _runs(batches: Sequence[Message]) -> Iterator[list[Message]]:
    """Group batches into blocks: each large batch alone, adjacent small ones together."""
    total = sum(m.end - m.offset for m in batches)
    if total >= SMALL_BYTES * len(batches):
        yield from ([m] for m in batches)
        return
    run: list[Message] = []
    for message in batches:
        apart = run and message.offset != run[-1].end
        if apart or (run and message.end - run[0].offset > GROUP_BYTES):
            yield run
            run = []
        run.append(message)
    if run:
        yield run


def _read_alone(
    block: RawBlock, part: PartialBatch | None, schema: pa.Schema, columns: Sequence[str]
) -> list[pa.RecordBatch] | None:
    """Read a block of one uncompressed record batch whose preamble is only a schema, in a third of
    the time of `_read`. Return None for all other blocks, and for damaged ones, for which `_read`
    raises an error that says where.

    Raises:  CorruptShard: as `messages_of`.
    """
    if part is not None or not 0 < len(block.preamble) <= _KEPT_PREAMBLE_BYTES_MAX:
        return None
    stored = _schema_alone(bytes(block.preamble))
    if stored is None or not is_as_stored(stored, schema, columns):
        return None
    start, end = block.place.offset, block.place.offset + len(block.body)
    message = next(whole_messages(Memory(block.url, block.body, start), start, end), None)
    if message is None or message.end != end:
        return None
    if message.head.kind != RECORDS or message.head.compressed:
        return None
    try:
        return [pa.ipc.read_record_batch(pa.py_buffer(block.body), stored)]
    except (pa.ArrowException, OSError):
        return None


@functools.lru_cache(_KEPT_PREAMBLES)
def _schema_alone(preamble: bytes) -> pa.Schema | None:
    """Return the schema of a preamble that contains nothing else. None if it is damaged, or if its
    numbers have the other byte order, which only a stream's reader swaps.
    """
    try:
        message = next(whole_messages(Memory("", memoryview(preamble), 0), 0, len(preamble)), None)
        if message is None or message.head.kind != SCHEMA or message.end != len(preamble):
            return None
        if message.head.is_big_endian:
            return None
        return pa.ipc.read_schema(pa.py_buffer(preamble))
    except (DataplaneError, pa.ArrowException, OSError):
        return None


def _read(
    block: RawBlock, part: PartialBatch | None, schema: pa.Schema, columns: Sequence[str]
) -> list[pa.RecordBatch]:
    source = _readable(block, part)
    is_file = bytes(block.body[:6]) == MAGIC and not len(block.preamble)
    open_ = pa.ipc.open_file if is_file else pa.ipc.open_stream
    opened = open_(source, options=pa.ipc.IpcReadOptions(use_threads=False))
    if not is_as_stored(opened.schema, schema, columns):
        stored = opened.schema
        present = check_shard(dataset_schema(stored, block.url), schema, columns, block.url)
        fields = sorted(map(stored.get_field_index, present))
        options = pa.ipc.IpcReadOptions(
            included_fields=fields or [0][: len(stored)], use_threads=False
        )
        source.seek(0)
        opened = open_(source, options=options)
    if is_file:
        return [opened.get_batch(i) for i in range(opened.num_record_batches)]
    return list(opened)


def _readable(block: RawBlock, part: PartialBatch | None) -> pa.NativeFile:
    """Open the block for pyarrow. A whole file is passed as memory, since pyarrow would read a
    Python file in a thread of its own, which may outlive the interpreter and crash it.
    """
    if not len(block.preamble):
        return pa.BufferReader(pa.py_buffer(block.body))
    pieces, end = list[tuple[int, memoryview]](), 0
    bodies = (block.body,) if part is None else (part.metadata, part.body)
    for piece in (block.preamble, *bodies):
        pieces.append((end, piece))
        end += len(piece)
    return spliced(end, pieces)


def _check_claims(block: RawBlock, part: PartialBatch | None) -> None:
    """Refuse compressed buffers that claim a decompressed size which no real block has.

    Raises:  CorruptShard.
    """
    claimed = 0
    limit = CLAIM_FLOOR_BYTES + CLAIM_RATIO_MAX * (len(block.preamble) + len(block.body))
    for offset, head, body in _bodies(block, part):
        if not head.compressed:
            continue
        for start, length in zip(head.starts, head.sizes, strict=True):
            claimed += max(0, _claim(body, start, length))
        if claimed > limit:
            raise corrupt(
                block.url,
                offset,
                "compressed buffers claim an impossible size",
                expected=f"at most {limit} bytes",
                found=claimed,
            )


def _bodies(block: RawBlock, part: PartialBatch | None) -> Iterator[tuple[int, Head, memoryview]]:
    """Yield the place, the metadata and the body of each message."""
    pieces = [(block.preamble, 0, block.preamble_place.offset)] if len(block.preamble) else []
    if part is None:
        is_file = not pieces and bytes(block.body[:6]) == MAGIC
        pieces.append((block.body, _first_of(block.body) if is_file else 0, block.place.offset))
    for piece, at, base in pieces:
        for message in whole_messages(Memory(block.url, piece, base), base + at, base + len(piece)):
            start = message.offset - base + message.metadata_length
            yield message.offset, message.head, piece[start : message.end - base]
    if part is not None:
        yield block.place.offset, part.head, part.body


def _first_of(file: memoryview) -> int:
    """Find the first message after the schema of a whole file; the schema may have no length."""
    length = int.from_bytes(file[-10:-6], "little")
    first = first_offset(file[-10 - length : -10])
    if first is not None and is_bare(Memory("", file, 0), len(_FILE_START), first):
        return first
    return len(_FILE_START)


def _claim(body: memoryview, at: int, length: int) -> int:
    if length < 8 or at < 0 or at + 8 > len(body):
        return 0
    return int.from_bytes(body[at : at + 8], "little", signed=True)
