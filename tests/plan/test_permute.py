from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from dataplane.model.errors import ConfigError
from dataplane.plan.permute import (
    extended,
    key,
    mix,
    mix_in_place,
    permutation,
    permutations,
    sample_keys,
)
from plan import golden, plain

MASK = 2**64 - 1
words = st.integers(0, MASK)
modest = settings(max_examples=150)


@pytest.mark.parametrize(("word", "expected"), golden.MIX.items())
def test_golden_mix(word, expected):
    assert mix(word) == expected


@pytest.mark.parametrize(("parts", "expected"), golden.KEYS.items())
def test_golden_keys(parts, expected):
    assert key(*parts) == expected


@pytest.mark.parametrize(("asked", "expected"), golden.PERMUTATIONS.items())
def test_golden_permutations(asked, expected):
    assert permutation(*asked).tolist() == expected


@pytest.mark.parametrize(("sample", "expected"), golden.SAMPLE_KEYS.items())
def test_golden_sample_keys(sample, expected):
    seed, epoch, shard, row, op = sample
    assert plain.sample_key(*sample) == expected
    assert sample_keys(seed, epoch, np.array([shard]), np.array([row]), op).tolist() == [expected]


@modest
@given(st.lists(words))
def test_arrays_are_mixed_as_words_are(given_words):
    mixed = mix_in_place(np.array(given_words, np.uint64))
    assert mixed.tolist() == [mix(word) for word in given_words]


@modest
@given(words, st.lists(words, max_size=3), st.lists(st.integers(0, 2**63 - 1)))
def test_keys_are_extended_as_they_are_made(seed, parts, last):
    found = extended(key(seed, *parts), np.array(last, np.int64))
    assert found.tolist() == [key(seed, *parts, each) for each in last]


@modest
@given(words, st.integers(1, 300))
def test_permutation_is_what_the_documentation_defines(keyed, length):
    assert permutation(keyed, length).tolist() == plain.permutation(keyed, length)


@modest
@given(st.lists(words, min_size=1, max_size=6), st.integers(0, 70))
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
