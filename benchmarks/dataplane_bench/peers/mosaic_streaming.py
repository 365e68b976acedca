"""MosaicML Streaming: MDS shards, a shuffled order of all samples that its workers share."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dataplane_bench.model import (
    BatchKind,
    BenchCase,
    ColumnType,
    Settings,
    StorageKind,
    TrialTask,
    Workload,
    WorkloadColumn,
)
from dataplane_bench.peers.base import SHUFFLE_BUFFER
from dataplane_bench.peers.rows import (
    RowCollate,
    StatefulLoader,
    announce,
    plain,
    refuses_limit,
    refuses_tables,
    rows,
)

SHARD_BYTES = 64 << 20
"""The library's default."""
_SHARDS_MIN = 4
"""It refuses a smaller limit of its cache."""


class MosaicStreaming:
    """`StreamingDataset` behind a `StreamingDataLoader`."""

    name = "mosaic"
    title = "MosaicML Streaming"
    requirements: tuple[str, ...] = ("mosaicml-streaming",)
    distribution = "mosaicml-streaming"
    delivers = frozenset({BatchKind.STORED, BatchKind.MIXED})

    def refuses(self, workload: Workload, case: BenchCase) -> str:
        return refuses_tables(workload) or refuses_limit(
            workload, case, _SHARDS_MIN * SHARD_BYTES, "its cache holds four shards of 64 MiB"
        )

    def layout(self, workload: Workload) -> str:
        return "mds-arrays"

    def describe(self, workload: Workload) -> str:
        mixed = "a Stream with its proportion for each source; " if workload.parts else ""
        return (
            f"{mixed}MDS shards of 64 MiB; shards in random order, samples shuffled in blocks of"
            " 262,144 if not told otherwise (py1e); ranks get equal shares, for which a sample may"
            " come twice"
        )

    def settings(self, workload: Workload, case: BenchCase, cores: int) -> tuple[Settings, ...]:
        ahead = {"num_workers": cores, "predownload": 64 * workload.batch_size}
        if case.store is StorageKind.S3:
            # Shuffle fewer shards at a time, so that a batch does not wait for all of them.
            near = {"num_workers": cores, "shuffle_block_size": SHUFFLE_BUFFER}
            return {"num_workers": cores}, near, ahead | near, {"num_workers": 1}
        return {"num_workers": cores}, ahead, {"num_workers": 1}, {"num_workers": 0}

    def prepare(self, workload: Workload, folder: Path) -> None:
        for part in workload.parts:
            self.prepare(workload.alone(part), folder / part.name)
        if workload.parts:
            return
        streaming = _streaming()
        encodings = {column.name: _encoding(column) for column in workload.columns}
        with streaming.MDSWriter(out=str(folder), columns=encodings) as shards:
            for row in rows(workload, workload.shards):
                arrays = {name: row[name] for name, of in encodings.items() if of[:7] == "ndarray"}
                shards.write(plain(row) | arrays)

    def open(self, task: TrialTask) -> StatefulLoader:
        return _opened(task)


def _opened(task: TrialTask) -> StatefulLoader:
    streaming = _streaming()
    announce(task)
    workload, settings = task.workload, dict(task.settings)
    workers = settings.pop("num_workers")
    local = str(task.place.folder)
    remote = None
    if task.case.store is StorageKind.S3:
        local, remote = str(task.cache / f"mds-{task.run}"), task.place.url
        if limit := task.case.cache_bytes_max(task.place.stored_bytes):
            settings["cache_limit"] = limit
    where: dict[str, Any] = {"local": local, "remote": remote}
    if workload.parts:
        where = {
            "streams": [
                streaming.Stream(local=f"{local}/{part.name}", proportion=part.weight)
                for part in workload.parts
            ],
            # As long as the first source lasts.
            "epoch_size": int(min(part.sample_count / part.weight for part in workload.parts)),
        }
    with _ranks_together(task):
        dataset = streaming.StreamingDataset(
            **where,
            batch_size=workload.batch_size,
            shuffle=not task.case.in_order,
            shuffle_algo="py1e",
            shuffle_seed=task.seed,
            **settings,
        )
    loader: Any = streaming.StreamingDataLoader(
        dataset,
        batch_size=workload.batch_size,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=RowCollate(workload),
    )
    return StatefulLoader(loader)


def _encoding(column: WorkloadColumn) -> str:
    """MDS' name for the encoding of a column of plain rows."""
    if column.kind is not ColumnType.FIXED:
        return "bytes"
    if column.shape:
        return f"ndarray:{column.dtype}:{','.join(map(str, column.shape))}"
    return "uint8" if column.dtype == "bool" else column.dtype


@contextlib.contextmanager
def _ranks_together(task: TrialTask) -> Iterator[None]:
    """The ranks of a job meet, and the jobs of a trial take turns: the library looks for names in
    shared memory that nobody has, and two that look at the same time find the same.
    """
    import torch.distributed as dist

    def meet() -> None:
        if task.size > 1:
            dist.barrier()

    if task.size > 1:
        meeting = f"file://{task.cache}/ranks-{task.run}"
        dist.init_process_group("gloo", meeting, rank=task.rank, world_size=task.size)
    with (task.cache / "mosaic.lock").open("w") as lock:
        if task.rank == 0:
            fcntl.flock(lock, fcntl.LOCK_EX)
        meet()
        yield
        meet()
    if task.size > 1:
        dist.destroy_process_group()


def _streaming() -> Any:
    """The library, which imports torchvision.

    PyPI's torchvision is built for CUDA's torch; with another one it finds no operators, and ends
    on their names. We need none of them, so the names will do.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library: Any = importlib.import_module("torch.library")
        names = library.Library("torchvision", "DEF")
        names.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        names.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("streaming")
