"""Balanced packs: the same cost on all ranks at each step, in the order of docs/order.md."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from dataplane.model.records import Exhausted, PackPolicy, PackSpec
from dataplane.plan.balance import numbered
from dataplane.plan.mixed_order import MixedOrder, SourceOrder
from dataplane.plan.mixture import Mixed, plan_of
from dataplane.plan.order import Order
from dataplane.plan.packs import costs, packs_of
from plan import golden, plain

Int64 = NDArray[np.int64]
LAYOUTS = st.lists(st.integers(1, 150), min_size=1, max_size=10).map(np.array)
LANES = st.integers(1, 9) | st.sampled_from([70, 200, 600])
WINDOWS, RAMPS, SEEDS = st.integers(1, 400), st.integers(0, 4), st.integers(0, 2**64 - 1)
few = settings(max_examples=60)


def balanced(rows: Int64, seed: int, lanes: int, window: int, epoch: int, ramp: int) -> Order:
    return Order(rows, seed, True, lanes, window, epoch, ramp, balanced=True)


@few
@given(LAYOUTS, SEEDS, LANES, WINDOWS, st.integers(0, 1), RAMPS)
def test_the_order_is_what_the_documentation_defines_and_its_inverse_leads_back(
    rows: Int64, seed: int, lanes: int, window: int, epoch: int, ramp: int
) -> None:
    order = balanced(rows, seed, lanes, window, epoch, ramp)
    positions = np.arange(order.sample_count)
    block, row = order.locate(positions)
    expected = plain.order(rows.tolist(), seed, lanes, window, epoch, ramp, balanced=True)
    assert list(zip(block.tolist(), row.tolist(), strict=True)) == expected
    assert len(set(expected)) == order.sample_count
    assert np.array_equal(order.position_of(block, row), positions)
    first, last = order.block_span(block)
    assert (first <= positions).all()
    assert (positions <= last).all()


@few
@given(LAYOUTS, SEEDS, LANES, WINDOWS, st.lists(st.integers(0, 2000), max_size=20))
def test_positions_are_found_alike_in_any_company(
    rows: Int64, seed: int, lanes: int, window: int, some: list[int]
) -> None:
    order = balanced(rows, seed, lanes, window, 1, 0)
    chosen = np.array([at % order.sample_count for at in some], np.int64)
    whole = order.locate(np.arange(order.sample_count))
    found = balanced(rows, seed, lanes, window, 1, 0).locate(chosen)
    assert np.array_equal(found, [each[chosen] for each in whole])


@settings(max_examples=25)
@given(LAYOUTS, LAYOUTS, SEEDS, WINDOWS, RAMPS, st.integers(0, 2), st.integers(1, 20))
def test_batches_of_one_source_each_have_the_balanced_order_of_every_pass_over_it(
    first: Int64, second: Int64, seed: int, window: int, ramp: int, epoch: int, batch: int
) -> None:
    layouts, share = (first, second), 1 << 31
    counts = tuple(int(rows.sum()) for rows in layouts)
    length = batch * (-(-sum(counts) // batch))
    mixed = Mixed(counts, (share, share), (0, 0), 1, Exhausted.CYCLE, length, batch)
    sources = [SourceOrder(rows, window, ramp, balanced=True) for rows in layouts]
    order = MixedOrder(plan_of(mixed, epoch), sources, seed, True, 3)
    positions = np.arange(order.sample_count)
    source, sample = order.samples_at(positions)
    assert all(len(set(some)) == 1 for some in source.reshape(-1, batch).tolist())
    block, row = order.locate(positions)
    for at, rows in enumerate(layouts):
        own, begin = plain.key(seed, plain.SOURCE, at), at * len(first)
        passes = {
            number: plain.order(rows.tolist(), own, 3, window, number, ramp, balanced=True)
            for number in set((sample[source == at] // counts[at]).tolist())
        }
        for position in np.flatnonzero(source == at).tolist():
            number, place = divmod(int(sample[position]), counts[at])
            found = (int(block[position]) - begin, int(row[position]))
            assert found == passes[number][place]
    some = positions[:: max(1, len(positions) // 7)]
    for position in some.tolist():
        assert position in order.positions_of(int(block[position]), int(row[position]))


def test_golden_positions_of_balanced_packs() -> None:
    for (epoch, position), expected in golden.BALANCED.items():
        order = balanced(np.full(1000, 300), 7, 8, 5000, epoch, 2)
        block, row = order.locate(np.array([position]))
        assert (int(block[0]), int(row[0])) == expected


def test_any_numbers_in_a_row_have_packs_of_all_costs() -> None:
    found = numbered(np.random.default_rng(0).permutation(1000))
    assert sorted(found.tolist()) == list(range(1000))
    ranks = np.random.default_rng(0).permutation(1000)[found]
    for begin in range(0, 1000, 50):
        part = np.sort(ranks[begin : begin + 50])
        assert np.abs(part - np.arange(10, 1000, 20)).max() < 60


def step_costs(
    pack: PackSpec, blocks: int, shuffle: tuple[int, int], ranks: int, batch: int
) -> Int64:
    """The cost of each rank at each step, for documents as web pages are.

    Shapes:  result: int64[steps, ranks].
    """
    rng = np.random.default_rng(0)
    of_blocks = []
    for number in range(blocks):
        lengths = np.ceil(rng.lognormal(np.log(616) - 0.72, 1.2, 3300)).astype(np.int64)
        of_blocks.append(costs(packs_of(lengths, pack, number), pack))
    counts = np.array([len(each) for each in of_blocks])
    order = Order(counts, 7, True, *shuffle, 1, balanced=pack.balanced)
    block, row = order.locate(np.arange(order.sample_count))
    found = np.concatenate(of_blocks)[(np.cumsum(counts) - counts)[block] + row]
    whole = len(found) // (ranks * batch) * ranks * batch
    return found[:whole].reshape(-1, batch, ranks).sum(axis=1)


@pytest.mark.parametrize("policy", [PackPolicy.BEST_FIT, PackPolicy.PAD])
@pytest.mark.parametrize(
    ("lanes", "window", "ranks", "batch"),
    [(1, 10**6, 64, 1), (64, 600, 64, 1), (64, 150, 64, 1), (64, 600, 48, 2), (8, 3000, 256, 1)],
)
def test_ranks_have_packs_of_about_the_same_cost_at_each_step(
    policy: PackPolicy, lanes: int, window: int, ranks: int, batch: int
) -> None:
    worst = []
    for is_balanced in (False, True):
        pack = PackSpec("tokens", 8192, policy, balanced=is_balanced)
        found = step_costs(pack, 192, (lanes, window), ranks, batch)
        worst.append(float(found.max(axis=1).sum() / found.mean(axis=1).sum()))
    assert worst[0] > 2
    assert worst[1] - 1 < (worst[0] - 1) / 5
