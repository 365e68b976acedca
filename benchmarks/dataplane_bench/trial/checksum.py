"""One number for all samples of an epoch, whatever their order: were they the same for everybody?

A sample's hash covers every byte of its columns but images, which every system decodes and crops
in its own way; of those only shape and type are looked at, and, where the workload generated them,
that an image has the colour that its label tells. Hashes are added modulo 2^64.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataplane_bench.model import CROP, Column, Kind, Workload

Words = NDArray[np.uint64]


class BatchRefused(Exception):
    """A batch is not what the contract says."""


class Sum:
    """Adds up the batches of one epoch."""

    def __init__(self, workload: Workload) -> None:
        self._columns = workload.columns
        self._sum = 0
        self.sample_count = 0
        self.byte_count = 0

    def add(self, batch: Mapping[str, Any]) -> None:
        """Raises:  BatchRefused."""
        counts = {column.name: _count(batch, column) for column in self._columns}
        count = next(iter(counts.values()))
        if any(one != count for one in counts.values()):
            raise BatchRefused(f"columns differ in length: {counts}")
        rows = np.zeros(count, np.uint64)
        for index, column in enumerate(self._columns):
            rows += _mix(self._hashes(batch, column) + np.uint64(index + 1))
        # A hash is mixed as a whole, so that no column can stand for another.
        self._sum = (self._sum + int(_mix(rows).sum(dtype=np.uint64))) % (1 << 64)
        self.sample_count += count

    @property
    def digest(self) -> str:
        """16 hexadecimal digits."""
        return f"{self._sum:016x}"

    def _hashes(self, batch: Mapping[str, Any], column: Column) -> Words:
        values = batch[column.name]
        match column.kind:
            case Kind.FIXED:
                array = _array(values, column.name, column.dtype)
                if array.shape[1:] != column.shape:
                    raise BatchRefused(f"{column.name}: shape {array.shape}, not {column.shape}")
                self.byte_count += array.nbytes
                return _row_hashes(array)
            case Kind.RAGGED:
                array = _array(values, column.name, column.dtype)
                lengths = np.asarray(batch[f"{column.name}.length"]).astype(np.int64)
                self.byte_count += array.nbytes
                return _ragged_hashes(array, lengths)
            case Kind.STRING:
                encoded = [one.encode() for one in values]
                self.byte_count += sum(len(one) for one in encoded)
                return np.array([zlib.crc32(one) for one in encoded], np.uint64)
            case Kind.IMAGE:
                array = _array(values, column.name, "uint8")
                if array.shape[1:] != (CROP, CROP, 3):
                    raise BatchRefused(f"{column.name}: shape {array.shape}")
                self.byte_count += array.nbytes
                return np.zeros(len(array), np.uint64)


def _count(batch: Mapping[str, Any], column: Column) -> int:
    if column.name not in batch:
        raise BatchRefused(f"column {column.name} is missing; there are {sorted(batch)}")
    return len(batch[column.name])


def _array(values: Any, name: str, dtype: str) -> NDArray[Any]:
    kind = type(values)
    if f"{kind.__module__}.{kind.__name__}" != "torch.Tensor":
        raise BatchRefused(f"{name}: {kind.__name__}, not a torch tensor")
    array: NDArray[Any] = values.numpy()
    if array.dtype != np.dtype(dtype):
        raise BatchRefused(f"{name}: {array.dtype}, not {dtype}")
    return array


def _row_hashes(array: NDArray[Any]) -> Words:
    """Shapes:  array: [n, ...].   result: uint64[n]."""
    flat = np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
    short = -flat.shape[1] % 8
    if short:
        flat = np.pad(flat, ((0, 0), (0, short)))
    words = np.ascontiguousarray(flat).view(np.uint64)
    weights = _mix(np.arange(1, words.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)
    return np.asarray((words * weights).sum(axis=1, dtype=np.uint64))


def _ragged_hashes(array: NDArray[Any], lengths: NDArray[np.int64]) -> Words:
    """Shapes:  array: [n, T], padded.   lengths: int64[n].   result: uint64[n]."""
    inside = np.arange(array.shape[1]) < lengths[:, None]
    if array.size and np.any(array[~inside]):
        raise BatchRefused("what pads a list is not 0")
    words = _mix(
        array.astype(np.float64).view(np.uint64)
        if array.dtype.kind == "f"
        else array.astype(np.uint64)
    )
    weights = _mix(np.arange(1, words.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)
    sums = (np.where(inside, words, np.uint64(0)) * weights).sum(axis=1, dtype=np.uint64)
    return np.asarray(sums + lengths.astype(np.uint64))


def _mix(words: Words) -> Words:
    """splitmix64's finaliser, of each word."""
    words = np.array(words, np.uint64)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
