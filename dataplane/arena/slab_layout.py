"""The layout of a slab, which workers write and trainers and nodes read, and the sizes of its
parts. Pure.

A slot begins with the slab and ends with the row index that it is made from, int32[rows, 2]. A slab
has one column after the other, each aligned to `ALIGN_BYTES`. A FIXED column is one array over all
batches. Any other column has one *piece* per batch: its values, then its side, both aligned.

    kind      values                   side, in int64             then
    PADDED    [rows, width]            lengths [rows]
    RAGGED    [width]                  offsets [rows + 1]
    BYTES     uint8[width]             offsets [rows + 1]         valid uint8[rows]
    STRING    as BYTES, in UTF-8
    OBJECT    one Arrow stream, of `width` bytes
    ARRAY     [width], of any shape        shape [dimensions]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dataplane.model.errors import CorruptShard
from dataplane.model.records import ColumnSpec, Kind, Region

Ints = npt.NDArray[np.int64]
_Number = TypeVar("_Number", int, Ints)

ALIGN_BYTES: Final = 64
SIDE_BYTES: Final = 8
"""Bytes of one length or offset."""
SHAPE_BYTES: Final = 2 * SIDE_BYTES
"""Bytes of the row count and the width of one padded batch."""
INDEX_BYTES: Final = 8
"""Bytes of one row in the row index."""
NUMBER_BYTES: Final = 4
"""Bytes of one row number in an excerpt of a block."""
TEXTS: Final = frozenset({Kind.BYTES, Kind.STRING})


class PlacedColumn(Protocol):
    """The place of one column: for each batch, the offsets of its values and of its side in the
    slab, in bytes, and its width. A FIXED column has only values; an OBJECT column has no side.
    """

    @property
    def values(self) -> Sequence[int]:
        """The offsets of values, in bytes."""

    @property
    def lengths(self) -> Sequence[int]:
        """The offsets of sides, in bytes."""

    @property
    def width(self) -> Sequence[int]:
        """The number of values; the number of bytes for OBJECT."""


class SlabPiece(NamedTuple):
    """Bytes of a slab."""

    offset: int
    length: int


class TextPiece(NamedTuple):
    """One batch of a column of texts.

    Shapes:  values: uint8[width].   offsets: int64[rows + 1].   valid: uint8[rows].
    """

    values: npt.NDArray[np.uint8]
    offsets: Ints
    valid: npt.NDArray[np.uint8]

    def listed(self, spec: ColumnSpec) -> list[Any]:
        """Return the texts, or the bytes of a column of bytes; None for nulls.

        Raises:  CorruptShard: a text is not UTF-8.
        """
        raw, ends = self.values.tobytes(), itertools.pairwise(self.offsets.tolist())
        every = zip(ends, self.valid.tolist(), strict=True)
        found = [raw[begin:end] if is_valid else None for (begin, end), is_valid in every]
        if spec.kind is not Kind.STRING:
            return found
        try:
            return [None if one is None else one.decode() for one in found]
        except UnicodeDecodeError as error:
            raise CorruptShard(
                f"column {spec.name!r} is declared as text, but holds {error.object[:40]!r}, which "
                f"is not UTF-8 ({error.reason} at byte {error.start})",
                field=spec.name,
                expected="UTF-8",
                found=repr(error.object[:40]),
            ) from error


# -- sizes -------------------------------------------------------------------------------------


def aligned(length: _Number) -> _Number:
    """Round up to the next multiple of ALIGN_BYTES."""
    return -(-length // ALIGN_BYTES) * ALIGN_BYTES


def row_index_bytes(rows: int) -> int:
    """Return the bytes that the row index of this many rows takes at the end of a slot."""
    return aligned(rows * INDEX_BYTES)


def row_numbers_bytes(rows: int) -> int:
    """Return how many bytes an excerpt of this many rows has at its start for their int32 row
    numbers.
    """
    return aligned(rows * NUMBER_BYTES)


def in_slot(slot: Region, rows: int) -> tuple[Region, Region]:
    """Return the two parts of a slot: the slab's space, and the row index of this many rows."""
    slab_bytes = slot.length - row_index_bytes(rows)
    index = Region(slot.offset + slab_bytes, rows * INDEX_BYTES)
    return Region(slot.offset, slab_bytes), index


def row_bytes(spec: ColumnSpec) -> int:
    """Return the size of one row of a FIXED column."""
    return spec.value_bytes * math.prod(spec.shape)


def values_bytes(spec: ColumnSpec, width: _Number, rows: _Number) -> _Number:
    """Return the bytes of the values of one piece."""
    if spec.kind is Kind.OBJECT:
        return width
    size = width * spec.value_bytes
    return size * rows if spec.kind is Kind.PADDED else size


def side_count(kind: Kind, rows: _Number) -> _Number:
    """Return how many lengths or offsets the side of a piece has; not for OBJECT."""
    return rows if kind is Kind.PADDED else rows + 1


def side_bytes(kind: Kind, rows: _Number) -> _Number:
    """Return the bytes of the side of one piece."""
    if kind is Kind.OBJECT:
        return rows * 0
    size = side_count(kind, rows) * SIDE_BYTES
    return size + rows if kind in TEXTS else size


def valid_at(side: _Number, rows: _Number) -> _Number:
    """Return the offset of a piece's `valid` bytes, which say which texts are not null, from that
    of its side.
    """
    return side + (rows + 1) * SIDE_BYTES


# -- places ------------------------------------------------------------------------------------


def one_after_other(values: Ints, sides: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the offsets within a column at which the values and the side of each piece begin, and
    those at which the first i pieces end.

    Shapes:  values, sides: int64[batches], bytes.   result: int64[batches], int64[batches],
    int64[batches + 1].
    """
    padded = aligned(values)
    begins = np.cumsum(padded + aligned(sides)) - padded - aligned(sides)
    side_begins = begins + padded
    return begins, side_begins, np.concatenate([[0], side_begins + sides])


def column_begins(ends: Ints) -> Ints:
    """Return the offsets at which columns of these sizes begin.

    Shapes:  ends: int64[columns, n], the sizes for n different numbers of batches.   result: the
    same.
    """
    padded = aligned(ends)
    begins: Ints = np.cumsum(padded, axis=0) - padded
    return begins


def pieces(spec: ColumnSpec, column: PlacedColumn, i: int, rows: int) -> list[SlabPiece]:
    """Return the pieces of a column for batch `i`, with `rows` rows: values, then side if any."""
    if spec.kind is Kind.FIXED:
        return [SlabPiece(column.values[i], rows * row_bytes(spec))]
    values = SlabPiece(column.values[i], values_bytes(spec, column.width[i], rows))
    if spec.kind is Kind.ARRAY:
        return [values, SlabPiece(column.lengths[i], len(spec.shape) * SIDE_BYTES)]
    if spec.kind is Kind.OBJECT:
        return [values]
    return [values, SlabPiece(column.lengths[i], side_bytes(spec.kind, rows))]


def texts(memory: npt.NDArray[np.uint8], column: PlacedColumn, i: int, rows: int) -> TextPiece:
    """Return the texts of batch `i`, which has `rows` rows.

    Shapes:  memory: uint8[bytes], the slab.
    """
    start, side = column.values[i], column.lengths[i]
    offsets = memory[side : side + (rows + 1) * SIDE_BYTES].view(np.int64)
    behind = valid_at(side, rows)
    return TextPiece(memory[start : start + column.width[i]], offsets, memory[behind:][:rows])
