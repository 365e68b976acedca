"""A loader over urls starts its node when it is made, and uses it when it is used."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import uuid
import warnings
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader, Mixture, ShardedIterableDataset, Source
from fleet import own_nodes, wait_until, worker_processes
from forked import forking
from hub import hub_server
from shards import arrow_bytes

from dataplane.base.units import PREFIX
from dataplane.model.errors import ConfigError, ShardNotFound, SpecMismatch
from dataplane.node.__main__ import _is_wanted_again

pytestmark = pytest.mark.usefixtures("small_node")


@pytest.fixture
def url(tmp_path: Path) -> str:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        table = pa.table({"x": range(10 * number, 10 * number + 10)})
        (folder / f"{number}.arrow").write_bytes(arrow_bytes(table))
    return f"{folder}/"


def the_node() -> psutil.Process:
    """The only one. The kernel tells its arguments a moment after it has begun to run."""
    deadline = time.monotonic() + 60
    while not (found := own_nodes()) and time.monotonic() < deadline:
        threading.Event().wait(0.001)
    (node,) = found
    return node


def numbers(loader: DataLoader) -> list[int]:
    return [x for batch in loader for x in batch["x"].tolist()]


def test_the_node_is_there_before_the_loader_is_used_and_stays_for_another(url: str) -> None:
    first, second = DataLoader(url, batch_size=4), DataLoader(url, batch_size=4)
    node = the_node()
    assert numbers(second) == list(range(30))
    first.close()
    assert numbers(second) == list(range(30))
    assert own_nodes() == [node]
    second.close()


@pytest.mark.parametrize("ends", ["close", "collected"])
def test_a_loader_that_is_never_used_leaves_nothing(url: str, ends: str) -> None:
    loader = DataLoader(url, batch_size=4)
    node = the_node()
    if ends == "close":
        loader.close()
        loader.close()
    del loader
    gc.collect()
    node.wait(60)


def test_a_node_that_was_killed_before_the_first_use_is_started_again(url: str) -> None:
    with DataLoader(url, batch_size=4) as loader:
        node = the_node()
        node.kill()
        node.wait(60)
        assert numbers(loader) == list(range(30))


def test_a_misspelt_local_path_is_an_error_when_the_loader_is_made(url: str) -> None:
    folder = Path(url)
    near = f"{folder}x"
    sources = {"web": Source(url, passes=1), "code": Source(near, passes=1)}
    for given, said in [
        (near, f"no file or folder {near}; {folder.parent} is there"),
        (f"file://{near}/", f"no file or folder {near}/"),
        (f"{near}/y/*.parquet", f"no file or folder {near}/y; {folder.parent} is there"),
        ([url, "/nowhere/a.arrow"], "no file or folder /nowhere/a.arrow; / is there"),
        (Mixture(sources), f"source 'code': there is no file or folder {near}"),
    ]:
        for kind in (DataLoader, ShardedIterableDataset):
            with pytest.raises(ShardNotFound, match=re.escape(said)):
                kind(given, batch_size=4)
    (folder.parent / "odd[1].parquet").symlink_to("gone")
    DataLoader(f"{folder.parent}/odd[1].parquet").close()
    with pytest.raises(ShardNotFound, match=r"did you mean '2\.arrow'"):
        DataLoader(f"{url}9.arrow")
    DataLoader(near, service="127.0.0.1:1").close()  # that one may have other folders


def test_arguments_are_checked_before_a_node_is_started(url: str) -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        DataLoader(url, batch_size=0)
    assert own_nodes() == []


def test_a_wrong_setting_of_the_node_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}WORKER_COUNT", "0")
    with DataLoader(url, batch_size=4) as loader, pytest.raises(ConfigError, match="worker_count"):
        next(iter(loader))


@pytest.mark.parametrize("is_read", [False, True])
def test_a_child_that_is_forked_takes_nothing_along(url: str, *, is_read: bool) -> None:
    with DataLoader(url, batch_size=4) as loader:
        node = the_node()

        def use() -> int:
            if is_read:  # over a connection of its own
                return int(numbers(loader) != list(range(30)))
            loader.close()
            return 0

        with forking(use) as child:
            assert child.ask() == 0
        assert numbers(loader) == list(range(30))
        assert own_nodes() == [node]


def test_a_node_without_loaders_keeps_no_memory_and_serves_the_next_one(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAPLANE_LINGER_S", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", uuid.uuid4().hex)

    def read(dp_size: int) -> None:
        ranks = [DataLoader(url, 4, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
        with contextlib.ExitStack() as stack:
            for each in ranks:
                stack.enter_context(each)
            assert sorted(x for each in ranks for x in numbers(each)) == list(range(30))
            assert _has_arenas(the_node())

    read(2)
    node = the_node()
    wait_until(lambda: not _has_arenas(node) and not worker_processes(node))
    read(3)
    assert own_nodes() == [node]
    node.terminate()
    node.wait(60)


def test_a_process_without_other_ranks_has_a_node_for_each_set_of_settings(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DataLoader(url, batch_size=4) as first:
        assert numbers(first) == list(range(30))
        node = the_node()
        monkeypatch.setenv("DATAPLANE_WORKER_COUNT", "2")
        with DataLoader(url, batch_size=4) as second:
            assert numbers(second) == list(range(30))
            (other,) = set(own_nodes()) - {node}
            assert len(worker_processes(other)) == 2


def test_a_function_is_found_in_a_folder_that_was_added_after_another_loader(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DataLoader(url, batch_size=4) as first:
        assert numbers(first) == list(range(30))
    name = f"added_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text("def function(columns): return columns")
    monkeypatch.syspath_prepend(tmp_path)
    with DataLoader(url, batch_size=4, map=f"{name}:function") as second:
        assert numbers(second) == list(range(30))


def _has_arenas(node: psutil.Process) -> bool:
    return "memfd:dataplane-" in Path(f"/proc/{node.pid}/maps").read_text()


def test_a_node_waits_for_another_loader_only_while_a_former_trainer_lives() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()

    async def is_wanted_again(pid: int, *, is_stopped: bool = False) -> bool:
        stop = asyncio.Event()
        if is_stopped:
            stop.set()
        return await _is_wanted_again(listener.fileno(), [pid], 10.0, stop)

    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as trainer:
        listener.bind("\0" + uuid.uuid4().hex)
        listener.listen()
        assert not asyncio.run(is_wanted_again(ended.pid))
        assert not asyncio.run(is_wanted_again(os.getpid(), is_stopped=True))
        trainer.connect(listener.getsockname())
        assert asyncio.run(is_wanted_again(os.getpid()))


ORDER = {"batch_size": 16, "shuffle": True, "seed": 5}


@pytest.fixture
def train(tmp_path: Path) -> Path:
    folder = tmp_path / "bucket-1" / "train"
    for i in range(3):
        (folder / f"part-{i}").mkdir(parents=True)
        table = pa.table({"i": range(i * 100, i * 100 + 100)})
        pq.write_table(table, folder / f"part-{i}" / "0.parquet", row_group_size=30)
    return folder


def taken(url: object, steps: int = 7, **how) -> tuple[dict, list[list[int]]]:
    """A state after some steps, and the steps that follow."""
    with DataLoader(url, **ORDER, **how) as loader:
        iterator = iter(loader)
        for _ in range(steps):
            next(iterator)
        return loader.state_dict(), [batch["i"].tolist() for batch in iterator]


def resumed(url: object, state: dict, **how) -> list[list[int]]:
    with DataLoader(url, **ORDER, **how) as loader:
        loader.load_state_dict(state)
        return [batch["i"].tolist() for batch in loader]


def test_a_copy_that_kept_its_modification_times_resumes(train: Path, tmp_path: Path) -> None:
    state, rest = taken(train)
    shutil.copytree(train, tmp_path / "bucket-2" / "deeper" / "train")
    shutil.rmtree(train)
    assert resumed(tmp_path / "bucket-2/deeper/train/part-*/0.parquet", state) == rest


def test_a_copy_with_new_modification_times_needs_dataset_moved(
    train: Path, tmp_path: Path
) -> None:
    state, rest = taken(train)
    copy = shutil.copytree(train, tmp_path / "copy")
    for i, path in enumerate(copy.glob("*/*")):
        os.utime(path, (1e9 + i, 1e9 + i))
    with pytest.raises(SpecMismatch, match="dataset_moved=True"):
        resumed(copy, state)
    with pytest.warns(UserWarning, match="Remove the argument"):
        assert resumed(copy, state, dataset_moved=True) == rest
    state, rest = taken(copy, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # dataset_moved is no longer needed, and there is no warning
        assert resumed(copy, state, dataset_moved=True) == rest
    dataset = ShardedIterableDataset(copy, **ORDER, dataset_moved=True)
    dataset.load_state_dict(state)
    assert [batch["i"].tolist() for batch in dataset] == rest
    dataset.close()


def test_a_dataset_that_grew_resumes_over_the_shards_that_it_had(train: Path) -> None:
    state, rest = taken(train)
    had = sorted(train.glob("*/*"))
    (train / "part-3").mkdir()
    pq.write_table(pa.table({"i": range(300, 400)}), train / "part-3" / "0.parquet")
    with pytest.raises(SpecMismatch, match=r"had 300 .* now has 400.*a list of their urls"):
        resumed(train, state)
    assert resumed(had, state) == rest


def test_a_push_to_the_hub_reaches_the_next_run_and_is_never_mixed_into_one(
    train: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, plain = {}, {"use_dictionary": False, "compression": "none", "row_group_size": 30}
    for i in (0, 1, 2, 7):
        path = train / f"{i}.parquet"
        pq.write_table(pa.table({"i": range(i * 100, i * 100 + 100)}), path, **plain)
        files[f"data/{i}.parquet"] = path.read_bytes()
    changed = files.pop("data/7.parquet")
    assert len(changed) == len(files["data/1.parquet"])
    with hub_server() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        url = "hf://datasets/org/name/data"
        first = hub.push(files)
        with DataLoader(url, **ORDER) as loader:
            iterator = iter(loader)
            head = [next(iterator)["i"].tolist() for _ in range(7)]
            state = loader.state_dict()
            hub.push({**files, "data/1.parquet": changed})
            rest = [batch["i"].tolist() for batch in iterator]
        assert sorted(i for batch in (*head, *rest) for i in batch) == list(range(300))
        assert set(hub.seen) == {first}
        with pytest.raises(SpecMismatch, match="copied or rewritten"):
            resumed(url, state)
        assert resumed(f"hf://datasets/org/name@{first}/data", state) == rest
        hub.push({**files, "README.md": b"only this is new"})
        assert resumed(url, state) == rest
