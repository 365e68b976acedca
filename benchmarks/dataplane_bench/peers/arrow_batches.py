"""Arrow tables as batches, for loaders whose rows are Arrow's."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataplane_bench.model import ColumnType, WorkloadColumn
from dataplane_bench.peers.base import Batch
from dataplane_bench.peers.images import random_resized_crop_flip
from dataplane_bench.peers.padding import padded


class TableBatches:
    """Makes a batch of a table. Numbers that are already contiguous are not copied.

    Each process draws crops from a generator of its own.
    """

    def __init__(self, columns: Sequence[WorkloadColumn], seed: int) -> None:
        self._columns, self._seed = columns, seed
        self._random: np.random.Generator | None = None
        # Arrow's memory is read-only, and nobody here writes into a batch.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

    def __call__(self, table: pa.Table) -> Batch:
        batch: dict[str, Any] = {}
        for column in self._columns:
            values = table[column.name].combine_chunks()
            self._put(batch, column, values)
        return batch

    def nested(self, table: pa.Table) -> Batch:
        """The same for a table of one row that holds each column of the batch as a list."""
        columns = [table[column.name].combine_chunks().flatten() for column in self._columns]
        return self(pa.table(columns, names=[column.name for column in self._columns]))

    def _put(self, batch: dict[str, Any], column: WorkloadColumn, values: pa.Array) -> None:
        import torch

        name = column.name
        match column.kind:
            case ColumnType.FIXED:
                batch[name] = torch.from_numpy(numbers(column, values))
            case ColumnType.RAGGED:
                batch[name], batch[f"{name}.length"] = padded(lists(column, values))
            case ColumnType.STRING:
                batch[name] = values.to_pylist()
            case ColumnType.IMAGE:
                if self._random is None:
                    self._random = np.random.default_rng((self._seed, _worker_index()))
                crops = [random_resized_crop_flip(one, self._random) for one in encoded(values)]
                batch[name] = torch.from_numpy(np.stack(crops))


def _worker_index() -> int:
    from torch.utils.data import get_worker_info

    worker = get_worker_info()
    return 0 if worker is None else worker.id + 1


def numbers(column: WorkloadColumn, values: pa.Array) -> NDArray[Any]:
    """Shapes:  result: dtype[n, *shape], a view where Arrow has the dtype."""
    count = len(values)
    while pa.types.is_fixed_size_list(values.type):
        values = values.flatten()
    array: NDArray[Any] = values.to_numpy(zero_copy_only=False).astype(column.dtype, copy=False)
    return array.reshape(count, *column.shape)


def lists(column: WorkloadColumn, values: pa.Array) -> list[NDArray[Any]]:
    """Shapes:  result: [T_i] of the column's dtype, views."""
    flat = values.flatten().to_numpy(zero_copy_only=False).astype(column.dtype, copy=False)
    offsets = values.offsets.to_numpy()
    bounds = (offsets - offsets[0]).tolist()
    return [flat[start:end] for start, end in pairwise(bounds)]


def encoded(values: pa.Array) -> list[NDArray[np.uint8]]:
    """The byte strings of an array, views."""
    return [np.frombuffer(one.as_buffer(), np.uint8) for one in values]
