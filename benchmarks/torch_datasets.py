"""Our DataLoader over torch Datasets, compared with torch's: speed, and peak memory.

    python benchmarks/torch_datasets.py speed | memory [CASE ...] [--json]

Each case is a dataset and the arguments of a loader; both loaders take turns. Exit status 1: a case
missed its bar.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from dataplane_bench.scripts import Row, family_cpu_s, line_of, run, send, started
from dataplane_torch import DataLoader
from msgspec import Struct
from torch.utils.data import Dataset, default_collate

LOADERS = {"torch": torch.utils.data.DataLoader, "ours": DataLoader}


class RepeatedRows(Dataset[Any]):
    """`count` samples that repeat a few samples, made once."""

    def __init__(self, count: int, samples: list[Any]) -> None:
        self.count, self.samples = count, samples

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % len(self.samples)]


class DatasetCase(Struct, frozen=True):
    """A dataset and the arguments of its loader. `bar` is the least ratio of torch's time to ours,
    `batch_mib` the size of the largest batch, `step_s` a trainer's step.
    """

    make: Callable[[], Dataset[Any]]
    arguments: dict[str, Any]
    bar: float = 0.95
    batch_mib: int = 0
    step_s: float = 0.0


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


SPEED_CASES = {
    "1mb-4": DatasetCase(_tensors(3_000, 262_144), _loading(16, 4), bar=3.0),
    "1mb-4-unbatched": DatasetCase(_tensors(3_000, 262_144), _loading(None, 4)),
    "1mb-0": DatasetCase(_tensors(1_000, 262_144), _loading(16)),
    "16mb-2": DatasetCase(_tensors(200, 4 << 20), _loading(1, 2)),
    "records-4": DatasetCase(_records, _loading(32, 4)),
    "tiny-2": DatasetCase(_tensors(100_000, 8), _loading(64, 2)),
    "tiny-2-unbatched": DatasetCase(_tensors(20_000, 8), _loading(None, 2)),
    "tiny-0": DatasetCase(_tensors(100_000, 8), _loading(64)),
    "strings-2": DatasetCase(_strings, _loading(64, 2)),
    "strings-0": DatasetCase(_strings, _loading(64)),
    "short-2": DatasetCase(_tensors(256, 8), _loading(64, 2)),
}


def speed(*cases: str, rounds: int = 5) -> Iterator[Row]:
    """How fast both loaders pass over a dataset, the start and end of workers included.

    The ratio is torch's time divided by ours, the median of all rounds: above 1, ours is faster.
    CPU is user and system time of this process and of its workers.
    """
    warnings.filterwarnings("ignore", message=".*worker processes in total.*")
    for name in cases or SPEED_CASES:
        case = SPEED_CASES[name]
        dataset = case.make()
        spent: dict[str, list[float]] = {}
        for round_number in range(rounds + 1):  # the first is not counted
            for loader_name, loader in LOADERS.items():
                began, cpu_s = time.perf_counter(), family_cpu_s()
                assert sum(1 for _ in loader(dataset, **case.arguments))
                took_s, cpu_s = time.perf_counter() - began, family_cpu_s() - cpu_s
                if round_number:
                    spent.setdefault(f"s {loader_name}", []).append(took_s)
                    spent.setdefault(f"CPU s {loader_name}", []).append(cpu_s)
        pairs = zip(spent["s torch"], spent["s ours"], strict=True)
        ratio = statistics.median(theirs / ours for theirs, ours in pairs)
        medians = {what: statistics.median(some) for what, some in spent.items()}
        yield Row(name, {"times torch's speed": ratio, **medians}, case.bar)


MIB = 1 << 20
SAMPLED_S = 0.02
NOISE_MIB = 32
"""Differences of Python and its allocators between two processes."""


class Sized(Dataset[torch.Tensor]):
    """Each sample is a new tensor of this many MiB."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.sizes[index] << 20,), index % 256, dtype=torch.uint8)


class Expanded(Sized):
    """The same samples, but each is an expanded row, which takes the memory of one row."""

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.full((1, MIB), index % 256, dtype=torch.uint8)
        return row.expand(self.sizes[index], MIB)


class Collated(Sized):
    """Collates eight parts of its own, and returns little."""

    def __getitem__(self, index: int) -> torch.Tensor:
        part = torch.full((self.sizes[index] << 19,), index % 256, dtype=torch.uint8)
        return torch.stack([default_collate([part, part])[:, 0] for _ in range(8)])


def expanded(samples: list[torch.Tensor]) -> torch.Tensor:
    """A collate function that expands one sample, such as a mask, to the whole batch."""
    return samples[0][None].expand(64, *samples[0].shape)


def _uneven() -> list[int]:
    chance = random.Random(7)
    return [chance.randint(1, 100) for _ in range(40)]


def _sized(
    kind: type[Sized], sizes: list[int], arguments: dict[str, Any], mib: int, step_s: float = 0.0
) -> DatasetCase:
    return DatasetCase(lambda: kind(sizes), arguments, batch_mib=mib, step_s=step_s)


MEMORY_CASES = {
    "even": _sized(Sized, [1] * 480, _loading(16, 2), 16),
    "even-slow": _sized(Sized, [1] * 480, _loading(16, 4), 16, 0.03),
    "large-1": _sized(Sized, [300] * 8, _loading(1, 1), 300),
    "large-2": _sized(Sized, [300] * 8, _loading(1, 2), 300),
    "large-slow": _sized(Sized, [300] * 8, _loading(1, 2), 300, 0.5),
    "uneven-1": _sized(Sized, _uneven(), _loading(1, 1), 100),
    "uneven-2": _sized(Sized, _uneven(), _loading(1, 2), 100),
    "uneven-unbatched": _sized(Sized, _uneven(), _loading(None, 2), 100),
    "expanded": _sized(Expanded, [200] * 10, _loading(None, 1), 1),
    "expanded-collate": _sized(Sized, [3] * 10, _loading(1, 1, collate_fn=expanded), 3),
    "collated": _sized(Collated, [50] * 10, _loading(1, 1), 1),
}


def memory(*cases: str, rounds: int = 3) -> Iterator[Row]:
    """The peak memory of both loaders, each pass in a process of its own.

    The peak is the growth of that process and its workers: the anonymous pages of every process,
    and each shared object (memfd, file in /dev/shm) once, mapped or not. It is sampled every few
    milliseconds and may miss short peaks, so the largest of the rounds counts. The bar is torch's
    peak plus one batch.
    """
    for name in cases or MEMORY_CASES:
        peaks = {
            kind: max(peak_mib(kind, name) for _ in range(rounds)) for kind in ("torch", "ours")
        }
        bar = peaks["torch"] + MEMORY_CASES[name].batch_mib + NOISE_MIB
        yield Row(name, {"MiB ours": peaks["ours"], "MiB torch": peaks["torch"]}, most=bar)


def peak_mib(kind: str, name: str) -> float:
    """The peak of one pass in its own process."""
    with contextlib.ExitStack() as stack:
        process = started(stack, sys.executable, __file__, "walk", kind, name)
        line_of(process.stdout)
        before = peak = used_bytes(process.pid)
        send(process)
        while process.poll() is None:
            peak = max(peak, used_bytes(process.pid))
            time.sleep(SAMPLED_S)
        assert not process.returncode, f"{kind} over {name} failed"
    return (peak - before) / MIB


def used_bytes(pid: int) -> int:
    """The memory of a process and its descendants together."""
    anonymous, shared = 0, dict[tuple[int, int], int]()
    for member in _family(pid):
        try:
            for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss_Anon:"):
                    anonymous += int(line.split()[1]) << 10
            for file in [*_open_files(member), *_mapped_files(member)]:
                about = file.stat()
                shared[about.st_dev, about.st_ino] = about.st_blocks * 512
        except OSError:  # it has ended
            continue
    return anonymous + sum(shared.values())


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _family(int(child))


def _open_files(pid: int) -> Iterator[Path]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if _is_shared(str(link.readlink())):
            yield link


def _mapped_files(pid: int) -> Iterator[Path]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and _is_shared(fields[5]):
            start, end = (f"{int(side, 16):x}" for side in fields[0].split("-"))
            yield Path(f"/proc/{pid}/map_files/{start}-{end}")


def _is_shared(name: str) -> bool:
    return name.startswith(("/memfd:dataplane", "/dev/shm/torch"))


def _walk(kind: str, name: str) -> None:
    """The work of the measured process."""
    warnings.filterwarnings("ignore", message=".*worker processes in total.*")
    case = MEMORY_CASES[name]
    loader = LOADERS[kind](case.make(), **case.arguments)
    print("ready", flush=True)
    sys.stdin.readline()
    for batch in loader:
        assert batch.shape
        time.sleep(case.step_s)


if __name__ == "__main__":
    sys.exit(run(__doc__, speed, memory, _walk))
