"""Libraries whose files are read where they were written: Megatron's, deltalake's and pyiceberg's.

None of them shuffles or makes batches: a trainer takes rows by index, in torch's DataLoader, or
shuffles what a scan yields in a buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dataplane_bench.model import BenchCase, Settings, StorageKind, TrialTask, Workload
from dataplane_bench.peers.base import SHUFFLE_BUFFER, Batch
from dataplane_bench.peers.rows import TableBatches, rows

_FILE_BYTES = 32 << 20
_BUFFERED_BATCHES = 8
_LOCATION = "metadata_location"
Take = Callable[[NDArray[np.int64]], Batch]


@dataclass(frozen=True, slots=True)
class OwnFiles:
    """An adapter of a library: how it writes files, takes rows by index, and scans tables."""

    name: str
    title: str
    distribution: str
    requirements: tuple[str, ...]
    shape: str
    write: Callable[[Workload, Path], None]
    take: Callable[[TrialTask], Take]
    scan: Callable[[Path], Iterator[pa.RecordBatch]] | None = None

    def refuses(self, workload: Workload, case: BenchCase) -> str:
        if workload.shape != self.shape or (self.scan is None and len(workload.columns) > 1):
            return f"it has no format for these samples, only for {self.shape}"
        return "" if case.store is StorageKind.LOCAL else "its adapter reads local files"

    def layout(self, workload: Workload) -> str:
        return self.name

    def describe(self, workload: Workload) -> str:
        buffered = ", or a scan in a buffer" if self.scan else ""
        return f"its own files; rows by index in torch's DataLoader{buffered}"

    def settings(self, workload: Workload, case: BenchCase, cores: int) -> tuple[Settings, ...]:
        scanned: tuple[Settings, ...] = ({"scan": True, "num_workers": 0},) if self.scan else ()
        return ({"num_workers": cores}, *scanned, {"num_workers": 0})

    def prepare(self, workload: Workload, folder: Path) -> None:
        self.write(workload, folder)

    def open(self, task: TrialTask) -> _Opened:
        return _Opened(self, task)


class _Rows:
    """A map-style dataset of whole batches, by the indexes of their rows."""

    def __init__(self, take: Take, count: int) -> None:
        self._take, self._count = take, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, ids: NDArray[np.int64]) -> Batch:
        return self._take(ids)


class _Opened:
    def __init__(self, files: OwnFiles, task: TrialTask) -> None:
        from torch.utils.data import DataLoader

        from dataplane_bench.peers.torch_datasets import BatchSampler, as_it_is

        self._files, self._task = files, task
        self._order = BatchSampler(task)
        self._iterator: Any = None
        self._loader: Any = None
        if not task.settings.get("scan"):
            workers = task.settings["num_workers"]
            self._loader = DataLoader(
                _Rows(files.take(task), task.workload.sample_count),  # type: ignore[arg-type]
                batch_size=None,
                sampler=self._order,
                collate_fn=as_it_is,  # type: ignore[arg-type]
                num_workers=workers,
                persistent_workers=workers > 0,
            )

    def epoch(self, number: int) -> Iterator[Batch]:
        if self._loader is None:
            assert self._files.scan is not None
            return _buffered(self._files.scan(self._task.place.folder), self._task, number)
        self._order.epoch = number
        self._iterator = iter(self._loader)
        return iter(self._iterator)

    def close(self) -> None:
        if self._iterator is not None and self._task.settings["num_workers"]:
            # No public way ends workers before the interpreter finds them unreachable.
            self._iterator._shutdown_workers()  # noqa: SLF001
        self._iterator = None


def _buffered(scanned: Iterator[pa.RecordBatch], task: TrialTask, number: int) -> Iterator[Batch]:
    """Batches of what a scan yields, shuffled in a buffer."""
    size = task.workload.batch_size
    room = max(SHUFFLE_BUFFER, _BUFFERED_BATCHES * size)
    random = np.random.default_rng((task.seed, number))
    batches = TableBatches(task.workload.columns, task.seed)

    def cut(held: list[pa.RecordBatch], end: int) -> Iterator[Batch]:
        table = pa.Table.from_batches(held)
        if not task.case.in_order:
            table = table.take(random.permutation(table.num_rows))
        for at in range(0, end, size):
            yield batches(table.slice(at, min(size, end - at)))
        held[:] = table.slice(end).to_batches()

    held: list[pa.RecordBatch] = []
    for rows_ in scanned:
        held.append(rows_)
        count = sum(len(some) for some in held)
        if count >= room:
            yield from cut(held, count - count % size)
    if held:
        yield from cut(held, sum(len(some) for some in held))


def _taken(table: pa.Table, task: TrialTask) -> Take:
    whole = table.combine_chunks()
    batches = TableBatches(task.workload.columns, task.seed)
    return lambda ids: batches(whole.take(ids))


def _prefix(folder: Path) -> str:
    return str(folder / "tokens")


def _write_megatron(workload: Workload, folder: Path) -> None:
    import torch
    from megatron.core.datasets import indexed_dataset

    (column,) = workload.columns
    prefix = _prefix(folder)
    dtype = np.dtype(column.dtype).type
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for row in rows(workload, workload.shards):
        builder.add_item(torch.from_numpy(row[column.name].copy()))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def _take_megatron(task: TrialTask) -> Take:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    (column,) = task.workload.columns
    dataset = IndexedDataset(_prefix(task.place.folder))

    def take(ids: NDArray[np.int64]) -> Batch:
        return {column.name: torch.from_numpy(np.stack([dataset[row] for row in ids.tolist()]))}

    return take


def _write_delta(workload: Workload, folder: Path) -> None:
    from deltalake import write_deltalake

    write_deltalake(folder, pq.read_table(workload.source), target_file_size=_FILE_BYTES)


def _delta(folder: Path) -> Any:
    from deltalake import DeltaTable

    return DeltaTable(folder)


def _write_iceberg(workload: Workload, folder: Path) -> None:
    """Write a table beside the folder, since its metadata have the whole paths of files, and the
    folder is renamed when it is complete.
    """
    from pyiceberg.catalog.sql import SqlCatalog

    place = folder.with_name(f"{folder.name.lstrip('.')}-files")
    place.mkdir()
    catalog = SqlCatalog("bench", uri="sqlite:///:memory:", warehouse=f"file://{place}")
    catalog.create_namespace("bench")
    source = pq.read_table(workload.source)
    limits = {"write.target-file-size-bytes": str(_FILE_BYTES)}
    table = catalog.create_table("bench.rows", schema=source.schema, properties=limits)
    table.append(source)
    (folder / _LOCATION).write_text(table.metadata_location, encoding="utf-8")


def metadata_location(folder: Path) -> str:
    """The file of metadata of the table that `_write_iceberg` wrote."""
    return (folder / _LOCATION).read_text(encoding="utf-8")


def _iceberg(folder: Path) -> Any:
    from pyiceberg.table import StaticTable

    return StaticTable.from_metadata(metadata_location(folder)).scan()


Megatron = functools.partial(
    OwnFiles, "megatron", "Megatron Core", "megatron-core", ("megatron-core",), "tokens",
    _write_megatron, _take_megatron,
)  # fmt: skip
Delta = functools.partial(
    OwnFiles, "delta", "deltalake", "deltalake", ("deltalake",), "tabular",
    _write_delta,
    lambda task: _taken(_delta(task.place.folder).to_pyarrow_table(), task),
    lambda folder: _delta(folder).to_pyarrow_dataset().to_batches(),
)  # fmt: skip
Iceberg = functools.partial(
    OwnFiles, "iceberg", "PyIceberg", "pyiceberg", ("pyiceberg[pyarrow,sql-sqlite]",), "tabular",
    _write_iceberg,
    lambda task: _taken(_iceberg(task.place.folder).to_arrow(), task),
    lambda folder: _iceberg(folder).to_arrow_batch_reader(),
)  # fmt: skip
