"""The machine that a report is of."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]


def machine_facts(folder: Path) -> dict[str, Any]:
    """What a reader needs to know to compare figures; `folder` is where the shards lie."""
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
    """The type of the file system, as "ext4"."""
    resolved = folder.resolve()
    inside = [
        one for one in psutil.disk_partitions(all=True) if resolved.is_relative_to(one.mountpoint)
    ]
    return max(inside, key=lambda one: len(one.mountpoint)).fstype if inside else ""
