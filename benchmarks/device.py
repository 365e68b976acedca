"""How well a GPU is fed: copies to it, stalls of its steps, and training loops' share of its rate.

    python benchmarks/device.py copies | training [--json]

`copies` needs a CUDA device. Without one, `training` takes tiny models and samples, which shows
only that it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from dataplane_bench.machine import bench_folder
from dataplane_bench.model import CROP, BenchCase, ColumnType, DatasetPlace, TrialTask, Workload
from dataplane_bench.peers import memmaps
from dataplane_bench.peers.torch_datasets import TorchPeer
from dataplane_bench.scripts import Row, lists, run, shard
from dataplane_bench.workloads.generate import generated
from dataplane_torch import DataLoader, RandomHorizontalFlip, RandomResizedCrop
from torch import nn
from torch.nn import functional

IS_ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_ON_GPU else "cpu"
ROW_BYTES = 1 << 20
SHARDS = 4
GIB = 1 << 30
TRIALS = 7
SAMPLES = {"resnet": "images", "transformer": "tokens"}
BATCH = {"resnet": 256, "transformer": 32}
VOCABULARY = 1 << 16
WARM_STEPS = 8

Batches = Iterator[torch.Tensor]
Step = Callable[[torch.Tensor], None]


class DeviceRows(torch.utils.data.Dataset[Any]):
    """The shards' rows for torch's own loader, as a memory map, its fastest source."""

    def __init__(self, path: Path, count: int) -> None:
        self._path, self._count = path, count
        self._rows: Any = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> torch.Tensor:
        if self._rows is None:
            self._rows = np.memmap(self._path, np.uint8, "r", shape=(self._count, ROW_BYTES))
        return torch.from_numpy(np.array(self._rows[i]))


def write(folder: Path, row_count: int) -> tuple[str, DeviceRows]:
    """The same rows as Arrow shards, and as one file."""
    shards = folder / "shards"
    shards.mkdir()
    draw = np.random.default_rng(7)
    with (folder / "rows").open("wb") as whole:
        for i in range(SHARDS):
            rows = draw.integers(0, 256, (row_count // SHARDS, ROW_BYTES), np.uint8)
            whole.write(rows.tobytes())
            table = pa.table({"x": lists(rows, ROW_BYTES)})
            (shards / f"{i}.arrow").write_bytes(shard(table, "arrow", 16))
    return str(shards), DeviceRows(folder / "rows", row_count // SHARDS * SHARDS)


def epochs(loader: Any) -> Iterator[Any]:
    """The batches of a loader, epoch after epoch."""
    while True:
        yield from loader


def copy_rate(source: torch.Tensor) -> float:
    """GiB/s to the device, the best of several trials."""
    target = torch.empty_like(source, device="cuda")
    rates = []
    for _ in range(TRIALS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(4):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(4 * source.nbytes / GIB / (time.perf_counter() - began))
    return max(rates)


def copy_rates(url: str, batch_size: int) -> dict[str, float]:
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


def products_of(seconds: float) -> Callable[[torch.Tensor], None]:
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
) -> dict[str, float]:
    """Milliseconds per step, by the source of its batches."""
    copy_ms = 1000 * batch_size * ROW_BYTES / GIB / rate
    with DataLoader(url, batch_size, shuffle=True, drop_last=True) as loader:
        host = epochs(loader)
        load_ms = step_ms((batch["x"] for batch in host), lambda _: None, 1.0)
    step = products_of(2 * (load_ms + copy_ms) / 1000)
    here = torch.zeros(batch_size, ROW_BYTES, dtype=torch.uint8, device="cuda")
    steps_ms = {"on the device already": step_ms(itertools.repeat(here), step, seconds)}
    with DataLoader(url, batch_size, shuffle=True, drop_last=True, device="cuda") as loader:
        batches = (batch["x"] for batch in epochs(loader))
        steps_ms['dataplane, device="cuda"'] = step_ms(batches, step, seconds)
    with DataLoader(url, batch_size, shuffle=True, drop_last=True, pin_memory=True) as loader:
        moved = (batch["x"].to("cuda", non_blocking=True) for batch in epochs(loader))
        steps_ms["dataplane, pin_memory=True and to()"] = step_ms(moved, step, seconds)
    torchs: Any = torch.utils.data.DataLoader(
        rows, batch_size, shuffle=True, drop_last=True, num_workers=4, pin_memory=True,
        persistent_workers=True,
    )  # fmt: skip
    moved = (batch.to("cuda", non_blocking=True) for batch in epochs(torchs))
    steps_ms["torch, pin_memory=True and to()"] = step_ms(moved, step, seconds)
    print(f"a batch is loaded in {load_ms:.1f} ms and copied in {copy_ms:.1f} ms", file=sys.stderr)
    return steps_ms


def copies(
    *, seconds: float = 5.0, batch_mib: int = 64, batches: int = 32, folder: str = ""
) -> Iterator[Row]:
    """Whether the copy to a GPU is hidden behind compute, and as fast as the bus.

    Copies: bytes per second from the loader's arena to the device, compared with a pinned tensor of
    the same size (the speed of the bus) and with pageable memory. Steps: a training step of matrix
    products takes longer than it takes to load and copy a batch; the rows show how much longer the
    step becomes with each loader than with a batch that is already on the device. Each step is
    synchronized, as in a loop that reads its loss, so only copies made ahead are hidden.
    """
    if not IS_ON_GPU:
        sys.exit(f"there is no CUDA device (torch {torch.__version__}): nothing was measured")
    with tempfile.TemporaryDirectory(dir=folder or None) as made:
        url, rows = write(Path(made), batch_mib * batches)
        rates = copy_rates(url, batch_mib)
        timed = steps(url, rows, batch_mib, seconds, rates["pinned"])
    for name, rate_here in rates.items():
        of_bus = {"GiB/s": rate_here, "of the bus": rate_here / rates["pinned"]}
        yield Row(f"copies from {name} memory", of_bus)
    bare = timed["on the device already"]
    for name, ms in timed.items():
        yield Row(f"a step, batches {name}", {"ms stall": ms - bare, "ms": ms})


class Bottleneck(nn.Module):
    """A block of ResNet-50.   Source:  He et al., Deep Residual Learning, 2015, figure 5."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        layers = [(width_in, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        made: list[nn.Module] = []
        for a, b, side, step in layers:
            made += [nn.Conv2d(a, b, side, step, side // 2, bias=False), nn.BatchNorm2d(b)]
            made += [nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*made[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or width_in != 4 * width:
            projection = nn.Conv2d(width_in, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.layers(x) + self.shortcut(x))


def resnet() -> nn.Module:
    """ResNet-50: torchvision's, or without it the same of torch's layers; one block each on CPU."""
    if IS_ON_GPU and find_spec("torchvision") is not None:
        models: Any = importlib.import_module("torchvision.models")
        made: nn.Module = models.resnet50()
        return made
    depths = (3, 4, 6, 3) if IS_ON_GPU else (1, 1, 1, 1)
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    width_in = 64
    for stage, depth in enumerate(depths):
        for block in range(depth):
            stride = 2 if stage and not block else 1
            layers.append(Bottleneck(width_in, 64 << stage, stride))
            width_in = 256 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class Transformer(nn.Module):
    """A decoder that predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        width, depth = (512, 8) if IS_ON_GPU else (32, 1)
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY if IS_ON_GPU else 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        hidden = self.layers(self.embedding(tokens), mask=mask, is_causal=True)
        scores: torch.Tensor = self.head(hidden)
        return scores


def step_of(name: str) -> Step:
    """A step of a model, without a wait for its end, as in a loop that seldom reads its loss."""
    torch.backends.cudnn.benchmark = True
    model = (resnet() if name == "resnet" else Transformer()).to(DEVICE)
    if name == "resnet":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        if name == "resnet":
            images = batch.permute(0, 3, 1, 2).float().div(127.5).sub(1)
            labels = batch[:, 0, 0, 0].long()
            return functional.cross_entropy(model(images), labels)
        tokens = batch.long() % VOCABULARY
        scores = model(tokens[:, :-1]).flatten(0, 1)
        return functional.cross_entropy(scores, tokens[:, 1:].flatten() % scores.shape[1])

    def step(batch: torch.Tensor) -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = loss_of(batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def rate(batches: Batches, step: Step, seconds: float) -> float:
    """Samples a second, once the buffers are warm."""
    for batch in itertools.islice(batches, WARM_STEPS if IS_ON_GPU else 1):
        step(batch)
    _synchronize()
    count, began = 0, time.perf_counter()
    while not count or time.perf_counter() - began < seconds:
        batch = next(batches)
        step(batch)
        count += len(batch)
    _synchronize()
    return count / (time.perf_counter() - began)


def _synchronize() -> None:
    if IS_ON_GPU:
        torch.cuda.synchronize()


def _epochs(epoch: Callable[[int], Iterator[Any]], column: str) -> Batches:
    for number in itertools.count():
        for batch in epoch(number):
            yield batch[column].to(DEVICE, non_blocking=True)


@contextlib.contextmanager
def ours(workload: Workload, column: str, **options: Any) -> Iterator[Batches]:
    """Batches of Dataplane, from the source's shards."""
    steps = [RandomResizedCrop(CROP), RandomHorizontalFlip()]
    if workload.shape == "images":
        options["transforms"] = {column: steps}
    shards = [str(shard) for shard in workload.shards]
    with DataLoader(
        shards, workload.batch_size, shuffle=True, seed=1, drop_last=True, columns=[column],
        **options,
    ) as loader:  # fmt: skip
        yield _epochs(lambda _: iter(loader), column)


@contextlib.contextmanager
def torchs(workload: Workload, column: str, folder: Path) -> Iterator[Batches]:
    """Batches of torch's DataLoader, from the files that suit it best, with a process a core."""
    cores = len(os.sched_getaffinity(0))
    settings: dict[str, Any] = {"num_workers": max(1, cores - 1), "prefetch_factor": 4}
    if workload.shape != "images":
        settings["fetch"] = "batch"
    case = BenchCase("local", workload.name)
    place = DatasetPlace(folder, str(folder))
    task = TrialTask("torch", case, workload, place, settings, folder, "training")
    peer = TorchPeer(partial(torch.utils.data.DataLoader, pin_memory=IS_ON_GPU), task)
    with contextlib.closing(peer):
        whole = workload.batch_size
        full = lambda number: (b for b in peer.epoch(number) if len(b[column]) == whole)  # noqa: E731
        yield _epochs(full, column)


def measured(name: str, seconds: float, scale: float) -> dict[str, float]:
    """Samples a second of a model by the source of its batches."""
    workload = generated(SAMPLES[name], bench_folder() / "source", scale)
    batch_size = BATCH[name] if IS_ON_GPU else 2
    workload = dataclasses.replace(workload, batch_size=batch_size)
    kinds = (ColumnType.IMAGE,) if name == "resnet" else (ColumnType.FIXED,)
    column = next(some.name for some in workload.columns if some.kind in kinds and _is_wide(some))
    step = step_of(name)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        memmaps.write(workload, folder)
        ways: dict[str, Any] = {"dataplane": partial(ours, workload, column)}
        if IS_ON_GPU:
            ways = {
                'dataplane, device="cuda"': partial(ours, workload, column, device="cuda"),
                "dataplane, pin_memory=True": partial(ours, workload, column, pin_memory=True),
            }
        ways["torch, pin_memory=True" if IS_ON_GPU else "torch"] = partial(
            torchs, workload, column, folder
        )
        with ours(workload, column) as batches:
            same = next(batches).clone()
        rates = {"one batch on the device": rate(itertools.repeat(same), step, seconds)}
        for way, opened in ways.items():
            with opened() as batches:
                rates[way] = rate(batches, step, seconds)
    return rates


def _is_wide(column: Any) -> bool:
    return column.kind is ColumnType.IMAGE or column.sample_bytes >= 256


def training(
    *,
    models: tuple[str, ...] = (*SAMPLES,),
    seconds: float = 8.0,
    scale: float = 2.0 if IS_ON_GPU else 0.01,
) -> Iterator[Row]:
    """How much of a GPU's own rate a training loop reaches, with each loader.

    ResNet-50 over random crops of 224 x 224 from JPEGs of 97 KB, and a small transformer over rows
    of 2,048 tokens, both in bfloat16: samples a second with one batch that is on the device
    already, and then with each loader, as shares of that.
    """
    for name in models:
        rates = measured(name, seconds, scale)
        own = rates["one batch on the device"]
        for way, value in rates.items():
            yield Row(f"{name}, {way}", {"of the device's rate": value / own, "samples/s": value})


if __name__ == "__main__":
    sys.exit(run(__doc__, copies, training))
