"""Count the rows of blocks that belong to a view; runs in an indexing process.

A block whose statistics decide the condition for all of its rows is not read. Of other blocks, only
the columns that the view needs are read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from dataplane.formats import registry
from dataplane.formats.base import ColumnBounds, Format, RawBlock, ShardReader
from dataplane.model.errors import CorruptShard
from dataplane.model.records import Region
from dataplane.rpc import tasks
from dataplane.transforms.row_filter import BlockRows, RowFilter

_READ_BYTES_MAX = 8 << 20
# Reading takes most of the time; decoding takes memory.
_decoding = threading.BoundedSemaphore(2)


def counts_of(shard: ShardReader, order: tasks.CountRows) -> bytes:
    """Count the rows of each block that belong to the view, as little-endian int64.

    Raises:  CorruptShard.  ConfigError: the condition cannot be evaluated.
    """
    schema = pa.ipc.read_schema(pa.py_buffer(order.schema))
    format_, rows = registry.by_name(order.format), RowFilter.of(order.view, schema)
    assert rows is not None
    place = order.blocks[0].preamble_place
    preamble = memoryview(bytes(shard.read(place.offset, place.length) if place.length else b""))
    known = _bounds(format_, order, preamble, rows)
    counts = np.zeros(len(order.blocks), "<i8")
    for at, block in enumerate(order.blocks):
        stored = BlockRows(block.stored_rows, block.first_row, block.shard_word)
        count = rows.count_known(known[at], stored)
        if count is None:
            count = _counted(shard, order, block, preamble, rows)
        counts[at] = count
    return counts.tobytes()


def _bounds(
    format_: Format, order: tasks.CountRows, preamble: memoryview, rows: RowFilter
) -> list[Mapping[str, ColumnBounds]]:
    """Return the bounds that the shard states for each block's columns, if its format has any."""
    column_bounds = getattr(format_, "column_bounds", None)
    if column_bounds is None or rows.condition is None:
        return [{}] * len(order.blocks)
    blocks = [block.index for block in order.blocks]
    found: list[Mapping[str, ColumnBounds]] = column_bounds(
        order.url, preamble, blocks, rows.condition.fields
    )
    return found


def _counted(
    shard: ShardReader,
    order: tasks.CountRows,
    block: tasks.RawBlockRef,
    preamble: memoryview,
    rows: RowFilter,
) -> int:
    pieces = [part for piece in block.pieces or (block.place,) for part in _parts(piece)]
    body = memoryview(b"".join(map(memoryview, shard.read_all(pieces))))
    raw = RawBlock(
        order.url, block.index, block.stored_rows, block.place, order.size_bytes,
        block.preamble_place, preamble, body, block.pieces,
    )  # fmt: skip
    schema = pa.ipc.read_schema(pa.py_buffer(order.schema))
    with _decoding:
        batch = registry.by_name(order.format).decode(raw, schema, rows.columns)
        if batch.num_rows != block.stored_rows:
            raise CorruptShard(
                f"{order.url}: block {block.index} has {batch.num_rows} rows, its index says "
                f"{block.stored_rows}",
                shard=order.url,
                expected=block.stored_rows,
                found=batch.num_rows,
            )
        stored = BlockRows(block.stored_rows, block.first_row, block.shard_word)
        return int(np.count_nonzero(rows.mask(batch, stored)))


def _parts(piece: Region) -> Iterator[Region]:
    """Cut a region into pieces that fit into a message."""
    end = piece.offset + piece.length
    for at in range(piece.offset, end, _READ_BYTES_MAX):
        yield Region(at, min(_READ_BYTES_MAX, end - at))
