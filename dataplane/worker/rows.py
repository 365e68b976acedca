"""Copies the rows of one slab from their blocks: with the compiled kernel, or with numpy.

Both give the same bytes. The compiled one runs at memory speed; the numpy one is for machines
without a C compiler, and documents the first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dataplane.errors import RowOutOfBounds
from dataplane.worker.columns import (
    TABLE_WIDTH,
    BlockColumns,
    Bytes,
    Ints,
    RowIndex,
    RowLayout,
    by_block,
)
from dataplane.worker.kernel import kernel


class Rows(Protocol):
    """The rows of one slab in their order, column by column. Arrays shorter than the slab's number
    of rows refer to its first rows.
    """

    def fixed(self, at: int, row_bytes: int, out: Bytes) -> None:
        """The rows of a FIXED column, one after the other.

        Shapes:  out: uint8[rows * row_bytes].
        """

    def packed(self, row_layout: RowLayout, count: int, out: Bytes, begins: Ints) -> None:
        """The first rows of all packed columns, each column at its place in `out`.

        Shapes:  begins: int64[columns], in the order of the row_layout.
        Raises:  RowOutOfBounds: a column does not end within `out`.
        """

    def spans(self, at: int) -> tuple[Ints, Ints]:
        """Where each row of a variable column starts in its block's values, and its length.

        Shapes:  result: int64[rows], int64[rows], in elements.
        Raises:  RowOutOfBounds: a row is not among the values.
        """

    def runs(self, at: int, element_bytes: int, spans: tuple[Ints, Ints], put: Ints, room: Ints,
             out: Bytes, padding: bytes = b"") -> None:  # fmt: skip
        """The rows of a variable column: row i goes to out[put[i] :], and the rest of its `room[i]`
        bytes is filled with copies of `padding`, or zeros.

        Shapes:  put, room: int64[rows], in bytes.   out: uint8[bytes].
        Raises:  RowOutOfBounds: a row is not among the values, or larger than its room.
        """

    def valid(self, at: int, count: int) -> Bytes:
        """1 for every one of the first rows that is not null.

        Shapes:  result: uint8[count].
        """


Open = Callable[[Sequence[BlockColumns], RowIndex], Rows]


def rows_of(blocks: Sequence[BlockColumns], row_index: RowIndex) -> Rows:
    """Rows of these blocks, in the order of the index, as fast as this installation can.

    Shapes:  row_index: int32[rows, 2], (block, row), in memory that no other process writes.
    Raises:  RowOutOfBounds: there is no such block, or no such row in it.
    """
    library = kernel().library
    if library is None:
        return NumpyRows(blocks, row_index)
    return CompiledRows(library, blocks, row_index)


class CompiledRows:
    """Rows, by kernel.c."""

    def __init__(
        self, library: ctypes.CDLL, blocks: Sequence[BlockColumns], row_index: RowIndex
    ) -> None:
        assert row_index.flags.c_contiguous
        assert row_index.dtype == np.int32
        self._library, self._rows = library, len(row_index)
        # Kept alive, since addresses point into their memory.
        self._blocks, self._index = blocks, row_index
        block_rows = np.array([block.rows for block in blocks], np.int64)
        first = library.gather_check(
            self._index.ctypes.data, self._rows, block_rows.ctypes.data, len(blocks)
        )
        _expect_inside(first, "the index")
        self._columns = len(blocks[0].table) if blocks else 0
        none = np.empty((0, TABLE_WIDTH), np.int64)
        self._tables = np.concatenate([none, *(block.table for block in blocks)])

    def _sources(self, at: int, count: int) -> tuple[int, int, int, int]:
        row = self._tables.ctypes.data + at * self._tables.strides[0]
        return row, self._columns, self._index.ctypes.data, count

    def fixed(self, at: int, row_bytes: int, out: Bytes) -> None:
        if row_bytes:
            count = len(out) // row_bytes
            self._library.gather_fixed(*self._sources(at, count), row_bytes, out.ctypes.data)

    def packed(self, row_layout: RowLayout, count: int, out: Bytes, begins: Ints) -> None:
        _expect_room(row_layout, count, out, begins)
        fields = fields_of(row_layout, begins + out.ctypes.data)
        self._library.gather_packed(
            *self._sources(self._columns - 1, count),
            row_layout.row_bytes,
            fields.ctypes.data,
            len(fields),
        )

    def spans(self, at: int) -> tuple[Ints, Ints]:
        starts, lengths = np.empty(self._rows, np.int64), np.empty(self._rows, np.int64)
        first = self._library.gather_spans(
            *self._sources(at, self._rows), starts.ctypes.data, lengths.ctypes.data
        )
        _expect_inside(first, f"column {at}")
        return starts, lengths

    def runs(self, at: int, element_bytes: int, spans: tuple[Ints, Ints], put: Ints, room: Ints,
             out: Bytes, padding: bytes = b"") -> None:  # fmt: skip
        assert len(padding) in {0, element_bytes}
        places = [array.ctypes.data for array in (*spans, put, room, out)]
        first = self._library.gather_runs(
            *self._sources(at, len(put)), element_bytes, *places, len(out), padding or None
        )
        _expect_inside(first, f"column {at}")

    def valid(self, at: int, count: int) -> Bytes:
        found = np.empty(count, np.uint8)
        self._library.gather_valid(*self._sources(at, count), found.ctypes.data)
        return found


class NumpyRows:
    """Rows, by numpy: block after block."""

    def __init__(self, blocks: Sequence[BlockColumns], row_index: RowIndex) -> None:
        self._rows = len(row_index)
        block_rows = np.array([*(block.rows for block in blocks), 0], np.int64)
        outside = (row_index < 0).any(axis=1) | (row_index[:, 0] >= len(blocks))
        outside |= row_index[:, 1] >= block_rows[np.where(outside, -1, row_index[:, 0])]
        _expect_inside(_first(outside), "the index")
        self._parts = [(blocks[block], take, put) for block, take, put in by_block(row_index)]

    def fixed(self, at: int, row_bytes: int, out: Bytes) -> None:
        if not row_bytes:
            return
        one_row = np.dtype((np.void, row_bytes))
        into = out.view(one_row)
        for block, take, put in self._parts:
            count = int(np.searchsorted(put, len(into)))
            into[put[:count]] = block.values[at].view.view(one_row)[take[:count]]

    def packed(self, row_layout: RowLayout, count: int, out: Bytes, begins: Ints) -> None:
        _expect_room(row_layout, count, out, begins)
        for block, take, put in self._parts:
            rows = block.values[-1].view.reshape(-1, row_layout.row_bytes)
            some = int(np.searchsorted(put, count))
            for (start, size), begin in zip(
                row_layout.fields.tolist(), begins.tolist(), strict=True
            ):
                into = out[begin : begin + count * size].reshape(-1, size)
                into[put[:some]] = rows[take[:some], start : start + size]

    def spans(self, at: int) -> tuple[Ints, Ints]:
        starts, ends = np.empty(self._rows, np.int64), np.empty(self._rows, np.int64)
        limits = np.empty(self._rows, np.int64)
        for block, take, put in self._parts:
            *_, limit, start_bytes = block.table[at].tolist()
            cuts = block.starts[at].view.view(f"i{start_bytes}")
            starts[put], ends[put] = cuts[take], cuts[take + 1]
            limits[put] = limit
        outside = (starts < 0) | (ends < starts) | (ends > limits)
        _expect_inside(_first(outside), f"column {at}")
        return starts, ends - starts

    def runs(self, at: int, element_bytes: int, spans: tuple[Ints, Ints], put: Ints, room: Ints,
             out: Bytes, padding: bytes = b"") -> None:  # fmt: skip
        element = np.frombuffer(padding or bytes(element_bytes), np.uint8)
        starts, lengths = (each[: len(put)] * element_bytes for each in spans)
        outside = (put < 0) | (lengths > room) | (room > len(out) - put)
        _expect_inside(_first(outside), f"column {at}")
        for block, _, places in self._parts:
            values = block.values[at].view
            for i in places[places < len(put)].tolist():
                end = put[i] + lengths[i]
                out[put[i] : end] = values[starts[i] : starts[i] + lengths[i]]
                rest = out[end : put[i] + room[i]]
                rest[:] = np.resize(element, len(rest))

    def valid(self, at: int, count: int) -> Bytes:
        found = np.ones(self._rows, np.uint8)
        for block, take, put in self._parts:
            if at in block.valid:
                found[put] = block.valid[at][take]
        return found[:count]


def fields_of(row_layout: RowLayout, addresses: Ints) -> Ints:
    """The kernel's description of packed rows and of the columns at these addresses.

    Shapes:  addresses: int64[columns].   result: int64[columns, 3].
    """
    return np.concatenate([row_layout.fields, addresses[:, None]], axis=1)


def _expect_room(row_layout: RowLayout, count: int, out: Bytes, begins: Ints) -> None:
    outside = (begins < 0) | (begins > len(out) - count * row_layout.fields[:, 1])
    if outside.any():
        raise RowOutOfBounds(f"{count} rows of packed columns do not fit into their slab", row=0)


def _first(outside: npt.NDArray[np.bool_]) -> int:
    return int(outside.argmax()) if outside.any() else -1


def _expect_inside(first: int, what: str) -> None:
    if first >= 0:
        raise RowOutOfBounds(
            f"row {first} of a slab is not where {what} says: please report this bug in "
            "Dataplane, unless memory changed while it was read",
            row=first,
        )
