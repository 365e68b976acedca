"""Reads slabs as local.proto and model.Kind describe them, without the code that writes them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dataplane.model.records import ColumnSpec, Kind
from dataplane.rpc.messages import Batch, Column


def batch_values(
    slab: memoryview, spec: ColumnSpec, column: Column, batches: Sequence[Batch], i: int
) -> list[Any]:
    """The rows of batch `i`: numbers, lists of numbers, bytes or None, or objects."""
    rows, at = batches[i].rows, column.values[i]
    if spec.kind is Kind.FIXED:
        size = math.prod(spec.shape)
        if i:
            before = batches[i - 1].rows * size * np.dtype(spec.dtype).itemsize
            assert at == column.values[i - 1] + before, "fixed pieces have a gap"
        flat = _array(slab, spec.dtype, rows * size, at)
        return flat.reshape(rows, size).tolist() if spec.shape else flat.tolist()
    assert at % 64 == 0, "a piece is not aligned"
    width = column.width[i]
    if spec.kind is Kind.OBJECT:
        if not width:
            return []
        with pa.ipc.open_stream(bytes(slab[at : at + width])) as reader:
            values: list[Any] = reader.read_all().column(0).to_pylist()
        return values
    side = column.lengths[i]
    assert side % 64 == 0, "lengths are not aligned"
    if spec.kind is Kind.PADDED:
        lengths = _array(slab, "int64", rows, side).tolist()
        padded = _array(slab, spec.dtype, rows * width, at).reshape(rows, width)
        assert width == max(lengths, default=0)
        for row, length in zip(padded, lengths, strict=True):
            assert not row[length:].any(), "padding is not zero"
        return [row[:n].tolist() for row, n in zip(padded, lengths, strict=True)]
    offsets = _array(slab, "int64", rows + 1, side).tolist()
    assert offsets[0] == 0
    assert offsets[-1] == width
    pairs = list(itertools.pairwise(offsets))
    if spec.kind is Kind.RAGGED:
        flat = _array(slab, spec.dtype, width, at)
        return [flat[a:b].tolist() for a, b in pairs]
    valid = _array(slab, "uint8", rows, side + (rows + 1) * 8).tolist()
    whole = bytes(slab[at : at + width])
    return [whole[a:b] if ok else None for (a, b), ok in zip(pairs, valid, strict=True)]


def _array(slab: memoryview, dtype: str, count: int, at: int) -> np.ndarray[Any, Any]:
    if not count:
        return np.empty(0, dtype)
    return np.frombuffer(slab, dtype, count, at)
