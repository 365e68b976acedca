"""Random numbers are drawn when torch's loader draws them: after each step of a program, every
generator has the state that it has with torch's loader, whatever the program draws in between.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dataplane_torch import DataLoader
from local_datasets import Flow, Samples, is_same
from torch.utils.data import (
    BatchSampler,
    IterDataPipe,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.datapipes.iter import IterableWrapper

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COUNT = 9


class Eager(Sampler[int]):
    """Draws when an iterator of it is made, and not later."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(COUNT).tolist())


class EagerBatches(Eager):
    """The same, in batches."""

    def __iter__(self) -> Iterator[Any]:
        return iter([batch.tolist() for batch in torch.randperm(COUNT).split(2)])

    def __len__(self) -> int:
        return 5


class EachTime(Eager):
    """Draws whenever it is asked."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(COUNT, ())) for _ in range(COUNT))


def shuffled_flow() -> Any:
    return IterableWrapper(range(COUNT), deepcopy=False).shuffle()


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"shuffle": True},
    "in order": dict,
    "unbatched": lambda: {"shuffle": True, "batch_size": None},
    "replacement": lambda: {"sampler": RandomSampler(range(COUNT), True, 40)},
    "subset": lambda: {"sampler": SubsetRandomSampler([1, 5, 7, 2, 3])},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0, 2.0, 3.0], 7)},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(COUNT)), 2, True)},
    "eager": lambda: {"sampler": Eager()},
    "eager, unbatched": lambda: {"sampler": Eager(), "batch_size": None},
    "eager batches": lambda: {"batch_sampler": EagerBatches()},
    "each time": lambda: {"sampler": EachTime()},
    "iterable": lambda: {"dataset": Flow("drawn", COUNT)},
    "datapipe": lambda: {"dataset": shuffled_flow()},
    "generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(7)},
}


def generators(loader: Any) -> list[Any]:
    """What each generator would draw next."""
    found = [torch.random.get_rng_state().tolist(), random.getstate()]
    found += [np.random.get_state()[1].tolist()]  # type: ignore[index]  # noqa: NPY002
    return [*found, *([loader.generator.get_state().tolist()] if loader.generator else [])]


def walked(loader: Any) -> Iterator[Any]:
    """A program that draws between all its steps: what it sees, and the generators after each."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    is_started_once = loader.persistent_workers or not loader.num_workers
    for _ in range(2 if is_started_once else 1):
        iterator = iter(loader)
        yield generators(loader)
        torch.manual_seed(8)
        for batch in iterator:
            yield batch
            yield generators(loader)
            torch.rand(3)
    if not loader.persistent_workers and not isinstance(loader.dataset, IterDataPipe):
        iterator, other = iter(loader), iter(loader)
        yield generators(loader)
        for both in zip(iterator, other, strict=True):
            yield both
            yield generators(loader)


WORKERS: dict[str, dict[str, Any]] = {
    "none": {},
    "one": {"num_workers": 1},
    "kept": {"num_workers": 1, "persistent_workers": True},
}


# Where processes are started, a few of each sort.
_FEW = ("shuffle", "eager, unbatched", "each time", "iterable", "datapipe", "generator")
CASES = [
    *((name, "none") for name in SAMPLERS),
    *((name, workers) for name in _FEW for workers in ("one", "kept")),
]


@pytest.mark.parametrize(("name", "workers"), CASES)
def test_generators_have_the_state_of_torchs_after_each_step(name, workers) -> None:
    expected, got = (
        list(
            walked(
                kind(**{"dataset": Samples("int", COUNT), **WORKERS[workers]} | SAMPLERS[name]())
            )
        )
        for kind in (torch.utils.data.DataLoader, DataLoader)
    )
    assert len(got) == len(expected)
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert is_same(one, other), f"step {i}: {one!r:.300} is not {other!r:.300}"
