"""The source shards as pyarrow reads them, one after the other: what every system must deliver.

It takes part in no case; the harness compares every system's checksum with its checksum.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataplane_bench.model import (
    BatchKind,
    BenchCase,
    ColumnType,
    Settings,
    TrialTask,
    Workload,
    WorkloadColumn,
)
from dataplane_bench.peers import documents
from dataplane_bench.peers.base import Batch
from dataplane_bench.peers.tokenising import tokenised, tokenising


class Reference:
    """Single-threaded, in order, from Parquet."""

    name = "reference"
    title = "the source"
    requirements: tuple[str, ...] = ()
    distribution = "pyarrow"

    def refuses(self, workload: Workload, case: BenchCase) -> str:
        del workload, case
        return ""

    def layout(self, workload: Workload) -> str:
        del workload
        return "reference"

    def describe(self, workload: Workload) -> str:
        del workload
        return "the source's Parquet shards, in order"

    def settings(self, workload: Workload, case: BenchCase, cores: int) -> tuple[Settings, ...]:
        del workload, case, cores
        return ({},)

    def prepare(self, workload: Workload, folder: Path) -> None:
        """Nothing to convert."""

    def open(self, task: TrialTask) -> _Source:
        return _Source(task.workload)


class _Source:
    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def epoch(self, number: int) -> Iterator[Batch]:
        del number
        return batches(self._workload)

    def close(self) -> None:
        """Nothing is open."""


def batches(workload: Workload) -> Iterator[Batch]:
    """The samples in order; documents that a trainer wants packed fill a pack each, or several."""
    names = [column.name for column in workload.columns]
    tokenise = None
    if workload.delivery is BatchKind.TOKENISED:
        tokenise = tokenising(workload)
    for shard in workload.shards:
        for rows in pq.ParquetFile(shard).iter_batches(workload.batch_size, columns=names):
            batch: dict[str, Any] = {}
            for column in workload.columns:
                _put(batch, column, rows[column.name])
            if tokenise is not None:
                yield tokenised(tokenise, batch)
            elif workload.delivery is BatchKind.PACKED:
                yield from documents.unpacked(batch, workload.length, workload.batch_size)
            else:
                yield batch


def _put(batch: dict[str, Any], column: WorkloadColumn, values: pa.Array) -> None:
    import torch

    match column.kind:
        case ColumnType.FIXED:
            flat = values.flatten() if column.shape else values
            while pa.types.is_fixed_size_list(flat.type):
                flat = flat.flatten()
            array = np.array(flat, dtype=column.dtype)
            batch[column.name] = torch.from_numpy(array.reshape(len(values), *column.shape))
        case ColumnType.RAGGED:
            lengths = np.diff(np.array(values.offsets))
            padded = np.zeros((len(values), int(lengths.max(initial=0))), column.dtype)
            inside = np.arange(padded.shape[1]) < lengths[:, None]
            padded[inside] = np.array(values.flatten(), dtype=column.dtype)
            batch[column.name] = torch.from_numpy(padded)
            batch[f"{column.name}.length"] = torch.from_numpy(lengths.astype(np.int64))
        case ColumnType.STRING:
            batch[column.name] = values.to_pylist()
        case ColumnType.IMAGE:
            from dataplane_bench.peers.images import random_resized_crop_flip

            random = np.random.default_rng(0)
            crops = [random_resized_crop_flip(one.as_py(), random) for one in values]
            batch[column.name] = torch.from_numpy(np.stack(crops))
