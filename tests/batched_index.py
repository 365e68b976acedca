"""Indexing in batches, as a node does it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from bombs import MIB

from dataplane.formats.base import Format, ShardIndex
from dataplane.index import batches
from dataplane.index.indexing import index_dataset
from dataplane.index.processes import IndexProcesses
from dataplane.index.run import ShardBatches, StoredShard
from dataplane.model.records import ObjectInfo
from dataplane.plan.manifest import Manifest
from dataplane.rpc.fetches import StartFetching
from dataplane.store.outage import Pauses
from dataplane.worker.death import WorkerBytes

LIMIT = WorkerBytes(512 * MIB, 0)


class Indexing:
    """Indexing processes, and which shards they were given one by one."""

    def __init__(self, processes: IndexProcesses) -> None:
        self._processes = processes
        self.alone: set[str] = set()
        self.together: list[str] = []

    def of(self, url: str, cache: Path | None = None, **more: object) -> Manifest:
        return index_dataset(
            url,
            index_shard=self._shard,
            begin_batches=self._batches,
            cache_dir=str(cache or ""),
            **more,  # type: ignore[arg-type]
        )

    def _shard(self, format_: Format, shard: StoredShard) -> ShardIndex:
        self.alone.add(shard.url.rpartition("/")[2])
        return self._processes.index(format_, shard)

    def _batches(self, format_: Format, listed: list[ObjectInfo]) -> ShardBatches | None:
        self.together = [one.url.rpartition("/")[2] for one in listed]
        return self._processes.begin_batches(format_, listed)


@contextlib.contextmanager
def indexing(
    silent_s: float = 60.0,
    keep: batches.KeepPreamble | None = None,
    pauses: Pauses | None = None,
    **reading: object,
) -> Iterator[Indexing]:
    environment = {**os.environ, **reading.pop("environment", {})}  # type: ignore[dict-item]
    lines = tuple(f"{name}={value}".encode() for name, value in environment.items())
    start = StartFetching(lines, **{"budget_s": 60.0, "request_timeout_s": 30.0, **reading})  # type: ignore[arg-type]
    with IndexProcesses(LIMIT, silent_s, 2, keep, start, pauses) as made:
        yield Indexing(made)
