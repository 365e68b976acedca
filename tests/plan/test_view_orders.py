"""Orders of views: every row of the view once, the same on any number of ranks, from any cursor."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from dataplane.model.changes import EpochSteps
from dataplane.model.records import End, Region, View
from dataplane.plan.manifest import Manifest
from dataplane.plan.order import Order
from dataplane.plan.shards import Shard
from dataplane.plan.slices import Slice
from dataplane.plan.views import chosen, first_rows, limited, shard_words, shared_counts
from plan import plain

UNIT = 1 << 32
SHARDS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4)
VIEWS = st.builds(
    lambda sample, split, limit: View(sample=sample, split_to=split, limit=limit),
    st.integers(UNIT // 4, UNIT),
    st.just(0) | st.integers(UNIT // 4, UNIT),
    st.just(0) | st.integers(1, 20),
)


def dataset(shards: list[list[int]]) -> Manifest:
    rows = [count for shard in shards for count in shard]
    made = [
        Shard(f"s3://b/{i}.arrow", 10_000, f"e{i}", len(shard), Region(0, 0), False)
        for i, shard in enumerate(shards)
    ]
    numbers = np.repeat(np.arange(len(shards)), [len(shard) for shard in shards])
    return Manifest(
        ("s3://b/",), "arrow", b"", made, numbers.astype(np.int32), np.array(rows),  # type: ignore[arg-type]
        np.arange(len(rows)) * 100, np.full(len(rows), 100), np.full(len(rows), 100),
    )  # fmt: skip


def stored(whole: Manifest, of_view: Manifest, view: View) -> list[list[tuple[int, int]]]:
    """(shard, row) of each row of each block of the view, as workers find them."""
    words, first = shard_words(whole.shards.urls), first_rows(whole)
    assert of_view.kept is not None
    found = []
    for block, kept in enumerate(of_view.kept.tolist()):
        shard, begin = whole.block_shard.item(kept), first.item(kept)
        mask = chosen(view, words.item(shard), begin, whole.block_rows.item(kept))
        rows = (begin + np.flatnonzero(mask)).tolist()[: of_view.block_rows.item(block)]
        assert len(rows) == of_view.block_rows.item(block)
        found.append([(shard, row) for row in rows])
    return found


@settings(max_examples=150)
@given(SHARDS, VIEWS, st.data())
def test_a_view_is_read_once_and_alike_on_any_number_of_ranks(
    shards: list[list[int]], view: View, data: st.DataObject
) -> None:
    whole = dataset(shards)
    counts = limited(shared_counts(whole, view), view.limit)
    expected = [
        (shard, row)
        for shard, rows in enumerate(shards)
        for row in range(sum(rows))
        if plain.is_in_shares(whole.shards.urls[shard].rpartition("/")[2] if len(shards) > 1
                              else "0.arrow", row, view.sample, 0, view.split_to)
    ][: view.limit or None]  # fmt: skip
    assert int(counts.sum()) == len(expected)
    if not expected:
        return
    of_view = whole.viewed(counts)
    rows = stored(whole, of_view, view)
    assert [row for block in rows for row in block] == expected
    shape = (data.draw(st.integers(0, 9)), True, data.draw(st.integers(1, 3)), 4)
    order = Order(of_view.block_rows, *shape, data.draw(st.integers(0, 2)))
    blocks, places = order.locate(np.arange(order.sample_count))
    epoch = [rows[b][p] for b, p in zip(blocks.tolist(), places.tolist(), strict=True)]
    assert sorted(epoch) == expected
    batch, cursor = data.draw(st.integers(4, 9)), data.draw(st.integers(0, len(expected) - 1))
    for size in (1, 2, 3, 4):
        read: dict[int, tuple[int, int]] = {}
        for rank in range(size):
            own = Slice(EpochSteps(order.sample_count, cursor, batch, End.RAGGED, size), rank)
            for step in range(own.step_count):
                for at in own.positions(step).tolist():
                    read[at] = epoch[at]
        assert [read[at] for at in sorted(read)] == epoch[cursor:]
