"""Rows that are taken out of jobs while they run, and launches and nodes that end others: a real
service, real trainers.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader
from fleet import Service
from plan.plain import substitute

from dataplane.cli import run
from dataplane.model.errors import LeaseFenced
from dataplane.model.records import Topology

BATCH = 24
OPTIONS: dict[str, Any] = {
    "shuffle": True, "seed": 3, "lanes": 2, "window": 40, "columns": ["id"],
}  # fmt: skip
SMALL = ("--block-arena-bytes", "32MiB", "--slab-bytes", "64KiB", "--worker-count", "1",
         "--delivery-bytes-per-rank", "2MiB")  # fmt: skip

Ids = list[list[int]]
Command = Callable[..., Any]


@pytest.fixture
def shards(tmp_path: Path) -> str:
    table = pa.table({"id": range(300)})
    pq.write_table(table, tmp_path / "s.parquet", row_group_size=20)
    return str(tmp_path / "s.parquet")


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    name = f"changes-{os.getpid()}:7077"
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("DATAPLANE_SERVICE", name)
    log = tmp_path / "service.log"
    with Service("--listen", "127.0.0.1:0", "--service", name, *SMALL, log=log) as made:
        yield made


@pytest.fixture
def command(service: Service, capsys: pytest.CaptureFixture[str]) -> Command:
    """The JSON that a command prints, or, if a status is expected, its error."""

    def asked(*arguments: str, status: int = 0) -> Any:
        capsys.readouterr()
        as_json = () if status else ("--json",)
        assert run([*arguments, "--join", service.address, *as_json]) == status
        told = capsys.readouterr()
        return told.err if status else json.loads(told.out)

    return asked


@contextlib.contextmanager
def ranks(url: Any, size: int = 1, state: Any = None, **more: Any) -> Iterator[list[Any]]:
    """The loaders of all ranks of one launch."""
    with contextlib.ExitStack() as stack:
        made = []
        for rank in range(size):
            place = Topology(rank, size, rank, size, rank, size)
            options = {"topology": place, "name": "j", "global_batch_size": BATCH, **OPTIONS}
            made.append(stack.enter_context(DataLoader(url, **{**options, **more})))
        for loader in made if state else ():
            loader.load_state_dict(state)
        yield made


def joined(passes: Sequence[Ids]) -> Ids:
    """Global batches, from the batches of each rank."""
    return [
        [one for turn in itertools.zip_longest(*step) for one in turn if one is not None]
        for step in zip(*passes, strict=True)
    ]


def read(url: Any, size: int = 1, state: Any = None, **more: Any) -> tuple[Ids, list[Any]]:
    """The global batches of a pass, and the states of all ranks after it."""
    with ranks(url, size, state, **more) as loaders:
        passes = [[batch["id"].tolist() for batch in loader] for loader in loaders]
        return joined(passes), [loader.state_dict() for loader in loaders]


def large_shards(folder: Path, rows: int, count: int) -> str:
    """The manifest of shards with rows so large that a node cannot read an epoch ahead."""
    rng, manifest = np.random.default_rng(1), str(folder / "all.manifest")
    for shard in range(count):
        ids = pa.array(range(shard * rows, (shard + 1) * rows))
        pad = pa.array([rng.bytes(4096) for _ in range(rows)])
        pq.write_table(pa.table({"id": ids, "pad": pad}), folder / f"s{shard:02}.parquet")
    files = [f"{folder}/s{at:02}.parquet" for at in range(count)]
    assert run(["index", *files, "-o", manifest]) == 0
    return manifest


def wait_for_start(command: Command) -> None:
    """Wait until the coordinator knows that the job has begun to read."""
    while [one["kind"] for one in command("ledger", "show", "j")][-1:] != ["start"]:
        threading.Event().wait(0.05)


def test_a_running_job_leaves_a_lost_shard_out_from_a_step_that_all_ranks_agree_on(
    command: Command, tmp_path: Path
) -> None:
    rows, batch, count = 64, 24, 42
    manifest, steps = large_shards(tmp_path, rows, count), count * rows // batch
    options = {**OPTIONS, "window": 4 * rows, "columns": ["id", "pad"]}
    options |= {"global_batch_size": batch}
    plan, _ = read(manifest, name="plain", **options)
    data = ("--data", manifest)
    with ranks(manifest, 3, **options) as loaders:
        passes = [iter(loader) for loader in loaders]
        given = [[next(one)["id"].tolist() for one in passes] for _ in range(3)]
        wait_for_start(command)
        told = command("tombstone", "j", "--shard", "s07.parquet", *data)
        at = told["entry"]["position"]
        assert told["is_running"]
        assert (at["epoch"], at["cursor"] % batch) == (0, 0)
        assert 3 * batch <= at["cursor"] < steps * batch
        (tmp_path / "s07.parquet").rename(tmp_path / "gone")
        states = []
        while got := [one for one in (next(each, None) for each in passes) if one is not None]:
            given.append([one["id"].tolist() for one in got])
            states.append([loader.state_dict() for loader in loaders])
        ledger = tmp_path / "ledger.jsonl"
        ledger.write_text(loaders[0].ledger())
        again = [[next(iter(one))["id"].tolist()] for one in loaders]
    found = joined([list(rank) for rank in zip(*given, strict=True)])
    blocks = {7}
    changed = [
        [
            substitute(3, 7, 0, count, blocks) * rows + row % rows if row // rows == 7 else row
            for row in one
        ]
        for one in plan
    ]
    there = at["cursor"] // batch
    assert found == plan[:there] + changed[there:]
    assert any(row // rows == 7 for one in plan[there:] for row in one)
    assert all(row // rows != 7 for one in joined(again) for row in one)
    assert all(len({json.dumps(one) for one in state}) == 1 for state in states)
    for name, step in itertools.product(("j", str(ledger)), (there - 1, there, there + 5)):
        traced = command("trace", name, "--epoch", "0", "--step", str(step), *data)
        shards = [int(one["shard"].removesuffix(".parquet")[-2:]) for one in traced]
        assert [
            shard * rows + one["row"] for shard, one in zip(shards, traced, strict=True)
        ] == found[step]
    # A later launch leaves it out from its start on, on another number of ranks.
    for step, size in ((0, 2), (there + 1, 4)):
        with ranks(manifest, size, states[step][0], **options) as resumed:
            rest = joined([[one["id"].tolist() for one in loader] for loader in resumed])
            assert rest == changed[4 + step :]
            digests = {loader.state_dict()["digest"]["value"] for loader in resumed}
        if step > there:
            assert digests == {states[-1][0]["digest"]["value"]}
    assert command("ledger", "verify", "j")["ok"]


def test_ledgers_of_each_launch_know_where_it_left_rows_out(
    command: Command, tmp_path: Path
) -> None:
    rows = 64
    manifest = large_shards(tmp_path, rows, 42)
    options = {**OPTIONS, "window": 4 * rows, "columns": ["id", "pad"]}
    with ranks(manifest, 1, **options | {"global_batch_size": 12}) as (loader,):
        next(iter(loader))
        state = loader.state_dict()
    with ranks(manifest, 2, state, **options) as loaders:
        passes = [iter(loader) for loader in loaders]
        given = [[next(one)["id"].tolist() for one in passes] for _ in range(3)]
        early = [loader.state_dict() for loader in loaders]
        given += [[next(one)["id"].tolist() for one in passes] for _ in range(2)]
        wait_for_start(command)
        read_now = {row // rows for step in given[3:] for part in step for row in part}
        entries = [
            command("tombstone", "j", "--shard", f"s{shard:02}.parquet", "--data", manifest)[
                "entry"
            ]
            for shard in sorted(read_now)[:2]
        ]
        # Steps of this launch begin at odd places.
        assert all((entry["position"]["cursor"] - 12) % BATCH == 0 for entry in entries)
        states = early
        while got := [one for one in (next(each, None) for each in passes) if one is not None]:
            given.append([one["id"].tolist() for one in got])
            states = [loader.state_dict() for loader in loaders]
            assert states[0] == states[1]
        # A coordinator without these entries is noticed.
        assert early[0]["ledger"]["entry"] < entries[0]["seq"]
        assert states[0]["ledger"]["entry"] == entries[-1]["seq"]
        (tmp_path / "first.jsonl").write_text(loaders[0].ledger())
    runs = [("first", joined([list(rank) for rank in zip(*given, strict=True)]))]
    with ranks(manifest, 4, early[0], **options) as loaders:
        passes = [[batch["id"].tolist() for batch in loader] for loader in loaders]
        (tmp_path / "second.jsonl").write_text(loaders[0].ledger())
    # The first launch had read the steps before without these rows left out.
    runs.append(("second", runs[0][1][:3] + joined(passes)))
    for name, batches in runs:
        for step, batch in enumerate(batches[:11]):
            traced = command(
                "trace", str(tmp_path / f"{name}.jsonl"), "--epoch", "0", "--step", str(step),
                "--cursor", "12", "--data", manifest,
            )  # fmt: skip
            assert [int(one["shard"][-10:-8]) * rows + one["row"] for one in traced] == batch
    files = [str(tmp_path / f"{name}.jsonl") for name in ("first", "second")]
    assert run(["ledger", "diff", *files]) == 1


def test_a_second_launch_of_one_name_says_that_it_ends_the_first(
    shards: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service.log is not None
    with ranks(shards, 2) as first:
        running = [iter(loader) for loader in first]
        for one in running:
            next(one)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
        with ranks(shards, 2) as second:
            with pytest.warns(UserWarning, match="'j' was being read by 2 ranks of another launch"):
                next(iter(second[0]))
            service.log.wait_for("WARNING dataplane.node: a launch ended another job=j", 1)
            service.log.wait_for("WARNING dataplane.node: rank ended job=j", 2)
            with pytest.raises(LeaseFenced, match="a newer launch has taken over"):
                [*running[0], *iter(first[0])]


def test_the_status_says_for_whose_loaders_a_draining_node_waits(
    shards: str, service: Service, command: Command
) -> None:
    with ranks(shards) as (loader,):
        next(iter(loader))
        service.process.send_signal(signal.SIGTERM)
        deadline = threading.Event()
        while not (work := [one for node in command("status")["nodes"] for one in node["work"]]):
            deadline.wait(0.05)
        assert work[0]["what"] == "draining until ranks 0 close their loaders"
        assert work[0]["dataset"] == "job j"
