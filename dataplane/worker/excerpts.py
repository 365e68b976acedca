"""Excerpts: some rows of a canonical block, which stay in memory when the block must go.

An excerpt in the block arena starts with the numbers of its rows in the block, int32, rising. The
rows follow from a multiple of a cache line on, stored as a block is. Row indexes name rows by their
numbers in the block, also if they are gathered from an excerpt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataplane.arena.slab_layout import NUMBER_BYTES, row_numbers_bytes
from dataplane.model.errors import RowOutOfBounds
from dataplane.model.records import ColumnSpec
from dataplane.worker.columns import BlockColumns, Ints, RowIndex, RowLayout, by_block
from dataplane.worker.pack_blocks import PackBlock, PackForm
from dataplane.worker.packing import packed_batch
from dataplane.worker.row_layout import open_stored, rows_of_block, store_rows


def write_excerpt(
    block: BlockColumns, specs: Sequence[ColumnSpec], region: memoryview, row_count: int
) -> int:
    """Write the rows whose numbers are at the start of the region. Return the bytes that the
    excerpt needs; if the region has fewer, no row is written.

    Raises:  RowOutOfBounds: the block has no such row, or the row's values are not in its column.
    """
    others, packed = rows_of_block(block, specs, _numbers(region, row_count))
    head = row_numbers_bytes(row_count)
    return head + store_rows(others, packed, block.row_layout, region[head:])


def write_packs(form: PackForm, block: PackBlock, region: memoryview, row_count: int) -> int:
    """Write packs of the block, with the columns of packs; see `write_excerpt`.

    Raises:  RowOutOfBounds: there is no such pack.
    """
    packed = packed_batch(form, block, _numbers(region, row_count))
    head = row_numbers_bytes(row_count)
    return head + store_rows(packed, np.empty(0, np.uint8), None, region[head:])


def open_excerpt(
    region: memoryview, specs: Sequence[ColumnSpec], row_layout: RowLayout | None, row_count: int
) -> tuple[BlockColumns, Ints]:
    """Return the places of an excerpt's columns, and the numbers of its rows.

    Raises:  RowOutOfBounds: the region is too short for its rows, or a buffer for its column.
    """
    rows = region[row_numbers_bytes(row_count) :]
    return open_stored(rows, specs, row_layout), _numbers(region, row_count)


def _numbers(region: memoryview, row_count: int) -> Ints:
    return np.frombuffer(region[: row_count * NUMBER_BYTES], np.int32).astype(np.int64)


def places_of(row_index: RowIndex, numbers: Sequence[Ints | None]) -> RowIndex:
    """Replace each row number of the row index by the row's place in its excerpt; rows of whole
    blocks keep their numbers. `numbers` has the row numbers of each block's excerpt, or None for a
    whole block.

    Raises:  RowOutOfBounds: an excerpt lacks a row.
    """
    if all(each is None for each in numbers):
        return row_index
    found = np.array(row_index, np.int32, order="C")
    for block, rows, places in by_block(found):
        own = numbers[block] if 0 <= block < len(numbers) else None
        if own is None:
            continue
        at = np.minimum(own.searchsorted(rows), max(len(own) - 1, 0))
        is_there = own[at] == rows if len(own) else np.zeros(len(rows), np.bool_)
        if not is_there.all():
            first = int(places[int(np.argmin(is_there))])
            raise RowOutOfBounds(
                f"row {first} of a slab is not in the excerpt of its block", row=first
            )
        found[places, 1] = at
    return found
