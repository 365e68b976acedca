"""How a trainer starts its node."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from fake_node import Script, open_job, serving, steps_of
from fleet import wait_until
from msgspec import structs
from openings import opening
from servers import S3Server
from shards import arrow_bytes

from dataplane.client import endpoint, waiting
from dataplane.client.endpoint import Embedded
from dataplane.client.session import Session
from dataplane.client.stream import SlabStream
from dataplane.model.errors import (
    ClosedError,
    DatasetChangedError,
    DataStallError,
    PeerLost,
    SpecMismatch,
)
from dataplane.rpc.messages import DatasetSource, OpenJob

TRAINER = """
import socket, sys
from dataplane.client.launch import start_node
from dataplane.rpc.messages import DatasetSource

node = "import socket, sys; assert socket.socket(fileno=int(sys.argv[2])).getsockname() == ''"
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    started = start_node(listener, (sys.executable, "-c", node), DatasetSource(("a.parquet",)))
    sys.exit(started.process.wait())
"""


@pytest.mark.parametrize("closed", ["", "<&- >&- 2>&-"])
def test_a_node_gets_its_listener_also_from_a_trainer_without_standard_streams(closed):
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, TRAINER]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("given", [["--help"], ["--stderr-fd", "2"]])
def test_a_node_without_a_listener_says_who_starts_it(given: list[str]) -> None:
    command = [sys.executable, "-P", "-m", "dataplane.node", *given]
    done = subprocess.run(command, check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 2
    assert "`dataplane serve`" in done.stderr
    assert "Traceback" not in done.stderr


_NOTED = """
import os, sys
from dataplane.node import __main__ as node
serve = node._embedded
async def served(*given):
    status = await serve(*given)
    path = %r
    with open(path + ".new", "w") as noted:
        noted.write("\\n".join(sys.modules))
    os.replace(path + ".new", path)
    return status
node._embedded = served
sys.exit(node.main())
"""
# Most take 3 to 50 ms of CPU, and a start takes 300.
_HEAVY = {
    *("argparse", "difflib", "email", "html", "importlib.metadata", "multiprocessing"),
    *("shutil", "tomllib"),
    *("aiohttp", "click", "fsspec", "grpc", "obstore", "PIL", "torch", "yaml", "zipfile"),
    *("pyarrow.compute", "pyarrow.dataset", "pyarrow.fs", "pyarrow.parquet"),
    *("dataplane.node.fork_server", "dataplane.fetcher.process", "dataplane.worker.worker"),
    *("dataplane.transforms.condition", "dataplane.transforms.where"),
    *("dataplane.formats.litdata", "dataplane.formats.tar"),
}


@pytest.mark.skipif(
    int(np.__version__.partition(".")[0]) < 2 or int(pa.__version__.partition(".")[0]) < 22,
    reason="older packages import more of Python and of themselves",
)
@pytest.mark.parametrize("is_remote", [False, True])
def test_an_embedded_node_serves_a_dataset_without_heavy_modules(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, *, is_remote: bool
) -> None:
    shards = {f"{n}.arrow": arrow_bytes(pa.table({"id": range(n, n + 64)})) for n in range(2)}
    url, noted = str(tmp_path / "shards"), tmp_path / "modules"
    if is_remote:
        for name, value in s3_server.environment().items():
            monkeypatch.setenv(name, value)
        bucket = s3_server.bucket()
        s3_server.put(bucket, shards)
        url = f"s3://{bucket}/"
    else:
        Path(url).mkdir()
        for name, content in shards.items():
            (Path(url) / name).write_bytes(content)
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DATAPLANE_LINGER_S", "0.1")
    command = (sys.executable, "-P", "-c", _NOTED % str(noted))
    job = structs.replace(open_job(), source=DatasetSource((url,)))
    session = Session(Embedded(f"test-{tmp_path}", command), job)
    stream = SlabStream(session, 0, 0)
    assert stream.batches_from(0)
    stream.close()
    session.close()
    deadline = time.monotonic() + 60
    while not noted.exists() and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    modules = set(noted.read_text().split("\n"))
    assert "dataplane.node.server" in modules
    # The node itself lists the shards, and reads small parts of them.
    reading = {"obstore"} if is_remote else set()
    assert sorted(modules & (_HEAVY - reading)) == []


_LATE = """
import os, sys, time
from dataplane.node import __main__ as node
started = node._started
def late(stderr_fd):
    while not os.path.exists(%r):
        time.sleep(0.01)
    print("a line of its start", file=sys.stderr)
    started(stderr_fd)
node._started = late
sys.exit(node.main())
"""


def test_what_a_node_logs_during_its_start_is_shown_also_after_its_welcome(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    command = (sys.executable, "-P", "-c", _LATE % str(tmp_path / "welcomed"))
    begun = Embedded(name, command).begin(DatasetSource((str(tmp_path),)))
    assert begun is not None
    wire, _ = begun.welcomed(time.monotonic() + 60, waiting.Notice("a node"))
    (tmp_path / "welcomed").touch()
    shown = [""]
    wait_until(lambda: shown.append(capfd.readouterr().err) or "of its start" in "".join(shown))
    wire.close()


Said = Callable[[str, int], list[str]]


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def said(monkeypatch, caplog) -> Said:
    """The log's lines with these words, once there are this many; waits are logged at once."""
    monkeypatch.setattr(waiting, "TELL_AFTER_S", 0.05)
    caplog.set_level(logging.WARNING, "dataplane.client")

    def lines(words: str, count: int) -> list[str]:
        for _ in range(3000):
            found = [line for line in list(caplog.messages) if line.startswith(words)]
            if len(found) >= count:
                return found
            threading.Event().wait(0.01)
        pytest.fail(f"no {words!r} {count} times in: {caplog.messages}")

    return lines


@pytest.mark.parametrize("at", ["start", "hello", "open", "stream", "slab"])
def test_a_node_that_is_killed_while_a_job_opens_is_started_again(tmp_path, embedded, at) -> None:
    mine = embedded(sample_count=60, killed_at=at, killed_once=str(tmp_path / "killed"))
    assert steps_of(mine) == list(range(15))
    assert (tmp_path / "killed").exists()


@pytest.mark.parametrize("at", ["hello", "open"])
def test_a_node_that_is_always_killed_ends_in_an_error_that_says_so(
    embedded, at, monkeypatch
) -> None:
    monkeypatch.setattr(endpoint, "START_TIMEOUT_S", 0.5)
    monkeypatch.setenv("DATAPLANE_STALL_TIMEOUT_S", "0.5")
    with pytest.raises(PeerLost, match="was lost several times") as caught:
        _ = embedded(killed_at=at).job
    assert caught.value.last_error


def test_a_service_that_comes_late_is_waited_for_and_the_log_says_so(
    name, session, said, beside
) -> None:
    mine = session()
    steps = beside.submit(steps_of, mine)
    (line,) = said("waiting for a node of service host:1 on this host", 1)
    for words in ("job=job", "rank=0", "no node listens"):
        assert words in line
    with serving(Script(sample_count=60), name):
        assert steps.result(60) == list(range(15))
        said("no longer waiting for a node of service host:1 on this host waited_s=", 1)
        mine.close()
    assert len(said("waiting", 1)) == 1


def test_a_service_that_hangs_up_while_a_job_opens_is_asked_again(
    name, session, monkeypatch, beside
) -> None:
    mine = session()
    asked = threading.Event()
    with serving(Script(sample_count=60), name) as first:
        monkeypatch.setattr(first, "_open_job", lambda *_: asked.set())
        steps = beside.submit(steps_of, mine)
        assert asked.wait(60)
    with serving(Script(sample_count=60), name) as second:
        assert steps.result(60) == list(range(15))
        assert sum(isinstance(one, OpenJob) for one in second.seen) == 1
        mine.close()


def test_advice_is_told_when_a_job_is_first_opened_and_not_again(name, session) -> None:
    mine = session()
    with serving(Script(advice=("first", "second")), name), pytest.warns() as told:
        mount = mine.mount()
    assert [str(one.message) for one in told] == ["first", "second"]
    while not mount.wire.is_lost:
        mount.wire.tell_nowait(opening("", job="", launch="", member=""))
    with serving(Script(advice=("first",)), name):
        assert mine.mount() is not mount
        mine.close()


def test_a_rank_that_finds_the_service_gone_between_two_steps_waits_for_it(
    name, session, said, beside
) -> None:
    mine = session()
    stream = SlabStream(mine, 0, 0, ahead=False)
    with serving(Script(), name):
        stream.batches_from(0)
        mount = mine.mount()
    while not mount.wire.is_lost:
        mount.wire.tell_nowait(opening("", job="", launch="", member=""))
    second = beside.submit(stream.batches_from, 1)
    said("waiting for a node of service host:1", 1)
    with serving(Script(), name):
        assert second.result(60)[0].batches[0].step == 1
        stream.close()
        mine.close()


def test_a_job_that_takes_long_to_open_is_logged(name, fake, session, said, monkeypatch, beside):
    node, asked = fake(), []
    monkeypatch.setattr(node, "_open_job", lambda *given: asked.append(given))
    mine = session()
    job = beside.submit(lambda: mine.job)
    (line,) = said("waiting for a job to be opened", 1)
    assert f"node=fake-{os.getpid()}" in line
    monkeypatch.undo()
    node._open_job(*asked[0])
    assert job.result(60)
    said("no longer waiting for a job to be opened", 1)


def test_closing_a_loader_ends_its_waiting(name, session, said, beside) -> None:
    mine = session()
    job = beside.submit(lambda: mine.job)
    said("waiting for a node", 1)
    mine.close()
    with pytest.raises(ClosedError, match="while it waited"):
        job.result(60)


def test_a_stall_while_a_service_is_away_says_who_is_away(name, session, monkeypatch) -> None:
    mine = session(stall_timeout_s=0.5)
    stream = SlabStream(mine, 0, 0, ahead=False)
    with serving(Script(), name):
        stream.batches_from(0)
    with pytest.raises(DataStallError, match="no node of service host:1 answered") as caught:
        stream.batches_from(1)
    assert "dataplane serve" in str(caught.value.last_error)
    stream.close()


def test_a_dataset_that_changed_meanwhile_is_not_served(name, session) -> None:
    mine = session()
    with serving(Script(), name):
        stream = SlabStream(mine, 0, 0)
        stream.batches_from(0)
    with serving(Script(salt="other"), name):
        with pytest.raises(DatasetChangedError):
            stream.batches_from(1)
        stream.close()
        mine.close()


def test_a_node_that_comes_back_with_other_pixels_is_not_read(name, session) -> None:
    mine = session()
    with serving(Script(pixels="Pillow 12.2.0 ()"), name):
        stream = SlabStream(mine, 0, 0)
        stream.batches_from(0)
    with serving(Script(pixels="Pillow 13.0.0 ()"), name):
        with pytest.raises(SpecMismatch, match=r"13\.0\.0.*12\.2\.0") as caught:
            stream.batches_from(1)
        assert caught.value.field == "pixels"
        stream.close()
        mine.close()


def test_the_imports_of_a_node_and_its_workers_leave_out_pandas(tmp_path: Path) -> None:
    # Before pyarrow 26, DataType.to_pandas_dtype() imports it: half a second of each process.
    (tmp_path / "pandas.py").write_text("raise SystemExit('pandas was imported')")
    modules = "dataplane.node.server, dataplane.node.manifests, dataplane.node.fork_server"
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {modules}"
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, text=True)
    assert done.returncode == 0
