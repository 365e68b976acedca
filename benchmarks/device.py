"""Is the copy to a GPU hidden behind compute, and is it as fast as the bus? Needs a CUDA device.

    python benchmarks/device.py [--json] [--seconds 5] [--batch-mib 64] [--folder DIR]

Two tables. Copies: bytes per second from the loader's arena to the device, compared with a pinned
tensor of the same size (the speed of the bus) and with pageable memory. Steps: a training step of
matrix products takes longer than it takes to load and copy a batch; the table shows how much longer
the step becomes with each loader than with a batch that is already on the device. Each step is
synchronized, as in a loop that reads its loss, so only copies made ahead are hidden.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from dataplane_torch import DataLoader

_ROW_BYTES = 1 << 20
_SHARDS = 4
_GIB = 1 << 30
_TRIALS = 7


class DeviceRows(torch.utils.data.Dataset[Any]):
    """The shards' rows for torch's own loader, as a memory map, its fastest source."""

    def __init__(self, path: Path, count: int) -> None:
        self._path, self._count = path, count
        self._rows: Any = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> torch.Tensor:
        if self._rows is None:
            self._rows = np.memmap(self._path, np.uint8, "r", shape=(self._count, _ROW_BYTES))
        return torch.from_numpy(np.array(self._rows[i]))


def write(folder: Path, row_count: int) -> tuple[str, DeviceRows]:
    """The same rows as Parquet shards, and as one file."""
    shards = folder / "shards"
    shards.mkdir()
    draw = np.random.default_rng(7)
    with (folder / "rows").open("wb") as whole:
        for i in range(_SHARDS):
            rows = draw.integers(0, 256, (row_count // _SHARDS, _ROW_BYTES), np.uint8)
            whole.write(rows.tobytes())
            values = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), _ROW_BYTES)
            table = pa.table({"x": values})
            name = shards / f"{i}.parquet"
            pq.write_table(table, name, row_group_size=16, compression="none", use_dictionary=False)
    return str(shards), DeviceRows(folder / "rows", row_count // _SHARDS * _SHARDS)


def epochs(loader: Any) -> Iterator[Any]:
    """The batches of a loader, epoch after epoch."""
    while True:
        yield from loader


def copy_rate(source: torch.Tensor) -> float:
    """GiB/s to the device, the best of several trials."""
    target = torch.empty_like(source, device="cuda")
    rates = []
    for _ in range(_TRIALS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(4):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(4 * source.nbytes / _GIB / (time.perf_counter() - began))
    return max(rates)


def copies(url: str, batch_size: int) -> dict[str, float]:
    """Rates by the memory that is copied from."""
    with DataLoader(url, batch_size, drop_last=True, pin_memory=True) as loader:
        (batch,) = [batch["x"] for _, batch in zip(range(1), loader, strict=False)]
        if not batch.is_pinned():
            raise SystemExit("the arena is not pinned: raise `ulimit -l`")
        plain = torch.empty_like(batch)
        return {
            "arena": copy_rate(batch),
            "pinned": copy_rate(plain.pin_memory()),
            "pageable": copy_rate(plain),
        }


def step_of(seconds: float) -> Callable[[torch.Tensor], None]:
    """A step that reads its batch and computes for about the given time."""
    side = torch.randn(4096, 4096, device="cuda")

    def times(count: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            torch.mm(side, side)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    times(3)
    count = max(1, round(seconds / (times(20) / 20)))

    def step(batch: torch.Tensor) -> None:
        total = batch.view(-1)[::4096].sum()
        for _ in range(count):
            torch.mm(side, side)
        total.item()
        torch.cuda.synchronize()

    return step


def step_ms(batches: Iterator[torch.Tensor], step: Callable[[Any], None], seconds: float) -> float:
    """Mean milliseconds of a step, batch included. A mean, so that rare stalls count too."""
    for _ in range(5):
        step(next(batches))
    count, began = 0, time.perf_counter()
    while count < 10 or time.perf_counter() - began < seconds:
        step(next(batches))
        count += 1
    return 1000 * (time.perf_counter() - began) / count


def steps(
    url: str, rows: DeviceRows, batch_size: int, seconds: float, rate: float
) -> dict[str, Any]:
    """Milliseconds per step, by the source of its batches."""
    copy_ms = 1000 * batch_size * _ROW_BYTES / _GIB / rate
    with DataLoader(url, batch_size, shuffle=True, drop_last=True) as loader:
        host = epochs(loader)
        load_ms = step_ms((batch["x"] for batch in host), lambda _: None, 1.0)
    step = step_of(2 * (load_ms + copy_ms) / 1000)
    here = torch.zeros(batch_size, _ROW_BYTES, dtype=torch.uint8, device="cuda")
    found = {"on the device already": step_ms(itertools.repeat(here), step, seconds)}
    with DataLoader(url, batch_size, shuffle=True, drop_last=True, device="cuda") as loader:
        batches = (batch["x"] for batch in epochs(loader))
        found['dataplane, device="cuda"'] = step_ms(batches, step, seconds)
    with DataLoader(url, batch_size, shuffle=True, drop_last=True, pin_memory=True) as loader:
        moved = (batch["x"].to("cuda", non_blocking=True) for batch in epochs(loader))
        found["dataplane, pin_memory=True and to()"] = step_ms(moved, step, seconds)
    torchs: Any = torch.utils.data.DataLoader(
        rows, batch_size, shuffle=True, drop_last=True, num_workers=4, pin_memory=True,
        persistent_workers=True,
    )  # fmt: skip
    moved = (batch.to("cuda", non_blocking=True) for batch in epochs(torchs))
    found["torch, pin_memory=True and to()"] = step_ms(moved, step, seconds)
    return {"copy_ms": copy_ms, "load_ms": load_ms, "step_ms": found}


def table(found: dict[str, Any]) -> str:
    """Print the tables."""
    rates, timed = found["copy_gib_s"], found["steps"]
    bare = timed["step_ms"]["on the device already"]
    lines = [
        f"{found['device']}, torch {found['torch']}; batches of {found['batch_mib']} MiB",
        f"{'copies from':40s}{'GiB/s':>10s}{'of the bus':>12s}",
        *(f"{name:40s}{rate:10.1f}{rate / rates['pinned']:12.0%}" for name, rate in rates.items()),
        f"a batch is loaded in {timed['load_ms']:.1f} ms and copied in {timed['copy_ms']:.1f} ms",
        f"{'batches':40s}{'ms a step':>10s}{'stall, ms':>12s}",
        *(f"{name:40s}{ms:10.1f}{ms - bare:12.2f}" for name, ms in timed["step_ms"].items()),
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each loader")
    parser.add_argument("--batch-mib", type=int, default=64)
    parser.add_argument("--batches", type=int, default=32, help="an epoch")
    parser.add_argument("--folder", type=Path, help="for the rows; a temporary one by default")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write(
            f"there is no CUDA device (torch {torch.__version__}): nothing was measured\n"
        )
        return 1
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        url, rows = write(Path(folder), given.batch_mib * given.batches)
        rates = copies(url, given.batch_mib)
        timed = steps(url, rows, given.batch_mib, given.seconds, rates["pinned"])
    found = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "batch_mib": given.batch_mib,
        "copy_gib_s": rates,
        "steps": timed,
    }
    sys.stdout.write((json.dumps(found) if given.json else table(found)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
