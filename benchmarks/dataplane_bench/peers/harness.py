"""Two systems that load nothing: the harness's own limit, and the source that all must deliver.

`noop` shows the highest rate that the harness can measure. `reference` reads the source shards with
pyarrow, one after the other; it takes part in no case, and every system's checksum is compared with
its checksum.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dataplane_bench.model import (
    CROP,
    BatchKind,
    BenchCase,
    ColumnType,
    Mode,
    Settings,
    TrialTask,
    Workload,
)
from dataplane_bench.peers import samples
from dataplane_bench.peers.base import Batch
from dataplane_bench.peers.rows import TableBatches
from dataplane_bench.peers.tokenising import tokenised, tokenising


class Noop:
    """One made-up batch; nothing is read."""

    name = "noop"
    title = "noop (harness)"
    requirements: tuple[str, ...] = ()
    distribution = "torch"
    delivers = frozenset(BatchKind)

    def refuses(self, workload: Workload, case: BenchCase) -> str:
        return "" if case.mode is Mode.STEADY else "it reads nothing"

    def layout(self, workload: Workload) -> str:
        return "noop"

    def describe(self, workload: Workload) -> str:
        return "one batch over and over"

    def settings(self, workload: Workload, case: BenchCase, cores: int) -> tuple[Settings, ...]:
        return ({},)

    def prepare(self, workload: Workload, folder: Path) -> None:
        """Nothing to convert."""

    def open(self, task: TrialTask) -> _Repeated:
        return _Repeated(_made_up(task.workload), task.workload.sample_count // task.size)


class _Repeated:
    def __init__(self, batch: Batch, sample_count: int) -> None:
        self._batch = batch
        size = len(next(iter(batch.values())))
        self._times = max(sample_count // size, 1)

    def epoch(self, number: int) -> Iterator[Batch]:
        return itertools.repeat(self._batch, self._times)

    def close(self) -> None:
        """Nothing was opened."""


def _made_up(workload: Workload) -> Batch:
    import torch

    size = workload.batch_size
    batch: dict[str, object] = {}
    for column in workload.batch_columns:
        match column.kind:
            case ColumnType.FIXED:
                dtype = getattr(torch, column.dtype)
                batch[column.name] = torch.zeros((size, *column.shape), dtype=dtype)
            case ColumnType.RAGGED:
                dtype = getattr(torch, column.dtype)
                batch[column.name] = torch.zeros((size, 1), dtype=dtype)
                batch[f"{column.name}.length"] = torch.ones(size, dtype=torch.int64)
            case ColumnType.STRING:
                batch[column.name] = [""] * size
            case ColumnType.IMAGE:
                batch[column.name] = torch.zeros((size, CROP, CROP, 3), dtype=torch.uint8)
    return batch


class Reference:
    """Single-threaded, in order, from Parquet."""

    name = "reference"
    title = "the source"
    requirements: tuple[str, ...] = ()
    distribution = "pyarrow"

    def layout(self, workload: Workload) -> str:
        return "reference"

    def describe(self, workload: Workload) -> str:
        return "the source's Parquet shards, in order"

    def settings(self, workload: Workload, case: BenchCase, cores: int) -> tuple[Settings, ...]:
        return ({},)

    def prepare(self, workload: Workload, folder: Path) -> None:
        """Nothing to convert."""

    def open(self, task: TrialTask) -> _Source:
        return _Source(task.workload)


class _Source:
    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def epoch(self, number: int) -> Iterator[Batch]:
        return batches(self._workload)

    def close(self) -> None:
        """Nothing is open."""


def batches(workload: Workload) -> Iterator[Batch]:
    """The samples in order; documents that a trainer wants packed fill a pack each, or several."""
    names = [column.name for column in workload.columns]
    tables, tokenise = TableBatches(workload.columns, 0), None
    if workload.delivery is BatchKind.TOKENISED:
        tokenise = tokenising(workload)
    for shard in workload.shards:
        for rows in pq.ParquetFile(shard).iter_batches(workload.batch_size, columns=names):
            batch = dict(tables(pa.Table.from_batches([rows])))
            if tokenise is not None:
                yield tokenised(tokenise, batch)
            elif workload.delivery is BatchKind.PACKED:
                yield from samples.unpacked(batch, workload.length, workload.batch_size)
            else:
                yield batch
