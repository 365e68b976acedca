"""Arrow columns made from pieces of a block: one copy of each value, no Python object for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dataplane.errors import CorruptShard

_INT32_MAX = (1 << 31) - 1


def bytes_column(
    pieces: Sequence[memoryview | bytes | None], kind: pa.DataType, url: str, field: str
) -> pa.Array:
    """One binary or string value a row; None is null.

    Raises:  CorruptShard: more than 2 GiB in one column of one block.
    """
    lengths = np.fromiter((-1 if p is None else len(p) for p in pieces), np.int64, len(pieces))
    valid = lengths >= 0
    offsets = offsets_of(np.where(valid, lengths, 0), url, field)
    values = pa.py_buffer(b"".join(piece for piece in pieces if piece is not None))
    return pa.Array.from_buffers(
        kind, len(pieces), [_bitmap(valid), pa.py_buffer(offsets), values], _nulls(valid)
    )


def primitive_column(values: np.ndarray, valid: np.ndarray, kind: pa.DataType) -> pa.Array:
    """One number a row.

    Shapes:  values: dtype of kind [rows].   valid: bool[rows].
    """
    buffers = [_bitmap(valid), pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(kind, len(values), buffers, _nulls(valid))


def list_column(
    counts: np.ndarray, valid: np.ndarray, values: pa.Array, url: str, field: str
) -> pa.Array:
    """One list a row.

    Shapes:  counts: int64[rows].   valid: bool[rows].   values: the lists, one after the other.
    Raises:  CorruptShard: more than 2^31 values in one column of one block.
    """
    offsets = pa.py_buffer(offsets_of(counts, url, field))
    return pa.Array.from_buffers(
        pa.list_(values.type),
        len(counts),
        [_bitmap(valid), offsets],
        _nulls(valid),
        children=[values],
    )


def offsets_of(lengths: np.ndarray, url: str, field: str) -> np.ndarray:
    """Arrow offsets.

    Shapes:  lengths: int64[rows].   result: int32[rows + 1].
    Raises:  CorruptShard: the sum does not fit in 32 bits.
    """
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if int(offsets[-1]) > _INT32_MAX:
        raise CorruptShard(
            f"{url}: column {field!r} holds {offsets[-1]} bytes or values in one block; the "
            f"maximum is {_INT32_MAX}. A compressed shard is one block: write smaller or "
            "uncompressed shards",
            shard=url,
            offset=0,
            expected=_INT32_MAX,
            found=int(offsets[-1]),
        )
    return offsets.astype(np.int32)


def _bitmap(valid: np.ndarray) -> pa.Buffer | None:
    if valid.all():
        return None
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


def _nulls(valid: np.ndarray) -> int:
    return int(len(valid) - np.count_nonzero(valid))
