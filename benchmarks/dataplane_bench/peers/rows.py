"""Rows of the source, one by one or in Arrow tables, and batches of them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dataplane_bench.model import BenchCase, ColumnType, TrialTask, Workload, WorkloadColumn
from dataplane_bench.peers.base import Batch
from dataplane_bench.peers.samples import padded, random_resized_crop_flip

_ROWS_AT_ONCE = 1024

Row = Mapping[str, Any]
"""A sample by column: FIXED is a number or an array, RAGGED an array, STRING str, IMAGE bytes."""


def refuses_tables(workload: Workload) -> str:
    """Why a loader that stores sample by sample cannot take these; "" if it can."""
    if workload.shape == "tabular":
        return "no columnar format; one record a row is not how tables are stored"
    return ""


def refuses_limit(workload: Workload, case: BenchCase, needed_bytes: int, why: str) -> str:
    """Why a loader whose cache cannot be smaller than this takes no part where caches are limited;
    "" if it can. The samples are taken to be as large as in the source.
    """
    stored_bytes = sum(path.stat().st_size for path in workload.shards)
    limit = case.cache_bytes_max(stored_bytes)
    if not case.cache_share or limit >= needed_bytes:
        return ""
    return f"{why} at least, more than {case.cache_share:.0%} of these samples: --scale"


def rows(workload: Workload, shards: Sequence[Path]) -> Iterator[Row]:
    """The samples of these shards of the source, in order."""
    names = [column.name for column in workload.columns]
    for shard in shards:
        for table in pq.ParquetFile(shard).iter_batches(_ROWS_AT_ONCE, columns=names):
            values = [_values(column, table[column.name]) for column in workload.columns]
            for row in zip(*values, strict=True):
                yield dict(zip(names, row, strict=True))


def _values(column: WorkloadColumn, values: pa.Array) -> Sequence[Any]:
    if column.kind is ColumnType.RAGGED:
        return lists(column, values)
    if column.kind is ColumnType.FIXED and column.shape:
        return numbers(column, values)  # type: ignore[return-value]
    pylist: list[Any] = values.to_pylist()
    return pylist


def plain(row: Row) -> dict[str, Any]:
    """The row with its arrays and texts as bytes, which every format stores correctly."""
    made: dict[str, Any] = {}
    for name, value in row.items():
        match value:
            case np.ndarray():
                made[name] = value.tobytes()
            case str():
                made[name] = value.encode()
            case _:
                made[name] = value
    return made


class RowCollate:
    """One batch of rows, their images decoded and cropped. What is not a number may be bytes, or an
    array of them.

    Each process that it is called in draws crops from a generator of its own.
    """

    def __init__(self, workload: Workload) -> None:
        self._columns = workload.columns
        self._random: np.random.Generator | None = None

    def __call__(self, batch_rows: Sequence[Row]) -> Batch:
        import torch

        batch: dict[str, Any] = {}
        for column in self._columns:
            name = column.name
            values = [row[name] for row in batch_rows]
            match column.kind:
                case ColumnType.FIXED if not column.shape:
                    batch[name] = torch.from_numpy(np.array(values, column.dtype))
                case ColumnType.FIXED:
                    batch[name] = _stacked(_row_arrays(column, values))
                case ColumnType.RAGGED:
                    batch[name], batch[f"{name}.length"] = padded(_row_arrays(column, values))
                case ColumnType.STRING:
                    batch[name] = [_text(text) for text in values]
                case ColumnType.IMAGE:
                    batch[name] = self._crops(values)
        return batch

    def _crops(self, encoded: Sequence[bytes]) -> Any:
        if self._random is None:
            import torch

            # torch gives every DataLoader worker a seed of its own.
            self._random = np.random.default_rng(torch.initial_seed())
        return _stacked([random_resized_crop_flip(image, self._random) for image in encoded])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else bytes(value).decode()


def _row_arrays(column: WorkloadColumn, values: Sequence[Any]) -> Sequence[NDArray[Any]]:
    if isinstance(values[0], np.ndarray):
        return values
    arrays = [np.frombuffer(row, column.dtype) for row in values]
    if len(column.shape) > 1:
        return [row.reshape(column.shape) for row in arrays]
    return arrays


def _stacked(values: Sequence[Any]) -> Any:
    """In a DataLoader's worker torch gathers into shared memory: no second copy on the way."""
    from torch.utils.data import default_collate, get_worker_info

    if get_worker_info() is None:
        import torch

        return torch.from_numpy(np.stack(values))
    return default_collate(list(values))


class StatefulLoader:
    """A loader with a state, which counts its epochs itself."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def epoch(self, number: int) -> Iterator[Batch]:
        return iter(self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()

    def resume(self, state: Any) -> Iterator[Batch]:
        self._loader.load_state_dict(state)
        return iter(self._loader)

    def close(self) -> None:
        self._loader = None


def record_type(columns: Sequence[WorkloadColumn]) -> np.dtype[np.void]:
    """All numbers of a row as one packed record, the widest first, for formats that take bytes."""
    wide_first = sorted(columns, key=lambda column: -column.sample_bytes)
    return np.dtype([(column.name, column.dtype, column.shape) for column in wide_first])


def announce(task: TrialTask) -> None:
    """Put what launchers tell each rank into this process' environment, where loaders look for it:
    torchrun's names, and GLOBAL_RANK, which is Lightning's.
    """
    rank, size = str(task.rank), str(task.size)
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, GLOBAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size
    )


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
                    self._random = np.random.default_rng((self._seed, worker_index()))
                crops = [random_resized_crop_flip(image, self._random) for image in encoded(values)]
                batch[name] = torch.from_numpy(np.stack(crops))


def worker_index() -> int:
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
    return [np.frombuffer(value.as_buffer(), np.uint8) for value in values]
