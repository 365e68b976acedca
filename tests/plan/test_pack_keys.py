"""The packs of each position are drawn with the key of its pass over the dataset."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.model.errors import ConfigError
from dataplane.model.records import Exhausted
from dataplane.plan.mixed_order import MixedOrder, SourceOrder
from dataplane.plan.mixture import Mixed, plan_of
from dataplane.plan.order import Order
from dataplane.plan.packs import KEYS_MAX, PACK_BITS, drawn_rows
from dataplane.plan.windows import distinct
from plan import plain

SEED = 7


def test_packs_of_one_dataset_have_a_key_for_each_block_and_epoch() -> None:
    order = Order(np.array([5, 3, 9]), SEED, True, 1, 4, 2)
    positions = np.arange(17)
    blocks, rows = order.locate(positions)
    used, index = distinct(blocks)
    drawn = drawn_rows(order, positions, blocks, rows, index)
    assert drawn.rows.tolist() == rows.tolist()
    assert drawn.keys == tuple((plain.key(SEED, plain.PACK, 2, block),) for block in used.tolist())


def test_packs_of_a_mixture_have_a_key_for_each_pass_over_their_source() -> None:
    counts, block_rows = (12, 5), (np.array([4, 8]), np.array([2, 3]))
    share = 1 << 31
    plan = plan_of(Mixed(counts, (share, share), (0, 0), 1, Exhausted.CYCLE, 40, 1), 1)
    order = MixedOrder(plan, [SourceOrder(rows, 3) for rows in block_rows], SEED, True, 1)
    positions = np.arange(order.sample_count)
    source, sample = order.samples_at(positions)
    blocks, rows = order.locate(positions)
    used, index = distinct(blocks)
    drawn = drawn_rows(order, positions, blocks, rows, index)
    assert any(len(each) > 1 for each in drawn.keys)
    for at, (of, which) in enumerate(zip(source.tolist(), sample.tolist(), strict=True)):
        own = plain.key(SEED, 7, of)
        key = plain.key(own, plain.PACK, which // counts[of], int(blocks[at]) - 2 * of)
        ordinal, row = divmod(int(drawn.rows[at]), 1 << PACK_BITS)
        assert (drawn.keys[index[at]][ordinal], row) == (key, rows[at])
    assert [len(set(each)) for each in drawn.keys] == [len(each) for each in drawn.keys]
    assert len(drawn.keys) == len(used)


def test_a_source_that_one_slab_would_read_too_often_is_refused() -> None:
    share = 1 << 31
    plan = plan_of(Mixed((1000, 1), (share, share), (0, 0), 1, Exhausted.CYCLE, 1000, 1), 0)
    sources = [SourceOrder(np.array([1000]), 10), SourceOrder(np.array([1]))]
    order = MixedOrder(plan, sources, SEED, True, 1)
    for count, is_refused in ((KEYS_MAX, False), (4 * KEYS_MAX, True)):
        positions = np.arange(count)
        blocks, rows = order.locate(positions)
        _, index = distinct(blocks)
        if is_refused:
            with pytest.raises(ConfigError, match="so few packs"):
                drawn_rows(order, positions, blocks, rows, index)
        else:
            drawn_rows(order, positions, blocks, rows, index)
