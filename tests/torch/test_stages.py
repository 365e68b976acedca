"""Runs whose recipe changes: stages, over a real node."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shutil
import sys
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dataplane_torch import ShardedIterableDataset
from dataplane_torch.arguments import before_of
from plan import plain
from recipes import (
    BATCH,
    GROUP,
    OPTIONS,
    RECIPES,
    ROWS,
    ids_of,
    mixed,
    ranks,
    read,
    some,
    state_after,
    urls,
    write,
)
from warm import WarmPython

from dataplane.cli import run
from dataplane.client.describe import answer_of
from dataplane.client.mixing import _sample_count
from dataplane.client.state import RunState
from dataplane.model.errors import ConfigError, SpecMismatch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shared_node: None) -> Path:
    return write(tmp_path_factory.mktemp("stages"))


def twin(delivered: list[Any], new: list[Any]) -> list[Any]:
    """The plain rule: of the new recipe's data, what was not delivered."""
    return sorted(set(new) - set(delivered))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_stage_begins_with_an_epoch_of_its_own_on_any_number_of_ranks(
    recipe: str, folder: Path
) -> None:
    before, after, old, new = RECIPES[recipe]
    before, after = urls(folder, before), urls(folder, after)
    state = state_after(before, 2, **old)
    with pytest.raises(SpecMismatch, match='change="restart"'), ranks(after, state=state, **new):
        pass
    with ranks(after, **new) as loaders:  # what another run has in this epoch
        loaders[0].set_epoch(1)
        expected = read(loaders)
    size = 2 + len(recipe) % 3
    with ranks(after, size, state, "restart", **new) as loaders:
        assert {loader.epoch for loader in loaders} == {1}
        assert read(loaders, 2) == expected[:2]
        states = [loader.state_dict() for loader in loaders]
    assert all(other == states[0] for other in states)
    (stage,) = states[0]["stages"]
    assert (stage["epoch"], stage["digest"]) == (0, state["spec_digest"])
    assert stage["rows"] == state["digest"]["value"] == states[0]["digest"]["base"]
    for change in (None, "restart"):  # a script that always passes it begins one stage
        with ranks(after, 1, states[0], change, **new) as loaders:
            assert read(loaders) == expected[2:]
            assert loaders[0].state_dict()["stages"] == [stage]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_rest_of_an_epoch_comes_before_the_next_stage_on_any_number_of_ranks(
    recipe: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after, old, new = RECIPES[recipe]
    former = {"a": some(folder, 0, 1), "b": some(folder, 2, 3)} if before == "mixed" else None
    former = some(folder, *before) if recipe == "shard lost" else former
    before, after = urls(folder, before), urls(folder, after)
    with ranks(before, **old) as loaders:  # the twin: each recipe has a loader of its own
        epochs, ended = [read(loaders)], loaders[0].state_dict()["digest"]["value"]
    with ranks(after, **new) as loaders:
        loaders[0].set_epoch(1)
        epochs += [read(loaders), read(loaders)]
    expected, states = [*epochs[0], *epochs[1]], [state_after(before, 1, **old)]
    with ranks(after, **new) as (loader,):
        sentence = loader.load_state_dict(states[0], change="finish", before=former)
        assert "Stage 2 of this run begins with epoch 1: " in sentence
        assert len(loader) == len(epochs[0])
        for batch in itertools.chain(loader, loader):
            assert ids_of(batch) == expected[len(states)]
            states.append(json.loads(json.dumps(loader.state_dict())))
        assert read([loader]) == epochs[2]
        (tmp_path / "ledger.jsonl").write_text(loader.ledger())
    (stage,) = states[-1]["stages"]
    assert (stage["epoch"], stage["rows"], len(states)) == (1, ended, len(expected))
    change, turn = len(epochs[0]), [*RECIPES].index(recipe)
    steps = change - 1 + turn % 3  # before, at and after the end of the epoch
    with ranks(after, 1 + turn % 4, **new) as loaders:
        for loader in loaders:
            loader.load_state_dict(states[steps - 1], change="finish", before=former)
        rest = [*read(loaders), *(read(loaders) if steps < change else [])]
        assert rest == expected[steps:]
        assert all(loader.state_dict()["stages"] == [stage] for loader in loaders)
    if recipe in ("seed and batch", "source removed", "shard lost"):
        check_traces(str(tmp_path / "ledger.jsonl"), capsys, *epochs, batch=())


def test_a_sentence_says_what_has_changed_and_nothing_if_nothing_has(folder: Path) -> None:
    state = state_after(some(folder, 0), 1)
    with ranks(some(folder, 0), seed=4) as (loader,):
        assert loader.load_state_dict(state, change="restart") == (
            "stage 2 of this run begins with epoch 1: seed: 3 in the state, 4 here. Epoch 0 ended "
            "after 24 of 60 samples, which stay delivered, and epoch 1 has all of the data"
        )
        with pytest.raises(ConfigError, match=r"change='now': pass \"restart\""):
            loader.load_state_dict(state, change="now")
    with ranks(some(folder, 0)) as (loader,):
        assert loader.load_state_dict(state, change="restart") == ""
        assert loader.epoch == 0


def test_an_epoch_that_has_ended_is_followed_by_the_next_stage(folder: Path) -> None:
    state = state_after(some(folder, 0), 3)
    with ranks(some(folder, 0), seed=4) as (loader,):
        sentence = loader.load_state_dict(state, change="unread")
        assert sentence.endswith(
            "All 1 epochs before it are complete, and epoch 1 has all of the data"
        )
        assert loader.epoch == 1
        assert loader.state_dict()["stages"][0]["cursor"] == 0


def test_epochs_of_a_former_stage_are_over(folder: Path) -> None:
    state = state_after(some(folder, 0), 1, epoch=2)
    with ranks(some(folder, 0), state=state, change="restart", seed=4) as (loader,):
        loader.set_epoch(2)  # as a script does that resumes in this epoch
        assert list(loader) == []
        assert loader.epoch == 3
        assert sorted(itertools.chain(*read([loader]))) == list(range(ROWS))
        with pytest.raises(ConfigError, match="epoch 1 belongs to a former stage"):
            loader.set_epoch(1)


def test_a_run_may_change_several_times(folder: Path) -> None:
    state, chain = state_after(some(folder, 0), 1), []
    for seed in (4, 5, 6):
        with ranks(some(folder, 0), 1, state, "restart", seed=seed) as loaders:
            read(loaders, 1)
            state = json.loads(json.dumps(loaders[0].state_dict()))
        assert state["stages"][:-1] == chain
        chain = state["stages"]
    assert [stage["epoch"] for stage in chain] == [0, 1, 2]
    assert [stage.get("rows") for stage in chain[1:]] != [chain[0]["rows"]] * 2
    with ranks(some(folder, 0), 3, state, seed=6) as loaders:
        rest = read(loaders)
    with ranks(some(folder, 0), seed=6) as loaders:
        loaders[0].set_epoch(3)
        assert read(loaders)[1:] == rest
    damaged = {**state, "stages": chain[::-1]}
    with pytest.raises(ConfigError, match="its stages"), ranks(some(folder, 0), state=damaged):
        pass


def test_a_state_after_a_change_has_only_plain_values(folder: Path) -> None:
    """`torch.load` by default reads nothing else."""
    lists = {"columns": ["id", "tokens"], "max_length": 4, "truncation_side": "left"}
    for url, more in ((some(folder, 0), {"drop_last": True, **lists}), (mixed(folder), {})):
        state = state_after(url, 1, **more)
        with ranks(url, state=state, change="restart", seed=4, **more) as (loader,):
            state = loader.state_dict()
        saved = io.BytesIO()
        torch.save(state, saved)
        assert torch.load(io.BytesIO(saved.getvalue())) == state


def test_rows_that_are_replaced_from_now_on_change_no_recipe(folder: Path) -> None:
    state = state_after(some(folder, 0), 1)
    with ranks(some(folder, 0), state=state, on_bad="replace") as (loader,):
        read([loader], 1)
        later = loader.state_dict()
    assert later["spec_digest"] == state["spec_digest"]
    with ranks(some(folder, 0), 1, later, "unread", on_bad="replace", seed=4) as loaders:
        assert len([*itertools.chain(*read(loaders))]) == ROWS - 2 * BATCH


def test_ranks_that_pass_different_changes_are_refused(folder: Path) -> None:
    state = state_after(some(folder, 0), 1)
    with ranks(some(folder, 0), 2, seed=4) as (first, second):
        first.load_state_dict(state, change="restart")
        with pytest.raises(SpecMismatch, match="stages"):
            second.load_state_dict({})


@pytest.mark.parametrize(
    "before",
    [
        "https://h/a.parquet?X-Amz-Signature=abc",
        {"web": ["s3://b/c", "https://me:pass@h/a.parquet"]},
    ],
)
def test_signed_urls_of_former_shards_are_refused(before: Any) -> None:
    """Their signatures would be in states and ledgers."""
    with pytest.raises(ConfigError, match=r"before= has https://h/a.parquet with a sig"):
        before_of(before)


def test_a_torch_loader_over_shards_changes_too(folder: Path) -> None:
    state = state_after(some(folder, 0), 1)
    with ranks(some(folder, 0), 1, state, "restart", seed=4) as loaders:
        expected = read(loaders)
    options = {**OPTIONS, "seed": 4, "name": "stages", "global_batch_size": BATCH}
    dataset = ShardedIterableDataset(some(folder, 0), **options)
    with contextlib.closing(dataset):
        assert dataset.load_state_dict(state, change="restart").startswith("stage 2")
        assert [ids_of(batch) for batch in dataset] == expected
        assert dataset.state_dict()["stages"][0]["epoch"] == 0


@pytest.mark.parametrize("case", range(4))
def test_an_epoch_of_what_is_unread_resumes_on_any_number_of_ranks(
    case: int, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after, old, new = [
        (some(folder, 0, 1), some(folder, 0, 1, 2), {}, {"seed": 4, "global_batch_size": 12}),
        (some(folder, 0, 1), mixed(folder, exhausted="renormalise"), {}, {}),
        (mixed(folder), some(folder, 1, 2, 3), {}, {}),
        (some(folder, 0, 1, 2), some(folder, 0, 2, 3), {"where": "half == 0"},
         {"where": "half == 0"}),
    ][case]  # fmt: skip
    former = {"a": some(folder, 0, 1), "b": some(folder, 2, 3)} if case == 2 else before
    change = {"change": "unread", "before": former if case > 1 else None}
    with ranks(before, **old) as loaders:
        delivered = read(loaders, 2)
        state = json.loads(json.dumps(loaders[0].state_dict()))
    with ranks(after, **new) as loaders:
        every = list(itertools.chain(*read(loaders)))
    if case == 1:
        every = list(range(4 * ROWS))  # the mixture stops
    left = twin(list(itertools.chain(*delivered)), every)
    with ranks(after, **new) as (loader,):
        assert "what is new" in loader.load_state_dict(state, **change)
        steps = -(-len(left) // new.get("global_batch_size", BATCH))
        assert (len(loader), loader.epoch) == (steps, 1)
        batches, states = [], []
        for batch in loader:
            batches.append(ids_of(batch))
            states.append(json.loads(json.dumps(loader.state_dict())))
        assert sorted(itertools.chain(*batches)) == left
        if case == 1:
            loader.set_epoch(1)
            with pytest.raises(ConfigError, match="its weights cannot change within it"):
                loader.set_weights({"a": 1, "b": 2})
            loader.set_epoch(2)
        following = read([loader])
        assert sorted(itertools.chain(*following)) == sorted(every)
        (tmp_path / "ledger.jsonl").write_text(loader.ledger())
    size = 2 + case % 3
    with ranks(after, size, **new) as loaders:
        for loader in loaders:
            loader.load_state_dict(state, **change)
        assert read(loaders) == batches
    with ranks(after, size, states[size - 2], **new) as loaders:  # within the epoch
        assert read(loaders) == batches[size - 1 :]
        assert read(loaders) == following
        assert {loader.state_dict()["epoch"] for loader in loaders} == {3}
    check_traces(str(tmp_path / "ledger.jsonl"), capsys, delivered, batches, following)


def check_traces(
    ledger: str,
    capsys: Any,
    *epochs: list[list[Any]],
    batch: tuple[str, ...] = ("--global-batch", str(BATCH)),
) -> None:
    """`trace` and `look` name the rows of all steps of all stages."""

    def shown(command: str, *step: str) -> Any:
        capsys.readouterr()
        assert run([command, ledger, *step, *batch, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    def traced(*step: str) -> list[Any]:
        rows = shown("trace", *step)
        return [int(row["shard"].split(".")[-2][-1]) * ROWS + row["row"] for row in rows]

    for epoch, batches in enumerate(epochs):
        assert traced("--epoch", str(epoch), "--step", "1") == batches[1]
        samples = shown("look", "--epoch", str(epoch), "--step", "1")["samples"]
        assert [row["id"] for row in samples] == batches[1]
    for epoch in range(3):
        first = sum(map(len, epochs[:epoch]))
        assert traced("--global-step", str(first)) == epochs[epoch][0]
    assert run(["plan", ledger, *batch, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["stages"]
    assert [(stage["steps"], stage["first_global_step"], stage["unread"]) for stage in planned] == [
        (len(epochs[0]), 0, False),
        (len(epochs[1]) + len(epochs[2]), len(epochs[0]), bool(batch)),
    ]
    assert run(["plan", ledger, *batch]) == 0
    assert run(["trace", ledger, *batch, "--epoch", "1", "--step", "99"]) == 2
    assert f"has {len(epochs[1])} steps" in capsys.readouterr().err
    assert run(["ledger", "verify", ledger]) == 0
    assert run(["ledger", "show", ledger]) == 0
    assert ("what was unread" in capsys.readouterr().out) == bool(batch)


RANK = """
import json, sys
import dataplane_torch
options = json.loads(sys.argv[2])
loader = dataplane_torch.DataLoader(
    sys.argv[1].split(), global_batch_size=24, shuffle=True, columns=["id"], **options
)
loader.load_state_dict(json.loads(sys.argv[3]), change="unread")
steps = [batch["id"].tolist() for batch in loader]
print(json.dumps([steps, loader.state_dict()]), flush=True)
sys.stdin.read()
"""


def test_processes_of_one_launch_agree_on_a_change(
    folder: Path, tmp_path: Path, warm_torch: WarmPython
) -> None:
    more = {"seed": 4, "lanes": 2, "window": 20}
    state = state_after(some(folder, 0, 1), 2)
    with ranks(some(folder, 0, 1, 2), 1, state, "unread", **more) as loaders:
        expected, ended = read(loaders), loaders[0].state_dict()
    (tmp_path / "rank.py").write_text(RANK)
    launched = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": uuid.uuid4().hex}
    arguments = [
        str(tmp_path / "rank.py"), " ".join(some(folder, 0, 1, 2)), json.dumps(more),
        json.dumps(state),
    ]  # fmt: skip
    processes = [
        warm_torch.run(
            arguments,
            {**os.environ, **launched, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            sys.stderr.fileno(),
        )
        for rank in range(2)
    ]
    lines = [process.stdout.readline() for process in processes]  # before one of them ends
    for process in processes:
        process.stdin.close()
        process.stdout.close()
        assert process.wait(60) == 0
    (first, state), (second, other) = map(json.loads, lines)
    pairs = zip(first, second, strict=True)
    assert [sorted(a + b) for a, b in pairs] == list(map(sorted, expected))
    assert state == other == json.loads(json.dumps(ended))


def test_steps_are_skipped_without_a_service(folder: Path) -> None:
    with ranks(some(folder, 0, 1, 2)) as loaders:
        whole = read(loaders)
        following = read(loaders)
    for size in (1, 3):
        with ranks(some(folder, 0, 1, 2), size) as loaders:
            passes = [iter(loader) for loader in loaders]
            assert read(passes, 2) == whole[:2]
            assert {loader.skip(3) for loader in loaders} == {3}
            states = [loader.state_dict() for loader in loaders]
            assert read(passes, 1) == whole[5:6]
            assert {loader.skip(9) for loader in loaders} == {2}
            assert read(passes) == []
            assert read(loaders, 2) == following[:2]
        with ranks(some(folder, 0, 1, 2), 2, states[0]) as loaders:
            assert {loader.skip(1) for loader in loaders} == {1}  # before the first batch
            assert read(loaders) == whole[6:]
        assert all(state == states[0] for state in states)
        assert states[0]["cursor"] == 5 * BATCH
        before = state_after(some(folder, 0, 1, 2), 2)
        assert states[0]["digest"]["value"] == before["digest"]["value"]
    with ranks(some(folder, 0)) as (loader,), pytest.raises(ConfigError, match=r"skip\(-1\)"):
        loader.skip(-1)


def test_rows_and_shards_are_taken_out_without_a_service(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    whole, there, away = str(tmp_path / "all.manifest"), tmp_path / "s1.parquet", tmp_path / "away"
    assert run(["index", *some(tmp_path, 0, 1, 2), "-o", whole]) == 0
    with ranks(whole) as loaders:
        plan, later = read(loaders), read(loaders)
    lost, blocks = range(4, 8), 3 * ROWS // GROUP

    def given(row: int) -> int:
        block, at = divmod(row, GROUP)
        if block in lost:
            block = plain.substitute(3, 1, block * GROUP - ROWS, blocks, lost)
        return (
            plain.substitute(3, 0, 7, GROUP, {7}) if (block, at) == (0, 7) else block * GROUP + at
        )

    expected = [*plan[:2], *([given(row) for row in batch] for batch in plan[2:])]
    states = []
    for size in (1, 3):
        with ranks(whole, size) as loaders:
            passes = [iter(loader) for loader in loaders]
            assert read(passes, 2) == expected[:2]
            there.rename(away)
            for loader in loaders:
                loader.tombstone("s1.parquet", "s0.parquet:7")
            assert read(passes) == []
            assert read(loaders, 1) == expected[2:3]
            states += [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
            ledger = loaders[0].ledger()
            away.rename(there)
    there.unlink()
    assert all(state == states[0] for state in states)
    for size in (2, 4):
        with ranks(whole, size, states[0]) as loaders:
            assert read(loaders) == expected[3:]
            assert read(loaders) == [[given(row) for row in batch] for batch in later]
    with ranks(whole, 1, states[0], "finish", seed=5) as loaders:  # also after a change
        assert read(loaders) == expected[3:]
        assert not {*itertools.chain(*read(loaders))} & {7, *range(ROWS, 2 * ROWS)}
        for name in ("s9.parquet", "", 3, ["s0.parquet"]):
            with pytest.raises(ConfigError, match=r"no shard 's9|give names of shards"):
                loaders[0].tombstone(name)
        assert len(loaders[0].state_dict()["taken_out"]) == 2
    (tmp_path / "ledger").write_text(ledger)
    for step in range(3):
        capsys.readouterr()
        asked = ["--data", whole, "--epoch", "0", "--step", str(step), "--json"]
        assert run(["trace", str(tmp_path / "ledger"), *asked]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert [int(row["shard"][-9]) * ROWS + row["row"] for row in rows] == expected[step]
    assert run(["ledger", "verify", str(tmp_path / "ledger")]) == 0


def test_what_was_taken_out_stays_out_wherever_the_shards_are(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    with ranks(some(folder, 0, 1, 2)) as loaders:
        read(loaders, 1)
        for _ in range(2):  # the second time changes nothing
            loaders[0].tombstone("s1.parquet", "0:7", "s0.parquet:7")
        state = json.loads(json.dumps(loaders[0].state_dict()))
        expected = read(loaders)
    assert not {*itertools.chain(*expected)} & {7, *range(ROWS, 2 * ROWS)}
    with ranks(some(tmp_path, 0, 1, 2), 2, state) as loaders:
        assert read(loaders) == expected
        taken = loaders[0].state_dict()["taken_out"]
    assert {row[0] for row in taken} == {
        f"file://{tmp_path}/s1.parquet",
        f"file://{tmp_path}/s0.parquet:7",
    }
    with ranks(some(folder, 2, 3)) as (loader,):
        assert "6 of the 6 rows and shards" in loader.load_state_dict(state, "restart")


def test_a_run_that_finishes_an_epoch_resumes_without_naming_its_change_again(
    folder: Path,
) -> None:
    state, former = state_after(some(folder, 0, 1), 1), some(folder, 0, 1)
    states = []
    with ranks(some(folder, 2, 3), 1, state, "finish", former, seed=5) as (loader,):
        batches = [ids_of(batch) for batch in loader]
        for _ in range(2):
            loader.load_state_dict(state, "finish", former)
            rest = iter(loader)
            for _ in range(2 if not states else len(batches)):
                next(rest)
            states.append(json.loads(json.dumps(loader.state_dict())))
        expected = read([loader])
    with ranks(some(folder, 2, 3), 2, states[0], seed=5) as loaders:
        assert read(loaders) == batches[2:]
        assert read(loaders) == expected
    with ranks(some(folder, 2, 3), 1, states[1], seed=5) as loaders:
        assert read(loaders) == expected
    with ranks(former, 1, states[0]) as loaders:  # the run may also stay with its old recipe
        assert read(loaders) == batches[2:]
    for state in states:
        with (
            pytest.raises(SpecMismatch, match="neither that recipe nor the one that followed"),
            ranks(some(folder, 2, 3), 1, state, seed=6),
        ):
            pass


def test_a_shard_that_a_former_recipe_takes_out_is_no_other_in_the_next_one(folder: Path) -> None:
    state, shards = state_after(some(folder, 0, 1), 1), some(folder, 2, 3)
    with ranks(shards, 1, state, "finish", some(folder, 0, 1)) as loaders:
        loaders[0].tombstone("0", "s1.parquet:3")
        read(loaders)
        assert sorted(itertools.chain(*read(loaders))) == list(range(2 * ROWS, 4 * ROWS))


def test_a_run_returns_to_its_epoch_of_what_was_unread(folder: Path) -> None:
    shards, options = some(folder, 0, 1), {**OPTIONS, "name": "stages", "seed": 4}
    state = state_after(shards, 2)
    with ranks(shards, 1, state, "unread", seed=4) as loaders:
        expected, following = read(loaders), read(loaders, 1)
        late = json.loads(json.dumps(loaders[0].state_dict()))
    assert (sum(map(len, expected)), late["epoch"]) == (72, 2)
    for change, begin in itertools.product((None, "restart"), (0, 1)):
        with ranks(shards, 1, late, change, seed=4) as loaders:
            session = loaders[0]._shards._session
            with pytest.raises(ConfigError, match="has only what was unread before"):
                answer_of(session, partial(_sample_count, 1, None))
            loaders[0].set_epoch(begin)  # 0 is over: the next pass is epoch 1
            assert ([] if begin else read(loaders)) == []
            assert read(loaders) == expected
            assert read(loaders, 1) == following
    for saved, change, begin in [(late, None, 1), (late, None, 0), (state, "unread", 0)]:
        dataset = ShardedIterableDataset(shards, BATCH, **options)
        with contextlib.closing(dataset):
            dataset.load_state_dict(saved, change=change)
            dataset.set_epoch(begin)
            if not begin:
                assert list(dataset) == []
                dataset.set_epoch(begin)
                assert list(dataset) == []
            assert [ids_of(batch) for batch in dataset] == expected
            assert ids_of(next(iter(dataset))) == following[0]


def test_an_epoch_that_a_change_follows_is_over(folder: Path) -> None:
    with ranks(some(folder, 0)) as loaders:
        loaders[0].set_epoch(1)
        passed = iter(loaders[0])
        assert [len(ids_of(next(passed))) for _ in range(3)] == [24, 24, 12]
        state = loaders[0].state_dict()
    assert state["in_last_step"]
    dataset = ShardedIterableDataset(
        some(folder, 0), BATCH, **{**OPTIONS, "seed": 4, "name": "stages"}
    )
    with ranks(some(folder, 0), seed=4) as (loader,), contextlib.closing(dataset):
        for reader in (loader, dataset):
            reader.load_state_dict(state, change="restart")
            reader.set_epoch(1)  # as a script does that resumes there
            assert list(reader) == []
            assert sum(len(ids_of(batch)) for batch in reader) == ROWS
            with pytest.raises(ConfigError, match="epoch 0 belongs to a former stage"):
                reader.set_epoch(0)


def test_a_damaged_list_of_stages_is_refused(folder: Path) -> None:
    state = state_after(some(folder, 0), 1)
    with ranks(some(folder, 0), 1, state, "restart", seed=4) as loaders:
        state = json.loads(json.dumps(loaders[0].state_dict()))
    (stage,) = state["stages"]
    nested = stage
    for _ in range(3000):
        nested = {**stage, "spec": {**stage["spec"], "stages": [nested]}}
    once = {**stage, "spec": {**stage["spec"], "stages": [stage]}}
    for stages, epoch, match in [
        ([nested], 1, "its stages"),
        ([once], 1, "stages of its own"),
        ([stage] * 1001, 1, "1001 stages are more than 1000"),
        ([{**stage, "cursor": 10**30}], 1, "its stages"),
        ([{**stage, "cursor": ROWS + 1}], 1, "cursor 61 of 60"),
        ([{**stage, "sample_count": 2**63}], 1, "its stages"),
        ([{**stage, "epoch": 2**70}], 1, "its stages"),
        ([{**stage, "epoch": 2**63}], 1, "its stages"),
        ([stage], 0, "epoch 0 lies before the end"),
    ]:
        with pytest.raises(ConfigError, match=match):
            RunState.from_dict({**state, "stages": stages, "epoch": epoch})
    numbers = {name: np.int64(stage[name]) for name in ("epoch", "cursor", "sample_count")}
    saved = RunState.from_dict({**state, "stages": [{**stage, **numbers}]})
    assert saved.to_dict() == state


def test_a_change_is_refused_if_the_state_does_not_say_enough(folder: Path) -> None:
    long = " or ".join(f"id == {number}" for number in range(300))
    cut = state_after(some(folder, 0), 1, where=long)
    with ranks(some(folder, 0), where=long, seed=4) as (loader,):
        with pytest.raises(ConfigError, match="a text above 2,000 characters"):
            loader.load_state_dict(cut, change="unread")
        assert loader.load_state_dict(cut, change="restart").startswith("stage 2")
    worker = {**state_after(some(folder, 0), 1), "step": 1, "step_stride": 1}
    options = {**OPTIONS, "name": "stages", "seed": 4}
    dataset = ShardedIterableDataset(some(folder, 0), BATCH, **options)
    with contextlib.closing(dataset), pytest.raises(ConfigError, match="one DataLoader worker"):
        dataset.load_state_dict(worker, change="restart")
