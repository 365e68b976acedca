"""Loaders that are passed to Accelerate itself, or that one process reads for all."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from dataplane_torch import DataLoader
from dataplane_torch.accelerate import prepare

from dataplane.model.errors import ConfigError


@pytest.fixture
def accelerator():
    yield Accelerator(cpu=True)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_accelerate_warns_when_it_would_replace_the_loader(accelerator) -> None:
    with pytest.warns(UserWarning, match="dataplane_torch.accelerate.prepare"):
        assert not isinstance(accelerator.prepare(DataLoader(range(4))), DataLoader)


def test_it_is_prepared_once_and_a_loader_of_torchs_becomes_ours(accelerator) -> None:
    theirs = accelerator.prepare(torch.utils.data.DataLoader(range(4), 2, shuffle=True))
    for loader in (DataLoader(range(4), 2), theirs):
        prepared = prepare(accelerator, loader)
        assert isinstance(prepared, DataLoader)
        assert prepare(accelerator, prepared) is accelerator.prepare(prepared) is prepared
        assert len(prepared) == 2
        assert sorted(one for batch in prepared for one in batch.tolist()) == [0, 1, 2, 3]


def test_the_device_that_batches_come_on_is_kept(accelerator) -> None:
    loader = DataLoader(range(4), 2, device="cpu", snapshot_every_n_steps=3)
    kept = prepare(accelerator, loader).base_dataloader
    assert (kept.device, kept.snapshot_every_n_steps) == ("cpu", 3)


def test_one_process_that_reads_for_all_is_refused(accelerator) -> None:
    accelerator.dataloader_config = DataLoaderConfiguration(dispatch_batches=True)
    with pytest.raises(ConfigError, match="dispatch_batches=False"):
        prepare(accelerator, DataLoader(range(4)))
