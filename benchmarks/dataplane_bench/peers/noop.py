"""No loader at all: one batch over and over. It shows the highest rate the harness can measure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

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
from dataplane_bench.peers.base import Batch


class Noop:
    """One made-up batch; nothing is read."""

    name = "noop"
    title = "noop (harness)"
    requirements: tuple[str, ...] = ()
    distribution = "torch"
    delivers = frozenset(BatchKind)

    def refuses(self, workload: Workload, case: BenchCase) -> str:
        del workload
        return "" if case.mode is Mode.STEADY else "it reads nothing"

    def layout(self, workload: Workload) -> str:
        del workload
        return "noop"

    def describe(self, workload: Workload) -> str:
        del workload
        return "one batch over and over"

    def settings(self, workload: Workload, case: BenchCase, cores: int) -> tuple[Settings, ...]:
        del workload, case, cores
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
        del number
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
