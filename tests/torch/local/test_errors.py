"""Exceptions of the user's code arrive in the trainer, with the worker's traceback."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dataplane_torch import DataLoader
from local_datasets import Samples, Talks, as_is
from torch.utils.data import DistributedSampler, IterableDataset


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
    """Make an error as a client does that makes the classes of its errors while it runs."""

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


class Notes(IterableDataset[int]):
    """Notes in a file when an iterator of it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            with self.path.open("a") as file:
                file.write("ended\n")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"num_workers": 1},
        {"num_workers": 1, "persistent_workers": True},
        {"num_workers": 1, "prefetch_factor": 40},
    ],
)
def test_iterators_of_the_dataset_end_when_a_pass_is_left(given, tmp_path) -> None:
    ended = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        path = tmp_path / kind.__module__
        path.touch()
        loader = kind(Notes(path), 2, **given)
        seen = []
        for _ in range(2):
            for batch in loader:
                assert batch.tolist() == [0, 1]
                break
            seen.append(path.read_text() if "persistent_workers" not in given else "later")
        del loader
        gc.collect()
        ended.append([*seen, path.read_text()])
    assert ended[0] == ended[1]
    assert ended[0][-1].count("ended") == 2


COUNT, STEPS = 24, 3


def loader_of(num_workers: int) -> DataLoader:
    """Rank 0 of two, with 3 steps of 4 samples an epoch."""
    sampler = DistributedSampler(range(COUNT), num_replicas=2, rank=0, shuffle=True, seed=5)
    return DataLoader(range(COUNT), 4, sampler=sampler, num_workers=num_workers)


def batches_of(loader: DataLoader, epoch: int) -> list[list[int]]:
    loader.set_epoch(epoch)
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("stop", [1, STEPS])
def test_a_pass_continues_in_the_epoch_of_its_state_unless_set_epoch_changes_it(
    num_workers, stop
) -> None:
    with loader_of(0) as loader:
        epochs = [batches_of(loader, epoch) for epoch in range(4)]
    assert epochs[1] != epochs[2] != epochs[3]
    with loader_of(num_workers) as loader:
        loader.set_epoch(2)
        iterator = iter(loader)
        assert [next(iterator).tolist() for _ in range(stop)] == epochs[2][:stop]
        state = loader.state_dict()
    with loader_of(num_workers) as loader:
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == epochs[2][stop:]
        loader.load_state_dict(state)
        iterator = iter(loader)
        loader.sampler.set_epoch(3)  # as a framework does that counts epochs itself
        assert [batch.tolist() for batch in iterator] == epochs[3]
        iterator = iter(loader)
        loader.sampler.set_epoch(1)
        assert next(iterator).tolist() == epochs[1][0]
        loader.sampler.set_epoch(2)  # of the next pass
        assert [batch.tolist() for batch in iterator] == epochs[1][1:]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_set_epoch_reaches_the_sampler_of_a_batch_sampler(num_workers) -> None:
    with loader_of(0) as loader:
        epochs = [batches_of(loader, epoch) for epoch in range(3)]
    batches = loader_of(0).batch_sampler
    with DataLoader(range(COUNT), batch_sampler=batches, num_workers=num_workers) as loader:
        assert [batches_of(loader, epoch) for epoch in range(3)] == epochs


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("stop", [1, STEPS])
def test_an_epoch_set_between_the_state_and_its_pass_is_used(num_workers, stop) -> None:
    with loader_of(0) as loader:
        epochs = [batches_of(loader, epoch) for epoch in range(4)]
    with loader_of(num_workers) as loader:
        loader.set_epoch(2)
        iterator = iter(loader)
        for _ in range(stop):
            next(iterator)
        state = loader.state_dict()
    for told, found in ((2, epochs[2][stop:]), (3, epochs[3])):
        with loader_of(num_workers) as loader:
            loader.load_state_dict(state)
            assert batches_of(loader, told) == found
            assert batches_of(loader, 1) == epochs[1]
            loader.load_state_dict(state)  # an older place than where the sampler is
            assert [batch.tolist() for batch in loader] == epochs[2][stop:]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_of_the_last_step_is_an_empty_pass_and_one_after_the_loop_is_not(
    num_workers,
) -> None:
    def loader() -> DataLoader:
        return DataLoader(range(COUNT), 8, num_workers=num_workers)

    def last_state(epoch: int | None) -> dict:
        with loader() as one:
            if epoch is not None:
                one.set_epoch(epoch)
            return [one.state_dict() for _ in one][-1]

    whole = [list(range(at, at + 8)) for at in range(0, COUNT, 8)]
    with loader() as other:
        other.load_state_dict(last_state(None))
        for found in ([], whole, whole):
            assert [batch.tolist() for batch in other] == found
        state = other.state_dict()
        for _ in range(2):
            other.load_state_dict(state)
            assert [batch.tolist() for batch in other] == whole
        # The same of a loop that sets the epochs.
        state = last_state(5)
        for told, found in ((5, []), (6, whole)):
            other.load_state_dict(state)
            iterator = iter(other)
            other.set_epoch(told)
            assert [batch.tolist() for batch in iterator] == found
