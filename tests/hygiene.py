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
import gc
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from dataplane.arena import forks

GRACE_S = 20.0
MARK = "DATAPLANE_TEST_RUN"
SHARED_PORTS: set[int] = set()
"""Ports of servers that live as long as the test session; `servers.py` adds them."""
SHARED_PIDS: set[int] = set()
"""Their processes: a test that asks for one late (`getfixturevalue`) starts it."""
WARM_PIDS: set[int] = set()
"""Those of them that fork processes for a test, which are the test's own."""

_seen_processes: tuple[str, set[tuple[int, int]]] = "", set()
"""Which task was the newest of the machine, and what was found then: see `_processes`."""

_STRANGERS: set[tuple[int, int]] = set()
"""Processes that were there before this test run had its mark: they never get it."""

_THREADS_THAT_STAY = ("MainThread", "fsspecIO", "Dummy-", "pytest", "session-", "pymp")
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

    newest_task: str
    processes: frozenset[tuple[int, int]]
    fds: dict[int, str]
    memfds: frozenset[str]
    size: str
    threads: frozenset[threading.Thread]
    shm: frozenset[str]


def mark_run() -> str:
    """Put a mark into the environment, which even orphaned descendants inherit."""
    mark = uuid.uuid4().hex
    running = _running()
    _STRANGERS.update((pid, started) for pid, (_, started) in running.items())
    _STRANGERS.difference_update(_descendants(running))
    os.environ[MARK] = mark
    return mark


def take(mark: str) -> Snapshot:
    """Look at everything now."""
    newest_task, processes = _processes(mark)
    return Snapshot(
        newest_task=newest_task,
        processes=frozenset(processes),
        fds=_fds(),
        memfds=frozenset(_memfds()),
        size=_size(),
        threads=frozenset(threading.enumerate()),
        shm=frozenset(_shm_names()),
    )


def wait_until_clean(before: Snapshot, mark: str, scratch: Path) -> list[str]:
    """What is left after the grace period; usually an empty list, returned at once."""
    deadline = time.monotonic() + GRACE_S
    pause = threading.Event()
    left = _left(before, mark, scratch)
    while left and time.monotonic() < deadline:
        gc.collect()
        _reap()
        left = _left(before, mark, scratch)
        if left:
            pause.wait(0.05)
    return left


def kill_new(before: Snapshot, mark: str) -> None:
    """Kill what a test left running, so that it cannot disturb the next one."""
    for pid, started in _new_processes(before, mark):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if (pid, started) in _found(mark):
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


def _left(before: Snapshot, mark: str, scratch: Path) -> list[str]:
    return [
        *(f"process {_describe(pid)}" for pid, _ in _new_processes(before, mark)),
        *(f"fd {fd} -> {target}" for fd, target in _new_fds(before)),
        *(f"mapped {name}" for name in _new_memfds(before)),
        *(f"thread {thread.name}" for thread in _new_threads(before)),
        *(f"/dev/shm/{name}" for name in sorted(_shm_names() - before.shm) if _is_ours(name)),
        *(f"temporary file {path.name}" for path in sorted(scratch.glob("*"))),
    ]


def _new_processes(before: Snapshot, mark: str) -> list[tuple[int, int]]:
    if _newest_task() == before.newest_task:
        return []
    new = _found(mark) - before.processes
    if not new:
        return []
    old = ({pid for pid, _ in before.processes} | SHARED_PIDS) - WARM_PIDS
    return [
        (pid, started)
        for pid, started in sorted(new)
        if pid not in SHARED_PIDS and not _descends(pid, old)
    ]


def _processes(mark: str) -> tuple[str, set[tuple[int, int]]]:
    """All that is there, or was when the newest task of the machine was the same: before most
    tests, none has started since the last look. And that task.
    """
    global _seen_processes  # noqa: PLW0603
    newest = _newest_task()
    if newest != _seen_processes[0]:
        _seen_processes = newest, _found(mark)
    return _seen_processes


def _newest_task() -> str:
    """The number of the process or thread that was started last, of all that this one can see."""
    return _read("/proc/loadavg").split()[-1].decode()


def _found(mark: str) -> set[tuple[int, int]]:
    """Descendants of this process, and everything that has the mark: pids and start times."""
    running = _running()
    found = _descendants(running)
    needle = f"{MARK}={mark}".encode()
    for pid, (_, started) in running.items():
        if (pid, started) in _STRANGERS or pid == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if needle in Path(f"/proc/{pid}/environ").read_bytes():
                found.add((pid, started))
    return found


def _running() -> dict[int, tuple[int, int]]:
    """Every process: its parent, and its start time in clock ticks since boot.

    Read directly, since psutil takes ten times as long, and this is done twice for every test.
    """
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are all that is needed
        if name.isdigit():
            with contextlib.suppress(OSError):
                # The name of the program, in parentheses, may contain anything.
                fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split(maxsplit=20)
                found[int(name)] = int(fields[1]), int(fields[19])
    return found


def _read(path: str) -> bytes:
    """The start of a file of /proc, read with as few system calls as possible."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def _descendants(running: dict[int, tuple[int, int]]) -> set[tuple[int, int]]:
    children = defaultdict(list)
    for pid, (parent, started) in running.items():
        children[parent].append((pid, started))
    found: set[tuple[int, int]] = set()
    todo = list(children[os.getpid()])
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += children[one[0]]
    return found


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


def _new_memfds(before: Snapshot) -> list[str]:
    """None if the address space of this process has the size that it had."""
    return [] if _size() == before.size else sorted(_memfds() - before.memfds)


def _size() -> str:
    return _read("/proc/self/statm").split()[0].decode()


def _memfds() -> set[str]:
    found = set()
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        lines = [line.rstrip("\n") for line in maps if "/memfd:" in line]
    for line in lines:
        name = line.partition("/memfd:")[2]
        if not name.startswith(_MEMFDS_THAT_STAY):
            inode = line.split(maxsplit=5)[4]
            found.add(f"memfd:{name} inode {inode}")
    return found


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
    family = {os.getpid(), *(pid for pid, _ in _descendants(_running()))}
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
