"""Blocks that are open for gathering. Single rows of them can be gathered into scratch memory as a
test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from msgspec import Struct

from dataplane.arena.slab_layout import NUMBER_BYTES, row_numbers_bytes
from dataplane.model.changes import ReplacedRow
from dataplane.model.errors import CorruptShard, ImageError, RowOutOfBounds
from dataplane.model.records import ColumnSpec
from dataplane.rpc import tasks
from dataplane.rpc.messages import Batch
from dataplane.worker.columns import (
    BlockColumns,
    Bytes,
    Ints,
    RowIndex,
    RowLayout,
    by_block,
    open_block,
)
from dataplane.worker.decoding import ReadDataset
from dataplane.worker.gather import Gather
from dataplane.worker.mapped import MappedShard
from dataplane.worker.pack_blocks import PackBlock, PackForm
from dataplane.worker.packing import CountGather, PackGather, packed_batch
from dataplane.worker.row_layout import open_stored, rows_of_block, store_rows
from dataplane.worker.rows import TriedImages

if TYPE_CHECKING:
    from dataplane.worker.image_decoding import SlabImages

# -- excerpts --------------------------------------------------------------------------------------
#
# Excerpts: some rows of a canonical block, which stay in memory when the block must go.
#
# An excerpt in the block arena starts with the numbers of its rows in the block, int32, rising. The
# rows follow from a multiple of a cache line on, stored as a block is. Row indexes name rows by
# their numbers in the block, also if they are gathered from an excerpt.


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


_APART_BYTES = 1 << 20


class OpenBlock(Struct, frozen=True):
    """A block to gather from: the mapped file of its rows, if any, which rows it has, and the
    restart indexes of its images. `numbers` are the rows of an excerpt, None for a whole block.
    `replaced` are the rows with the content of others, by their numbers in the block.
    """

    columns: BlockColumns
    shard: MappedShard | None
    origin: tasks.Origin | None
    restart_indexes: Bytes | None
    numbers: Ints | None
    replaced: Mapping[int, ReplacedRow] = {}


def slab_images_of(
    dataset: ReadDataset,
    blocks: Sequence[OpenBlock],
    render: tasks.Render | None,
    row_index: RowIndex,
    tried: TriedImages | None = None,
) -> SlabImages | None:
    """Return the image columns of rows of these blocks, if there are any. If `tried` is given,
    images that cannot be decoded are noted there.

    Shapes:  row_index: int32[rows, 2].
    """
    if render is None:
        return None
    # Import Pillow and libjpeg only if there are images.
    from dataplane.worker.image_decoding import SlabImages

    origins = [block.origin for block in blocks if block.origin is not None]
    assert len(origins) == len(blocks)
    restart_indexes = [block.restart_indexes for block in blocks]
    numbers = row_index[:, 1].copy()
    return SlabImages(render, dataset.plan.specs, origins, restart_indexes, numbers, tried)


def gather_apart(
    dataset: ReadDataset, block: OpenBlock, rows: Sequence[int], render: tasks.Render | None
) -> None:
    """Gather rows of one block into scratch memory."""
    index = np.array([(0, row) for row in rows], np.int32).reshape(-1, 2)
    slab_images = slab_images_of(dataset, [block], render, index)
    specs = dataset.plan.specs if slab_images is None else slab_images.specs
    index = places_of(index, [block.numbers])
    batches = (Batch(0, len(rows), len(rows)),)
    lists = dataset.plan.lists
    gather = Gather(specs, [block.columns], index, batches, slab_images=slab_images, lists=lists)
    scratch(gather)


def image_fault(
    dataset: ReadDataset, render: tasks.Render, block: OpenBlock, row: int
) -> ImageError | None:
    """Return the fault of the images of a block's row, drawn as in this epoch; None if they can be
    decoded.
    """
    try:
        gather_apart(dataset, block, [row], render)
    except ImageError as error:
        return error
    return None


def check_images(dataset: ReadDataset, raw: tasks.RawBlockRef, batch: pa.RecordBatch) -> None:
    """Check that the images of a row of a decoded block can be decoded, as in epoch 0.

    Raises:  CorruptShard: those of no row can.
    """
    origin = tasks.Origin(raw.url, raw.shard, raw.first_row, bool(raw.stored_rows))
    block = OpenBlock(open_block(batch, dataset.plan.specs), None, origin, None, None)
    render, fault = tasks.Render(dataset.images, dataset.seed, 0), None
    for row in range(batch.num_rows):
        fault = image_fault(dataset, render, block, row)
        if fault is None:
            return
    raise CorruptShard(
        f"{raw.url}: no image of block {raw.index} can be decoded: {fault}", shard=raw.url
    )


def scratch(gather: Gather | PackGather | CountGather) -> None:
    """Gather into memory that nobody reads."""
    room = bytearray(_APART_BYTES)
    needed = gather.into(memoryview(room)).bytes_needed
    if needed:
        gather.into(memoryview(bytearray(needed)))
