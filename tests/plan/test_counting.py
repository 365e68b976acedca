from __future__ import annotations

from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from dataplane.model.errors import ConfigError
from dataplane.plan.counting import (
    SHARES_SUM,
    SLOTS_MAX,
    CountingTree,
    by_temperature,
    of_tokens,
    quantised,
)
from plan import golden, plain

FAR = 10**10
weights = st.one_of(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.lists(st.floats(0, 1), min_size=1, max_size=60),
    st.lists(st.floats(-20, 0).map(lambda power: 10**power), min_size=1, max_size=60),
).filter(any)
modest = settings(max_examples=100)


def pareto(count):
    """Weights of sources as they are on the web: few are large."""
    return [(1 + source) ** -1.2 for source in range(count)]


@modest
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


@modest
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


@modest
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
    with pytest.raises(ConfigError, match="a source of 10 samples would not be read beside one of"):
        by_temperature([10, 1000], 0.001)


@pytest.mark.parametrize("wrong", [[-1.0, 2.0], [float("nan")], [float("inf")], [0.0, 0.0]])
def test_weights_that_are_no_weights_are_refused(wrong):
    with pytest.raises(ConfigError, match="weight"):
        quantised(wrong)
