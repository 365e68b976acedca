"""The estimate of a shuffle's quality is that of the order itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dataplane.plan.defaults import BlockSizes, Shuffle
from dataplane.plan.order import Order
from dataplane.plan.quality import _permuted, quality, unshuffled_quality

LABELS = 100


def entropy(labels):
    """In bits."""
    share = np.bincount(labels) / len(labels)
    share = share[share > 0]
    return -(share * np.log2(share)).sum()


def measured(rows, shuffle, draws, epoch, seeds=6):
    """The quality of an order, of batches evenly over the epoch."""
    rows, samples = np.asarray(rows), int(np.sum(rows))
    first = np.cumsum(rows) - rows
    random = np.random.default_rng(3)
    full = np.mean([entropy(random.integers(0, LABELS, draws)) for _ in range(400)])
    found = []
    for seed in range(seeds):
        order = Order(rows, seed, True, shuffle.lanes, shuffle.window, epoch, shuffle.ramp)
        for start in np.linspace(0, samples - draws, 24).astype(np.int64):
            block, row = order.locate(np.arange(start, start + draws))
            found.append(entropy((first[block] + row) * LABELS // samples))
    return np.mean(found) / full


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 300), st.integers(1, 400), st.sampled_from([1, 2, 4, 8, 16]),
    st.floats(0.02, 8), st.sampled_from([16, 64, 256, 2000]), st.integers(0, 3),
)  # fmt: skip
def test_the_estimate_is_the_quality_of_the_order(blocks, rows, lanes, share, draws, ramp):
    samples = blocks * rows
    assume(samples > 2 * draws)
    window = max(1, min(round(rows * share), -(-samples // lanes)))
    sizes = BlockSizes(samples, blocks, rows, rows, 1, rows)
    for epoch, shuffle in ((0, Shuffle(lanes, window, ramp)), (1, Shuffle(lanes, window, 0))):
        expected = min(measured([rows] * blocks, shuffle, draws, epoch), 1)
        assert quality(sizes, shuffle, draws) == pytest.approx(expected, abs=0.08)


def test_one_large_block_among_small_ones_is_seen():
    rows = np.array([100] * 40 + [96_000])
    sizes = BlockSizes.of(rows, rows)
    for shuffle in (Shuffle(1, 10_000, 0), Shuffle(8, 1000, 0)):
        expected = measured(rows, shuffle, 256, 1)
        assert expected < 0.75
        assert quality(sizes, shuffle, 256) == pytest.approx(expected, abs=0.08)


def test_a_small_dataset_is_shuffled_worse_in_epoch_0():
    sizes = BlockSizes(50_000, 50, 1000, 4_096_000, 4096, 1000)
    assert quality(sizes, Shuffle(1, 50_000, 0), 256) == 1
    assert quality(sizes, Shuffle(1, 50_000, 3), 256) == pytest.approx(0.76, abs=0.03)


def test_the_order_of_the_dataset_has_no_quality():
    sizes = BlockSizes(1_000_000, 1000, 1000, 4_096_000, 4096, 1000)
    assert unshuffled_quality(sizes, 256) < 0.05
    assert unshuffled_quality(sizes, 1) == 1


@pytest.mark.parametrize("count", [1, 2, 3, 17, 64, 1000])
def test_places_are_permuted(count):
    keys = np.full(count, 12345, np.uint64)
    found = _permuted(keys, np.arange(count), np.full(count, count))
    assert sorted(found.tolist()) == list(range(count))
    assert count < 17 or found.tolist() != list(range(count))


def test_any_number_of_samples_has_a_quality():
    sizes = BlockSizes(1 << 60, 1 << 40, 1 << 20, 1 << 30, 1 << 10, 1 << 20)
    assert quality(sizes, Shuffle(512, 1000, 3), 4096) > 0.95
    assert quality(sizes, Shuffle(1, 1000, 0), 256) < 0.1
