from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from dataplane.plan.defaults import (
    LANES,
    OPEN_BYTES_MIN,
    OPEN_SAMPLES_MAX,
    RAMP_BYTES,
    BlockSizes,
    open_bytes_max,
    shuffle_of,
)
from plan import plain

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
WORLDS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
modest = settings(max_examples=150)


def uniform(block_count, rows, sample_bytes):
    samples, block_bytes = block_count * rows, rows * sample_bytes
    return BlockSizes(samples, block_count, rows, block_bytes, sample_bytes, rows)


datasets = st.builds(
    uniform, st.integers(1, 5_000_000), st.integers(1, 100_000), st.integers(0, 1 << 20)
)


def test_sizes_are_means_rounded_up():
    sizes = BlockSizes.of(np.array([3, 4]), np.array([10, 20]))
    assert sizes == BlockSizes(7, 2, 4, 15, 5, 4)


def test_the_usual_block_is_that_of_most_samples():
    rows = np.array([100] * 10 + [9000])
    assert BlockSizes.of(rows, rows).usual_rows == 8110
    assert BlockSizes.of(np.full(7, 30), np.full(7, 30)).usual_rows == 30


@modest
@given(st.integers(1, 1 << 34), st.integers(1, 5_000_000), st.integers(0, 1 << 44))
def test_defaults_are_what_the_documentation_defines(samples, blocks, decoded):
    blocks = min(blocks, samples)
    rows, bytes_ = -(-samples // blocks), -(-decoded // blocks)
    found = shuffle_of(BlockSizes(samples, blocks, rows, bytes_, -(-decoded // samples), rows))
    assert (found.lanes, found.window, found.ramp) == plain.defaults(samples, blocks, decoded)


@modest
@given(datasets)
def test_default_windows_fit_into_their_memory(sizes):
    found = shuffle_of(sizes)
    assert found.lanes in LANES
    assert 1 <= found.window <= -(-sizes.samples // found.lanes)
    if found.lanes > 1:
        assert found.lanes * sizes.open_window_bytes(found.window) <= open_bytes_max(sizes)
        assert found.lanes * found.window <= OPEN_SAMPLES_MAX
        assert 7 * found.lanes <= sizes.blocks


@modest
@given(datasets)
def test_the_first_windows_of_epoch_0_are_no_longer_than_they_must_be(sizes):
    found = shuffle_of(sizes)
    first = -(-found.window // 2**found.ramp)
    together = found.lanes * first * sizes.sample_bytes
    least = max(4 * sizes.block_rows, found.lanes * sizes.block_rows // 8)
    if found.ramp:
        assert found.lanes * 2 * first * sizes.sample_bytes > RAMP_BYTES
        assert found.lanes * first >= least - found.lanes
    if together > RAMP_BYTES:
        assert first <= 2 * -(-least // found.lanes) + 2


@modest
@given(datasets, st.integers(1, 10_000), st.integers(1, 1 << 22))
def test_what_is_given_is_kept(sizes, lanes, window):
    assert shuffle_of(sizes, lanes).lanes == lanes
    assert shuffle_of(sizes, None, window).window == window
    both = shuffle_of(sizes, lanes, window)
    assert (both.lanes, both.window) == (lanes, window)


@pytest.mark.parametrize("world", WORLDS)
def test_the_usual_numbers_of_gpus_divide_the_lanes_of_large_datasets(world):
    """A lane has a GiB at least: of powers of two, all that the dataset has GiB for divide them,
    and of three times these, all do from 1.5 TiB on.
    """
    is_power_of_two = world & (world - 1) == 0
    least = max(world, 1) if is_power_of_two and world <= 512 else max(LANES[-2], world)
    least = LANES[-1] if world == 1024 else least
    for gib in (least, 2 * least, 2 * LANES[-1], 10 * LANES[-1]):
        lanes = shuffle_of(uniform(gib * 256, 1024, 4 * KIB)).lanes
        assert lanes % world == 0, (gib, lanes)


@pytest.mark.parametrize(
    ("block_count", "rows", "sample_bytes", "expected"),
    [
        (50, 4000, 12, (1, 200_000, 0)),
        (128, 512, 8200, (1, 32_208, 3)),
        (10_000, 500, 4096, (16, 44_099, 7)),
        (1000, 5000, 4096, (128, 579, 0)),
        (2098, 610, 110_000, (128, 818, 3)),
        (1280, 1000, 110_000, (128, 428, 1)),
        (1_000_000, 1000, 8192, (3072, 535, 2)),
        (125_000, 8000, 8192, (512, 1215, 0)),
        (2_500_000, 4000, 1024, (3072, 5461, 3)),
        (1000, 1_000_000, 100, (128, 111_607, 0)),
        (3, 1, 0, (1, 3, 0)),
        (6, 64, 16 * MIB, (1, 54, 0)),
    ],
)
def test_golden_defaults(block_count, rows, sample_bytes, expected):
    found = shuffle_of(uniform(block_count, rows, sample_bytes))
    assert (found.lanes, found.window, found.ramp) == expected


def test_a_dataset_of_256_mib_is_one_window():
    rows, sample_bytes = 256, 4 * KIB - 4
    assert shuffle_of(uniform(256, rows, sample_bytes)).window == 256 * rows
    assert open_bytes_max(uniform(256, rows, sample_bytes)) == OPEN_BYTES_MIN
    assert shuffle_of(uniform(257, rows, sample_bytes)).window < 257 * rows
