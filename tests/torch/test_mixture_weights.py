"""Weights of a mixture that change: by a schedule, while a job runs, and at resume."""

from __future__ import annotations

import copy
import json
import os
import signal
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dataplane_torch import DataLoader, Mixture, ShardedIterableDataset, Source
from launching import launch
from warm import WarmPython
from weighted import (
    BATCH,
    FIRST,
    OPTIONS,
    ROUND,
    SECOND,
    THIRD,
    Rows,
    changed_at,
    counts_of,
    joined,
    mixed,
    on_ranks,
    rows_of,
    saved,
    write_sources,
)

from dataplane.model.errors import ConfigError, SpecMismatch
from dataplane.plan.counting import CountingTree, quantised


@pytest.fixture
def folder(tmp_path: Path, shared_node: None) -> Path:
    return write_sources(tmp_path)


def test_a_schedule_takes_effect_with_the_first_round_that_begins_in_its_step_or_later(
    folder: Path,
) -> None:
    with DataLoader(mixed(folder), **OPTIONS) as loader:
        plain = rows_of(loader)
    with DataLoader(mixed(folder, schedule=[(3, SECOND), (30, THIRD)]), **OPTIONS) as loader:
        rows = rows_of(loader)
        assert len(loader) == len(rows) == 60
        ids = np.array(rows).reshape(-1)
        assert ids[:ROUND].tolist() == np.array(plain).reshape(-1)[:ROUND].tolist()
        for begin, weights in ((0, FIRST), (ROUND, SECOND), (2 * ROUND, THIRD)):
            # The counts of a segment start at its beginning.
            tree = CountingTree(quantised(list(weights.values())))
            steps = min(1024, (5760 - begin) // 2)
            expected = 2 * tree.counts(np.array([steps]))[0]
            part = ids[begin : begin + 2 * steps] // 10_000
            assert np.bincount(part, minlength=3).tolist() == expected.tolist()
        # The next epoch begins with the last weights.
        assert counts_of(rows_of(loader))[0] == 0


@pytest.mark.parametrize(
    ("at", "steps", "last"), [(None, 256, [3, 3, 3, 2]), (255, 257, [1, 1, 1, 0])]
)
def test_no_row_is_lost_where_weights_change_within_a_joined_last_step(
    folder: Path, at: int | None, steps: int, last: list[int]
) -> None:
    """The last 3 of 2,051 rows join the step before, but not if other weights begin within it."""
    options = {**OPTIONS, "end": "ragged", "global_batch_size": 8}
    found = []
    for size in (1, 4):
        with ExitStack() as stack:
            passes = []
            for rank in range(size):
                place = {"dp_rank": rank, "dp_size": size, "name": f"joined-{at}"}
                loader = DataLoader(mixed(folder, length=2051), **place, **options)
                stack.enter_context(loader)
                assert len(loader) == (257 if size == 1 else 256)
                passes.append(rows_of(loader) if at is None else changed_at(loader, at, SECOND))
        found.append([[one for step in each for one in step] for each in passes])
    assert len(passes[0]) == steps
    assert [len(each[-1]) for each in passes] == last
    ((alone,), parts) = found
    assert len(alone) == 2051
    assert [alone[rank::4] for rank in range(4)] == parts


def test_weights_set_in_the_loop_are_those_of_a_schedule(folder: Path) -> None:
    make = lambda: mixed(folder, schedule=[(20, SECOND)])  # noqa: E731
    with DataLoader(make(), **OPTIONS) as loader:
        expected, state = rows_of(loader), saved(loader)
    for steps in (1, 21):
        with DataLoader(mixed(folder), **OPTIONS) as loader:
            found: Rows = []
            for batch in loader:
                found.append(batch["id"].tolist())
                if len(found) == steps:
                    # The round ends within step 21.
                    assert loader.set_weights(SECOND) == (0, 21)
            assert found == expected
            assert saved(loader)["mixture"]["changes"] == state["mixture"]["changes"]
            assert saved(loader)["digest"] == state["digest"]


def test_a_run_goes_on_across_changes_on_another_number_of_ranks(folder: Path) -> None:
    with DataLoader(mixed(folder), **OPTIONS) as loader:
        whole: Rows = []
        states = {0: saved(loader)}
        for batch in loader:
            whole.append(batch["id"].tolist())
            if len(whole) in (10, 30):
                loader.set_weights(SECOND if len(whole) == 10 else THIRD)
            states[len(whole)] = saved(loader)
    # Before and behind each change, and where a round begins: in step 21 and in step 42.
    for step, size in ((10, 2), (21, 1), (22, 3), (42, 1), (43, 1)):
        state = states[step]
        rest = on_ranks(lambda: mixed(folder), size, lambda one: one.load_state_dict(state))  # noqa: B023
        # A state of before step 30 does not have the third weights, which begin in step 42.
        known = len(whole) if step > 30 else 42
        assert rest[: known - step] == whole[step:known]


def test_a_run_is_resumed_with_edited_weights(folder: Path) -> None:
    with DataLoader(mixed(folder), **OPTIONS) as loader:
        first = rows_of(loader, 12)
        state = saved(loader)
        whole = [*first, *rows_of_state(folder, state)]
    with DataLoader(mixed(folder), **OPTIONS) as loader:
        expected = changed_at(loader, 12, SECOND)
    assert expected[:21] == whole[:21]
    assert expected[22:] != whole[22:]

    edited = on_ranks(lambda: mixed(folder, SECOND), 2, lambda one: one.load_state_dict(state))
    assert edited == expected[12:]

    def set_at_once(loader: Any) -> None:
        loader.load_state_dict(state)
        assert loader.set_weights(SECOND) == (0, 21)

    assert on_ranks(lambda: mixed(folder), 2, set_at_once) == expected[12:]
    # A schedule that has brought them by now is the same.
    scheduled = mixed(folder, THIRD, schedule=[(12, SECOND)])
    assert on_ranks(lambda: scheduled, 1, lambda one: one.load_state_dict(state)) == expected[12:]


def rows_of_state(folder: Path, state: dict[str, Any], **options: Any) -> Rows:
    with DataLoader(mixed(folder, **options), **OPTIONS) as loader:
        loader.load_state_dict(state)
        return rows_of(loader)


def test_a_resumed_run_keeps_weights_that_were_set(folder: Path) -> None:
    with DataLoader(mixed(folder), **OPTIONS) as loader:
        loader.set_weights(SECOND)
        assert saved(loader)["mixture"]["changes"][0] == [0, 0, list(quantised([0.1, 0.6, 0.3]))]
        expected = [*rows_of(loader), *rows_of(loader)]
        state = saved(loader)
    assert expected == [*on_ranks(lambda: mixed(folder, SECOND), 1), *expected[60:]]
    with DataLoader(mixed(folder), **OPTIONS) as loader:
        loader.load_state_dict(state)
        assert counts_of(rows_of(loader))[1] == pytest.approx(0.6 * 5760, abs=10)
        loader.load_state_dict({})
        assert counts_of(rows_of(loader))[1] == pytest.approx(0.2 * 5760, abs=10)


def test_weights_set_before_a_state_was_loaded_are_replaced_with_a_warning(folder: Path) -> None:
    with DataLoader(mixed(folder), **OPTIONS) as loader:
        start = saved(loader)
        rows_of(loader, 12)
        plain = saved(loader)
        loader.set_weights(SECOND)
        rows_of(loader, 12)  # of the next pass
        changed = saved(loader)
        loader.load_state_dict(plain)  # a rollback to before the change
    replaced = pytest.warns(
        UserWarning, match=r"had set from sample 0 of epoch 0 on .*sample 1152 of epoch 0\): if .*"
        r" call set_weights\(\) after load_state_dict\(\)"
    )  # fmt: skip
    with DataLoader(mixed(folder), **OPTIONS) as loader:
        loader.set_weights(SECOND)
        with replaced:
            loader.load_state_dict(plain)
        assert saved(loader) == plain
        loader.load_state_dict(plain)  # said once
        for state in (start, {}):
            loader.load_state_dict({})
            loader.set_weights(SECOND)
            with pytest.warns(UserWarning, match="sample 0 of epoch 0"):
                loader.load_state_dict(state)
    with DataLoader(mixed(folder), **OPTIONS) as loader:
        loader.set_weights(FIRST)
        loader.load_state_dict(plain)
        loader.load_state_dict(changed)
        loader.set_weights(THIRD)
        loader.load_state_dict(changed)


def test_an_epoch_may_become_longer_or_shorter(folder: Path) -> None:
    # Until the first of two sources has been read ten times.
    weights = {"web": 0.5, "code": 0.5}
    sources = {
        name: Source(folder / f"{name}.parquet", weight=weight, max_passes=20)
        for name, weight in weights.items()
    }
    with DataLoader(Mixture(sources), **OPTIONS) as loader:
        short = len(loader)
        assert short == 2 * 3000 // BATCH
        found: Rows = []
        for batch in loader:
            found.append(batch["id"].tolist())
            if len(found) == 2:
                assert loader.set_weights({"web": 0.9, "code": 0.1}) == (0, 21)
                longer = len(loader)
                state = saved(loader)
        assert len(found) == longer > short
        assert state["sample_count"] > 2 * 3000
        assert counts_of(found)[0] > 3500
        after = rows_of(loader)
        assert len(after) == len(loader)
    with DataLoader(Mixture(sources), **OPTIONS) as loader:
        loader.load_state_dict(state)
        assert rows_of(loader) == found[2:]
        assert rows_of(loader) == after


def test_weights_of_tokens_and_of_batches_change(folder: Path) -> None:
    sources = {
        name: Source(folder / f"{name}.parquet", weight=1, mean_length=length)
        for name, length in {"web": 100, "code": 200, "math": 400}.items()
    }
    tokens = lambda: Mixture(sources, unit="tokens", exhausted="cycle", length=10**6)  # noqa: E731
    with DataLoader(tokens(), **OPTIONS) as loader:
        count = len(loader)
        rows = changed_at(loader, 1, {"web": 2, "code": 1, "math": 1})
        state = saved(loader)
    assert len(rows) == count
    found = counts_of(rows[22:])
    assert found[0] / found[1] == pytest.approx(4, rel=0.02)
    # The length in samples is that of the first weights, also after a resume with others.
    sources["web"] = Source(folder / "web.parquet", weight=3, mean_length=100)
    with DataLoader(tokens(), **OPTIONS) as loader:
        loader.load_state_dict(state)
        assert len(loader) == count
        found = counts_of(rows_of(loader)[22:])
    assert found[0] / found[1] == pytest.approx(6, rel=0.02)

    batches = mixed(folder, unit="batch", length=1100)
    with DataLoader(batches, **{**OPTIONS, "global_batch_size": 4}) as loader:
        found_rows = changed_at(loader, 5, THIRD)
    assert [len({one // 10_000 for one in row}) for row in found_rows] == [1] * 1100
    assert counts_of(found_rows[1024:])[0] == 0 < counts_of(found_rows[:1024])[0]


def test_datasets_of_torch_workers_follow_a_schedule_and_a_state(folder: Path) -> None:
    schedule = [(20, SECOND)]
    with DataLoader(mixed(folder, schedule=schedule), **OPTIONS) as loader:
        expected = rows_of(loader)
    with DataLoader(mixed(folder), **OPTIONS) as loader:
        changed_at(loader, 10, SECOND)
        loader.set_epoch(0)
        state = saved(loader)

    def rows(dataset: Any) -> Rows:
        loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
        return rows_of(loader)

    scheduled = mixed(folder, schedule=schedule)
    assert rows(ShardedIterableDataset(scheduled, **OPTIONS)) == expected
    with closing(ShardedIterableDataset(mixed(folder), **OPTIONS)) as dataset:
        dataset.load_state_dict(state)
        assert dataset.state_dict()["mixture"] == state["mixture"]
        assert rows(dataset) == expected


def test_ranks_that_were_given_other_weights_are_refused(folder: Path) -> None:
    named = {**OPTIONS, "name": f"job-{os.getpid()}", "dp_size": 2}
    with (
        DataLoader(mixed(folder), dp_rank=0, **named) as first,
        closing(DataLoader(mixed(folder, SECOND), dp_rank=1, **named)) as second,
    ):
        len(first)
        with pytest.raises(SpecMismatch, match="weights"):
            len(second)
    scheduled = mixed(folder, schedule=[(5, SECOND)])
    with (
        DataLoader(mixed(folder), dp_rank=0, **named) as first,
        closing(DataLoader(scheduled, dp_rank=1, **named)) as second,
    ):
        len(first)
        with pytest.raises(SpecMismatch, match="schedule"):
            len(second)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"web": 1, "code": 1}, "'math' is missing"),
        ({**FIRST, "maths": 1}, "no source 'maths'"),
        ({**FIRST, "web": -1}, "0 or more"),
        ({**FIRST, "web": None}, "0 or more"),
        ({**FIRST, "web": float("inf")}, "0 or more"),
        (dict.fromkeys(FIRST, 0), "all weights are 0"),
        ([0.5, 0.5], "expected weights by source name"),
    ],
)
def test_weights_that_are_none_are_refused(folder: Path, given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        mixed(folder, schedule=[(10, given)])
    with (
        closing(DataLoader(mixed(folder), **OPTIONS)) as loader,
        pytest.raises(ConfigError, match=said),
    ):
        loader.set_weights(given)


@pytest.mark.parametrize(
    "schedule",
    [
        [(0, SECOND)],
        [(-5, SECOND)],
        [(1.5, SECOND)],
        [(5, SECOND), (5, FIRST)],
        [(5, SECOND), (4, FIRST)],
        [(5,)],
        [5],
        {5: SECOND},
        7,
    ],
)
def test_schedules_that_are_none_are_refused(folder: Path, schedule: Any) -> None:
    with pytest.raises(ConfigError, match=r"schedule.*rising steps") as caught:
        mixed(folder, schedule=schedule)
    assert caught.value.nouns["field"] == "schedule"


def test_only_loaders_over_a_mixture_have_weights(folder: Path) -> None:
    with (
        closing(DataLoader(folder / "web.parquet", batch_size=4)) as loader,
        pytest.raises(ConfigError, match="over a Mixture"),
    ):
        loader.set_weights({"web": 1})
    with pytest.raises(ConfigError, match="over a Mixture"):
        DataLoader([1, 2, 3]).set_weights({"web": 1})


def test_weights_with_which_an_epoch_would_have_no_step_are_refused(folder: Path) -> None:
    # It would end with the 40 samples of the last source.
    rare, until = {"web": 0, "code": 0, "math": 1}, {"exhausted": "stop", "length": None}
    with DataLoader(mixed(folder, **until), **OPTIONS) as loader:
        rows = rows_of(loader)
        with pytest.raises(ConfigError, match="40 samples, less than a global batch of 96, and"):
            loader.set_weights(rare)
        assert len(rows) == len(rows_of(loader)) == len(loader)
    scheduled = [(len(rows), rare), (9 * len(rows), FIRST)]
    with (
        closing(DataLoader(mixed(folder, schedule=scheduled, **until), **OPTIONS)) as loader,
        pytest.raises(ConfigError, match="no step is left"),
    ):
        len(loader)


def test_damaged_weights_in_a_state_are_refused(folder: Path) -> None:
    with DataLoader(mixed(folder), **OPTIONS) as loader:
        state = saved(loader)
        for damage in ("changes", "digest", "asked"):
            broken = copy.deepcopy(state)
            broken["mixture"][damage] = []
            with pytest.raises(ConfigError, match="damaged"):
                loader.load_state_dict(broken)
        assert len(rows_of(loader)) == 60


RANK = Path(__file__).parent / "on_mixtures.py"
LENGTH, RANK_ROUND, SET_AT, SAVED_AT, KILLED_AT = 3072, 1024, 5, 12, 15
EDITED = {"web": 0.5, "code": 0.0, "math": 0.5}
ONE_LANE: dict[str, Any] = {**OPTIONS, "lanes": 1}


def test_a_mixture_under_ddp_is_that_of_one_process_after_a_kill_on_other_ranks(
    tmp_path: Path, small_node: None, warm_torch: WarmPython
) -> None:
    folder, out = write_sources(tmp_path), tmp_path / "out"

    def ranks(phase: str, size: int, **more: Any) -> tuple[list[int], Rows]:
        """The exit statuses of all ranks, and their global batches."""
        given = {
            "phase": phase, "out": str(out), "folder": str(folder), "length": LENGTH,
            "options": ONE_LANE, "weights": FIRST, "state": None, "set_at": 0, "set_to": SECOND,
            "saved_at": 0, "killed_at": 0,
        }  # fmt: skip
        done = launch(warm_torch, RANK, out, json.dumps({**given, **more}), size=size)
        files = sorted(out.glob(f"{phase}-*.jsonl"))
        passes = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        return done, joined(passes)

    times = {"set_at": SET_AT, "saved_at": SAVED_AT, "killed_at": KILLED_AT}
    killed, first = ranks("first", 2, **times)
    assert killed == [-signal.SIGKILL] * 2, (out / "errors").read_text()
    states = [json.loads((out / f"state-{rank}.json").read_text()) for rank in range(2)]
    assert states[0] == states[1]
    done, rest = ranks("rest", 4, state=states[0], weights=EDITED)
    assert done == [0] * 4, (out / "errors").read_text()

    whole = []
    with DataLoader(mixed(folder, length=LENGTH), **ONE_LANE) as loader:
        for batch in loader:
            whole.append(batch["id"].tolist())
            if len(whole) == SET_AT:
                loader.set_weights(SECOND)
            if len(whole) == SAVED_AT:
                state = saved(loader)
    with DataLoader(mixed(folder, EDITED, length=LENGTH), **ONE_LANE) as loader:
        loader.load_state_dict(state)
        assert rows_of(loader) == rest
    assert states[0] == state
    assert first == whole[:KILLED_AT]
    # The weights that were set, and then those of the edited mixture.
    changed, edited = (
        RANK_ROUND // BATCH,
        2 * RANK_ROUND // BATCH - SAVED_AT,
    )
    assert counts_of(whole[:changed])[1] < counts_of(whole[changed + 1 : 2 * changed])[1]
    assert rest[:edited] == whole[SAVED_AT : SAVED_AT + edited]
    assert counts_of(rest[edited + 1 :])[1] == 0
