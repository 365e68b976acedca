"""The first shard with nulls in a column, computed from the counts of all shards."""

from __future__ import annotations

from dataplane.plan.columns import NEVER, UNKNOWN, NullCounts


def test_the_first_shard_with_a_null_is_named_however_few_it_has() -> None:
    found = NullCounts.of([[0, 1, 0, NEVER], [2, 3, 0, NEVER], [1, 0, 0, NEVER]])
    assert found is not None
    assert found.shards.tolist() == [1, 0, -1, -1]
    assert found.counts.tolist() == [3, 4, 0, NEVER]


def test_a_shard_without_statistics_may_have_nulls_anywhere() -> None:
    found = NullCounts.of([[0, 1, NEVER], []])
    assert found is not None
    assert found.shards.tolist() == [-1, 0, -1]
    assert found.counts.tolist() == [UNKNOWN, 1, UNKNOWN]
    assert NullCounts.of([[], []]) is None
