"""Shares of rows: as the page says, disjoint, and the same whatever else the dataset has."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from manifests import small

from dataplane.model.errors import ConfigError
from dataplane.model.records import View
from dataplane.plan.manifest import Manifest
from dataplane.plan.permute import Domain, key
from dataplane.plan.shards import starts_of
from dataplane.plan.texts import Texts
from dataplane.plan.views import (
    check_shares,
    chosen,
    chosen_counts,
    limited,
    shard_words,
    shared_counts,
)
from dataplane.transforms.options import view_of
from plan import golden, plain

UNIT = 1 << 32
BOUNDS = st.integers(0, UNIT)
VIEWS = st.builds(
    lambda sample, ends: View(sample=sample, split_from=min(ends), split_to=max(ends)),
    BOUNDS,
    st.tuples(BOUNDS, BOUNDS).filter(lambda ends: ends[0] != ends[1]) | st.just((0, 0)),
)


def test_the_keys_of_rows_are_the_golden_ones() -> None:
    for (use, name, row), expected in golden.SHARE_KEYS.items():
        word = shard_words(Texts.of([f"s3://b/{name}", "s3://b/\U0001f600"])).item(0)
        assert key(0, Domain.SHARE, use, word, row) == expected == plain.share_key(use, name, row)


@given(VIEWS, st.integers(0, 1000), st.integers(0, 50))
def test_rows_are_chosen_as_the_page_says(view: View, first: int, count: int) -> None:
    word = shard_words(Texts.of(["/data/en/a", "/data/b"])).item(0)
    expected = [
        plain.is_in_shares("en/a", row, view.sample, view.split_from, view.split_to)
        for row in range(first, first + count)
    ]
    assert chosen(view, word, first, count).tolist() == expected


@given(VIEWS, st.lists(st.integers(1, 40), min_size=1, max_size=8), st.booleans())
def test_counts_are_those_of_the_chosen_rows(view: View, rows: list[int], long: bool) -> None:
    sizes = np.array([*rows, 70_000 if long else 1])
    first, words = starts_of(sizes)[:-1], np.arange(len(sizes), dtype=np.uint64)
    expected = [
        int(chosen(view, word, at, count).sum())
        for word, at, count in zip(words.tolist(), first.tolist(), sizes.tolist(), strict=True)
    ]
    assert chosen_counts(view, words, first, sizes).tolist() == expected


@given(st.floats(1e-6, 1 - 1e-6))
def test_a_share_and_its_complement_have_every_row_once(share: float) -> None:
    from fractions import Fraction

    first = view_of(split=("train", share))
    rest = 1 - Fraction(str(share))
    last = view_of(split=("validation", float(rest)))
    if Fraction(str(float(rest))) == rest:
        assert (first.split_from, first.split_to) == (0, last.split_from)
    assert last.split_to == UNIT


def test_shards_that_are_added_move_no_row() -> None:
    few, more = (Texts.of([f"s3://b/d/{i}.parquet" for i in range(n)]) for n in (3, 30))
    assert shard_words(few).tolist() == shard_words(more).tolist()[:3]
    moved = Texts.of([f"/mnt/copy/{i}.parquet" for i in range(3)])
    assert shard_words(moved).tolist() == shard_words(few).tolist()


def test_a_view_has_the_blocks_with_rows_and_knows_their_places() -> None:
    whole = small()
    view = whole.viewed(np.array([0, 7, 30]))
    assert view.block_rows.tolist() == [7, 30]
    assert view.sample_count == 37
    assert [view.block_in_shard(block) for block in range(2)] == [whole.block_in_shard(1), 1 - 1]
    assert [shard.empty_blocks for shard in view.shards] == [(0, 1), (0,), ()]
    assert view.block_decoded.tolist() == [35, 56]
    assert view.fingerprint == whole.fingerprint
    assert view != whole


def test_all_rows_are_the_whole_dataset() -> None:
    whole = small()
    view = whole.viewed(whole.block_rows)
    assert view.shards == whole.shards
    assert np.array_equal(view.block_rows, whole.block_rows)


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(0, 60))
def test_a_limit_takes_the_first_rows(counts: list[int], limit: int) -> None:
    found = limited(np.array(counts), limit)
    left = limit or sum(counts)
    for mine, all_of in zip(found.tolist(), counts, strict=True):
        assert mine == min(left, all_of)
        left -= mine


def test_shares_of_blocks_count_rows_from_the_start_of_their_shard() -> None:
    whole: Manifest = small()
    view = View(sample=UNIT // 3)
    expected = [
        sum(plain.is_in_shares(name, row, view.sample) for row in rows)
        for name, rows in (("0", range(10)), ("0", range(10, 30)), ("2", range(30)))
    ]
    assert shared_counts(whole, view).tolist() == expected


@pytest.mark.parametrize(
    "view",
    [
        View(sample=UNIT + 1),
        View(split_from=5, split_to=5),
        View(split_to=UNIT + 1),
        View(split_from=1),
        View(limit=-1),
    ],
)
def test_what_is_no_share_is_refused(view: View) -> None:
    with pytest.raises(ConfigError, match="no shares"):
        check_shares(view)
