"""How much of a GPU's own rate does a training loop reach, with each loader?

    python benchmarks/training.py [--model resnet transformer] [--seconds 8] [--json FILE]

ResNet-50 over random crops of 224 x 224 from JPEGs of 97 KB, and a small transformer over rows of
2,048 tokens, both in bfloat16: samples a second with one batch that is on the device already, and
then with each loader, as shares of that. Without a CUDA device, models and samples are tiny, which
shows only that the script runs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from dataplane_bench.folders import bench_folder
from dataplane_bench.model import CROP, BenchCase, ColumnType, DatasetPlace, TrialTask, Workload
from dataplane_bench.peers import memmaps
from dataplane_bench.peers.torch_datasets import TorchPeer
from dataplane_bench.workloads.generate import generated
from dataplane_torch import DataLoader, RandomHorizontalFlip, RandomResizedCrop
from torch import nn
from torch.nn import functional

SAMPLES = {"resnet": "images", "transformer": "tokens"}
BATCH = {"resnet": 256, "transformer": 32}
VOCABULARY = 1 << 16
WARM_STEPS = 8
IS_ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_ON_GPU else "cpu"

Batches = Iterator[torch.Tensor]
Step = Callable[[torch.Tensor], None]


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
    column = next(each.name for each in workload.columns if each.kind in kinds and _is_wide(each))
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
        found = {"one batch on the device": rate(itertools.repeat(same), step, seconds)}
        for way, opened in ways.items():
            with opened() as batches:
                found[way] = rate(batches, step, seconds)
    return found


def _is_wide(column: Any) -> bool:
    return column.kind is ColumnType.IMAGE or column.sample_bytes >= 256


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=[*SAMPLES], default=[*SAMPLES])
    parser.add_argument("--seconds", type=float, default=8.0, help="for each loader")
    parser.add_argument("--scale", type=float, default=2.0 if IS_ON_GPU else 0.01)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = torch.cuda.get_device_name() if IS_ON_GPU else "CPU"
    print(f"{device}, torch {torch.__version__}")
    found = {}
    for name in given.model:
        found[name] = rates = measured(name, given.seconds, given.scale)
        own = rates["one batch on the device"]
        for way, value in rates.items():
            print(f"{name:12s} {way:30s} {value:10,.1f} samples/s {value / own:7.1%}", flush=True)
    if given.json:
        given.json.write_text(json.dumps({"device": device, "samples_per_s": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
