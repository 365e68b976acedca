"""The peak memory of our DataLoader over a torch Dataset, compared with torch's.

    python benchmarks/memory.py [--json] [--rounds 3] [case ...]

Each case is a dataset and the arguments of a loader; a round is one pass with torch's and one with
ours, each in its own process. The peak is the growth of that process and its workers: the anonymous
pages of every process, and each shared object (memfd, file in /dev/shm) once, mapped or not. It is
sampled every few milliseconds and may miss short peaks, so the largest of the rounds counts. The
bar is torch's peak plus one batch. Exit status 1: a case missed it.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dataplane_torch import DataLoader
from torch.utils.data import Dataset, default_collate

_PAUSE_S = 0.02
_MIB = 1 << 20
# Tolerance for differences of Python and its allocators between two processes.
_NOISE_MIB = 32


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
        row = torch.full((1, _MIB), index % 256, dtype=torch.uint8)
        return row.expand(self.sizes[index], _MIB)


class Collated(Sized):
    """Collates eight parts of its own, and returns little."""

    def __getitem__(self, index: int) -> torch.Tensor:
        part = torch.full((self.sizes[index] << 19,), index % 256, dtype=torch.uint8)
        return torch.stack([default_collate([part, part])[:, 0] for _ in range(8)])


def expanded(samples: list[torch.Tensor]) -> torch.Tensor:
    """A collate function that expands one sample, such as a mask, to the whole batch."""
    return samples[0][None].expand(64, *samples[0].shape)


@dataclass(frozen=True, slots=True)
class Case:
    """A dataset, how it is loaded, and the MiB of its largest batch."""

    name: str
    make: Callable[[], Dataset[Any]]
    arguments: dict[str, Any]
    batch_mib: int
    step_s: float = 0.0


def _uneven() -> list[int]:
    chance = random.Random(7)
    return [chance.randint(1, 100) for _ in range(40)]


CASES = (
    Case("even", lambda: Sized([1] * 480), {"batch_size": 16, "num_workers": 2}, 16),
    Case("even-slow", lambda: Sized([1] * 480), {"batch_size": 16, "num_workers": 4}, 16, 0.03),
    Case("large-1", lambda: Sized([300] * 8), {"batch_size": 1, "num_workers": 1}, 300),
    Case("large-2", lambda: Sized([300] * 8), {"batch_size": 1, "num_workers": 2}, 300),
    Case("large-slow", lambda: Sized([300] * 8), {"batch_size": 1, "num_workers": 2}, 300, 0.5),
    Case("uneven-1", lambda: Sized(_uneven()), {"batch_size": 1, "num_workers": 1}, 100),
    Case("uneven-2", lambda: Sized(_uneven()), {"batch_size": 1, "num_workers": 2}, 100),
    Case("uneven-unbatched", lambda: Sized(_uneven()), {"batch_size": None, "num_workers": 2}, 100),
    Case("expanded", lambda: Expanded([200] * 10), {"batch_size": None, "num_workers": 1}, 1),
    Case(
        "expanded-collate",
        lambda: Sized([3] * 10),
        {"batch_size": 1, "num_workers": 1, "collate_fn": expanded},
        3,
    ),
    Case("collated", lambda: Collated([50] * 10), {"batch_size": 1, "num_workers": 1}, 1),
)  # fmt: skip


def peak_mib(kind: str, case: Case) -> float:
    """The result of one pass in its own process."""
    command = [sys.executable, __file__, "--walk", kind, case.name]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        before = peak = used_bytes(process.pid)
        print("go", file=process.stdin, flush=True)
        while process.poll() is None:
            peak = max(peak, used_bytes(process.pid))
            time.sleep(_PAUSE_S)
        assert not process.returncode, f"{kind} over {case.name} failed"
    return (peak - before) / _MIB


def used_bytes(pid: int) -> int:
    """The memory of a process and its descendants together."""
    anonymous, shared = 0, dict[tuple[int, int], int]()
    for each in _family(pid):
        try:
            for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss_Anon:"):
                    anonymous += int(line.split()[1]) << 10
            for file in [*_open_files(each), *_mapped_files(each)]:
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


def walk(kind: str, case: Case) -> None:
    """The work of the measured process."""
    warnings.filterwarnings("ignore", message=".*worker processes in total.*")
    dataset = case.make()
    loader = (torch.utils.data.DataLoader if kind == "torch" else DataLoader)(
        dataset, **case.arguments
    )
    print("ready", flush=True)
    sys.stdin.readline()
    for batch in loader:
        assert batch.shape
        time.sleep(case.step_s)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("cases", nargs="*", help="names of cases; all of them without")
    parser.add_argument("--rounds", type=int, default=3, help="passes of each loader (3)")
    parser.add_argument("--json", action="store_true", help="one object a case")
    parser.add_argument("--walk", choices=("torch", "ours"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    known = {case.name: case for case in CASES}
    if unknown := set(given.cases) - set(known):
        parser.error(f"no case is called {', '.join(sorted(unknown))}: {', '.join(known)}")
    if given.walk:
        walk(given.walk, known[given.cases[0]])
        return 0
    if not given.json:
        print(f"{'case':18}{'torch MiB':>11}{'ours MiB':>10}{'bar':>7}{'ratio':>7}")
    missed = 0
    for name in given.cases or known:
        case = known[name]
        theirs, ours = (
            max(peak_mib(kind, case) for _ in range(given.rounds)) for kind in ("torch", "ours")
        )
        bar = theirs + case.batch_mib + _NOISE_MIB
        missed += ours > bar
        if given.json:
            found = {"case": name, "torch_mib": theirs, "ours_mib": ours, "bar_mib": bar}
            print(json.dumps(found), flush=True)
            continue
        print(f"{name:18}{theirs:11.0f}{ours:10.0f}{bar:7.0f}{ours / theirs:7.2f}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
