"""Assembles slabs of packs: pieces of documents of decoded blocks, side by side.

Invariants:
1. All bytes of a pack are written: what no document takes is padding.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
from msgspec import Struct
from msgspec.structs import astuple

from dataplane.arena import slab_layout
from dataplane.arena.slab_layout import row_bytes
from dataplane.errors import RowOutOfBounds
from dataplane.model import ColumnSpec, PackSpec
from dataplane.plan.packs import PACK_BITS, Packs, packing_of
from dataplane.rpc import tasks
from dataplane.rpc.messages import Batch, Column
from dataplane.transforms.packing import LABELS
from dataplane.worker.columns import BlockColumns, Bytes, Ints, RowIndex, by_block
from dataplane.worker.gather import Gathered
from dataplane.worker.kernel import kernel
from dataplane.worker.pack_blocks import PackBlock, PackForm, document_lengths
from dataplane.worker.rows import Int32s, Open, Rows, rows_of

_NO_LABEL = -100
_NO_DOCUMENT = -1


class PackGather:
    """Assembles one slab of packs.

    Shapes:  row_index: int32[rows, 2], (block, pack and key), or a row of an excerpt.
    """

    def __init__(
        self,
        form: PackForm,
        blocks: Sequence[PackBlock],
        row_index: RowIndex,
        batches: Sequence[Batch],
        open_rows: Open = rows_of,
        library: ctypes.CDLL | None = None,
    ) -> None:
        self._form, self._blocks, self._open = form, blocks, open_rows
        self._library = kernel().library if open_rows is rows_of else library
        self._batches = batches
        # A copy, since the trainer can write to the memory of the index.
        self._index = np.array(row_index, np.int32, order="C")

    def into(self, slab: memoryview, expect: Callable[[int], None] | None = None) -> Gathered:
        """As Gather.into.

        Raises:  RowOutOfBounds: a pack is not where its block says.
        """
        return _into(self._form.specs, self._batches, slab, expect, self._write)

    def _write(self, count: int, columns: Sequence[Bytes]) -> None:
        block, row = self._index[:count].astype(np.int64).T
        outside = (block < 0) | (block >= len(self._blocks)) | (row < 0)
        if outside.any():
            raise RowOutOfBounds("a slab has a row of no block", row=int(outside.argmax()))
        is_excerpt = np.array([one.packs is None for one in self._blocks], np.bool_)[block]
        for one, rows, places in by_block(self._index[:count][is_excerpt]):
            at = np.flatnonzero(is_excerpt)[places]
            self._copy_excerpt(self._blocks[one].columns, rows, at, columns)
        drawn = np.flatnonzero(~is_excerpt)
        if len(drawn):
            self._write_pieces(self._pieces(block[drawn], row[drawn], drawn), columns)

    def _pieces(self, block: Ints, row: Ints, places: Ints) -> _Pieces:
        """The pieces of these packs, which are rows `places` of the slab.

        Shapes:  block, row, places: int64[n].
        """
        packs = [each for one in self._blocks for each in one.packs or ()]
        key_counts = np.array([len(one.packs or ()) for one in self._blocks], np.int64)
        key = row >> PACK_BITS
        if (key >= key_counts[block]).any():
            raise RowOutOfBounds("a slab has a pack without its key", row=int(places[0]))
        tables = (np.cumsum(key_counts) - key_counts)[block] + key
        listed = list_pieces(packs, tables, row & ((1 << PACK_BITS) - 1), self._library)
        table, rows, begins, lengths, at, pack, ordinals = listed
        blocks = np.repeat(np.arange(len(self._blocks)), key_counts)[table]
        return _Pieces(blocks, rows, begins, lengths, places[pack], at, ordinals)

    def _copy_excerpt(
        self, block: BlockColumns, rows: Ints, places: Ints, columns: Sequence[Bytes]
    ) -> None:
        index = np.stack([np.zeros(len(rows), np.int32), rows.astype(np.int32)], axis=1)
        opened = self._open([block], index)
        for at, (spec, out) in enumerate(zip(self._form.specs, columns, strict=True)):
            size = row_bytes(spec)
            some = np.empty(len(rows) * size, np.uint8)
            opened.fixed(at, size, some)
            out.reshape(-1, size)[places] = some.reshape(-1, size)

    def _write_pieces(self, pieces: _Pieces, columns: Sequence[Bytes]) -> None:
        """Write every column of the packs that these pieces make."""
        form = self._form
        # Excerpts have other columns, and are not gathered from here.
        has_documents = np.array([one.packs is not None for one in self._blocks], np.int64)
        row_index = np.empty((len(pieces.rows), 2), np.int32)
        row_index[:, 0] = (np.cumsum(has_documents) - 1)[pieces.blocks]
        row_index[:, 1] = pieces.rows
        rows = self._open([b.columns for b in self._blocks if b.packs is not None], row_index)
        placed = _Placed.of(pieces, form.pack)
        for at, (spec, out) in enumerate(zip(form.specs, columns, strict=True)):
            if at > len(form.pack.carry) and spec.name != LABELS:
                _write_output(spec, rows, pieces, placed, out.view(np.int32))
                continue
            source = form.column(form.pack.column if spec.name == LABELS else spec.name)
            starts, lengths = rows.spans(source)
            if (pieces.begins + pieces.lengths > lengths).any():
                raise RowOutOfBounds("a document is shorter than it was", row=0)
            starts = starts + pieces.begins
            put, room, width = placed.put, placed.room, spec.value_bytes
            if spec.name == LABELS and at > len(form.pack.carry):
                # The token after the last one of a document that is cut is its label, too.
                spans = starts + 1, np.minimum(pieces.lengths, lengths - pieces.begins - 1)
                dtype = form.stored[source].dtype
                rows.wide_runs(source, dtype, spans, put, room, out.view(np.int64), _NO_LABEL)
            else:
                spans, padding = (starts, pieces.lengths), b"" if at else form.padding
                rows.runs(source, width, spans, put * width, room * width, out, padding)


def list_pieces(
    packs: Sequence[Packs], tables: Ints, numbers: Ints, library: ctypes.CDLL | None
) -> Ints:
    """The pieces of packs: row i is pack numbers[i] of packs[tables[i]].

    Shapes:  tables, numbers: int64[n].   result: int64[7, pieces]: of each piece its table, its
    document, where it begins there, its length, where it lies in its pack, its row, and its number
    in the pack.
    Raises:  RowOutOfBounds: there is no such pack.
    """
    counts = np.array([len(each) for each in packs], np.int64)
    outside = (numbers < 0) | (numbers >= counts[tables])
    if outside.any():
        at = int(outside.argmax())
        raise RowOutOfBounds(
            f"a slab has pack {numbers[at]} of a block of {counts[tables[at]]}: the dataset, or"
            " what a map makes of it, is not what it was when packs were counted. If it is, please"
            " report this bug in Dataplane",
            row=at,
        )
    found = _listed if library is None else functools.partial(_listed_fast, library)
    return found(packs, tables, numbers)


def _listed_fast(library: ctypes.CDLL, packs: Sequence[Packs], tables: Ints, numbers: Ints) -> Ints:
    facts = np.array(
        [(p.starts.ctypes.data, p.pieces.ctypes.data, p.pieces.shape[1], len(p)) for p in packs],
        np.int64,
    )
    tables, numbers = (np.ascontiguousarray(each, np.int64) for each in (tables, numbers))
    room = 16 * len(numbers) + 1024
    while True:
        out = np.empty((7, room), np.int64)
        count = library.list_pieces(
            facts.ctypes.data, len(packs), tables.ctypes.data, numbers.ctypes.data, len(numbers),
            out.ctypes.data, room,
        )  # fmt: skip
        if count >= 0:
            return out[:, :count]
        room *= 4


def _listed(packs: Sequence[Packs], tables: Ints, numbers: Ints) -> Ints:
    parts = []
    for row, (table, number) in enumerate(zip(tables.tolist(), numbers.tolist(), strict=True)):
        start, end = packs[table].starts[number : number + 2].tolist()
        part = np.empty((7, end - start), np.int64)
        part[0], part[5], part[6] = table, row, np.arange(end - start)
        part[1:5] = packs[table].pieces[:, start:end]
        parts.append(part)
    return np.concatenate(parts, axis=1)


class CountGather:
    """Assembles one slab that says of blocks what becomes of their tokens.

    Shapes:  row_index: int32[rows, 2], (block, 0).
    """

    def __init__(
        self,
        form: PackForm,
        blocks: Sequence[tuple[BlockColumns, tasks.Origin | None]],
        row_index: RowIndex,
        batches: Sequence[Batch],
    ) -> None:
        self._form, self._batches = form, batches
        found = [packing_of(document_lengths(*each, form), form.pack) for each in blocks]
        self._packings = np.array([astuple(each) for each in found], np.int64)
        self._blocks = np.array(row_index[:, 0], np.int64)

    def into(self, slab: memoryview, expect: Callable[[int], None] | None = None) -> Gathered:
        """As Gather.into."""
        return _into(self._form.specs, self._batches, slab, expect, self._write)

    def _write(self, count: int, columns: Sequence[Bytes]) -> None:
        rows = self._packings[self._blocks[:count]]
        columns[0].view(np.int64)[:] = rows.reshape(-1)


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


class _Pieces(Struct, frozen=True, eq=False):
    """Pieces of documents. Those of a pack follow one another.

    Shapes:  all: int64[pieces]; the block and the row of each, its first token and its tokens,
    where it goes: the row of the slab, the place in the pack, and which piece of the pack it is.
    """

    blocks: Ints
    rows: Ints
    begins: Ints
    lengths: Ints
    packs: Ints
    places: Ints
    ordinals: Ints


class _Placed(Struct, frozen=True, eq=False):
    """Where pieces of documents go.

    Shapes:  put, taken, room: int64[pieces]: where in all packs together each one goes, what it
    takes, and the same with the padding behind the last of a pack.   first, last: int64[packs], of
    the pieces of each pack.   size: the tokens of a pack.
    """

    put: Ints
    taken: Ints
    room: Ints
    first: Ints
    last: Ints
    size: int

    @classmethod
    def of(cls, pieces: _Pieces, pack: PackSpec) -> _Placed:
        """The places of these pieces."""
        first = np.flatnonzero(pieces.ordinals == 0)
        last = np.append(first[1:], len(pieces.rows)) - 1
        taken = -(-pieces.lengths // pack.multiple) * pack.multiple
        room = taken.copy()
        room[last] = pack.length - pieces.places[last]
        put = pieces.packs * pack.length + pieces.places
        return cls(put, taken, room, first, last, pack.length)


def _write_output(
    spec: ColumnSpec, rows: Rows, pieces: _Pieces, placed: _Placed, out: Int32s
) -> None:
    """One of the columns that say where documents lie in their packs."""
    last, size, taken = placed.last, placed.size, placed.taken
    packs, used = pieces.packs[last], pieces.places[last] + taken[last]
    if spec.name == "max_seqlen":
        out[packs] = np.maximum(np.maximum.reduceat(taken, placed.first), size - used)
    elif spec.name == "cu_seqlens":
        table = out.reshape(-1, *spec.shape)
        table[packs] = size
        table[pieces.packs, pieces.ordinals] = pieces.places
        table[packs, pieces.ordinals[last] + 1] = used
    else:
        is_position = spec.name == "position_ids"
        values = np.zeros_like(taken) if is_position else pieces.ordinals
        padding = np.full(len(packs), 0 if is_position else _NO_DOCUMENT)
        put = np.concatenate([placed.put, packs * size + used])
        room = np.concatenate([taken, size - used])
        rows.fill(put, room, np.concatenate([values, padding]), int(is_position), out)


def packed_batch(form: PackForm, block: PackBlock, rows: Ints) -> pa.RecordBatch:
    """These packs of a block, as an excerpt has them.

    Shapes:  rows: int64[n].
    """
    index = np.stack([np.zeros(len(rows), np.int32), rows.astype(np.int32)], axis=1)
    gather = PackGather(form, [block], index, [Batch(0, len(rows), len(rows))])
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
