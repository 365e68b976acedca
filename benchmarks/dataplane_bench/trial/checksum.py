"""A checksum of all samples of an epoch, in any order, to compare the output of all systems.

A sample's hash covers every byte of its columns but images, which every system decodes and crops
in its own way; of those only shape and type are looked at, and, where they are our own generated
ones, that an image has the colour that its label tells. Hashes are added modulo 2^64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataplane_bench.model import CROP, ColumnType, Workload, WorkloadColumn

Words = NDArray[np.uint64]
Batch = Mapping[str, Any]


class BatchRefused(Exception):
    """A batch breaks the contract."""


def check(batch: Batch, workload: Workload) -> None:
    """Check the form of a batch, not its values.   Raises:  BatchRefused."""
    count = _sample_count(batch, workload)
    if not 0 < count <= workload.batch_size:
        raise BatchRefused(f"{count} samples, not {workload.batch_size}")
    for column in workload.batch_columns:
        _check_values(batch, column)


class Sum:
    """Adds up the batches of one epoch."""

    def __init__(self, workload: Workload) -> None:
        from dataplane_bench.workloads import images

        self._workload = workload
        self._has_colours = not workload.urls and workload.columns == images.RECIPE.columns
        self._sum = 0
        self.sample_count = 0
        self.byte_count = 0

    def add(self, batch: Batch) -> None:
        """Raises:  BatchRefused."""
        hashes, byte_count = sample_hashes(batch, self._workload)
        if self._has_colours:
            _check_colours(batch)
        self._sum = (self._sum + int(hashes.sum(dtype=np.uint64))) % (1 << 64)
        self.sample_count += len(hashes)
        self.byte_count += byte_count

    @property
    def digest(self) -> str:
        """16 hexadecimal digits."""
        return f"{self._sum:016x}"

    def facts(self) -> dict[str, Any]:
        """What else there is to say about the samples: nothing."""
        return {}


def sample_hashes(batch: Batch, workload: Workload) -> tuple[Words, int]:
    """The hash of each sample, and the bytes of all.

    Shapes:  result: uint64[B].
    Raises:  BatchRefused.
    """
    rows, byte_count = np.zeros(_sample_count(batch, workload), np.uint64), 0
    for index, column in enumerate(workload.batch_columns):
        byte_count += _check_values(batch, column)
        # Mixed with the column's place, so that no column can stand for another.
        rows += mix(_hashes(batch, column) + np.uint64(index + 1))
    # A sample's hash is mixed as a whole, so that no sample can lend a column to another.
    return mix(rows), byte_count


def _sample_count(batch: Batch, workload: Workload) -> int:
    for column in workload.batch_columns:
        if column.name not in batch:
            raise BatchRefused(f"column {column.name} is missing; there are {sorted(batch)}")
    counts = {column.name: len(batch[column.name]) for column in workload.batch_columns}
    count = next(iter(counts.values()))
    if any(one != count for one in counts.values()):
        raise BatchRefused(f"columns differ in length: {counts}")
    return count


def _check_values(batch: Batch, column: WorkloadColumn) -> int:
    """Their bytes.   Raises:  BatchRefused: a wrong type, shape or padding."""
    values, name = batch[column.name], column.name
    match column.kind:
        case ColumnType.FIXED:
            array = _array(values, name, column.dtype)
            _check_shape(array, name, column.shape)
        case ColumnType.RAGGED:
            array = _array(values, name, column.dtype)
            _check_padding(array, _lengths(batch, name), name)
        case ColumnType.STRING:
            if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
                raise BatchRefused(f"{name}: not a list of str")
            return sum(len(one.encode()) for one in values)
        case ColumnType.IMAGE:
            array = _array(values, name, "uint8")
            _check_shape(array, name, (CROP, CROP, 3))
    return array.nbytes


def _check_shape(array: NDArray[Any], name: str, shape: tuple[int, ...]) -> None:
    if array.shape[1:] != shape:
        raise BatchRefused(f"{name}: shape {array.shape}, not {('B', *shape)}")


def _check_padding(array: NDArray[Any], lengths: NDArray[np.int64], name: str) -> None:
    if array.ndim != 2 or len(lengths) != len(array):
        raise BatchRefused(f"{name}: shape {array.shape} and {len(lengths)} lengths")
    if len(lengths) and not 0 <= lengths.min() <= lengths.max() <= array.shape[1]:
        raise BatchRefused(f"{name}: lengths of up to {lengths.max()} in {array.shape[1]} places")
    outside = np.arange(array.shape[1]) >= lengths[:, None]
    if np.any(array, where=outside):
        raise BatchRefused(f"{name}: what pads a list is not 0")


def _check_colours(batch: Batch) -> None:
    from dataplane_bench.workloads import images

    pixels, labels = batch["image"].numpy(), batch["label"].numpy()
    found = images.label_of_colour(pixels.mean(axis=(1, 2)))
    wrong = np.flatnonzero(found != labels)
    if len(wrong):
        first = int(wrong[0])
        raise BatchRefused(
            f"image: sample {int(batch['id'][first])} has the colour of label {found[first]}, and "
            f"comes with label {labels[first]}; so do {len(wrong)} of {len(labels)}"
        )


def _array(values: Any, name: str, dtype: str) -> NDArray[Any]:
    kind = type(values)
    if f"{kind.__module__}.{kind.__name__}" != "torch.Tensor":
        raise BatchRefused(f"{name}: {kind.__name__}, not a torch tensor")
    array: NDArray[Any] = values.numpy()
    if array.dtype != np.dtype(dtype):
        raise BatchRefused(f"{name}: {array.dtype}, not {dtype}")
    return array


def _lengths(batch: Batch, name: str) -> NDArray[np.int64]:
    found = batch.get(f"{name}.length")
    if found is None:
        raise BatchRefused(f"column {name}.length is missing; there are {sorted(batch)}")
    return _array(found, f"{name}.length", "int64")


def _hashes(batch: Batch, column: WorkloadColumn) -> Words:
    """Shapes:  result: uint64[B]."""
    values = batch[column.name]
    match column.kind:
        case ColumnType.FIXED:
            return _row_hashes(values.numpy())
        case ColumnType.RAGGED:
            return _ragged_hashes(values.numpy(), _lengths(batch, column.name))
        case ColumnType.STRING:
            return np.array([_text_hash(one) for one in values], np.uint64)
        case ColumnType.IMAGE:
            return np.zeros(len(values), np.uint64)


def _row_hashes(array: NDArray[Any]) -> Words:
    """Shapes:  array: [B, ...].   result: uint64[B]."""
    size = int(np.prod(array.shape[1:], dtype=np.int64)) * array.itemsize
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(len(array), size)
    flat = np.pad(flat, ((0, 0), (0, -size % 8)))
    return _weighted(flat.view(np.uint64))


def _ragged_hashes(array: NDArray[Any], lengths: NDArray[np.int64]) -> Words:
    """Shapes:  array: [B, T], padded with 0.   lengths: int64[B].   result: uint64[B]."""
    # Word by word and a 0 for 0, so that the width of the batch is no part of it.
    wide = np.zeros((*array.shape, 8), np.uint8)
    flat = np.ascontiguousarray(array).view(np.uint8)
    wide[..., : array.itemsize] = flat.reshape(*array.shape, array.itemsize)
    return _weighted(wide.view(np.uint64)[..., 0]) + mix(lengths.astype(np.uint64))


def _text_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _weighted(words: Words) -> Words:
    """Shapes:  words: uint64[B, n].   result: uint64[B], in which each place has its own weight."""
    return np.asarray((words * weights(words.shape[1])).sum(axis=1, dtype=np.uint64))


def weights(count: int) -> Words:
    """One for each place of a row, odd numbers.   Shapes:  result: uint64[count]."""
    return mix(np.arange(1, count + 1, dtype=np.uint64)) | np.uint64(1)


def mix(words: Words) -> Words:
    """splitmix64's finaliser, of each word.

    Source:  Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014.
    """
    words = np.array(words, np.uint64)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
