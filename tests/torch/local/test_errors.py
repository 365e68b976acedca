"""Exceptions of the user's code arrive in the trainer, with the worker's traceback."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dataplane_torch import DataLoader
from local_datasets import Samples, Talks, as_is
from torch.utils.data import IterableDataset


class Unlucky(Samples):
    """Sample 2 raises."""

    def __init__(self, error: Exception) -> None:
        super().__init__("", 6)
        self.error = error

    def __getitem__(self, i: int) -> int:
        if i == 2:
            raise self.error
        return i


class Demanding(Exception):
    """An error that one message does not make."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one, two)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("here"), ValueError),
        (KeyError("here"), KeyError),
        (StopIteration("here"), StopIteration),
        (Demanding(1, 2), RuntimeError),
    ],
)
def test_exceptions_come_with_the_workers_traceback(error, kind) -> None:
    told = []
    for loader in (torch.utils.data.DataLoader, DataLoader):
        iterator = iter(loader(Unlucky(error), None, num_workers=1))
        assert [next(iterator), next(iterator)] == [0, 1]
        with pytest.raises(kind) as caught:
            next(iterator)
        told.append(str(caught.value).splitlines()[0])
        assert "worker process 0" in str(caught.value)
        assert "__getitem__" in str(caught.value)
        assert list(iterator) == [3, 4, 5]
        del iterator, caught
    assert told[0] == told[1]


def made_here() -> Exception:
    """As of a client that makes the classes of its errors while it runs."""

    class NoSuchKey(ValueError):
        pass

    return NoSuchKey("there is no object x")


def test_an_error_of_a_class_that_cannot_be_sent_comes_as_text() -> None:
    with (
        DataLoader(Unlucky(made_here()), None, num_workers=1) as loader,
        pytest.raises(RuntimeError, match=r"(?s)process 0.*__getitem__.*NoSuchKey: there is no ob"),
    ):
        list(loader)


class Local:
    """An index that means nothing in another process."""

    def __reduce__(self) -> Any:
        return index_of, (os.getpid(),)


def index_of(pid: int) -> int:
    if os.getpid() != pid:
        raise LookupError("an index of another process")
    return 0


def test_an_index_that_a_worker_cannot_read_ends_the_pass() -> None:
    with (
        DataLoader(Samples("int", 4), None, sampler=[Local()], num_workers=1, timeout=30) as loader,
        pytest.raises(RuntimeError, match="exit code 1"),
    ):
        list(loader)


def raises(*_: Any) -> Any:
    raise ZeroDivisionError("by nothing")


class RaisesWhenBegun(IterableDataset[int]):
    """A dataset whose iter() fails."""

    def __iter__(self) -> Any:
        raise ZeroDivisionError("by nothing")


@pytest.mark.parametrize(
    "given",
    [
        {"dataset": Samples("int", 4), "collate_fn": raises},
        {"dataset": Samples("int", 4), "worker_init_fn": raises},
        {"dataset": RaisesWhenBegun()},
    ],
)
def test_whatever_of_the_users_raises(given) -> None:
    with (
        DataLoader(num_workers=1, **given) as loader,
        pytest.raises(ZeroDivisionError, match=r"(?s)worker process 0.*by nothing"),
    ):
        list(loader)


def test_a_prefetch_depth_of_zero_is_refused_and_does_not_make_an_empty_pass() -> None:
    loader = DataLoader(Samples("int", 4), num_workers=1, prefetch_factor=0)
    with pytest.raises(ValueError, match="prefetch_factor=0"):
        iter(loader)


def test_a_sampler_that_raises_does_so_here() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        raises()

    with (
        DataLoader(Samples("int", 4), sampler=Once(numbers()), num_workers=1) as loader,
        pytest.raises(ZeroDivisionError, match=r"^by nothing"),
    ):
        list(loader)


class Once:
    """A sampler."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return self.numbers


class Unspeakable(Talks):
    """A dataset whose state cannot be pickled."""

    def state_dict(self) -> dict[str, Any]:
        return {"it": threading.Lock() if self.at > 1 else None}


@pytest.mark.parametrize("dataset", [Samples("int", 2), Unspeakable()])
def test_unpicklable_batches_raise_an_error(dataset) -> None:
    collate_fn = unpicklable if isinstance(dataset, Samples) else as_is
    with (
        DataLoader(dataset, None, num_workers=1, collate_fn=collate_fn) as loader,
        pytest.raises(Exception, match=r"(?s)worker process 0.*(P|p)ickle"),
    ):
        for _batch, _ in zip(loader, range(5), strict=False):
            pass


def unpicklable(sample: Any) -> Any:
    """A collate function."""
    return lambda: sample
