"""TFRecord with tf.train.Example: a block is a run of records up to about 4 MiB.

A record is: length uint64, masked CRC-32C of the length, payload, masked CRC-32C of the payload.
Indexing checks the CRC of every length, reads the feature names of records up to 1 MiB, and skips
larger payloads; decoding checks both CRCs. A shard of gzip or zlib data, whatever its name, is one
block.

The schema comes from the first records of each shard (at most 1,000, and at most one block), and
from later records with new features. bytes_list is binary, int64_list is int64, float_list is
float32. A feature is a scalar if it has exactly one value in each of these records, else a list. A
feature that a record lacks is null; in a scalar column, a feature without values is null, too. A
job that reads all columns refuses a feature that no index has. Columns are sorted by name, since
the order of a protobuf map means nothing.

Source:  https://www.tensorflow.org/tutorials/load_data/tfrecord
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence

import google_crc32c
import numpy as np
import pyarrow as pa
from msgspec import Struct

from dataplane.base.suffixes import BY_FORMAT
from dataplane.formats import example
from dataplane.formats.base import Block, RawBlock, ShardIndex, ShardReader
from dataplane.formats.conform import batch_of, check_columns, check_rows
from dataplane.formats.faults import corrupt, describe, require_bytes
from dataplane.formats.joint_types import inferred_schema
from dataplane.formats.known_names import KnownNames
from dataplane.formats.source import (
    BLOCK_BYTES,
    NEAR_BYTES,
    ByteSource,
    Inflated,
    Memory,
    Window,
    block_source,
    holds_compressed,
    is_compressed,
)
from dataplane.model.errors import CorruptShard, SchemaMismatch
from dataplane.model.records import Region
from dataplane.plan.columns import NEVER, UNKNOWN

SAMPLE_RECORDS = 1000
RECORD_BYTES_MAX = 1 << 30
HEADER_BYTES, TRAILER_BYTES = 12, 4
# Arrow's estimated overhead for a record: offsets and validity of a few columns.
ROW_BYTES = 128
# A block's decoded size is estimated from the sample's, times this margin.
MARGIN = 1.5

_LENGTH = struct.Struct("<QI")


class TfRecord:
    """The TFRecord format, plain and compressed."""

    name = "tfrecord"
    suffixes = BY_FORMAT["tfrecord"]
    index_version = 1  # raised when indexes got the features of the whole shard

    def index(self, shard: ShardReader) -> ShardIndex:
        """Implement `Format.index`: one pass over the records."""
        require_bytes(shard.url, shard.size_bytes, "TFRecord")
        window = Window(shard)
        compressed = _is_compressed(window.view(0, HEADER_BYTES))
        source: ByteSource = Inflated(shard) if compressed else window
        sample = _sampled(source)
        survey = _Survey(source, sample)
        runs: list[tuple[int, int, int]] = []
        start = end = rows = count = 0
        size = None if compressed else shard.size_bytes
        for at, stop in _records(source, 0, size):
            if rows and not compressed and stop + TRAILER_BYTES - start > BLOCK_BYTES:
                runs.append((rows, start, end))
                start, rows = end, 0
            rows, end, count = rows + 1, stop + TRAILER_BYTES, count + 1
            if count > sample.records:
                survey.note(at, stop)
        if rows:
            runs.append((rows, start, end))
        features, growth = survey.features(), survey.growth()
        blocks = [_block(*run, growth) for run in runs]
        if compressed:
            place = Region(0, shard.size_bytes)
            blocks = [Block(block.rows, place, block.decoded_bytes) for block in blocks]
        schema = inferred_schema(
            {_name(shard.url, name): features[name].type for name in sorted(features)}
        )
        nulls = array("q")
        for name in sorted(features):
            present = sample.features[name].present if name in sample.features else 0
            lacking = sample.records - sample.bad - present
            nulls.append(lacking if lacking or sample.records == count else UNKNOWN)
            if features[name].is_list:
                nulls.append(NEVER)  # list items: the values of a feature are never null
        return ShardIndex(schema, tuple(blocks), Region(0, 0), zero_copy=False, nulls=nulls)

    def decode(self, block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
        """Implement `Format.decode`; a SchemaMismatch names the record."""
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
        if len(columns) == len(schema):
            _refuse_unknown(records, starts, schema.names, source.url)
        arrays = {
            name: _column(body, records, starts, schema.field(name), source.url) for name in columns
        }
        return batch_of(arrays, schema, columns, block)

    def rows_apart(self, block: RawBlock) -> Sequence[int] | None:
        """Return where the records of a block begin in its bytes, and its end; None if they are
        compressed.
        """
        if holds_compressed(block) and _is_compressed(block.body[:HEADER_BYTES]):
            return None
        source = block_source(block, compressed=False)
        base, length = source.base, source.length
        records = _records(source, base, base + length)
        return [*(at - HEADER_BYTES - base for at, _ in records), length]


def _masked_crc(piece: memoryview) -> int:
    # This C function accepts numpy's view without a copy.
    crc: int = google_crc32c.value(np.frombuffer(piece, np.uint8))
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _is_compressed(head: memoryview) -> bool:
    """Return whether a shard is compressed. The length of a plain record may look like gzip's magic
    bytes, but then the checksum of that length is correct.
    """
    if not is_compressed(bytes(head[:4])):
        return False
    return len(head) < HEADER_BYTES or _masked_crc(head[:8]) != _LENGTH.unpack(head)[1]


def _has_right_length(header: memoryview) -> bool:
    length, crc = _LENGTH.unpack(header[:HEADER_BYTES])
    return bool(length <= RECORD_BYTES_MAX and crc == _masked_crc(header[:8]))


def _records(
    source: ByteSource, at: int, end: int | None, number: int = 0
) -> Iterator[tuple[int, int]]:
    """Yield the place of each payload. `end` is None if it is not known yet; the first record has
    number `number`.

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
        if end is not None and at > end:
            raise _cut_off(source.url, start, length, number)
        yield start, start + length
        # If the end is not known, read the record's last byte to find out whether the record is
        # complete. Do so after the yield, since a compressed source is only read forward.
        if end is None and not len(source.view(at - 1, 1)):
            raise _cut_off(source.url, start, length, number)
        number += 1


def _cut_off(url: str, start: int, length: int, number: int) -> CorruptShard:
    return corrupt(
        url,
        start - HEADER_BYTES,
        f"record {number} is truncated",
        expected=f"a record of {length} bytes",
        found="the end of the shard",
    )


def _check_payload(source: ByteSource, at: int, stop: int) -> None:
    record = source.view(at, stop - at + TRAILER_BYTES)
    stored = int.from_bytes(record[-TRAILER_BYTES:], "little")
    computed = _masked_crc(record[:-TRAILER_BYTES])
    if stored != computed:
        raise corrupt(
            source.url,
            at,
            f"the payload of the record at byte {at - HEADER_BYTES} is damaged (checksum)",
            expected=f"{computed:#010x}",
            found=f"{stored:#010x}",
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


class _Features(Struct):
    """Facts about one feature: its kind, the number of records that have it, and whether any
    record has no value or several values in it.
    """

    kind: int
    present: int = 0
    is_list: bool = False

    @property
    def type(self) -> pa.DataType:
        value = example.KIND_TYPES[self.kind]
        return pa.list_(value) if self.is_list else value


class _Sample(Struct, frozen=True):
    """Facts from the first records of a shard: their features, their number, how many of them are
    damaged, which decoding reports, and the number of decoded bytes per stored byte.
    """

    features: dict[bytes, _Features]
    growth: float
    records: int
    bad: int


def _sampled(source: ByteSource) -> _Sample:
    """Collect the facts from the records of the first block."""
    head = source.view(0, BLOCK_BYTES)
    features: dict[bytes, _Features] = {}
    fault: CorruptShard | None = None
    at = decoded = records = bad = 0
    for _ in range(SAMPLE_RECORDS):
        if at + HEADER_BYTES > len(head):
            break
        length = _LENGTH.unpack(head[at : at + HEADER_BYTES])[0]
        end = at + HEADER_BYTES + length + TRAILER_BYTES
        if at == 0 and end > len(head) and _has_right_length(head):
            head = source.view(0, end)
        if end > len(head):
            # The record runs over the end of the sample, is truncated, or is damaged: the pass over
            # all records finds out.
            break
        sample = Memory(source.url, head[:end], 0)
        start, stop = next(_records(sample, at, end, records))
        try:
            _check_payload(sample, start, stop)
            parsed = _parsed(head, source.url, 0, start, stop)
        except CorruptShard as error:
            bad, fault = bad + 1, error
        else:
            decoded += _note(features, parsed, head, source.url, at)
        at, records = end, records + 1
    if fault is not None and 2 * bad > records:
        raise fault
    return _Sample(features, MARGIN * max(1.0, decoded / max(1, at)), records, bad)


def _note(
    features: dict[bytes, _Features],
    record: Mapping[bytes, example.Feature],
    body: memoryview,
    url: str,
    offset: int,
) -> int:
    """Note the features of a record, and return their decoded size in bytes.

    Raises:  SchemaMismatch: a feature has another kind than in earlier records.
    """
    decoded = 0
    for name, feature in record.items():
        if feature.kind == example.EMPTY:
            continue
        known = features.setdefault(name, _Features(feature.kind))
        if known.kind != feature.kind:
            raise _other_kind(url, offset, name, known.kind, feature.kind)
        known.present += 1
        count = example.value_count(body, feature)
        known.is_list |= count != 1
        stored = sum(b - a for a, b in feature.spans)
        decoded += 8 * count if feature.kind == example.INTS else stored
    return decoded


class _Survey:
    """Searches a shard's records for features that its sample lacks. Only records with such
    features are parsed; features of payloads beyond 1 MiB stay unknown, since indexing does not
    read them.
    """

    def __init__(self, source: ByteSource, sample: _Sample) -> None:
        self._source, self._sample = source, sample
        self._late: dict[bytes, _Features] = {}
        self._known = KnownNames(example.written_names(sample.features))
        self._records: list[tuple[int, memoryview]] = []
        self._held_bytes = 0
        self._late_growth = 0.0

    def note(self, at: int, stop: int) -> None:
        """Note the record whose payload is at [at, stop).

        Raises:  SchemaMismatch: a feature has several kinds.
        """
        if stop - at > NEAR_BYTES:
            return
        record = self._source.view(at, stop - at + TRAILER_BYTES)
        self._records.append((at, record))
        self._held_bytes += len(record)
        if self._held_bytes >= BLOCK_BYTES:
            self._look_through()

    def features(self) -> dict[bytes, _Features]:
        """Return the features of the sample and of the other records.

        Raises:  SchemaMismatch: a feature has several kinds.
        """
        self._look_through()
        return self._sample.features | self._late

    def growth(self) -> float:
        """Estimate the decoded bytes per stored byte."""
        return self._sample.growth + MARGIN * self._late_growth

    def _look_through(self) -> None:
        url, decoded = self._source.url, 0
        pieces = [record for _, record in self._records]
        for number in example.with_others(pieces, TRAILER_BYTES, self._known):
            at, record = self._records[number]
            stop = at + len(record) - TRAILER_BYTES
            try:
                _check_payload(Memory(url, record, at), at, stop)
                parsed = _parsed(record, url, at, at, stop)
            except CorruptShard:
                continue  # decoding reports the damage, if the block is ever read
            late = {
                name: feature
                for name, feature in parsed.items()
                if name not in self._sample.features
            }
            decoded += _note(self._late, late, record, url, at - HEADER_BYTES)
        self._late_growth = max(self._late_growth, decoded / max(1, self._held_bytes))
        self._records, self._held_bytes = [], 0


def _name(url: str, name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError as fault:
        raise corrupt(url, 0, f"the feature name {name!r} is not UTF-8") from fault


def _other_kind(url: str, offset: int, name: bytes, expected: int, kind: int) -> SchemaMismatch:
    field = name.decode("utf-8", "replace")
    return SchemaMismatch(
        f"{url}: the record at byte {offset} has {field!r} as {example.KIND_NAMES[kind]}, records "
        f"before it as {example.KIND_NAMES[expected]}; write one kind for each feature",
        shard=url,
        offset=offset,
        field=field,
        expected=example.KIND_NAMES[expected],
        found=example.KIND_NAMES[kind],
    )


def _refuse_unknown(
    records: Sequence[Mapping[bytes, example.Feature]],
    starts: Sequence[int],
    names: Collection[str],
    url: str,
) -> None:
    """Refuse a feature that is in no column, since a job that reads all columns would miss it.

    Raises:  SchemaMismatch.
    """
    known = frozenset(name.encode() for name in names)
    for number, record in enumerate(records):
        if record.keys() <= known:
            continue
        name = next(
            (
                n
                for n, feature in record.items()
                if n not in known and feature.kind != example.EMPTY
            ),
            None,
        )
        if name is not None:
            field = name.decode("utf-8", "replace")
            raise SchemaMismatch(
                f"{url}: record {number} of its block, at byte {starts[number]}, has a feature "
                f"{field!r}, which indexing did not see: of records beyond 1 MiB, it reads only "
                f"those among the first {SAMPLE_RECORDS} and the first 4 MiB of a shard. Put a "
                "record that has it at the start of a shard, or leave the feature out with "
                f"columns=[…]: {', '.join(names)}",
                shard=url,
                offset=starts[number],
                field=field,
                expected="no such feature",
                found=example.KIND_NAMES[record[name].kind],
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
        feature = record.get(name)
        if feature is not None and feature.kind not in {kind, example.EMPTY}:
            raise _other_kind(url, starts[number], name, kind, feature.kind)
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
