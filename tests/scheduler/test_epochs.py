"""Which blocks stay in memory from one epoch to the next."""

from __future__ import annotations

import numpy as np
import pytest
from caches import fewest, least_recent
from driven_epochs import FILE_BYTES, PAGE, DrivenEpochs
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.commands.plan_reads import kept_share, open_bytes_max
from dataplane.model.config import JobSpec
from dataplane.plan.order import Order

READ_AHEAD = 22
"""Slabs whose blocks are loaded before they are needed, which LRU does not do."""


def job(lanes: int, window: int, seed: int = 1) -> JobSpec:
    return JobSpec("f", seed=seed, shuffle=True, lanes=lanes, window=window, global_batch=4)


@pytest.mark.parametrize("part", [2, 4])
@pytest.mark.parametrize(("lanes", "window"), [(1, 1), (6, 24)])
def test_later_epochs_load_no_more_than_the_best_possible(
    part: int, lanes: int, window: int
) -> None:
    blocks, epochs = 240, 3
    room = blocks // part
    run = DrivenEpochs(blocks, room, job(lanes, window), rows=8, epochs=epochs)
    assert sorted(run.loads[:blocks]) == list(range(blocks))
    best, usual = (each(run.slabs, room) - blocks for each in (fewest, least_recent))
    later = len(run.loads) - blocks
    assert later <= 1.05 * best
    assert usual / later > 0.95 * usual / best > 1.1


@settings(max_examples=15, deadline=None)
@given(
    st.integers(2, 40), st.integers(1, 40), st.integers(1, 6), st.integers(1, 3),
    st.sampled_from([1, 3, 9, 1000]), st.integers(0, 99),
)  # fmt: skip
def test_it_never_loads_much_more_than_lru(
    blocks: int, room: int, rows: int, lanes: int, window: int, seed: int
) -> None:
    run = DrivenEpochs(blocks, 4 + room, job(lanes, window, seed), rows=rows, epochs=3)
    assert len(run.loads) <= least_recent(run.slabs, 4 + room) + READ_AHEAD


@pytest.mark.parametrize("part", [2, 4, 10])
@pytest.mark.parametrize(("lanes", "window"), [(1, 1), (6, 24), (24, 64)])
def test_a_scheduler_loads_about_the_least_that_a_plan_tells(
    part: int, lanes: int, window: int
) -> None:
    blocks, epochs = 240, 3
    run = DrivenEpochs(blocks, blocks // part, job(lanes, window), rows=8, epochs=epochs)
    later = len(run.loads) - blocks
    assert later >= 0.98 * (epochs - 1) * (blocks - most_kept(run, blocks // part))
    if window * lanes < blocks:  # open windows take little of the memory
        assert later <= 1.05 * (epochs - 1) * (blocks - most_kept(run, blocks // part))


def most_kept(run: DrivenEpochs, room: int, disk: int = 0) -> float:
    """How many blocks stay from one epoch to the next, at most."""
    blocks = len(run.dataset.marks.raw)
    open_bytes = open_bytes_max(run.order(1), np.arange(blocks), run.dataset.marks.raw)
    whole = (blocks * FILE_BYTES, blocks * PAGE)
    _, share = kept_share(whole, room * PAGE, open_bytes, disk * FILE_BYTES)
    return share * blocks


@pytest.mark.parametrize(
    ("part", "disk_part", "lanes", "window"), [(8, 4, 6, 24), (8, 2, 1, 1), (4, 4, 6, 24)]
)
def test_later_epochs_load_few_blocks_with_a_disk(
    part: int, disk_part: int, lanes: int, window: int
) -> None:
    blocks, epochs = 240, 4
    room, disk = blocks // part, blocks // disk_part
    run = DrivenEpochs(blocks, room, job(lanes, window), rows=8, epochs=epochs, disk=disk)
    later = len(run.loads) - blocks
    assert later >= 0.98 * (epochs - 1) * (blocks - most_kept(run, room, disk))
    # Never more than the disk alone would need, and nearer to the best of both than LRU.
    assert later <= 1.02 * (epochs - 1) * (blocks - disk)
    best, usual = (each(run.slabs, room + disk) - blocks for each in (fewest, least_recent))
    assert later - best < (usual - best) / 2


def test_a_disk_with_room_for_everything_is_read_alone() -> None:
    run = DrivenEpochs(60, 20, job(2, 24), rows=8, epochs=3, disk=60)
    assert sorted(run.loads) == list(range(60))
    assert run.disk_loads


@pytest.mark.parametrize(
    ("lanes", "rows", "window"), [(6, 8, 24), (1, 8, 480), (24, 8, 8), (12, 40, 20)]
)
def test_a_scheduler_reads_blocks_once_if_what_is_open_at_most_fits(
    lanes: int, rows: int, window: int
) -> None:
    blocks = 240
    order = Order(np.full(blocks, rows), 1, True, lanes, window, 0)
    spans = list(zip(*(each.tolist() for each in order.block_span(np.arange(blocks))), strict=True))
    most = max(
        sum(first <= at <= last for first, last in spans) for at in range(order.sample_count)
    )

    def run(room: int) -> DrivenEpochs:
        return DrivenEpochs(blocks, room, job(lanes, window), rows=rows, epochs=1)

    fitting = run(most + 2)
    assert open_bytes_max(order, np.arange(blocks), fitting.dataset.marks.raw) == most * PAGE
    assert len(fitting.loads) <= 1.02 * blocks  # a block of the next epoch may be among them
    assert len(run(round(0.8 * most)).loads) > 1.1 * blocks
