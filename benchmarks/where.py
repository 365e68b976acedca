"""The CPU seconds of a loader, by process, and in the trainer's own thread.

    python benchmarks/where.py URL... --batch-size 32 [--columns a,b] [--no-shuffle] [--json]

A training loop that does nothing takes batches, epoch after epoch. After a few seconds of warm-up,
the CPU times of the trainer, its node and its workers are read at both ends of a window. Settings
come from the environment (DATAPLANE_SLAB_BYTES=…).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
from dataplane_torch import DataLoader

WARM_S = 1.5


@dataclass(frozen=True, slots=True)
class CpuReading:
    """CPU seconds so far: of the trainer's thread, and of each process by its role."""

    at: float
    thread_s: float
    processes: dict[str, float]

    @classmethod
    def now(cls) -> CpuReading:
        """The times now."""
        me = psutil.Process()
        found: dict[str, float] = {}
        for process in (me, *me.children(recursive=True)):
            times = process.cpu_times()
            name = _name(process, me)
            found[name] = found.get(name, 0.0) + times.user + times.system
        return cls(time.perf_counter(), time.thread_time(), found)


def _name(process: psutil.Process, trainer: psutil.Process) -> str:
    if process == trainer:
        return "trainer"
    return "workers" if process.name() == "dp-worker" else "node"


def _batches(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _measured(loader: Any, batch_size: int, seconds: float) -> dict[str, Any]:
    batches, count = _batches(loader), 0
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_S:
        next(batches)
    first = CpuReading.now()
    while time.perf_counter() - first.at < seconds:
        next(batches)
        count += 1
    last = CpuReading.now()
    elapsed, millions = last.at - first.at, count * batch_size / 1e6
    thread_s = last.thread_s - first.thread_s
    return {
        "samples_per_s": count * batch_size / elapsed,
        "trainer_thread_share": thread_s / elapsed,
        "trainer_thread_us_a_batch": thread_s / count * 1e6,
        "cpu_s_per_million_samples": {
            name: (cpu_s - first.processes.get(name, 0.0)) / millions
            for name, cpu_s in last.processes.items()
        },
    }


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--columns", default="", help="with commas between; all of them by default")
    parser.add_argument("--no-shuffle", action="store_true")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with DataLoader(
        given.urls,
        given.batch_size,
        shuffle=not given.no_shuffle,
        columns=given.columns.split(",") if given.columns else None,
    ) as loader:
        found = _measured(loader, given.batch_size, given.seconds)
    if given.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    costs = found["cpu_s_per_million_samples"]
    lines = [
        f"{found['samples_per_s']:,.0f} samples/s",
        f"the trainer's thread is busy for {found['trainer_thread_share']:.0%} of the time",
        f"  {found['trainer_thread_us_a_batch']:.1f} us a batch",
        "CPU seconds per million samples:",
        *(f"  {name:10s}{cpu_s:8.3f}" for name, cpu_s in costs.items()),
        f"  {'in all':10s}{sum(costs.values()):8.3f}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
