"""Repeated reads of blocks are logged now and then, with their number and size."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scheduler_run import Run
from scheduler_scenes import epoch_of_one, far_too_small, several
from scheduler_simulate import simulate

from dataplane.scheduler.blocks import ReadAgain
from dataplane.scheduler.events import Note


def block(dataset_id: int = 1, index: int = 0) -> Any:
    dataset = SimpleNamespace(dataset_id=dataset_id, name="lab", stored=np.array([7, 9]))
    return SimpleNamespace(dataset=dataset, index=index)


def test_a_line_comes_less_and_less_often() -> None:
    notes: list[Note] = []
    again = ReadAgain(1 << 20, notes.append)
    for second in range(3600):
        again.note(block(index=0), float(second))
        again.note(block(index=1), float(second))
    lines = [note.facts for note in notes]
    assert [line["seconds"] for line in lines] == [10, 60, 120, 240, 480, 960]
    assert [line["blocks"] for line in lines[:2]] == [21, 120]
    assert lines[0]["bytes"] == 10 * 16 + 7
    assert lines[1]["bytes"] == 60 * 16
    assert lines[0]["block_arena_bytes"] == 1 << 20
    assert lines[0]["dataset"] == "lab"


def test_repeated_reads_are_logged_at_least_every_hour() -> None:
    notes: list[Note] = []
    again = ReadAgain(1 << 20, notes.append)
    for minute in range(24 * 60):
        again.note(block(), 60.0 * minute)
    assert [note.facts["seconds"] for note in notes][-3:] == [3600] * 3


def test_a_few_repeated_reads_are_not_logged_and_a_closed_dataset_is_forgotten() -> None:
    notes: list[Note] = []
    again = ReadAgain(1, notes.append)
    again.note(block(), 0.0)
    again.forget(1)
    again.note(block(), 100.0)
    assert notes == []


def test_an_arena_larger_than_the_dataset_reads_nothing_twice_and_a_smaller_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = []

    def note(_: ReadAgain, evicted: Any, _now: float) -> None:
        counted.append(evicted)

    monkeypatch.setattr(ReadAgain, "note", note)
    for seed in range(8):
        simulate(lambda seed=seed: Run(random.Random(seed), tight=False, factor=50), several)
    assert not counted
    for seed in range(24):
        simulate(lambda seed=seed: Run(random.Random(seed), tight=False, factor=1), several)
    assert counted


@pytest.mark.parametrize("seed", [1, 2, 5])
def test_blocks_that_leave_rows_behind_count(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arena is smaller than one batch's blocks: their rows are copied, and they give way."""
    noted: list[int] = []
    monkeypatch.setattr(ReadAgain, "note", lambda _, block, _now: noted.append(block.index))
    run = simulate(lambda: far_too_small(random.Random(seed), monkeypatch), epoch_of_one)
    needed = len({block for _, _, samples in run.consumers[0]._steps for block, _ in samples})
    again = run.outside.loads - needed
    assert again > needed
    # Some give way before their windows open, and each may for a last time at the end of its own.
    assert 0.7 * again <= len(noted) <= again + needed
