"""The speed of our DataLoader over a torch Dataset, compared with torch's, in one process.

    python benchmarks/torch_datasets.py [--json] [--rounds 5] [case ...]

Each case is a dataset and the arguments of a loader. A round is one pass with torch's and one with
ours over the same dataset, including the start and end of workers. The ratio is torch's time
divided by ours, the median of all rounds: above 1, ours is faster. CPU is user and system time of
this process and of its workers. Exit status 1: a case missed its bar.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from dataplane_torch import DataLoader
from torch.utils.data import Dataset

_BAR = 0.95


class RepeatedRows(Dataset[Any]):
    """`count` samples that repeat a few samples, made once."""

    def __init__(self, count: int, samples: list[Any]) -> None:
        self.count, self.samples = count, samples

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % len(self.samples)]


@dataclass(frozen=True, slots=True)
class DatasetCase:
    """A dataset and the arguments of its loader; `bar` is the least ratio."""

    name: str
    make: Callable[[], Dataset[Any]]
    arguments: dict[str, Any]
    bar: float = _BAR


def _tensors(
    count: int, *shape: int, dtype: torch.dtype = torch.float32
) -> Callable[[], RepeatedRows]:
    return lambda: RepeatedRows(count, [torch.ones(shape).to(dtype) for _ in range(64)])


def _records() -> RepeatedRows:
    samples = [{"image": torch.ones(3, 64, 64), "label": i, "name": f"{i}.jpg"} for i in range(64)]
    return RepeatedRows(6_000, samples)


def _strings() -> RepeatedRows:
    return RepeatedRows(60_000, [f"a sentence of some length, number {i}" for i in range(64)])


def _loading(batch_size: int | None, num_workers: int = 0, **more: Any) -> dict[str, Any]:
    return {"batch_size": batch_size, "num_workers": num_workers, **more}


CASES = (
    DatasetCase("1mb-4", _tensors(3_000, 262_144), _loading(16, 4), bar=3.0),
    DatasetCase("1mb-4-unbatched", _tensors(3_000, 262_144), _loading(None, 4)),
    DatasetCase("1mb-0", _tensors(1_000, 262_144), _loading(16)),
    DatasetCase("16mb-2", _tensors(200, 4 << 20), _loading(1, 2)),
    DatasetCase("records-4", _records, _loading(32, 4)),
    DatasetCase("tiny-2", _tensors(100_000, 8), _loading(64, 2)),
    DatasetCase("tiny-2-unbatched", _tensors(20_000, 8), _loading(None, 2)),
    DatasetCase("tiny-0", _tensors(100_000, 8), _loading(64)),
    DatasetCase("strings-2", _strings, _loading(64, 2)),
    DatasetCase("strings-0", _strings, _loading(64)),
    DatasetCase("short-2", _tensors(256, 8), _loading(64, 2)),
)


@dataclass(frozen=True, slots=True)
class DatasetResult:
    """Medians: the ratio of torch's time to ours in a round, and seconds of a pass."""

    name: str
    bar: float
    ratio: float
    torch_s: float
    ours_s: float
    torch_cpu_s: float
    ours_cpu_s: float


def measure(case: DatasetCase, rounds: int) -> DatasetResult:
    """Passes with both loaders in turns; the first pass of each is not counted."""
    dataset = case.make()
    loaders = (torch.utils.data.DataLoader, DataLoader)
    times: tuple[list[float], list[float]] = ([], [])
    cpus: tuple[list[float], list[float]] = ([], [])
    for round_index in range(rounds + 1):
        for which, loader in enumerate(loaders):
            started, cpu = time.perf_counter(), _cpu_s()
            count = sum(1 for _ in loader(dataset, **case.arguments))
            assert count
            if round_index:
                times[which].append(time.perf_counter() - started)
                cpus[which].append(_cpu_s() - cpu)
    ratios = [theirs / ours for theirs, ours in zip(*times, strict=True)]
    medians = [statistics.median(each) for each in (*times, *cpus)]
    return DatasetResult(case.name, case.bar, statistics.median(ratios), *medians)


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("cases", nargs="*", help="names of cases; all of them without")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each loader (5)")
    parser.add_argument("--json", action="store_true", help="one object a case")
    given = parser.parse_args()
    known = {case.name: case for case in CASES}
    if unknown := set(given.cases) - set(known):
        parser.error(f"no case is called {', '.join(sorted(unknown))}: {', '.join(known)}")
    warnings.filterwarnings("ignore", message=".*worker processes in total.*")
    head = ("case", "torch", "ours", "torch cpu", "ours cpu", "ratio", "bar")
    if not given.json:
        print("{:18}{:>9}{:>9}{:>11}{:>10}{:>8}{:>7}".format(*head))
    missed = 0
    for name in given.cases or known:
        result = measure(known[name], given.rounds)
        missed += result.ratio < result.bar
        if given.json:
            fields = {field: getattr(result, field) for field in DatasetResult.__slots__}
            print(json.dumps(fields), flush=True)
            continue
        print(
            f"{result.name:18}{result.torch_s:9.3f}{result.ours_s:9.3f}{result.torch_cpu_s:11.2f}"
            f"{result.ours_cpu_s:10.2f}{result.ratio:8.2f}{result.bar:7.2f}",
            flush=True,
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
