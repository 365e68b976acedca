from __future__ import annotations

from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, example, given

from dataplane.model.errors import ConfigError
from dataplane.model.records import Exhausted, ShareChange
from dataplane.plan import mixed_order
from dataplane.plan.counting import (
    SHARES_SUM,
    SLOTS_MAX,
    CountingTree,
    by_temperature,
    of_tokens,
    quantised,
)
from dataplane.plan.mixed_order import NEVER, MixedOrder, SourceOrder
from dataplane.plan.mixture import Mixed, plan_of
from dataplane.plan.permute import key
from plan import golden, plain

layouts = st.lists(st.integers(1, 12), min_size=1, max_size=6)
words = st.integers(0, 2**64 - 1)


@st.composite
def mixtures(draw):
    """A mixture, the layouts of its sources, and changes of its shares."""
    rows = draw(st.lists(layouts, min_size=1, max_size=4))
    counts = tuple(map(sum, rows))
    exhausted = draw(st.sampled_from(Exhausted))
    batch = draw(st.sampled_from([1, 1, 1, 3]))
    lanes = draw(st.integers(1, 6)) if batch == 1 else 1
    shares = st.lists(st.integers(1, 20), min_size=len(rows), max_size=len(rows))
    is_cycle = exhausted is Exhausted.CYCLE
    passes = tuple(draw(st.integers(0 if is_cycle else 1, 3)) for _ in rows)
    length = draw(st.just(0) | st.integers(1, sum(counts)))
    length -= length % batch
    of = Mixed(
        counts, quantised(draw(shares)), passes, lanes, exhausted, length, batch,
        draw(st.sampled_from([2, 8, 1024])),
    )  # fmt: skip
    epoch = draw(st.integers(0, 2))
    at = st.tuples(st.integers(0, 2), st.integers(0, 60))
    changes = [
        ShareChange(*where, quantised(draw(shares)))
        for where in sorted(draw(st.lists(at, max_size=2 if of.length else 0)))
    ]
    return of, rows, epoch, tuple(changes)


def order_of(of, rows, epoch=0, changes=(), seed=7, window=3, shuffle=True):
    try:
        plan = plan_of(of, epoch, changes)
    except ConfigError:
        assume(False)
    sources = [SourceOrder(np.array(each), window, 1) for each in rows]
    return MixedOrder(plan, sources, seed, shuffle, of.lanes)


def everything(order):
    return np.arange(order.sample_count)


def twin_of(of, epoch, changes, seed=7):
    told = [(change.epoch, change.position, change.shares) for change in changes]
    return plain.mixture(
        seed, of.counts, of.shares, of.passes_max, of.lanes, of.exhausted.value, of.length,
        of.batch, of.round_steps, epoch, told,
    )  # fmt: skip


@given(mixtures())
def test_a_mixture_is_what_the_documentation_defines(drawn):
    of, _rows, epoch, changes = drawn
    order = order_of(*drawn)
    found = np.stack(order.samples_at(everything(order)), axis=1).tolist()
    assert list(map(tuple, found)) == twin_of(of, epoch, changes)


@given(mixtures())
def test_an_epoch_has_the_next_samples_of_each_source_once(drawn):
    order = order_of(*drawn)
    plan = order.plan
    source, sample = order.samples_at(everything(order))
    for one, (base, count) in enumerate(zip(plan.base, plan.counts, strict=True)):
        assert np.array_equal(np.sort(sample[source == one]), np.arange(base, base + count))
    of, rows, epoch, changes = drawn
    after = order_of(of, rows, epoch + 1, changes).plan
    assert np.array_equal(after.base, plan.base + plan.counts)


@given(mixtures(), words)
def test_samples_are_those_of_each_source_in_its_own_order(drawn, seed):
    of, rows, _, _ = drawn
    order = order_of(*drawn, seed=seed)
    source, sample = order.samples_at(everything(order))
    blocks, found = order.locate(everything(order))
    starts = np.cumsum([0, *map(len, rows)])
    for one, sizes in enumerate(rows):
        mine = source == one
        numbers = sample[mine] // of.counts[one]
        for number in np.unique(numbers).tolist():
            expected = plain.order(sizes, key(seed, 7, one), of.lanes, 3, number, 1)
            at = np.flatnonzero(mine)[numbers == number]
            pairs = zip((blocks[at] - starts[one]).tolist(), found[at].tolist(), strict=True)
            places = (sample[at] % of.counts[one]).tolist()
            assert list(pairs) == [expected[place] for place in places]


@given(mixtures(), st.booleans())
def test_positions_of_finds_every_position_of_a_row_and_no_other(drawn, shuffle):
    order = order_of(*drawn, shuffle=shuffle)
    blocks, rows = order.locate(everything(order))
    for block, row in {*zip(blocks.tolist()[:20], rows.tolist()[:20], strict=True)}:
        expected = np.flatnonzero((blocks == block) & (rows == row))
        assert np.array_equal(order.positions_of(block, row), expected)


@example(
    (Mixed((7, 5), quantised([3, 1]), (1, 1), 4, Exhausted.RENORMALISE, 0, 1, 8), [[7], [5]], 0, ())
)
@given(mixtures())
def test_the_reads_before_a_position_are_of_all_rows_before_it_and_of_no_other(drawn):
    order = order_of(*drawn)
    starts = np.cumsum([0, *map(len, drawn[1])]).tolist()
    rows = np.stack(order.locate(everything(order)), axis=1).tolist()
    for cursor in {0, 1, *range(2, len(rows), len(rows) // 8 + 1), len(rows) - 1, len(rows)}:
        found = set()
        for start, passes in zip(starts, order.read_before(cursor), strict=False):
            for read in passes:
                at = np.concatenate([np.arange(read.begin, read.end), read.others])
                blocks, places = read.order.locate(at)
                found |= set(zip((blocks + start).tolist(), places.tolist(), strict=True))
        assert found == set(map(tuple, rows[:cursor]))


@given(mixtures())
def test_samples_of_a_block_stand_within_its_span(drawn):
    rows = drawn[1]
    order = order_of(*drawn)
    count = sum(map(len, rows))
    first, last = order.block_span(np.arange(count))
    blocks, _ = order.locate(everything(order))
    for block in range(count):
        at = np.flatnonzero(blocks == block)
        if len(at):
            assert 0 <= first[block] <= at[0] <= at[-1] <= last[block] < order.sample_count
        one = order.block_span(np.array([block]))
        assert (first[block], last[block]) == (one[0][0], one[1][0])
    assert (first[first < 0] == NEVER).all()
    assert (last[first < 0] == NEVER).all()


@given(mixtures(), st.data())
def test_positions_are_found_alike_in_any_company(drawn, more):
    order = order_of(*drawn)
    whole = np.stack(order.locate(everything(order)))
    positions = st.lists(st.integers(0, order.sample_count - 1), max_size=50)
    some = np.array(more.draw(positions), np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixed_order, "_ROUNDS_BYTES", 1)
        assert np.array_equal(order_of(*drawn).locate(some), whole[:, some])
    assert np.array_equal(order.locate(some), whole[:, some])


@given(mixtures(), st.integers(0, 60))
def test_a_change_to_the_same_shares_changes_nothing(drawn, position):
    of, rows, epoch, _ = drawn
    plain_order = order_of(of, rows, epoch)
    changed = order_of(of, rows, epoch, (ShareChange(0, position, of.shares),))
    at = everything(plain_order)
    assert changed.sample_count == plain_order.sample_count
    assert np.array_equal(changed.locate(at), plain_order.locate(at))


@given(mixtures(), st.integers(0, 60))
def test_a_change_leaves_what_is_before_it(drawn, position):
    of, rows, epoch, _ = drawn
    assume(of.length)
    before = order_of(of, rows, epoch)
    other = quantised([2.0] + [1.0] * (len(rows) - 1))
    after = order_of(of, rows, epoch, (ShareChange(epoch, position, other),))
    at = np.arange(min(position, of.length))
    assert np.array_equal(after.samples_at(at), before.samples_at(at))


@pytest.mark.parametrize("dp_size", [2, 3, 4, 8, 96])
def test_ranks_and_batches_have_even_shares_of_each_source(dp_size):
    counts = (10**8,) * 4
    of = Mixed(counts, quantised([70, 20, 7, 3]), (1,) * 4, 96)
    order = order_of(of, [[10**6] * 100] * 4)
    source, _ = order.samples_at(np.arange(960 * 1024))
    exact = np.array([0.70, 0.20, 0.07, 0.03])
    for rank in range(dp_size):
        mine = np.bincount(source[rank::dp_size], minlength=4)
        assert np.abs(mine / mine.sum() - exact).max() < 1e-3
    batches = np.stack([np.bincount(one, minlength=4) for one in source.reshape(-1, 960)])
    assert batches.std(axis=0).max() < 3  # independent draws: 14


def test_a_lane_reads_one_lane_of_each_source():
    of = Mixed((10**6, 10**6), quantised([3, 1]), (0, 0), 8, Exhausted.CYCLE, 10**6)
    order = order_of(of, [[1000] * 1000] * 2)
    at = np.arange(10**6)
    source, sample = order.samples_at(at)
    for one in range(2):
        turned = (at - sample)[source == one] % 8
        assert len(np.unique(turned)) == 1


def test_golden_mixtures():
    for (counts, shares, lanes, name, length, epoch), expected in golden.MIXTURES.items():
        exhausted = Exhausted(name)
        passes = (int(exhausted is not Exhausted.CYCLE),) * len(counts)
        of = Mixed(counts, shares, passes, lanes, exhausted, length)
        order = order_of(of, [[each] for each in counts], epoch)
        pairs = zip(*order.samples_at(everything(order)), strict=True)
        assert " ".join(f"{a}.{b}" for a, b in pairs) == expected


def test_golden_positions_of_large_mixtures():
    for (lanes, steps, position), (source, sample) in golden.FAR_MIXTURES.items():
        counts = (lanes * 10**9,) * 4
        of = Mixed(counts, (70, 20, 7, 3), (1,) * 4, lanes, round_steps=steps)
        # Sources of a multiple of the lanes begin at lane 0.
        order = order_of(of, [[each] for each in counts], window=1)
        found = order.samples_at(np.array([position]))
        assert (int(found[0][0]), int(found[1][0])) == (source, sample)
        assert order.positions_of_samples(source, np.array([sample])).tolist() == [position]


def test_the_epoch_stops_when_the_first_source_is_exhausted():
    plan = plan_of(Mixed((1000, 100), quantised([3, 1]), (1, 1), 4), 0)
    assert plan.counts[1] == 100
    assert abs(plan.counts[0] - 300) < 4 * 3.4


def test_other_sources_go_on_without_an_exhausted_one():
    of = Mixed((1000, 101, 50), quantised([1, 1, 1]), (1, 2, 1), 4, Exhausted.RENORMALISE)
    plan = plan_of(of, 0)
    assert plan.counts.tolist() == [1000, 202, 50]
    assert plan.sample_count == 1252


def test_sources_are_read_again_until_all_were_read_once():
    of = Mixed((1000, 100), quantised([1, 1]), (0, 0), 4, Exhausted.CYCLE)
    plan = plan_of(of, 0)
    assert 1000 <= plan.counts[0] < 1016
    assert abs(plan.counts[0] - plan.counts[1]) < 4 * 7


def test_a_length_that_the_sources_do_not_have_is_refused():
    of = Mixed((100, 100), quantised([1, 1]), (1, 1), 1, Exhausted.STOP, 1000)
    with pytest.raises(ConfigError, match="exhausted='cycle'"):
        plan_of(of, 0)


def test_an_epoch_without_a_sample_is_refused():
    of = Mixed((100, 1), quantised([2**32 - 1, 1]), (1, 1), 1, batch=3)
    with pytest.raises(ConfigError, match="no samples"):
        plan_of(of, 0)


def test_later_epochs_are_planned_without_the_ones_before():
    of = Mixed((1000, 100), quantised([3, 1]), (0, 0), 4, Exhausted.CYCLE, 400)
    plan = plan_of(of, 10**12)
    first = plan_of(of, 0)
    assert plan.base.tolist() == (first.counts * 10**12).tolist()


def test_a_position_that_is_not_there_is_refused():
    order = order_of(Mixed((10,), (1 << 32,), (1,)), [[10]])
    for wrong in (-1, 10):
        with pytest.raises(ConfigError, match="they run from 0 to 9"):
            order.locate(np.array([wrong]))
    with pytest.raises(ConfigError, match="no block 1"):
        order.block_span(np.array([1]))


FAR = 10**10
weights = st.one_of(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.lists(st.floats(0, 1), min_size=1, max_size=60),
    st.lists(st.floats(-20, 0).map(lambda power: 10**power), min_size=1, max_size=60),
).filter(any)


def pareto(count):
    """Weights of sources as they are on the web: few are large."""
    return [(1 + source) ** -1.2 for source in range(count)]


@given(weights, st.lists(st.integers(0, 2**40), min_size=1, max_size=20))
def test_counts_are_exact_to_less_than_three_and_a_half(given_weights, slots):
    shares = quantised(given_weights)
    found = CountingTree(shares).counts(np.array(slots))
    assert found.sum(axis=1).tolist() == slots
    for row, k in zip(found.tolist(), slots, strict=True):
        assert all(
            abs(count - Fraction(k * share, SHARES_SUM)) < Fraction(336, 100)
            for count, share in zip(row, shares, strict=True)
        )


@given(weights, st.integers(0, FAR), st.integers(1, 200))
def test_counts_are_what_the_documentation_defines(given_weights, first, count):
    shares = quantised(given_weights)
    slots = list(range(first, first + count))
    found = CountingTree(shares).counts(np.array(slots))
    root = plain.tree(shares)
    for k, row in zip(slots, found.tolist(), strict=True):
        expected = plain.counts(root, k)
        assert row == [expected.get(source, 0) for source in range(len(shares))]
    rises = np.diff(found, axis=0)
    assert np.isin(rises, (0, 1)).all()


@given(weights, st.integers(1, FAR))
def test_slots_for_is_the_smallest_number_of_slots_with_a_count(given_weights, count):
    tree, shares = CountingTree(quantised(given_weights)), quantised(given_weights)
    sources = np.flatnonzero(shares)
    slots = tree.slots_for(sources, np.full(len(sources), count))
    for source, k in zip(sources.tolist(), slots.tolist(), strict=True):
        if k == SLOTS_MAX:
            assert count * SHARES_SUM > (SLOTS_MAX - 4 * SHARES_SUM) * shares[source]
            continue
        before, at = tree.counts(np.array([k - 1, k]))[:, source].tolist()
        assert (before, at) == (count - 1, count)


def test_100_sources_of_very_different_weight_are_exact_at_every_round():
    shares = quantised(pareto(100))
    slots = np.arange(0, 1024 * 2000, 1024)
    exact = slots[:, None] * np.array(shares) / SHARES_SUM
    assert np.abs(CountingTree(shares).counts(slots) - exact).max() < 3.4


def test_golden_counts():
    for shares, expected in golden.COUNTS.items():
        found = CountingTree(shares).counts(np.arange(len(expected) + 1))
        assert "".join(map(str, np.diff(found, axis=0).argmax(axis=1))) == expected


@given(weights)
def test_shares_add_up_and_are_in_proportion(given_weights):
    shares, total = quantised(given_weights), sum(map(Fraction, given_weights))
    assert sum(shares) == SHARES_SUM
    for share, weight in zip(shares, given_weights, strict=True):
        assert (share > 0) == (weight > 0)
        exact = Fraction(weight) * SHARES_SUM / total
        assert abs(share - exact) < 1 + len(shares)


def test_shares_of_equal_weights_differ_by_one_at_most():
    assert quantised([1, 1, 1]) == (1431655766, 1431655765, 1431655765)
    assert quantised([0.7, 0.3]) == quantised([7, 3])


def test_weights_of_tokens_count_longer_samples_less():
    assert quantised(of_tokens([1, 1], [100, 300])) == quantised([3, 1])
    with pytest.raises(ConfigError, match="mean_length"):
        of_tokens([1], [0])


def test_a_temperature_makes_shares_more_equal():
    assert by_temperature([100, 400], 1) == [0.25, 1]
    assert by_temperature([100, 400], 2) == [0.5, 1]
    assert by_temperature([100, 400], float("inf")) == [1, 1]
    with pytest.raises(ConfigError, match="temperature"):
        by_temperature([1], 0)


def test_a_temperature_drops_no_source():
    assert all(by_temperature([1, 1 << 20], 0.1))
    with pytest.raises(
        ConfigError, match="a source of 10 samples would get weight 0 beside one of"
    ):
        by_temperature([10, 1000], 0.001)


@pytest.mark.parametrize("wrong", [[-1.0, 2.0], [float("nan")], [float("inf")], [0.0, 0.0]])
def test_weights_that_are_no_weights_are_refused(wrong):
    with pytest.raises(ConfigError, match="weight"):
        quantised(wrong)
