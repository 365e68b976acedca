"""What cgroups leave of a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dataplane.base.machine import (
    bound_to,
    cpu_limit,
    least_used,
    memory_limit,
    numa_node_of,
    numa_nodes,
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


def test_numa_nodes_have_the_processors_that_this_process_may_use(tmp_path):
    usable = sorted(os.sched_getaffinity(0))
    first, rest = usable[0], usable[1:]
    root = made(
        tmp_path,
        {
            "sys/devices/system/node/node10/cpulist": ",".join(map(str, rest)) + "\n",
            "sys/devices/system/node/node2/cpulist": f"{first},70000-70003\n",
            "sys/devices/system/node/node1/cpulist": "\n",  # memory without processors
            "sys/devices/system/node/online": "1-2,10\n",
        },
    )
    assert numa_nodes(root) == (frozenset({first}), *([frozenset(rest)] if rest else []))
    assert numa_nodes(tmp_path / "nowhere") == (frozenset(usable),)
    (node,) = numa_nodes(made(tmp_path, {"sys/devices/system/node/node10/cpulist": ""}))
    assert bound_to((node,), 0) == ()  # one node: nothing is bound


def test_a_process_is_on_a_numa_node_if_it_may_run_nowhere_else():
    usable = frozenset(os.sched_getaffinity(0))
    elsewhere = frozenset({70000})
    assert numa_node_of(os.getpid(), (elsewhere, usable)) == 1
    assert numa_node_of(os.getpid(), (elsewhere, elsewhere)) is None
    assert numa_node_of(os.getpid(), (usable,)) is None
    assert numa_node_of(0, (elsewhere, usable)) is None
    assert [least_used((elsewhere, usable), used) for used in ([], [0], [0, 1, 1])] == [0, 1, 0]
