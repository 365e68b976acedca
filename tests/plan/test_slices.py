from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from dataplane.model.changes import EpochSteps
from dataplane.model.config import JobSpec, MixtureSpec, SourceSpec
from dataplane.model.errors import ConfigError
from dataplane.model.records import End, PackPolicy, PackSpec, View
from dataplane.plan.cluster import Cluster
from dataplane.plan.order import Order
from dataplane.plan.slices import Slice

modest = settings(max_examples=80)
ends = st.sampled_from(End)


@pytest.mark.parametrize("ranks_per_host", range(1, 5))
def test_the_hosts_of_some_lanes_are_those_with_a_rank_that_reads_one_of_them(ranks_per_host):
    for dp_size, lanes in itertools.product(range(1, 9), (1, 2, 3, 4, 6, 8)):
        cluster = Cluster(dp_size, ranks_per_host)
        meeting = cluster.meeting(lanes)
        for first, count in itertools.product(range(lanes), repeat=2):
            read = {lane % meeting for lane in range(first, first + count + 1)}
            hosts = {rank // ranks_per_host for rank in range(dp_size) if rank % meeting in read}
            assert cluster.hosts_of(first, count, lanes) == len(hosts)


@st.composite
def epochs(draw):
    sample_count = draw(st.integers(1, 300))
    end = draw(ends)
    batch = draw(st.integers(1, sample_count if end is End.DROP else 350))
    return sample_count, batch, end, draw(st.integers(0, sample_count))


def ranks(sample_count, cursor, batch, end, dp_size):
    steps = EpochSteps(sample_count, cursor, batch, end, dp_size)
    return [Slice(steps, rank) for rank in range(dp_size)]


def global_batches(sample_count, cursor, batch, end, dp_size):
    """The ranks' batches of every step, put together by unwrapped position."""
    slices = ranks(sample_count, cursor, batch, end, dp_size)
    for step in range(slices[0].step_count):
        start = cursor + step * batch
        mine = [each.positions(step) for each in slices]
        joined = np.full(sum(map(len, mine)), -1)
        for rank, positions in enumerate(mine):
            joined[(rank - start) % dp_size :: dp_size] = positions
        yield joined.tolist()


@modest
@given(epochs(), st.data())
def test_global_batches_are_the_same_for_every_dp_size(epoch, more):
    sample_count, batch, end, cursor = epoch
    dp_size = more.draw(st.integers(1, min(batch, 9)))
    alone = list(global_batches(sample_count, cursor, batch, end, 1))
    found = list(global_batches(sample_count, cursor, batch, end, dp_size))
    if len(found) < len(alone):  # the last one has joined the one before
        assert end is End.RAGGED
        assert len(alone[-1]) < dp_size
        alone[-2:] = [alone[-2] + alone[-1]]
    assert found == alone
    flat = [position for each in alone for position in each]
    assert flat == [(cursor + place) % sample_count for place in range(len(flat))]


@modest
@given(epochs(), st.data())
def test_every_rank_makes_the_same_steps_and_batches_differ_by_one_at_most(epoch, more):
    sample_count, batch, end, cursor = epoch
    dp_size = more.draw(st.integers(1, min(batch, 9)))
    slices = ranks(sample_count, cursor, batch, end, dp_size)
    assert len({each.step_count for each in slices}) == 1
    steps = slices[0].step_count
    left = sample_count - cursor
    joins = end is End.RAGGED and left > batch and 0 < left % batch < dp_size
    assert steps == (left // batch if end is End.DROP or joins else -(-left // batch))
    rows = np.array([each.positions_of_steps(0, steps).rows for each in slices])
    assert steps == 0 or (rows.max(axis=0) - rows.min(axis=0)).max() <= 1
    assert steps == 0 or rows.max() <= -(-batch // dp_size) + 1
    if left >= dp_size:
        assert steps == 0 or rows.min() >= 1
    if end is not End.RAGGED:
        assert (rows.sum(axis=0) == batch).all()


@modest
@given(epochs(), st.data())
def test_valid_rows_come_first_and_cover_the_rest_of_the_epoch_once(epoch, more):
    sample_count, batch, end, cursor = epoch
    dp_size = more.draw(st.integers(1, min(batch, 9)))
    seen = []
    for each in ranks(sample_count, cursor, batch, end, dp_size):
        for step in range(each.step_count):
            one = each.positions_of_steps(step, 1)
            seen += one.positions[: one.valid[0]].tolist()
            assert end is End.PAD or one.valid[0] == one.rows[0]
    steps = each.step_count
    stop = cursor + steps * batch if end is End.DROP else sample_count
    assert sorted(seen) == list(range(cursor, stop))


@modest
@given(epochs(), st.integers(0, 20), st.integers(1, 5), st.data())
def test_many_steps_at_once_are_the_steps_one_by_one(epoch, first, stride, more):
    sample_count, batch, end, cursor = epoch
    dp_size = more.draw(st.integers(1, min(batch, 9)))
    rank = more.draw(st.integers(0, dp_size - 1))
    one = Slice(EpochSteps(sample_count, cursor, batch, end, dp_size), rank)
    steps = range(min(first, one.step_count), one.step_count, stride)
    many = one.positions_of_steps(steps.start, len(steps), stride)
    singly = [one.positions_of_steps(step, 1) for step in steps]
    assert many.positions.tolist() == [t for each in singly for t in each.positions]
    assert many.rows.tolist() == [len(each.positions) for each in singly]
    assert many.valid.tolist() == [int(each.valid[0]) for each in singly]


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12).map(np.array),
    st.integers(0, 2**64 - 1),
    st.integers(1, 20),
    st.integers(1, 20),
    st.data(),
)
def test_resuming_anywhere_on_any_dp_size_gives_the_identical_suffix(
    rows, seed, lanes, window, more
):
    sample_count = int(rows.sum())
    batch = more.draw(st.integers(8, 40))
    whole = np.stack(Order(rows, seed, True, lanes, window, 4).locate(np.arange(sample_count)))
    consumed = []
    cursor = 0
    while cursor < sample_count:
        dp_size = more.draw(st.integers(1, 8))
        order = Order(rows, seed, True, lanes, window, 4)
        batches = list(global_batches(sample_count, cursor, batch, End.RAGGED, dp_size))
        for positions in batches[: more.draw(st.integers(1, 4))]:
            consumed.append(np.stack(order.locate(np.array(positions))))
            cursor += len(positions)
    assert np.array_equal(np.concatenate(consumed, axis=1), whole)


@modest
@given(epochs(), st.data())
def test_a_run_of_many_launches_reads_every_sample_of_an_epoch_once(epoch, more):
    sample_count, batch, end, cursor = epoch
    seen, last = list(range(cursor)), []
    while cursor < sample_count:
        if end is not End.DROP:
            batch = more.draw(st.integers(1, 40))
        own = ranks(sample_count, cursor, batch, end, more.draw(st.integers(1, min(batch, 9))))
        steps = more.draw(st.integers(1, 9))
        last = [step for step in range(own[0].step_count) if step < steps]
        for step in last:
            each = [one.positions_of_steps(step, 1) for one in own]
            seen += sorted(at for one in each for at in one.positions[: one.valid[0]].tolist())
        cursor = own[0].steps.after(len(last))
        assert cursor == len(seen)
        if end is End.DROP and own[0].step_count <= steps:
            break
    assert seen == list(range(cursor))
    assert cursor == sample_count or (end is End.DROP and sample_count - cursor < batch)


def test_fewer_rows_than_ranks_join_the_step_before():
    slices = ranks(10, 0, 4, End.RAGGED, 4)
    assert [each.positions(1).tolist() for each in slices] == [[4, 8], [5, 9], [6], [7]]
    assert [each.step_count for each in slices] == [2] * 4
    enough = ranks(20, 0, 8, End.RAGGED, 4)
    assert [each.positions(2).tolist() for each in enough] == [[16], [17], [18], [19]]


def test_no_row_joins_a_step_that_begins_before_other_weights():
    for changed, rows in ((4, [2, 2, 1, 1]), (5, [1, 1, 0, 0])):
        steps = EpochSteps(10, 0, 4, End.RAGGED, 4, weights_from=changed)
        own = [Slice(steps, rank) for rank in range(4)]
        assert [len(each.positions(each.step_count - 1)) for each in own] == rows


def test_no_padded_batch_joins_another():
    rows, padded = JobSpec("f", global_batch=4), View(pack=PackSpec("t", 8, PackPolicy.PAD))
    sources = tuple(SourceSpec(name, "f", 1, view=padded) for name in "ab")
    packs = replace(rows, view=padded), replace(rows, mixture=MixtureSpec(sources))
    for spec, count in ((rows, 2), (packs[0], 3), (packs[1], 3)):
        steps = EpochSteps.of(spec, 10, dp_size=4)
        assert (steps.count, steps.begin(1), steps.after(9)) == (count, 4, 10)
        assert [len(Slice(steps, rank).positions(count - 1)) for rank in (0, 3)] == (
            [2, 1] if count == 2 else [1, 0]
        )
    EpochSteps.of(packs[0], 3, dp_size=4).check_ranks(2)


def test_fewer_rows_than_ranks_in_all_are_refused():
    for sample_count, cursor, end in ((3, 0, End.PAD), (4, 0, End.RAGGED), (10, 10, End.RAGGED)):
        EpochSteps(sample_count, cursor, 4, end, 4).check_ranks(2)
    with pytest.raises(ConfigError, match=r"^epoch 2 has fewer samples \(3\) .* end=.pad"):
        EpochSteps(3, 0, 4, End.RAGGED, 4).check_ranks(2)
    with pytest.raises(ConfigError, match=r"^after position 8, epoch 2 has .*\(3\)"):
        EpochSteps(10, 8, 4, End.RAGGED, 4).check_ranks(2)


def test_pad_wraps_to_the_start_of_the_epoch_and_says_so():
    steps = [each.positions_of_steps(1, 1) for each in ranks(10, 0, 8, End.PAD, 4)]
    assert [each.positions.tolist() for each in steps] == [[8, 2], [9, 3], [0, 4], [1, 5]]
    assert [each.valid.tolist() for each in steps] == [[1], [1], [0], [0]]


def test_pad_wraps_as_often_as_the_batch_needs():
    one = Slice(EpochSteps(3, 1, 8, End.PAD)).positions_of_steps(0, 1)
    assert one.positions.tolist() == [1, 2, 0, 1, 2, 0, 1, 2]
    assert one.valid.tolist() == [2]


def test_a_finished_epoch_has_no_steps():
    for end in End:
        one = Slice(EpochSteps(10, 10, 4, end))
        assert one.step_count == 0
        assert one.positions_of_steps(0, 0).positions.tolist() == []


def test_ten_thousand_million_samples_need_no_array_of_them():
    one = Slice(EpochSteps(10**10, 10**10 - 4096, 4096, End.RAGGED, 512), 511)
    assert one.positions(0).tolist() == list(range(10**10 - 4096 + 511, 10**10, 512))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"cursor": -1}, "cursor"),
        ({"cursor": 101}, "cursor"),
        ({"dp_rank": 4}, "dp_rank"),
        ({"dp_rank": -1}, "dp_rank"),
        ({"dp_size": 0}, "dp_size"),
        ({"global_batch": 0}, "global_batch"),
        ({"global_batch": 3}, "global_batch"),
        ({"global_batch": 1 << 40}, "global_batch"),
        ({"global_batch": 101, "end": End.DROP}, "global_batch"),
        ({"sample_count": 0, "cursor": 0}, "sample_count"),
    ],
)
def test_what_makes_no_slice_is_refused(change, field):
    good = {
        "sample_count": 100,
        "cursor": 0,
        "global_batch": 8,
        "end": End.RAGGED,
        "dp_rank": 3,
        "dp_size": 4,
    }
    asked = {**good, **change}
    rank = asked.pop("dp_rank")
    with pytest.raises(ConfigError) as refused:
        Slice(EpochSteps(**asked), rank)
    assert refused.value.field == field


@pytest.mark.parametrize("steps", [(-1, 1, 1), (25, 1, 1), (20, 6, 1), (0, 1, 0), (0, -1, 1)])
def test_steps_that_are_not_there_are_refused(steps):
    one = Slice(EpochSteps(100, 0, 4, End.RAGGED))
    with pytest.raises(ConfigError):
        one.positions_of_steps(*steps)
