"""LitData: packed shards that are mapped where they lie, or cached, and read nearly in order."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
from dataplane_bench.peers.rows import (
    Row,
    RowCollate,
    StatefulLoader,
    announce,
    record_type,
    refuses_limit,
    refuses_tables,
    rows,
)

SHARD_BYTES = 64_000_000
"""About: its documentation's choice."""
_SHARDS_MIN = 4
"""In its cache: one that is read, and those that are loaded ahead."""


class LitData:
    """`StreamingDataset` behind a `StreamingDataLoader`; tokens through its `TokensLoader`."""

    name = "litdata"
    title = "LitData"
    requirements: tuple[str, ...] = ("litdata",)
    distribution = "litdata"
    delivers = frozenset({BatchKind.STORED, BatchKind.MIXED})

    def refuses(self, workload: Workload, case: BenchCase) -> str:
        return refuses_tables(workload) or refuses_limit(
            workload, case, _SHARDS_MIN * SHARD_BYTES, "its cache holds some shards of 64 MB"
        )

    def layout(self, workload: Workload) -> str:
        return "litdata-records"

    def describe(self, workload: Workload) -> str:
        form = "records for its TokensLoader" if _is_records(workload) else "samples"
        size = "64 MB" if _is_records(workload) else f"64 MB, or {SHUFFLE_BUFFER:,}"
        mixed = "a CombinedStreamingDataset of " if workload.parts else ""
        return f"{mixed}{form} in shards of {size}; shards in random order, shuffled inside"

    def settings(self, workload: Workload, case: BenchCase, cores: int) -> tuple[Settings, ...]:
        ahead: Settings = {"num_workers": cores, "max_pre_download": 8}
        return (
            {"num_workers": cores},
            *((ahead,) if case.store is StorageKind.S3 else ()),
            {"num_workers": 1},
            {"num_workers": 0},
        )

    def prepare(self, workload: Workload, folder: Path) -> None:
        from litdata import TokensLoader, optimize

        for part in workload.parts:
            self.prepare(workload.alone(part), folder / part.name)
        if workload.parts:
            return
        shards = workload.shards
        optimize(
            functools.partial(_samples, workload),
            inputs=list(range(len(shards))),
            output_dir=str(folder),
            **_limit(workload),
            num_workers=min(len(os.sched_getaffinity(0)), len(shards)),
            item_loader=TokensLoader() if _is_records(workload) else None,
            verbose=False,
        )

    def open(self, task: TrialTask) -> StatefulLoader:
        return _opened(task)


def _opened(task: TrialTask) -> StatefulLoader:
    from litdata import CombinedStreamingDataset, StreamingDataLoader

    announce(task)
    workload, settings = task.workload, dict(task.settings)
    workers = settings.pop("num_workers")
    dataset: Any
    if workload.parts:
        urls = [f"{task.place.url}/{part.name}" for part in workload.parts]
        dataset = CombinedStreamingDataset(
            [_dataset(task, url, settings) for url in urls],
            seed=task.seed,
            weights=[part.weight for part in workload.parts],
            iterate_over_all=False,
        )
    else:
        dataset = _dataset(task, task.place.url, settings)
    are_records = _is_records(workload)
    collate = functools.partial(_columns, workload) if are_records else RowCollate(workload)
    loader: Any = StreamingDataLoader(
        dataset,
        batch_size=workload.batch_size,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=collate,
    )
    return StatefulLoader(loader)


def _dataset(task: TrialTask, url: str, settings: Settings) -> Any:
    """The samples below this URL."""
    from litdata import StreamingDataset, TokensLoader

    loader = None
    if _is_records(task.workload):
        size = record_type(task.workload.columns).itemsize
        loader = TokensLoader(block_size=size // _token_type(task.workload).itemsize)
    return StreamingDataset(
        url,
        item_loader=loader,
        shuffle=not task.case.in_order,
        drop_last=False,
        seed=task.seed,
        # A shard is shuffled as a whole, so it must be decoded as a whole: a part of it would
        # be decoded anew for each sample that is in another part than the sample before.
        item_shuffle_window=0,
        batch_decode="all",
        **settings,
        **(_remote(task) if task.case.store is StorageKind.S3 else {}),
    )


def _remote(task: TrialTask) -> dict[str, Any]:
    """The arguments of a StreamingDataset for shards in S3."""
    from litdata.streaming import downloader

    # Its faster client requires TLS, which a local server lacks, and no option turns this off.
    getattr(downloader, "_OBSTORE_CLIENT_OPTIONS", {})["allow_http"] = True
    limit = task.case.cache_bytes_max(task.place.stored_bytes)
    return {
        "cache_dir": str(task.cache / f"litdata-{task.run}"),
        **({"max_cache_size": limit} if limit else {}),
        "storage_options": {
            "endpoint_url": task.place.endpoint,
            "aws_access_key_id": task.place.access_key,
            "aws_secret_access_key": task.place.secret_key,
        },
    }


def _is_records(workload: Workload) -> bool:
    """Whether all samples have the same size, as the TokensLoader wants it."""
    return all(column.kind is ColumnType.FIXED for column in workload.columns)


def _token_type(workload: Workload) -> np.dtype[Any]:
    """The type of the tokens that make up a record: that of its only column, or bytes."""
    return np.dtype(workload.columns[0].dtype if len(workload.columns) == 1 else "uint8")


def _limit(workload: Workload) -> dict[str, int]:
    """When a shard is full. As many small samples as 64 MB hold would be decoded in one go, while
    the trainer waits: a shard of what others shuffle at once will do.
    """
    if _is_records(workload):
        return {"chunk_bytes": SHARD_BYTES}
    source_bytes = sum(shard.stat().st_size for shard in workload.shards)
    count = SHARD_BYTES * workload.sample_count // source_bytes
    return {"chunk_size": min(max(count, 1), SHUFFLE_BUFFER)}


def _samples(workload: Workload, shard: int) -> Iterator[Any]:
    """Converts one shard of the source."""
    samples = rows(workload, workload.shards[shard : shard + 1])
    if not _is_records(workload):
        yield from map(_leaves, samples)
        return
    record = np.zeros(1, record_type(workload.columns))
    for row in samples:
        for name, value in row.items():
            record[name] = value
        yield record.view(_token_type(workload)).copy()


def _leaves(row: Row) -> dict[str, Any]:
    """The row with its texts and images as arrays.

    Of numbers, bytes and texts alone it would make Arrow batches of 256 rows, and decode one anew
    for each sample that is not in the same batch as the sample before.
    """
    leaves = dict(row)
    for name, value in row.items():
        if isinstance(value, str | bytes):
            encoded = value.encode() if isinstance(value, str) else value
            leaves[name] = np.frombuffer(encoded, np.uint8)
    return leaves


def _columns(workload: Workload, records: Sequence[Any]) -> Batch:
    """A batch of records.   Shapes:  records: uint8[record_type.itemsize]."""
    import torch

    together = np.stack(records).view(record_type(workload.columns))[:, 0]
    return {
        column.name: torch.from_numpy(np.ascontiguousarray(together[column.name]))
        for column in workload.columns
    }
