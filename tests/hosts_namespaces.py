"""Hosts of one machine, as network namespaces, which are gone with the script that made them.

Everything lives in namespaces of one process tree (network, processes, mounts, host names), so
nothing has a name outside: when the first process of the tree ends, however it ends, the kernel
kills all others, and with them go devices, namespaces and the files of `scratch`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from dataplane_bench.processes import dies_with_us

INSIDE = "HOSTS_INSIDE"
FOLDER = "HOSTS_FOLDER"
PREFIX = "dataplane-hosts-"
DEVICE = "net0"

_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
_libc = ctypes.CDLL(None, use_errno=True)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace with one device. `net` and `uts` keep it alive, and say where it is."""

    number: int
    name: str
    address: str
    net: int
    uts: int

    @property
    def places(self) -> list[str]:
        """Return the argument of `enter`, for any process of this tree."""
        return [f"/proc/{os.getpid()}/fd/{fd}" for fd in (self.net, self.uts)]

    @property
    def within(self) -> list[str]:
        """A command that runs another one on this host."""
        net, uts = self.places
        return ["nsenter", f"--net={net}", f"--uts={uts}"]

    def run(self, *command: str) -> str:
        return run_tool(*self.within, *command)

    def call(self, work: Callable[[], _T]) -> _T:
        """Do this in a thread on this host; sockets that it makes stay there."""
        return _elsewhere(lambda: (enter(*self.places), work())[1])

    def sent_bytes(self) -> int:
        """Return the bytes that its device has sent so far, with headers."""
        (told,) = json.loads(self.run("ip", "-j", "-s", "link", "show", DEVICE))
        return int(told["stats64"]["tx"]["bytes"])


@functools.cache
def why_not() -> str:
    """Why this machine cannot have such hosts; empty if it can."""
    for needed in ("unshare", "nsenter", "ip"):
        if shutil.which(needed) is None:
            return f"{needed} is not installed"
    trial = 'ip link set lo up && exec 3<>/dev/net/tun && [ "$$" = 1 ]'
    tried = subprocess.run([*_unshare(), "sh", "-c", trial], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"no namespaces: {tried.stderr.decode().strip()}"


def live_inside() -> None:
    """Run this script again in namespaces of its own, and return there; the process outside ends
    with the same status.
    """
    match os.environ.get(INSIDE):
        case None:
            # In a session of its own: of a Ctrl-C it learns once, and from us.
            command = [*dies_with_us(), *_unshare(), sys.executable, *sys.argv]
            with empty_folder() as folder:
                environ = {**os.environ, INSIDE: "first", FOLDER: str(folder)}
                process = subprocess.Popen(command, env=environ, start_new_session=True)
                _stop_on_signals(lambda: psutil.Process(process.pid).children())
                status = process.wait()
            sys.exit(status)
        case "first":
            # It reaps orphans; when it ends, the kernel ends all others.
            process = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, INSIDE: ""})
            _stop_on_signals(lambda: [psutil.Process(process.pid)])
            while (ended := os.wait())[0] != process.pid:
                pass
            os._exit(os.waitstatus_to_exitcode(ended[1]) & 0xFF)
        case _:
            # As Ctrl-C does: everything is undone on the way out.
            signal.signal(signal.SIGTERM, signal.default_int_handler)


def _stop_on_signals(processes: Callable[[], Sequence[psutil.Process]]) -> None:
    """Pass what asks this process to end on to others, and wait for them."""

    def stop(*_: object) -> None:
        with contextlib.suppress(psutil.Error):
            for process in processes():
                process.terminate()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)


def _unshare() -> list[str]:
    as_root = [] if os.getuid() == 0 else ["--map-root-user"]
    apart = ["--net", "--uts", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child"]
    return ["unshare", *as_root, *apart]


@contextlib.contextmanager
def empty_folder() -> Iterator[Path]:
    """A folder that nobody else uses. Those of processes that were killed are removed first."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    with _locked(folder) as locked:
        assert locked
        for other in folder.parent.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError), _locked(other) as is_stale:
                if is_stale:
                    other.rmdir()
        yield folder
        folder.rmdir()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether this process has the folder for itself, until the end of the block."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    is_ours = True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        is_ours = False
    try:
        yield is_ours
    finally:
        os.close(fd)


@contextlib.contextmanager
def scratch(size: str) -> Iterator[Path]:
    """A folder in memory, of at most this size, which only processes inside see."""
    folder = Path(os.environ[FOLDER])
    run_tool("mount", "-t", "tmpfs", "-o", f"size={size}", "hosts", str(folder))
    try:
        yield folder
    finally:
        run_tool("umount", "--lazy", str(folder))


def enter(net: str, uts: str) -> None:
    """Move this thread, and what it will start, to a host."""
    for place in (net, uts):
        fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        _call(_libc.setns, fd, 0)
        os.close(fd)


def new_host(number: int, name: str) -> Host:
    def make() -> tuple[int, int]:
        _call(_libc.unshare, _CLONE_NEWNET | _CLONE_NEWUTS)
        socket.sethostname(name)
        net, uts = (
            os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
            for kind in ("net", "uts")
        )
        return net, uts

    return Host(number, name, f"10.77.0.{number + 1}", *_elsewhere(make))


def _elsewhere(work: Callable[[], _T]) -> _T:
    """Do this in a thread of its own, whose namespaces are nobody else's."""
    done: list[Any] = []

    def run() -> None:
        try:
            done.append((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            done.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    made, error = done[0]
    if error is not None:
        raise error
    return made


def _call(function: Any, *arguments: int) -> None:
    if function(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), function.__name__)


def run_tool(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
