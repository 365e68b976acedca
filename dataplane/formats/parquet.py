"""Parquet: a block is a row group, the preamble is the footer.

Only the footer is read to index a shard. A block's place spans the pages of all its columns, so one
ranged read fetches it; where fewer columns are wanted, several that leave out what lies between
them. Page checksums are verified where the writer put them in; a Parquet file without them (the
default of most writers) cannot show a flipped bit that still decompresses, see `docs/formats.md`.

Source:  https://parquet.apache.org/docs/file-format/
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

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
from dataplane.formats.parquet_footers import MAGIC, Footers, parsed
from dataplane.formats.parquet_nulls import HISTOGRAM, NULL_COUNT, NullCounter
from dataplane.formats.splice import spliced
from dataplane.formats.thrift import Shape, struct
from dataplane.model import Region
from dataplane.suffixes import BY_FORMAT

TAIL_BYTES = 64 << 10
_footers = Footers()
_DEPTH_MAX = 256
# Bytes of a decoded value, by physical type: BOOLEAN, INT32, INT64, INT96, FLOAT, DOUBLE and
# BYTE_ARRAY. That of FIXED_LEN_BYTE_ARRAY is in the schema.
_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 8, 4: 4, 5: 8, 6: 0}
# Of FileMetaData: the schema's types, lengths and child counts; each row group's columns and rows;
# of each column its file, what its pages hold (number of values, sizes, offsets, bounds, nulls) and
# how it is encrypted.
_BOUNDS = (1, 2, 5, 6)
_STATISTICS: Shape = {**dict.fromkeys(_BOUNDS), **NULL_COUNT}
_COLUMN: Shape = {
    **dict.fromkeys((5, 6, 7, 9, 11)),
    12: _STATISTICS,
    16: HISTOGRAM,
}
_FOOTER: Shape = {
    2: {1: None, 2: None, 3: None, 5: None},
    3: None,
    4: {1: {1: None, 3: _COLUMN, 8: None}, 3: None},
    8: None,
}


class Parquet:
    """The Parquet format."""

    name = "parquet"
    suffixes = BY_FORMAT["parquet"]

    def index(self, shard: ShardReader) -> ShardIndex:
        """As `Format.index`: reads the footer and nothing else."""
        footer, raw = _footer(shard)
        with foreign_faults(shard.url, footer.offset, "the Parquet footer is damaged"):
            try:
                facts = struct(raw[:-8], _FOOTER)
                blocks = tuple(_blocks(facts, shard.url, footer))
                found = sum(block.rows for block in blocks)
                if facts[3] > found:  # less than that is what early writers in Rust say
                    raise ValueError(f"{facts[3]} rows, and {found} in its row groups")
                counter = NullCounter(facts[2])
                for row_group in facts[4]:
                    if row_group[3]:
                        counter.add(row_group[1])
            except (TypeError, AttributeError) as fault:
                raise ValueError("a field has another type than the format says") from fault
            except KeyError as fault:
                raise ValueError(f"field {fault} of a structure is missing") from fault
            schema = parsed(raw).metadata.schema.to_arrow_schema()
            nulls = array("q", counter.counts(schema))
        relaxed = dataset_schema(schema, shard.url)
        return ShardIndex(relaxed, blocks, footer, zero_copy=False, nulls=nulls)

    def decode(self, block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
        """As `Format.decode`."""
        url, start = block.url, block.place.offset
        with foreign_faults(url, block.preamble_place.offset, "the Parquet footer is damaged"):
            footer = _footers.of(url, block.preamble)
            metadata, group = footer.metadata, footer.groups[block.index]
        pieces = [*_pieces(block), (block.preamble_place.offset, block.preamble)]
        with foreign_faults(url, start, f"row group {group} cannot be decoded"):
            opened = pq.ParquetFile(
                spliced(block.shard_bytes, pieces),
                metadata=metadata,
                memory_map=False,
                pre_buffer=False,  # in threads of Arrow's, which may outlive the interpreter
                page_checksum_verification=True,
            )
            found = opened.schema_arrow
            as_stored, leaves = is_as_stored(found, schema, columns), None
            if not as_stored:
                check_shard(found, schema, columns, url)
                leaves = _leaves(found, columns, metadata.num_columns)
            table = opened.reader.read_row_group(group, column_indices=leaves, use_threads=False)
            batches = table.to_batches() if as_stored and table.schema.equals(schema) else []
            if len(batches) == 1:
                check_rows(url, start, block.rows, table.num_rows)
                return validated(batches[0], url, start)
            arrays = {name: _one_array(table, name, url, start) for name in columns}
            check_rows(url, start, block.rows, table.num_rows if columns else block.rows)
            batch = batch_of(arrays, schema, columns, block.rows)
        return validated(batch, url, start)


def _footer(shard: ShardReader) -> tuple[Region, bytes]:
    """The footer's place, from the metadata to the end of the file, and its bytes."""
    url, size = shard.url, shard.size_bytes
    require_bytes(url, size, "Parquet")
    tail = bytes(memoryview(shard.read(max(0, size - TAIL_BYTES), min(size, TAIL_BYTES))))
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


def _blocks(facts: dict[int, Any], url: str, footer: Region) -> Iterator[Block]:
    if 8 in facts:
        raise corrupt(url, footer.offset, "encrypted Parquet files are not supported; decrypt it")
    _check_depth(facts[2])
    leaves = [element for element in facts[2] if not element.get(5)]
    widths = [_WIDTHS.get(leaf.get(1, -1), leaf.get(2, 0)) for leaf in leaves]
    top_level = _top_level(facts[2])
    for group, row_group in enumerate(facts[4]):
        rows, columns = row_group[3], row_group[1]
        if rows < 0 or len(columns) != len(widths):
            raise ValueError(f"row group {group} has {rows} rows, {len(columns)} columns")
        if rows == 0:
            continue
        start, end = footer.offset, 4
        places, sizes = [], []
        for at, column in enumerate(columns):
            first, last = _pages(column, url, footer)
            if not 4 <= first <= last <= footer.offset:
                raise corrupt(
                    url,
                    footer.offset,
                    f"row group {group}, column {at} lies outside of the file",
                    expected=f"bytes 4 to {footer.offset}",
                    found=f"{first} to {last}",
                )
            start, end = min(start, first), max(end, last)
            places.append((first, last))
            # Each column has its validity, and each list its offsets.
            sizes.append(9 * rows + _decoded_bytes(column[3], widths[at]))
        if not columns:
            raise ValueError(f"row group {group} has no columns")
        columns_at = array("q")
        for leaves_of in top_level:
            first = min(places[leaf][0] for leaf in leaves_of)
            last = max(places[leaf][1] for leaf in leaves_of)
            size = sum(sizes[leaves_of.start : leaves_of.stop])
            columns_at.extend((first - start, last - first, size))
        yield Block(rows, Region(start, end - start), sum(sizes), columns_at)


def _top_level(elements: list[dict[int, Any]]) -> list[range]:
    """The leaves of each top-level column: groups come before their children."""
    found: list[range] = []
    leaf, open_groups = 0, [elements[0].get(5, 0)]
    for element in elements[1:]:
        if len(open_groups) == 1:
            found.append(range(leaf, leaf))
        open_groups[-1] -= 1
        children = element.get(5, 0)
        if children:
            open_groups.append(children)
        else:
            leaf += 1
            found[-1] = range(found[-1].start, leaf)
        while len(open_groups) > 1 and open_groups[-1] == 0:
            open_groups.pop()
    return found


def _pieces(block: RawBlock) -> list[tuple[int, memoryview]]:
    """What of the shard is there, each with its offset in it."""
    at, found = 0, []
    for piece in block.pieces or (block.place,):
        found.append((piece.offset, block.body[at : at + piece.length]))
        at += piece.length
    return found


def _check_depth(elements: list[dict[int, Any]]) -> None:
    """The schema lists each group before its children; other readers follow it by recursion."""
    open_groups: list[int] = []
    for element in elements:
        while open_groups and open_groups[-1] == 0:
            open_groups.pop()
        if open_groups:
            open_groups[-1] -= 1
        open_groups.append(element.get(5, 0))
        if len(open_groups) > _DEPTH_MAX:
            raise ValueError(f"columns are nested deeper than {_DEPTH_MAX} levels")


def _pages(column: dict[int, Any], url: str, footer: Region) -> tuple[int, int]:
    """Where a column's pages lie; the dictionary, where there is one, comes first."""
    if column.get(1):
        raise corrupt(url, footer.offset, "columns in other files are not supported")
    if 8 in column or 3 not in column:
        raise corrupt(url, footer.offset, "encrypted Parquet columns are not supported; decrypt it")
    facts = column[3]
    first: int = facts[9]
    if 0 < facts.get(11, 0) < first:
        first = facts[11]
    return first, first + max(-1, facts[7])


def _decoded_bytes(facts: dict[int, Any], width: int) -> int:
    """An estimate that rather errs upwards: pages may hold each distinct value only once."""
    values = int(max(0, facts[5]))
    if width:
        return values * (width + 1)
    size = values * 9 + int(max(0, facts[6]))
    if facts.get(11):
        bounds = facts.get(12, {})
        longest = max((len(bounds.get(bound, b"")) for bound in _BOUNDS), default=0)
        size += values * max(16, longest)
    return size


def _leaf_count(kind: pa.DataType) -> int:
    """How many Parquet columns an Arrow type is stored as."""
    if isinstance(kind, pa.BaseExtensionType):
        return _leaf_count(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _leaf_count(kind.value_type)
    if pa.types.is_nested(kind):
        return sum(_leaf_count(kind.field(i).type) for i in range(kind.num_fields))
    return 1


def _leaves(schema: pa.Schema, columns: Sequence[str], leaf_total: int) -> list[int]:
    """The Parquet columns of top-level columns, by place: their dotted paths may be ambiguous."""
    spans: dict[str, range] = {}
    at = 0
    for field in schema:
        spans[field.name] = range(at, at + _leaf_count(field.type))
        at = spans[field.name].stop
    if at != leaf_total:
        raise ValueError(f"the schema has {at} leaf columns, the footer {leaf_total}")
    return [leaf for name in columns for leaf in spans[name]]


def _one_array(table: pa.Table, name: str, url: str, offset: int) -> pa.Array:
    column = table.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        if column.num_chunks != 1:
            raise corrupt(
                url,
                offset,
                f"column {name!r} decodes to more than 2 GiB in one row group; write smaller "
                "row groups, or the column as large_string or large_binary",
            )
        column = column.chunk(0)
    return column
