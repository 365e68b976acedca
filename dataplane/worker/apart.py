"""Blocks that are open for gathering. Single rows of them can be gathered into scratch memory as a
test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from dataplane.model.changes import ReplacedRow
from dataplane.model.errors import ImageError
from dataplane.rpc import tasks
from dataplane.rpc.messages import Batch
from dataplane.worker.columns import BlockColumns, Bytes, Ints, RowIndex
from dataplane.worker.decoding import ReadDataset
from dataplane.worker.excerpts import places_of
from dataplane.worker.gather import Gather
from dataplane.worker.mapped import MappedShard
from dataplane.worker.packing import CountGather, PackGather
from dataplane.worker.rows import TriedImages

if TYPE_CHECKING:
    from dataplane.worker.image_decoding import SlabImages

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


def scratch(gather: Gather | PackGather | CountGather) -> None:
    """Gather into memory that nobody reads."""
    room = bytearray(_APART_BYTES)
    needed = gather.into(memoryview(room)).bytes_needed
    if needed:
        gather.into(memoryview(bytearray(needed)))
