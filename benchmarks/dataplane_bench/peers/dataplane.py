"""Dataplane itself: reads a user's shards as they are, and generated samples as Arrow IPC."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataplane_bench import processes
from dataplane_bench.model import (
    CROP,
    BatchKind,
    BenchCase,
    ColumnType,
    Settings,
    TrialTask,
    Workload,
    leaves,
)
from dataplane_bench.peers import tokenising
from dataplane_bench.peers.base import Batch, Loader
from dataplane_bench.peers.own_files import metadata_location

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_BYTES = 4 << 20
"""Of a record batch: large enough to gather from, and small enough to fetch."""
_BLOCKS_AT_EDGES = 3
START_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 10.0
_MADE = {
    BatchKind.MIXED: "a Mixture",
    BatchKind.PACKED: "its workers pack, anew in each epoch",
    BatchKind.TOKENISED: "its workers tokenise, and the node keeps what it has room for",
}


class Dataplane:
    """`from dataplane_torch import DataLoader`."""

    name = "dataplane"
    title = "Dataplane"
    requirements: tuple[str, ...] = ()
    distribution = "dataplane-loader"
    delivers = frozenset(BatchKind)

    def layout(self, workload: Workload) -> str:
        return "shards" if workload.urls or workload.delivery is BatchKind.TOKENISED else "arrow"

    def describe(self, workload: Workload) -> str:
        form = "Arrow IPC, record batches of 4 MiB"
        if self.layout(workload) == "shards":
            form = "the shards as they are"
        text = f"{form}; shuffled over the whole epoch, in windows where it is very long"
        if workload.delivery in _MADE:
            return f"{text}; {_MADE[workload.delivery]}"
        if workload.of_kind(ColumnType.IMAGE):
            return f"{text}; its workers decode what a crop needs, resize and flip it"
        return text

    def settings(self, workload: Workload, case: BenchCase, cores: int) -> tuple[Settings, ...]:
        if workload.delivery is BatchKind.TOKENISED:
            # By default a node begins with fewer workers, and adds them while trainers wait.
            return {}, {"workers": cores}
        # By default, a small dataset is shuffled as a whole, and stays in memory for that.
        return ({"lanes": 1, "window": "what fits"} if case.cache_share else {},)

    def prepare(self, workload: Workload, folder: Path) -> None:
        for part in workload.parts:
            below = folder / part.name
            below.mkdir()
            self.prepare(workload.alone(part), below)
        if workload.parts:
            return
        if self.layout(workload) == "shards":
            for shard in workload.urls or workload.shards:
                _same_file(Path(shard), folder / Path(shard).name)
            return
        import pyarrow.parquet as pq

        for shard in workload.shards:
            _write_arrow(pq.read_table(shard), folder / f"{shard.stem}.arrow")

    def open(self, task: TrialTask) -> Loader:
        os.environ.update(_variables(task))
        if task.size > 1:
            from dataplane_bench.peers import rows

            # The ranks of a run find the node that they share by what torchrun tells them.
            rows.announce(task)
            os.environ["TORCHELASTIC_RUN_ID"] = task.run
        return _Opened(task)

    def serve(self, task: TrialTask) -> tuple[str, _Service]:
        service = _Service(task)
        return service.address, service


class _Opened:
    def __init__(self, task: TrialTask) -> None:
        from dataplane_torch import DataLoader

        # Dataplane's name of a column of a user's shards, and the name that all peers use.
        self._names = {leaf: name for name, leaf in leaves(task.workload).items()}
        lanes, window = _lanes_window(task)
        self._loader = DataLoader(
            _where(task),
            task.workload.batch_size,
            shuffle=not task.case.in_order,
            seed=task.seed,
            service=task.service or None,
            name=task.run,
            sharing=task.group or None,
            lanes=lanes,
            window=window,
            **(_making(task.workload) or self._columns(task.workload)),
        )

    def _columns(self, workload: Workload) -> dict[str, Any]:
        """The columns as they are stored, images as random crops."""
        from dataplane_torch import RandomHorizontalFlip, RandomResizedCrop

        images = {column.name for column in workload.of_kind(ColumnType.IMAGE)}
        steps = [RandomResizedCrop(CROP), RandomHorizontalFlip()]
        transforms = {leaf: steps for leaf, name in self._names.items() if name in images}
        return {"columns": list(self._names), "transforms": transforms}

    def epoch(self, number: int) -> Iterator[Batch]:
        self._loader.set_epoch(number)
        return self._batches()

    def state(self) -> Any:
        return self._loader.state_dict()

    def resume(self, state: Any) -> Iterator[Batch]:
        self._loader.load_state_dict(state)
        return self._batches()

    def close(self) -> None:
        self._loader.close()

    def _batches(self) -> Iterator[Batch]:
        # Columns that are made have the same name for all.
        if all(leaf == name for leaf, name in self._names.items()):
            return iter(self._loader)
        names = self._names | {
            f"{leaf}.length": f"{name}.length" for leaf, name in self._names.items()
        }
        return ({names[leaf]: value for leaf, value in batch.items()} for batch in self._loader)


class _Service:
    """`dataplane serve`, as its user would start it."""

    def __init__(self, task: TrialTask) -> None:
        log = task.cache / "serve.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dataplane", "serve", "--listen", "127.0.0.1:0"],
                cwd=task.cache,
                env={**os.environ, **_variables(task)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            self.address = processes.wait_for_node(self._process, log, START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        processes.end(self._process, DRAIN_TIMEOUT_S)


def _making(workload: Workload) -> dict[str, Any]:
    """Arguments that make batches of documents or texts; none where samples come as stored."""
    match workload.delivery:
        case BatchKind.PACKED:
            from dataplane_torch import Pack

            made = [column.name for column in workload.batch_columns if column.name != "tokens"]
            return {"pack": Pack("tokens", workload.length, outputs=made)}
        case BatchKind.TOKENISED:
            os.environ.update(tokenising.variables(workload))
            return {"map": tokenising.BlockTokenising}
        case _:
            return {}


def _where(task: TrialTask) -> Any:
    """The samples' shards, or a mixture of the shards of several sources."""
    parts, place = task.workload.parts, task.place
    match task.case.files:
        case "iceberg":
            return f"iceberg+{metadata_location(place.folder)}"
        case "delta":
            return f"delta+{place.url}"
        case files if files:
            return place.url
    if not parts:
        return _urls(place.folder, place.url)
    from dataplane_torch import Mixture, Source

    sources = {
        part.name: Source(
            _urls(place.folder / part.name, f"{place.url}/{part.name}"), weight=part.weight
        )
        for part in parts
    }
    return Mixture(sources, exhausted="stop")


def _urls(folder: Path, url: str) -> list[str]:
    """All shards by name: a user's shards may have any name."""
    return [f"{url}/{name}" for name in sorted(path.name for path in folder.iterdir())]


def _lanes_window(task: TrialTask) -> tuple[int | None, int | None]:
    """The defaults; or one lane, with windows so small that two of them and the blocks at their
    edges fit into three quarters of the block arena, since a batch may come from both.
    """
    if "window" not in task.settings:
        return None, None
    limit = task.case.cache_bytes_max(task.place.stored_bytes) or task.place.stored_bytes
    room = max(limit * 3 // 4 - _BLOCKS_AT_EDGES * BLOCK_BYTES, 0) // 2
    window = room * task.workload.sample_count // task.place.stored_bytes
    return task.settings["lanes"], max(window, task.workload.batch_size)


def _variables(task: TrialTask) -> dict[str, str]:
    """The node's settings, with what the case allows it to keep of the samples."""
    limit = task.case.cache_bytes_max(task.place.stored_bytes)
    variables = {"DATAPLANE_BLOCK_ARENA_BYTES": str(limit)} if limit else {}
    if "workers" in task.settings:
        variables["DATAPLANE_WORKER_COUNT"] = str(task.settings["workers"])
    return variables


def _same_file(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:  # on another file system
        shutil.copyfile(source, target)


def _write_arrow(table: pa.Table, path: Path) -> None:
    import pyarrow as pa

    row_bytes = max(table.nbytes // max(table.num_rows, 1), 1)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table.combine_chunks(), max(BLOCK_BYTES // row_bytes, 1))
