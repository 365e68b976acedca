"""Facts about the machine on which a benchmark ran, and the load of other processes."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dataplane_bench.cores import CoreIds
from dataplane_bench.trial import watch

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class CpuSample:
    """CPU seconds since the machine started, summed over the cores that this process may use:
    total, busy, and stolen by the hypervisor; and those that our own processes used.
    """

    total_s: float
    busy_s: float
    steal_s: float
    own_s: float


def look(own: Sequence[int] | None = None, cores: CoreIds | None = None) -> CpuSample:
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
    """What a reader needs to know to compare results; `folder` holds the shards."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "storage": _file_system(folder),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(folder: Path) -> str:
    """The type of the file system, such as "ext4"."""
    resolved = folder.resolve()
    inside = [
        one for one in psutil.disk_partitions(all=True) if resolved.is_relative_to(one.mountpoint)
    ]
    return max(inside, key=lambda one: len(one.mountpoint)).fstype if inside else ""
