"""How long a trainer waits when some samples are slow, and for its first batch on another world.

python benchmarks/stalls.py slow | restart [--json]
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from dataplane_bench.processes import dies_with_us
from dataplane_bench.scripts import Row, run
from dataplane_torch import DataLoader
from torch.utils.data import Dataset

ROW_S, SLOW_S, WORKERS, BATCH = 0.001, 0.1, 4, 32
"""A row of a hundred takes 100 times as long: 64 ms of a worker for a batch, on average."""
FLOATS, ROWS_A_BLOCK, GLOBAL = 4096, 64, 64
HERE = Path(__file__).parent


def seconds_of(row: int) -> float:
    """How long a row takes. Slow ones lie anywhere."""
    return SLOW_S if row * 2654435761 % (1 << 32) < (1 << 32) // 100 else ROW_S


def slow_map(columns: dict[str, Any]) -> dict[str, Any]:
    """The `map=` that waits for each row of a block, as a decoder would work on it."""
    time.sleep(sum(map(seconds_of, columns["row"].tolist())))
    return columns


class Slow(Dataset[dict[str, Any]]):
    """The same rows for a torch loader, which waits for one after the other."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        time.sleep(seconds_of(row))
        return {"row": row, "x": torch.zeros(FLOATS)}


def slow(*, rows: int = 6_400, step_ms: float = 20.0, rounds: int = 3) -> Iterator[Row]:
    """Waits for a batch with one row of a hundred 100 times slower than the others, and a step that
    leaves four workers idle for a fifth of their time. The first tenth of an epoch does not count.
    """
    warnings.filterwarnings("ignore", message=".*worker processes in total.*")
    os.environ |= {"DATAPLANE_WORKER_COUNT": str(WORKERS), "PYTHONPATH": str(HERE)}
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder) / "rows.arrow", rows)
        sampled: dict[str, Any] = {"batch_size": BATCH, "shuffle": True}
        loaded: dict[str, Any] = {**sampled, "num_workers": WORKERS}
        loaders: dict[str, Callable[[], Iterable[Any]]] = {
            "Dataplane, map= over files": lambda: DataLoader(
                folder, map=f"stalls:{slow_map.__name__}", **sampled
            ),
            "Dataplane, over the Dataset": lambda: DataLoader(Slow(rows), **loaded),
        }
        for factor in (2, 8):
            loaders[f"torch, prefetch_factor={factor}"] = functools.partial(
                torch.utils.data.DataLoader, Slow(rows), prefetch_factor=factor, **loaded
            )
        waits: dict[str, list[float]] = {name: [] for name in loaders}
        for _ in range(rounds):
            for name, make in loaders.items():
                waits[name] += _waits(make(), step_ms / 1e3)
    for name, values in waits.items():
        median, late, most = np.quantile(np.array(values) * 1e3, (0.5, 0.99, 1.0)).tolist()
        yield Row(name, {"ms p99": late, "ms median": median, "ms at most": most})
    yield Row("load", {"": os.getloadavg()[0]})


def _waits(loader: Iterable[Any], step_s: float) -> list[float]:
    """How long each step waits for its batch."""
    waits, batches = [], iter(loader)
    while True:
        began = time.perf_counter()
        if next(batches, None) is None:
            break
        waits.append(time.perf_counter() - began)
        time.sleep(step_s)
    if isinstance(loader, DataLoader):
        loader.close()
    return waits[len(waits) // 10 :]


def _write(path: Path, rows: int) -> None:
    values = pa.FixedSizeListArray.from_arrays(
        pa.array(np.random.default_rng(0).random(rows * FLOATS, np.float32)), FLOATS
    )
    table = pa.table({"row": range(rows), "x": values})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=ROWS_A_BLOCK)


def restart(*, rows: int = 8_000, rounds: int = 3) -> Iterator[Row]:
    """Seconds until each of two ranks has a batch of a run that had four, and has read 90 % of an
    epoch. The start of their node counts, imports do not.
    """
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder) / "rows.arrow", rows)
        _run_ranks(folder, rows, 4)
        seconds = [max(_run_ranks(folder, rows, 2)) for _ in range(rounds)]
    took = {"s": statistics.median(seconds), "s at most": max(seconds)}
    yield Row("first batch on two ranks in place of four", took)
    yield Row("load", {"": os.getloadavg()[0]})


def _run_ranks(folder: str, rows: int, count: int) -> list[float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    processes = [
        subprocess.Popen(
            [*dies_with_us(), sys.executable, __file__, "rank", folder, str(rows)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    return [float(process.communicate(timeout=180)[0]) for process in processes]


def _rank(folder: str, rows: int) -> None:
    """Read 90 % of an epoch and write a state, or go on from the state that is there."""
    state, group = Path(folder, "state.json"), torch.distributed
    group.init_process_group("gloo")
    options: dict[str, Any] = {"global_batch_size": GLOBAL, "shuffle": True, "columns": ["row"]}
    goes_on = state.exists()
    group.barrier()
    began = time.perf_counter()
    with DataLoader(Path(folder, "rows.arrow"), **options) as loader:
        if goes_on:
            loader.load_state_dict(json.loads(state.read_text()))
        for _ in itertools.islice(loader, 1 if goes_on else 9 * rows // GLOBAL // 10):
            pass
        print(time.perf_counter() - began)
        if group.get_rank() == 0 and not goes_on:
            state.write_text(json.dumps(loader.state_dict()))
        group.barrier()
    group.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run(__doc__, slow, restart, _rank))
