"""Real launches by torchrun: what their ranks agree on, with and without a process group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed
from dataplane_torch import DataLoader, ShardedIterableDataset
from dataplane_torch.group import check_layout, check_pixels, check_weights, launch_token
from torch.testing._internal.distributed.fake_pg import FakeStore

from dataplane.model.errors import SpecMismatch
from dataplane.model.records import Topology

pytestmark = pytest.mark.usefixtures("small_node")

COUNT = 240
RANK = """
import json, os, pathlib, sys, threading
import torch.distributed
import dataplane_torch

shards, out, when = sys.argv[1:]

def loader_of():
    return dataplane_torch.DataLoader(shards, 8, columns=["i"])

if when != "after":
    loaders = [loader_of()]
if when != "never":
    torch.distributed.init_process_group("gloo")
if when == "after":
    loaders = [loader_of()]
if when == "both":
    loaders.append(loader_of())
for loader in loaders:
    seen = [k for batch in loader for k in batch["i"].tolist()]
    mount = loader._shards._session.mount()
    found = {
        "seen": seen,
        "node": mount.node_id,
        "generation": mount.job.generation,
        "incarnation": loader._shards._job.request.incarnation,
        "job": loader._shards._job.request.job_id,
    }
    place = pathlib.Path(out) / f"{os.environ['RANK']}-{loaders.index(loader)}.json"
    place.write_text(json.dumps(found))
if when != "never":
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
while len(list(pathlib.Path(out).glob("*.json"))) < 2 * len(loaders):
    threading.Event().wait(0.01)  # a node does not wait for ranks that come when others have gone
"""


@pytest.fixture
def shards(tmp_path: Path) -> str:
    pq.write_table(pa.table({"i": range(COUNT)}), tmp_path / "a.parquet", row_group_size=60)
    return str(tmp_path / "a.parquet")


def torchrun(python: Path, shards: str, out: Path, when: str) -> list[dict]:
    """Two ranks; what each of their loaders has found."""
    script = out.with_suffix(".py")
    script.write_text(RANK)
    out.mkdir()
    launcher = [python, "-m", "torch.distributed.run", "--standalone"]
    options = ["--nproc-per-node=2", f"--log-dir={out.with_suffix('.log')}"]
    command = [*launcher, *options, str(script), shards, str(out), when]
    launched = subprocess.run(
        command,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": str(python)},
        capture_output=True,
        text=True,
    )
    assert launched.returncode == 0, launched.stderr
    return [json.loads(path.read_text()) for path in sorted(out.iterdir())]


@pytest.mark.parametrize(
    ("when", "loaders"),
    [pytest.param(when, 1, marks=pytest.mark.slow) for when in ("never", "after")] + [("both", 2)],
)
def test_the_ranks_of_a_launch_share_one_node_with_and_without_a_group(
    shards, tmp_path, when, loaders, warm_torch
) -> None:
    found = torchrun(warm_torch.executable(tmp_path), shards, tmp_path / "out", when)
    assert len(found) == 2 * loaders
    assert len({one["node"] for one in found}) == 1
    assert {one["generation"] for one in found} == {1}
    assert len({(one["job"], one["incarnation"]) for one in found}) == loaders
    for nth in range(loaders):
        assert sorted(k for one in found[nth::loaders] for k in one["seen"]) == list(range(COUNT))


ALONE = """
import sys
import dataplane_torch

shards, seed = sys.argv[1:3]
given = {"sharing": "both"} if "sharing" in sys.argv else {"dp_rank": 0, "dp_size": 1}
with dataplane_torch.DataLoader(shards, 8, shuffle=True, seed=int(seed), **given) as loader:
    print(*loader._shards._job.request.job_id, loader.schema is None, flush=True)
    sys.stdin.readline()
    seen = [k for batch in loader for k in batch["i"].tolist()]
    assert sorted(seen) == list(range(240))
    print(*seen, flush=True)
"""


@pytest.mark.parametrize("how", ["alone", "sharing"])
def test_two_runs_in_one_batch_script_are_two_jobs(shards, tmp_path, how, warm_torch) -> None:
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    launched = {
        "SLURM_JOB_ID": uuid.uuid4().hex, "SLURM_PROCID": "0", "SLURM_NTASKS": "1",
        "ENVIRONMENT": "BATCH", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
    }  # fmt: skip
    if how == "alone":
        launched |= {"RANK": "0", "WORLD_SIZE": "1"}
    runs = [
        warm_torch.run([str(script), shards, seed, how], os.environ | launched, sys.stderr.fileno())
        for seed in "12"
    ]
    try:
        jobs = [run.stdout.readline() for run in runs]
        for run in runs:
            run.stdin.write("go\n")
            run.stdin.flush()
        orders = [run.stdout.readline() for run in runs]
        assert [run.wait(60) for run in runs] == [0, 0]
    finally:
        for run in runs:
            run.kill()
            run.wait()
            run.stdin.close()
            run.stdout.close()
    assert len({*jobs, *orders}) == 4


@pytest.fixture
def group(tmp_path: Path):
    """A new process group with this process as its only member."""

    def make(name: str) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        store = torch.distributed.FileStore(str(tmp_path / name), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)

    yield make
    torch.distributed.destroy_process_group()


def test_a_token_is_drawn_once_a_launch(group, shards, monkeypatch) -> None:
    assert launch_token() == ""
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    incarnations = []
    for launch in ("first", "second"):
        group(launch)
        assert launch_token() == launch_token() != ""
        incarnations += [DataLoader(shards)._shards._job.request.incarnation for _ in range(2)]
    assert incarnations[0] == incarnations[1] != incarnations[2] == incarnations[3]


def test_ranks_whose_nodes_make_other_pixels_are_refused(group) -> None:
    check_pixels("Pillow 13.0.0 ()")  # there is no other rank to compare with
    group("only")
    check_pixels("")
    check_pixels("Pillow 12.2.0 ()")
    check_pixels("Pillow 12.2.0 ()")
    check_pixels("")
    with pytest.raises(SpecMismatch, match=r"pillow==12\.2\.0") as caught:
        check_pixels("Pillow 13.0.0 ()")
    assert caught.value.expected == "Pillow 12.2.0 ()"
    assert caught.value.found == "Pillow 13.0.0 ()"


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch):
    """A process group that counts two ranks, of which this process plays both."""
    c10d = torch.distributed.distributed_c10d
    store = torch.distributed.HashStore()
    monkeypatch.setattr(c10d, "_get_default_store", lambda: store)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


def test_ranks_whose_nodes_share_no_coordinator_compare_layout_and_spec(pair) -> None:
    place = Topology(0, 2, 0, 2, source="torch.distributed: rank 0 of 2")
    check_layout("j", place, "d" * 32, 0)
    check_layout("j", Topology(1, 2, 1, 2), "d" * 32, 0)
    alone = Topology(0, 1, 1, 2, source="DeviceMesh(tp=2), batch axes: none")
    with pytest.raises(SpecMismatch, match="differ in dp_size") as caught:
        check_layout("j", alone, "d" * 32, 0)
    assert (caught.value.expected, caught.value.found) == (2, 1)
    mine, first = str(caught.value).splitlines()[1:]
    assert "rank 1  dp_rank 0 of 1  spec dddddddd  DeviceMesh(tp=2), batch axes: none" in mine
    assert "rank 0  dp_rank 0 of 2  spec dddddddd  torch.distributed: rank 0 of 2" in first
    with pytest.raises(SpecMismatch, match="differ in spec"):
        check_layout("j", Topology(1, 2, 1, 2), "e" * 32, 0)
    check_layout("k", alone, "e" * 32, 0)
    check_layout("j", Topology(), "e" * 32, 0)  # a loader that one rank makes for itself
    check_layout("j", Topology(1, 2, 1, 2), "e" * 32, 1)  # the next stage of the run


def test_ranks_compare_the_weights_that_they_set(pair) -> None:
    first, second = Topology(0, 2, 0, 2), Topology(1, 2, 1, 2)
    for rank in (first, second):
        check_weights("j", rank, 0, "0:960:aaaa")
    check_weights("j", first, 1, "1:0:bbbb")
    with pytest.raises(
        SpecMismatch, match=r"weights at sample 0 of epoch 1 that differ from another rank"
    ):
        check_weights("j", second, 1, "1:0:cccc")
    with pytest.raises(SpecMismatch, match=r"rank 1 .* sample 96 .* another rank at sample 0"):
        check_weights("j", second, 1, "1:96:bbbb")
    check_weights("j", Topology(), 1, "1:0:cccc")  # a loader that one rank makes for itself


def test_loaders_compare_their_pixels_with_those_of_other_ranks(group, fake) -> None:
    group("only")
    fake(pixels="Pillow 13.0.0 ()")
    with DataLoader("/data", 10) as loader:
        assert len(list(loader)) == 10
    with closing(ShardedIterableDataset("/data", 10)) as dataset:
        assert len(list(dataset)) == 10
    fake(pixels="Pillow 12.2.0 ()")
    with DataLoader("/data", 10) as loader, pytest.raises(SpecMismatch, match="pixels"):
        next(iter(loader))
    with (
        closing(ShardedIterableDataset("/data", 10)) as dataset,
        pytest.raises(SpecMismatch, match="pixels"),
    ):
        next(iter(dataset))


def test_a_forked_child_leaves_the_groups_connections_alone(group) -> None:
    group("only")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, launch_token().encode() or b"none")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"none"
    os.close(reader)
    os.close(writer)


class Incomparable(torch.distributed.Store):
    """A store of a user's own, of which torch asks less than a token needs."""


def test_a_group_whose_store_cannot_compare_has_no_token(group, monkeypatch) -> None:
    group("only")
    c10d = torch.distributed.distributed_c10d
    monkeypatch.setattr(c10d, "_get_default_store", Incomparable)
    assert launch_token() == ""
    monkeypatch.setattr(c10d, "_get_default_store", lambda: None)
    assert launch_token() == ""
    monkeypatch.delattr(c10d, "_get_default_store")
    assert launch_token() == ""
