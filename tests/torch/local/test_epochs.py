"""Epochs set on samplers: part of the state, and accepted until the first batch is requested."""

from __future__ import annotations

import pytest
import torch
from dataplane_torch import DataLoader
from torch.utils.data import DistributedSampler

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
def test_a_generator_continues_where_the_finished_pass_left_it(num_workers) -> None:
    def shuffled() -> DataLoader:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(range(12), 4, shuffle=True, generator=generator, num_workers=num_workers)

    with shuffled() as loader:
        first = iter(loader)
        for _ in range(STEPS):
            next(first)
        state = loader.state_dict()
        second = [batch.tolist() for batch in loader]
    with shuffled() as loader:
        loader.load_state_dict(state)
        iterator = iter(loader)
        loader.sampler.set_epoch(1)
        assert [batch.tolist() for batch in iterator] == second


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
