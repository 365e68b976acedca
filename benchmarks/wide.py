"""What does it cost to open a table with very many columns, and how long do other trainers wait?

    python benchmarks/wide.py [--columns 2000 8000 100000] [--format arrow parquet] [--json]

A node serves a trainer that takes a step every 5 ms. A second trainer opens a table with this many
float columns, in two shards, and takes its first batch. The report shows the CPU seconds of the
node, of the indexing processes, of the workers and of the second trainer, from its start to its
first batch; and the maximum and 99th percentile of the first trainer's waits meanwhile. Exit status
1: opening 100,000 columns took 10 s of CPU or more (node, indexing processes and workers), or the
99th percentile was 50 ms or more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

SHARDS, ROWS = 2, 64
STEP_S = 0.005
CPU_S_MAX, WAIT_S_MAX = 10.0, 0.050
PARTS = ("node", "indexing", "workers", "trainer")
DATAPLANE = [sys.executable, "-m", "dataplane"]
LOOP = """
import sys, threading, time
from dataplane_torch import DataLoader
waits, pause = [], threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), pause.set()), daemon=True).start()
loader = DataLoader(sys.argv[1], batch_size=8, service=sys.argv[2])
while not pause.is_set():
    batches = iter(loader)
    while True:
        began = time.perf_counter()
        batch = next(batches, None)
        waits.append((time.time(), time.perf_counter() - began))
        if len(waits) == 200:
            print("ready", flush=True)
        if batch is None or pause.wait(float(sys.argv[3])):
            break
for at, wait in waits:
    print(at, wait)
"""
OPEN = """
import resource, sys, time
import torch
from dataplane_torch import DataLoader
began, before = time.time(), time.process_time()
loader = DataLoader(sys.argv[1], batch_size=8, shuffle=True, service=sys.argv[2])
batch = next(iter(loader))
print(len(batch), began, time.time(), time.process_time() - before, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Found:
    """The results of one table: `cpu_s` by process; the waits of the other trainer in seconds."""

    columns: int
    format: str
    wall_s: float
    cpu_s: dict[str, float]
    wait_p99_s: float
    wait_s_max: float
    steps: int

    @property
    def is_good(self) -> bool:
        """Whether the bars are met."""
        opening_s = sum(self.cpu_s.values()) - self.cpu_s["trainer"]
        return opening_s < CPU_S_MAX and self.wait_p99_s < WAIT_S_MAX


class _Watched(threading.Thread):
    """CPU seconds of a service's processes, sampled while they run."""

    def __init__(self, service: psutil.Process) -> None:
        super().__init__(daemon=True)
        self._service, self._is_over = service, threading.Event()
        self._seen: dict[int, tuple[str, float, float]] = {}
        self._look()
        self.start()

    def run(self) -> None:
        """Sample often, since an indexing process ends as soon as it is done."""
        while not self._is_over.wait(0.02):
            self._look()

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds since the start, by process."""
        self._is_over.set()
        self.join()
        self._look()
        found = dict.fromkeys(PARTS, 0.0)
        for part, first, last in self._seen.values():
            found[part] += last - first
        return found

    def _look(self) -> None:
        is_first = not self._seen
        for process in (self._service, *self._service.children(recursive=True)):
            try:
                times = process.cpu_times()
                cpu_s = times.user + times.system
                part, first, _ = self._seen.get(process.pid) or (
                    _part(process), cpu_s if is_first else 0.0, 0.0,
                )  # fmt: skip
            except psutil.Error:
                continue
            self._seen[process.pid] = (part, first, cpu_s)


def _part(process: psutil.Process) -> str:
    parts = {"dp-indexer": "indexing", "dp-worker": "workers"}
    return parts.get(process.name(), "node")


def _write(folder: Path, columns: int, form: str) -> str:
    folder.mkdir()
    values = pa.array(np.arange(ROWS, dtype=np.float32))
    table = pa.Table.from_arrays([values] * columns, [f"feature_{i}" for i in range(columns)])
    for shard in range(SHARDS):
        path = folder / f"{shard}.{form}"
        if form == "parquet":
            pq.write_table(table, path, use_dictionary=False)
        else:
            with pa.ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table)
    return str(folder)


def measure(folder: Path, columns: int, form: str) -> Found:
    """Measure one table, on its own node."""
    wide = _write(folder / "wide", columns, form)
    narrow = folder / "narrow.parquet"
    pq.write_table(pa.table({"x": np.arange(100_000)}), narrow, row_group_size=10_000)
    serve = [*DATAPLANE, "serve", "--cache-dir", str(folder / "cache"), "--listen", "127.0.0.1:0"]
    serve += ["--state-dir", str(folder / "state"), "--log-level", "error"]
    serving = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
    assert serving.stdout is not None
    address = serving.stdout.readline().split()[-1]
    serving.stdout.readline()
    stepping = subprocess.Popen(
        [sys.executable, "-c", LOOP, str(narrow), address, str(STEP_S)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert stepping.stdout is not None
    try:
        stepping.stdout.readline()
        watched = _Watched(psutil.Process(serving.pid))
        opened = subprocess.run(
            [sys.executable, "-c", OPEN, wide, address], capture_output=True, text=True, check=True
        )
        count, began, ended, own_s = map(float, opened.stdout.split())
        assert count == columns
        cpu_s = watched.cpu_s() | {"trainer": own_s}
        lines = stepping.communicate()[0].splitlines()
        told = np.array([line.split() for line in lines if line != "ready"], np.float64)
        waits = told[(told[:, 0] >= began) & (told[:, 0] - told[:, 1] <= ended), 1]
        p99_s = float(np.quantile(waits, 0.99))
        wall_s = ended - began
        return Found(columns, form, wall_s, cpu_s, p99_s, float(waits.max()), len(waits))
    finally:
        stepping.kill()
        stepping.wait()
        serving.terminate()
        serving.wait()


def main() -> int:
    """Run the command. Exit status 1: a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--columns", type=int, nargs="+", default=[2000, 8000, 100_000])
    parser.add_argument("--format", nargs="+", default=["arrow", "parquet"])
    parser.add_argument("--json", action="store_true", help="print one JSON object a table")
    given = parser.parse_args()
    is_good = True
    for form in given.format:
        for columns in given.columns:
            with tempfile.TemporaryDirectory() as folder:
                found = measure(Path(folder), columns, form)
            is_good = is_good and found.is_good
            sys.stdout.write(f"{_told(found, as_json=given.json)}\n")
            sys.stdout.flush()
    return int(not is_good)


def _told(found: Found, *, as_json: bool) -> str:
    if as_json:
        told: dict[str, Any] = {name: getattr(found, name) for name in Found.__slots__}
        return json.dumps(told)
    cpu = ", ".join(f"{part} {seconds:.2f}" for part, seconds in found.cpu_s.items())
    return (
        f"{found.format}, {found.columns} columns: first batch after {found.wall_s:.1f} s; CPU s: "
        f"{cpu}; the other trainer waited {found.wait_p99_s * 1e3:.1f} ms (p99), "
        f"{found.wait_s_max * 1e3:.1f} ms (most) in {found.steps} steps"
    )


if __name__ == "__main__":
    sys.exit(main())
