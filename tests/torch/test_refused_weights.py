"""Weights of a mixture that are refused, and states that have such."""

from __future__ import annotations

import copy
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from dataplane_torch import DataLoader
from weighted import FIRST, OPTIONS, SECOND, THIRD, Rows, mixed, rows_of, saved, write_sources

from dataplane.model.errors import ConfigError, SpecMismatch


@pytest.fixture
def folder(tmp_path: Path, shared_node: None) -> Path:
    return write_sources(tmp_path)


def test_ranks_that_were_given_other_weights_are_refused(folder: Path) -> None:
    named = {**OPTIONS, "name": f"job-{os.getpid()}", "dp_size": 2}
    with (
        DataLoader(mixed(folder), dp_rank=0, **named) as first,
        closing(DataLoader(mixed(folder, SECOND), dp_rank=1, **named)) as second,
    ):
        len(first)
        with pytest.raises(SpecMismatch, match="weights"):
            len(second)
    scheduled = mixed(folder, schedule=[(5, SECOND)])
    with (
        DataLoader(mixed(folder), dp_rank=0, **named) as first,
        closing(DataLoader(scheduled, dp_rank=1, **named)) as second,
    ):
        len(first)
        with pytest.raises(SpecMismatch, match="schedule"):
            len(second)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"web": 1, "code": 1}, "'math' is missing"),
        ({**FIRST, "maths": 1}, "no source 'maths'"),
        ({**FIRST, "web": -1}, "0 or more"),
        ({**FIRST, "web": None}, "0 or more"),
        ({**FIRST, "web": float("inf")}, "0 or more"),
        (dict.fromkeys(FIRST, 0), "all weights are 0"),
        ([0.5, 0.5], "are no weights"),
    ],
)
def test_weights_that_are_none_are_refused(folder: Path, given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        mixed(folder, schedule=[(10, given)])
    with (
        closing(DataLoader(mixed(folder), **OPTIONS)) as loader,
        pytest.raises(ConfigError, match=said),
    ):
        loader.set_weights(given)


@pytest.mark.parametrize(
    "schedule",
    [
        [(0, SECOND)],
        [(-5, SECOND)],
        [(1.5, SECOND)],
        [(5, SECOND), (5, FIRST)],
        [(5, SECOND), (4, FIRST)],
        [(5,)],
        [5],
        {5: SECOND},
        7,
    ],
)
def test_schedules_that_are_none_are_refused(folder: Path, schedule: Any) -> None:
    with pytest.raises(ConfigError, match=r"schedule.*rising steps") as caught:
        mixed(folder, schedule=schedule)
    assert caught.value.nouns["field"] == "schedule"


def test_only_loaders_over_a_mixture_have_weights(folder: Path) -> None:
    with (
        closing(DataLoader(folder / "web.parquet", batch_size=4)) as loader,
        pytest.raises(ConfigError, match="over a Mixture"),
    ):
        loader.set_weights({"web": 1})
    with pytest.raises(ConfigError, match="over a Mixture"):
        DataLoader([1, 2, 3]).set_weights({"web": 1})


def test_weights_with_which_an_epoch_cannot_be_planned_are_refused(folder: Path) -> None:
    mixture = mixed(folder, exhausted="renormalise", length=590)
    with DataLoader(mixture, **{**OPTIONS, "global_batch_size": 16}) as loader:
        expected = rows_of(loader, 5)
    with DataLoader(mixture, **{**OPTIONS, "global_batch_size": 16}) as loader:
        found: Rows = []
        for batch in loader:
            found.append(batch["id"].tolist())
            if len(found) == 2:
                # The next round begins in the next epoch, which would lack the first source.
                with pytest.raises(ConfigError, match="an epoch of 590 samples"):
                    loader.set_weights(THIRD)
            if len(found) == 5:
                break
        assert found == expected


def test_weights_with_which_an_epoch_would_have_no_step_are_refused(folder: Path) -> None:
    # It would end with the 40 samples of the last source.
    rare, until = {"web": 0, "code": 0, "math": 1}, {"exhausted": "stop", "length": None}
    with DataLoader(mixed(folder, **until), **OPTIONS) as loader:
        rows = rows_of(loader)
        with pytest.raises(ConfigError, match="40 samples, less than a global batch of 96, and"):
            loader.set_weights(rare)
        assert len(rows) == len(rows_of(loader)) == len(loader)
    scheduled = [(len(rows), rare), (9 * len(rows), FIRST)]
    with (
        closing(DataLoader(mixed(folder, schedule=scheduled, **until), **OPTIONS)) as loader,
        pytest.raises(ConfigError, match="no step is left"),
    ):
        len(loader)


def test_damaged_weights_in_a_state_are_refused(folder: Path) -> None:
    with DataLoader(mixed(folder), **OPTIONS) as loader:
        state = saved(loader)
        for damage in ("changes", "digest", "asked"):
            broken = copy.deepcopy(state)
            broken["mixture"][damage] = []
            with pytest.raises(ConfigError, match="damaged"):
                loader.load_state_dict(broken)
        assert len(rows_of(loader)) == 60
