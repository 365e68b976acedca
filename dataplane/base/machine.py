"""The memory and processors that this process may use, cgroup limits included.

All code that reads Linux's files about memory and processors is in this module.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import pwd
import resource
import signal
import socket
import sys
import termios
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from msgspec import Struct

_DESCRIPTORS_MAX = 1 << 16
_DESCRIPTORS_KEPT = 256
_CONNECTIONS_MIN = 16
_OBJECTS_BEFORE_LOOK = 1 << 16
_PULSE_PAUSE_S_MAX = 5.0
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class Machine(Struct, frozen=True):
    """The memory and processors that this process may use; default settings depend on them."""

    memory_bytes: int
    cpu_count: int
    uid: int


def this_machine() -> Machine:
    """Return what this process may use of its machine."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    schedulable = len(os.sched_getaffinity(0))
    root = Path("/")
    return Machine(
        memory_bytes=min(installed, memory_limit(root) or installed),
        cpu_count=min(schedulable, cpu_limit(root) or schedulable),
        uid=os.getuid(),
    )


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open files to its hard limit. The usual soft limit of 1024
    protects programs that use select(), which we do not. Children inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_max() -> int:
    """Return how many connections one listener of this process may accept. A process has at most
    two listeners, and one of them uses a second descriptor per connection, so at least a quarter of
    all descriptors is left for logs, imports, workers and shards.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else min(soft, _DESCRIPTORS_MAX)
    return max(_CONNECTIONS_MIN, (limit - _DESCRIPTORS_KEPT) // 4)


def lock_holder(path: Path) -> int | None:
    """Return the process that has locked a file, or a part of it; None if the kernel reports none.

    Source: proc_locks(5).
    """
    try:
        found = path.stat()
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    major, minor = os.major(found.st_dev), os.minor(found.st_dev)
    place = f"{major:02x}:{minor:02x}:{found.st_ino}"
    pids = [words[4] for line in lines if place in (words := line.split()) and "->" not in words]
    return next((int(pid) for pid in pids if pid.isdigit() and int(pid)), None)


def pwd_home(uid: int) -> str:
    """Return a user's home folder from the password database; "" if it has none."""
    try:
        return pwd.getpwuid(uid).pw_dir
    except KeyError:
        return ""


def may_create_in(folder: str) -> bool:
    """Return whether this process may create files in a folder, or the folder if it is missing."""
    while not os.path.exists(folder):  # noqa: PTH110 - Path's raises in the home of another user
        folder = os.path.dirname(folder)  # noqa: PTH120
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)  # noqa: PTH112


def memory_limit(root: Path) -> int | None:
    """Return the bytes that the tightest cgroup around this process allows; None without a limit.

    Source: Documentation/admin-guide/cgroup-v2.rst (memory.max), cgroup-v1/memory.rst.
    """
    limits = [
        int(text)
        for folder in _cgroups(root, "memory")
        for text in _words(folder / "memory.max", folder / "memory.limit_in_bytes")[:1]
        if text.isdigit()
    ]
    return min(limits, default=None)


def cpu_limit(root: Path) -> int | None:
    """Return the whole processors that the tightest cgroup quota allows, at least 1; None without a
    quota.

    Source: Documentation/admin-guide/cgroup-v2.rst (cpu.max), scheduler/sched-bwc.rst.
    """
    counts = []
    for folder in _cgroups(root, "cpu"):
        quota = _words(folder / "cpu.max") or [
            *_words(folder / "cpu.cfs_quota_us"),
            *_words(folder / "cpu.cfs_period_us"),
        ]
        # "max" in version 2 and -1 in version 1 mean that there is no quota.
        if len(quota) == 2 and all(text.isdigit() for text in quota) and int(quota[1]):
            counts.append(max(1, int(quota[0]) // int(quota[1])))
    return min(counts, default=None)


def limit_memory(size_bytes: int) -> None:
    """Limit this process's private memory: heap, stacks of threads and private mappings. Shared
    memory and mapped files do not count.

    Source: getrlimit(2), RLIMIT_DATA since Linux 4.7.
    """
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = size_bytes if hard == resource.RLIM_INFINITY else min(size_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def collect_rarely() -> None:
    """Collect cyclic garbage less often. The facts of a wide table are hundreds of thousands of
    objects without cycles, and examining them after every few thousand new ones would take a third
    of the time.
    """
    gc.freeze()
    gc.set_threshold(_OBJECTS_BEFORE_LOOK, 20, 20)


def thread_count() -> int:
    """Return the number of threads of this process, those of libraries included.

    Source: proc(5), /proc/self/task.
    """
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def close_descriptors(keep: Collection[int]) -> None:
    """Close all descriptors of this process except 0, 1, 2 and those in `keep`."""
    for fd in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
        if fd > 2 and fd not in keep:
            with contextlib.suppress(OSError):  # the folder's own descriptor is closed already
                os.close(fd)


def set_process(name: str, *, dies_with_parent: bool = False) -> None:
    """Name this process, in 15 bytes. With `dies_with_parent`, the kernel kills the process when
    its parent ends.

    Source: prctl(2).
    """
    libc = ctypes.CDLL(None)
    if dies_with_parent:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_NAME, name.encode())


def kill_count_for_memory() -> int:
    """Return how many processes of this machine the kernel has killed because memory ran out; 0 if
    the kernel does not report the number.

    Source: mm/oom_kill.c, and mm/vmstat.c (oom_kill).
    """
    for line in _text(Path("/proc/vmstat")).splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill":
            return int(number)
    return 0


def has_ended(pid: int) -> bool:
    """Return whether all threads of a process have ended, even if its parent has not reaped it yet.

    Source: proc_pid_stat(5), field 3; the name in parentheses before it may have any characters.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return True
    return fields[0] in {b"Z", b"X"}


def waited_for_processor_s(pid: int) -> float:
    """Return the seconds for which the main thread of a process was ready to run but had no
    processor; 0.0 if the kernel does not report them, or the process is gone.

    Source: Documentation/scheduler/sched-stats.rst (/proc/<pid>/schedstat).
    """
    words = _words(Path(f"/proc/{pid}/schedstat"))
    return int(words[1]) / 1e9 if len(words) > 1 else 0.0


class ProcessorWaits:
    """Measures how long one thread of this process has waited for a processor so far. Keeps the
    kernel's file about the thread open.

    Source: Documentation/scheduler/sched-stats.rst (/proc/<pid>/task/<tid>/schedstat).
    """

    def __init__(self, native_id: int) -> None:
        try:
            path = f"/proc/self/task/{native_id}/schedstat"
            self._fd: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = None

    @property
    def is_known(self) -> bool:
        """Whether the kernel reports the thread's waits."""
        return self._fd is not None

    def seconds(self) -> float:
        """Return the seconds that the thread has waited so far; 0 if the kernel does not report
        them.
        """
        if self._fd is None:
            return 0.0
        try:
            return int(os.pread(self._fd, 128, 0).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class OwnTime:
    """Measures how long a process has worked on something, excluding the time that it waited for a
    processor. `now` is from time.monotonic().
    """

    def __init__(self, pid: int, now: float) -> None:
        self._pid = pid
        self.begin(now)

    def begin(self, now: float) -> None:
        """Start counting from now."""
        self._began, self._waited_s = now, waited_for_processor_s(self._pid)

    def exceeds(self, timeout_s: float, now: float) -> bool:
        """Return whether the process has worked longer than `timeout_s`. Reads /proc only once
        `timeout_s` of wall time has passed, since before that the answer is no.
        """
        own_s = now - self._began
        if own_s <= timeout_s:
            return False
        return own_s - (waited_for_processor_s(self._pid) - self._waited_s) > timeout_s


class Pulse:
    """Detects that the process at the other end of a local socket no longer reads.

    The process is considered stopped, or stuck in a system call, if a message stays unread for
    `timeout_s`, not counting the time that the process waited for a processor. The kernel reports
    how many bytes are unread, so the other process need not answer. Call `is_lost` about twice a
    second.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock, self._timeout_s = sock, timeout_s
        self._unread = 0
        self._own: OwnTime | None = None
        self._looked = 0.0

    def is_lost(self, pid: int, now: float, probe: Callable[[], object]) -> bool:
        """Return whether the process `pid` must be replaced. If the process has read all messages,
        this function calls `probe`, which must send it a message of any kind.
        """
        unread, before = _unread_bytes(self._sock), self._unread
        # Start measuring anew after a long pause between two calls: our own process may have been
        # stopped.
        if not unread or unread < before or now - self._looked > _PULSE_PAUSE_S_MAX:
            self._own = None
        self._looked = now
        if not unread:
            probe()
            unread = _unread_bytes(self._sock)
        self._unread = unread
        if not unread:
            return False
        if self._own is None:
            self._own = OwnTime(pid, now)
        return self._own.exceeds(self._timeout_s, now)


def _unread_bytes(sock: socket.socket) -> int:
    """Return how many bytes the other end has not read, including the kernel's overhead; 0 if
    unknown.
    """
    if sock.fileno() < 0:
        return 0
    try:
        found = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:
        return 0
    return int.from_bytes(found, sys.byteorder)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the cgroup of this process and all above it, in the hierarchy that has this controller.

    Inside a container the path of /proc/self/cgroup may not exist below the mount; then only the
    mount itself, which is the container's own cgroup, has the files.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        below = mount / path.strip().lstrip("/")
        yield below
        yield from (folder for folder in below.parents if folder.is_relative_to(mount))


def _words(*candidates: Path) -> list[str]:
    for path in candidates:
        words = _text(path).split()
        if words:
            return words
    return []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
