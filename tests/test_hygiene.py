"""Leftovers of a test are found, whatever they are, and nothing else is."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import hygiene
import pytest

SLEEP = "import time; time.sleep(600)"
DAEMON = f"""
import os
if not os.fork():
    os.setsid()
    if not os.fork():
        print(os.getpid(), flush=True)
        os.closerange(0, 3)
        {SLEEP}
"""


@contextlib.contextmanager
def a_process():
    with subprocess.Popen([sys.executable, "-S", "-c", SLEEP]) as process:
        yield f"process {process.pid} "
        process.kill()


@contextlib.contextmanager
def a_process_without_the_mark():
    with subprocess.Popen([sys.executable, "-S", "-c", SLEEP], env={}) as process:
        yield f"process {process.pid} "
        process.kill()


@contextlib.contextmanager
def a_daemon():
    command = [sys.executable, "-S", "-c", DAEMON]
    pid = int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    yield f"process {pid} "
    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def a_socket():
    with socket.socket() as made:
        yield f"fd {made.fileno()} -> socket:"


@contextlib.contextmanager
def a_mapping():
    fd = os.memfd_create("forgotten")
    os.truncate(fd, 1 << 20)
    with mmap.mmap(fd, 1 << 20):
        os.close(fd)
        yield "mapped memfd:forgotten"


@contextlib.contextmanager
def a_thread():
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait, name="forgotten")
    thread.start()
    yield "thread forgotten"
    ends.set()
    thread.join()


@contextlib.contextmanager
def shared_memory():
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        yield f"/dev/shm/{Path(file.name).name}"


@contextlib.contextmanager
def a_file():
    with tempfile.NamedTemporaryFile() as file:
        yield f"temporary file {Path(file.name).name}"


KINDS = [
    a_process, a_process_without_the_mark, a_daemon, a_socket, a_mapping, a_thread, shared_memory,
    a_file,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_is_found_and_what_has_gone_is_not(kind, monkeypatch):
    monkeypatch.setattr(hygiene, "GRACE_S", 0.0)
    scratch = Path(tempfile.gettempdir())
    before = hygiene.take()
    with kind() as words:
        left = hygiene.wait_until_clean(before, scratch)
        assert any(line.startswith(words) for line in left), left
        assert hygiene.wait_until_clean(hygiene.take(), scratch / "none") == []
    monkeypatch.undo()
    assert hygiene.wait_until_clean(before, scratch) == []


def test_processes_are_known_after_their_numbers_began_again():
    before = hygiene.take()
    with a_process() as words:
        hygiene._processes.newest = 1 << 40
        assert [f"process {pid} " for pid in hygiene._new_processes(before)] == [words]
        hygiene.kill_new(before)
