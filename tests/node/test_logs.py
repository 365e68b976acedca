"""The logs of served and of embedded nodes, for people and for programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader
from warm import WarmPython

TRAINER = """
import sys
from dataplane_torch import DataLoader
with DataLoader(sys.argv[1], batch_size=4, name="pretrain") as loader:
    assert sum(len(batch["id"]) for batch in loader) == 40
"""
# What a node keeps in its cache folder: an index, rows of a condition, values of codes, packs.
CACHING = """
import sys
from dataplane_torch import DataLoader, Pack
given = {"where": "id < 30", "columns": ["id"], "codes": ["id"]}
with (
    DataLoader(sys.argv[1], batch_size=4, **given) as loader,
    DataLoader(sys.argv[1], batch_size=1, pack=Pack("tokens", 4)) as packs,
):
    assert sum(len(batch["id"]) for batch in loader) == 30
    assert len(packs) == 20 == len(list(packs))
"""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("DATAPLANE_LOG_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "CACHE_DIR": str(tmp_path / "cache"),
        "STATE_DIR": str(tmp_path / "state"),
        "WORKER_COUNT": "1",
        "BLOCK_ARENA_BYTES": "16MiB",
        "LINGER_S": "0.2",
    }.items():
        monkeypatch.setenv(f"DATAPLANE_{name}", value)


@pytest.fixture
def url(tmp_path: Path) -> str:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": list(range(40))}), path, row_group_size=10)
    return str(path)


@pytest.fixture
def train(url: str, tmp_path: Path, warm_torch: WarmPython) -> Callable[[], str]:
    """The stderr of a trainer that reads one epoch, less what a busy machine adds to it: a node that
    starts slowly.
    """

    def run() -> str:
        script, errors = tmp_path / "trainer.py", tmp_path / "errors"
        script.write_text(TRAINER)
        with errors.open("wb") as stderr:
            process = warm_torch.run([str(script), url], os.environ, stderr.fileno())
        process.stdin.close()
        process.stdout.close()
        status = process.wait(60)
        lines = errors.read_text().splitlines(keepends=True)
        assert status == 0, lines
        return "".join(line for line in lines if "waiting for the node of this run" not in line)

    return run


def test_an_embedded_node_logs_nothing_without_a_problem(train: Callable[[], str]) -> None:
    assert train() == ""


def test_without_a_cache_folder_an_embedded_node_counts_and_indexes_all_and_warns_once(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_torch: WarmPython
) -> None:
    rows = [[at, at + 1] for at in range(40)]
    pq.write_table(pa.table({"id": range(40), "tokens": rows}), url, row_group_size=10)
    script, errors, home = tmp_path / "trainer.py", tmp_path / "errors", tmp_path / "home"
    script.write_text(CACHING)
    home.write_text("no folder")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("DATAPLANE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    before = {*Path.cwd().iterdir()}
    with errors.open("wb") as stderr:
        process = warm_torch.run([str(script), url], os.environ, stderr.fileno())
    process.stdin.close()
    process.stdout.close()
    status, said = process.wait(60), errors.read_text()
    assert status == 0, said
    assert said.count("default cache folder cannot be created") == 1
    assert f"folder={home}/.cache/dataplane" in said
    assert "DATAPLANE_CACHE_DIR=FOLDER" in said
    assert {*Path.cwd().iterdir()} == before


def test_an_embedded_node_logs_more_on_request(
    train: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAPLANE_LOG_LEVEL", "info")
    monkeypatch.setenv("DATAPLANE_LOG_FORMAT", "json")
    # The trainer has its own log.
    lines = [line for line in train().splitlines() if line.startswith("{")]
    opened, *_, closed = map(json.loads, lines)
    assert opened["event"] == "job opened"
    assert closed["event"] == "job closed"
    for line in (opened, closed):
        assert (line["job"], line["rank"], line["level"]) == ("pretrain", 0, "info")
    assert (opened["samples"], opened["blocks"], opened["shards"]) == (40, 4, 1)
    assert closed["cursor"] > 0


def status_of(*arguments: str, stderr: IO[str]) -> int:
    """The exit status of a service that does not start."""
    command = [sys.executable, "-m", "dataplane", "serve", *arguments]
    environ = os.environ | {"DATAPLANE_LOG_FORMAT": "json"}
    return subprocess.run(command, env=environ, stderr=stderr, timeout=60, check=False).returncode


def test_a_served_node_writes_json_on_stderr_and_only_what_is_ready_on_stdout(
    url: str, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("w+") as log:
        service = subprocess.Popen(
            [sys.executable, "-m", "dataplane", "serve", "--listen", "127.0.0.1:0",
             "--log-format", "json"],
            stdout=subprocess.PIPE, stderr=log, text=True,
            env=os.environ | {"GRPC_VERBOSITY": "debug"},
        )  # fmt: skip
        with service:
            assert service.stdout is not None
            address = service.stdout.readline().split()[-1]
            assert service.stdout.readline() == f"ready: node {address}\n"
            with DataLoader(url, 4, name="pretrain", service=address) as loader:
                assert sum(len(batch["id"]) for batch in loader) == 40
            for wrong in (["--listen", address], ["--lease-x", "1"]):
                assert status_of(*wrong, stderr=log) == 2
            service.terminate()
            assert service.wait(60) == 0
            assert service.stdout.read() == ""
        log.seek(0)
        lines = [json.loads(line) for line in log]
    events = [line["event"] for line in lines]
    assert "job opened" in events
    assert "job closed" in events
    errors = [line for line in lines if line["event"] == "the service ends with an error"]
    assert [line["error"] for line in errors] == ["ConfigError", "NoSuchOption"]
    assert [line.get("address") for line in errors] == [address, None]
    assert {line["exit_status"] for line in errors} == {2}
    assert "log.cc" in next(line["event"] for line in lines if line["room"] == "stderr")
    lines = [line for line in lines if line["room"] != "stderr"]
    assert len(lines) < 20, "nothing for each batch or block"
    assert all(line["timestamp"].endswith("Z") for line in lines)
