"""DataLoader(device=…) over a torch Dataset: torch's batches, on a device that is always late."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from dataplane_torch import DataLoader
from device_steps import content, expect_nothing_left, step
from fleet import wait_until
from local_datasets import LONG
from torch.utils.data import Dataset, IterableDataset

COUNT, SIZE = 40, 4
STEPS = COUNT // SIZE
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator"),
]


class Rows(Dataset[Any]):
    """Long and short tensors, a number, a text."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> Any:
        x = torch.full((LONG,), i, dtype=torch.int16)
        return {"x": x, "more": (torch.tensor([i, i]), i, f"no. {i}")}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        first, every = (info.id, info.num_workers) if info else (0, 1)
        return (Rows()[i] for i in range(first, COUNT, every))


def loader_of(num_workers: int, dataset: Any = None, **given: Any) -> DataLoader:
    dataset = Rows() if dataset is None else dataset
    if isinstance(dataset, Rows):
        given = {"shuffle": True, **given}
    generator = torch.Generator().manual_seed(7)
    return DataLoader(dataset, SIZE, num_workers=num_workers, generator=generator, **given)


def on_the_host(num_workers: int, dataset: Any = None) -> tuple[list[list[bytes]], list[Any]]:
    """The batches of an epoch, and the state after each."""
    loader = loader_of(num_workers, dataset)
    batches, states = [], []
    for batch in loader:
        batches.append(content(batch))
        states.append(loader.state_dict())
    return batches, states


@pytest.mark.parametrize("dataset", [Rows(), Stream()], ids=["map", "iterable"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_and_states_are_the_same_as_on_the_host(onto, num_workers, dataset) -> None:
    expected, states = on_the_host(num_workers, dataset)
    device = onto(num_workers)
    with loader_of(num_workers, dataset, device="cuda") as loader:
        batches = iter(loader)
        for want, state in zip(expected, states, strict=True):
            step(device, batches, want)
            assert loader.state_dict() == state
        with pytest.raises(StopIteration):
            next(batches)
        loader.load_state_dict(states[3])
        batches = iter(loader)
        for want in expected[4:]:
            step(device, batches, want)
        assert next(batches, None) is None
    del batches
    assert (device.pageable == 0) is bool(num_workers)
    expect_nothing_left(device)


def await_next(loader: DataLoader) -> None:
    """Whether the next answer has arrived in this process."""
    found = loader._latest()
    wait_until(lambda: found._next_made() is not None or found._hear(0.0, rests=True))


def arrays(samples: list[Any]) -> Any:
    """A batch of some parts that a loader leaves in host memory, and some that it moves."""
    x = torch.stack([one["x"] for one in samples])
    return {"x": x, "array": x.numpy().copy()}


@pytest.mark.parametrize("seed", range(3))
def test_arrays_stay_and_may_be_copied_by_the_user_in_any_stream(onto, seed) -> None:
    device = onto(seed)
    with loader_of(2, collate_fn=arrays, device="cuda") as loader:
        for batch in loader:
            array = batch["array"]
            assert isinstance(array, np.ndarray)
            want = array.tobytes()
            device.read(batch["x"], want)
            device.current = device.random.choice(device.streams[1:])
            device.read(device.copied(torch.from_numpy(array)), want)
            del batch, array
            device.tick(2)
    assert device.pageable == 0
    expect_nothing_left(device)


def test_batches_in_any_order_come_once(onto) -> None:
    device = onto()
    with loader_of(3, in_order=False, device="cuda") as loader:
        seen = []
        for i, batch in enumerate(loader):
            seen.append(batch["more"][1])
            if i == 4:
                state = loader.state_dict()
                break
        del batch
    with loader_of(3, in_order=False, device="cuda") as loader:
        loader.load_state_dict(state)
        seen += [batch["more"][1] for batch in loader]
    device.finish()
    assert sorted(number for one in seen for number in one.tolist()) == list(range(COUNT))
    del seen
    expect_nothing_left(device)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_pass_that_is_left_holds_nothing_when_the_next_begins(onto, persistent) -> None:
    device = onto()
    with loader_of(2, device="cuda", persistent_workers=persistent, shuffle=False) as loader:
        for _ in range(3):
            batches = iter(loader)
            first = next(batches)
            await_next(loader)
            second = next(batches)
            device.finish()
            assert [one["more"][1].tolist() for one in (first, second)] == [
                list(range(SIZE)),
                list(range(SIZE, 2 * SIZE)),
            ]
            del first, second, batches
            gc.collect()
            assert persistent or not device.live
        state = loader.state_dict()
        assert state["step"] == 2
    expect_nothing_left(device)


class Fails:
    """An object that cannot be unpickled."""

    def __init__(self, made: int) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return refuse, (self.made,)


def refuse(made: int) -> Any:
    raise ValueError(f"cannot unpickle {made}")


class Broken(Rows):
    """A dataset whose third batch cannot be made, or be unpickled."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __getitem__(self, i: int) -> Any:
        if i == 2 * SIZE and self.how == "made":
            raise ValueError("cannot make it")
        return super().__getitem__(i)

    def collate(self, samples: list[Any]) -> Any:
        x = torch.stack([one["x"] for one in samples])
        is_broken = self.how == "unpickled" and int(x[0, 0]) == 2 * SIZE
        return [x, Fails(8)] if is_broken else [x, 1]


@pytest.mark.parametrize("how", ["made", "unpickled"])
def test_an_error_comes_when_its_batch_is_due(onto, how) -> None:
    device, dataset = onto(), Broken(how)
    given = {"collate_fn": dataset.collate, "shuffle": False, "device": "cuda"}
    with loader_of(1, dataset, **given) as loader:
        batches = iter(loader)
        for i in range(2):
            next(batches)
            assert loader.state_dict()["step"] == i + 1
            if i == 0:
                await_next(loader)
        with pytest.raises(ValueError, match="cannot"):
            next(batches)
        assert loader.state_dict()["step"] == 2
        rest = [next(batches)[0] for _ in range(STEPS - 3)]
        device.finish()
        assert [int(x[0, 0]) for x in rest] == [SIZE * i for i in range(3, STEPS)]
        del rest, batches
    expect_nothing_left(device)


def test_the_death_of_a_worker_is_raised_when_its_batch_is_due(onto) -> None:
    device = onto()
    with loader_of(1, device="cuda") as loader:
        batches = iter(loader)
        next(batches)
        await_next(loader)
        os.kill(batches._workers[0].pid, signal.SIGKILL)
        taken: list[int] = []
        with pytest.raises(RuntimeError, match="killed by signal"):
            taken.extend(len(batch) for batch in batches)
        assert loader.state_dict()["step"] == 1 + len(taken)
        del batches
    expect_nothing_left(device)
