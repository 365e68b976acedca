"""TFRecord with tf.train.Example: a block is a run of records up to about 4 MiB.

A record is: length uint64, masked CRC-32C of the length, payload, masked CRC-32C of the payload.
Indexing checks the CRC of every length and skips the payloads; decoding checks both. A shard that
is gzip or zlib data, whatever its name, is one block.

Schema: from the first shard's first records (at most 1,000, at most one block). bytes_list is
binary, int64_list int64, float_list float32; a scalar if no sampled record has another number of
values than one, else a list. A feature that a record lacks is null (in a scalar column one without
values, too), and features that the sample lacks are left out. Columns are sorted by name: the order
of a protobuf map means nothing.

Source:  https://www.tensorflow.org/tutorials/load_data/tfrecord
"""

from __future__ import annotations

import struct
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

import google_crc32c
import numpy as np
import pyarrow as pa
from msgspec import Struct

from dataplane.errors import SchemaMismatch
from dataplane.formats import example
from dataplane.formats.base import Block, RawBlock, ShardIndex, ShardReader
from dataplane.formats.conform import batch_of, check_columns, check_rows
from dataplane.formats.faults import corrupt, describe, require_bytes
from dataplane.formats.gzipped import is_compressed
from dataplane.formats.inferred import inferred_schema
from dataplane.formats.source import (
    BLOCK_BYTES,
    ByteSource,
    Inflated,
    Memory,
    Window,
    block_source,
    holds_compressed,
)
from dataplane.model import Region
from dataplane.plan.null_counts import NEVER, UNKNOWN
from dataplane.suffixes import BY_FORMAT

SAMPLE_RECORDS = 1000
RECORD_BYTES_MAX = 1 << 30
HEADER_BYTES, TRAILER_BYTES = 12, 4
# Arrow's estimated overhead for a record: offsets and validity of a few columns.
ROW_BYTES = 128
# A block's decoded size is estimated from the sample's, with this margin.
MARGIN = 1.5

_LENGTH = struct.Struct("<QI")


class TfRecord:
    """The TFRecord format, plain and compressed."""

    name = "tfrecord"
    suffixes = BY_FORMAT["tfrecord"]

    def index(self, shard: ShardReader) -> ShardIndex:
        """As `Format.index`: one pass over the record headers."""
        require_bytes(shard.url, shard.size_bytes, "TFRecord")
        window = Window(shard)
        compressed = _is_compressed(window.view(0, HEADER_BYTES))
        source: ByteSource = Inflated(shard) if compressed else window
        sample = _sampled(source)
        schema, growth = sample.schema, sample.growth
        blocks: list[Block] = []
        start = end = rows = count = 0
        size = None if compressed else shard.size_bytes
        for _, stop in _records(source, 0, size):
            if rows and not compressed and stop + TRAILER_BYTES - start > BLOCK_BYTES:
                blocks.append(_block(rows, start, end, growth))
                start, rows = end, 0
            rows, end, count = rows + 1, stop + TRAILER_BYTES, count + 1
        if compressed:
            place = Region(0, shard.size_bytes)
            blocks = (
                [Block(rows, place, _block(rows, 0, end, growth).decoded_bytes)] if rows else []
            )
        elif rows:
            blocks.append(_block(rows, start, end, growth))
        nulls = sample.nulls(is_whole=sample.records == count)
        return ShardIndex(schema, tuple(blocks), Region(0, 0), zero_copy=False, nulls=nulls)

    def decode(self, block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
        """As `Format.decode`; SchemaMismatch names the record."""
        check_columns(schema, columns)
        compressed = holds_compressed(block) and _is_compressed(block.body[:HEADER_BYTES])
        source = block_source(block, compressed=compressed)
        base, length = source.base, source.length
        spans = list(_records(source, base, base + length))
        check_rows(block.url, block.place.offset, block.rows, len(spans))
        body = source.view(base, length)
        records = []
        for at, stop in spans:
            _check_payload(source, at, stop)
            records.append(_parsed(body, source.url, base, at, stop))
        starts = [at - HEADER_BYTES for at, _ in spans]
        arrays = {
            name: _column(body, records, starts, schema.field(name), source.url) for name in columns
        }
        return batch_of(arrays, schema, columns, block.rows)


def _masked_crc(piece: memoryview) -> int:
    # This C function accepts numpy's view without a copy.
    crc: int = google_crc32c.value(np.frombuffer(piece, np.uint8))
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _is_compressed(head: memoryview) -> bool:
    """A record of the right length may start as gzip does; then its checksum is right as well."""
    if not is_compressed(bytes(head[:4])):
        return False
    return len(head) < HEADER_BYTES or _masked_crc(head[:8]) != _LENGTH.unpack(head)[1]


def _has_right_length(header: memoryview) -> bool:
    length, crc = _LENGTH.unpack(header[:HEADER_BYTES])
    return bool(length <= RECORD_BYTES_MAX and crc == _masked_crc(header[:8]))


def _records(
    source: ByteSource, at: int, end: int | None, number: int = 0
) -> Iterator[tuple[int, int]]:
    """The place of each payload; `end` is None if it is not known yet. The first record has number
    `number`.

    Raises:  CorruptShard: damaged or truncated; names the record's number and offset.
    """
    while end is None or at < end:
        header = source.view(at, HEADER_BYTES)
        if end is None and not header:
            return
        if len(header) < HEADER_BYTES:
            raise corrupt(
                source.url,
                at,
                f"record {number} is truncated",
                expected=f"{HEADER_BYTES} bytes of header",
                found=len(header),
            )
        length, crc = _LENGTH.unpack(header)
        computed = _masked_crc(header[:8])
        if crc != computed:
            what = f"the length of record {number} is damaged (checksum)"
            if at == 0:
                looks = describe(bytes(source.view(at, 512)))
                what = f"not a TFRecord shard, or its first length is damaged ({looks})"
            raise corrupt(source.url, at, what, expected=f"{computed:#010x}", found=f"{crc:#010x}")
        if length > RECORD_BYTES_MAX:
            raise corrupt(
                source.url, at, f"record {number} is longer than 1 GiB", found=f"{length} bytes"
            )
        start, at = at + HEADER_BYTES, at + HEADER_BYTES + length + TRAILER_BYTES
        # Without a known end, the last byte of the record tells whether it is complete.
        if at > end if end is not None else not len(source.view(at - 1, 1)):
            raise corrupt(
                source.url,
                start - HEADER_BYTES,
                f"record {number} is truncated",
                expected=f"a record of {length} bytes",
                found="the end of the shard",
            )
        yield start, start + length
        number += 1


def _check_payload(source: ByteSource, at: int, stop: int) -> None:
    record = source.view(at, stop - at + TRAILER_BYTES)
    found = int.from_bytes(record[-TRAILER_BYTES:], "little")
    computed = _masked_crc(record[:-TRAILER_BYTES])
    if found != computed:
        raise corrupt(
            source.url,
            at,
            f"the payload of the record at byte {at - HEADER_BYTES} is damaged (checksum)",
            expected=f"{computed:#010x}",
            found=f"{found:#010x}",
        )


def _block(rows: int, start: int, end: int, growth: float) -> Block:
    decoded = int(growth * (end - start)) + ROW_BYTES * rows
    return Block(rows, Region(start, end - start), decoded)


def _parsed(
    body: memoryview, url: str, base: int, at: int, stop: int
) -> dict[bytes, example.Feature]:
    try:
        return example.features(body, at - base, stop - base)
    except example.MalformedExample as fault:
        raise corrupt(
            url, at, f"the record is not a tf.train.Example ({fault}); its checksum is right"
        ) from fault


class _Sample(Struct, frozen=True):
    """Facts from the first records of a shard: the schema (see the module's docstring), decoded
    bytes per stored byte, the number of records, and how many of them lack each column.
    """

    schema: pa.Schema
    growth: float
    records: int
    lacking: Sequence[int]

    def nulls(self, *, is_whole: bool) -> array[int]:
        """As ShardIndex.nulls. A feature's values are never null."""
        found = array("q")
        for field, lacking in zip(self.schema, self.lacking, strict=True):
            found.append(lacking if lacking or is_whole else UNKNOWN)
            if pa.types.is_list(field.type):
                found.append(NEVER)
        return found


def _sampled(source: ByteSource) -> _Sample:
    """The facts from the first block's records."""
    head = source.view(0, BLOCK_BYTES)
    kinds: dict[bytes, int] = {}
    lists: set[bytes] = set()
    present: Counter[bytes] = Counter()
    at = decoded = records = 0
    for _ in range(SAMPLE_RECORDS):
        if at + HEADER_BYTES > len(head):
            break
        length = _LENGTH.unpack(head[at : at + HEADER_BYTES])[0]
        end = at + HEADER_BYTES + length + TRAILER_BYTES
        if at == 0 and end > len(head) and _has_right_length(head):
            head = source.view(0, end)
        if end > len(head):
            # Cut off by the sample, truncated or damaged: the pass over all records decides.
            break
        sample = Memory(source.url, head[:end], 0)
        start, stop = next(_records(sample, at, end, records))
        _check_payload(sample, start, stop)
        for name, feature in _parsed(head, source.url, 0, start, stop).items():
            if feature.kind == example.EMPTY:
                continue
            if kinds.setdefault(name, feature.kind) != feature.kind:
                raise _other_kind(source.url, at, name, kinds[name], feature.kind)
            present[name] += 1
            count = example.value_count(head, feature)
            if count != 1:
                lists.add(name)
            stored = sum(b - a for a, b in feature.spans)
            decoded += 8 * count if feature.kind == example.INTS else stored
        at, records = end, records + 1
    columns = {
        _name(source.url, name): pa.list_(kind) if name in lists else kind
        for name, kind in ((name, example.KIND_TYPES[kinds[name]]) for name in sorted(kinds))
    }
    lacking = [records - present[name] for name in sorted(kinds)]
    growth = MARGIN * max(1.0, decoded / max(1, at))
    return _Sample(inferred_schema(columns), growth, records, lacking)


def _name(url: str, name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError as fault:
        raise corrupt(url, 0, f"the feature name {name!r} is not UTF-8") from fault


def _other_kind(url: str, offset: int, name: bytes, expected: int, found: int) -> SchemaMismatch:
    field = name.decode("utf-8", "replace")
    return SchemaMismatch(
        f"{url}: the record at byte {offset} has {field!r} as {example.KIND_NAMES[found]}, records "
        f"before it as {example.KIND_NAMES[expected]}; write one kind for each feature",
        shard=url,
        offset=offset,
        field=field,
        expected=example.KIND_NAMES[expected],
        found=example.KIND_NAMES[found],
    )


def _column(
    body: memoryview,
    records: Sequence[dict[bytes, example.Feature]],
    starts: Sequence[int],
    field: pa.Field,
    url: str,
) -> pa.Array:
    name = field.name.encode()
    value_type = field.type.value_type if pa.types.is_list(field.type) else field.type
    kind = next(k for k, t in example.KIND_TYPES.items() if t.equals(value_type))
    for number, record in enumerate(records):
        found = record.get(name)
        if found is not None and found.kind not in {kind, example.EMPTY}:
            raise _other_kind(url, starts[number], name, kind, found.kind)
    try:
        values = example.convert(body, value_type, example.gather(records, name))
    except example.MalformedExample as fault:
        raise corrupt(url, starts[0], f"feature {field.name!r} is malformed ({fault})") from fault
    if not pa.types.is_list(field.type) and values.counts.max(initial=0) > 1:
        number = int(np.argmax(values.counts > 1))
        count = int(values.counts[number])
        raise SchemaMismatch(
            f"{url}: record {number} of its block, at byte {starts[number]}, has {count} values of "
            f"{field.name!r}, which is a scalar in the first {SAMPLE_RECORDS} records of the "
            "dataset's shards; put a record with several values among those of one, or write one "
            "value a record",
            shard=url,
            offset=starts[number],
            field=field.name,
            expected="one value",
            found=count,
        )
    return example.column_of(values, field.type)
