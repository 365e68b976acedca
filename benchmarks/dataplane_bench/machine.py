"""The machine of a benchmark: its facts, load and free memory, which cores loaders use, and where
files lie.

An S3 server that shares cores with the loaders slows them down as no server elsewhere would. So it
gets cores of its own where the machine has enough of them. Its CPU time is reported apart.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dataplane import settings
from dataplane.base.machine import this_machine
from dataplane_bench.trial import watch

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROVIDED_BYTES_MAX = 4 << 30


@dataclass(frozen=True, slots=True)
class CpuSample:
    """CPU seconds since the machine started, summed over the cores that this process may use:
    total, busy, and stolen by the hypervisor; and those that our own processes used.
    """

    total_s: float
    busy_s: float
    steal_s: float
    own_s: float


def cpu_sample(own: Sequence[int] | None = None, cores: CoreIds | None = None) -> CpuSample:
    """The values now. Our own processes are the descendants of `own`, or else of this process; they
    use `cores`, or else only those of this thread.

    Source:  the lines "cpuN" of proc_stat(5).
    """
    own_s = watch.cpu_s((os.getpid(),) if own is None else own)
    usable = {f"cpu{core}" for core in cores or os.sched_getaffinity(0)}
    total = busy = steal = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in usable:
            user, nice, system, idle, iowait, irq, softirq, stolen = map(int, fields[:8])
            at_work = user + nice + system + irq + softirq
            busy, steal = busy + at_work, steal + stolen
            total += at_work + idle + iowait + stolen
    return CpuSample(total / _TICKS_PER_S, busy / _TICKS_PER_S, steal / _TICKS_PER_S, own_s)


def load_between(before: CpuSample, after: CpuSample) -> dict[str, float]:
    """The load from outside between two samples, as shares of the time of all cores: "others" is
    from processes that are not ours, "steal" from the hypervisor.
    """
    total = after.total_s - before.total_s
    if total <= 0:
        return {}
    others = after.busy_s - before.busy_s - (after.own_s - before.own_s)
    steal = after.steal_s - before.steal_s
    return {"others": round(max(0.0, others / total), 4), "steal": round(steal / total, 4)}


def machine_facts(folder: Path) -> dict[str, Any]:
    """The facts that a reader needs to compare results; `folder` holds the shards."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "storage": _file_system(folder),
    }


def provide_memory() -> None:
    """Touch free memory, up to 4 GiB, and release it.

    The host of a virtual machine may take back free memory, and takes up to ten times as long as a
    page fault of a real machine to provide it again. That belongs to no loader.
    """
    block, free_bytes = bytes(1 << 20), psutil.virtual_memory().free // 2
    size_bytes = min(free_bytes, this_machine().memory_bytes // 4, _PROVIDED_BYTES_MAX)
    if size_bytes < len(block):
        return
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size_bytes - len(block), len(block)):
            memory[at : at + len(block)] = block


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(folder: Path) -> str:
    """The type of the file system, such as "ext4"."""
    resolved = folder.resolve()
    inside = [
        partition
        for partition in psutil.disk_partitions(all=True)
        if resolved.is_relative_to(partition.mountpoint)
    ]
    return max(inside, key=lambda partition: len(partition.mountpoint)).fstype if inside else ""


CORES_MIN = 8
"""Fewer are shared: what is left for the loaders would be another machine."""
_SERVER_SHARE = 4

CoreIds = set[int] | frozenset[int]


@dataclass(frozen=True, slots=True)
class Division:
    """Cores by number, as the kernel counts them. Both are all of them where they are shared."""

    loaders: CoreIds
    server: CoreIds

    @property
    def all(self) -> CoreIds:
        return self.loaders | self.server

    @property
    def are_apart(self) -> bool:
        return not self.loaders & self.server


def divided(cores: CoreIds) -> Division:
    """A quarter of the cores for the server, the last ones, where there are enough."""
    if len(cores) < CORES_MIN:
        return Division(cores, cores)
    ordered = sorted(cores)
    count = len(ordered) // _SERVER_SHARE
    return Division(frozenset(ordered[:-count]), frozenset(ordered[-count:]))


@contextlib.contextmanager
def confined(cores: CoreIds) -> Iterator[None]:
    """Until the block ends, this thread and what it starts use only these cores.

    A process that was started inside stays there.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def bench_folder() -> Path:
    """Samples, environments of peers and reports: in the user's cache, beside our own.

    Raises:  ConfigError: the user has no home.
    """
    cache = settings.BY_NAME["cache_dir"].default(this_machine(), os.environ)
    return Path(str(cache), "bench")
