"""The digest of the rows that a run was given, by its invariants in client/state.py."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec.structs import replace

from dataplane.client.state import RowsDigest
from dataplane.model.config import JobSpec
from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnOptions, Cut, End, ImageSpec, View

SPEC = JobSpec("f", seed=7, shuffle=True, lanes=4, window=16, global_batch=8)
# (epoch, first cursor, last cursor) of passes, one after the other
passes = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 9)).map(
        lambda one: (one[0], min(one[1:]), max(one[1:]))
    ),
    max_size=4,
)


def resumed(digest: RowsDigest, epoch: int, cursor: int) -> RowsDigest:
    return RowsDigest.from_dict(digest.to_dict(epoch, cursor), epoch, cursor)


@given(passes, st.data())
def test_2_a_run_that_is_interrupted_anywhere_has_the_digest_of_one_that_is_not(ran, data):
    whole = interrupted = RowsDigest()
    for epoch, first, last in ran:
        whole = whole.continued("order", epoch, first)
        interrupted = interrupted.continued("order", epoch, first)
        for cursor in range(first, last + 1):
            whole, interrupted = whole.reached(cursor), interrupted.reached(cursor)
            assert interrupted.value == whole.value
            if data.draw(st.booleans()):
                interrupted = resumed(interrupted, epoch, cursor)
                interrupted = interrupted.continued("order", epoch, cursor)
    assert whole.to_dict(5, 0) == interrupted.to_dict(5, 0)


@given(passes, passes)
def test_runs_with_other_steps_have_other_digests(mine, others):
    def digest(ran):
        found = RowsDigest()
        for epoch, first, last in ran:
            found = found.continued("order", epoch, first).reached(last)
        return found.value

    def steps(ran):
        return [(epoch, cursor) for epoch, first, last in ran for cursor in range(first, last)]

    assert (digest(mine) == digest(others)) == (steps(mine) == steps(others))


def test_another_order_or_global_batch_begins_another_range():
    before = RowsDigest().continued("a", 0, 0).reached(64)
    assert before.continued("a", 0, 64) == before
    after = before.continued("b", 0, 64)
    assert after.value == before.value
    assert after.reached(128).value != before.reached(128).value


@pytest.mark.parametrize(
    "changed",
    [{"column_options": ColumnOptions(("id",))}, {"view": View(map="m:f", collate="m:g")},
     {"transforms": (ImageSpec("jpg", 8, 8, Cut.WHOLE),)}, {"fingerprint": "elsewhere"}],
)  # fmt: skip
def test_the_form_of_the_rows_does_not_count(changed):
    assert replace(SPEC, **changed).rows_digest("layout") == SPEC.rows_digest("layout")


@pytest.mark.parametrize(
    "changed",
    [{"seed": 8}, {"shuffle": False}, {"lanes": 8}, {"window": 8}, {"ramp": 1}, {"end": End.PAD},
     {"global_batch": 16}, {"view": View(where="x > 1")}],
)  # fmt: skip
def test_all_that_decides_which_rows_a_batch_has_counts(changed):
    assert replace(SPEC, **changed).rows_digest("layout") != SPEC.rows_digest("layout")
    assert SPEC.rows_digest("layout") != SPEC.rows_digest("other")


@pytest.mark.parametrize(
    "damaged", [{"value": None}, {"begin": "x"}, {"base": None}, {"begin": None}, {"order": 1}]
)
def test_what_is_no_digest_is_refused(damaged):
    saved = RowsDigest().continued("a", 0, 0).reached(64).to_dict(0, 64)
    with pytest.raises(ConfigError, match="this state is damaged: its digest"):
        RowsDigest.from_dict({**saved, **damaged}, 0, 64)


def test_a_state_whose_position_was_changed_goes_on_from_its_value():
    saved = RowsDigest().continued("a", 0, 0).reached(64).to_dict(0, 64)
    moved = RowsDigest.from_dict(saved, 1, 24)
    assert (moved.value, moved.begin) == (saved["value"], 24)
