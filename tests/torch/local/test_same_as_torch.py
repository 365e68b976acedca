"""One program sees the same with torch's loader and with ours: batches, errors, warnings, worker
infos and random numbers. docs/datasets.md lists the intended differences.

    pytest -m "slow or not slow" tests/torch/local/test_same_as_torch.py    # with all of the workers
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import random
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dataplane_torch import DataLoader
from local_datasets import COLLATED, Flow, Pair, Samples, Together, as_is, as_pair, is_same
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_convert,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper

COUNT = 7
Arguments = dict[str, Any]
Make = Callable[[], Arguments]
Walk = Callable[[Any], Iterator[Any]]


@dataclasses.dataclass(frozen=True)
class Point:
    """A sample that only a user's own collate function knows."""

    x: torch.Tensor
    y: int


class TwoWords(Exception):
    """An exception that cannot be made of one text."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


class Of(Dataset[Any]):
    """A dataset that returns the result of a function for each index."""

    def __init__(self, sample: Callable[[int], Any], count: int = COUNT) -> None:
        self.sample, self.count = sample, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        return self.sample(i)


class Streams(IterableDataset[Any]):
    """A function's results, equally many in each worker; `length` is the length that it reports."""

    def __init__(self, sample: Callable[[int], Any], length: int | None = None) -> None:
        self.sample, self.length = sample, length

    def __iter__(self) -> Iterator[Any]:
        return map(self.sample, range(5))

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("no length")
        return self.length


def raising(error: Callable[[], BaseException], at: int = 3) -> Callable[[int], Any]:
    def sample(i: int) -> Any:
        if i == at:
            raise error()
        return i

    return sample


def about_worker(i: int) -> Any:
    info = get_worker_info()
    told = None if info is None else (info.id, info.num_workers, info.seed, type(info.dataset))
    return i, repr(told), torch.initial_seed(), torch.get_num_threads() if info else None


def drawn(i: int) -> Any:
    return i, random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def seeds(worker_id: int) -> None:
    """A worker_init_fn."""
    np.random.seed(worker_id)  # noqa: NPY002
    info = get_worker_info()
    assert info is not None
    info.dataset.sample = lambda i: (i, worker_id, float(np.random.rand()))  # noqa: NPY002


def refuses(worker_id: int) -> None:
    """A worker_init_fn that fails in one of them."""
    if worker_id == 0:
        raise OSError(2, f"no such file, worker {worker_id}")


def fails_to_collate(samples: list[Any]) -> Any:
    """A collate function that refuses one batch."""
    if 4 in samples:
        raise ValueError("cannot collate 4")
    return samples


class Backwards:
    """A sampler that is not one of torch's classes."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(COUNT - 1, -1, -1))

    def __len__(self) -> int:
        return COUNT


class Eager(Backwards):
    """Draws when an iterator of it is made, and not later."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(COUNT).tolist())


class EagerBatches(Backwards):
    """The same, in batches."""

    def __iter__(self) -> Iterator[Any]:
        return iter([batch.tolist() for batch in torch.randperm(COUNT).split(2)])


class EachTime(Backwards):
    """Draws whenever it is asked."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(COUNT, ())) for _ in range(COUNT))


def fails_after(count: int) -> Iterator[int]:
    yield from range(count)
    raise LookupError("the sampler ends badly")


class EndsBadly(Backwards):
    """A sampler that raises."""

    def __iter__(self) -> Iterator[int]:
        return fails_after(3)


# How a loop continues.


def whole(loader: Any) -> Iterator[Any]:
    for _ in range(2):
        yield from loader
        yield "end"


def left(loader: Any) -> Iterator[Any]:
    for _ in range(2):
        yield from itertools.islice(loader, 2)
        yield "left"
    yield from loader


def generators(loader: Any) -> list[Any]:
    """The state of each generator."""
    states = [torch.random.get_rng_state(), hash(random.getstate())]
    states += [np.random.get_state()[1].copy()]  # type: ignore[index]  # noqa: NPY002
    return [*states, *([loader.generator.get_state()] if loader.generator else [])]


def drawing(loader: Any) -> Iterator[Any]:
    """Draws between all steps."""
    for iterator in (iter(loader), zip(loader, loader, strict=True)):
        yield generators(loader)
        torch.manual_seed(8)
        for batch in iterator:
            yield batch, generators(loader)
            torch.rand(3)


def drawing_kept(loader: Any) -> Iterator[Any]:
    """The same with persistent workers, which do not run two passes at once."""
    for _ in range(2):
        iterator = iter(loader)
        yield generators(loader)
        for batch in iterator:
            yield batch, generators(loader)
            torch.rand(3)


def both_at_once(loader: Any) -> Iterator[Any]:
    yield from zip(loader, loader, strict=True)


def past_the_end(loader: Any) -> Iterator[Any]:
    """Continues after errors and after the end, like a careless loop."""
    iterator = iter(loader)
    ends = 0
    for _ in range(15):
        try:
            yield next(iterator)
        except StopIteration:
            ends += 1
            yield "ended"
            if ends == 2:
                return
        except Exception as error:  # noqa: BLE001 - what it is like is what we look at
            yield described(error)


def looked_at(loader: Any) -> Iterator[Any]:
    for name in (
        *("batch_size", "drop_last", "num_workers", "prefetch_factor", "persistent_workers"),
        *("pin_memory", "pin_memory_device", "timeout", "generator", "in_order"),
    ):
        yield name, repr(getattr(loader, name))
    for name in ("sampler", "batch_sampler", "collate_fn", "dataset"):
        yield name, type(getattr(loader, name)).__name__
    for name in ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset"):
        yield attempted(lambda name=name: setattr(loader, name, 3))
    yield attempted(lambda: setattr(loader, "multiprocessing_context", "fork"))
    yield attempted(lambda: len(loader))
    iterator = iter(loader)
    yield iter(iterator) is iterator
    yield attempted(lambda: len(iterator))
    yield attempted(lambda: pickle.dumps(iterator))[0]  # it names its class
    yield from iterator


def sent(loader: Any) -> Iterator[Any]:
    yield from pickle.loads(pickle.dumps(loader))


# What there is to compare: a name, arguments, and a loop.

MAPS: dict[str, Make] = {
    **{kind: lambda kind=kind: {"dataset": Samples(kind, COUNT)} for kind in COLLATED},
    "together": lambda: {"dataset": Together("pair", COUNT)},
    "a list": lambda: {"dataset": [3, 1, 2]},
    "a dict": lambda: {"dataset": {0: "a", 1: "b", 2: "c"}},
    "a range": lambda: {"dataset": range(5)},
    "a tensor": lambda: {"dataset": torch.arange(12.0).view(4, 3)},
    "an array": lambda: {"dataset": np.arange(12).reshape(4, 3)},
    "tensors": lambda: {"dataset": TensorDataset(torch.arange(6), torch.ones(6, 2))},
    "a subset": lambda: {"dataset": Subset(range(9), [3, 8, 1])},
    "both": lambda: {"dataset": ConcatDataset([range(3), [7, 8]])},
    "beside": lambda: {"dataset": StackDataset(a=range(4), b=torch.ones(4))},
    "empty": lambda: {"dataset": Of(int, 0)},
    "an empty range": lambda: {"dataset": range(0)},
    "ordered": lambda: {"dataset": Of(lambda i: OrderedDict(b=i, a=torch.ones(i % 1 + 2)))},
    "defaults": lambda: {"dataset": Of(lambda i: defaultdict(list, {"x": i}))},
    "a set of texts": lambda: {"dataset": Of(lambda i: (f"{i}", [b"x", "y"]))},
    "pairs": lambda: {"dataset": Of(lambda i: Pair(torch.ones(2), i))},
    "nothing in a tuple": lambda: {"dataset": Of(lambda i: ((), [], i))},
    "big integers": lambda: {"dataset": Of(lambda i: 2**62 + i)},
    "numpy scalars": lambda: {"dataset": Of(lambda i: {"a": np.float16(i), "b": np.bool_(i)})},
}
WRONG: dict[str, Make] = {
    "ragged": lambda: {"dataset": Of(lambda i: torch.ones(1 + i % 2)), "batch_size": 2},
    "ragged lists": lambda: {"dataset": Of(lambda i: [0] * (1 + i % 2)), "batch_size": 2},
    "none": lambda: {"dataset": Of(lambda i: None), "batch_size": 2},
    "none among": lambda: {"dataset": Of(lambda i: None if i == 3 else i), "batch_size": 2},
    "images": lambda: {"dataset": Of(lambda i: Image.new("RGB", (4, 4))), "batch_size": 2},
    "points": lambda: {"dataset": Of(lambda i: Point(torch.ones(1), i)), "batch_size": 2},
    "arrays of objects": lambda: {"dataset": Of(lambda i: np.array([None, i])), "batch_size": 2},
    "other keys": lambda: {"dataset": Of(lambda i: {f"{i // 3}": i}), "batch_size": 2},
    "KeyError": lambda: {"dataset": Of(raising(lambda: KeyError("a\nb"))), "batch_size": 2},
    "no message": lambda: {"dataset": Of(raising(ValueError)), "batch_size": 2},
    "two words": lambda: {"dataset": Of(raising(lambda: TwoWords("a", "b"))), "batch_size": 2},
    "OSError": lambda: {"dataset": Of(raising(lambda: OSError(2, "no file", "x.jpg")))},
    "IndexError": lambda: {"dataset": Of(raising(IndexError)), "batch_size": 3},
    "StopIteration": lambda: {"dataset": Of(raising(StopIteration)), "batch_size": 2},
    "unicode": lambda: {"dataset": Of(lambda i: b"\xff".decode()), "batch_size": 2},
    "collate": lambda: {"dataset": range(9), "batch_size": 2, "collate_fn": fails_to_collate},
    "sampler": lambda: {"dataset": range(9), "batch_size": 2, "sampler": EndsBadly()},
    "beyond": lambda: {"dataset": range(3), "sampler": [0, 5, 1]},
    "in a stream": lambda: {"dataset": Streams(raising(lambda: KeyError("x"))), "batch_size": 2},
}
FLOWS: dict[str, Make] = {
    "stream": lambda: {"dataset": Streams(drawn), "batch_size": 2},
    "stream, dropped": lambda: {"dataset": Streams(drawn), "batch_size": 2, "drop_last": True},
    "stream, unbatched": lambda: {"dataset": Streams(drawn), "batch_size": None},
    "too short a length": lambda: {"dataset": Streams(int, 3), "batch_size": 1},
    "shared flow": lambda: {"dataset": Flow("pair", 7), "batch_size": 3},
    "chain": lambda: {"dataset": ChainDataset([Flow("int", 3), Flow("int", 2)])},
}
SAMPLED: dict[str, Make] = {
    "shuffled": lambda: {"shuffle": True, "batch_size": 2},
    "with a generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(4)},
    "dropped": lambda: {"shuffle": True, "batch_size": 2, "drop_last": True},
    "unbatched": lambda: {"shuffle": True, "batch_size": None},
    "a list of indices": lambda: {"sampler": [3, 1, 1, 0], "batch_size": 3},
    "an array of indices": lambda: {"sampler": np.array([3, 1, 1, 0]), "batch_size": 3},
    "an array of batches": lambda: {"batch_sampler": np.array([[0, 6], [2, 2]])},
    "backwards": lambda: {"sampler": Backwards(), "batch_size": 4},
    "eager": lambda: {"sampler": Eager()},
    "eager, unbatched": lambda: {"sampler": Eager(), "batch_size": None},
    "eager batches": lambda: {"batch_sampler": EagerBatches()},
    "each time": lambda: {"sampler": EachTime()},
    "iterable": lambda: {"dataset": Flow("drawn", COUNT)},
    "datapipe": lambda: {"dataset": IterableWrapper(range(COUNT), deepcopy=False).shuffle()},
    "replaced": lambda: {"sampler": RandomSampler(range(COUNT), True, 11), "batch_size": 4},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0, 3.0], 9), "batch_size": 4},
    "random subset": lambda: {"sampler": SubsetRandomSampler([5, 1, 2]), "batch_size": 2},
    "rank 1 of 3": lambda: {"sampler": DistributedSampler(range(COUNT), 3, 1), "batch_size": 2},
    "batches": lambda: {"batch_sampler": BatchSampler(SequentialSampler(range(COUNT)), 3, True)},
    "lists of batches": lambda: {"batch_sampler": [[0, 6], [2], [3, 3, 3]]},
    "own collate": lambda: {"collate_fn": as_pair, "batch_size": 3},
    "no collate": lambda: {"collate_fn": as_is, "batch_size": 3},
    "converted": lambda: {"collate_fn": default_convert, "batch_size": 3},
}
WORKERS: dict[str, Arguments] = {
    "0": {},
    "2": {"num_workers": 2},
    "2 kept": {"num_workers": 2, "persistent_workers": True},
    "1, far ahead": {"num_workers": 1, "prefetch_factor": 5},
    "2 forked": {"num_workers": 2, "multiprocessing_context": "fork"},
    "1 spawned": {"num_workers": 1, "multiprocessing_context": "spawn"},
}


def cases() -> Iterator[Any]:
    """(arguments, loop) of every case; those with processes are slow, but for a few."""

    def case(name: str, make: Make, walk: Walk, workers: str, *, is_quick: bool = False) -> Any:
        def arguments() -> Arguments:
            return {**make(), **WORKERS[workers]}

        marks = () if is_quick or workers == "0" else pytest.mark.slow
        return pytest.param(arguments, walk, id=f"{name}, {workers}", marks=marks)

    for name, make in MAPS.items():
        for walk in (whole, looked_at) if name in {"a list", "pair"} else (whole,):
            yield case(f"{name} {walk.__name__}", make, walk, "0")
            yield case(f"{name} {walk.__name__}", make, walk, "2", is_quick=name == "tensors")
    for name, make in {**WRONG, **FLOWS}.items():
        quick = name in {"none among", "two words", "sampler", "stream"}
        for workers in ("0", "2"):
            yield case(name, make, past_the_end, workers, is_quick=quick)
    for name, make in SAMPLED.items():
        for workers, walk in (
            *(("0", whole), ("0", both_at_once)),
            *(("2", left), ("2", both_at_once), ("2 kept", whole)),
            *(("0", drawing), ("2", drawing_kept), ("2 kept", drawing_kept)),
        ):
            if name == "datapipe" and walk in {both_at_once, drawing}:
                continue  # of which there is one pass at a time

            def sampled(make: Make = make) -> Arguments:
                return {"dataset": Of(drawn), **make()}

            quick = name in {"with a generator", "weighted"} and workers == "2"
            quick |= walk is drawing_kept and name in {"shuffled", "each time", "datapipe"}
            yield case(f"{name} {walk.__name__}", sampled, walk, workers, is_quick=quick)
    for workers in WORKERS:
        for sample, walk in ((about_worker, whole), (drawn, left)):
            # Arguments of a spawned process are pickled: functions of a test module cannot be.
            # And what workers that are kept draw after a pass that was left is not torch's.
            if workers != "1 spawned" and (workers, walk) != ("2 kept", left):
                name = f"{sample.__name__} {walk.__name__}"
                quick = workers == "2 kept" and sample is about_worker
                made = lambda sample=sample: {"dataset": Of(sample), "batch_size": 2}  # noqa: E731
                yield case(name, made, walk, workers, is_quick=quick)
    yield case("spawned", lambda: {"dataset": Samples("drawn", 4)}, whole, "1 spawned")
    yield case("seeded", lambda: {"dataset": Of(drawn), "worker_init_fn": seeds}, whole, "2")
    yield case("refused", lambda: {"dataset": Of(drawn), "worker_init_fn": refuses}, whole, "2")
    yield case("pinned", lambda: {"dataset": range(4), "pin_memory": True}, whole, "2")
    yield case("sent", lambda: {"dataset": Samples("pair", 4)}, sent, "0")


def attempted(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - as above
        return described(error)


def described(error: BaseException) -> Any:
    """Its class, and its message without the lines of the traceback within."""
    lines = str(error).split("\n")
    return type(error).__name__, lines[0], lines[-1], lines[-2] if not lines[-1] else ""


def seen(kind: type, arguments: Callable[[], Arguments], walk: Walk) -> list[Any]:
    """What a program sees; where generators are left; what it was warned of."""
    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)  # noqa: NPY002
    found: list[Any] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            loader = kind(**arguments())
            try:
                found.extend(walk(loader))
            finally:
                if loader._iterator is not None:
                    loader._iterator._shutdown_workers()
        except Exception as error:  # noqa: BLE001 - as above
            found.append(described(error))
    found += [float(torch.rand(())), random.random(), float(np.random.rand())]  # noqa: NPY002
    pid = f"(pid(s) {os.getpid()})"
    told = {str(one.message).replace(pid, "") for one in warned if one.category is UserWarning}
    return [*found, sorted(told)]


@pytest.mark.parametrize(("arguments", "walk"), list(cases()))
def test_a_program_sees_the_same_as_with_torch(arguments, walk) -> None:
    expected = seen(torch.utils.data.DataLoader, arguments, walk)
    got = seen(DataLoader, arguments, walk)
    for i, (one, other) in enumerate(itertools.zip_longest(got, expected)):
        assert is_same(one, other), f"step {i}: {one!r:.500} is not {other!r:.500}"
