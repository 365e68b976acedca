"""What cgroups leave of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataplane.base.machine import (
    cpu_limit,
    memory_limit,
    this_machine,
)


def made(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine_has_memory_and_a_processor():
    machine = this_machine()
    assert machine.memory_bytes > 1 << 20
    assert machine.cpu_count >= 1


def test_the_tightest_cgroup_counts(tmp_path):
    root = made(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/memory.max": "1000000\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/box/cpu.max": "250000 100000\n",
        },
    )
    assert memory_limit(root) == 1_000_000
    assert cpu_limit(root) == 2


def test_inside_a_container_the_mount_is_the_containers_own(tmp_path):
    root = made(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../elsewhere\n",
            "sys/fs/cgroup/memory.max": "4096\n",
            "sys/fs/cgroup/cpu.max": "50000 100000\n",
        },
    )
    assert memory_limit(root) == 4096
    assert cpu_limit(root) == 1


def test_version_one_hierarchies_are_read(tmp_path):
    root = made(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n",
            "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "8192\n",
            "sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert memory_limit(root) == 8192
    assert cpu_limit(root) == 4


@pytest.mark.parametrize("text", ["", "0::/\n", "9:name=systemd:/\n"])
def test_without_cgroup_limits_there_is_no_limit(text, tmp_path):
    root = made(tmp_path, {"proc/self/cgroup": text})
    assert memory_limit(root) is None
    assert cpu_limit(root) is None
