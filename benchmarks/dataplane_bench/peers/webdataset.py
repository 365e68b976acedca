"""WebDataset: tar shards that are read from one end to the other, shuffled in a buffer."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dataplane_bench.model import (
    BenchCase,
    ColumnType,
    Settings,
    StorageKind,
    TrialTask,
    Workload,
    WorkloadColumn,
)
from dataplane_bench.peers.base import SHUFFLE_BUFFER, Batch
from dataplane_bench.peers.rows import Row, RowCollate, announce, record_type, refuses_tables, rows

SHARD_COUNT = 32
"""Or more: each is read by one worker of one rank, so there must be enough for all."""
SHARD_BYTES = 256 << 20
"""Or less."""


class WebDataset:
    """`wds.WebDataset(...).shuffle(...).map(...).batched(...)` behind a `wds.WebLoader`."""

    name = "webdataset"
    title = "WebDataset"
    requirements: tuple[str, ...] = ("webdataset",)
    distribution = "webdataset"

    def refuses(self, workload: Workload, case: BenchCase) -> str:
        if case.store is StorageKind.S3 and shutil.which("curl") is None:
            return "it reads from S3 through curl, which is not installed"
        return refuses_tables(workload)

    def layout(self, workload: Workload) -> str:
        return "webdataset"

    def describe(self, workload: Workload) -> str:
        return (
            "tar shards, the numbers of a sample in one file; shards in random order, then a"
            f" shuffle buffer of {SHUFFLE_BUFFER:,} samples a worker"
        )

    def settings(self, workload: Workload, case: BenchCase, cores: int) -> tuple[Settings, ...]:
        return (
            {"num_workers": cores},
            {"num_workers": cores, "prefetch_factor": 8},
            {"num_workers": 1},
            {"num_workers": 0},
        )

    def prepare(self, workload: Workload, folder: Path) -> None:
        import webdataset as wds

        shards = workload.shards
        source_bytes = sum(shard.stat().st_size for shard in shards)
        shard_count = max(SHARD_COUNT, -(-source_bytes // SHARD_BYTES))
        per_shard = math.ceil(workload.sample_count / shard_count)
        files = _Files(workload)
        with wds.ShardWriter(
            str(folder / "shard-%06d.tar"),
            maxcount=per_shard,
            encoder=False,
            mtime=0,  # a fraction of a second would cost a second header for each file
            verbose=0,
        ) as shard:
            for index, row in enumerate(rows(workload, shards)):
                shard.write({"__key__": f"{index:012d}", **files.pack(row)})

    def open(self, task: TrialTask) -> _Opened:
        return _Opened(task)


class _Opened:
    def __init__(self, task: TrialTask) -> None:
        import webdataset as wds

        announce(task)
        workload = task.workload
        urls = _urls(task)
        samples = (
            wds.WebDataset(
                urls,
                shardshuffle=len(urls),
                detshuffle=True,
                seed=task.seed,
                nodesplitter=wds.split_by_node,
                empty_check=False,
            )
            .shuffle(SHUFFLE_BUFFER)
            .map(_Files(workload).unpack)
            .batched(workload.batch_size, collation_fn=RowCollate(workload))
        )
        # Workers that stay count the epochs; new ones would read in the order of the first.
        stay = task.settings["num_workers"] > 0
        self._loader: Any = wds.WebLoader(
            samples, batch_size=None, persistent_workers=stay, **task.settings
        )

    def epoch(self, number: int) -> Iterator[Batch]:
        return iter(self._loader)

    def close(self) -> None:
        self._loader = None


def _urls(task: TrialTask) -> list[str]:
    """The shards, as WebDataset opens them: in S3 through a pipe, as its documentation does with
    the AWS client. That takes a second of CPU time for each shard, where curl takes none.
    """
    names = sorted(shard.name for shard in task.place.folder.glob("*.tar"))
    if task.case.store is StorageKind.LOCAL:
        return [f"{task.place.folder}/{name}" for name in names]
    key = "$AWS_ACCESS_KEY_ID:$AWS_SECRET_ACCESS_KEY"
    curl = f'curl -sf --retry 9 --aws-sigv4 "aws:amz:$AWS_REGION:s3" --user "{key}"'
    path = task.place.url.removeprefix("s3://")
    return [f"pipe:{curl} {task.place.endpoint}/{path}/{name}" for name in names]


class _Files:
    """A sample's files: one for all its numbers, one for each text and each image.

    The numbers are a record of the fixed columns and the lengths of the lists, then the lists.
    """

    def __init__(self, workload: Workload) -> None:
        self._fixed = workload.of_kind(ColumnType.FIXED)
        self._ragged = workload.of_kind(ColumnType.RAGGED)
        lengths = [
            WorkloadColumn(_length(column), ColumnType.FIXED, "int64") for column in self._ragged
        ]
        self._record = record_type((*self._fixed, *lengths))
        # Numbered, since tar suffixes know neither upper case nor every character.
        texts, images = workload.of_kind(ColumnType.STRING), workload.of_kind(ColumnType.IMAGE)
        self._texts = {column.name: f"{index}.txt" for index, column in enumerate(texts)}
        self._images = {column.name: f"{index}.jpg" for index, column in enumerate(images)}

    def pack(self, row: Row) -> dict[str, bytes]:
        """The files by suffix."""
        record = np.zeros(1, self._record)
        for column in self._fixed:
            record[column.name] = row[column.name]
        for column in self._ragged:
            record[_length(column)] = len(row[column.name])
        lists = [row[column.name].tobytes() for column in self._ragged]
        files: dict[str, bytes] = {"bin": b"".join([record.tobytes(), *lists])}
        files |= {suffix: row[name].encode() for name, suffix in self._texts.items()}
        return files | {suffix: row[name] for name, suffix in self._images.items()}

    def unpack(self, sample: Mapping[str, Any]) -> Row:
        """The row that `pack` split into files."""
        numbers = sample["bin"]
        record = np.frombuffer(numbers, self._record, 1)[0]
        row = {column.name: record[column.name] for column in self._fixed}
        offset = self._record.itemsize
        for column in self._ragged:
            count = int(record[_length(column)])
            values = np.frombuffer(numbers, column.dtype, count, offset)
            row[column.name] = values
            offset += values.nbytes
        row |= {name: sample[suffix].decode() for name, suffix in self._texts.items()}
        return row | {name: sample[suffix] for name, suffix in self._images.items()}


def _length(column: WorkloadColumn) -> str:
    return f"{column.name}.length"
