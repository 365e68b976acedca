"""`dataplane serve` as a real process: ready, drained, stopped, refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from certificates import Authority
from dataplane_torch import DataLoader
from fleet import Service, free_address
from trusted import TOKEN, TRUSTED

from dataplane.base.machine import lock_holder
from dataplane.cli import run
from dataplane.commands import status
from dataplane.coordinator.front import CoordinatorConfig
from dataplane.coordinator.server import CoordinatorServer
from dataplane.model.config import PROTOCOL_VERSION, VERSION
from dataplane.rpc import local
from dataplane.rpc.address import served_name
from dataplane.rpc.messages import FromNode, Hello, ToNode, Welcome

SMALL = ("--block-arena-bytes", "16MiB", "--worker-count", "1")
PROGRAM = (sys.executable, "-m", "dataplane")


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and the address of its coordinator."""
    process = subprocess.Popen(
        [*PROGRAM, "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"HOME": str(folder), "DATAPLANE_STATE_DIR": str(folder / "state")},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        try:
            line = process.stdout.readline()
            if not line.startswith("ready: coordinator "):
                pytest.fail(f"{line}{process.stderr.read()}")
            yield process, line.split()[-1]
        finally:
            process.kill()
            process.wait()


def greeted(address: str) -> socket.socket:
    """A trainer's connection to this host's node, after the greeting."""
    sock = local.connect(served_name(os.getuid(), address), 10.0)
    greet(sock)
    return sock


def greet(sock: socket.socket) -> None:
    local.send(sock, ToNode(1, Hello(VERSION, PROTOCOL_VERSION, os.getpid())))
    answer, _ = local.receive(sock, FromNode)
    assert isinstance(answer.body, Welcome)


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, check=False)


def status_of(capsys: pytest.CaptureFixture[str], address: str) -> dict[str, Any]:
    """Return what `dataplane status` prints, asked from this process: another takes 1 s of CPU."""
    assert run(["status", address, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_drains_a_coordinator(number, code, tmp_path, capsys):
    with serving(tmp_path, "--coordinator", "--listen", "127.0.0.1:0") as (process, address):
        assert status_of(capsys, address)["version"] == VERSION
        process.send_signal(number)
        _, told = process.communicate()
        assert process.returncode == code
        assert "draining" in told
        assert "Traceback" not in told


def test_draining_waits_for_the_last_trainer(tmp_path):
    with serving(tmp_path, "--listen", "127.0.0.1:0", *SMALL) as (process, address):
        assert process.stdout is not None
        assert process.stdout.readline() == f"ready: node {address}\n"
        with greeted(address) as sock:
            assert len(json.loads(ask("status", address, "--json").stdout)["nodes"]) == 1
            before = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            for child in before:  # a terminal that is closed sends it to all
                child.send_signal(signal.SIGHUP)
            assert process.stderr is not None
            assert "draining" in process.stderr.readline()
            assert process.stderr.readline().endswith(
                f"draining until loaders are closed processes={os.getpid()}\n"
            )
            process.send_signal(signal.SIGHUP)  # no second one: a shell adds it
            greet(sock)
            assert psutil.Process(process.pid).children(recursive=True) == before
        assert process.wait(60) == 0


def test_a_second_signal_stops_at_once(tmp_path):
    with serving(tmp_path, "--listen", "127.0.0.1:0", *SMALL) as (process, address):
        assert process.stdout is not None
        process.stdout.readline()
        with greeted(address):
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            assert "draining" in process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def test_workers_is_another_way_to_write_worker_count_and_names_no_other_setting(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("DATAPLANE_WORKERS", "5")  # reads in flight, of commands
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    for given, count in ((("--workers", "0"), 0), (("--worker-count", "2"), 2)):
        few = (*SMALL[:2], *given)
        with Service("--listen", "127.0.0.1:0", *few) as service:
            (node,) = status_of(capsys, service.address)["nodes"]
            assert node["worker_count"] == count
    (tmp_path / "dataplane.toml").write_text("workers = 3")
    assert run(["serve", "--config", str(tmp_path / "dataplane.toml")]) == 2
    assert "workers" in capsys.readouterr().err


def test_a_standalone_node_joins_a_coordinator_on_another_address(tmp_path):
    head = f"head-{os.getpid()}:7077"
    with serving(tmp_path, "--coordinator", "--listen", "127.0.0.1:0") as (_, address):
        node = subprocess.Popen(
            [*PROGRAM, "serve", "--node", "--join", address, "--service", head, *SMALL],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert node.stdout is not None
        assert node.stdout.readline() == f"ready: node {head}\n"
        with greeted(head):
            pass
        node.terminate()
        node.communicate()
        assert node.returncode == 0


def test_a_node_that_waits_for_its_coordinator_is_not_ready_and_ends_on_request(tmp_path, capsys):
    address = free_address()
    with Service("--node", "--join", address, *SMALL, log=tmp_path / "log", awaited=False) as node:
        assert node.log is not None
        (line,) = node.log.wait_for("coordinator does not answer")
        assert f"address={address}" in line
        assert run(["status", "--node", address]) == 1
        assert f"waits for the coordinator at {address}" in capsys.readouterr().out
        with greeted(address):  # trainers wait, and do not hold it up
            node.process.send_signal(signal.SIGTERM)
            assert node.process.stdout is not None
            assert node.process.stdout.read() == ""
            assert node.process.wait(60) == 0


PATCHED = """
from dataplane.model import config
config.VERSION = "9.9.9"
from dataplane.__main__ import main
main()
"""


def test_versions_of_one_protocol_work_together(tmp_path):
    pq.write_table(pa.table({"id": range(100)}), tmp_path / "rows.parquet")
    environ = {"DATAPLANE_STATE_DIR": str(tmp_path / "state")}
    address = free_address()
    newer = subprocess.Popen(
        [sys.executable, "-c", PATCHED, "serve", "--coordinator", "--listen", address],
        env=os.environ | environ, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        with Service("--node", "--join", address, *SMALL, environ=environ) as node:
            with DataLoader(str(tmp_path / "rows.parquet"), 10, service=address) as loader:
                ids = [row for batch in loader for row in batch["id"].tolist()]
            assert ids == [*range(100)]
            assert node.stop() == 0
    finally:
        newer.kill()
        newer.communicate()


def test_a_coordinator_of_another_protocol_is_reported_at_once(monkeypatch):
    async def refused() -> subprocess.CompletedProcess[str]:
        config = CoordinatorConfig("0.0.1", protocol=PROTOCOL_VERSION - 1)
        server = CoordinatorServer(config, "127.0.0.1:0", TRUSTED)
        address = await server.start()
        try:
            monkeypatch.setenv("DATAPLANE_TOKEN", TOKEN)
            return await asyncio.to_thread(ask, "serve", "--node", "--join", address, *SMALL)
        finally:
            await server.stop(0.0)

    found = asyncio.run(refused())
    assert found.returncode == 2
    assert "0.0.1" in found.stderr
    assert found.stdout == ""


def test_a_second_node_of_one_service_is_refused(tmp_path, capsys):
    with serving(tmp_path, "--listen", "127.0.0.1:0", *SMALL) as (process, address):
        assert process.stdout is not None
        process.stdout.readline()
        assert run(["serve", "--node", "--join", address, *SMALL]) == 2
    assert "another node of yours (process" in capsys.readouterr().err


SQUATTER = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
    squatter.bind("\\0" + sys.argv[1])
    if sys.argv[2] == "listens":
        squatter.listen()
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start another user's process")
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("listens", "of user 65534 has taken the socket name"),
        ("is silent", "a process that takes no connections has the socket name"),
    ],
)
def test_a_squatter_of_the_nodes_name_is_named(how, words, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    address = free_address()
    name = served_name(os.getuid(), address)
    with subprocess.Popen(
        [sys.executable, "-c", SQUATTER, name, how],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as squatter:  # fmt: skip
        assert squatter.stdin is not None
        assert squatter.stdout is not None
        try:
            assert squatter.stdout.readline() == "ready\n"
            assert run(["serve", "--listen", address, *SMALL]) == 2
        finally:
            squatter.stdin.close()
    told = " ".join(capsys.readouterr().err.split())
    assert words in told
    assert (f"process {squatter.pid} " in told) == (how == "listens")


def test_a_probe_finds_a_node_that_is_ready_that_hangs_and_that_is_gone(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(status, "PROBE_S", 0.2)
    with serving(tmp_path, "--listen", "127.0.0.1:0", *SMALL) as (process, address):
        assert process.stdout is not None
        process.stdout.readline()
        while run(["status", "--node", "--service", address]) == 3:
            pass  # the probe's time is short
        assert " is ready\n" in capsys.readouterr().out
        process.send_signal(signal.SIGSTOP)
        assert run(["status", "--node", address]) == 3
        assert "has not answered for 0.2 s" in capsys.readouterr().err
    assert run(["status", "--node", address]) == 3
    assert "no node listens" in capsys.readouterr().err
    assert run(["status", "--node", address, "--json"]) == 2


def test_a_misspelt_variable_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("DATAPLANE_ALLOWED_URL", "s3://bucket/train")
    assert run(["serve", "--coordinator", "--listen", "127.0.0.1:0"]) == 2
    assert "did you mean DATAPLANE_ALLOWED_URLS?" in capsys.readouterr().err


def test_a_second_service_gets_an_error_about_its_port_or_the_database_owner(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    with serving(tmp_path, "--coordinator", "--listen", "127.0.0.1:0") as (process, address):
        assert run(["serve", "--coordinator", "--listen", address]) == 2
        told = capsys.readouterr().err
        assert f"cannot listen at {address}: Address already in use" in told
        assert "choose another port" in told
        assert "sqlite" not in told
        assert run(["serve", "--coordinator", "--listen", "127.0.0.1:0"]) == 2
        told = capsys.readouterr().err
        assert "coordinator.sqlite is locked: another coordinator" in told
        assert "--state-dir" in told
        if lock_holder(tmp_path / "state" / "coordinator.sqlite") is not None:
            assert f"(process {process.pid})" in told


def test_an_address_of_another_host_is_told_as_such(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path))
    assert run(["serve", "--coordinator", "--listen", "192.0.2.1:7077", "--insecure"]) == 2
    told = capsys.readouterr().err
    assert "192.0.2.1 is no address of this host" in told
    assert "another service" not in told


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (("--listen", "0.0.0.0:7077"), "--service HOST:7077"),
        (("--listen", "[::]:7077"), "--service HOST:7077"),
        (("--listen", "0.0.0.0:0"), "--service HOST:PORT, and that port with --listen"),
        (("--listen", "127.0.0.1:0", "--service", "0.0.0.0:7077"), "--service HOST:7077"),
        (("--node", "--join", "0.0.0.0:7077"), "--service HOST:7077"),
    ],
)
def test_every_address_is_no_name_for_trainers_and_nothing_is_started(
    tmp_path, monkeypatch, capsys, given, advice
):
    state = tmp_path / "state"
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(state))
    monkeypatch.delenv("DATAPLANE_TOKEN", raising=False)
    assert run(["serve", *given, "--insecure", *SMALL]) == 2
    told = capsys.readouterr()
    assert advice in told.err
    assert not told.out
    assert not state.exists()


def test_a_coordinator_listens_on_a_private_unix_socket(tmp_path):
    address = f"unix:{tmp_path}/c.sock"
    with serving(tmp_path, "--coordinator", "--listen", address) as (_, announced):
        assert announced == address
        assert (tmp_path / "c.sock").stat().st_mode & 0o777 == 0o600
        assert run(["status", address]) == 0


def test_watching_ends_with_ctrl_c(tmp_path):
    with serving(tmp_path, "--coordinator", "--listen", "127.0.0.1:0") as (_, address):
        watching = subprocess.Popen(
            [*PROGRAM, "status", address, "--watch"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"FORCE_COLOR": "1"},
        )
        assert watching.stdout is not None
        first = watching.stdout.readline()
        assert "coordinator" in first
        watching.send_signal(signal.SIGINT)
        out, told = watching.communicate()
        assert watching.returncode == 130
        assert "\x1b[?25" not in first + out, "it hides a cursor that a pipe does not have"
        assert "Traceback" not in told


def test_a_taken_port_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert run(["serve", "--coordinator", "--listen", address]) == 2
    assert address in capsys.readouterr().err


def test_a_taken_port_for_neighbours_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        joining = ["--node", "--join", free_address(), "--data-listen", address]
        assert run(["serve", *joining, *SMALL]) == 2
        told = capsys.readouterr().err
        assert f"cannot listen for neighbours at {address}" in told
        assert "--data-listen" in told


@pytest.mark.parametrize("given", [(), ("cert", "key"), ("ca",)])
def test_encrypted_neighbours_need_all_files_of_tls(tmp_path, monkeypatch, capsys, given):
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path))
    files = Authority.made().write(tmp_path, "node")
    options = [text for name in given for text in (f"--tls-{name}", getattr(files, name))]
    assert run(["serve", "--node", "--join", "unix:/none", "--peer-tls", *options, *SMALL]) == 2
    told = capsys.readouterr().err
    missing = [f"tls_{name}" for name in ("cert", "key", "ca") if name not in given]
    assert f"peer_tls is set without {', '.join(missing)}: " in told


def test_a_secret_of_neighbours_that_others_can_read_ends_the_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path))
    (tmp_path / "neighbours.key").write_text("0" * 64 + "\n")
    (tmp_path / "neighbours.key").chmod(0o644)
    assert run(["serve", "--coordinator", "--listen", "127.0.0.1:0"]) == 2
    told = capsys.readouterr().err
    assert "neighbours.key belongs to user" in told
    assert "0" * 64 not in told


def test_beyond_loopback_needs_a_flag(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path))
    assert run(["serve", "--coordinator", "--listen", "0.0.0.0:0"]) == 2
    assert "--insecure" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--coordinator", "--node"], "exclude each other"),
        (["--node"], "--join"),
        (["--join", "head:7077"], "add --node"),
        (["--slab-bytes", "1TiB"], "delivery_bytes_per_rank"),
        (["--listen", "nonsense"], "host:port"),
    ],
)
def test_what_does_not_fit_together_is_refused(arguments, wanted, capsys):
    assert run(["serve", *arguments]) == 2
    assert wanted in capsys.readouterr().err
