"""Processes that never outlive the process that started them, each in its own session.

So Ctrl-C at a terminal reaches only the parent, which ends its children in the right order. If the
parent is killed, the kernel kills the children (on Linux, if util-linux has `setpriv`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

POLL_S = 0.05
_TAIL_BYTES = 3000
_PR_SET_PDEATHSIG = 1
_READY = "ready: "
_pause = threading.Event()


class ProcessEnded(Exception):
    """A process ended, or was not ready in time; the message has the end of its output."""


@contextlib.contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command with its output in `log`; at the end of the block, kill it and its children."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*dies_with_us(), *command],
            cwd=log.parent,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill_family(process)


def wait_until(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, timeout_s: float
) -> None:
    """Raises:  ProcessEnded: it ended first, or the time is over."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if process.poll() is not None:
            raise ProcessEnded(f"exit status {process.returncode}; its last words:\n{tail(log)}")
        if time.monotonic() > deadline:
            raise ProcessEnded(f"not ready within {timeout_s:g} s; its last words:\n{tail(log)}")
        pause(POLL_S)


def kill_family(process: subprocess.Popen[Any]) -> list[int]:
    """SIGKILL a process and all its descendants together; return their process ids.

    The process is stopped first, so that it starts no more meanwhile. May be called twice.
    """
    if process.poll() is not None:
        return []
    family = []
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(process.pid)
        root.suspend()
        family = [root, *root.children(recursive=True)]
        for member in family:
            with contextlib.suppress(psutil.Error):
                member.kill()
    process.wait()
    psutil.wait_procs(family, timeout=5)
    return [member.pid for member in family]


def end(process: subprocess.Popen[bytes], grace_s: float) -> int | None:
    """Send SIGTERM and wait; return the exit status, or None if the process had to be killed."""
    process.terminate()
    try:
        return process.wait(grace_s)
    except subprocess.TimeoutExpired:
        kill_family(process)
        return None


def tail(log: Path) -> str:
    """The end of a process's output."""
    if not log.exists():
        return ""
    with log.open("rb") as written:
        written.seek(max(log.stat().st_size - _TAIL_BYTES, 0))
        return written.read(_TAIL_BYTES).decode(errors="replace").strip()


def announcements(log: Path) -> str:
    """The whole lines with which a service has announced its parts so far."""
    lines = log.read_text(errors="replace").splitlines(keepends=True) if log.exists() else []
    return "".join(line for line in lines if line.startswith(_READY) and line.endswith("\n"))


def wait_for_node(process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> str:
    """The address of a service's node, once the service has announced it.

    Raises:  ProcessEnded: it ended first, or the time is over.
    """
    mark = f"{_READY}node "
    wait_until(lambda: mark in announcements(log), process, log, timeout_s)
    return announcements(log).partition(mark)[2].splitlines()[0]


def pause(seconds: float) -> None:
    """Sleep for a moment, so that other processes can run."""
    _pause.wait(seconds)


def tool(name: str) -> str:
    """The path of a program in this environment, or else in PATH.

    Raises:  FileNotFoundError: it is in neither.
    """
    beside = Path(sys.executable).with_name(name)
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed: `make setup` brings it")
    return path


def free_ports(count: int, below: int = 1 << 16) -> list[int]:
    """Ports of 127.0.0.1 that were free when checked; another process may take them."""
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            taken = held.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = taken.getsockname()[1]
            if port < below:
                ports.append(port)
        return ports


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, for whatever reason."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signal.SIGKILL)


def dies_with_us() -> list[str]:
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else []
