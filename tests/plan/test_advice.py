from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dataplane.model.records import Exhausted
from dataplane.plan.advice import advice, blocks_per_batch, memory
from dataplane.plan.cluster import Cluster
from dataplane.plan.counting import quantised
from dataplane.plan.defaults import (
    GIB,
    LANES,
    OPEN_BYTES_MIN,
    OPEN_SAMPLES_MAX,
    RAMP_BYTES,
    BlockSizes,
    Shuffle,
    mixed_lanes,
    open_bytes_max,
    shuffle_of,
    source_window,
)
from dataplane.plan.mixed_order import MixedOrder, SourceOrder
from dataplane.plan.mixture import ROUND_STEPS, Mixed, plan_of
from dataplane.plan.order import Order
from dataplane.plan.quality import _permuted, quality, unshuffled_quality
from dataplane.plan.shuffled import (
    QUALITY_MIN,
    ShuffledJob,
    ShuffledSource,
    draws_of,
    figures_by_host_count,
    hosts_per_block,
    mixed_window,
)
from plan import plain

TB = 10**12


def uniform(block_count, rows, sample_bytes):
    samples, block_bytes = block_count * rows, rows * sample_bytes
    return BlockSizes(samples, block_count, rows, block_bytes, sample_bytes, rows)


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


def source(sizes, window, draws=256, kept=None, name=""):
    kept = sizes.dataset_bytes if kept is None else kept
    return ShuffledSource(sizes, window, draws, sizes.dataset_bytes, kept, name)


def advised(sources, lanes, cluster, batch=256, arena=math.inf):
    return advice(ShuffledJob(tuple(sources), lanes, cluster, batch, arena))


def told(sizes, shuffle, hosts=1, batch=256, arena=math.inf):
    batch = max(batch, hosts * 8)
    whole = [source(sizes, shuffle.window, batch)]
    return advised(whole, shuffle.lanes, Cluster(hosts * 8, 8), batch, arena)


def followed(sizes, said):
    """The shuffle of a dataset whose user does what is said."""
    if "leave out lanes and window" in said:
        return shuffle_of(sizes)
    lanes, window = re.search(r"set lanes=(\d+)(?:, window=(\d+))?", said).groups()
    return shuffle_of(sizes, int(lanes), window and int(window))


def mixed(every, shares, batch=256, window=0, lanes=0):
    """Sources with the defaults of a mixture, or this window; and the lanes."""
    lanes = lanes or mixed_lanes(every)
    found = [
        source(
            sizes,
            window or source_window(sizes, lanes, every),
            draws_of(share, batch, 1),
            name=name,
        )
        for sizes, share, name in zip(every, shares, "abcdefghij", strict=False)
    ]
    return found, lanes


@pytest.mark.parametrize("sizes", ORDINARY)
def test_ordinary_datasets_with_defaults_give_no_advice(sizes):
    for hosts in (1, 2, 4, 8, *((16, 32, 64) if sizes.dataset_bytes > 2 * TB else ())):
        for batch in (32, 256, 4096):
            assert told(sizes, shuffle_of(sizes), hosts, batch) == ""


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
    said = told(PHOTOS, Shuffle(1, 1440, 0))
    assert "from about 2 of 1,280 blocks (shuffle quality 0.17" in said
    assert "leave out lanes and window" in said
    large = uniform(72, 1000, 400_000)
    said = told(large, shuffle_of(large))
    assert "set lanes=" in said
    assert told(large, followed(large, said)) == ""


@pytest.mark.parametrize("blocks", [1, 2, 8, 20, 40])
def test_few_large_blocks_are_told_with_a_window_of_the_dataset(blocks):
    sizes = uniform(blocks, 5_000_000 // blocks, 4096)
    said = told(sizes, shuffle_of(sizes))
    assert "shuffle quality 0." in said
    shuffle = followed(sizes, said)
    assert quality(sizes, Shuffle(shuffle.lanes, shuffle.window, 0), 256) > 0.8
    assert told(sizes, shuffle) == ""


def test_a_shuffle_that_is_not_poor_is_not_warned_of():
    sizes = uniform(1000, 1000, 110_000)
    for blocks, warned in ((20, True), (32, False), (40, False)):
        shuffle = Shuffle(4, blocks * 250, 0)
        assert bool(told(sizes, shuffle)) is warned
        assert (quality(sizes, shuffle, 256) < QUALITY_MIN) is warned


def test_small_datasets_and_small_batches_give_no_advice():
    assert told(uniform(100, 10, 100), Shuffle(1, 1, 0)) == ""
    assert told(uniform(20, 1000, 110_000), Shuffle(1, 20_000, 0), batch=8) == ""


def test_hosts_that_read_much_more_than_their_share_are_told_with_lanes_that_help():
    said = told(PHOTOS, shuffle_of(PHOTOS), hosts=3)
    assert "each of 3 hosts reads about 131.1 GiB in an epoch" in said
    assert "3.0 times its share: set lanes=120" in said
    assert told(PHOTOS, shuffle_of(PHOTOS, 120), hosts=3) == ""
    said = told(uniform(700, 1000, 1_000_000), Shuffle(8, 8000, 0), hosts=64)
    assert "write smaller blocks; with 3,584 or more, lanes=512 helps" in said


def expect_silence(given_shuffle, arena, said_of):
    """Nothing is said of a job that follows what is said of this one, with other lanes and window,
    or more memory; unless nothing but smaller blocks helps against one of the problems.
    """
    said = said_of(*given_shuffle, arena)
    changed, asked = given_shuffle, re.search(r"set lanes=(\d+)(?:, window=(\d+))?", said)
    if asked:
        changed = int(asked[1]), asked[2] and int(asked[2])
    elif "leave out lanes and window" in said:
        changed = None, None
    raised = re.search(r"block_arena_bytes to (\d+)MiB", said)
    enough = int(raised[1]) << 20 if raised else arena
    ways = [(changed, enough)]
    if "; or " in said:  # one of two ways
        ways = [(given_shuffle, enough), (changed, arena)]
    for shuffle, room in ways if said and (raised or changed != given_shuffle) else []:
        again = said_of(*shuffle, room)
        assert not again or ("reads about" in again and "write smaller blocks" in said)
        assert "come from" not in again
        assert "its block arena has" not in again


GIVEN = st.sampled_from([(None, None), (1, None), (None, 10), (4, 100), (1, 1440)])
ARENAS = st.sampled_from([GIB >> 4, GIB, 4 * GIB, 64 * GIB, math.inf])
BLOCKS = st.sampled_from([1, 2, 5, 20, 40, 64, 70, 100, 200, 1000, 5000, 50_000])
ROWS, SAMPLE_BYTES = st.sampled_from([10, 100, 1000, 50_000]), st.sampled_from([100, 4096, 110_000])
RANKS = st.sampled_from([1, 8, 24, 64, 512])


@given(st.builds(uniform, BLOCKS, ROWS, SAMPLE_BYTES), RANKS, GIVEN, ARENAS)
def test_nothing_is_said_of_a_job_that_follows_the_advice(sizes, ranks, given_shuffle, arena):
    def said_of(lanes, window, arena):
        shuffle = shuffle_of(sizes, lanes, window)
        window = min(shuffle.window, -(-sizes.samples // shuffle.lanes))
        whole, cluster = [source(sizes, window, 32 * ranks)], Cluster(ranks, min(8, ranks))
        return advised(whole, shuffle.lanes, cluster, 32 * ranks, arena)

    expect_silence(given_shuffle, arena, said_of)


@given(
    st.lists(
        st.tuples(st.builds(uniform, BLOCKS, ROWS, SAMPLE_BYTES), st.floats(0.05, 1)),
        min_size=2, max_size=3,
    ),
    RANKS, GIVEN, ARENAS,
)  # fmt: skip
def test_nothing_is_said_of_a_mixture_that_follows_the_advice(every, ranks, given_shuffle, arena):
    total = sum(weight for _, weight in every)
    shares = [weight / total for _, weight in every]

    def said_of(lanes, window, arena):
        found, lanes = mixed([sizes for sizes, _ in every], shares, 32 * ranks, window, lanes)
        longer = [
            replace(one, window=mixed_window(one.window, share, 1, ROUND_STEPS))
            for one, share in zip(found, shares, strict=True)
        ]
        return advised(longer, lanes, Cluster(ranks, min(8, ranks)), 32 * ranks, arena)

    expect_silence(given_shuffle, arena, said_of)


def room(sizes, shuffle, ranks, arena_bytes, kept=None):
    whole = [source(sizes, shuffle.window, kept=kept)]
    return memory(ShuffledJob(tuple(whole), shuffle.lanes, Cluster(ranks, 8), 256, arena_bytes))


def test_open_windows_larger_than_the_arena_are_told_with_both_numbers():
    shuffle = shuffle_of(PHOTOS)
    assert room(PHOTOS, shuffle, 64, 4 * GIB) == ""
    said = room(PHOTOS, shuffle, 8, 4 * GIB)
    assert "about 18.7 GiB of blocks open on a host" in said
    assert "its block arena has 4.0 GiB" in said
    need = int(re.search(r"block_arena_bytes to (\d+)MiB", said)[1]) << 20
    assert room(PHOTOS, shuffle, 8, need) == ""
    assert re.search(r"set lanes=\d+, window=\d+, for a shuffle quality of 0.\d+", said)
    assert told(PHOTOS, followed(PHOTOS, said), arena=4 * GIB) == ""


def test_blocks_that_take_no_arena_need_none():
    assert room(PHOTOS, shuffle_of(PHOTOS), 8, 1 << 20, kept=0) == ""


def test_an_arena_that_holds_one_block_gives_no_lanes_that_help():
    said = room(PHOTOS, shuffle_of(PHOTOS), 8, GIB // 8)
    assert "lanes=" not in said
    assert "write smaller blocks" in said
    assert said.endswith(". No other lanes and window both fit and mix well")


@pytest.mark.parametrize("hosts", [1, 2, 8])
def test_ordinary_mixtures_with_defaults_give_no_advice(hosts):
    """Web pages, code and books of 4 KiB a row, and photographs in small blocks."""
    every = [
        uniform(200_000, 1000, 4096),
        uniform(50_000, 1000, 4096),
        uniform(4000, 1000, 4096),
        uniform(33_684, 38, 110_000),
    ]
    for batch in (32, 256, 4096):
        sources, lanes = mixed(every, (0.6, 0.3, 0.02, 0.08), max(batch, 8 * hosts))
        assert advised(sources, lanes, Cluster(8 * hosts, 8), max(batch, 8 * hosts)) == ""


def test_a_mixture_of_one_source_is_told_what_its_dataset_is():
    for sizes in (PHOTOS, uniform(72, 1000, 110_000)):
        for arena in (math.inf, GIB // 8):
            said = [
                advised([source(sizes, 1440, name=name)], 1, Cluster(24, 8), arena=arena)
                for name in ("", "a")
            ]
            assert said[1].replace("of source 'a' in a batch", "of a batch") == said[0]
            assert "of a batch" in said[0]


def test_the_source_that_mixes_worst_is_named():
    every = [uniform(200_000, 1000, 4096), PHOTOS, PHOTOS]
    sources, _ = mixed(every, (0.2, 0.5, 0.3), window=1440, lanes=1)
    said = advised(sources, 1, Cluster(1, 1))
    assert "the samples of source 'b' in a batch come from about" in said
    assert "; 2 more sources are like that)" in said
    assert "leave out lanes and window" in said
    # So few of its samples are in a batch that they come from enough blocks.
    rare, _ = mixed(every, (0.998, 0.001, 0.001), window=4000, lanes=64)
    assert advised(rare, 64, Cluster(1, 1)) == ""
    together = draws_of(0.5, 256, 256)
    assert (together, draws_of(0.5, 256, 1), draws_of(1e-9, 256, 1)) == (256, 128, 1)


def test_a_mixture_that_hosts_read_again_is_told_with_lanes_that_help():
    every = [PHOTOS, uniform(2560, 1000, 110_000)]
    sources, lanes = mixed(every, (0.5, 0.5))
    said = advised(sources, lanes, Cluster(24, 8))
    assert "each of 3 hosts reads about" in said
    better = int(re.search(r"set lanes=(\d+)", said)[1])
    assert not better % 24
    assert advised(mixed(every, (0.5, 0.5), lanes=better)[0], better, Cluster(24, 8)) == ""


def test_the_open_windows_of_all_sources_need_memory():
    every = [PHOTOS, uniform(2560, 1000, 110_000)]
    sources, lanes = mixed(every, (0.5, 0.5))

    def said(sources, lanes, arena):
        return memory(ShuffledJob(tuple(sources), lanes, Cluster(8, 8), 256, arena))

    found = said(sources, lanes, 16 * GIB)
    need = int(re.search(r"block_arena_bytes to (\d+)MiB", found)[1]) << 20
    assert [said([one], lanes, need) for one in sources] == ["", ""]
    assert said(sources, lanes, need) == ""
    assert said(sources, lanes, int(need / 1.2))
    fewer, window = map(int, re.search(r"lanes=(\d+), window=(\d+)", found).groups())
    fitting, _ = mixed(every, (0.5, 0.5), window=window, lanes=fewer)
    assert said(fitting, fewer, 16 * GIB) == ""
    assert said(sources, lanes, 2 * GIB).endswith(
        ". No other lanes and window both fit and mix well"
    )


def test_hosts_of_a_mixture_read_what_they_would_of_each_source():
    every = [uniform(2048, 1000, 1000), uniform(64, 1000, 1000)]
    sources, _ = mixed(every, (0.5, 0.5), window=500, lanes=32)
    for cluster in (Cluster(8, 8), Cluster(64, 8), Cluster(24, 8)):
        apart = [hosts_per_block([one], 32, cluster) for one in sources]
        assert apart == [cluster.hosts_per_block(32, one.blocks) for one in every]
        stored = [one.stored_bytes for one in sources]
        mean = np.average(apart, weights=stored)
        assert hosts_per_block(sources, 32, cluster) == pytest.approx(mean)
    for apart, both in zip(
        zip(*(figures_by_host_count([one], 32, Cluster(8, 8)) for one in sources), strict=True),
        figures_by_host_count(sources, 32, Cluster(8, 8)),
        strict=True,
    ):
        for name in ("open_window_bytes_per_host", "bytes_read_per_host"):
            total = sum(getattr(one, name) for one in apart)
            assert getattr(both, name) == pytest.approx(total, abs=2)


@given(
    st.lists(st.tuples(st.integers(30, 200), st.integers(4, 40)), min_size=1, max_size=3),
    st.integers(1, 16),
    st.floats(0.2, 4),
    st.integers(8, 128),
    st.data(),
)  # fmt: skip
def test_blocks_per_batch_of_a_source_are_about_those_of_the_order(
    layouts, lanes, length, batch, data
):
    shares = quantised([data.draw(st.integers(1, 8)) for _ in layouts])
    counts = tuple(blocks * rows for blocks, rows in layouts)
    of = Mixed(counts, shares, (1,) * len(counts), lanes, Exhausted.STOP, 0, 1, 64)
    plan = plan_of(of, 0, ())
    if plan.sample_count < 8 * batch:
        return
    windows = [
        max(1, min(round(rows * length), blocks * rows // lanes)) for blocks, rows in layouts
    ]
    sources = [
        SourceOrder(np.full(blocks, rows), window, 0)
        for (blocks, rows), window in zip(layouts, windows, strict=True)
    ]
    order = MixedOrder(plan, sources, 5, True, lanes)
    starts = np.linspace(0, plan.sample_count - batch, 40).astype(np.int64)
    first = np.cumsum([0, *(blocks for blocks, _ in layouts)])
    found = [order.locate(np.arange(at, at + batch))[0] for at in starts]
    for one, ((blocks, rows), window) in enumerate(zip(layouts, windows, strict=True)):
        own = [
            len(np.unique(each[(first[one] <= each) & (each < first[one + 1])])) for each in found
        ]
        share = plan.counts[one] / plan.sample_count
        draws = draws_of(share, batch, 1)
        shuffle = Shuffle(lanes, mixed_window(window, share, 1, of.round_steps), 0)
        estimate = blocks_per_batch(uniform(blocks, rows, 1), shuffle, draws)
        assert 0.5 * np.mean(own) - 1 <= estimate <= 1.7 * np.mean(own) + 1.5


KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
WORLDS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
modest = settings(max_examples=80)


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


@settings(max_examples=12, deadline=None)
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
