"""Make Arrow columns from pieces of a block: each value is copied once, without a Python object."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dataplane.formats.arrays import OFFSET_MAX, widened

_NARROW_BYTES = 4


def bytes_column(pieces: Sequence[memoryview | bytes | None], kind: pa.DataType) -> pa.Array:
    """Make a column with one binary or string value a row; None is null. Beyond 2 GiB the type is
    wide.
    """
    lengths = np.fromiter((-1 if p is None else len(p) for p in pieces), np.int64, len(pieces))
    valid = lengths >= 0
    offsets = offsets_of(np.where(valid, lengths, 0))
    kind = widened(kind) if offsets.itemsize > _NARROW_BYTES else kind
    values = pa.py_buffer(b"".join(piece for piece in pieces if piece is not None))
    return pa.Array.from_buffers(
        kind, len(pieces), [_bitmap(valid), pa.py_buffer(offsets), values], _nulls(valid)
    )


def primitive_column(values: np.ndarray, valid: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Make a column with one number a row.

    Shapes:  values: dtype of kind [rows].   valid: bool[rows].
    """
    buffers = [_bitmap(valid), pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(kind, len(values), buffers, _nulls(valid))


def list_column(counts: np.ndarray, valid: np.ndarray, values: pa.Array) -> pa.Array:
    """Make a column with one list a row; beyond 2^31 values the type is wide.

    Shapes:  counts: int64[rows].   valid: bool[rows].   values: the lists, one after the other.
    """
    offsets = offsets_of(counts)
    make = pa.large_list if offsets.itemsize > _NARROW_BYTES else pa.list_
    return pa.Array.from_buffers(
        make(values.type),
        len(counts),
        [_bitmap(valid), pa.py_buffer(offsets)],
        _nulls(valid),
        children=[values],
    )


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Return Arrow offsets, as narrow as the total allows.

    Shapes:  lengths: int64[rows].   result: int32[rows + 1], or int64[rows + 1].
    """
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets if offsets[-1] > OFFSET_MAX else offsets.astype(np.int32)


def _bitmap(valid: np.ndarray) -> pa.Buffer | None:
    if valid.all():
        return None
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


def _nulls(valid: np.ndarray) -> int:
    return int(len(valid) - np.count_nonzero(valid))
