"""An arena that is smaller than one batch's blocks: each block is read for many slabs at once."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from scheduler_scenes import epoch_of_one, far_too_small
from scheduler_simulate import simulate

from dataplane.scheduler.holdings import Holdings
from dataplane.scheduler.planning import Passes


@pytest.mark.parametrize("seed", [1, 2, 5])
def test_blocks_are_read_far_less_often_than_once_a_batch(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = simulate(lambda: far_too_small(random.Random(seed), monkeypatch), epoch_of_one)
    (consumer,) = run.consumers
    assert consumer.ended
    once_a_batch = sum(len({block for block, _ in samples}) for _, _, samples in consumer._steps)
    told = [note for note in run.notes if "smaller than the open windows" in note.event]
    assert run.outside.extracted
    assert len(told) == 1
    assert run.outside.loads < once_a_batch * 2 / 3


def test_excerpts_stay_while_readers_of_other_datasets_use_them() -> None:
    """Those of the dataset that they were made for have gone."""
    first, second, read = object(), object(), [object()]
    excerpts = SimpleNamespace(is_open=True, awaited=lambda: (second,) if read else (), closed=0)

    def close() -> None:
        excerpts.closed += 1

    excerpts.close = close
    streams = SimpleNamespace(of_dataset=lambda dataset: dataset is second and bool(read))
    passes = Passes(SimpleNamespace(), excerpts, streams, lambda _: None)  # type: ignore[arg-type]
    passes._opened_for = (first,)  # type: ignore[assignment]
    for _ in range(3):
        assert not passes.look(None)
    assert not excerpts.closed
    read.clear()
    assert not passes.look(None)
    assert excerpts.closed == 1


def _lost(losses: int, read_between: int) -> bool:
    """Whether excerpts are needed after a block of 60 bytes was lost so often, with so many bytes
    read in between, in an arena of 100.
    """
    holdings, block = Holdings(100), SimpleNamespace(kept_bytes=60)
    for _ in range(losses):
        holdings.loaded_bytes += read_between
        holdings.lose(block)  # type: ignore[arg-type]
    return holdings.needs_excerpts


def test_a_job_that_loses_little_of_what_it_reads_makes_no_excerpts() -> None:
    assert not _lost(losses=1, read_between=0)
    assert _lost(losses=2, read_between=0)
    assert _lost(losses=3, read_between=100)
    assert not _lost(losses=1000, read_between=240)
