"""Rows of canonical blocks -> one slab.

The slab is laid out column after column. A FIXED column is one array over all batches of the slab;
every other column has one piece a batch. Pieces start at multiples of 64 bytes. See model.Kind.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataplane.model import ColumnSpec, Kind
from dataplane.rpc.messages import Batch, Column
from dataplane.rpc.tasks import Assembled

Ints = npt.NDArray[np.int64]

_ALIGN_BYTES = 64
# From this many bytes a row on, one memcpy a row beats numpy's indexing, which copies twice.
_LONG_ROW_BYTES = 1024
_VARIABLE = frozenset({Kind.PADDED, Kind.RAGGED, Kind.BYTES, Kind.STRING})


@dataclass(frozen=True, slots=True)
class BlockColumns:
    """One canonical block as arrays.

    `fixed[c]` is dtype_c[rows, *shape]; `starts[c]` int64[rows + 1] into `flat[c]`; `valid[c]`
    bool[rows] or None where all are; `objects[c]` an Arrow array.
    """

    fixed: dict[int, npt.NDArray[Any]]
    starts: dict[int, Ints]
    flat: dict[int, npt.NDArray[Any]]
    valid: dict[int, npt.NDArray[np.bool_] | None]
    objects: dict[int, pa.Array]


def open_block(batch: pa.RecordBatch, specs: Sequence[ColumnSpec]) -> BlockColumns:
    """Views of a canonical block's buffers; they keep the buffers alive."""
    block = BlockColumns({}, {}, {}, {}, {})
    for at, spec in enumerate(specs):
        array = batch.column(at)
        if spec.kind is Kind.OBJECT:
            block.objects[at] = array
        elif spec.kind is Kind.FIXED:
            block.fixed[at] = _fixed_view(array, spec)
        else:
            block.starts[at] = _offsets(array)
            block.flat[at] = _flat_view(array, spec)
            block.valid[at] = (
                array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
            )
    return block


def _fixed_view(array: pa.Array, spec: ColumnSpec) -> npt.NDArray[Any]:
    dtype, width = np.dtype(spec.dtype), math.prod(spec.shape)
    values = array.values if spec.shape else array
    offset = values.offset + (array.offset * width if spec.shape else 0)
    buffer = values.buffers()[1]
    flat = (
        np.frombuffer(buffer, dtype, len(array) * width, offset * dtype.itemsize)
        if buffer is not None and len(array) and width
        else np.empty(len(array) * width, dtype)
    )
    return flat.reshape(len(array), *spec.shape)


def _offsets(array: pa.Array) -> Ints:
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array) + 1, np.int64)
    return np.frombuffer(buffer, np.int64, len(array) + 1, array.offset * 8)


def _flat_view(array: pa.Array, spec: ColumnSpec) -> npt.NDArray[Any]:
    if spec.kind in {Kind.BYTES, Kind.STRING}:
        buffer = array.buffers()[2]
        return np.frombuffer(buffer, np.uint8) if buffer is not None else np.empty(0, np.uint8)
    values, dtype = array.values, np.dtype(spec.dtype)
    buffer = values.buffers()[1]
    if buffer is None or not len(values):
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, len(values), values.offset * dtype.itemsize)


@dataclass(frozen=True, slots=True)
class _Group:
    """The rows that one block gives: `take[i]` of the block goes to row `put[i]` of the slab."""

    block: BlockColumns
    take: Ints
    put: Ints


class Gather:
    """One slab in the making."""

    def __init__(
        self,
        specs: Sequence[ColumnSpec],
        blocks: Sequence[BlockColumns],
        row_index: npt.NDArray[np.int32],
        batches: Sequence[Batch],
    ) -> None:
        self._specs = specs
        self._batches = batches
        self._bounds = np.cumsum([0, *(batch.rows for batch in batches)]).tolist()
        self._groups = _group(blocks, row_index)
        self._rows = len(row_index)
        self._lengths = {
            at: self._row_lengths(at) for at, spec in enumerate(specs) if spec.kind in _VARIABLE
        }
        self._objects = {
            at: self._object_pieces(at) for at, spec in enumerate(specs) if spec.kind is Kind.OBJECT
        }

    def into(self, slab: memoryview) -> Assembled:
        """Write as many whole batches as fit.

        Shapes:  slab: uint8[bytes], writable, page-aligned.
        """
        count = len(self._batches)
        while count and self._layout(count)[1] > len(slab):
            count -= 1
        if not count:
            return Assembled(0, bytes_needed=self._layout(1)[1])
        columns, used = self._layout(count)
        out = np.frombuffer(slab, np.uint8)
        if count < len(self._batches):
            self._cut(count)
        for at, (spec, column) in enumerate(zip(self._specs, columns, strict=True)):
            self._write(at, spec, column, out)
        return Assembled(count, bytes_used=used, columns=columns)

    def _row_lengths(self, at: int) -> Ints:
        lengths = np.zeros(self._rows, np.int64)
        for group in self._groups:
            starts = group.block.starts[at]
            lengths[group.put] = starts[group.take + 1] - starts[group.take]
        return lengths

    def _object_pieces(self, at: int) -> list[bytes]:
        """One Arrow stream a batch, of its own rows alone; nothing for an empty batch."""
        if not self._groups:
            return [b"" for _ in self._batches]
        taken = pa.concat_arrays([g.block.objects[at].take(pa.array(g.take)) for g in self._groups])
        place = np.empty(self._rows, np.int64)
        place[np.concatenate([g.put for g in self._groups])] = np.arange(self._rows)
        return [
            _stream_of(taken.take(pa.array(place[a:b]))) if b > a else b""
            for a, b in itertools.pairwise(self._bounds)
        ]

    def _layout(self, count: int) -> tuple[tuple[Column, ...], int]:
        """Where the first `count` batches lie, and how many bytes they take."""
        end, columns = 0, []
        for at, spec in enumerate(self._specs):
            values, lengths, width = [], [], []
            if spec.kind is Kind.FIXED:
                end = _aligned(end)
                row = np.dtype(spec.dtype).itemsize * math.prod(spec.shape)
                values = [end + bound * row for bound in self._bounds[:count]]
                end += self._bounds[count] * row
            else:
                for i in range(count):
                    piece, side, wide = self._piece(at, spec, i)
                    values.append(_aligned(end))
                    lengths.append(_aligned(values[-1] + piece))
                    width.append(wide)
                    end = lengths[-1] + side
            columns.append(Column(tuple(values), tuple(lengths), tuple(width)))
        return tuple(columns), end

    def _piece(self, at: int, spec: ColumnSpec, i: int) -> tuple[int, int, int]:
        """(bytes of the values, bytes of lengths or offsets, width) of one batch's piece."""
        if spec.kind is Kind.OBJECT:
            size = len(self._objects[at][i])
            return size, 0, size
        rows = self._batches[i].rows
        lengths = self._lengths[at][self._bounds[i] : self._bounds[i + 1]]
        if spec.kind is Kind.PADDED:
            longest = int(lengths.max()) if rows else 0
            return rows * longest * np.dtype(spec.dtype).itemsize, rows * 8, longest
        total = int(lengths.sum())
        if spec.kind is Kind.RAGGED:
            return total * np.dtype(spec.dtype).itemsize, (rows + 1) * 8, total
        return total, (rows + 1) * 8 + rows, total

    def _cut(self, count: int) -> None:
        """Forget the rows of the batches that did not fit."""
        self._rows = self._bounds[count]
        kept = []
        for group in self._groups:
            inside = group.put < self._rows
            kept.append(_Group(group.block, group.take[inside], group.put[inside]))
        self._groups = [group for group in kept if len(group.put)]
        self._batches = self._batches[:count]

    def _write(self, at: int, spec: ColumnSpec, column: Column, out: npt.NDArray[np.uint8]) -> None:
        if spec.kind is Kind.FIXED:
            self._write_fixed(at, spec, column, out)
        elif spec.kind is Kind.OBJECT:
            for i, offset in enumerate(column.values):
                piece = self._objects[at][i]
                out[offset : offset + len(piece)] = np.frombuffer(piece, np.uint8)
        else:
            self._write_variable(at, spec, column, out)

    def _write_fixed(
        self, at: int, spec: ColumnSpec, column: Column, out: npt.NDArray[np.uint8]
    ) -> None:
        dtype, width = np.dtype(spec.dtype), math.prod(spec.shape)
        start, size = column.values[0], self._rows * width * np.dtype(spec.dtype).itemsize
        into = out[start : start + size].view(dtype).reshape(self._rows, *spec.shape)
        for group in self._groups:
            source = group.block.fixed[at]
            if _consecutive(group.take) and _consecutive(group.put):
                first = group.take[0]
                into[group.put[0] : group.put[-1] + 1] = source[first : first + len(group.put)]
            elif width * dtype.itemsize >= _LONG_ROW_BYTES:
                for take, put in zip(group.take.tolist(), group.put.tolist(), strict=True):
                    into[put] = source[take]
            else:
                into[group.put] = source[group.take]

    def _write_variable(
        self, at: int, spec: ColumnSpec, column: Column, out: npt.NDArray[np.uint8]
    ) -> None:
        dtype = np.dtype(spec.dtype or "uint8")
        lengths, into = self._lengths[at], np.zeros(self._rows, np.int64)
        for i, batch in enumerate(self._batches):
            rows = slice(self._bounds[i], self._bounds[i + 1])
            own, base = lengths[rows], column.values[i] // dtype.itemsize
            ends = np.cumsum(own)
            side = out[column.lengths[i] :]
            if spec.kind is Kind.PADDED:
                into[rows] = base + np.arange(batch.rows, dtype=np.int64) * column.width[i]
                side[: batch.rows * 8].view(np.int64)[:] = own
                size = batch.rows * column.width[i] * dtype.itemsize
                out[column.values[i] : column.values[i] + size] = 0
            else:
                into[rows] = base + ends - own
                offsets = side[: (batch.rows + 1) * 8].view(np.int64)
                offsets[0] = 0
                offsets[1:] = ends
            if spec.kind in {Kind.BYTES, Kind.STRING}:
                side[(batch.rows + 1) * 8 : (batch.rows + 1) * 8 + batch.rows] = 1
        whole = out[: len(out) // dtype.itemsize * dtype.itemsize].view(dtype)
        for group in self._groups:
            starts = group.block.starts[at][group.take]
            _copy_runs(whole, into[group.put], group.block.flat[at], starts, lengths[group.put])
            if spec.kind in {Kind.BYTES, Kind.STRING}:
                self._write_valid(group, at, column, out)

    def _write_valid(
        self, group: _Group, at: int, column: Column, out: npt.NDArray[np.uint8]
    ) -> None:
        valid = group.block.valid[at]
        if valid is None:
            return
        for put in group.put[~valid[group.take]].tolist():
            i = int(np.searchsorted(self._bounds, put, side="right")) - 1
            while not self._batches[i].rows:
                i -= 1
            rows = self._batches[i].rows
            out[column.lengths[i] + (rows + 1) * 8 + put - self._bounds[i]] = 0


def _group(blocks: Sequence[BlockColumns], row_index: npt.NDArray[np.int32]) -> list[_Group]:
    by_block = np.argsort(row_index[:, 0], kind="stable")
    ordered = row_index[by_block]
    cuts = np.searchsorted(ordered[:, 0], np.arange(len(blocks) + 1))
    return [
        _Group(block, ordered[a:b, 1].astype(np.int64), by_block[a:b])
        for block, a, b in zip(blocks, cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)
        if b > a
    ]


def _consecutive(numbers: Ints) -> bool:
    return bool(numbers[-1] - numbers[0] == len(numbers) - 1 and (np.diff(numbers) == 1).all())


def _copy_runs(
    into: npt.NDArray[Any], put: Ints, source: npt.NDArray[Any], take: Ints, lengths: Ints
) -> None:
    """into[put[i] : put[i] + lengths[i]] = source[take[i] : take[i] + lengths[i]], for every i."""
    total = int(lengths.sum())
    if total * into.itemsize >= _LONG_ROW_BYTES // 2 * len(lengths):
        runs = zip(put.tolist(), take.tolist(), lengths.tolist(), strict=True)
        for start, first, length in runs:
            into[start : start + length] = source[first : first + length]
        return
    within = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    into[np.repeat(put, lengths) + within] = source[np.repeat(take, lengths) + within]


def _stream_of(array: pa.Array) -> bytes:
    batch = pa.record_batch([array], names=["column"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN_BYTES) * _ALIGN_BYTES
