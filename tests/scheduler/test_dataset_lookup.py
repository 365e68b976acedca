"""A delivery's orders may cover several datasets: which block each number means."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from other_orders import Backwards, Concatenated

import dataplane
from dataplane.model.config import JobSpec
from dataplane.model.records import Stream
from dataplane.plan.order import Order
from dataplane.scheduler.dataset import BlockName, DatasetBlocks, DatasetLookup, Marks
from dataplane.scheduler.next_use import NEVER, NextUse, WalkPosition
from dataplane.scheduler.records import BlockPhase, CachedBlock
from dataplane.scheduler.walk import SlabSizes, Walk

# The code that makes a job's order, and that which explains its lanes and windows.
ORDER_MAKERS = {"plan/order.py", "plan/explain.py", "plan/shuffled.py", "commands/plan.py",
                "commands/plan_reads.py", "plan/orders.py", "plan/mixed_order.py",
                "plan/tombstones.py", "node/own_reads.py", "node/counts.py"}  # fmt: skip


def _blocks(dataset_id: int, count: int) -> DatasetBlocks:
    sizes = np.ones(count, np.int64)
    return DatasetBlocks(
        dataset_id, "d", Marks.of(sizes, sizes, np.ones(count, np.bool_)), sizes, sizes, str
    )


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_every_number_is_one_block_of_one_dataset(counts: list[int], data: st.DataObject) -> None:
    datasets = [_blocks(10 + at, count) for at, count in enumerate(counts)]
    lookup = DatasetLookup(*datasets)
    expected = [BlockName(each.dataset_id, i) for each in datasets for i in range(len(each.stored))]
    assert [lookup.name(number) for number in range(sum(counts))] == expected
    assert [lookup.number(*lookup.find(number)) for number in range(sum(counts))] == [
        *range(sum(counts))
    ]
    numbers = sorted(data.draw(st.sets(st.integers(0, sum(counts) - 1))))
    parts = lookup.parts(np.array(numbers, np.int64))
    found = [(part.dataset.dataset_id, i) for part in parts for i in part.blocks.tolist()]
    assert found == [expected[number] for number in numbers]
    assert all(len(part.blocks) for part in parts)
    for at, each in enumerate(datasets):
        each.marks.keys[:] = np.arange(len(each.stored)) + 100 * at
    keys = lookup.keys(np.array(numbers, np.int64)).tolist()
    assert keys == [100 * (expected[n].dataset_id - 10) + expected[n].block for n in numbers]
    assert all(each in lookup for each in datasets)
    assert _blocks(9, 1) not in lookup


def test_a_block_is_needed_where_the_order_over_all_datasets_has_it() -> None:
    first, second = _blocks(1, 3), _blocks(2, 2)
    lookup = DatasetLookup(first, second)
    orders = [Order(np.full(n, 4), 0, False, 1, 1, 0) for n in (3, 2)]
    order = Backwards(Concatenated(orders, [3, 2]))  # positions 0 to 7 belong to the second dataset
    uses = NextUse(lambda dataset: [WalkPosition(1, order, 5, lookup.number(dataset, 0))])
    blocks = [
        CachedBlock(*lookup.find(number), 1 + number, BlockPhase.READY) for number in range(5)
    ]
    for block in blocks:
        uses.add(block)
    found = [(block.dataset.dataset_id, block.index, use) for block, use in uses.farthest()]
    assert found == [(2, 1, NEVER), (1, 0, 11), (1, 1, 7), (1, 2, 3), (2, 0, 0)]
    assert [uses.use_of(*lookup.find(number)) for number in range(5)] == [11, 7, 3, 0, NEVER]


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.integers(0, 99), st.integers(1, 7))
def test_a_walk_works_with_any_order_that_has_the_three_methods(
    rows: list[int], seed: int, batch: int
) -> None:
    counts = [1, len(rows) - 1]
    parts = [np.array(rows[:1]), np.array(rows[1:])]
    order = Backwards(Concatenated([Order(each, seed, True, 2, 5, 0) for each in parts], counts))
    spec = JobSpec("f", global_batch=batch)
    plans = Walk(spec, order, Stream(0, 0, 0, 1), SlabSizes(4, 4, 0)).next_plans(sum(rows) + 1)
    taken = [(plan.blocks[b], row) for plan in plans for b, row in plan.row_index.tolist()]
    assert taken == list(zip(*order.locate(np.arange(sum(rows))), strict=True))
    assert sorted(taken) == [(b, row) for b, count in enumerate(rows) for row in range(count)]


def test_only_the_code_that_makes_an_order_knows_its_class() -> None:
    root = Path(dataplane.__file__).parent
    knowing = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "dataplane.plan.order"
        if "Order" in {alias.name for alias in node.names}
    }
    assert knowing < ORDER_MAKERS
