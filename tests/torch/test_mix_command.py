"""`dataplane mix`: weights of a job changed from outside, over a real service and real trainers."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import weighted
from dataplane_torch import DataLoader, ShardedIterableDataset
from fleet import Service
from weighted import BATCH, FIRST, OPTIONS, ROUND, SECOND, THIRD, joined, mixed, rows_of, saved

from dataplane.cli import run
from dataplane.model.records import Topology

SMALL = ("--block-arena-bytes", "32MiB", "--slab-bytes", "64KiB", "--worker-count", "1",
         "--delivery-bytes-per-rank", "2MiB")  # fmt: skip

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weighted.write_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    name = f"mix-{os.getpid()}:7077"
    state = str(tmp_path_factory.mktemp("service"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATAPLANE_STATE_DIR", state)
        patch.setenv("DATAPLANE_SERVICE", name)
        with Service("--listen", "127.0.0.1:0", "--service", name, *SMALL) as made:
            yield made


@pytest.fixture
def command(service: Service, capsys: pytest.CaptureFixture[str]) -> Command:
    """The JSON that a command prints, or, if a status is expected, its error."""

    def asked(*arguments: str, status: int = 0) -> Any:
        capsys.readouterr()
        as_json = () if status else ("--json",)
        found = run([*arguments, "--join", service.address, *as_json])
        told = capsys.readouterr()
        assert found == status, told.err
        return " ".join(told.err.split()) if status else json.loads(told.out)

    return asked


def weights(given: dict[str, float]) -> list[str]:
    return [f"{name}={weight}" for name, weight in given.items()]


@contextlib.contextmanager
def ranks(
    folder: Path,
    size: int,
    name: str,
    state: Any = None,
    given: dict[str, float] = FIRST,
    **mixture: Any,
) -> Iterator[list[Any]]:
    """The loaders of all ranks of one launch."""
    with contextlib.ExitStack() as stack:
        loaders: list[Any] = []
        for rank in range(size):
            place = Topology(rank, size, rank, size, rank, size)
            options = {**OPTIONS, "topology": place, "name": name}
            source = mixed(folder, given, **mixture)
            loaders.append(stack.enter_context(DataLoader(source, **options)))
        for loader in loaders if state else ():
            loader.load_state_dict(state)
        yield loaders


def set_inside(folder: Path, at: int, given: dict[str, float]) -> list[list[int]]:
    """The batches of a pass whose loop sets weights when it has come to this position."""
    with ranks(folder, 1, "inside") as (loader,):
        found = []
        for batch in loader:
            found.append(batch["id"].tolist())
            if len(found) * BATCH == at:
                loader.set_weights(given)
        return found


def test_weights_that_are_changed_from_outside_are_those_of_set_weights_on_every_rank(
    tmp_path: Path, command: Command
) -> None:
    # Rows so large that a node cannot read the rest of the epoch ahead while the command runs.
    folder = weighted.write_sources(tmp_path, pad=1024)
    with ranks(folder, 3, "j") as loaders:
        passes = [iter(loader) for loader in loaders]
        steps = [[next(one)["id"].tolist() for one in passes] for _ in range(7)]
        before = [saved(loader) for loader in loaders]
        told = command("mix", "j", *weights(SECOND))
        at = told["entry"]["position"]
        assert told["is_running"]
        assert (at["epoch"], at["cursor"] % BATCH) == (0, 0)
        # Batches that wait for their trainers count as read.
        assert 7 * BATCH <= at["cursor"] <= 2 * ROUND
        assert [saved(loader) for loader in loaders] == before
        states = []
        while batches := [one for one in (next(each, None) for each in passes) if one is not None]:
            steps.append([batch["id"].tolist() for batch in batches])
            states.append([saved(loader) for loader in loaders])
    found = joined([list(rank) for rank in zip(*steps, strict=True)])
    assert found == set_inside(folder, at["cursor"], SECOND)
    assert all(len({json.dumps(one) for one in state}) == 1 for state in states)
    passed = [state[0]["mixture"]["changes"] for state in states]
    there = at["cursor"] // BATCH - 7  # states behind this step have the change
    assert {len(changes) for changes in passed[:there]} == {1}
    assert {json.dumps(changes[1:]) for changes in passed[there:]} == {
        json.dumps([[0, -(-at["cursor"] // ROUND) * ROUND, passed[-1][1][2]]])
    }
    # From any state on, on another number of ranks, and with rows traced.
    for step, size in ((0, 2), (there, 4)):
        with ranks(folder, size, "j", states[step][0]) as again:
            rest = joined([rows_of(loader) for loader in again])
            assert rest == found[8 + step :]
            assert {saved(one)["digest"]["value"] for one in again} == {
                states[-1][0]["digest"]["value"]
            }
    kinds = [one["kind"] for one in command("ledger", "show", "j")]
    assert kinds.count("mix") == 1
    assert "weights" in kinds
    assert command("ledger", "verify", "j")["ok"]


def test_a_step_can_be_named_and_the_next_epoch_and_a_job_that_nobody_reads(
    folder: Path, command: Command
) -> None:
    with ranks(folder, 2, "k") as loaders:
        passes = [iter(loader) for loader in loaders]
        steps = [[next(one)["id"].tolist() for one in passes] for _ in range(3)]
        state = saved(loaders[0])
        said = command("mix", "k", *weights(THIRD), "--at-step", "1", status=2)
        assert "has begun step 1 of epoch 0, or its batches are already made" in said
        told = command("mix", "k", *weights(THIRD), "--at-step", "30")
        assert told["entry"]["position"] == {"epoch": 0, "cursor": 30 * BATCH}
        # Of the first step of the next epoch, and of one behind the last of this.
        command("mix", "k", *weights(SECOND), "--at-step", "70")
        steps += [
            [batch["id"].tolist() for batch in batches] for batches in zip(*passes, strict=True)
        ]
        following = joined([rows_of(loader) for loader in loaders])
        assert weighted.counts_of(following)[0] == pytest.approx(0.1 * 5760, abs=20)
        ends = [saved(loader) for loader in loaders]
        assert ends[0] == ends[1]
    found = joined([list(rank) for rank in zip(*steps, strict=True)])
    assert found == set_inside(folder, 30 * BATCH, THIRD)
    changes = ends[0]["mixture"]["changes"]
    assert [one[:2] for one in changes] == [[0, 0], [0, 2 * ROUND], [1, 0]]
    with ranks(folder, 1, "k", state) as (loader,):
        assert rows_of(loader) == found[3:]
        assert rows_of(loader) == following
        assert saved(loader)["digest"] == ends[0]["digest"]
    wait_until_idle(command, "k")
    told = command("mix", "k", *weights(FIRST), "--at-step", "2", "--epoch", "0")
    assert not told["is_running"]
    with ranks(folder, 1, "k") as (loader,):
        rest = rows_of(loader)
    assert rest == set_inside(folder, 2 * BATCH, FIRST)[: ROUND * 2 // BATCH] + rest[42:]


def test_weights_behind_the_last_step_are_those_of_the_next_epoch_from_its_first_row_on(
    folder: Path, command: Command
) -> None:
    """A round begins with the samples that are dropped; one rank knows of it before it comes there,
    and the other one with its next epoch.
    """
    last = 3 * ROUND // BATCH
    with ranks(folder, 2, "t", length=3 * ROUND + 30) as loaders:
        first = iter(loaders[0])
        next(first)
        command("mix", "t", *weights(SECOND), "--at-step", str(last))
        assert (len([*first]), len(rows_of(loaders[1]))) == (last - 1, last)
        ends = [saved(loader) for loader in loaders]
        assert ends[0] == ends[1]
        passes = [iter(loader) for loader in loaders]
        for _ in range(2):
            for each in passes:
                next(each)
        states = [saved(loader) for loader in loaders]
        rest = [[batch["id"].tolist() for batch in each] for each in passes]
        ends = [saved(loader) for loader in loaders]
    assert states[0] == states[1]
    assert ends[0] == ends[1]
    assert [one[:2] for one in ends[0]["mixture"]["changes"]] == [[0, 0], [1, 0]]
    with ranks(folder, 1, "t", states[0], length=3 * ROUND + 30) as (loader,):
        assert rows_of(loader) == joined(rest)
        assert {**saved(loader), "ledger": None} == {**ends[0], "ledger": None}


def test_weights_behind_the_loaded_state_are_ignored_with_a_warning(
    folder: Path, command: Command
) -> None:
    with ranks(folder, 1, "b") as (loader,):
        passed = iter(loader)
        found, states = [], []
        for _ in range(10):
            found.append(next(passed)["id"].tolist())
            states.append(saved(loader))
        found += [batch["id"].tolist() for batch in passed]
    wait_until_idle(command, "b")
    told = command("mix", "b", *weights(SECOND), "--at-step", "5", "--epoch", "0")
    ignored = pytest.warns(
        UserWarning,
        match=rf"entry {told['entry']['seq']} of the ledger of job 'b' is ignored: .* code=0.6"
        r" math=0.3 web=0.1 from sample 480 of epoch 0 on, .*`dataplane mix b code=0.6",
    )
    with ranks(folder, 1, "b") as (loader,):
        with ignored:
            loader.load_state_dict(states[-1])
        assert rows_of(loader, 5) == found[10:15]
        later = saved(loader)
    with ranks(folder, 1, "b", later) as (loader,):  # not again after the next checkpoint
        assert rows_of(loader) == found[15:]
    with ranks(folder, 1, "b", states[4]) as (loader,):
        assert rows_of(loader) == set_inside(folder, 5 * BATCH, SECOND)[5:]


def test_weights_with_which_no_epoch_can_be_planned_change_nothing(
    folder: Path, command: Command
) -> None:
    least = weights({"web": 0, "code": 0, "math": 1})
    epoch = {"exhausted": "stop", "length": 390}
    why = "an epoch of 390 samples was asked for, but the sources have only 40 with these weights"
    with ranks(folder, 2, "u", **epoch) as loaders:
        passes = [iter(loader) for loader in loaders]
        first = joined([[next(one)["id"].tolist()] for one in passes])
        for at in ([], ["--at-step", "3"]):
            said = command("mix", "u", *least, *at, status=2)
            assert f"rank 0 of job 'u' cannot read these weights: {why}" in said
        found = first + joined([[batch["id"].tolist() for batch in one] for one in passes])
    wait_until_idle(command, "u")  # nobody is there to plan with them
    command("mix", "u", *least, "--at-step", "2", "--epoch", "0")
    for size in (1, 2):
        with ranks(folder, size, "u", **epoch) as loaders:
            with pytest.warns(UserWarning, match=f"job 'u' is ignored: .*: {why}"):
                assert joined([rows_of(loader) for loader in loaders]) == found
            assert len(saved(loaders[0])["mixture"]["changes"]) == 1
        wait_until_idle(command, "u")  # the next launch has the name of the first


def test_a_state_names_the_ledger_that_its_run_depends_on(folder: Path, command: Command) -> None:
    with ranks(folder, 1, "m") as (loader,):
        next(iter(loader))
        state = saved(loader)
    assert "ledger" not in state
    wait_until_idle(command, "m")
    with ranks(folder, 2, "m", state) as loaders:
        passes = [iter(loader) for loader in loaders]
        for batches in passes:
            next(batches)
        command("mix", "m", *weights(SECOND), "--at-step", "30")
        states = [[saved(loader) for loader in loaders]]
        for batches in passes:
            list(batches)
        states.append([saved(loader) for loader in loaders])
    assert states[0][0] == states[0][1]
    assert states[1][0] == states[1][1]
    kinds = {one["seq"]: one["kind"] for one in command("ledger", "show", "m")}
    assert [kinds[each[0]["ledger"]["entry"]] for each in states] == ["end", "mix"]
    for each in states:
        with ranks(folder, 1, "m", each[0]):
            pass
        with (
            pytest.warns(UserWarning, match="the ledger of job 'n' is not the one of this state"),
            ranks(folder, 1, "n", each[0]),
        ):
            pass


def test_steps_of_a_mixture_are_skipped_also_where_its_weights_change(
    folder: Path, command: Command
) -> None:
    """The round in which other weights begin begins within the skipped steps."""
    change = ROUND // BATCH
    whole = set_inside(folder, 2 * BATCH, SECOND)
    with ranks(folder, 1, "s") as (loader,):
        assert len(loader) == len(whole)
    command("skip", "s", "--steps", f"{change - 1}:{change + 3}", "--epoch", "0")
    left = [*whole[: change - 1], *whole[change + 3 :]]
    digests = set()
    for size in (1, 3):
        with ranks(folder, size, "s") as loaders:
            passes: list[list[list[int]]] = [[] for _ in loaders]
            states = []
            for batches in zip(*loaders, strict=True):
                for found, batch in zip(passes, batches, strict=True):
                    found.append(batch["id"].tolist())
                if len(passes[0]) == 2:
                    for loader in loaders:
                        loader.set_weights(SECOND)
                states.append(saved(loaders[0]))
            del batch, batches  # a rank that holds tensors has not left
            digests |= {saved(one)["digest"]["value"] for one in loaders}
            assert joined(passes) == left
    for at in (1, change - 3, change - 2, change - 1, change + 9):
        with ranks(folder, 2, "s", states[at]) as loaders:
            assert joined([rows_of(loader) for loader in loaders]) == left[at + 1 :]
            digests |= {saved(one)["digest"]["value"] for one in loaders}
    assert len(digests) == 1
    for step, skipped in ((change - 2, False), (change - 1, True), (change + 3, False)):
        rows = command("trace", "s", "--epoch", "0", "--step", f"{step}", *places(folder))
        assert {one["is_skipped"] for one in rows} == {skipped}
        ids = [one["row"] + 10_000 * list(FIRST).index(one["source"]) for one in rows]
        assert ids == whole[step]


def places(folder: Path) -> list[str]:
    return [f"--data={name}={folder}/{name}.parquet" for name in FIRST]


def wait_until_idle(command: Command, job: str) -> None:
    while command("ledger", "show", job)[-1]["kind"] != "end":
        threading.Event().wait(0.05)


def test_what_cannot_be_changed_is_refused(folder: Path, command: Command) -> None:
    with ranks(folder, 1, "l") as (loader,):
        next(iter(loader))
        for given, why in (
            (("web=1",), "'code' is missing"),
            ((*weights(FIRST), "news=1"), "there is no source 'news'"),
            (("web=0", "code=0", "math=0"), "all weights are 0"),
            (("web=-1", "code=1", "math=1"), "weight=-1.0: pass a number, 0 or more"),
            (("web=1", "web=2"), "give each source one weight"),
            (("web",), "give NAME=WEIGHT, such as web=0.6"),
            ((*weights(FIRST), "--epoch", "1"), "give both"),
            ((*weights(FIRST), "--at-step", f"{1 << 61}"), "is beyond the end of any job"),
            ((*weights(FIRST), "--at-step", "9" * 30), "is not in the range"),
        ):
            assert why in command("mix", "l", *given, status=2)
    assert "give FIRST:STOP" in command("skip", "l", "--steps", f"0:{'9' * 30}", status=2)
    assert "no job is called 'nobody'" in command("mix", "nobody", "web=1", status=2)
    with DataLoader(str(folder / "web.parquet"), name="plain", batch_size=8) as loader:
        next(iter(loader))
        assert "reads one dataset" in command("mix", "plain", "web=1", status=2)
    dataset = ShardedIterableDataset(mixed(folder), **{**OPTIONS, "name": "torch"})
    with contextlib.closing(dataset):
        next(iter(dataset))
        said = command("mix", "torch", *weights(SECOND), status=2)
        assert "rank 0 of job 'torch' cannot read these weights: they do not change" in said
