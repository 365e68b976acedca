"""The plans of a walk cover the steps of the slice exactly once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.model.changes import EpochSteps
from dataplane.model.config import JobSpec
from dataplane.model.errors import ConfigError
from dataplane.model.records import Cut, End, Exhausted, ImageSpec, PackSpec, Stream, View
from dataplane.plan.mixed_order import MixedOrder, SourceOrder
from dataplane.plan.mixture import Mixed, plan_of
from dataplane.plan.order import Order
from dataplane.plan.slices import Slice
from dataplane.rpc.messages import Batch
from dataplane.rpc.tasks import Render
from dataplane.scheduler.walk import Plan, SlabSizes, Walk


@st.composite
def walks(draw: st.DrawFn) -> tuple[Walk, Order, Slice, Stream, int]:
    rows = np.array(draw(st.lists(st.integers(1, 9), min_size=1, max_size=10)), np.int64)
    total = int(rows.sum())
    dp_size = draw(st.integers(1, min(total, 4)))
    batch = draw(st.integers(dp_size, max(total, dp_size)))
    spec = JobSpec(
        "f", draw(st.integers(0, 9)), draw(st.booleans()), draw(st.integers(1, 3)),
        draw(st.integers(1, 20)), batch, draw(st.sampled_from(End)),
    )  # fmt: skip
    cursor = draw(st.integers(0, total))
    epoch = draw(st.integers(0, 2))
    order = Order(rows, spec.seed, spec.shuffle, spec.lanes, spec.window, epoch)
    at = Stream(
        epoch, cursor, draw(st.integers(0, dp_size - 1)), dp_size,
        draw(st.integers(0, 3)), draw(st.integers(1, 3)),
    )  # fmt: skip
    most = draw(st.integers(1, 8))
    own = Slice(EpochSteps(total, cursor, batch, spec.end, dp_size), at.dp_rank)
    return Walk(spec, order, at, SlabSizes(most, most, 0)), order, own, at, most


def _all(walk: Walk, counts: st.SearchStrategy[int], data: st.DataObject) -> list[Plan]:
    plans: list[Plan] = []
    while True:
        count = data.draw(counts)
        some = walk.next_plans(count)
        plans += some
        if len(some) < count:
            assert walk.next_plans(3) == []
            return plans


def _samples(plan: Plan) -> list[tuple[int, int]]:
    assert list(plan.blocks) == sorted(set(plan.blocks))
    assert set(plan.row_index[:, 0].tolist()) == set(range(len(plan.blocks)))
    assert plan.row_index.dtype == np.int32
    return [(plan.blocks[b], r) for b, r in plan.row_index.tolist()]


@given(walks(), st.data())
def test_the_plans_of_a_walk_are_the_steps_of_its_slice(
    drawn: tuple[Walk, Order, Slice, Stream, int], data: st.DataObject
) -> None:
    walk, order, own, at, most = drawn
    assert walk.step_count == own.step_count
    plans = _all(walk, st.integers(1, 4), data)
    batches = [batch for plan in plans for batch in plan.batches]
    steps = list(range(at.first_step, own.step_count, at.step_stride))
    assert [batch.step for batch in batches] == steps
    found = [sample for plan in plans for sample in _samples(plan)]
    positions = [own.positions(step) for step in steps]
    expected = [
        pair
        for each in positions
        for pair in zip(*(part.tolist() for part in order.locate(each)), strict=True)
    ]
    assert found == expected
    assert [batch.rows for batch in batches] == [len(each) for each in positions]
    sizes = [len(plan.batches) for plan in plans]
    assert sizes[:1] in ([], [1])
    assert all(size <= most for size in sizes)
    assert all(b <= 2 * a for a, b in itertools.pairwise(sizes))


def test_plans_are_shorter_where_a_source_of_few_packs_is_drawn_too_often() -> None:
    counts, share = (1000, 1), 1 << 31
    plan = plan_of(Mixed(counts, (share, share), (0, 0), 1, Exhausted.CYCLE, 2000, 1), 0)
    sources = [SourceOrder(np.array([count])) for count in counts]
    order = MixedOrder(plan, sources, 7, True, 1)
    view = View(pack=PackSpec("tokens", 8))
    spec = JobSpec("f", 7, True, 1, 1, 20, End.RAGGED, view=view)
    walk = Walk(spec, order, Stream(0, 0, 0, 1), SlabSizes(64, 64, 0), is_ahead=True)
    plans = walk.next_plans(1000)
    assert [batch.step for plan in plans for batch in plan.batches] == list(range(100))
    rows = np.concatenate([plan.blocks[plan.row_index[:, 0]] for plan in plans])
    assert rows.tolist() == order.locate(np.arange(2000))[0].tolist()
    assert 1 < max(len(plan.batches) for plan in plans) < 64


@given(walks(), st.data())
def test_a_plan_that_is_split_is_the_same_batches_of_the_blocks_that_each_needs(
    drawn: tuple[Walk, Order, Slice, Stream, int], data: st.DataObject
) -> None:
    for plan in _all(drawn[0], st.just(2), data):
        if len(plan.batches) < 2:
            continue
        first, rest = plan.split(data.draw(st.integers(1, len(plan.batches) - 1)))
        assert (*first.batches, *rest.batches) == plan.batches
        assert _samples(first) + _samples(rest) == _samples(plan)


@settings(max_examples=15)
@given(st.integers(1, 64), st.integers(1, 256), st.integers(1, 1000))
def test_plans_become_as_long_as_slabs_turn_out_to_have_room(first, most, batch_bytes):
    rows = np.array([100] * 10, np.int64)
    spec = JobSpec("f", 1, False, 1, 1, 1, End.RAGGED)
    order = Order(rows, 1, False, 1, 1, 0)
    walk = Walk(spec, order, Stream(0, 0, 0, 1), SlabSizes(min(first, most), most, 0))
    slab_bytes, sizes = 10_000, []
    while plans := walk.next_plans(1):
        count = len(plans[0].batches)
        sizes.append(count)
        fits = max(1, min(count, slab_bytes // batch_bytes))
        walk.sizes.fitted(fits, fits * batch_bytes, slab_bytes, cut=fits < count)
    assert sum(sizes) == 1000
    # Except for the last slab of the epoch, and the short ones at its start.
    assert set(sizes[9:-1]) <= {min(most, slab_bytes // batch_bytes)}


def test_what_batches_take_is_followed_with_room_for_how_much_they_differ():
    sizes = SlabSizes(1, 1000, 0)
    found = []
    for batch_bytes in (100, 200, 125, 125):
        sizes.fitted(1, batch_bytes, 10_000, cut=True)
        found.append(sizes.batches)
    # Means of 100, 125, 125, 125; spreads of 0, 25, 18.75, 14.06.
    assert found == [100, 57, 61, 65]
    sizes.fitted(1, 9000, 10_000, cut=False)
    assert sizes.batches == 65, "of a slab that is short nothing is learned"
    sizes.fitted(1, 20_000, 10_000, cut=True)
    assert sizes.batches == 1


def test_a_wide_table_gets_no_more_pieces_because_each_takes_long() -> None:
    """What a piece takes for its columns it takes however few rows it has."""
    for column_count, found in ((3, 6), (1000, 1)):
        sizes = SlabSizes(4, 4, 0, is_divisible=True, column_count=column_count)
        pieces = 1
        for _ in range(40):
            alone_s = 0.00001 * column_count
            sizes.took([Batch(0, 1000, 1000)], 0.033 + pieces * alone_s)
            pieces = sizes.pieces(1000, 64)
        assert pieces == found


def test_busy_workers_get_larger_pieces() -> None:
    sizes = SlabSizes(4, 4, 0, is_divisible=True, row_s=0.0014)
    assert sizes.pieces(64, 16) == 16
    assert sizes.pieces(64, 16, are_busy=True) == 4
    sizes.row_s = 0.1
    assert sizes.pieces(64, 16, are_busy=True) == 16


def test_an_empty_batch_changes_no_estimate() -> None:
    sizes = SlabSizes(4, 4, 0, is_divisible=True, row_s=0.001)
    sizes.took([Batch(0, 0, 0)], 1.0)
    assert sizes.row_s == 0.001


def test_a_slab_of_less_than_half_of_the_usual_batches_changes_no_estimate() -> None:
    for usual, found in ((8, 100), (9, 9)):
        sizes = SlabSizes(usual, 1000, 0)
        sizes.fitted(4, 400, 10_000, cut=False)
        assert sizes.batches == found


@given(st.integers(0, 9), st.integers(1, 3), st.integers(1, 6), st.integers(1, 4))
def test_aligned_plans_end_at_the_same_steps_of_the_epoch_whoever_walks(
    later: int, stride: int, batches: int, batch: int
) -> None:
    spec = JobSpec("f", 1, False, 1, 1, batch, End.RAGGED)
    order = Order(np.array([100]), 1, False, 1, 1, 0)
    at = Stream(0, later * stride * batch, 0, 1, 0, stride)
    walk = Walk(spec, order, at, SlabSizes(batches, 99, 0), is_aligned=True)
    plans = walk.next_plans(1000)
    ordinals = [walk.position_of(plan) // (batch * stride) for plan in plans]
    ends = {at + len(plan.batches) for at, plan in zip(ordinals, plans, strict=True)}
    whole = range(-(-later // batches) * batches, ordinals[-1], batches)
    assert ends.issuperset(each for each in whole if each > later)


def test_a_walk_over_images_says_how_they_are_made_and_whether_they_are_cropped() -> None:
    order = Order(np.array([4]), 1, False, 1, 1, 3)
    for images, crops in (
        ((), False),
        ((ImageSpec("x", 8, 8, Cut.WHOLE),), False),
        ((ImageSpec("x", 8, 8, Cut.WHOLE), ImageSpec("y", 8, 8, Cut.RANDOM)), True),
    ):
        spec = JobSpec("f", 1, False, 1, 1, 1, transforms=images)
        walk = Walk(spec, order, Stream(3, 0, 0, 1), SlabSizes(1, 1, 0))
        assert walk.render == (Render(images, 1, 3) if images else None)
        assert walk.crops == crops


@given(walks(), st.data())
def test_a_walk_of_some_steps_has_one_plan_of_them(
    drawn: tuple[Walk, Order, Slice, Stream, int], data: st.DataObject
) -> None:
    whole, order, own, at, most = drawn
    spec = JobSpec("f", global_batch=whole.global_batch, end=own.steps.end)
    steps = range(at.first_step, own.step_count, at.step_stride)
    if steps:
        count = data.draw(st.integers(1, len(steps)))
        walk = Walk(spec, order, at, SlabSizes(most, most, 0), count=count)
        (plan,) = walk.next_plans(2)
        assert walk.is_planned
        assert [batch.step for batch in plan.batches] == list(steps[:count])
        expected = own.positions_of_steps(at.first_step, count, at.step_stride)
        blocks, rows = order.locate(expected.positions)
        assert _samples(plan) == list(zip(blocks.tolist(), rows.tolist(), strict=True))
    with pytest.raises(ConfigError):
        Walk(spec, order, at, SlabSizes(most, most, 0), count=len(steps) + 1)
