"""Whole numbers may be numpy's or torch's, wherever one is taken; bools and fractions are none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dataplane_torch import DataLoader, ShardedIterableDataset

from dataplane.client.topology import find_topology
from dataplane.model.errors import ConfigError
from dataplane.model.records import Topology
from dataplane.rpc.messages import OpenJob

URL = "s3://bucket/shards/*.parquet"
KINDS = pytest.mark.parametrize("kind", [np.int64, np.uint16, np.int8, torch.tensor])


def request_of(node) -> OpenJob:
    return [one for one in node.seen if isinstance(one, OpenJob)][-1]


@KINDS
def test_every_count_that_a_loader_takes_may_be_of_any_kind(fake, kind):
    node = fake()
    with DataLoader(
        URL, kind(8), shuffle=True, seed=kind(3), lanes=kind(4), window=kind(64),
        dp_rank=kind(0), dp_size=kind(2),
    ) as loader:  # fmt: skip
        assert len(loader) == 7
        loader.set_epoch(kind(5))
        assert type(loader.epoch) is int
        next(iter(loader))
        state = loader.state_dict()
        assert state["epoch"] == 5
        loader.load_state_dict({name: _as(kind, value) for name, value in state.items()})
        assert loader.state_dict() == state
    request = request_of(node)
    spec = request.spec
    assert (spec.seed, spec.lanes, spec.window, spec.global_batch) == (3, 4, 64, 16)
    assert request.topology == Topology(0, 2, 0, 1)
    with DataLoader(URL, global_batch_size=kind(12)) as loader:
        len(loader)
    assert request_of(node).spec.global_batch == 12


def _as(kind, value):
    """The state's numbers as this kind has them, where they fit."""
    return kind(value) if isinstance(value, int) and value < 100 else value


@KINDS
def test_a_dataset_for_torchs_loader_takes_them_too(fake, kind):
    fake()
    dataset = ShardedIterableDataset(URL, kind(8), seed=kind(3))
    dataset.set_epoch(kind(2))
    assert dataset.state_dict()["epoch"] == 2
    state = {**dataset.state_dict(), "step": kind(1), "step_stride": kind(1)}
    dataset.load_state_dict(state)
    dataset.close()


@pytest.mark.parametrize("wrong", [True, np.True_, 8.0, np.float64(8), "8", -1, 0, 1 << 40])
def test_what_is_not_a_count_is_refused_with_its_name(wrong):
    with pytest.raises(ConfigError, match=r"batch_size=.*a whole number from 1"):
        DataLoader(URL, batch_size=wrong)


def test_no_count_is_for_samples_that_are_batches_already():
    with pytest.raises(ConfigError, match=r"batch_size=None: .*Pass the samples of a rank's batch"):
        DataLoader(URL, batch_size=None)


@pytest.mark.parametrize("wrong", [True, 1.0, "1", -1, 1 << 62, 1 << 64])
def test_what_is_not_an_epoch_is_refused(fake, wrong):
    fake()
    with DataLoader(URL) as loader, pytest.raises(ConfigError, match="an epoch is a whole number"):
        loader.set_epoch(wrong)


def test_a_topology_accepts_integers_of_any_kind_and_nothing_else():
    given = Topology(*map(np.int64, (1, 2, 3, 8, 1, 4)))
    found = find_topology({}, explicit=given)
    assert found == Topology(1, 2, 3, 8, 1, 4)
    assert type(found.dp_rank) is int
    for wrong in (True, 1.0, "1"):
        with pytest.raises(ConfigError, match=r"dp_rank is .*: not a number"):
            find_topology({}, explicit=Topology(dp_rank=wrong, dp_size=2))


def test_states_over_a_dataset_may_hold_numpys_numbers():
    loader = DataLoader(list(range(40)), batch_size=4)
    iterator = iter(loader)
    taken = [next(iterator).tolist() for _ in range(3)]
    state = loader.state_dict()
    state = {n: np.int64(v) if type(v) is int else v for n, v in state.items()}
    state["sampler"] = {**state["sampler"], "drawn": np.int64(state["sampler"]["drawn"])}
    again = DataLoader(list(range(40)), batch_size=4)
    again.load_state_dict(state)
    assert taken + [batch.tolist() for batch in again] == torch.arange(40).view(10, 4).tolist()
