"""Hugging Face datasets: Arrow files that are mapped, or streamed from S3, behind a DataLoader.

Sources: https://huggingface.co/docs/datasets/use_with_pytorch (batches by a sampler, format
"arrow", with_transform), .../about_mapstyle_vs_iterable (an iterable dataset is read in order and
is faster), .../stream (shuffling, map, checkpoints with StatefulDataLoader), .../process
(interleave); https://huggingface.co/docs/trl/reducing_memory_usage ("Packing"): TRL packs a dataset
once, before training, or a stream as it comes; its collator makes position ids of the lengths of
each pack's documents.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane_bench.model import (
    BatchKind,
    BenchCase,
    ColumnType,
    Settings,
    StorageKind,
    TrialTask,
    Workload,
)
from dataplane_bench.peers.base import SHUFFLE_BUFFER, Batch
from dataplane_bench.peers.rows import TableBatches, lists
from dataplane_bench.peers.samples import pack_batch
from dataplane_bench.peers.tokenising import Tokenising, set_threads, tokenising

if TYPE_CHECKING:
    import pyarrow as pa


_PACKS = "packs"
"""The folder of what TRL packed beforehand."""


def _prepare(workload: Workload, rows: Any, folder: Path, file_count: int) -> None:
    """Write what is made before a training."""
    if workload.delivery is BatchKind.PACKED:
        _packed(workload, rows).save_to_disk(str(folder / _PACKS), num_shards=file_count)


def _stored(task: TrialTask, folder: str) -> Any:
    """A map-style dataset of a task's samples."""
    import datasets

    workload = task.workload
    if workload.parts:
        return datasets.interleave_datasets(
            [datasets.load_from_disk(f"{folder}/{part.name}") for part in workload.parts],
            probabilities=[part.weight for part in workload.parts],
            seed=task.seed,
        ).with_format("arrow")
    match workload.delivery:
        case BatchKind.PACKED:
            return datasets.load_from_disk(f"{folder}/{_PACKS}").with_format("arrow")
        case BatchKind.TOKENISED:
            rows = datasets.load_from_disk(folder)
            return rows.with_transform(functools.partial(_transformed, tokenising(workload)))
        case _:
            return datasets.load_from_disk(folder).with_format("arrow")


def _collate(task: TrialTask) -> Any:
    """Makes a batch of rows of `_stored`; its method `nested`, of rows of `_streamed`."""
    workload = task.workload
    match workload.delivery:
        case BatchKind.PACKED:
            return PackBatches(workload.length)
        case BatchKind.TOKENISED:
            return TokenisedBatches(workload, task.seed)
        case _:
            return TableBatches(workload.columns, task.seed)


def _streamed(workload: Workload, rows: Any) -> Any:
    """An iterable dataset in Arrow's format, with what is made of its samples."""
    match workload.delivery:
        case BatchKind.PACKED:
            return _packed(workload, rows)
        case BatchKind.TOKENISED:
            make = functools.partial(_tokenised_table, tokenising(workload))
            return rows.map(make, batched=True, batch_size=workload.batch_size)
        case _:
            return rows


def _packed(workload: Workload, rows: Any) -> Any:
    from trl import pack_dataset

    # "bfd" would cut off what does not fit into one pack.
    return pack_dataset(rows.select_columns("tokens"), workload.length, "bfd_split")


class PackBatches:
    """Batches of packs, as TRL's collator makes them, with the number of each document."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, table: pa.Table) -> Batch:
        packs, sizes = (table[name].combine_chunks() for name in ("tokens", "seq_lengths"))
        return pack_batch(_values(packs, "int32"), _values(sizes, "int64"), self._length)

    def nested(self, table: pa.Table) -> Batch:
        """The same for a table of one row that holds each column of the batch as a list."""
        import pyarrow as pa

        names = ["tokens", "seq_lengths"]
        return self(pa.table([table[name].combine_chunks().flatten() for name in names], names))


class TokenisedBatches:
    """Batches of what the transform, or the stream's map, has already made."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._tables = TableBatches(workload.batch_columns, seed)

    def __call__(self, made: Batch) -> Batch:
        return made

    def nested(self, table: pa.Table) -> Batch:
        """See TableBatches."""
        return self._tables.nested(table)


def _values(values: pa.Array, dtype: str) -> list[Any]:
    from dataplane_bench.model import WorkloadColumn

    return lists(WorkloadColumn("", ColumnType.RAGGED, dtype), values)


def _transformed(tokenise: Tokenising, rows: dict[str, list[Any]]) -> Batch:
    import torch

    made = {name: torch.from_numpy(array) for name, array in tokenise(rows["text"]).items()}
    return {"id": torch.tensor(rows["id"]), **made}


def _tokenised_table(tokenise: Tokenising, table: pa.Table) -> pa.Table:
    import pyarrow as pa

    made = tokenise(table["text"].to_pylist())
    flat = pa.array(np.ravel(made["tokens"]))
    tokens = pa.FixedSizeListArray.from_arrays(flat, made["tokens"].shape[1])
    count = pa.array(made["token_count"])
    return pa.table({"id": table["id"], "tokens": tokens, "token_count": count})


FILE_COUNT, SHARD_COUNT = 32, 64
"""A shard, or a file in S3, is read by one worker of one rank."""


_MADE = {
    BatchKind.MIXED: "; interleave_datasets",
    BatchKind.PACKED: "; packed by TRL (bfd_split): a map once for all epochs, before training",
    BatchKind.TOKENISED: "; texts become tokens in a transform, or in an iterable's map",
}


class HuggingFaceDatasets:
    """`Dataset.load_from_disk`, as a map or as an iterable, and `load_dataset(streaming=True)`."""

    name = "huggingface"
    title = "Hugging Face datasets"
    requirements = ("datasets", "torchdata", "trl")
    distribution = "datasets"
    delivers = frozenset(BatchKind)

    def layout(self, workload: Workload) -> str:
        return "huggingface"

    def describe(self, workload: Workload) -> str:
        return (
            "Arrow files of save_to_disk; a map is shuffled over the whole epoch, an iterable by"
            f" shards and in a buffer of {SHUFFLE_BUFFER:,} samples, which a state leaves out"
            f"{_MADE.get(workload.delivery, '')}"
        )

    def settings(self, workload: Workload, case: BenchCase, cores: int) -> tuple[Settings, ...]:
        share = max(cores // case.process_count, 1)
        if case.store is StorageKind.S3:
            counts = (share, 2 * share) if workload.shape == "images" else (share, 0)
            return tuple({"dataset": "iterable", "num_workers": count} for count in counts)
        if workload.shape == "images":
            return (
                {"dataset": "map", "num_workers": share},
                {"dataset": "map", "num_workers": 2 * share},
                {"dataset": "iterable", "num_workers": share},
            )
        return tuple(
            {"dataset": kind, "num_workers": count}
            for kind in ("map", "iterable")
            for count in (share, 0)
        )

    def prepare(self, workload: Workload, folder: Path) -> None:
        import datasets

        for part in workload.parts:
            self.prepare(workload.alone(part), folder / part.name)
        if workload.parts:
            return
        datasets.disable_progress_bars()
        cache = folder / "cache"
        shards = [str(shard) for shard in workload.shards]
        names = [column.name for column in workload.columns]
        rows = datasets.Dataset.from_parquet(shards, columns=names, cache_dir=str(cache))
        files = min(FILE_COUNT, workload.sample_count)
        rows.save_to_disk(str(folder), num_shards=files)
        _prepare(workload, rows, folder, files)
        shutil.rmtree(cache)

    def open(self, task: TrialTask) -> _Opened:
        return _Opened(task)


class _Opened:
    def __init__(self, task: TrialTask) -> None:
        import datasets
        from torchdata.stateful_dataloader import StatefulDataLoader

        datasets.disable_progress_bars()
        self._workers = int(task.settings["num_workers"])
        choice: dict[str, Any] = {"num_workers": self._workers}
        if self._workers:
            choice |= {"persistent_workers": True, "prefetch_factor": 4}
        set_threads(self._workers)
        batches = _collate(task)
        if task.settings["dataset"] == "map":
            from dataplane_bench.peers.torch_datasets import BatchSampler

            rows = _stored(task, str(task.place.folder))
            self._order: Any = BatchSampler(task, len(rows))
            choice |= {"dataset": rows, "sampler": self._order, "collate_fn": batches}
        else:
            self._order = None
            self._rows = _iterable(task, self._workers)
            choice |= {"dataset": self._rows, "collate_fn": batches.nested}
        self._loader = StatefulDataLoader(batch_size=None, **choice)
        self._iterator: Any = None

    def epoch(self, number: int) -> Iterator[Batch]:
        if self._order is None:
            self._rows.set_epoch(number)
        else:
            self._order.epoch = number
        return self._rest()

    def state(self) -> Any:
        return self._loader.state_dict()

    def resume(self, state: Any) -> Iterator[Batch]:
        self._loader.load_state_dict(state)
        return self._rest()

    def _rest(self) -> Iterator[Batch]:
        self._iterator = iter(self._loader)
        return iter(self._iterator)

    def close(self) -> None:
        if self._workers and self._iterator is not None:
            # No public way ends workers before the interpreter finds them unreachable.
            self._iterator._shutdown_workers()  # noqa: SLF001
        self._iterator = None


def _iterable(task: TrialTask, workers: int) -> Any:
    """A rank's batches as Arrow tables of one row."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    workload, folder = task.workload, task.place.folder
    if workload.parts:
        rows = datasets.interleave_datasets(
            [
                _shuffled(_stream(task, folder / part.name, workers), task)
                for part in workload.parts
            ],
            probabilities=[part.weight for part in workload.parts],
            seed=task.seed,
        )
    else:
        rows = _shuffled(_stream(task, folder, workers), task)
    rows = split_dataset_by_node(rows, rank=task.rank, world_size=task.size)
    made = _streamed(workload, rows.with_format("arrow"))
    return made.with_format("arrow").batch(workload.batch_size)


def _shuffled(rows: Any, task: TrialTask) -> Any:
    return rows.shuffle(seed=task.seed, buffer_size=SHUFFLE_BUFFER)


def _stream(task: TrialTask, folder: Path, workers: int) -> Any:
    """The samples of a folder in order, in shards that workers share."""
    import datasets

    place = task.place
    if task.case.store is StorageKind.S3:
        return datasets.load_dataset(
            "arrow",
            data_files=f"{place.url}/*.arrow",
            split="train",
            streaming=True,
            storage_options={
                "key": place.access_key,
                "secret": place.secret_key,
                "client_kwargs": {"endpoint_url": place.endpoint or None},
            },
        )
    # Equally many per worker and rank: one worker would read a remainder while others idle.
    readers = task.size * max(workers, 1)
    mapped = datasets.load_from_disk(str(folder))
    count = min(-(-SHARD_COUNT // readers) * readers, len(mapped))
    return mapped.to_iterable_dataset(num_shards=count)
