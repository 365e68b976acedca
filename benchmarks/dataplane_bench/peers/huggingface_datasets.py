"""Hugging Face datasets: Arrow files that are mapped, or streamed from S3, behind a DataLoader.

Sources: https://huggingface.co/docs/datasets/use_with_pytorch (batches by a sampler, format
"arrow"), https://huggingface.co/docs/datasets/about_mapstyle_vs_iterable (an iterable dataset is
read in order and is faster), https://huggingface.co/docs/datasets/stream (shuffling, checkpoints
with StatefulDataLoader).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dataplane_bench.model import (
    BatchKind,
    BenchCase,
    Settings,
    StorageKind,
    TrialTask,
    Workload,
)
from dataplane_bench.peers import huggingface_made
from dataplane_bench.peers.base import SHUFFLE_BUFFER, Batch
from dataplane_bench.peers.tokenising import set_threads

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

    def refuses(self, workload: Workload, case: BenchCase) -> str:
        del workload, case
        return ""

    def layout(self, workload: Workload) -> str:
        del workload
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
        huggingface_made.prepare(workload, rows, folder, files)
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
        batches = huggingface_made.collate(task)
        if task.settings["dataset"] == "map":
            from dataplane_bench.peers.torch_datasets import BatchSampler

            rows = huggingface_made.stored(task, str(task.place.folder))
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
            [_shuffled(_stream(task, folder / one.name, workers), task) for one in workload.parts],
            probabilities=[part.weight for part in workload.parts],
            seed=task.seed,
        )
    else:
        rows = _shuffled(_stream(task, folder, workers), task)
    rows = split_dataset_by_node(rows, rank=task.rank, world_size=task.size)
    made = huggingface_made.streamed(workload, rows.with_format("arrow"))
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
