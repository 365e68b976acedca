from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from dataplane.model.errors import ConfigError
from dataplane.plan import windows
from dataplane.plan.loops import sort_rows
from dataplane.plan.order import WINDOW_MAX, Finder, Order, upcoming
from dataplane.plan.permute import (
    extended,
    key,
    mix,
    mix_in_place,
    permutation,
    permutations,
    sample_keys,
)
from dataplane.plan.windows import distinct
from plan import golden, plain

layouts = st.lists(st.integers(1, 40), min_size=1, max_size=30).map(np.array)
words = st.integers(0, 2**64 - 1)
counts = st.integers(1, 70)
ramps = st.integers(0, 9)
epochs = st.just(0) | words
modest = settings(max_examples=80)


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


LENGTHS = st.lists(st.integers(1, 9) | st.integers(1, 1 << 40), min_size=1, max_size=40)


@given(LENGTHS, st.data())
def test_intervals_of_any_lengths_are_found(lengths: list[int], data: st.DataObject) -> None:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    drawn = data.draw(st.lists(st.integers(0, int(starts[-1]) - 1), max_size=20))
    places = np.array([*drawn, *starts[:-1], *(starts[1:] - 1)], np.int64)
    expected = np.searchsorted(starts, places, side="right") - 1
    found, within = Finder(starts).find(places)
    assert found.tolist() == expected.tolist()
    assert within.tolist() == (places - starts[expected]).tolist()


@pytest.mark.parametrize("count", [1, 3, 100, 70_000])
@pytest.mark.parametrize("length", [1, 7, 23_301])
def test_equal_intervals_with_a_short_one_at_every_tenth_are_found(count: int, length: int) -> None:
    lengths = np.full(count, length, np.int64)
    lengths[9::10] = 1
    starts = np.concatenate([[0], np.cumsum(lengths)])
    places = np.random.default_rng(0).integers(0, starts[-1], 1000)
    found, within = Finder(starts).find(places)
    assert (starts[found] + within == places).all()
    assert (within >= 0).all()
    assert (places < starts[found + 1]).all()


@pytest.mark.parametrize("count", [100_000, 300_001])
def test_intervals_that_crowd_into_one_part_are_found(count: int) -> None:
    lengths = np.ones(count, np.int64)
    lengths[count // 2] = 1 << 40
    starts = np.concatenate([[0], np.cumsum(lengths)])
    expected = np.random.default_rng(0).integers(0, count, 1000)
    found, within = Finder(starts).find(starts[expected] + lengths[expected] - 1)
    assert found.tolist() == expected.tolist()
    assert within.tolist() == (lengths[expected] - 1).tolist()


@pytest.mark.parametrize("count", [1 << 15, 1 << 20])
def test_each_part_of_the_finder_has_at_most_two_intervals(count: int) -> None:
    finder = Finder(np.arange(count + 1, dtype=np.int64) * 1000)
    assert int(np.diff(finder._first).max()) <= 2


near = st.lists(st.integers(-50, 50))
far = st.lists(st.integers(-(2**61), 2**61))


@given(near | far)
def test_distinct_values_rise_and_give_the_values_back(values):
    found, number = distinct(np.array(values, np.int64))
    assert found.tolist() == sorted(set(values))
    assert found[number].tolist() == values


MASK = 2**64 - 1
permuted_words = st.integers(0, MASK)


@pytest.mark.parametrize(("word", "expected"), golden.MIX.items())
def test_golden_mix(word, expected):
    assert mix(word) == expected


@pytest.mark.parametrize(("parts", "expected"), golden.KEYS.items())
def test_golden_keys(parts, expected):
    assert key(*parts) == expected


@pytest.mark.parametrize(("asked", "expected"), golden.PERMUTATIONS.items())
def test_golden_permutations(asked, expected):
    assert tuple(permutation(*asked).tolist()) == expected


@pytest.mark.parametrize(("sample", "expected"), golden.SAMPLE_KEYS.items())
def test_golden_sample_keys(sample, expected):
    seed, epoch, shard, row, op = sample
    assert plain.sample_key(*sample) == expected
    assert sample_keys(seed, epoch, np.array([shard]), np.array([row]), op).tolist() == [expected]


@modest
@given(st.lists(permuted_words))
def test_arrays_are_mixed_as_words_are(given_words):
    mixed = mix_in_place(np.array(given_words, np.uint64))
    assert mixed.tolist() == [mix(word) for word in given_words]


@modest
@given(permuted_words, st.lists(permuted_words, max_size=3), st.lists(st.integers(0, 2**63 - 1)))
def test_keys_are_extended_as_they_are_made(seed, parts, last):
    found = extended(key(seed, *parts), np.array(last, np.int64))
    assert found.tolist() == [key(seed, *parts, each) for each in last]


@modest
@given(permuted_words, st.integers(1, 300))
def test_permutation_is_what_the_documentation_defines(keyed, length):
    assert permutation(keyed, length).tolist() == plain.permutation(keyed, length)


@modest
@given(st.lists(permuted_words, min_size=1, max_size=6), st.integers(0, 70))
def test_permutations_made_together_equal_those_made_one_by_one(keys, length):
    together = permutations(keys, length)
    assert together.tolist() == [permutation(each, length).tolist() for each in keys]
    assert all(sorted(each) == list(range(length)) for each in together.tolist())


def test_every_place_of_a_permutation_is_equally_likely():
    length, trials = 8, 8000
    found = permutations(extended(key(5), np.arange(trials)), length)
    counts = np.stack([np.bincount(column, minlength=length) for column in found.T.astype(int)])
    expected = trials / length
    # 49 degrees of freedom: a value above 85 would come once in a thousand keys.
    assert ((counts - expected) ** 2 / expected).sum() < 85


def test_keys_of_different_lengths_differ():
    assert len({key(0), key(0, 0), key(0, 0, 0), key(0, 1), key(1), key(1, 0)}) == 6


def test_sample_keys_differ_by_every_part():
    base = (1, 2, 3, 4, "crop")
    changed = [base, (0, 2, 3, 4, "crop"), (1, 0, 3, 4, "crop"), (1, 2, 0, 4, "crop")]
    changed += [(1, 2, 3, 0, "crop"), (1, 2, 3, 4, "flip"), (1, 2, 4, 3, "crop")]
    made = {int(sample_keys(a, b, np.array([c]), np.array([d]), e)[0]) for a, b, c, d, e in changed}
    assert len(made) == len(changed)


@pytest.mark.parametrize("parts", [(-1,), (1 << 64,), (0, -1), (0, 1 << 64)])
def test_what_is_no_word_is_refused(parts):
    with pytest.raises(ConfigError):
        key(*parts)


WORDS = st.integers(0, 2**64 - 1) | st.integers(0, 5) | st.integers(2**64 - 5, 2**64 - 1)


def _check(rows: Sequence[Sequence[int]]) -> None:
    words = np.array(rows, np.uint64).reshape(len(rows), -1)
    expected = np.sort(words, axis=1)
    sort_rows(words)
    assert (words == expected).all()


@given(st.integers(0, 40).flatmap(lambda n: st.lists(st.lists(WORDS, min_size=n, max_size=n))))
def test_rows_of_any_words_are_sorted_each_by_itself(rows: list[list[int]]) -> None:
    _check(rows or [[]])


@pytest.mark.parametrize("count", [0, 1, 2, 255, 1023, 1024, 1025, 70_001, 300_000])
def test_hashes_are_sorted(count: int) -> None:
    _check(np.random.default_rng(count).integers(0, 2**64, (2, count), np.uint64).tolist())


@pytest.mark.parametrize(
    "words",
    [
        np.arange(5000)[::-1],
        np.zeros(5000),
        np.arange(5000, dtype=np.uint64)[::-1] * np.uint64(2**51),
        np.arange(5000, dtype=np.uint64) % np.uint64(3) * np.uint64(2**62),
        np.repeat(np.array([2**63, 1], np.uint64), 70_000),
    ],
)
def test_colliding_words_are_sorted(words: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
    _check([words.tolist()])
