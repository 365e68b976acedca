"""Gather rows of canonical blocks into one slab, in the layout of arena/slab_layout.py."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa
from msgspec import Struct
from msgspec.structs import replace

from dataplane.arena import slab_layout
from dataplane.arena.slab_layout import ALIGN_BYTES, SIDE_BYTES, TEXTS
from dataplane.model.records import ColumnSpec, Kind
from dataplane.rpc.messages import Batch, Column
from dataplane.transforms.lists import AS_THEY_ARE, ListForm
from dataplane.worker.columns import (
    BlockColumns,
    Bytes,
    Ints,
    RowIndex,
    RowLayout,
    by_block,
    row_sizes,
)
from dataplane.worker.rows import Rows

if TYPE_CHECKING:
    from dataplane.worker.image_decoding import SlabImages

_NONE = np.empty(0, np.int64)


class _Pieces(Struct, frozen=True):
    """The places of the pieces of one column, one piece for each batch, relative to the column's
    start.

    Shapes:  values, sides, width: int64[batches]; a FIXED column has no sides and no width.
    ends: int64[batches + 1], where the first i batches end.   spans: as Rows.spans.
    """

    values: Ints
    ends: Ints
    sides: Ints
    width: Ints
    spans: tuple[Ints, Ints] = (_NONE, _NONE)
    streams: tuple[bytes, ...] = ()


class Gathered(Struct, frozen=True):
    """The number of batches that fitted, the places of their columns, and their size; if none
    fitted, the size of the first batch.
    """

    batch_count: int
    bytes_needed: int = 0
    bytes_used: int = 0
    columns: tuple[Column, ...] = ()


class Gather:
    """Assembles one slab, or only its rows `part`; `slab_images` has the images of the
    same rows.
    """

    def __init__(
        self,
        specs: Sequence[ColumnSpec],
        blocks: Sequence[BlockColumns],
        row_index: RowIndex,
        batches: Sequence[Batch],
        slab_images: SlabImages | None = None,
        lists: Mapping[int, ListForm] | None = None,
        part: slice = slice(None),
    ) -> None:
        self._specs, self._sizes, self._lists = specs, row_sizes(specs), lists or {}
        self._slab_images, self._blocks = slab_images, blocks
        self._packing = blocks[0].row_layout if blocks else None
        self._batch_rows = np.array([batch.rows for batch in batches], np.int64)
        self._bounds = _sums(self._batch_rows)
        self._alike: dict[int, _Pieces] = {}  # pieces of FIXED columns, by row size
        # Copy the index: it lies in memory that the trainer can write to.
        row_index = np.array(row_index, np.int32, order="C")
        self._part, own = part, row_index[part]
        self._index = own
        self._rows = Rows(blocks, own)
        # Read the sizes of all rows, also for a part of them: they determine where the part begins.
        is_sized = any(spec.kind is not Kind.FIXED for spec in specs)
        is_whole = len(own) == len(row_index) or not is_sized
        self._all_rows = self._rows if is_whole else Rows(blocks, row_index)
        self._pieces = [
            self._streams(spec, blocks, row_index)
            if spec.kind is Kind.OBJECT
            else self._of(at, spec)
            for at, spec in enumerate(specs)
        ]

    def into(self, slab: memoryview, expect: Callable[[int], None] | None = None) -> Gathered:
        """Write as many whole batches as fit; `expect` is called first, with the number of bytes.

        Shapes:  slab: uint8[bytes], writable, page-aligned.
        Raises:  RowOutOfBounds: a row is not where its block says.
        """
        sizes = np.array([pieces.ends for pieces in self._pieces], np.int64)
        sizes = sizes.reshape(len(self._pieces), len(self._bounds))
        begins = slab_layout.column_begins(sizes)
        ends = begins[-1] + sizes[-1] if len(sizes) else np.zeros_like(self._bounds)
        count = int(np.searchsorted(ends, len(slab), side="right")) - 1
        if not count:
            return Gathered(0, bytes_needed=int(ends[1]))
        if expect is not None:
            expect(int(ends[count]))
        out = _Slab(slab, self._rows, self._batch_rows[:count], self._draw, self._lists, self._part)
        columns = tuple(self._written(out, begins[:, count]))
        return Gathered(count, bytes_used=int(ends[count]), columns=columns)

    def _written(self, out: _Slab, begins: Ints) -> Iterator[Column]:
        """Gather every column into its place; packed columns all at once."""
        packed = frozenset(self._packing.columns if self._packing is not None else ())
        # Find the bounds of all FIXED columns at once: a wide table has tens of thousands.
        bounds = (begins[:, None] + np.outer(self._sizes, out.bounds)).tolist()
        for at, (spec, ends) in enumerate(zip(self._specs, bounds, strict=True)):
            if at in packed:
                yield Column(tuple(ends[:-1]), (), ())
            elif spec.kind is Kind.FIXED:
                yield out.write_fixed(at, self._sizes[at], ends)
            else:
                yield out.write(at, spec, self._pieces[at], int(begins[at]))
        if self._packing is not None:
            out.write_packed(self._packing, begins[list(self._packing.columns)])

    def _draw(self, at: int, out: Bytes) -> bool:
        """Write the pixels of a column, if it has images."""
        if self._slab_images is None or at not in self._slab_images:
            return False
        self._slab_images.write(at, self._blocks, self._index, self._rows, out)
        return True

    def _of(self, at: int, spec: ColumnSpec) -> _Pieces:
        if spec.kind is Kind.FIXED:
            return self._fixed(self._sizes[at])
        spans = _cut(self._all_rows.spans(at), self._lists.get(at, AS_THEY_ARE))
        is_padded = spec.kind is Kind.PADDED
        width = self._longest(spans[1]) if is_padded else np.diff(_sums(spans[1])[self._bounds])
        return self._spread(spec, width, spans)

    def _spread(
        self,
        spec: ColumnSpec,
        width: Ints,
        spans: tuple[Ints, Ints] = (_NONE, _NONE),
        streams: tuple[bytes, ...] = (),
    ) -> _Pieces:
        """Return pieces of these widths, one batch after the other."""
        rows = self._batch_rows
        sides = slab_layout.side_bytes(spec.kind, rows)
        values, begins, ends = slab_layout.one_after_other(
            slab_layout.values_bytes(spec, width, rows), sides
        )
        return _Pieces(values, ends, begins, width, spans, streams)

    def _fixed(self, size: int) -> _Pieces:
        found = self._alike.get(size)
        if found is None:
            ends = self._bounds * size
            found = self._alike[size] = _Pieces(ends[:-1], ends, _NONE, _NONE)
        return found

    def _longest(self, lengths: Ints) -> Ints:
        """Return the greatest length in each batch; 0 for an empty batch."""
        longest, some = np.zeros_like(self._batch_rows), self._batch_rows > 0
        if some.any():
            longest[some] = np.maximum.reduceat(lengths, self._bounds[:-1][some])
        return longest

    def _streams(
        self, spec: ColumnSpec, blocks: Sequence[BlockColumns], row_index: RowIndex
    ) -> _Pieces:
        """Make one Arrow stream per batch, with only the batch's rows; empty for an empty batch."""
        streams = [b""] * len(self._batch_rows)
        groups, name = list(by_block(row_index)), spec.name
        if groups:
            column = pa.concat_arrays(
                [blocks[block].batch.column(name).take(pa.array(rows)) for block, rows, _ in groups]
            )
            place = np.empty(len(row_index), np.int64)
            place[np.concatenate([places for _, _, places in groups])] = np.arange(len(row_index))
            for i, (a, b) in enumerate(itertools.pairwise(self._bounds.tolist())):
                if b > a:
                    streams[i] = _stream_of(column.take(pa.array(place[a:b])))
        sizes = np.array([len(stream) for stream in streams], np.int64)
        return self._spread(spec, sizes, streams=tuple(streams))


class _Slab:
    """The batches that fit into a slab, of which the rows `part` are written."""

    def __init__(
        self,
        slab: memoryview,
        rows: Rows,
        batch_rows: Ints,
        draw: Callable[[int, Bytes], bool],
        lists: Mapping[int, ListForm],
        part: slice,
    ) -> None:
        self._lists = lists
        self._rows, self._draw = rows, draw
        self._bytes: Bytes = np.frombuffer(slab, np.uint8)
        self._words = self._bytes[: len(slab) // SIDE_BYTES * SIDE_BYTES].view(np.int64)
        self._batch_rows = batch_rows
        self.bounds = _sums(batch_rows)
        self._first, end, _ = part.indices(int(self.bounds[-1]))
        self._count = max(end - self._first, 0)

    @functools.cached_property
    def _places(self) -> tuple[Ints, Ints]:
        """The batch of each row, and its place in the batch."""
        batch = np.repeat(np.arange(len(self._batch_rows)), self._batch_rows)
        return batch, np.arange(self.bounds[-1]) - self.bounds[batch]

    def write(self, at: int, spec: ColumnSpec, pieces: _Pieces, begin: int) -> Column:
        """Write one column that is not FIXED, from `begin` on."""
        count = len(self._batch_rows)
        values, sides = begin + pieces.values[:count], begin + pieces.sides[:count]
        width = pieces.width[:count]
        if spec.kind is Kind.OBJECT:
            streams = pieces.streams if not self._first else ()
            for start, stream in zip(values.tolist(), streams, strict=False):
                self._bytes[start : start + len(stream)] = np.frombuffer(stream, np.uint8)
        else:
            self._write_runs(at, spec, pieces.spans, values, sides, width)
        return Column(tuple(values.tolist()), tuple(sides.tolist()), tuple(width.tolist()))

    def write_fixed(self, at: int, size: int, bounds: Sequence[int]) -> Column:
        """Gather one FIXED column, whose rows have this size; `bounds` are where each batch starts,
        and where the last one ends.
        """
        begin = bounds[0] + self._first * size
        end = begin + self._count * size
        if not self._draw(at, self._bytes[begin:end]):
            self._rows.fixed(at, size, self._bytes[begin:end])
        return Column(tuple(bounds[:-1]), (), ())

    def write_packed(self, row_layout: RowLayout, begins: Ints) -> None:
        """Write all packed columns at once.

        Shapes:  begins: int64[columns], where each column begins, in the order of the row_layout.
        """
        begins = begins + self._first * row_layout.fields[:, 1]
        self._rows.packed(row_layout, self._count, self._bytes, begins)

    def _write_runs(
        self,
        at: int,
        spec: ColumnSpec,
        spans: tuple[Ints, Ints],
        values: Ints,
        sides: Ints,
        width: Ints,
    ) -> None:
        part = slice(self._first, self._first + self._count)
        (batch, within), size = (each[part] for each in self._places), spec.value_bytes
        starts, lengths = spans[0][part], spans[1][part]
        side = sides[batch] // SIDE_BYTES + within
        if spec.kind is Kind.PADDED:
            room = width[batch] * size
            put = values[batch] + within * room
            self._words[side] = lengths
        else:
            room, sums = lengths * size, _sums(spans[1])
            before = sums[part] - sums[self.bounds[batch]]
            put = values[batch] + before * size
            if not self._first:
                self._words[sides // SIDE_BYTES] = 0
            self._words[side + 1] = before + lengths
        padding = self._lists.get(at, AS_THEY_ARE).padding
        self._rows.runs(at, size, (starts, lengths), put, room, self._bytes, padding)
        if spec.kind in TEXTS:
            behind = slab_layout.valid_at(sides, self._batch_rows)
            self._bytes[behind[batch] + within] = self._rows.valid(at, len(batch))


def _cut(spans: tuple[Ints, Ints], form: ListForm) -> tuple[Ints, Ints]:
    """Cut lists to the maximum length; return where each starts then, and its length."""
    if not form.length_max:
        return spans
    starts, lengths = spans
    kept = np.minimum(lengths, form.length_max)
    return (starts + (lengths - kept) if form.keeps_end else starts), kept


def _sums(counts: Ints) -> Ints:
    """Return the running sums of the counts, with a leading 0."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums


def _stream_of(array: pa.Array) -> bytes:
    batch = pa.record_batch([array], names=["column"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


# -- names of sources ------------------------------------------------------------------------------
#
# A column names the source of each sample in a slab of a mixture.


_DTYPE = np.dtype(np.int32)


class Gathers(Protocol):
    """The interface that assembles a slab."""

    def into(self, slab: memoryview, expect: Callable[[int], None] | None = None, /) -> Gathered:
        """Write as many whole batches as fit; `expect` is called first, with the number of
        bytes.
        """


class NamedSources:
    """The columns that another object gathers, followed by a column of int32 with the source of
    each row's block. Only the rows `part` are written.

    Shapes:  sources: one for each block.   row_index: int32[rows, 2], (index of the block, row).
    """

    def __init__(
        self,
        gather: Gathers,
        sources: Sequence[int],
        row_index: RowIndex,
        batches: Sequence[Batch],
        part: slice = slice(None),
    ) -> None:
        self._gather, self._part = gather, part
        self._values = np.array(sources, _DTYPE)[row_index[:, 0]]
        self._ends = np.cumsum([0, *(batch.rows for batch in batches)]) * _DTYPE.itemsize

    def into(self, slab: memoryview, expect: Callable[[int], None] | None = None) -> Gathered:
        """Implement `Gathers.into`."""
        own = ALIGN_BYTES + int(self._ends[-1])
        made = self._gather.into(slab[: max(len(slab) - own, 0)], expect)
        if not made.batch_count:
            return replace(made, bytes_needed=made.bytes_needed + own)
        begin = -(-made.bytes_used // ALIGN_BYTES) * ALIGN_BYTES
        length = int(self._ends[made.batch_count])
        if expect is not None:
            expect(begin + length)
        values = self._values[: length // _DTYPE.itemsize]
        np.frombuffer(slab[begin : begin + length], _DTYPE)[self._part] = values[self._part]
        column = Column(tuple((begin + self._ends[: made.batch_count]).tolist()), (), ())
        return replace(made, bytes_used=begin + length, columns=(*made.columns, column))
