"""Checksums of all samples of an epoch, in any order, to compare the output of all systems.

A sample's hash covers every byte of its columns but images, which every system decodes and crops
in its own way; of those only shape and type are checked, and, where they are our own generated
ones, that an image has the colour of its label. Hashes are added modulo 2^64.

An epoch of a mixture ends when the first source is exhausted, so it is not all samples of all
sources; those that arrive are compared one by one with the shards: rows as the sources have them,
none twice in a pass, and shares.

Packs are compared by all their documents: every token of them, once. A document that is longer than
a pack fills whole packs, and its rest counts as a document: all systems cut it at the same places.
Tokens of documents are not 0, so that 0 is padding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataplane_bench.model import CROP, ColumnType, Workload, WorkloadColumn
from dataplane_bench.peers.harness import batches

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
        self._has_colours = not workload.urls and workload.columns == images.COLUMNS
        self._sum = self._order = 0
        self.sample_count = 0
        self.byte_count = 0

    def add(self, batch: Batch) -> None:
        """Raises:  BatchRefused."""
        hashes, byte_count = sample_hashes(batch, self._workload)
        places = np.arange(self.sample_count, self.sample_count + len(hashes), dtype=np.uint64)
        self._order = (self._order + int(mix(hashes ^ mix(places)).sum(dtype=np.uint64))) % (
            1 << 64
        )
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
        """A digest of the samples in this order."""
        return {"order": f"{self._order:016x}"}


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
    if any(other != count for other in counts.values()):
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
            if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
                raise BatchRefused(f"{name}: not a list of str")
            return sum(len(text.encode()) for text in values)
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
    seen = images.label_of_colour(pixels.mean(axis=(1, 2)))
    wrong = np.flatnonzero(seen != labels)
    if len(wrong):
        first = int(wrong[0])
        raise BatchRefused(
            f"image: sample {int(batch['id'][first])} has the colour of label {seen[first]}, and "
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
    lengths = batch.get(f"{name}.length")
    if lengths is None:
        raise BatchRefused(f"column {name}.length is missing; there are {sorted(batch)}")
    return _array(lengths, f"{name}.length", "int64")


def _hashes(batch: Batch, column: WorkloadColumn) -> Words:
    """Shapes:  result: uint64[B]."""
    values = batch[column.name]
    match column.kind:
        case ColumnType.FIXED:
            return _row_hashes(values.numpy())
        case ColumnType.RAGGED:
            return _ragged_hashes(values.numpy(), _lengths(batch, column.name))
        case ColumnType.STRING:
            return np.array([_text_hash(text) for text in values], np.uint64)
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


DEVIATIONS_MAX = 4.0
"""By how many standard deviations of independent draws a source's share of an epoch may be off."""
_LENGTH_MIN = 0.5
"""An epoch may end before the first source is exhausted, as with worker processes, but not soon."""


class MixtureSum:
    """Looks at the batches of one epoch."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._hashes = np.zeros(workload.sample_count, np.uint64)
        for batch in batches(workload):
            self._hashes[batch["id"].numpy()] = sample_hashes(batch, workload)[0]
        self._seen = np.zeros(workload.sample_count, np.int64)
        self._wrong_count = 0
        self.sample_count = 0
        self.byte_count = 0

    def add(self, batch: Batch) -> None:
        """Raises:  BatchRefused."""
        hashes, byte_count = sample_hashes(batch, self._workload)
        ids = batch["id"].numpy()
        known = (ids >= 0) & (ids < len(self._seen))
        np.add.at(self._seen, ids[known], 1)
        right = self._hashes[ids[known]] == hashes[known]
        self._wrong_count += len(ids) - int(right.sum())
        self.sample_count += len(ids)
        self.byte_count += byte_count

    @property
    def digest(self) -> str:
        """Samples are compared one by one instead."""
        return f"{0:016x}"

    def facts(self) -> dict[str, Any]:
        """The share that each source has, and what is wrong, "" if nothing is."""
        parts = self._workload.parts
        bounds = np.cumsum([part.sample_count for part in parts])[:-1]
        seen = np.split(self._seen, bounds)
        shares = {
            part.name: float(counts.sum()) / self.sample_count
            for part, counts in zip(parts, seen, strict=True)
        }
        again = [part.name for part, counts in zip(parts, seen, strict=True) if np.ptp(counts) > 1]
        return {"shares": shares, "fault": self._fault(shares, again)}

    def _fault(self, shares: dict[str, float], again: list[str]) -> str:
        parts = self._workload.parts
        if self._wrong_count:
            return f"{self._wrong_count:,} samples are not the sources'"
        if again:
            return f"samples of {', '.join(again)} come again before others have come once"
        for part in parts:
            deviation = math.sqrt(part.weight * (1 - part.weight) / self.sample_count)
            if abs(part.weight - shares[part.name]) > DEVIATIONS_MAX * deviation:
                return f"{shares[part.name]:.1%} of the samples are {part.name}'s"
        length = min(part.sample_count / part.weight for part in parts)
        if self.sample_count < length * _LENGTH_MIN:
            return f"{self.sample_count:,} samples, and no source is exhausted"
        return ""


class PackSum:
    """Adds up the documents in the packs of one epoch."""

    def __init__(self, workload: Workload) -> None:
        self._workload, self._weights = workload, weights(workload.length)
        self._sum = self._token_count = self._document_count = 0
        self.sample_count = 0
        self.byte_count = 0

    def add(self, batch: Batch) -> None:
        """Raises:  BatchRefused: the form is wrong, or documents are not told apart."""
        check(batch, self._workload)
        tokens, positions, documents = (
            batch[column.name].numpy() for column in self._workload.batch_columns
        )
        is_token = tokens != 0
        places, in_order = positions[is_token], documents[is_token]
        packs = np.nonzero(is_token)[0]
        starts = _starts(packs, places, in_order)
        words = tokens[is_token].astype(np.uint64) * self._weights[places]
        lengths = np.diff(np.append(starts, len(words))).astype(np.uint64)
        hashes = mix(np.add.reduceat(words, starts, dtype=np.uint64) + mix(lengths))
        self._sum = (self._sum + int(hashes.sum(dtype=np.uint64))) % (1 << 64)
        self._token_count += len(words)
        self._document_count += len(starts)
        self.sample_count += len(tokens)
        self.byte_count += sum(batch[column.name].nbytes for column in self._workload.batch_columns)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits."""
        return f"{self._sum:016x}"

    def facts(self) -> dict[str, Any]:
        """How many documents there were, and which share of the packs is padding."""
        room = self.sample_count * self._workload.length
        return {"documents": self._document_count, "waste": 1 - self._token_count / room}


def _starts(
    packs: NDArray[np.int64], places: NDArray[np.int32], documents: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Where documents begin among the tokens of a batch: at position 0.

    Shapes:  packs, places, documents: [tokens].   result: int64[documents].
    Raises:  BatchRefused: a position does not follow from the one before, or a document's number is
    not the same for all of its tokens, or is its neighbour's.
    """
    first = places == 0
    begins = np.append(True, packs[1:] != packs[:-1])
    follows = np.append(False, places[1:] == places[:-1] + 1)
    if np.any(begins & ~first) or np.any(~first & ~follows):
        raise BatchRefused("position_ids: they do not count up from 0 in each document")
    is_other = np.append(True, documents[1:] != documents[:-1])
    if np.any((first != is_other) & ~begins):
        raise BatchRefused("document_ids: they are not one number for each document of a pack")
    return np.flatnonzero(first)
