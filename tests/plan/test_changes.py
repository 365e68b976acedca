"""Where other shares of a mixture take effect."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given, settings

from dataplane.model.changes import step_count
from dataplane.model.errors import ConfigError
from dataplane.model.records import End, Exhausted, ScheduledShares, ShareChange
from dataplane.plan import mixture
from dataplane.plan.changes import changed, in_effect, next_boundary, scheduled, steps_before
from dataplane.plan.counting import CountingTree, quantised
from dataplane.plan.mixture import Mixed, plan_of
from plan import golden
from plan.test_mixture import everything, mixtures, order_of, twin_of

places = st.tuples(st.integers(0, 2), st.integers(0, 80))
HALVES, MOST, LEAST = quantised([1, 1]), quantised([9, 1]), quantised([1, 9])
LONG = Mixed((50, 30), HALVES, (0, 0), 2, Exhausted.CYCLE, 160, round_steps=8)


def others(of):
    """Shares that no drawn mixture has."""
    return quantised([37 + one for one in range(len(of.counts))])


def effective(of, changes):
    try:
        return in_effect(of, changes)
    except ConfigError:
        assume(False)


def boundaries(of, epoch, changes):
    """The positions of an epoch at which shares can change."""
    found = {0}  # and where a segment ends
    for segment in plan_of(of, epoch, changes).segments:
        unit = segment.lanes * segment.batch * segment.round_steps
        found |= {*range(segment.start, segment.stop, unit), segment.stop}
    return found


@given(mixtures())
def test_changes_are_placed_where_the_plan_makes_them(drawn):
    of, rows, epoch, changes = drawn
    found = effective(of, changes)
    assert in_effect(of, found) == found
    for change in found:
        assert change.position in boundaries(of, change.epoch, found)
    made = [one for each in range(4) for one in plan_of(of, each, changes).changed]
    assume(len(made) == len({*made}) == len(found))
    at = everything(order_of(of, rows, epoch, changes))
    expected = order_of(of, rows, epoch, changes).samples_at(at)
    assert np.array_equal(order_of(of, rows, epoch, found).samples_at(at), expected)


@given(mixtures())
def test_planned_again_where_they_take_effect_changes_are_what_the_documentation_defines(drawn):
    of, _rows, epoch, changes = drawn
    found = effective(of, changes)
    order = order_of(of, _rows, epoch, found)
    pairs = np.stack(order.samples_at(everything(order)), axis=1).tolist()
    assert list(map(tuple, pairs)) == twin_of(of, epoch, found)


@given(mixtures(), places)
def test_other_shares_take_effect_at_the_next_boundary_and_leave_what_is_before(drawn, place):
    of, rows, _, changes = drawn
    assume(len(rows) > 1)
    before = effective(of, changes)
    assume(place[1] < plan_of(of, place[0], before).sample_count)
    try:
        found, at = changed(of, before, place, others(of))
    except ConfigError:
        assume(False)
    assert at >= place
    assert [one for one in found if one.place < at] == [one for one in before if one.place < at]
    assert ShareChange(*at, others(of)) in found
    if at[0] == place[0]:
        assert at[1] == min(
            each for each in boundaries(of, at[0], [one for one in before if one.place < place])
            if each >= place[1]
        )  # fmt: skip
    end = at[1] if at[0] == place[0] else plan_of(of, place[0], before).sample_count
    early = np.arange(min(end, 100))
    kept = [one for one in before if one.place < place]
    assert np.array_equal(
        order_of(of, rows, place[0], found).samples_at(early),
        order_of(of, rows, place[0], kept).samples_at(early),
    )


@given(mixtures(), places, st.integers(0, 40))
def test_ranks_that_ask_anywhere_before_a_boundary_get_the_same(drawn, place, later):
    of, _, _, changes = drawn
    before = effective(of, changes)
    assume(place[1] < plan_of(of, place[0], before).sample_count)
    kept = tuple(one for one in before if one.place < place)
    at = next_boundary(of, kept, place)
    place = min((place[0], place[1] + later), at)
    assert next_boundary(of, kept, place) == at


@given(mixtures(), places)
def test_the_shares_that_are_in_force_anyway_change_nothing(drawn, place):
    of, _, _, changes = drawn
    before = tuple(one for one in effective(of, changes) if one.place < place)
    now = before[-1].shares if before else of.shares
    found, _ = changed(of, before, place, now)
    assert found == before


def test_taking_back_a_change_before_it_takes_effect_changes_nothing():
    first, at = changed(LONG, (), (0, 5), MOST)
    assert (first, at) == ((ShareChange(0, 16, MOST),), (0, 16))
    assert changed(LONG, first, (0, 9), HALVES) == ((), (0, 16))
    # At the boundary itself it may be replaced, but not behind it.
    assert changed(LONG, first, (0, 16), LEAST)[0] == (ShareChange(0, 16, LEAST),)
    assert changed(LONG, first, (0, 17), LEAST)[0] == (*first, ShareChange(0, 32, LEAST))


def test_later_changes_stay_where_they_are():
    planned = (ShareChange(0, 64, MOST), ShareChange(1, 0, LEAST))
    found, _ = changed(LONG, planned, (0, 20), others(LONG))
    assert found == (ShareChange(0, 32, others(LONG)), *planned)


def test_a_change_at_the_end_of_an_epoch_takes_effect_at_the_start_of_the_next_one():
    dealt = Mixed((50, 30), HALVES, (1, 1), 2, Exhausted.RENORMALISE, round_steps=8)
    for of, change in ((dealt, ShareChange(1, 0, MOST)), (LONG, ShareChange(0, 160, MOST))):
        end = plan_of(of, 0).sample_count
        assert changed(of, (), (0, end - 1), MOST)[0] == (change,)
        assert plan_of(of, 0, (change,)).sample_count == end
        plan = plan_of(of, 1, (change,))
        assert plan.segments[0].shares == MOST
        assert plan.base.tolist() == plan_of(of, 0).counts.tolist()


def test_counts_start_at_the_beginning_of_a_segment():
    order = order_of(LONG, [[50], [30]], 0, (ShareChange(0, 48, MOST),))
    source, _ = order.samples_at(np.arange(160))
    for begin, shares in ((0, HALVES), (48, MOST)):
        tree = CountingTree(shares)
        for rounds in (1, 2, 3):
            some = np.bincount(source[begin : begin + 16 * rounds], minlength=2)
            assert some.tolist() == (2 * tree.counts(np.array([8 * rounds]))[0]).tolist()


def test_a_schedule_counts_steps_through_all_epochs():
    schedule = [ScheduledShares(step, each) for step, each in ((3, MOST), (25, LEAST), (70, MOST))]
    # 160 samples an epoch: 20 steps of 8. Step 3 begins at 24, and a round at 32.
    found = scheduled(LONG, (), (0, 0), schedule, 8, End.RAGGED)
    assert [one.place for one in found] == [(0, 32), (1, 48), (3, 80)]
    # From step 10 on, what is behind it is left.
    rest = [ScheduledShares(one.step - 10, one.shares) for one in schedule[1:]]
    assert scheduled(LONG, found, (0, 80), rest, 8, End.RAGGED) == found
    assert steps_before(LONG, found, (3, 80), 8, End.RAGGED) == 70


@given(
    mixtures(), st.lists(st.integers(1, 90), min_size=1, max_size=3, unique=True).map(sorted),
    st.integers(1, 20), st.sampled_from(End),
)  # fmt: skip
def test_scheduled_shares_take_effect_in_their_step_or_with_the_next_round(
    drawn, steps, batch, end
):
    of, _, _, _ = drawn
    assume(of.length)  # otherwise the change itself may shorten the epoch of its step
    shares = [quantised([1 + step + one for one in range(len(of.counts))]) for step in steps]
    schedule = [ScheduledShares(*one) for one in zip(steps, shares, strict=True)]
    assume(len({of.shares, *shares}) == len(shares) + 1)
    try:
        found = scheduled(of, (), (0, 0), schedule, batch, end)
    except ConfigError:
        assume(False)
    asked = []
    for one in schedule:  # step by step
        left, epoch = one.step, 0
        while (count := step_count(plan_of(of, epoch, found).sample_count, batch, end)) <= left:
            left, epoch = left - count, epoch + 1
            if epoch > 100:
                return  # there are no more steps
        asked.append((epoch, left * batch))
    for change in found:
        at = asked[shares.index(change.shares)]
        before = tuple(one for one in found if one.place < change.place)
        assert change.place == next_boundary(
            of, before, max(at, *[one.place for one in before], (0, 0))
        )


@st.composite
def exhaustible(draw):
    """A mixture whose sources may run out, entries of a schedule, and a global batch. Some shares
    are 0, so that a change may leave no source to read.
    """
    counts = tuple(draw(st.lists(st.integers(1, 120), min_size=2, max_size=3)))
    exhausted = draw(st.sampled_from(Exhausted))
    shares = st.lists(st.integers(0, 3), min_size=len(counts), max_size=len(counts)).filter(any)
    passes = (0 if exhausted is Exhausted.CYCLE else 1,) * len(counts)
    length = draw(st.just(0) | st.integers(1, 100)) if exhausted is Exhausted.CYCLE else 0
    of = Mixed(
        counts, quantised(draw(shares)), passes, draw(st.integers(1, 2)), exhausted, length,
        round_steps=draw(st.sampled_from([2, 8, 32])),
    )  # fmt: skip
    steps = sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=5)))
    schedule = [ScheduledShares(step, quantised(draw(shares))) for step in steps]
    return of, schedule, draw(st.integers(1, 16))


@settings(max_examples=80)
@given(exhaustible())
def test_a_schedule_is_what_is_set_while_the_job_reads(drawn):
    of, schedule, batch = drawn
    expected = ()
    try:
        for one in schedule:  # after so many steps, the job is at this place
            epoch, gone = 0, 0
            while True:
                plan = plan_of(of, epoch, expected)
                steps = step_count(plan.sample_count, batch, End.RAGGED)
                if one.step < gone + steps:
                    break
                epoch, gone = epoch + 1, gone + steps
            place = (epoch, (one.step - gone) * batch)
            expected, _ = changed(of, expected, place, one.shares)
    except ConfigError:
        assume(False)
    assert scheduled(of, (), (0, 0), schedule, batch, End.RAGGED) == expected


def test_of_two_changes_at_one_round_the_last_one_counts_even_if_the_first_leaves_no_source():
    of = Mixed((200, 3000), HALVES, (1, 1), 1, Exhausted.RENORMALISE, round_steps=64)
    over, rest = quantised([1, 0]), quantised([0, 1])  # the first source ends at sample 400
    schedule = [ScheduledShares(80, over), ScheduledShares(81, rest)]
    found = scheduled(of, (), (0, 0), schedule, 8, End.RAGGED)
    first, _ = changed(of, (), (0, 80 * 8), over)
    assert plan_of(of, 0, first).sample_count == 656
    assert changed(of, first, (0, 81 * 8), rest)[0] == found
    assert plan_of(of, 0, found).sample_count == 3200


def test_scheduled_shares_with_which_an_epoch_has_no_step_are_refused():
    of = Mixed((30, 1), quantised([1, 0]), (1, 1))
    for step in (1, 3, 7):  # within an epoch, at its start, and after several
        schedule = [ScheduledShares(step, HALVES), ScheduledShares(9, MOST)]
        with pytest.raises(ConfigError, match="samples, less than a global batch of 10, and"):
            scheduled(of, (), (0, 0), schedule, 10, End.DROP)
        assert scheduled(of, (), (0, 0), schedule, 10, End.RAGGED)
        assert scheduled(of, (), (0, 0), schedule, 2, End.DROP)


def test_golden_mixtures_that_change():
    for (
        counts,
        shares,
        lanes,
        steps,
        name,
        length,
        epoch,
        changes,
    ), expected in golden.CHANGED_MIXTURES.items():
        exhausted = Exhausted(name)
        passes = (int(exhausted is not Exhausted.CYCLE),) * len(counts)
        of = Mixed(counts, shares, passes, lanes, exhausted, length, round_steps=steps)
        order = order_of(of, [[each] for each in counts], epoch, [ShareChange(*c) for c in changes])
        pairs = zip(*order.samples_at(everything(order)), strict=True)
        assert " ".join(f"{a}.{b}" for a, b in pairs) == expected


def test_a_schedule_over_many_epochs_plans_each_a_few_times(monkeypatch):
    planned = []
    plan = mixture._Planner.plan

    def counted(planner):
        planned.append(planner._epoch)
        return plan(planner)

    monkeypatch.setattr(mixture._Planner, "plan", counted)
    mixture._kept_plan.cache_clear()
    schedule = [ScheduledShares(7 * (1 + at), quantised([1 + at % 5, 7])) for at in range(200)]
    found = scheduled(LONG, (), (0, 0), schedule, 8, End.DROP)
    epochs = 1 + found[-1].epoch
    assert epochs > 60
    assert len(planned) < 6 * epochs
