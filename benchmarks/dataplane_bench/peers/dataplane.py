"""Dataplane itself, over the shards as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dataplane_bench.model import Case, Settings, Task, Workload
from dataplane_bench.peers.base import Batch


class Dataplane:
    """`from dataplane_torch import DataLoader` over Arrow shards."""

    name = "dataplane"
    title = "Dataplane"
    requirements: tuple[str, ...] = ()
    distribution = "dataplane-loader"

    def refuses(self, workload: Workload, case: Case) -> str:
        del workload, case
        return ""

    def layout(self, workload: Workload) -> str:
        del workload
        return "arrow"

    def describe(self, workload: Workload) -> str:
        del workload
        return "Arrow IPC shards, shuffled over the whole epoch in windows"

    def settings(self, workload: Workload, case: Case, cores: int) -> tuple[Settings, ...]:
        del workload, case, cores
        return ({},)

    def prepare(self, workload: Workload, folder: Path) -> None:
        for shard in sorted(workload.source.glob("*.parquet")):
            file = pq.ParquetFile(shard)
            with pa.ipc.new_file(folder / f"{shard.stem}.arrow", file.schema_arrow) as writer:
                for group in range(file.num_row_groups):
                    writer.write_table(file.read_row_group(group))

    def open(self, task: Task) -> _Opened:
        return _Opened(task)


class _Opened:
    def __init__(self, task: Task) -> None:
        from dataplane_torch import DataLoader

        from dataplane.model import Topology

        rank, size = task.rank, task.size
        self._loader = DataLoader(
            f"{task.place.url}/*.arrow",
            batch_size=task.workload.batch_size,
            shuffle=True,
            seed=task.seed,
            topology=Topology(rank, size, rank, size, rank, size),
            name=task.run,
        )

    def epoch(self, number: int) -> Iterator[Batch]:
        self._loader.set_epoch(number)
        return iter(self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()

    def resume(self, state: Any) -> Iterator[Batch]:
        self._loader.load_state_dict(state)
        return iter(self._loader)

    def close(self) -> None:
        self._loader.close()
