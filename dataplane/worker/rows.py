"""Copies the rows of one slab from their blocks, at memory speed, with the functions of kernel.c.
Keeps the images that were decoded for rows of a slab that is gathered again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from dataplane.model.errors import ImageError, RowOutOfBounds
from dataplane.worker.columns import (
    TABLE_WIDTH,
    BlockColumns,
    Bytes,
    Ints,
    RowIndex,
    RowLayout,
)
from dataplane.worker.kernel import kernel

_IMAGES_AT_ONCE = 16
"""Images that are decoded together; if one of them fails, each is decoded by itself."""


class Rows:
    """The rows of one slab in the order of its index, column by column. Arrays shorter than the
    slab's number of rows refer to its first rows.

    Shapes:  row_index: int32[rows, 2], (block, row), in memory that no other process writes.
    Raises:  RowOutOfBounds: a block or a row of the index does not exist.
    """

    def __init__(self, blocks: Sequence[BlockColumns], row_index: RowIndex) -> None:
        assert row_index.flags.c_contiguous
        assert row_index.dtype == np.int32
        self._library, self._rows = kernel(), len(row_index)
        # Keep blocks and index alive: the kernel gets addresses in their memory.
        self._blocks, self._index = blocks, row_index
        block_rows = np.array([block.rows for block in blocks], np.int64)
        first = self._library.gather_check(
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
        """Write the rows of a FIXED column, one after the other.

        Shapes:  out: uint8[rows * row_bytes].
        """
        if row_bytes:
            count = len(out) // row_bytes
            self._library.gather_fixed(*self._sources(at, count), row_bytes, out.ctypes.data)

    def packed(self, row_layout: RowLayout, count: int, out: Bytes, begins: Ints) -> None:
        """Write the first rows of all packed columns, each column at its place in `out`.

        Shapes:  begins: int64[columns], in the order of the row_layout.
        Raises:  RowOutOfBounds: a column does not end within `out`.
        """
        _expect_room(row_layout, count, out, begins)
        fields = fields_of(row_layout, begins + out.ctypes.data)
        self._library.gather_packed(
            *self._sources(self._columns - 1, count),
            row_layout.row_bytes,
            fields.ctypes.data,
            len(fields),
        )

    def spans(self, at: int) -> tuple[Ints, Ints]:
        """Return where each row of a variable column starts in its block's values, and its length.

        Shapes:  result: int64[rows], int64[rows], in elements.
        Raises:  RowOutOfBounds: a row is not among the values.
        """
        starts, lengths = np.empty(self._rows, np.int64), np.empty(self._rows, np.int64)
        first = self._library.gather_spans(
            *self._sources(at, self._rows), starts.ctypes.data, lengths.ctypes.data
        )
        _expect_inside(first, f"column {at}")
        return starts, lengths

    def runs(self, at: int, element_bytes: int, spans: tuple[Ints, Ints], put: Ints, room: Ints,
             out: Bytes, padding: bytes = b"") -> None:  # fmt: skip
        """Write the rows of a variable column: row i goes to out[put[i] :], and the rest of its
        `room[i]` bytes is filled with copies of `padding`, or zeros.

        Shapes:  put, room: int64[rows], in bytes.   out: uint8[bytes].
        Raises:  RowOutOfBounds: a row is not among the values, or larger than its room.
        """
        assert len(padding) in {0, element_bytes}
        places = [array.ctypes.data for array in (*spans, put, room, out)]
        first = self._library.gather_runs(
            *self._sources(at, len(put)), element_bytes, *places, len(out), padding or None
        )
        _expect_inside(first, f"column {at}")

    def valid(self, at: int, count: int) -> Bytes:
        """Return 1 for each of the first `count` rows that is not null, else 0.

        Shapes:  result: uint8[count].
        """
        found = np.empty(count, np.uint8)
        self._library.gather_valid(*self._sources(at, count), found.ctypes.data)
        return found


def fields_of(row_layout: RowLayout, addresses: Ints) -> Ints:
    """Return the kernel's description of packed rows and of the columns at these addresses.

    Shapes:  addresses: int64[columns].   result: int64[columns, 3].
    """
    return np.concatenate([row_layout.fields, addresses[:, None]], axis=1)


def _expect_room(row_layout: RowLayout, count: int, out: Bytes, begins: Ints) -> None:
    outside = (begins < 0) | (begins > len(out) - count * row_layout.fields[:, 1])
    if outside.any():
        raise RowOutOfBounds(f"{count} rows of packed columns do not fit into their slab", row=0)


def _expect_inside(first: int, what: str) -> None:
    if first >= 0:
        raise RowOutOfBounds(
            f"row {first} of a slab is not where {what} says: please report this bug in "
            "Dataplane, unless memory changed while it was read",
            row=first,
        )


class TriedImages(Struct):
    """The images of a slab that is gathered again, after other rows have replaced those whose
    images failed. `faults` are the errors, by place in the slab. `pixels` are the pixels of each
    column from the last time, and `numbers` are the numbers of the slab's rows at that time.

    Shapes:  numbers: int32[rows].   pixels[c]: uint8[n * bytes of one image].
    """

    numbers: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    pixels: dict[int, Bytes] = field(default_factory=dict)
    faults: dict[int, ImageError] = field(default_factory=dict)

    def begin_again(self, numbers: npt.NDArray[np.int32]) -> None:
        """Note that the slab, now written with the rows of these numbers, will be written again."""
        self.numbers, self.faults = numbers, {}
        try:
            # Copy the pixels: when the slab is written again, other columns may take their places.
            self.pixels = {at: made.copy() for at, made in self.pixels.items()}
        except MemoryError:
            self.pixels = {}  # all images are decoded again

    def missing(
        self, at: int, numbers: npt.NDArray[np.int32], size: int, out: Bytes
    ) -> list[slice]:
        """Write the pixels of a column that are known from the last time; return the places of the
        other images, which must be decoded.
        """
        made = self.pixels.get(at, out[:0])[: len(out)]
        out[: len(made)] = made
        self.pixels[at] = out
        known, count = len(made) // size, len(out) // size
        others = np.flatnonzero(numbers[:known] != self.numbers[:known]).tolist()
        starts = range(known, count, _IMAGES_AT_ONCE)
        return [
            *(slice(place, place + 1) for place in others),
            *(slice(start, min(start + _IMAGES_AT_ONCE, count)) for start in starts),
        ]
