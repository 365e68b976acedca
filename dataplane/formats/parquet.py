"""Parquet: a block is a row group, the preamble is the footer.

Indexing a shard reads only its footer. A block's place spans the pages of all its columns, so that
one ranged read fetches it; if fewer columns are requested, several reads leave out the bytes in
between. Page checksums are verified if the writer stored them. Without them (the default of most
writers), a flipped bit goes unnoticed if the page still decompresses: see `docs/formats.md`.

Source:  https://parquet.apache.org/docs/file-format/
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataplane.base.suffixes import BY_FORMAT
from dataplane.formats.arrays import joined
from dataplane.formats.base import Block, ColumnBounds, RawBlock, ShardIndex, ShardReader
from dataplane.formats.conform import (
    batch_of,
    check_rows,
    check_shard,
    dataset_schema,
    is_as_stored,
    validated,
)
from dataplane.formats.faults import corrupt, describe, foreign_faults, require_bytes
from dataplane.formats.parquet_columns import NullCounter, SchemaTree, bounds_of, schema_tree
from dataplane.formats.parquet_footers import (
    BYTES,
    COLUMN_COUNT,
    DECODED_BYTES,
    DICTIONARY,
    ENCRYPTED,
    FIELDS,
    FIRST_PAGE,
    FLAGS,
    LEVELS,
    LONGEST_BOUND,
    MAGIC,
    METADATA,
    OTHER_FILE,
    PRESENT,
    VALUES,
    FooterFacts,
    Footers,
    Int64,
    parsed,
    read_footer,
)
from dataplane.formats.source import PROBE_BYTES, spliced
from dataplane.model.errors import SchemaMismatch
from dataplane.model.records import Region

_footers = Footers()
# INT96 as the type of a column in a SchemaElement or ColumnMetaData, in compact Thrift.
_INT96 = re.compile(rb"\x15\x06")
_SECONDS_MAX = (1 << 63) // 10**9
_ESTIMATE_MAX = float(1 << 62)
_PARQUET_MR = re.compile(r"parquet-mr(?: version (\d+)\.(\d+)(?:\.(\d+))?)?")
_IN_PIECES = "chunked array"
_PARTS = 8
_SIZES_FIXED = (1, 2, 9)
_SLACK_BYTES = 100


class Parquet:
    """The Parquet format."""

    name = "parquet"
    suffixes = BY_FORMAT["parquet"]

    def first_reads(self, size_bytes: int) -> tuple[Region, ...]:
        """Return the range that `index` reads first: the end, where most footers fit."""
        return (_end(size_bytes),)

    def index(self, shard: ShardReader) -> ShardIndex:
        """Implement `Format.index`: read the footer and nothing else."""
        footer, raw = _footer(shard)
        with foreign_faults(shard.url, footer.offset, "the Parquet footer is damaged"):
            facts = read_footer(memoryview(raw)[:-8])
            tree = schema_tree(facts.elements)
            counter = NullCounter(tree.level_max)
            metadata = parsed(raw).metadata
            slack = _slack_bytes(metadata.created_by)
            blocks = tuple(_blocks(facts, tree, counter, shard.url, footer, slack))
            row_count = sum(block.rows for block in blocks)
            if facts.rows > row_count:  # accept fewer rows, which early writers in Rust state
                raise ValueError(f"it states {facts.rows} rows, its row groups {row_count}")
            schema = metadata.schema.to_arrow_schema()
            nulls = array("q", counter.counts(schema).tobytes())
        relaxed = dataset_schema(schema, shard.url)
        return ShardIndex(relaxed, blocks, footer, zero_copy=False, nulls=nulls)

    def column_bounds(
        self, url: str, preamble: memoryview, blocks: Sequence[int], names: Sequence[str]
    ) -> list[Mapping[str, ColumnBounds]]:
        """Return the bounds that the footer states for columns in these blocks of a shard."""
        with foreign_faults(url, 0, "the Parquet footer is damaged"):
            return bounds_of(_footers.of(url, preamble), blocks, names)

    def decode(self, block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
        """Implement `Format.decode`."""
        url, start = block.url, block.place.offset
        with foreign_faults(url, block.preamble_place.offset, "the Parquet footer is damaged"):
            metadata, group = _footers.group_of(block)
        with foreign_faults(url, start, f"row group {group} cannot be decoded"):
            opened = _opened(block, metadata)
            stored = opened.schema_arrow
            as_stored, leaves = is_as_stored(stored, schema, columns), None
            present = columns if as_stored else check_shard(stored, schema, columns, url)
            if not as_stored:
                leaves = _leaves(stored, present, metadata.num_columns)
            table = _read_group(opened.reader, group, leaves, block.rows)
            for name, own in _int96_columns(block.preamble, opened, present):
                again = _opened(block, metadata, int96_unit="s").reader
                seconds = again.read_row_group(group, column_indices=own, use_threads=False)
                _check_int96(table.column(name), name, seconds.column(0), block)
            batches = table.to_batches() if as_stored and table.schema.equals(schema) else []
            if len(batches) == 1:
                check_rows(url, start, block.rows, table.num_rows)
                return validated(batches[0], url, start)
            arrays = {name: joined(table.column(name).chunks) for name in present}
            check_rows(url, start, block.rows, table.num_rows if present else block.rows)
            batch = batch_of(arrays, schema, columns, block)
        return validated(batch, url, start)


def _end(size_bytes: int) -> Region:
    length = min(size_bytes, PROBE_BYTES)
    return Region(size_bytes - length, length)


def _footer(shard: ShardReader) -> tuple[Region, bytes]:
    """Read the footer; return its place, up to the end of the file, and its bytes."""
    url, size = shard.url, shard.size_bytes
    require_bytes(url, size, "Parquet")
    last = _end(size)
    tail = bytes(memoryview(shard.read(last.offset, last.length)))
    if size < 12 or tail[-4:] != MAGIC:
        head = bytes(memoryview(shard.read(0, min(size, 512))))
        if tail[-4:] == b"PARE":
            raise corrupt(url, size - 4, "encrypted Parquet files are not supported; decrypt it")
        if head[:4] == MAGIC:
            raise corrupt(
                url,
                size - 4,
                "the Parquet file is truncated, its footer is missing; upload it again",
                expected="PAR1",
                found=tail[-4:].hex(" "),
            )
        raise corrupt(url, 0, "not a Parquet file", expected="PAR1", found=describe(head))
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length > size - 4:
        raise corrupt(
            url,
            size - 8,
            "the length of the Parquet footer is wrong",
            expected=f"at most {size - 12} bytes",
            found=length - 8,
        )
    place = Region(size - length, length)
    if length <= len(tail):
        return place, tail[-length:]
    return place, bytes(memoryview(shard.read(place.offset, length)))


def _slack_bytes(created_by: str) -> int:
    """Return how many bytes after a column may belong to it. Early versions of parquet-mr did not
    count the header of the dictionary in a column's size (PARQUET-816), so readers must read more.
    """
    writer = _PARQUET_MR.match(created_by or "")
    if writer is None or tuple(int(part or 0) for part in writer.groups()) >= _SIZES_FIXED:
        return 0
    return _SLACK_BYTES


def _blocks(
    facts: FooterFacts,
    tree: SchemaTree,
    counter: NullCounter,
    url: str,
    footer: Region,
    slack: int,
) -> Iterator[Block]:
    """Yield the row groups that have rows, and add each to `counter`."""
    if facts.is_encrypted:
        raise corrupt(url, footer.offset, "encrypted Parquet files are not supported; decrypt it")
    column_ends = np.cumsum(facts.groups[:, COLUMN_COUNT]).tolist()
    level_ends = np.concatenate(([0], np.cumsum(facts.columns[:, LEVELS])))
    for group, (rows, count) in enumerate(facts.groups.tolist()):
        if rows == 0:  # some writers list no columns for such a group
            continue
        if rows < 0 or count != len(tree.widths):
            raise ValueError(f"row group {group} has {rows} rows, {count} columns")
        if not count:
            yield Block(rows, Region(0, len(MAGIC)), 0)
            continue
        end = column_ends[group]
        columns = facts.columns[end - count : end]
        first, last = _places(columns, group, url, footer)
        sizes = _sizes(columns, tree.widths, rows)
        start, stop = int(first.min()), min(int(last.max()) + slack, footer.offset)
        yield Block(
            rows,
            Region(start, stop - start),
            int(sizes.sum()),
            array("q", _columns_at(tree, first - start, last - start, sizes).tobytes()),
        )
        counter.add(columns, facts.levels[level_ends[end - count] : level_ends[end]])


def _places(columns: Int64, group: int, url: str, footer: Region) -> tuple[Int64, Int64]:
    """Return where each column's pages begin and end; a dictionary, if any, comes first."""
    flags = columns[:, FLAGS]
    if (flags & OTHER_FILE).any():
        raise corrupt(url, footer.offset, "columns in other files are not supported")
    if ((flags & ENCRYPTED) | (~flags & METADATA)).any():
        raise corrupt(url, footer.offset, "encrypted Parquet columns are not supported; decrypt it")
    for number in (FIRST_PAGE, BYTES, VALUES):
        _require(columns, number)
    first, dictionary = columns[:, FIRST_PAGE], columns[:, DICTIONARY]
    first = np.where((dictionary > 0) & (dictionary < first), dictionary, first)
    length = columns[:, BYTES]
    is_within = (first >= 4) & (first <= footer.offset) & (length >= 0)
    is_within &= length <= footer.offset - np.where(is_within, first, 0)
    if not is_within.all():
        at = int(np.argmin(is_within))
        raise corrupt(
            url,
            footer.offset,
            f"row group {group}, column {at} lies outside of the file",
            expected=f"bytes 4 to {footer.offset}",
            found=f"{first[at]} to {int(first[at]) + max(-1, int(length[at]))}",
        )
    return first, first + length


def _sizes(columns: Int64, widths: Int64, rows: int) -> Int64:
    """Estimate decoded sizes, too large rather than too small, since pages may store each distinct
    value once. Each column adds its validity, and each list its offsets.
    """
    is_open = widths == 0
    _require(columns[is_open], DECODED_BYTES)
    values = np.maximum(columns[:, VALUES], 0)
    decoded = np.maximum(columns[:, DECODED_BYTES], 0)
    has_dictionary = is_open & (columns[:, DICTIONARY] != 0)
    value_bytes = np.where(has_dictionary, np.maximum(columns[:, LONGEST_BOUND], 16) + 9.0, 9.0)
    value_bytes = np.where(is_open, value_bytes, np.abs(widths + 1.0))
    if (values * value_bytes + np.where(is_open, decoded, 0.0) + 9.0 * rows).sum() > _ESTIMATE_MAX:
        raise ValueError("its row groups cannot be as large as they claim")
    value_bytes = np.where(has_dictionary, np.maximum(columns[:, LONGEST_BOUND], 16) + 9, 9)
    sizes = np.where(is_open, values * value_bytes + decoded, values * (widths + 1))
    return 9 * rows + sizes


def _columns_at(tree: SchemaTree, first: Int64, last: Int64, sizes: Int64) -> Int64:
    """Return `Block.columns`, from the facts known about the leaves."""
    if (tree.first == tree.last).any():
        raise ValueError("a group of the schema has no columns")
    if len(tree.first) < len(first):
        first = np.minimum.reduceat(first, tree.first)
        last = np.maximum.reduceat(last, tree.first)
        sizes = np.add.reduceat(sizes, tree.first)
    return np.stack((first, last - first, sizes), axis=1).reshape(-1)


def _require(columns: Int64, number: int) -> None:
    if not (columns[:, FLAGS] & PRESENT[number]).all():
        raise ValueError(f"field {FIELDS[number]} of a structure is missing")


def _opened(
    block: RawBlock, metadata: pq.FileMetaData, int96_unit: str | None = None
) -> pq.ParquetFile:
    """Open the shard with only a block and the footer readable."""
    pieces = [*_pieces(block), (block.preamble_place.offset, block.preamble)]
    return pq.ParquetFile(
        spliced(block.shard_bytes, pieces),
        metadata=metadata,
        memory_map=False,
        pre_buffer=False,  # threads that read ahead may outlive the interpreter
        page_checksum_verification=True,
        coerce_int96_timestamp_unit=int96_unit,
    )


def _int96_columns(
    preamble: memoryview, opened: pq.ParquetFile, columns: Sequence[str]
) -> Iterator[tuple[str, range]]:
    """Yield the columns that contain INT96, with their leaves."""
    if not _INT96.search(preamble):
        return
    wanted, schema, end = frozenset(columns), opened.schema, 0
    for field in opened.schema_arrow:
        leaves = range(end, end + _leaf_count(field.type))
        end = leaves.stop
        if field.name in wanted and any(
            schema.column(leaf).physical_type == "INT96" for leaf in leaves
        ):
            yield field.name, leaves


def _check_int96(
    column: pa.ChunkedArray, name: str, in_seconds: pa.ChunkedArray, block: RawBlock
) -> None:
    """Refuse times that do not fit into nanoseconds: Arrow silently wraps them, so that the year
    9999 becomes 1816. They are found by comparing with seconds, which hold every INT96.

    Raises:  SchemaMismatch: shard, field, found.
    """
    before = 0
    for read, true in zip(column.chunks, in_seconds.chunks, strict=True):
        if next(_wrapped_times(read, true), None) is None:
            before += len(read)
            continue
        row = next(
            i for i in range(len(read)) if any(_wrapped_times(read.take([i]), true.take([i])))
        )
        time = next(_wrapped_times(read.take([row]), true.take([row])))
        raise SchemaMismatch(
            f"{block.url}: row {before + row} of block {block.index}: column {name!r} has {time}, "
            "but INT96 is read as nanoseconds, which end at 1677 and 2262: leave out the column "
            "with columns=[…], or write the shard again from "
            'pyarrow.parquet.read_table(path, coerce_int96_timestamp_unit="us")',
            shard=block.url,
            field=name,
            expected="a time from 1677-09-21 to 2262-04-11",
            found=time,
        )


def _wrapped_times(read: pa.Array, true: pa.Array) -> Iterator[str]:
    """Yield the times, nested or not, that differ between nanoseconds and seconds."""
    if read.type.equals(true.type):  # not INT96
        return
    if not pa.types.is_nested(read.type):
        nanoseconds, seconds = (
            times.drop_null().view(pa.int64()).to_numpy() for times in (read, true)
        )
        if not len(seconds) or (seconds.min() > -_SECONDS_MAX and seconds.max() < _SECONDS_MAX):
            return
        off = seconds - nanoseconds // 10**9
        # Early Arrow wrote times before 1970 with a negative time of day. Read as seconds, these
        # are 2**64 ns later. Accept them: they are whole microseconds here, but times that truly
        # are 2**64 ns later are not.
        is_early = (np.abs(off - 2**64 // 10**9) <= 1) & (nanoseconds % 1000 == 0)
        for at in np.flatnonzero((np.abs(off) > 1) & ~is_early).tolist():
            yield str(seconds[at].astype("M8[s]"))
        return
    for part, true_part in zip(_parts(read), _parts(true), strict=True):
        yield from _wrapped_times(part, true_part)


def _parts(array: pa.Array) -> list[pa.Array]:
    if pa.types.is_map(array.type):
        return [array.keys, array.items]
    return array.flatten() if pa.types.is_struct(array.type) else [array.flatten()]


def _read_group(reader: Any, group: int, leaves: Sequence[int] | None, rows: int) -> pa.Table:
    """Read columns of a row group. Texts of more than 2 GiB come in several chunks; inside lists
    and structs pyarrow cannot make chunks, so fewer rows are read at a time.
    """
    options = {"column_indices": leaves, "use_threads": False}
    part = rows
    while True:
        try:
            if part == rows:
                return reader.read_row_group(group, **options)
            return pa.Table.from_batches(reader.iter_batches(part, [group], **options))
        except pa.ArrowNotImplementedError as fault:
            if part == 1 or _IN_PIECES not in str(fault):
                raise
        part = -(-part // _PARTS)


def _pieces(block: RawBlock) -> list[tuple[int, memoryview]]:
    """Return the fetched pieces of the shard, each with its offset."""
    at, pieces = 0, []
    for piece in block.pieces or (block.place,):
        pieces.append((piece.offset, block.body[at : at + piece.length]))
        at += piece.length
    return pieces


def _leaf_count(kind: pa.DataType) -> int:
    """Return the number of Parquet columns that store an Arrow type."""
    if isinstance(kind, pa.BaseExtensionType):
        return _leaf_count(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _leaf_count(kind.value_type)
    if pa.types.is_nested(kind):
        return sum(_leaf_count(kind.field(i).type) for i in range(kind.num_fields))
    return 1


def _leaves(schema: pa.Schema, columns: Sequence[str], leaf_total: int) -> list[int]:
    """Return the indices of the Parquet columns that make up top-level columns. They are not found
    by dotted path, which may be ambiguous.
    """
    spans: dict[str, range] = {}
    at = 0
    for field in schema:
        spans[field.name] = range(at, at + _leaf_count(field.type))
        at = spans[field.name].stop
    if at != leaf_total:
        raise ValueError(f"the schema has {at} leaf columns, the footer {leaf_total}")
    return [leaf for name in columns for leaf in spans[name]]
