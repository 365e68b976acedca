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
from dataplane.scheduler.predicted import Guests, open_bytes_max, predicted

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


@pytest.mark.parametrize("large", [0, 7, 4999])
def test_one_very_large_block_counts_once_whichever_blocks_are_looked_at(large: int) -> None:
    blocks, rows = 20_000, np.full(20_000, 8, np.int64)
    raw = np.full(blocks, PAGE, np.int64)
    raw[large] = blocks * PAGE
    marks = Marks.of(raw, np.zeros_like(raw), np.ones(blocks, np.bool_))
    dataset = DatasetBlocks(1, "made up", marks, raw, rows, url=str)
    orders = [Order(rows, 1, True, 4, 64, epoch) for epoch in range(3)]
    needed = [np.arange(blocks)] * 3
    whole = predicted(dataset, orders, needed, 3 * blocks * PAGE, 88, 4)
    part = predicted(dataset, orders, needed, blocks * PAGE // 2, 88, 4)
    for found in (whole, part):
        assert found.is_sampled
        assert found.epochs[0].bytes_needed == found.epochs[0].bytes_read == raw.sum()
        assert found.epochs[0].blocks_read == blocks
    assert whole.epochs[1].bytes_read == 0
    # It never fits; half of the others do.
    assert part.epochs[1].bytes_read == pytest.approx(1.5 * blocks * PAGE, rel=0.02)
    assert open_bytes_max(dataset, orders[1], needed[1]) > blocks * PAGE


def test_a_block_that_never_fits_once_decoded_is_read_in_every_epoch() -> None:
    raw, rows = np.full(10, PAGE, np.int64), np.full(10, 8, np.int64)
    decoded = np.where(np.arange(10) == 3, 100, 1) * PAGE
    dataset = DatasetBlocks(
        1, "made up", Marks.of(raw, decoded, np.ones(10, np.bool_)), raw, rows, url=str
    )
    orders = [Order(rows, 1, True, 2, 16, epoch) for epoch in range(4)]
    found = predicted(dataset, orders, [np.arange(10)] * 4, 50 * PAGE, 16, 2)
    assert [each.blocks_read for each in found.epochs] == [10, 1, 1]


def test_blocks_that_are_being_decoded_do_not_keep_those_of_open_windows_out() -> None:
    """They take all of the arena if nobody waits for it, and end before open windows make room."""
    blocks, room = 240, 60
    pages, rows = np.full(blocks, PAGE, np.int64), np.full(blocks, 8, np.int64)
    dataset = DatasetBlocks(
        1, "made up", Marks.of(pages, pages, np.ones(blocks, np.bool_)), pages, rows, url=str
    )
    orders = [Order(rows, 1, True, 6, 24, epoch) for epoch in range(4)]
    every = [np.arange(blocks)] * len(orders)
    few, many = (
        predicted(dataset, orders, every, room * PAGE, 88, under_way) for under_way in (2, room)
    )
    later = [sum(each.blocks_read for each in found.epochs[1:]) for found in (few, many)]
    assert later[0] < later[1] < 2 * blocks


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
    assert open_bytes_max(fitting.dataset, order, np.arange(blocks)) == most * PAGE
    assert len(fitting.loads) <= 1.02 * blocks  # a block of the next epoch may be among them
    assert len(run(round(0.8 * most)).loads) > 1.1 * blocks
