"""Which saved states fit which jobs, and the errors for those that do not."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given
from manifests import small
from msgspec import structs
from msgspec.structs import replace

from dataplane.client.state import RowsDigest, RunState
from dataplane.model import config
from dataplane.model.config import JobSpec
from dataplane.model.errors import ConfigError, SpecMismatch, VersionMismatch
from dataplane.model.ledger import LedgerMark
from dataplane.model.records import ColumnOptions, Cut, End, ImageSpec, ListPolicy, StackSpec, View
from dataplane.plan.views import identity_of
from dataplane.rpc.messages import JobOpened

SPEC = JobSpec(
    small().fingerprint, seed=7, shuffle=True, lanes=4, window=16, global_batch=8, end=End.DROP,
    column_options=ColumnOptions(("id", "text"), fill_null=(("id", 0.0),)),
)  # fmt: skip
IMAGE = ImageSpec("jpg", 224, 224, Cut.RANDOM, scale=(0.08, 1.0), ratio=(0.75, 4 / 3), flip=0.5)


def job(manifest=None, spec=SPEC) -> JobOpened:
    manifest = manifest or small()
    spec = replace(spec, fingerprint=manifest.fingerprint)
    count = manifest.sample_count
    return JobOpened(spec, spec.digest(), identity_of(manifest), count, (), 0, 0, 1, 60.0)


def changed(**options) -> JobSpec:
    """The same job with other options, those of columns among them."""
    of_columns = set(ColumnOptions.__struct_fields__) & options.keys()
    given = {name: options.pop(name) for name in of_columns}
    return replace(SPEC, column_options=replace(SPEC.column_options, **given), **options)


def elsewhere(**change):
    shards = (
        structs.replace(s, url=s.url.replace("s3://b", "s3://c"), **change) for s in small().shards
    )
    return small(shards=tuple(shards))


def refusal(state: RunState, found: JobOpened, **how) -> SpecMismatch:
    with pytest.raises(SpecMismatch) as caught:
        state.check(found, **how)
    return caught.value


def test_a_state_records_its_image_software_and_resumes_with_any_other():
    made = structs.replace(job(), pixels="Pillow 12.2.0 ()")
    state = RunState.of(made, 0, 8)
    saved = json.loads(json.dumps(state.to_dict()))
    assert saved["pixels"] == "Pillow 12.2.0 ()"
    assert RunState.from_dict(saved) == state
    state.check(structs.replace(made, pixels="Pillow 13.0.0 ()"))
    assert "pixels" not in RunState.of(job(), 0, 8).to_dict()
    with pytest.raises(ConfigError, match="pixels"):
        RunState.from_dict(saved | {"pixels": 3})


@pytest.mark.parametrize("other", [{"version": 1}, {"version": 3}, {"order": 1}, {"order": 3}])
def test_a_state_of_another_version_or_order_is_refused_with_what_to_do(other):
    saved = RunState.of(job(), 2, 24).to_dict()
    with pytest.raises(
        VersionMismatch, match=r"with the dataplane that saved .* set_epoch\(\)"
    ) as caught:
        RunState.from_dict(saved | other)
    (version,) = other.values()
    assert (caught.value.expected, caught.value.found) == (2, version)


@pytest.mark.parametrize("cursor", [0, 56, 60])
def test_after_the_last_whole_step_comes_the_next_epoch(cursor):
    assert RunState.of(job(), 2, cursor).normalised(SPEC).cursor == 0


def test_a_state_is_the_same_after_it_was_saved():
    state = RunState.of(job(), 2, 24)
    assert RunState.from_dict(json.loads(json.dumps(state.to_dict()))) == state
    fixed = {"version": 2, "order": 2, "spec_digest": job().digest, "epoch": 2, "cursor": 24}
    assert {**state.to_dict(), **fixed} == state.to_dict()


def test_a_state_keeps_where_the_ledger_was():
    state = replace(RunState.of(job(), 2, 24), mark=LedgerMark(12, "0123456789abcdef"))
    saved = json.loads(json.dumps(state.to_dict()))
    assert RunState.from_dict(saved) == state
    assert saved["ledger"] == {"entry": 12, "head": "0123456789abcdef"}
    with pytest.raises(ConfigError, match="its ledger is"):
        RunState.from_dict({**saved, "ledger": {"entry": "x"}})


def test_a_state_without_its_order_is_refused():
    saved = RunState.of(job(), 2, 24).to_dict()
    del saved["order"]
    with pytest.raises(ConfigError, match="its order is None"):
        RunState.from_dict(saved)


def test_a_state_is_small_whatever_the_job_is():
    columns = tuple(f"a column with a long name, no. {i}" for i in range(500))
    largest = JobSpec(
        "f" * 32, (1 << 64) - 1, True, (1 << 63) - 1, (1 << 63) - 1, 1, End.DROP, (IMAGE,) * 9,
        ColumnOptions(
            columns, ListPolicy.RAGGED, tuple((name, 0.1) for name in columns),
            (StackSpec("x", columns),),
        ),
    )  # fmt: skip
    state = RunState.of(job(spec=largest), (1 << 62) - 1, 0)
    saved = replace(state, sample_count=(1 << 62) - 1).to_dict()
    assert len(json.dumps(saved)) < 10_000
    assert RunState.from_dict(saved).to_dict() == saved
    del saved["values"]
    assert len(json.dumps(saved)) < 1000


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": 8}, "seed: 7 in the state, 8 here"),
        ({"shuffle": False, "lanes": 1}, "shuffle: True in the state, False here; lanes: 4 in"),
        ({"end": End.RAGGED}, "end: drop in the state, ragged here"),
        ({"columns": ()}, 'columns: ["id","text"] in the state, not given here'),
        ({"fill_null": (("id", 1.0),)}, 'fill_null: [["id",0.0]] in the state, [["id",1.0]] here'),
        (
            {"transforms": (IMAGE,)},
            'transforms: not given in the state, [{"column":"jpg","cut":"random"',
        ),
    ],
)
def test_a_state_of_other_options_names_each_with_both_values(change, sentence):
    error = refusal(RunState.of(job(), 0, 0), job(spec=changed(**change)))
    assert sentence in str(error)
    assert error.field == next(iter(change))
    assert len(str(error)) < 500


def test_of_long_values_what_differs_is_shown():
    columns = tuple(f"column-{i}" for i in range(100))
    state = RunState.of(job(spec=changed(columns=columns)), 0, 0)
    saved = json.loads(json.dumps(state.to_dict()))
    state = RunState.from_dict(saved)
    assert not state.check(job(spec=changed(columns=columns)))
    for other, sentence in [
        (columns[:-1], '"column-99" besides 99 equal ones in the state, nothing besides 99 equal'),
        (
            ("a", *columns[1:]),
            '"column-0" besides 99 equal ones in the state, "a" besides 99 equal',
        ),
        (columns[1::-1] + columns[2:], '["column-0","column-1",'),
        (("id",), 'and 80 more besides 0 equal ones in the state, "id" besides 0 equal ones here'),
    ]:
        error = refusal(state, job(spec=changed(columns=other)))
        assert sentence in str(error)
        assert len(str(error)) < 1200
    many = tuple(f"column-{i}" for i in range(900))
    state = RunState.of(job(spec=changed(columns=many)), 0, 0)
    error = refusal(state, job(spec=changed(columns=many[:-1])))
    assert "another value with the same first 2000 characters in the state" in str(error)
    for values in (1, {"columns": 2}, [[1, 2]]):
        with pytest.raises(ConfigError, match="its values"):
            RunState.from_dict(saved | {"values": values})


def test_an_option_of_a_later_version_is_named():
    saved = RunState.of(job(), 0, 0)
    later = replace(saved, spec_digest="0" * 32, options={**saved.options, "mixing": "on"})
    assert "mixing: on in the state, unknown to this version" in str(refusal(later, job()))


def test_a_dataset_that_moved_with_its_etags_resumes():
    state = RunState.of(job(), 0, 0)
    assert job(elsewhere()).digest != job().digest
    assert state.check(job(elsewhere())) is False


def test_a_copy_with_other_etags_needs_dataset_moved():
    state, copy = RunState.of(job(), 0, 0), job(elsewhere(etag="new"))
    error = refusal(state, copy)
    assert "same names, sizes and blocks, but other ETags" in str(error)
    assert "dataset_moved=True" in str(error)
    assert state.check(copy, dataset_moved=True) is True
    both = refusal(state, job(elsewhere(etag="new"), replace(SPEC, seed=8, window=17)))
    for part in ("ETags", "seed: 7 in the state, 8 here", "window: 16 in the state, 17 here"):
        assert part in str(both)


def test_another_dataset_is_refused_even_with_dataset_moved():
    grown = tuple(
        structs.replace(shard, size_bytes=shard.size_bytes + 1) for shard in small().shards
    )
    # Its default window differs too: errors leave out what follows from the dataset.
    other = job(small(shards=grown), replace(SPEC, window=17))
    error = refusal(RunState.of(job(), 0, 0), other, dataset_moved=True)
    assert "but other shards" in str(error)
    assert "window" not in str(error)
    fewer = structs.replace(job(), sample_count=59)
    error = refusal(RunState.of(job(), 0, 0), fewer, dataset_moved=True)
    assert "the dataset had 60 samples and now has 59" in str(error)
    assert "a list of their urls" in str(error)


@pytest.mark.parametrize(
    "damage",
    [
        {"options": None}, {"dataset": None}, {"options": 1}, {"options": {"seed": [1]}}, {"options": {1: 1}}, {"dataset": "x"},
        {"dataset": {"content": "c"}}, {"dataset": {"content": 1, "layout": "l"}},
    ],
)  # fmt: skip
def test_damaged_states_are_refused(damage):
    with pytest.raises(ConfigError, match="damaged"):
        RunState.from_dict({**RunState.of(job(), 0, 0).to_dict(), **damage})


def test_names_of_options_are_unique():
    names = [name for name, _ in config._options(SPEC)]
    assert len(names) == len(set(names))


DIGEST_SPEC = JobSpec("f", seed=7, shuffle=True, lanes=4, window=16, global_batch=8)
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
    assert replace(DIGEST_SPEC, **changed).rows_digest("layout") == DIGEST_SPEC.rows_digest(
        "layout"
    )


@pytest.mark.parametrize(
    "changed",
    [{"seed": 8}, {"shuffle": False}, {"lanes": 8}, {"window": 8}, {"ramp": 1}, {"end": End.PAD},
     {"global_batch": 16}, {"view": View(where="x > 1")}],
)  # fmt: skip
def test_all_that_decides_which_rows_a_batch_has_counts(changed):
    assert replace(DIGEST_SPEC, **changed).rows_digest("layout") != DIGEST_SPEC.rows_digest(
        "layout"
    )
    assert DIGEST_SPEC.rows_digest("layout") != DIGEST_SPEC.rows_digest("other")


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


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": "2"}, {"epoch": -1}, {"epoch": 0.5}, {"epoch": 1 << 62}, {"cursor": 61},
        {"cursor": True}, {"spec_digest": None}, {"spec_digest": ""}, {"spec_digest": 5},
        {"epoch": 0, "in_last_step": True}, {"in_last_step": 1}, {"ledger": {"entry": -1, "head": ""}},
        {"ledger": {"entry": 1 << 62, "head": ""}}, {"order": -1}, {"sample_count": 1 << 64},
        {"options": {"seed": 0.5}},
    ],
    ids=str,
)  # fmt: skip
def test_values_that_no_state_has_are_refused(wrong):
    state = RunState.of(job(), 1, 8).to_dict()
    assert RunState.from_dict(state).to_dict() == state
    with pytest.raises(ConfigError):
        RunState.from_dict(state | wrong)


@given(
    st.none() | st.lists(st.integers())
    | st.dictionaries(
        st.sampled_from(["version", "spec_digest", "epoch", "cursor"]),
        st.none() | st.integers() | st.text(),
    )
)  # fmt: skip
def test_what_is_no_state_is_refused(garbage):
    with pytest.raises(ConfigError):
        RunState.from_dict(garbage)
