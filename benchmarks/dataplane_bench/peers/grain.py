"""Grain: a MapDataset, shuffled as a whole, in threads or in worker processes.

Images are records of ArrayRecord files, its own format. Everything else is gathered from arrays in
mapped files, batch by batch: ArrayRecord hands out one record after the other, and was six times
slower with rows of 8 KiB. Grain's own shuffle costs some microseconds of Python a row; a numpy
permutation of each epoch, whose batches are what Grain numbers, is tried beside it.

Source: https://google-grain.readthedocs.io, "Dataset basics", "Data sources", and the docstrings
of ReadOptions (no threads for what is in memory), mp_prefetch, FirstFitPackIterDataset and
BestFitPackIterDataset.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataplane_bench.model import (
    BatchKind,
    BenchCase,
    ColumnType,
    Mode,
    Settings,
    StorageKind,
    TrialTask,
    Workload,
)
from dataplane_bench.peers import memmaps, rows, samples
from dataplane_bench.peers.base import Batch
from dataplane_bench.peers.samples import pieces

_FILES = 8
_BUFFERED = 2
"""Batches that each thread prefetches."""
_ENDLESS = 1 << 40


class Grain:
    """Samples by number, from ArrayRecord or from mapped arrays."""

    name = "grain"
    title = "Grain"
    requirements = ("grain",)
    distribution = "grain"
    delivers = frozenset({BatchKind.STORED, BatchKind.MIXED, BatchKind.PACKED})

    def refuses(self, workload: Workload, case: BenchCase) -> str:
        return "it reads no S3" if case.store is StorageKind.S3 else ""

    def layout(self, workload: Workload) -> str:
        return "array_record" if workload.of_kind(ColumnType.IMAGE) else memmaps.LAYOUT

    def describe(self, workload: Workload) -> str:
        if workload.of_kind(ColumnType.IMAGE):
            return "ArrayRecord files, shuffled over the whole epoch"
        if workload.delivery is BatchKind.PACKED:
            return _PACKS_DESCRIBED
        if workload.parts:
            return "arrays in mapped files, shuffled over the whole epoch; MapDataset.mix"
        return "arrays in mapped files, shuffled over the whole epoch"

    def settings(self, workload: Workload, case: BenchCase, cores: int) -> tuple[Settings, ...]:
        share = max(cores // case.process_count, 1)
        if workload.of_kind(ColumnType.IMAGE):
            return (
                {"workers": 0, "threads": 16},
                {"workers": 0, "threads": share},
                {"workers": share, "threads": 1},
            )
        if workload.delivery is BatchKind.PACKED:
            return _pack_choices(share)
        if workload.parts:
            return tuple(
                {"order": "grain", "workers": workers, "threads": threads}
                for workers, threads in ((0, 0), (0, 1), (0, max(share, 2)), (1, 0))
            )
        return (
            {"order": "grain", "workers": 0, "threads": 0},
            {"order": "numpy", "workers": 0, "threads": 1},
            {"order": "numpy", "workers": 0, "threads": max(share, 2)},
            {"order": "numpy", "workers": 1, "threads": 0},
        )

    def prepare(self, workload: Workload, folder: Path) -> None:
        if not workload.of_kind(ColumnType.IMAGE):
            memmaps.write(workload, folder)
            return
        from array_record.python.array_record_module import ArrayRecordWriter

        pack = _Records(workload).pack
        shards = workload.shards
        for index in range(_FILES):
            writer = ArrayRecordWriter(
                str(folder / f"{index:05d}.array_record"), "group_size:1,uncompressed"
            )
            for row in rows.rows(workload, shards[index::_FILES]):
                writer.write(pack(row))
            writer.close()

    def open(self, task: TrialTask) -> _Opened | _Packs:
        if task.workload.delivery is BatchKind.PACKED:
            return _Packs(task)
        return _Opened(task)


class _Opened:
    """One endless iterator; an epoch is a fixed count of batches. Workers persist over epochs."""

    def __init__(self, task: TrialTask) -> None:
        import grain
        import torch

        # Ranks of one host share its cores; threads and workers are Grain's, not torch's.
        torch.set_num_threads(1)
        count, size = task.workload.sample_count, task.workload.batch_size
        self._length = -(-len(range(task.rank, count, task.size)) // size)
        self._matrices = [dense for dense in memmaps.dense_files(task.workload) if dense.is_matrix]
        if task.workload.of_kind(ColumnType.IMAGE):
            files = sorted(str(path) for path in task.place.folder.glob("*.array_record"))
            records = _Records(task.workload)
            source = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(files))
            mine = source.seed(task.seed).shuffle()[task.rank :: task.size]
            samples = mine.random_map(records.sample)
            batches = samples.batch(size, batch_fn=records.collate).repeat()
            self._matrices = []
        elif task.settings["order"] == "numpy":
            batches = grain.MapDataset.range(_ENDLESS).map(_Permuted(task)).map(_Gather(task))
        else:
            ids = _mixed(task) if task.workload.parts else _shuffled(range(count), task.seed)
            self._length = -(-len(range(task.rank, len(ids), task.size)) // size)
            mine = ids[task.rank :: task.size].batch(size, batch_fn=np.array)
            batches = mine.repeat().map(_Gather(task))
        threads, workers = task.settings["threads"], task.settings["workers"]
        options = grain.ReadOptions(
            num_threads=threads, prefetch_buffer_size=max(_BUFFERED * threads, 1)
        )
        endless = batches.to_iter_dataset(options)
        if workers:
            buffers = grain.MultiprocessingOptions(workers, per_worker_buffer_size=_BUFFERED)
            endless = endless.mp_prefetch(buffers)
        self._iterator = iter(endless)
        self._done = 0

    def epoch(self, number: int) -> Iterator[Batch]:
        if self._done != number * self._length:
            from grain.experimental import set_next_index

            self._done = number * self._length
            set_next_index(self._iterator, self._done)
        return self._rest()

    def state(self) -> Any:
        return {"iterator": self._iterator.get_state(), "done": self._done}

    def resume(self, state: Any) -> Iterator[Batch]:
        self._iterator.set_state(state["iterator"])
        self._done = state["done"]
        return self._rest()

    def _rest(self) -> Iterator[Batch]:
        """The rest of the epoch."""
        import torch

        for _ in range(self._length - self._done % self._length):
            # Count before yielding: the consumer may ask for the state as soon as it has the batch.
            self._done += 1
            batch = {
                name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                for name, value in next(self._iterator).items()
            }
            yield memmaps.unpacked(self._matrices, batch)

    def close(self) -> None:
        self._iterator.close()


def _shuffled(ids: range, seed: int) -> Any:
    import grain

    return grain.MapDataset.range(ids.start, ids.stop).seed(seed).shuffle()


def _mixed(task: TrialTask) -> Any:
    """The samples of a mixture until its first source is exhausted."""
    import grain

    parts = task.workload.parts
    ends = list(itertools.accumulate(part.sample_count for part in parts))
    ids = [
        _shuffled(range(end - part.sample_count, end), task.seed + index)
        for index, (part, end) in enumerate(zip(parts, ends, strict=True))
    ]
    return grain.MapDataset.mix(ids, weights=[part.weight for part in parts])


class _Permuted:
    """The row numbers of a batch by its own number, which counts on from epoch to epoch."""

    def __init__(self, task: TrialTask) -> None:
        self._task = task
        self._orders: dict[int, NDArray[np.int64]] = {}

    def __call__(self, number: int) -> NDArray[np.int64]:
        count, size = self._task.workload.sample_count, self._task.workload.batch_size
        mine = range(self._task.rank, count, self._task.size)
        epoch, index = divmod(number, -(-len(mine) // size))
        order = self._orders.get(epoch)
        if order is None:
            random = np.random.default_rng((self._task.seed, epoch))
            order = random.permutation(count)[self._task.rank :: self._task.size]
            # Other threads may still be at the end of the epoch before.
            self._orders = {epoch: order, **dict(list(self._orders.items())[:1])}
        return order[index * size : (index + 1) * size]


class _Gather:
    """Batches by their row numbers. Each process maps the files when it first needs them."""

    def __init__(self, task: TrialTask) -> None:
        self._workload, self._folder = task.workload, task.place.folder
        self._rows: memmaps.MappedRows | None = None

    def __call__(self, ids: NDArray[np.int64]) -> dict[str, Any]:
        if self._rows is None:
            import torch

            torch.set_num_threads(1)
            self._rows = memmaps.mapped(self._workload, self._folder, np.random.default_rng())
        return _arrays(self._rows.gather(ids))


class _Records:
    """Rows as bytes: a header of all numbers and of the other columns' lengths, then those."""

    def __init__(self, workload: Workload) -> None:
        self._fixed = workload.of_kind(ColumnType.FIXED)
        self._listed = memmaps.listed(workload)
        fields = [(column.name, column.dtype, column.shape) for column in self._fixed]
        fields += [(f"{column.name}.bytes", "int64", ()) for column in self._listed]
        self._header = np.dtype(fields)

    def pack(self, row: rows.Row) -> bytes:
        """One row as a record."""
        parts = [samples.encoded(column, row[column.name]) for column in self._listed]
        values = [row[column.name] for column in self._fixed] + [len(part) for part in parts]
        return b"".join([np.array([tuple(values)], self._header).tobytes(), *parts])

    def sample(self, record: bytes, random: np.random.Generator) -> rows.Row:
        """The record as a trainer sees it."""
        header = np.frombuffer(record, self._header, 1)[0]
        row: dict[str, Any] = {column.name: header[column.name] for column in self._fixed}
        at = self._header.itemsize
        for column in self._listed:
            end = at + int(header[f"{column.name}.bytes"])
            values = np.frombuffer(record[at:end], memmaps.values_dtype(column))
            row[column.name] = memmaps.made(column, values, random)
            at = end
        return row

    def collate(self, samples: Sequence[rows.Row]) -> dict[str, Any]:
        """A batch of samples."""
        batch: dict[str, Any] = {
            column.name: np.array([sample[column.name] for sample in samples], column.dtype)
            for column in self._fixed
        }
        for column in self._listed:
            batch |= memmaps.collated(column, [sample[column.name] for sample in samples])
        return _arrays(batch)


def _arrays(batch: Batch) -> dict[str, Any]:
    """With arrays for tensors: those travel between Grain's processes in shared memory."""
    import torch

    return {
        name: value.numpy() if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


_PACKS_DESCRIBED = (
    "arrays in mapped files, shuffled over the whole epoch; packs of Grain's own first fit or best"
    " fit; packs are emitted when a document fits into none of the open ones"
)
_BINS = 64
"""Packs that are open at the same time: as two batches hold."""


def _pack_choices(workers: int) -> tuple[Settings, ...]:
    """The settings worth trying."""
    return (
        {"fit": "first", "workers": workers},
        {"fit": "best", "workers": workers},
        {"fit": "first", "workers": 0},
    )


class _Packs:
    """A new iterator for an epoch that is checked. Otherwise epochs follow each other in one, in
    which a pack may hold documents of both: worker processes take seconds to start.
    """

    def __init__(self, task: TrialTask) -> None:
        import torch

        torch.set_num_threads(1)
        self._task = task
        self._iterator: Any = None

    def epoch(self, number: int) -> Iterator[Batch]:
        import torch

        self.close()
        self._iterator = iter(_pack_batches(self._task, number))
        names = {
            "tokens": "tokens",
            "tokens_positions": "position_ids",
            "tokens_segment_ids": "document_ids",
        }
        for batch in self._iterator:
            yield {names[name]: torch.from_numpy(array) for name, array in batch.items()}

    def close(self) -> None:
        if self._iterator is not None:
            self._iterator.close()
        self._iterator = None


def _pack_batches(task: TrialTask, number: int) -> Any:
    import grain

    workload, workers = task.workload, task.settings["workers"]
    documents = _Pieces(task)
    kinds = {
        "first": grain.experimental.FirstFitPackIterDataset,
        "best": grain.experimental.BestFitPackIterDataset,
    }
    source = grain.MapDataset.source(documents).seed(task.seed + number).shuffle()
    if task.case.mode is not Mode.VERIFY:
        source = source.repeat()
    packs = kinds[task.settings["fit"]](
        source.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=1)),
        length_struct={"tokens": workload.length},
        num_packing_bins=_BINS,
        seed=task.seed,
    )
    batches = packs.batch(workload.batch_size, batch_fn=_stacked)
    if workers:
        buffers = grain.MultiprocessingOptions(workers, per_worker_buffer_size=_BUFFERED)
        batches = batches.mp_prefetch(buffers)
    return batches


def _stacked(packs: Sequence[dict[str, NDArray[np.int32]]]) -> dict[str, NDArray[np.int32]]:
    return {name: np.stack([pack[name] for pack in packs]) for name in packs[0]}


class _Pieces:
    """The pieces of documents, by number. Each process maps the files when it first needs them."""

    def __init__(self, task: TrialTask) -> None:
        self._workload, self._folder = task.workload, task.place.folder
        offsets = np.fromfile(self._folder / "tokens.offsets", np.int64)
        self._starts, self._ends = pieces(offsets, task.workload.length)
        self._values: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int32]]:
        if self._values is None:
            rows = memmaps.mapped(self._workload, self._folder, np.random.default_rng())
            self._values = rows.lists["tokens"][0]
        return {"tokens": self._values[self._starts[index] : self._ends[index]]}
