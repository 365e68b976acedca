"""The fork server starts processes and reports their ends; its own death is survived."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from dataplane.rpc import local, tasks
from dataplane.worker import forking
from dataplane.worker.forking import ForkedProcess, fork_server

WAIT_S = 60.0


@pytest.fixture
def by_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork servers start here as users' do, not in forks of a process that has their modules."""
    monkeypatch.setattr(forking, "_executed", forking._executed.__wrapped__)


@pytest.fixture(autouse=True)
def held(by_exec: None) -> Iterator[None]:
    with fork_server.held():
        yield


def a_process(role: str = "worker") -> tuple[ForkedProcess, socket.socket, int]:
    """A process, our end of its socket, and its stderr."""
    ours, theirs = local.pair()
    stderr = os.memfd_create("stderr", os.MFD_CLOEXEC)
    with theirs:
        return fork_server.start(role, theirs, stderr, 1 << 30), ours, stderr


def server_of(process: ForkedProcess) -> psutil.Process:
    found = psutil.Process(process.pid).parent()
    assert found is not None
    return found


def test_processes_share_one_parent_and_end_with_their_sockets() -> None:
    first, sock, stderr = a_process()
    second, other_sock, other_stderr = a_process("fetcher")
    assert server_of(first) == server_of(second)
    assert server_of(first).num_threads() == 1  # or a child may inherit a held lock
    deadline = time.monotonic() + WAIT_S
    named = ((first, "dp-worker"), (second, "dp-fetcher"))
    for process, name in named:
        while psutil.Process(process.pid).name() != name:  # it has just been forked
            assert time.monotonic() < deadline
            os.sched_yield()
    with sock, other_sock:
        local.send(sock, tasks.Task(tasks.DetachArena(1)))
        local.receive(sock, tasks.Result)
        assert not first.wait(0.0)
    assert first.wait(WAIT_S)
    assert first.status() == 0
    assert second.wait(WAIT_S)
    assert second.status() == 0
    for descriptor in (stderr, other_stderr):
        os.close(descriptor)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_end_of_a_process_is_reported_with_its_signal(number: signal.Signals) -> None:
    process, sock, stderr = a_process()
    told: list[int] = []
    process.on_end(told.append)
    os.kill(process.pid, number)
    assert process.wait(WAIT_S)
    assert told == [-number]
    process.on_end(told.append)  # a late callback is called, too
    assert told == [-number, -number]
    process.kill()
    sock.close()
    os.close(stderr)


def test_a_process_can_be_killed_before_it_has_started() -> None:
    process, sock, stderr = a_process()
    process.kill()
    assert process.wait(WAIT_S)
    assert process.status() == -signal.SIGKILL
    sock.close()
    os.close(stderr)


def test_if_the_fork_server_dies_its_processes_end_and_it_is_started_again() -> None:
    process, sock, stderr = a_process()
    server = server_of(process)
    server.kill()
    assert process.wait(WAIT_S)
    assert process.status() == -signal.SIGKILL
    assert not psutil.pid_exists(process.pid) or _is_zombie(process.pid)
    again, other_sock, other_stderr = a_process()
    assert server_of(again) != server
    again.kill()
    assert again.wait(WAIT_S)
    for each in (sock, other_sock):
        each.close()
    for fd in (stderr, other_stderr):
        os.close(fd)


def test_a_stopped_fork_server_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "_LOOK_S", 0.02)
    process, sock, stderr = a_process()
    server = server_of(process)
    assert fork_server._server is not None
    monkeypatch.setattr(fork_server._server._pulse, "_timeout_s", 0.2)
    os.kill(server.pid, signal.SIGSTOP)
    waiting, other_sock, other_stderr = a_process()
    assert waiting.wait(WAIT_S)
    assert process.wait(WAIT_S)
    assert {waiting.status(), process.status()} == {-signal.SIGKILL}
    again, third_sock, third_stderr = a_process()
    assert server_of(again) != server
    again.kill()
    assert again.wait(WAIT_S)
    for each in (sock, other_sock, third_sock):
        each.close()
    for fd in (stderr, other_stderr, third_stderr):
        os.close(fd)


def test_a_fork_server_outlives_a_sigterm_to_the_whole_service() -> None:
    process, sock, stderr = a_process()
    server = server_of(process)
    local.send(sock, tasks.Task(tasks.DetachArena(1)))
    local.receive(sock, tasks.Result)
    for each in (server, psutil.Process(process.pid)):
        each.terminate()
    assert process.wait(WAIT_S)
    assert process.status() == -signal.SIGTERM
    again, other_sock, other_stderr = a_process()
    assert server_of(again) == server
    again.kill()
    assert again.wait(WAIT_S)
    for each_sock in (sock, other_sock):
        each_sock.close()
    for fd in (stderr, other_stderr):
        os.close(fd)


def test_a_process_that_cannot_start_says_why_on_its_stderr() -> None:
    process, sock, stderr = a_process("nobody")
    assert process.wait(WAIT_S)
    assert process.status() == 1
    assert b"nobody" in os.pread(stderr, 4096, 0)
    sock.close()
    os.close(stderr)


def test_the_fork_server_ends_when_its_last_holder_releases_it() -> None:
    process, sock, stderr = a_process()
    server = server_of(process)
    fork_server.acquire()
    fork_server.release()
    assert server.is_running()
    process.kill()
    assert process.wait(WAIT_S)
    fork_server.release()
    assert not server.is_running()
    fork_server.acquire()
    sock.close()
    os.close(stderr)


def test_if_the_fork_server_cannot_start_requested_processes_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process, sock, stderr = a_process()
    monkeypatch.setattr(forking, "_MODULE", "dataplane.no_such_module")
    server_of(process).kill()
    assert process.wait(WAIT_S)
    again, other_sock, other_stderr = a_process()
    assert again.wait(WAIT_S)
    assert again.status() < 0
    assert again.pid == 0
    for each in (sock, other_sock):
        each.close()
    for fd in (stderr, other_stderr):
        os.close(fd)


def _is_zombie(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


_YOUNG = """
import os, signal, socket, sys
import psutil
from dataplane.node.fork_server import main
from dataplane.rpc import local
from dataplane.worker.forking import fork_server

def a_process():
    ours, theirs = local.pair()
    with theirs:
        return fork_server.start("worker", theirs, 2, 1 << 30), ours

kept = open(os.devnull)
fork_server.acquire(None, main)
first, sock = a_process()
server = psutil.Process(first.pid).parent()
print(server.name(), server.num_threads(), server.ppid() == os.getpid(), server.cmdline()[1])
print(kept.name in {each.path for each in server.open_files()})
server.kill()
print(first.status())
again, other = a_process()
print(psutil.Process(again.pid).parent().cmdline()[3], flush=True)
other.close()
print(again.status())
fork_server.release()
print(psutil.Process().children())
"""


def test_a_process_that_has_just_started_forks_its_fork_server() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _YOUNG],
        env={**os.environ, **forking.ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "dp-fork-server 1 True -c",
        "False",
        "-9",
        "dataplane.node",  # a new one is a new interpreter
        "0",
        "[]",
    ]


def test_what_is_forked_starts_without_the_secrets_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, sock, stderr = a_process()
    server_of(first).kill()
    assert first.wait(WAIT_S)
    sock.close()
    os.close(stderr)
    secrets = (
        "DATAPLANE_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
        "db_password",
        "WANDB_API_KEY",
    )
    for name in secrets:
        monkeypatch.setenv(name, "hush")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:hush@proxy:3128")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "kept")
    for role in ("worker", "fetcher"):
        process, sock, stderr = a_process(role)
        for one in (psutil.Process(process.pid), server_of(process)):
            seen = one.environ()
            assert "hush" not in str(seen)
            assert seen["TOKENIZERS_PARALLELISM"] == "kept"
        process.kill()
        assert process.wait(WAIT_S)
        sock.close()
        os.close(stderr)
