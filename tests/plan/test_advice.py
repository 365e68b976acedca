from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.plan.advice import advice, blocks_per_batch, memory
from dataplane.plan.cluster import Cluster
from dataplane.plan.defaults import GIB, BlockSizes, Shuffle, shuffle_of
from dataplane.plan.order import Order

TB = 10**12


def uniform(block_count, rows, sample_bytes):
    return BlockSizes(block_count * rows, block_count, rows, rows * sample_bytes, sample_bytes)


PHOTOS = uniform(1280, 1000, 110_000)
ORDINARY = (
    uniform(50, 4000, 12),
    uniform(10_000, 500, 4096),
    uniform(1000, 5000, 4096),
    uniform(33_684, 38, 110_000),
    uniform(2098, 610, 110_000),
    PHOTOS,
    uniform(976_562, 1024, 8192),
    uniform(2_500_000, 4000, 1024),
)


def told(sizes, shuffle, hosts=1, batch=256):
    stored = sizes.dataset_bytes
    return advice(sizes, shuffle, Cluster(hosts * 8, 8), max(batch, hosts * 8), stored)


@pytest.mark.parametrize("sizes", ORDINARY)
def test_ordinary_datasets_with_defaults_give_no_advice(sizes):
    for hosts in (1, 2, 4, 8, *((16, 32, 64) if sizes.dataset_bytes > 2 * TB else ())):
        for batch in (32, 256, 4096):
            assert told(sizes, shuffle_of(sizes), hosts, batch) == ()


@settings(max_examples=60)
@given(
    st.integers(20, 400), st.integers(2, 60), st.integers(1, 32), st.floats(0.05, 6),
    st.integers(1, 200),
)  # fmt: skip
def test_blocks_per_batch_are_about_those_of_the_order(blocks, rows, lanes, share, batch):
    window = max(1, min(round(rows * share), blocks * rows // lanes))
    order = Order(np.full(blocks, rows), 5, True, lanes, window, 1)
    batch = min(batch, blocks * rows // 8)
    if not batch or order.window * lanes >= blocks * rows:
        return
    starts = np.linspace(0, blocks * rows - batch, 40).astype(np.int64)
    found = [len(np.unique(order.locate(np.arange(at, at + batch))[0])) for at in starts]
    estimate = blocks_per_batch(uniform(blocks, rows, 1), Shuffle(lanes, window, 0), batch)
    assert estimate <= blocks
    assert 0.55 * np.mean(found) - 1 <= estimate <= 1.6 * np.mean(found) + 1


def test_batches_of_few_blocks_are_told_with_what_helps():
    (said,) = told(PHOTOS, Shuffle(1, 1440, 0))
    assert "from about 2 of 1,280 blocks (a full shuffle: 232)" in said
    assert "leave out lanes and window" in said
    large = uniform(72, 1000, 110_000)
    (said,) = told(large, shuffle_of(large))
    assert "write smaller blocks" in said
    lanes, window = shuffle_of(large).lanes, int(re.search(r"window=(\d+)", said)[1])
    assert told(large, Shuffle(lanes, window, 0)) == ()
    few = uniform(20, 1000, 110_000)
    (said,) = told(few, shuffle_of(few))
    assert said.endswith("write smaller blocks (row groups or record batches)")


def test_small_datasets_and_small_batches_give_no_advice():
    assert told(uniform(100, 10, 100), Shuffle(1, 1, 0)) == ()
    assert told(uniform(20, 1000, 110_000), Shuffle(1, 20_000, 0), batch=8) == ()


def test_hosts_that_read_much_more_than_their_share_are_told_with_lanes_that_help():
    (said,) = told(PHOTOS, shuffle_of(PHOTOS), hosts=3)
    assert "each of 3 hosts reads about 131.1 GiB" in said
    assert "3.0 times its share, since 128 lanes are shared by 24 ranks: set lanes=120" in said
    assert told(PHOTOS, shuffle_of(PHOTOS, 120), hosts=3) == ()
    (said,) = told(uniform(700, 1000, 1_000_000), Shuffle(8, 4000, 0), hosts=64)
    assert "write smaller blocks; with 3,584 or more, lanes=512 helps" in said


def test_open_windows_larger_than_the_arena_are_told_with_both_numbers():
    shuffle, kept = shuffle_of(PHOTOS), PHOTOS.dataset_bytes
    assert memory(PHOTOS, shuffle, Cluster(64, 8), kept, 4 * GIB) == ""
    said = memory(PHOTOS, shuffle, Cluster(8, 8), kept, 4 * GIB)
    assert "about 18.7 GiB of blocks open on this host" in said
    assert "its block arena has 4.0 GiB" in said
    need = int(re.search(r"block_arena_bytes to (\d+)MiB", said)[1]) << 20
    assert memory(PHOTOS, shuffle, Cluster(8, 8), kept, need) == ""
    lanes, window = map(int, re.search(r"lanes=(\d+), window=(\d+)$", said).groups())
    assert memory(PHOTOS, Shuffle(lanes, window, 0), Cluster(8, 8), kept, 4 * GIB) == ""


def test_blocks_that_take_no_arena_need_none():
    assert memory(PHOTOS, shuffle_of(PHOTOS), Cluster(8, 8), 0, 1 << 20) == ""


def test_an_arena_that_holds_one_block_gives_no_lanes_that_help():
    said = memory(PHOTOS, shuffle_of(PHOTOS), Cluster(8, 8), PHOTOS.dataset_bytes, GIB // 8)
    assert "lanes=" not in said
