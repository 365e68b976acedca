"""Assembles slabs of packs: pieces of documents of decoded blocks, side by side.

Invariants:
1. All bytes of a pack are written: bytes that no document takes are padding.

A padded batch is a pack in which each document takes a row. The memory of a padded batch is as long
as a pack; the batch takes its first rows * width values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
from msgspec import Struct
from msgspec.structs import astuple, replace

from dataplane.arena import slab_layout
from dataplane.arena.slab_layout import ALIGN_BYTES, SHAPE_BYTES, aligned, row_bytes
from dataplane.model.errors import RowOutOfBounds
from dataplane.model.records import ColumnSpec
from dataplane.plan.packs import PACK_BITS, Packing, Packs, documents_max, packing_of
from dataplane.rpc import tasks
from dataplane.rpc.messages import Batch, Column
from dataplane.transforms.packing import LENGTHS
from dataplane.worker.columns import BlockColumns, Bytes, Ints, RowIndex, by_block
from dataplane.worker.gather import Gathered
from dataplane.worker.kernel import kernel
from dataplane.worker.pack_blocks import PackBlock, PackForm, document_lengths
from dataplane.worker.rows import Rows

# -- drawn packs -----------------------------------------------------------------------------------
#
# Write packs into the columns of a slab, using kernel.c.


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


_NO_PACKING = astuple(Packing(0, 0, 0, 0, 0))


class PackGather:
    """Assembles one slab of packs, or only its packs `part`. `as_rows`: padded batches are
    assembled as packs of equal length, too.

    Shapes:  row_index: int32[rows, 2], (block, pack and key), or (block, row) for an excerpt.
    """

    def __init__(
        self,
        form: PackForm,
        blocks: Sequence[PackBlock],
        row_index: RowIndex,
        batches: Sequence[Batch],
        *,
        as_rows: bool = False,
        part: slice = slice(None),
    ) -> None:
        self._part = part
        self._has_shapes = form.pads and not as_rows
        self._form, self._blocks, self._batches = form, blocks, batches
        # Copy the index: it lies in memory that the trainer can write to.
        self._index = np.array(row_index, np.int32, order="C")

    def into(self, slab: memoryview, expect: Callable[[int], None] | None = None) -> Gathered:
        """Implement Gather.into.

        Raises:  RowOutOfBounds: a pack is not where its block says.
        """
        form = self._form
        if not self._has_shapes:
            return _into(form.specs, self._batches, slab, expect, self._write)
        return _padded_into(form, self._batches, slab, expect, self._write)

    def _write(self, count: int, columns: Sequence[Bytes]) -> None:
        index, places = self._index[:count][self._part], np.arange(count)[self._part]
        if any(one.packs is None for one in self._blocks):
            is_excerpt = np.array([*(one.packs is None for one in self._blocks), False], np.bool_)
            # Rows that name no block count as whole blocks here; `write_packs` reports them.
            copied = is_excerpt[np.clip(index[:, 0], -1, len(self._blocks))]
            for one, rows, put in by_block(index[copied]):
                self._copy_excerpt(self._blocks[one].columns, rows, places[copied][put], columns)
            index, places = index[~copied], places[~copied]
        if not len(places):
            return
        write_packs(self._form, self._blocks, index, places, columns)

    def _copy_excerpt(
        self, block: BlockColumns, rows: Ints, places: Ints, columns: Sequence[Bytes]
    ) -> None:
        index = np.stack([np.zeros(len(rows), np.int32), rows.astype(np.int32)], axis=1)
        opened = Rows([block], index)
        for at, (spec, out) in enumerate(zip(self._form.specs, columns, strict=True)):
            size = row_bytes(spec)
            some = np.empty(len(rows) * size, np.uint8)
            opened.fixed(at, size, some)
            out.reshape(-1, size)[places] = some.reshape(-1, size)


class CountGather:
    """Assembles one slab that reports how blocks' tokens are packed, or only its rows `part`.

    Shapes:  row_index: int32[rows, 2], (block, 0).
    """

    def __init__(
        self,
        form: PackForm,
        blocks: Sequence[tuple[BlockColumns, tasks.Origin | None]],
        row_index: RowIndex,
        batches: Sequence[Batch],
        part: slice = slice(None),
    ) -> None:
        self._form, self._batches, self._part = form, batches, part
        used = np.array(row_index[:, 0], np.int64)
        own = set(used[part].tolist())
        found = {
            at: astuple(packing_of(document_lengths(*block, form), form.pack))
            for at, block in enumerate(blocks)
            if at in own
        }
        rows = [found.get(at, _NO_PACKING) for at in used.tolist()]
        self._packings = np.array(rows, np.int64).reshape(-1, len(_NO_PACKING))

    def into(self, slab: memoryview, expect: Callable[[int], None] | None = None) -> Gathered:
        """Implement Gather.into."""
        return _into(self._form.specs, self._batches, slab, expect, self._write)

    def _write(self, count: int, columns: Sequence[Bytes]) -> None:
        out = columns[0].view(np.int64).reshape(-1, len(_NO_PACKING))
        out[self._part] = self._packings[:count][self._part]


def _padded_into(
    form: PackForm,
    batches: Sequence[Batch],
    slab: memoryview,
    expect: Callable[[int], None] | None,
    write: Callable[[int, Sequence[Bytes]], None],
) -> Gathered:
    """Implement `_into` for batches with at most one padded batch each. The shape of each batch
    follows after the columns.
    """
    if any(batch.rows > 1 for batch in batches):
        raise RowOutOfBounds("a batch has more than one padded batch", row=1)
    shapes_bytes = ALIGN_BYTES + SHAPE_BYTES * len(batches)
    shapes: list[Ints] = []

    def write_all(count: int, columns: Sequence[Bytes]) -> None:
        write(count, columns)
        at = next(i for i, spec in enumerate(form.specs) if spec.name == LENGTHS)
        lengths = columns[at].view(np.int32).reshape(count, -1 if count else 1)
        rows, multiple = (lengths > 0).sum(axis=1), form.pack.multiple
        longest = lengths.max(axis=1, initial=0).astype(np.int64)
        shapes.append(np.stack([rows, -(-longest // multiple) * multiple], axis=1))

    own = len(slab) - shapes_bytes
    told = (lambda size: expect(size + shapes_bytes)) if expect is not None else None
    made = _into(form.specs, batches, slab[: max(own, 0)], told, write_all)
    if not made.batch_count:
        return replace(made, bytes_needed=made.bytes_needed + shapes_bytes)
    filled = [batch.rows > 0 for batch in batches[: made.batch_count]]
    shape = np.zeros((made.batch_count, 2), np.int64)
    shape[filled] = shapes[0]
    begin = aligned(made.bytes_used)
    end = begin + shape.nbytes
    np.frombuffer(slab[begin:end], np.int64)[:] = shape.reshape(-1)
    sides = tuple(range(begin, end, SHAPE_BYTES))
    rows, values = shape[:, 0].tolist(), shape.prod(axis=1).tolist()
    columns = tuple(
        Column(column.values, sides, tuple(rows if spec.name == LENGTHS else values))
        for spec, column in zip(form.specs, made.columns, strict=True)
    )
    return replace(made, bytes_used=end, columns=columns)


def _into(
    specs: Sequence[ColumnSpec],
    batches: Sequence[Batch],
    slab: memoryview,
    expect: Callable[[int], None] | None,
    write: Callable[[int, Sequence[Bytes]], None],
) -> Gathered:
    """Write as many whole batches as fit. All columns are FIXED: `write` gets the number of rows,
    and the memory of each column.
    """
    row_sizes = np.array([row_bytes(spec) for spec in specs], np.int64)
    bounds = np.cumsum([0, *(batch.rows for batch in batches)], dtype=np.int64)
    sizes = np.outer(row_sizes, bounds)
    begins = slab_layout.column_begins(sizes)
    ends = begins[-1] + sizes[-1]
    count = int(np.searchsorted(ends, len(slab), side="right")) - 1
    if not count:
        return Gathered(0, bytes_needed=int(ends[1]))
    if expect is not None:
        expect(int(ends[count]))
    out, places = np.frombuffer(slab, np.uint8), begins[:, count]
    used = (places + sizes[:, count]).tolist()
    write(
        int(bounds[count]),
        [out[begin:end] for begin, end in zip(places.tolist(), used, strict=True)],
    )
    told = (places[:, None] + sizes[:, :count]).tolist()
    columns = tuple(Column(tuple(each), (), ()) for each in told)
    return Gathered(count, bytes_used=int(ends[count]), columns=columns)


def packed_batch(form: PackForm, block: PackBlock, rows: Ints) -> pa.RecordBatch:
    """Return these packs of a block in the form of an excerpt.

    Shapes:  rows: int64[n].
    """
    index = np.stack([np.zeros(len(rows), np.int32), rows.astype(np.int32)], axis=1)
    gather = PackGather(form, [block], index, [Batch(0, len(rows), len(rows))], as_rows=True)
    scratch = bytearray(gather.into(memoryview(b"")).bytes_needed)
    columns = gather.into(memoryview(scratch)).columns
    arrays = [
        _array(spec, pa.py_buffer(memoryview(scratch)[column.values[0] :]), len(rows))
        for spec, column in zip(form.specs, columns, strict=True)
    ]
    return pa.record_batch(arrays, names=[spec.name for spec in form.specs])


def _array(spec: ColumnSpec, buffer: pa.Buffer, rows: int) -> pa.Array:
    kind = pa.from_numpy_dtype(np.dtype(spec.dtype))
    if not spec.shape:
        return pa.Array.from_buffers(kind, rows, [None, buffer])
    values = pa.Array.from_buffers(kind, rows * spec.shape[0], [None, buffer])
    return pa.FixedSizeListArray.from_arrays(values, spec.shape[0])
