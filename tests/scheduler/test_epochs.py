"""Which blocks stay in memory from one epoch to the next."""

from __future__ import annotations

import numpy as np
import pytest
from caches import fewest, least_recent
from driven_epochs import FILE_BYTES, PAGE, DrivenEpochs
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.config import JobSpec
from dataplane.plan.order import Order
from dataplane.scheduler.dataset import DatasetBlocks, Marks
from dataplane.scheduler.predicted import Guests, predicted

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


@pytest.mark.parametrize("part", [2, 4])
@pytest.mark.parametrize(("lanes", "window"), [(1, 1), (6, 24)])
def test_the_prediction_is_what_a_scheduler_loads(part: int, lanes: int, window: int) -> None:
    blocks, epochs = 240, 3
    run = DrivenEpochs(blocks, blocks // part, job(lanes, window), rows=8, epochs=epochs)
    orders = [run.order(epoch) for epoch in range(epochs + 1)]
    needed = [np.arange(blocks)] * len(orders)
    found = predicted(run.dataset, orders, needed, blocks // part * PAGE, READ_AHEAD * 4, 0)
    assert [each.blocks_needed for each in found.epochs] == [blocks] * epochs
    assert found.epochs[0].blocks_read == blocks
    later = sum(each.blocks_read for each in found.epochs[1:])
    assert later == pytest.approx(len(run.loads) - blocks, rel=0.05)
    assert sum(each.bytes_read for each in found.epochs) == (blocks + later) * PAGE
    assert not found.is_sampled
    assert not found.is_too_small


@pytest.mark.parametrize(
    ("part", "disk_part", "lanes", "window"), [(8, 4, 6, 24), (8, 2, 1, 1), (4, 4, 6, 24)]
)
def test_later_epochs_load_as_few_blocks_with_a_disk_as_predicted(
    part: int, disk_part: int, lanes: int, window: int
) -> None:
    blocks, epochs = 240, 4
    room, disk = blocks // part, blocks // disk_part
    run = DrivenEpochs(blocks, room, job(lanes, window), rows=8, epochs=epochs, disk=disk)
    orders = [run.order(epoch) for epoch in range(epochs + 1)]
    needed = [np.arange(blocks)] * len(orders)
    found = predicted(
        run.dataset, orders, needed, room * PAGE, READ_AHEAD * 4, 0, disk * FILE_BYTES
    )
    later = len(run.loads) - blocks
    assert later == pytest.approx(sum(each.blocks_read for each in found.epochs[1:]), rel=0.05)
    # Never more than the disk alone would need, and nearer to the best of both than LRU.
    assert later <= 1.02 * (epochs - 1) * (blocks - disk)
    best, usual = (each(run.slabs, room + disk) - blocks for each in (fewest, least_recent))
    assert later - best < (usual - best) / 2


def test_copies_that_neighbours_keep_take_memory_in_the_prediction() -> None:
    blocks = 200
    pages, rows = np.full(blocks, PAGE, np.int64), np.full(blocks, 8, np.int64)
    marks = Marks.of(pages, pages, np.ones(blocks, np.bool_))
    dataset = DatasetBlocks(1, "made up", marks, pages, rows, url=str)
    orders = [Order(rows, 1, True, 4, 16, epoch) for epoch in range(4)]

    def later(copies: int, *, is_local: bool) -> int:
        guests = Guests(np.full(blocks, copies), np.full(blocks, is_local))
        every = [np.arange(blocks)] * len(orders)
        found = predicted(
            dataset, orders, every, blocks * PAGE // 2, 88, 0, guests=lambda _epoch, _: guests
        )
        assert found.epochs[0].blocks_read == blocks
        assert not found.is_too_small
        return sum(each.blocks_read for each in found.epochs[1:])

    alone = predicted(dataset, orders, [np.arange(blocks)] * 4, blocks * PAGE // 2, 88, 0)
    assert later(0, is_local=True) == sum(each.blocks_read for each in alone.epochs[1:])
    assert later(0, is_local=True) < later(1, is_local=True) < later(2, is_local=True)
    # What an owner does not read itself stays as it was fetched, and is never decoded there.
    assert later(1, is_local=False) <= later(1, is_local=True)


def test_a_disk_with_room_for_everything_is_read_alone() -> None:
    run = DrivenEpochs(60, 20, job(2, 24), rows=8, epochs=3, disk=60)
    assert sorted(run.loads) == list(range(60))
    assert run.disk_loads


def test_many_blocks_are_predicted_from_some_of_them() -> None:
    blocks = 20_000
    raw, rows = np.full(blocks, PAGE, np.int64), np.full(blocks, 8, np.int64)
    marks = Marks.of(raw, np.zeros_like(raw), np.ones(blocks, np.bool_))
    dataset = DatasetBlocks(1, "made up", marks, raw, rows, url=str)
    orders = [Order(rows, 1, True, 4, 64, epoch) for epoch in range(3)]
    found = predicted(dataset, orders, [np.arange(blocks)] * 3, blocks * PAGE // 2, 88, 4)
    assert found.is_sampled
    assert found.epochs[0].blocks_read == blocks
    assert found.epochs[1].hit_rate == pytest.approx(0.5, abs=0.02)


def test_an_arena_without_room_for_the_open_windows_is_told() -> None:
    run = DrivenEpochs(40, 40, job(4, 64), rows=8, epochs=1)
    orders = [run.order(epoch) for epoch in range(2)]
    found = predicted(run.dataset, orders, [np.arange(40)] * 2, 6 * PAGE, 8, 0)
    assert found.is_too_small
