"""A loader over urls starts its node when it is made, and uses it when it is used."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from dataplane_torch import DataLoader, Mixture, ShardedIterableDataset, Source
from fleet import own_nodes, worker_processes
from shards import arrow_bytes

from dataplane.base.units import PREFIX
from dataplane.model.errors import ConfigError, ShardNotFound
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


def test_the_node_is_there_before_the_loader_is_used(url: str) -> None:
    with DataLoader(url, batch_size=4) as loader:
        node = the_node()
        assert numbers(loader) == list(range(30))
        assert own_nodes() == [node]


def test_loaders_of_one_process_begin_one_node_whichever_is_used_first(url: str) -> None:
    with DataLoader(url, batch_size=4) as first, DataLoader(url, batch_size=3) as second:
        node = the_node()
        assert numbers(second) == numbers(first) == list(range(30))
        assert own_nodes() == [node]


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


def test_the_node_of_a_closed_loader_stays_for_another_that_waits(url: str) -> None:
    first, second = DataLoader(url, batch_size=4), DataLoader(url, batch_size=4)
    node = the_node()
    assert numbers(second) == list(range(30))
    first.close()
    assert numbers(second) == list(range(30))
    assert own_nodes() == [node]
    second.close()


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


def test_a_mistake_in_the_dataset_is_told_when_the_loader_is_used(url: str) -> None:
    with (
        DataLoader(f"{url}none*", batch_size=4) as loader,
        pytest.raises(ShardNotFound, match="none"),
    ):
        next(iter(loader))


def test_arguments_are_checked_before_a_node_is_started(url: str) -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        DataLoader(url, batch_size=0)
    assert own_nodes() == []


def test_a_wrong_setting_of_the_node_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}WORKER_COUNT", "0")
    with DataLoader(url, batch_size=4) as loader, pytest.raises(ConfigError, match="worker_count"):
        next(iter(loader))


def test_a_child_that_is_forked_before_the_first_use_takes_nothing_along(url: str) -> None:
    with DataLoader(url, batch_size=4) as loader:
        node = the_node()
        pid = os.fork()
        if not pid:
            signal.alarm(60)
            status = 1
            try:
                loader.close()
                del loader
                gc.collect()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert numbers(loader) == list(range(30))
        assert own_nodes() == [node]


def test_a_forked_child_reads_over_a_connection_of_its_own(url: str) -> None:
    with DataLoader(url, batch_size=4) as loader:
        readable, writable = os.pipe()
        pid = os.fork()
        if not pid:
            signal.alarm(60)
            status = 1
            try:
                os.write(writable, repr(numbers(loader)).encode())
                status = 0
            finally:
                os._exit(status)
        os.close(writable)
        said = os.read(readable, 1 << 10)
        os.close(readable)
        assert said == repr(list(range(30))).encode()
        assert os.waitpid(pid, 0)[1] == 0
        assert numbers(loader) == list(range(30))


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
    _wait_until(lambda: not _has_arenas(node) and not worker_processes(node))
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


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


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
