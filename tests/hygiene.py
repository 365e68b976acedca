"""Checks that a test leaves nothing behind, by snapshots of this process and its descendants.

Compared before and after every test: processes, file descriptors, mapped memfds, threads, files in
/dev/shm, and files in the test's own TMPDIR. New ones get a grace period to go away (sockets close
asynchronously, processes take a moment to die).

What may stay, with the reason:
- eventpoll, eventfd, timerfd, io_uring: tokio, gRPC and Arrow make them once, on first use, and
  keep them. asyncio's own are reported by its ResourceWarning, which is an error here.
- TCP connections to a server that the whole test session shares: pools of cached clients.
- threads called "fsspecIO", "Dummy-…" (native threads that called Python), "pytest-…", and
  "session-…": pools of fixtures that outlive a test should take this prefix.
- descendants of processes that were there before, for instance of a module's server.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from dataplane.arena import forks

GRACE_S = 20.0
MARK = "DATAPLANE_TEST_RUN"
KERNEL = 2
"""The process id of the parent of all threads of the kernel."""
SHARED_PORTS: set[int] = set()
"""Ports of servers that live as long as the test session; `servers.py` adds them."""
SHARED_PIDS: set[int] = set()
"""Their processes: a test that asks for one late (`getfixturevalue`) starts it."""
WARM_PIDS: set[int] = set()
"""Those of them that fork processes for a test, which are the test's own."""

_THREADS_THAT_STAY = (
    *("MainThread", "fsspecIO", "Dummy-", "pytest", "session-", "pymp"),
    "dataplane-member",  # a pool of the process, for shards that are joined from objects
)
_FDS_THAT_STAY = (
    "anon_inode:[eventpoll]",
    "anon_inode:[eventfd]",
    "anon_inode:[timerfd]",
    "anon_inode:[io_uring]",
    "/dev/nvidia",
    "/dev/urandom",
    "/dev/random",
)
_MEMFDS_THAT_STAY = ("libffi", ".nvidia", "nvidia")
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All resources that exist at one moment."""

    processes: dict[int, int]
    fds: dict[int, str]
    memfds: frozenset[str]
    threads: frozenset[threading.Thread]
    shm: frozenset[str]


@dataclass(slots=True)
class Processes:
    """Processes of the machine: ours are descendants of this one, and all that have its mark.

    A process is read once, when it is new: its parent, its start in clock ticks since boot, and its
    environment, which stays what it was. If no task has started since, none is new.
    """

    mark: bytes = b""
    newest: int = 0
    ours: dict[int, int] = field(default_factory=dict)
    strangers: set[int] = field(default_factory=set)

    def now(self) -> dict[int, int]:
        """Our processes, some of which may have ended: process ids and start times."""
        newest = _newest_task()
        if newest != self.newest:
            if newest < self.newest:  # numbers are used again: none is known by its number
                self.strangers, self.ours = set(), {}
            self.newest = newest
            self._update()
        return self.ours

    def _update(self) -> None:
        present = {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208
        self.strangers &= present
        ours = {pid: started for pid, started in self.ours.items() if pid in present}
        new = {}
        for pid in sorted(present - self.strangers - ours.keys() - {os.getpid()}):
            with contextlib.suppress(OSError):
                new[pid] = _parent_and_start(pid)
        for pid, (parent, started) in new.items():
            environ = _environment(pid, parent)
            if self.mark in environ:
                ours[pid] = started
            elif environ:  # or it is just executing another file
                self.strangers.add(pid)
        for pid in _below(new, {os.getpid(), *ours}):
            ours[pid] = new[pid][1]
        self.ours = ours
        self.strangers -= ours.keys()


_processes = Processes()


def mark_run() -> str:
    """Put a mark into the environment, which even orphaned descendants inherit."""
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    _processes.mark = f"{MARK}={mark}".encode()
    return mark


def take() -> Snapshot:
    """Look at everything now."""
    return Snapshot(
        processes=_processes.now(),
        fds=_fds(),
        memfds=_memfds(),
        threads=frozenset(threading.enumerate()),
        shm=frozenset(_shm_names()),
    )


def wait_until_clean(before: Snapshot, scratch: Path) -> list[str]:
    """Return what is left after the grace period; usually an empty list, returned at once."""
    deadline = time.monotonic() + GRACE_S
    pause = threading.Event()
    left = _left(before, scratch)
    while left and time.monotonic() < deadline:
        gc.collect()
        _reap()
        left = _left(before, scratch)
        if left:
            pause.wait(0.05)
    return left


def kill_new(before: Snapshot) -> None:
    """Kill what a test left running, so that it cannot disturb the next one."""
    for pid in _new_processes(before):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            process.kill()
            process.wait(timeout=5)


def empty(scratch: Path) -> None:
    """Remove a test's TMPDIR with all that is in it."""
    shutil.rmtree(scratch, ignore_errors=True)


def warm_up() -> None:
    """Start everything that libraries keep for ever, so that no test is blamed for it."""
    import multiprocessing.util

    import fsspec.asyn
    import obstore
    import obstore.store

    multiprocessing.util.get_temp_dir()
    loop = fsspec.asyn.get_loop()
    pool = ThreadPoolExecutor(thread_name_prefix="fsspecIO")
    loop.call_soon_threadsafe(loop.set_default_executor, pool)
    memory = obstore.store.MemoryStore()
    obstore.put(memory, "warm", b"up")
    obstore.get(memory, "warm").bytes()
    for family in (socket.AF_INET, socket.AF_UNIX):
        socket.socket(family).close()
    newest = _newest_task()
    threading.Thread(target=int).start()
    assert _newest_task() != newest, "/proc/loadavg does not say when processes start"


def _left(before: Snapshot, scratch: Path) -> list[str]:
    return [
        *(f"process {_describe(pid)}" for pid in _new_processes(before)),
        *(f"fd {fd} -> {target}" for fd, target in _new_fds(before)),
        *(f"mapped {name}" for name in sorted(_memfds() - before.memfds)),
        *(f"thread {thread.name}" for thread in _new_threads(before)),
        *(f"/dev/shm/{name}" for name in sorted(_shm_names() - before.shm) if _is_ours(name)),
        *(f"temporary file {path.name}" for path in sorted(scratch.glob("*"))),
    ]


def _new_processes(before: Snapshot) -> list[int]:
    old = (before.processes.keys() | SHARED_PIDS) - WARM_PIDS
    return [
        pid
        for pid, started in sorted(_processes.now().items())
        if before.processes.get(pid) != started
        and pid not in SHARED_PIDS
        and _runs(pid, started)
        and not _descends(pid, old)
    ]


def _runs(pid: int, started: int) -> bool:
    with contextlib.suppress(OSError):
        return _parent_and_start(pid)[1] == started
    return False


def _newest_task() -> int:
    """The number of the process or thread that was started last, of all that this one can see."""
    return int(_read("/proc/loadavg").split()[-1])


def _parent_and_start(pid: int) -> tuple[int, int]:
    """Read directly, since psutil takes ten times as long, and this is done for every process."""
    # The name of the program, in parentheses, may contain anything.
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split(maxsplit=20)
    return int(fields[1]), int(fields[19])


def _environment(pid: int, parent: int) -> bytes:
    """Threads of the kernel and processes of other users have one without the mark."""
    if parent == KERNEL:
        return b"none"
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        return b"secret"
    except OSError:
        return b""


def _read(path: str) -> bytes:
    """The start of a file of /proc, read with as few system calls as possible."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def _below(running: dict[int, tuple[int, int]], ancestors: set[int]) -> set[int]:
    """The running processes that descend from these ancestors, by their parents."""
    below: set[int] = set()
    while more := {
        pid
        for pid, (parent, _) in running.items()
        if pid not in below and (parent in ancestors or parent in below)
    }:
        below |= more
    return below


def _descends(pid: int, ancestors: set[int]) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(parent.pid in ancestors for parent in psutil.Process(pid).parents())
    return False


def _describe(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{pid} ({process.status()}): {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"{pid} (gone)"


def _fds() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are all that is needed
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 - far quicker
    return {fd: target for fd, target in found.items() if not target.startswith("/proc/")}


def _new_fds(before: Snapshot) -> list[tuple[int, str]]:
    new = [
        (fd, target)
        for fd, target in sorted(_fds().items())
        if before.fds.get(fd) != target and not target.startswith(_FDS_THAT_STAY)
    ]
    if any(target.startswith("socket:") for _, target in new):
        shared = _fds_to_shared_servers()
        new = [(fd, target) for fd, target in new if fd not in shared]
    return new


def _fds_to_shared_servers() -> set[int]:
    return {
        connection.fd
        for connection in psutil.Process().net_connections("tcp")
        if connection.raddr and connection.raddr.port in SHARED_PORTS
    }


def _memfds() -> frozenset[str]:
    return memfds_in(_read("/proc/self/statm").split()[0])


@functools.lru_cache(maxsize=1)
def memfds_in(_size: bytes) -> frozenset[str]:
    """The memfds that are mapped, read again if the address space has another size. It may have the
    same by chance after a fixture of several tests has come: then this cache is cleared.
    """
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        lines = [line.rstrip("\n").partition("/memfd:") for line in maps if "/memfd:" in line]
    return frozenset(
        f"memfd:{name} inode {numbers.split()[4]}"
        for numbers, _, name in lines
        if not name.startswith(_MEMFDS_THAT_STAY)
    )


def _new_threads(before: Snapshot) -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread not in before.threads and not thread.name.startswith(_THREADS_THAT_STAY)
    ]


def _shm_names() -> set[str]:
    with contextlib.suppress(OSError):
        return {entry.name for entry in os.scandir(_SHM) if _owned(entry)}
    return set()


def _owned(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        return entry.stat().st_uid == os.getuid()
    return False


def _is_ours(name: str) -> bool:
    """Whether no process outside this test run holds the file: others may test at the same time.

    By its inode: a semaphore is mapped while it has another name, which is gone by now.
    """
    try:
        held = (_SHM / name).stat()
    except OSError:
        return False
    place = f"{os.major(held.st_dev):02x}:{os.minor(held.st_dev):02x} {held.st_ino} "
    family = {os.getpid(), *_processes.now()}
    for pid in psutil.pids():
        if pid in family:
            continue
        with contextlib.suppress(OSError):
            if place in Path(f"/proc/{pid}/maps").read_text():
                return False
            with os.scandir(f"/proc/{pid}/fd") as links:
                if any(_is_of(link, held) for link in links):
                    return False
    return (_SHM / name).exists()


def _is_of(link: os.DirEntry[str], held: os.stat_result) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(link.stat(), held)
    return False


def _reap() -> None:
    """Reap children that no code waits for any more."""
    forks.lasting_forks()
    subprocess._cleanup()  # type: ignore[attr-defined]
    if "multiprocessing" in sys.modules:
        import multiprocessing
        from multiprocessing import resource_tracker

        multiprocessing.active_children()
        tracker = resource_tracker._resource_tracker  # type: ignore[attr-defined]
        if tracker._pid is not None:
            # It starts with the first spawned child and would stay as long as this process.
            tracker._stop()
