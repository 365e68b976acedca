"""Schedules of stages: one run whose recipe changes at given steps and after given epochs."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import recipes
import torch
from dataplane_torch import DataLoader, Pack, Stage
from recipes import ids_of, ranks, read, some, write

from dataplane.cli import run
from dataplane.model.errors import ConfigError

DROP = {"end": "drop"}  # else the last steps of an epoch may depend on the number of ranks


def of_sources(folder: Path) -> Any:
    return {"a": some(folder, 0, 1), "b": some(folder, 2, 3)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shared_node: None) -> Path:
    return write(tmp_path_factory.mktemp("schedules"))


def plain(state: Any) -> Any:
    return json.loads(json.dumps(state))


def with_a_loader_each(
    folder: Path, parts: list[tuple[Any, dict[str, Any], dict[str, Any]]]
) -> list[list[Any]]:
    """The twin: a loader of its own for each stage, and `change=` between them. Return the steps of
    each pass.
    """
    passes, state, former, last = list[list[Any]](), None, None, None
    for urls, lasts, options in parts:
        change = lasts.get("change") or "restart"
        before = former if state and last != urls else None
        made = recipes.urls(folder, urls)
        with ranks(made, 1, state, change if state else None, before, **DROP, **options) as (
            loader,
        ):
            left = lasts.get("steps")
            for _ in range(lasts.get("epochs", 2) if left is None else 99):
                passes.append(read([loader], left))
                left = None if left is None else left - len(passes[-1])
                state = plain(loader.state_dict())
                if left == 0:
                    break
        last, former = urls, of_sources(folder) if urls == "mixed" else some(folder, *urls)
    return passes


def stages_of(folder: Path, parts: list[Any]) -> list[Stage]:
    return [Stage(recipes.urls(folder, urls), **lasts, **options) for urls, lasts, options in parts]


def random_parts(chance: random.Random) -> list[Any]:
    """A schedule of 2 to 4 stages of random recipes."""
    options = [
        {"columns": ["id", "tokens"], "max_length": 4}, {"columns": ["id", "tokens"]},
        {"global_batch_size": 12}, {"seed": 5}, {"pack": Pack("tokens", 32), "columns": None},
        {"lanes": 4, "window": 9},
    ]  # fmt: skip
    datasets: list[Any] = [(0, 1), (0, 1, 2), (1, 2), "mixed"]
    parts: list[Any] = []
    count = chance.randint(2, 4)
    for number in range(count):
        lasts: dict[str, Any] = {}
        if number < count - 1:
            lasts = chance.choice([{"steps": chance.randint(1, 9)}, {"epochs": 1}, {"epochs": 2}])
        if number and "steps" in parts[-1][1]:
            lasts["change"] = chance.choice(["restart", "unread"])
        others = [recipe for recipe in options if not parts or recipe != parts[-1][2]]
        parts.append((chance.choice(datasets), lasts, chance.choice(others)))
    return parts


@pytest.mark.parametrize(
    "seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 15))]
)
def test_a_random_schedule_is_what_a_loader_for_each_stage_delivers(
    seed: int, folder: Path, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    parts = random_parts(chance)
    passes = with_a_loader_each(folder, parts)
    steps = list(itertools.chain(*passes))
    options = {**DROP, "stages": stages_of(folder, parts)}
    states: list[Any] = []
    with ranks(some(folder, 0), **options) as (loader,):
        while len(states) < len(steps):
            for batch in loader:
                assert ids_of(batch) == steps[len(states)]
                states.append(plain(loader.state_dict()))
        (tmp_path / "ledger.jsonl").write_text(loader.ledger())
    assert run(["ledger", "verify", str(tmp_path / "ledger.jsonl")]) == 0
    ends = set(itertools.accumulate(map(len, passes[:-1])))
    points = {at + by for at in ends for by in (-1, 0, 1)} | {chance.randrange(len(steps))}
    for at in sorted(point for point in points if 0 < point < len(steps)):
        with ranks(some(folder, 0), chance.randint(1, 4), states[at - 1], **options) as loaders:
            rest: list[Any] = []
            for _ in range(len(passes) + 1):
                rest += read(loaders)
                if len(rest) >= len(steps) - at:
                    break
            assert rest == steps[at:]
            digests = {loader.state_dict()["digest"]["value"] for loader in loaders}
            assert digests == {states[-1]["digest"]["value"]}


def test_each_sample_comes_once_over_stages_of_what_is_unread(folder: Path) -> None:
    stages = [
        Stage(steps=2),
        Stage(steps=3, change="unread", global_batch_size=12),
        Stage(change="unread", seed=9),
    ]
    with ranks(some(folder, 0, 1, 2), 3, stages=stages) as loaders:
        passes = [read(loaders) for _ in range(3)]
        assert [len(steps) for steps in passes[:2]] == [2, 3]
        assert [len(step) for step in passes[1]] == [12] * 3
        assert {loader.epoch for loader in loaders} == {3}
        assert sorted(itertools.chain(*itertools.chain(*passes))) == list(range(180))
        assert sorted(itertools.chain(*read(loaders))) == list(range(180))


def test_a_loop_over_epochs_reads_and_resumes_a_schedule(folder: Path) -> None:
    options = {"stages": [Stage(steps=7), Stage(epochs=1, change="restart", seed=4), Stage(seed=5)]}
    urls = some(folder, 0, 1)
    seen, states = list[tuple[int, list[Any]]](), list[Any]()
    with ranks(urls, **options) as (loader,):
        for epoch in range(4):
            loader.set_epoch(epoch)
            for batch in loader:
                seen.append((epoch, ids_of(batch)))
                states.append(plain(loader.state_dict()))
    counts = Counter(epoch for epoch, _ in seen)
    assert counts == {0: 5, 1: 2, 2: 5, 3: 5}
    assert [len(state.get("stages", [])) for state in states] == [0] * 7 + [1] * 5 + [2] * 5
    for at in (4, 5, 6, 7, 8, 11, 12):
        with ranks(urls, 2, states[at - 1], **options) as loaders:
            rest = []
            for epoch in range(seen[at - 1][0], 4):
                for loader in loaders:
                    loader.set_epoch(epoch)
                rest += [(epoch, step) for step in read(loaders)]
            assert rest == seen[at:]
    with ranks(urls, **options) as (loader,):  # a script that begins at an epoch of stage 3
        loader.load_state_dict(states[8])
        loader.set_epoch(3)
        assert [(3, step) for step in read([loader])] == seen[12:]


def test_steps_that_are_skipped_belong_to_their_stage(folder: Path) -> None:
    options = {"stages": [Stage(steps=4), Stage(change="restart", seed=4)]}
    with ranks(some(folder, 0, 1, 2), 2, **options) as loaders:
        assert {loader.skip(1) for loader in loaders} == {1}
        passes = [iter(loader) for loader in loaders]
        assert len(read(passes, 1)) == 1
        assert {loader.skip(9) for loader in loaders} == {2}
        assert read(passes) == []
        assert {loader.epoch for loader in loaders} == {1}
        assert len(read(loaders)) == 8


def test_weights_are_those_of_the_stage_of_the_chosen_epoch(folder: Path) -> None:
    options = {"stages": [Stage(epochs=1), Stage(recipes.mixed(folder))]}
    with ranks(some(folder, 0), **options) as (loader,):
        loader.set_epoch(1)
        assert loader.set_weights({"a": 1, "b": 3}) == (1, 0)
        assert loader.sources == ("a", "b")


def test_a_run_takes_up_a_schedule_and_changes_within_it(folder: Path) -> None:
    urls = some(folder, 0, 1)
    with ranks(urls) as (loader,):
        passes = iter(loader)
        read([passes], 2)
        state = plain(loader.state_dict())
        rest = read([passes])
    options = {"stages": [Stage(steps=4), Stage(change="restart", seed=4)]}
    with ranks(urls, 1, state, **options) as (loader,):
        assert read([loader]) == rest
        assert loader.epoch == 1
    with ranks(urls, 1, state, "restart", **{**options, "window": 9}) as (loader,):
        assert len(read([loader])) == 4
        state = plain(loader.state_dict())
        assert [stage.get("planned", False) for stage in state["stages"]] == [False, True]
    more = {**state, "stages": [*state["stages"], *state["stages"][1:]]}
    with (
        pytest.raises(ConfigError, match="of stage 3 of a schedule, and this loader has 2 stages"),
        ranks(urls, 1, more, **options),
    ):
        pass


def test_stages_that_are_over_stay_as_they_were(folder: Path) -> None:
    urls, first = some(folder, 0, 1), Stage(steps=4)
    second = Stage(epochs=1, change="restart", window=9)
    last = Stage(some(folder, 1, 2), seed=4)
    with ranks(urls, stages=[first, second, last], end="drop") as (loader,):
        passes = [read([loader]) for _ in range(3)]
        assert loader.dataset.urls == (*some(folder, 1, 2),)
        state = plain(loader.state_dict())
        rest = read([loader])
        assert [len(steps) for steps in passes] == [4, 5, 5]
    third = Stage(some(folder, 1, 2), seed=4, epochs=1)
    later = Stage(some(folder, 1, 2), seed=4, global_batch_size=12)
    for number, stages in (
        (1, [Stage(steps=5), second, last]),
        (1, [Stage(steps=4, max_length=3), second, last]),
        (1, [Stage(steps=4, seed=9), second, last]),
        (1, [Stage(recipes.mixed(folder), steps=4), second, last]),
        (2, [first, Stage(epochs=1, change="unread", window=9), last]),
        (1, [Stage(epochs=1, window=9), third, later]),  # the first was removed
    ):
        with (
            pytest.raises(ConfigError, match=rf"stage {number} of stages= .* which is over"),
            ranks(urls, 1, state, end="drop", stages=stages),
        ):
            pass
    moved = [Stage(urls[::-1], steps=4), second, last]
    with ranks(urls, 2, state, end="drop", stages=moved) as loaders:
        assert read(loaders) == rest


def test_a_ledger_traces_every_step_and_plan_shows_stages_behind_and_ahead(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*command: str) -> Any:
        capsys.readouterr()
        assert run([*command, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    stages = [
        Stage(steps=3),
        Stage(epochs=1, change="unread", global_batch_size=12),
        Stage(some(folder, 1, 2), steps=4, seed=4),
        Stage(change="restart", max_length=3, columns=["id", "tokens"]),
    ]
    ledger, saved = str(tmp_path / "ledger.jsonl"), [str(tmp_path / name) for name in ("s", "c")]
    with ranks(some(folder, 0, 1), stages=stages) as (loader,):
        passes = [read([loader]) for _ in range(2)]
        third = iter(loader)
        passes.append(read([third], 2))
        state = loader.state_dict()
        Path(ledger).write_text(loader.ledger())
        Path(saved[0]).write_text(json.dumps({"step": 3, "loader": state}))
        torch.save({"model": {"w": torch.ones(2)}, "loader": state}, saved[1])
    assert run(["ledger", "verify", ledger]) == 0
    every = 0
    for epoch, steps in enumerate(passes):
        for step, expected in enumerate(steps):
            for named in (
                ["--epoch", str(epoch), "--step", str(step)],
                ["--global-step", str(every)],
            ):
                rows = shown("trace", ledger, *named)
                ids = [int(row["shard"].split(".")[-2][-1]) * 60 + row["row"] for row in rows]
                assert ids == expected
            every += 1
    ahead = [{
        "stage": 4, "begins": "after 2 more steps", "change": "restart",
        "options": "max_length=3, columns",
    }]  # fmt: skip
    planned = shown("plan", ledger)
    assert [(of["first_global_step"], of["steps"]) for of in planned["stages"]] == [
        (0, 3), (3, 4), (7, 5),
    ]  # fmt: skip
    assert planned["stages_ahead"] == ahead
    for path in saved:
        planned = shown("plan", path)
        assert [(of["last_epoch"], of["last_step"], of["changed"]) for of in planned["stages"]] == [
            (0, 3, []), (1, None, ["global_batch"]), (2, 2, ["global_batch", "seed"]),
        ]  # fmt: skip
        assert (planned["stages_ahead"], planned["cursor"]) == (ahead, 48)
    assert run(["plan", saved[0]]) == run(["plan", ledger]) == 0
    assert "what was unread" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stages", "match"),
    [
        ([], "pass a list of 2 to"),
        ([Stage()], "pass a list of 2 to"),
        ([Stage(steps=1), {"seed": 1}], "pass a list of 2 to"),
        ([Stage(), Stage(seed=1)], "stage 1 does not say how long it lasts"),
        ([Stage(steps=1), Stage(seed=1)], "stage 2 begins within an epoch"),
        ([Stage(epochs=1, change="unread"), Stage(seed=1)], "the first stage begins the run"),
        ([Stage(epochs=1), Stage(seed=1, steps=3)], "the last stage goes on until"),
        ([Stage(epochs=1), Stage()], "stage 2 has the recipe of the stage before it"),
        ([Stage(epochs=1), Stage(seed=-1)], "stage 2: seed=-1"),
        ([Stage(epochs=1), Stage(["/nowhere/x.parquet"])], "there is no file or folder"),
    ],
)
def test_an_impossible_schedule_is_refused_when_the_loader_is_made(
    stages: Any, match: str, folder: Path
) -> None:
    with pytest.raises(Exception, match=match) as caught:
        DataLoader(some(folder, 0), 4, stages=stages)
    assert type(caught.value).__name__ in ("ConfigError", "ShardNotFound")


def test_a_stage_that_the_dataset_refuses_ends_the_run_at_its_start(folder: Path) -> None:
    stages = [Stage(epochs=5), Stage(seed=4, steps=3), Stage(change="unread", columns=["idd"])]
    with ranks(some(folder, 0), stages=stages) as (loader,):
        with pytest.raises(ConfigError, match=r"stage 3 \(.*s0.parquet\): .*idd"):
            next(iter(loader))
        with pytest.raises(ConfigError, match="stage 3"):
            len(loader)


def test_an_impossible_stage_is_refused() -> None:
    with pytest.raises(ConfigError, match="pass one"):
        Stage(steps=1, epochs=1)
    with pytest.raises(ConfigError, match="steps=0: pass a whole number from 1"):
        Stage(steps=0)
    with pytest.raises(ConfigError, match="give the stage before it epochs="):
        Stage(change="finish")
    with pytest.raises(ConfigError, match="service holds for the whole run"):
        Stage(service="x")
    with pytest.raises(TypeError, match=r"Stage\(\) has no argument 'seq_len'. Use max_length="):
        Stage(seq_len=4)
