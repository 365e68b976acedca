from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from dataplane.model.errors import ConfigError
from dataplane.plan import windows
from dataplane.plan.order import WINDOW_MAX, Order, upcoming
from plan import golden, plain

layouts = st.lists(st.integers(1, 40), min_size=1, max_size=30).map(np.array)
words = st.integers(0, 2**64 - 1)
counts = st.integers(1, 70)
ramps = st.integers(0, 9)
epochs = st.just(0) | words
modest = settings(max_examples=150)


def everything(order):
    return np.arange(order.sample_count)


def sample_ids(order, rows, positions):
    """The places of samples in the dataset's own order."""
    block, row = order.locate(positions)
    return (np.cumsum(rows) - rows)[block] + row


@modest
@given(layouts, words, st.booleans(), counts, counts, epochs, ramps)
def test_order_is_a_bijection(rows, seed, shuffle, lanes, window, epoch, ramp):
    order = Order(rows, seed, shuffle, lanes, window, epoch, ramp)
    found = sample_ids(order, rows, everything(order))
    assert np.array_equal(np.sort(found), everything(order))


@modest
@given(layouts, words, counts, counts, epochs, ramps)
def test_order_is_what_the_documentation_defines(rows, seed, lanes, window, epoch, ramp):
    order = Order(rows, seed, True, lanes, window, epoch, ramp)
    found = np.stack(order.locate(everything(order)), axis=1)
    expected = plain.order(rows.tolist(), seed, lanes, window, epoch, ramp)
    assert [tuple(pair) for pair in found.tolist()] == expected


@modest
@given(layouts, words, st.booleans(), counts, counts, ramps)
def test_position_of_is_the_inverse_of_locate(rows, seed, shuffle, lanes, window, ramp):
    order = Order(rows, seed, shuffle, lanes, window, 0, ramp)
    positions = everything(order)[::-1]
    assert np.array_equal(order.position_of(*order.locate(positions)), positions)


@modest
@given(layouts, words, counts, counts, ramps, st.data())
def test_positions_are_found_alike_in_any_company(rows, seed, lanes, window, ramp, more):
    order = Order(rows, seed, True, lanes, window, 0, ramp)
    whole = sample_ids(order, rows, everything(order))
    some = np.array(more.draw(st.lists(st.integers(0, len(whole) - 1), max_size=50)), np.int64)
    assert np.array_equal(sample_ids(order, rows, some), whole[some])
    fresh = Order(rows, seed, True, lanes, window, 0, ramp)
    assert np.array_equal(sample_ids(fresh, rows, some), whole[some])


@modest
@given(layouts, words, counts, counts, ramps)
def test_forgotten_windows_are_made_again_with_the_same_content(rows, seed, lanes, window, ramp):
    roomy = Order(rows, seed, True, lanes, window, 0, ramp)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "WINDOW_CACHE_BYTES", 3 * 2 * window)
        tight = Order(rows, seed, True, lanes, window, 0, ramp)
    positions = everything(roomy)
    expected = roomy.locate(positions)
    assert np.array_equal(tight.locate(positions), expected)
    assert np.array_equal(tight.locate(positions[::-1]), np.array(expected)[:, ::-1])
    assert np.array_equal(tight.position_of(*expected), positions)


@modest
@given(layouts, words, st.booleans(), counts, counts, st.integers(0, 1), ramps)
def test_block_spans_are_those_of_the_windows_that_need_the_block(
    rows, seed, shuffle, lanes, window, epoch, ramp
):
    order = Order(rows, seed, shuffle, lanes, window, epoch, ramp)
    first, last = np.full(len(rows), order.sample_count), np.full(len(rows), -1)
    for lane in range(order.lanes):
        base, end = order.lane_starts(np.array([lane, lane + 1])).tolist()
        stops = range(1, end - base + 1)
        if shuffle:
            stops = plain.cuts(lane, lanes, window, ramp, epoch, order.sample_count)
        starts = [0, *stops]
        for opened, stop in zip(starts, stops, strict=False):
            closed = min(stop, end - base) - 1
            if opened > closed:
                continue
            offsets = np.arange(opened, closed + 1)
            needed = np.unique(order.locate(offsets * order.lanes + lane)[0])
            first[needed] = np.minimum(first[needed], opened * order.lanes + lane)
            last[needed] = np.maximum(last[needed], closed * order.lanes + lane)
    spans = order.block_span(np.arange(len(rows)))
    assert np.array_equal(spans[0], first)
    assert np.array_equal(spans[1], last)
    block, _ = order.locate(everything(order))
    assert (first[block] <= everything(order)).all()
    assert (last[block] >= everything(order)).all()


@modest
@given(layouts, words, counts, counts, st.integers(0, 200), st.integers(1, 9))
def test_upcoming_blocks_are_distinct_and_in_order_of_first_use(
    rows, seed, lanes, window, start, stride
):
    order = Order(rows, seed, True, lanes, window, 0)
    start = min(start, order.sample_count)
    block, _ = order.locate(np.arange(start, order.sample_count, stride))
    expected = list(dict.fromkeys(block.tolist()))
    assert upcoming(order, start, order.sample_count, stride).tolist() == expected


def test_upcoming_reaches_over_many_pieces():
    rows = np.full(500, 1000)
    order = Order(rows, 3, True, 4, 2500, 0)
    block, _ = order.locate(everything(order))
    assert upcoming(order, 0, 500_000).tolist() == list(dict.fromkeys(block.tolist()))


@modest
@given(layouts, words, counts, counts)
def test_without_shuffle_the_order_is_the_datasets_own(rows, seed, lanes, window):
    order = Order(rows, seed, False, lanes, window, 5)
    assert np.array_equal(sample_ids(order, rows, everything(order)), everything(order))
    assert order.lanes == 1


def test_a_lane_holds_its_own_blocks():
    rows = np.full(64, 10)
    order = Order(rows, 9, True, 8, 20, 0)
    block, _ = order.locate(everything(order))
    for lane in range(8):
        mine = order.block_lanes(np.unique(block[lane::8]))
        assert mine[0].tolist() == mine[1].tolist() == [lane] * 8


@pytest.mark.parametrize(("case", "expected"), golden.ORDERS.items(), ids=str)
def test_golden_orders(case, expected):
    rows, seed, lanes, window, ramp, epoch = case
    order = Order(np.array(rows), seed, True, lanes, window, epoch, ramp)
    found = np.stack(order.locate(everything(order)), axis=1)
    assert [f"{block}.{row}" for block, row in found.tolist()] == expected.split()


@pytest.mark.parametrize("epoch", [0, 3])
def test_golden_positions_of_ten_thousand_million_samples(epoch):
    order = Order(np.full(2_500_000, 4000), 7, True, 96, 4096, epoch, 6)
    expected = {at: sample for (of, at), sample in golden.FAR.items() if of == epoch}
    found = np.stack(order.locate(list(expected)), axis=1).tolist()
    assert [tuple(pair) for pair in found] == list(expected.values())


def test_seeds_and_epochs_give_other_orders():
    rows = np.full(30, 10)
    seen = {
        sample_ids(Order(rows, seed, True, 4, 16, epoch), rows, np.arange(300)).tobytes()
        for seed in (0, 1, 2**64 - 1)
        for epoch in (0, 1, 2**64 - 1)
    }
    assert len(seen) == 9


def test_window_longer_than_a_lane_is_the_whole_lane():
    rows = np.full(10, 7)
    short, long = (Order(rows, 1, True, 2, window, 0) for window in (35, 1 << 40))
    positions = np.arange(70)
    assert np.array_equal(short.locate(positions), long.locate(positions))
    assert long.window == 35
    assert Order(rows, 1, True, 3, 1 << 40, 0).window == 24


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"lanes": 0}, "lanes"),
        ({"lanes": -4}, "lanes"),
        ({"lanes": 1 << 40}, "lanes"),
        ({"window": 0}, "window"),
        ({"window": 1 << 62}, "window"),
        ({"ramp": -1}, "ramp"),
        ({"ramp": 29}, "ramp"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"epoch": -1}, "epoch"),
        ({"block_rows": np.array([], np.int64)}, "block_rows"),
        ({"block_rows": np.array([3, 0, 2])}, "block_rows"),
        ({"block_rows": np.array([3, -1])}, "block_rows"),
        ({"block_rows": np.array([1 << 61] * 4)}, "block_rows"),
        ({"block_rows": np.array([1.5])}, "block_rows"),
        ({"block_rows": np.array([[1, 2]])}, "block_rows"),
        ({"block_rows": np.array([4 * WINDOW_MAX]), "lanes": 1, "window": 1 << 40}, "window"),
    ],
)
def test_what_no_order_can_have_is_refused(change, field):
    good = {
        "block_rows": np.array([5, 5]),
        "seed": 0,
        "shuffle": True,
        "lanes": 2,
        "window": 3,
        "epoch": 0,
    }
    with pytest.raises(ConfigError) as refused:
        Order(**{**good, **change})
    assert refused.value.field == field


@pytest.mark.parametrize("wrong", [-1, 10, 1 << 62])
def test_positions_and_samples_outside_are_refused(wrong):
    order = Order(np.array([5, 5]), 0, True, 2, 3, 0)
    for ask in (
        lambda: order.locate(np.array([0, wrong])),
        lambda: order.position_of(np.array([wrong]), np.array([0])),
        lambda: order.position_of(np.array([0]), np.array([wrong])),
        lambda: order.block_span(np.array([wrong])),
        lambda: upcoming(order, 0, 10, -1),
    ):
        with pytest.raises(ConfigError):
            ask()


def test_no_positions_give_no_samples():
    order = Order(np.array([5, 5]), 0, True, 2, 3, 0)
    assert [len(each) for each in order.locate(np.array([], np.int64))] == [0, 0]
    assert upcoming(order, 4, 4).tolist() == []


@modest
@given(layouts, words, st.booleans(), counts, counts, epochs, ramps)
def test_a_block_has_the_same_span_alone_as_among_others(
    rows, seed, shuffle, lanes, window, epoch, ramp
):
    order = Order(rows, seed, shuffle, lanes, window, epoch, ramp)
    blocks = np.arange(len(rows))
    alone = [np.concatenate(order.block_span(np.array([block]))).tolist() for block in blocks]
    # Two or more: a single one is computed in another way.
    among = np.stack(order.block_span(np.append(blocks, 0)), 1)[:-1]
    assert alone == among.tolist()


def test_without_shuffling_a_block_spans_its_own_positions():
    order = Order(np.array([3, 2, 4]), 0, False, 2, 8, 0)
    first, last = order.block_span(np.arange(3))
    assert first.tolist() == [0, 3, 5]
    assert last.tolist() == [2, 4, 8]


def test_lanes_open_their_windows_at_an_even_rate():
    lanes, window = 8, 500
    order = Order(np.full(400, 100), 3, True, lanes, window, 1)
    first, _ = order.block_span(np.arange(400))
    offset, lane = np.divmod(first[first >= lanes], lanes)
    opened = np.unique(np.stack([offset, lane]), axis=1)[0]
    parts = np.arange(0, order.sample_count // lanes - window, window // 4)
    # In a quarter of a window, two of eight lanes should open one; with whole blocks up to four do.
    assert np.histogram(opened, parts)[0].max() <= 4


def test_the_first_batches_of_epoch_0_need_few_blocks():
    orders = [Order(np.full(400, 100), 3, True, 1, 40_000, epoch, 5) for epoch in (0, 1)]
    needed = [len(np.unique(order.locate(np.arange(600))[0])) for order in orders]
    assert needed[0] <= 14
    assert needed[1] > 250


def test_the_ramp_halves_the_first_window_and_no_other():
    order = Order(np.full(400, 100), 3, True, 1, 10_000, 0, 3)
    block, _ = order.locate(everything(order))
    for begin, end in ((0, 1250), (1250, 2500), (2500, 5000), (5000, 10_000), (10_000, 20_000)):
        inside = (end - begin) / 100
        assert inside <= len(np.unique(block[begin:end])) <= inside + 1
