"""Arrow IPC: file and stream, told apart by their first bytes, never by the name.

A block is a record batch, or a run of small ones; the preamble is the schema and the dictionaries
before the first record batch, so that preamble and body, one after the other, are an IPC stream.
Where dictionaries come later than that, or a file's footer lists its batches in another order than
they lie, the shard is one block.

Source:  https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from dataplane.formats.arrow_size import decoded_estimate
from dataplane.formats.base import Block, RawBlock, ShardIndex, ShardReader
from dataplane.formats.conform import (
    batch_of,
    check_columns,
    check_rows,
    check_shard,
    dataset_schema,
    validated,
)
from dataplane.formats.faults import corrupt, describe, foreign_faults, require_bytes
from dataplane.formats.flatbuf import (
    DICTIONARY,
    RECORDS,
    SCHEMA,
    Head,
    footer_batches,
    message_head,
)
from dataplane.formats.source import NEAR_BYTES, PROBE_BYTES, Memory, Parts, Source, Window
from dataplane.formats.splice import spliced
from dataplane.model import Region

MAGIC = b"ARROW1"
CONTINUATION = b"\xff\xff\xff\xff"
METADATA_BYTES_MAX = 256 << 20
# Record batches smaller than this are grouped, up to the second figure.
SMALL_BYTES = 256 << 10
GROUP_BYTES = 4 << 20
# A compressed buffer states its size before it is inflated; a block may not claim more than this
# many times its own size beyond the floor.
CLAIM_RATIO_MAX = 1024
CLAIM_FLOOR_BYTES = 64 << 20
# Of how many record batches the metadata is read at once; and the end-of-stream mark, padded.
_TOGETHER_MIN, _TOGETHER_MAX = 4, 1 << 14
_END_BYTES = 64


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a stream: where it lies, and what its metadata says."""

    offset: int
    metadata_length: int
    head: Head

    @property
    def end(self) -> int:
        """Where the next message starts."""
        return self.offset + self.metadata_length + self.head.body_length


class ArrowIpc:
    """The Arrow IPC format, file and stream."""

    name = "arrow"
    suffixes = (".arrows", ".arrow", ".feather", ".ipc")

    def index(self, shard: ShardReader) -> ShardIndex:
        """As `Format.index`: reads the metadata of each message, and no body that it can skip."""
        require_bytes(shard.url, shard.size_bytes, "Arrow IPC")
        window = Window(shard)
        start = bytes(window.view(0, 512))
        order: list[int] | None = None
        source: Source = window
        first, end = 0, shard.size_bytes
        if start.startswith(MAGIC):
            first, (end, batches) = 8, _file_footer(shard)
            order = [offset for offset, _ in batches]
            source = _read_together(shard, window, end, batches)
        elif not start.startswith(CONTINUATION) and not _is_legacy(start, shard.size_bytes):
            raise corrupt(
                shard.url,
                0,
                "not an Arrow IPC file or stream",
                found=describe(start),
                expected="ARROW1",
            )
        messages = list(_messages(source, first, end, file=order is not None))
        return _shard_index(window, shard, messages, order)

    def decode(self, block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
        """As `Format.decode`."""
        url, start = block.url, block.place.offset
        check_columns(schema, columns)
        _check_claims(block)
        with foreign_faults(url, start, "the record batch cannot be decoded"):
            batches = _read(block, schema, columns)
        # Joining batches follows their offsets, so each is checked before.
        batches = [validated(batch, url, start) for batch in batches]
        rows = sum(batch.num_rows for batch in batches)
        check_rows(url, start, block.rows, rows)
        with foreign_faults(url, start, "the record batches cannot be joined"):
            batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
            arrays = {name: batch.column(name) for name in columns}
            return batch_of(arrays, schema, columns, rows)


def _is_legacy(start: bytes, size: int) -> bool:
    """Before Arrow 0.15 a message started with its length, without a continuation mark."""
    length = int.from_bytes(start[:4], "little")
    if not 16 <= length <= min(size - 4, METADATA_BYTES_MAX) or length + 4 > len(start):
        return False
    try:
        return message_head(memoryview(start)[4 : 4 + length]).kind == SCHEMA
    except ValueError:
        return False


def _file_footer(shard: ShardReader) -> tuple[int, list[tuple[int, int]]]:
    """Where a file's messages end; of its record batches, in their order, offset and length of the
    metadata.
    """
    url, size = shard.url, shard.size_bytes
    # The end of the file is read once: all of the footer is there, but of very many batches.
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
        raise corrupt(url, size - 10, "the length of the footer is wrong", found=length)
    end = size - 10 - length
    with foreign_faults(url, end, "the footer of the Arrow IPC file is damaged"):
        return end, footer_batches(window.view(end, length))


def _read_together(
    shard: ShardReader, window: Window, end: int, batches: Sequence[tuple[int, int]]
) -> Source:
    """The metadata of large record batches, read at once and not one after the other: a store takes
    as long for each of them as for a MiB.
    """
    far = len(batches) >= _TOGETHER_MIN and end > len(batches) * NEAR_BYTES
    if not far or len(batches) > _TOGETHER_MAX:
        return window
    places = [(at, length) for at, length in batches if at >= 0 and 0 < length <= PROBE_BYTES]
    mark = max(0, end - _END_BYTES)
    return Parts(shard, window, [*places, (mark, end - mark)])


def _messages(source: Source, at: int, end: int, *, file: bool) -> Iterator[Message]:
    """The messages between two offsets, up to the end-of-stream mark.

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
                "the Arrow IPC stream is truncated: it was not closed, or not uploaded whole",
                expected="a message or the end-of-stream mark",
                found="the end of the shard",
            )
        length = int.from_bytes(prefix[skip - 4 : skip], "little", signed=True)
        if length == 0:
            break
        if not 8 <= length <= min(METADATA_BYTES_MAX, end - at - skip):
            raise corrupt(url, at, "the length of a message's metadata is wrong", found=length)
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


def _shard_index(
    window: Window, shard: ShardReader, messages: list[Message], order: list[int] | None
) -> ShardIndex:
    url = shard.url
    if not messages or messages[0].head.kind != SCHEMA:
        raise corrupt(url, 0, "an Arrow IPC shard starts with a schema message")
    schema = _schema(window, messages[0])
    batches = [m for m in messages if m.head.kind == RECORDS]
    start = batches[0].offset if batches else messages[-1].end
    before = [m for m in messages if m.offset < start]
    dictionaries = any(m.head.kind == DICTIONARY for m in messages)
    in_order = order is None or order == [m.offset for m in batches]
    late = any(m.head.kind == DICTIONARY and m.offset > start for m in messages)
    if late or not in_order:
        rows = sum(m.head.rows for m in batches)
        decoded = shard.size_bytes + sum(_decoded(schema, m) for m in messages)
        whole = Block(rows, Region(0, shard.size_bytes), decoded)
        return ShardIndex(schema, (whole,) if rows else (), Region(0, 0), zero_copy=False)
    shared = sum(_decoded(schema, m) for m in before)
    runs = list(_runs([m for m in batches if m.head.rows]))
    blocks = tuple(
        Block(
            sum(m.head.rows for m in run),
            Region(run[0].offset, run[-1].end - run[0].offset),
            shared + sum(_decoded(schema, m) for m in run),
        )
        for run in runs
    )
    preamble = Region(messages[0].offset, start - messages[0].offset)
    plain = not dictionaries and not any(m.head.compressed for m in batches)
    return ShardIndex(schema, blocks, preamble, plain and all(len(run) == 1 for run in runs))


def _schema(window: Window, message: Message) -> pa.Schema:
    body = bytes(window.view(message.offset, message.end - message.offset))
    with foreign_faults(window.url, message.offset, "the schema of the shard is damaged"):
        return dataset_schema(pa.ipc.read_schema(pa.py_buffer(body)), window.url)


def _decoded(schema: pa.Schema, message: Message) -> int:
    head = message.head
    if not head.compressed:
        return head.body_length
    if head.kind == DICTIONARY:
        return 8 * head.body_length
    return decoded_estimate(schema, head.nodes, head.body_length)


def _runs(batches: Sequence[Message]) -> Iterator[list[Message]]:
    """Batches as they become blocks: alone where they are large enough, else in neighbour runs."""
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


def _read(block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> list[pa.RecordBatch]:
    split = len(block.preamble)
    file = spliced(split + len(block.body), [(0, block.preamble), (split, block.body)])
    if split == 0 and bytes(block.body[:6]) == MAGIC:
        found = pa.ipc.open_file(file).schema
    else:
        found = pa.ipc.open_stream(file).schema
    check_shard(dataset_schema(found, block.url), schema, columns, block.url)
    fields = sorted(found.get_field_index(name) for name in columns)
    options = pa.ipc.IpcReadOptions(included_fields=fields or [0], use_threads=False)
    file.seek(0)
    if split == 0 and bytes(block.body[:6]) == MAGIC:
        opened = pa.ipc.open_file(file, options=options)
        return [opened.get_batch(i) for i in range(opened.num_record_batches)]
    return list(pa.ipc.open_stream(file, options=options))


def _check_claims(block: RawBlock) -> None:
    """Refuse compressed buffers that claim to inflate to more than any real block does.

    Raises:  CorruptShard.
    """
    if not len(block.preamble):
        pieces = [(block.body, 8 if bytes(block.body[:6]) == MAGIC else 0, 0)]
    else:
        pieces = [
            (block.preamble, 0, block.preamble_place.offset),
            (block.body, 0, block.place.offset),
        ]
    claimed = 0
    limit = CLAIM_FLOOR_BYTES + CLAIM_RATIO_MAX * (len(block.preamble) + len(block.body))
    for piece, at, base in pieces:
        for message in _whole_messages(
            Memory(block.url, piece, base), base + at, base + len(piece)
        ):
            if not message.head.compressed:
                continue
            body = message.offset - base + message.metadata_length
            for offset, length in message.head.buffers:
                claimed += max(0, _claim(piece, body + offset, length))
            if claimed > limit:
                raise corrupt(
                    block.url,
                    message.offset,
                    "compressed buffers claim an impossible size",
                    expected=f"at most {limit} bytes",
                    found=claimed,
                )


def _whole_messages(source: Source, at: int, end: int) -> Iterator[Message]:
    """The messages of a piece that may end without a mark."""
    for message in _messages(source, at, end, file=True):
        yield message
        if message.end == end:
            return


def _claim(piece: memoryview, at: int, length: int) -> int:
    if length < 8 or at < 0 or at + 8 > len(piece):
        return 0
    return int.from_bytes(piece[at : at + 8], "little", signed=True)
