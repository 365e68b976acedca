"""Write packs into the columns of a slab, using kernel.c."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from dataplane.model.errors import RowOutOfBounds
from dataplane.plan.packs import PACK_BITS, Packs, documents_max
from dataplane.worker.columns import BlockColumns, Bytes, Ints, RowIndex
from dataplane.worker.kernel import kernel
from dataplane.worker.pack_blocks import PackBlock, PackForm


def write_packs(
    form: PackForm,
    blocks: Sequence[PackBlock],
    index: RowIndex,
    places: Ints,
    columns: Sequence[Bytes],
) -> None:
    """Write every column of these packs, which are rows `places` of the slab.

    Shapes:  index: int32[n, 2], (block, pack and key).   places: int64[n].   columns: uint8[bytes].
    Raises:  RowOutOfBounds: there is no such pack, or a document is not where its block says.
    """
    tables = [
        (
            *(each.starts.ctypes.data, each.pieces.ctypes.data, each.pieces.shape[1], len(each)),
            *(block.columns.table.ctypes.data, block.columns.rows),
        )
        for block in blocks
        for each in block.packs or ()
    ]
    firsts = [0, *itertools.accumulate(len(block.packs or ()) for block in blocks)]
    outputs = [
        (kind, out.ctypes.data, *facts)
        for (kind, *facts), out in zip(form.outputs, columns, strict=True)
    ]
    # Keep these arrays alive until the kernel has returned: the kernel gets only their addresses.
    packs, cuts, into = (np.array(each, np.int64) for each in (tables, firsts, outputs))
    pack = form.pack
    packing = np.array(
        [
            *(packs.ctypes.data, cuts.ctypes.data, len(blocks), into.ctypes.data, len(outputs)),
            *(pack.length, pack.multiple, documents_max(pack) + 2),
        ],
        np.int64,
    )
    failed = kernel().gather_packs(
        packing.ctypes.data, index.ctypes.data, places.ctypes.data, len(places)
    )
    if failed >= 0:
        _drawn(blocks, index)  # raises a better error if a pack does not exist
        raise RowOutOfBounds(
            f"the documents of pack {failed} of a slab are not where their block says: please"
            " report this bug in Dataplane, unless memory changed while it was read",
            row=failed,
        )


class _Drawn(Struct, frozen=True, eq=False):
    """The packs of the blocks of a slab, by block and key, and which of them the slab has.

    Shapes:  tables, numbers: int64[n]; pack numbers[i] of packs[tables[i]].
    """

    packs: Sequence[tuple[BlockColumns, Packs]]
    tables: Ints
    numbers: Ints


def _drawn(blocks: Sequence[PackBlock], index: RowIndex) -> _Drawn:
    """Find the packs of the index.   Raises:  RowOutOfBounds: there is no such pack."""
    block, row = index.astype(np.int64).T
    outside = (block < 0) | (block >= len(blocks)) | (row < 0)
    if outside.any():
        raise RowOutOfBounds("a slab has a row of no block", row=int(outside.argmax()))
    key_counts = np.array([len(one.packs or ()) for one in blocks], np.int64)
    key, numbers = row >> PACK_BITS, row & ((1 << PACK_BITS) - 1)
    outside = key >= key_counts[block]
    if outside.any():
        raise RowOutOfBounds(
            "a slab names a pack by a key that the block of the pack does not have",
            row=int(outside.argmax()),
        )
    packs = [(one.columns, each) for one in blocks for each in one.packs or ()]
    tables = (np.cumsum(key_counts) - key_counts)[block] + key
    counts = np.array([len(each) for _, each in packs], np.int64)[tables]
    outside = numbers >= counts
    if outside.any():
        at = int(outside.argmax())
        raise RowOutOfBounds(
            f"a slab has pack {numbers[at]} of a block of {counts[at]}: the dataset, or what a map"
            " makes of it, is not what it was when packs were counted. If it is, please report"
            " this bug in Dataplane",
            row=at,
        )
    return _Drawn(packs, tables, numbers)
