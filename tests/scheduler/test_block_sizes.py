"""Decoded sizes are expected from those seen before, and seldom too small."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataplane.scheduler.dataset import DatasetBlocks, DecodedParts, Marks

INDEXED = 1 << 20


def _dataset(indexed: list[int]) -> DatasetBlocks:
    sizes = np.array(indexed, np.int64)
    marks = Marks.of(sizes.copy(), sizes, np.ones(len(sizes), np.bool_))
    return DatasetBlocks(1, "d", marks, sizes, sizes, url=str)


def test_until_a_block_was_decoded_the_index_is_believed() -> None:
    dataset = _dataset([1000, 0, 2000])
    assert dataset.decoded(np.arange(3)).tolist() == [1000, 0, 2000]
    assert [dataset.decoded_bytes(block) for block in range(3)] == [1000, 0, 2000]


def test_a_decoded_block_is_known_exactly_and_others_become_as_large_a_part() -> None:
    dataset = _dataset([10_000, 0, 20_000, 30_000])
    dataset.was_decoded(2, 8000)
    assert dataset.decoded_bytes(2) == 8000
    assert 4000 <= dataset.decoded_bytes(0) <= 4100
    assert dataset.decoded_bytes(1) == 0
    dataset.was_decoded(0, 9000)
    assert dataset.decoded_bytes(2) == 8000
    assert dataset.decoded_bytes(3) >= 27_000


def test_one_block_larger_than_indexed_does_not_make_others_seem_larger() -> None:
    dataset = _dataset([1000, 1000])
    dataset.was_decoded(0, 1 << 40)
    assert dataset.decoded_bytes(0) == 1 << 40
    assert dataset.decoded_bytes(1) == 1000


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 21)), min_size=1))
def test_many_are_expected_as_each_is(blocks: list[tuple[int, int]]) -> None:
    dataset = _dataset([indexed for indexed, _ in blocks])
    for block, (indexed, decoded) in enumerate(blocks):
        if indexed and block % 2:
            dataset.was_decoded(block, decoded)
        together = dataset.decoded(np.arange(len(blocks))).tolist()
        assert together == [dataset.decoded_bytes(one) for one in range(len(blocks))]


@given(st.floats(0.01, 0.9), st.floats(1e-6, 0.09))
def test_few_blocks_are_larger_than_expected_however_they_grow(first: float, spread: float) -> None:
    """The worst case: each is larger than any before."""
    parts, too_small = DecodedParts(), 0
    for part in np.linspace(first, first + spread, 5000).tolist():
        decoded = int(part * INDEXED)
        too_small += decoded > parts.expected(INDEXED)
        parts.seen(INDEXED, decoded)
    most = 2 + math.log(max(spread * INDEXED / 64, 1)) / math.log(9 / 8)
    assert too_small <= most
