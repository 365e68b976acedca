"""An arena that is smaller than one batch's blocks: each block is read for many slabs at once."""

from __future__ import annotations

import dataclasses
import random

import pytest
from scheduler_run import Run
from scheduler_simulate import simulate


def _epoch_of_one(run: Run) -> None:
    spec = dataclasses.replace(run.worlds[1].spec, shuffle=True, lanes=8, window=24, global_batch=8)
    run.consume(run.deliver_to(run.worlds[1], spec=spec), 0, 1, steps=(0, 1))


@pytest.mark.parametrize("seed", [1, 2, 5])
def test_blocks_are_read_far_less_often_than_once_a_batch(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_world.KINDS", (("s3", False),) * 4)
    monkeypatch.setattr("scheduler_run.arena_of_passes", lambda *_: 600_000)
    run = simulate(lambda: Run(random.Random(seed), tight=False, is_large=True), _epoch_of_one)
    (consumer,) = run.consumers
    assert consumer.ended
    once_a_batch = sum(len({block for block, _ in samples}) for _, _, samples in consumer._steps)
    told = [note for note in run.notes if "smaller than the open windows" in note.event]
    assert run.outside.extracted
    assert len(told) == 1
    assert run.outside.loads < once_a_batch * 2 / 3
