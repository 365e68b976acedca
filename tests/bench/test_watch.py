"""Costs of processes measured from outside match what they measure themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import threading

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_bench import bounds
from dataplane_bench.bounds import best_rate
from dataplane_bench.machine import CpuSample, confined, cpu_sample, divided, load_between
from dataplane_bench.model import ColumnType, DatasetPlace, StorageKind, Workload, WorkloadColumn
from dataplane_bench.trial import watch
from dataplane_bench.trial.launch import TrialFailed
from dataplane_bench.workloads.generate import RECIPES, generated

MIB = 1 << 20
TICK_S = 1 / os.sysconf("SC_CLK_TCK")

# Uses the requested CPU seconds, and says when it is done.
BURN = """
import json, os, resource, sys, time
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
def said(words):
    os.write(1, json.dumps(words).encode() + b"\\n")
"""
PARENT = (
    BURN
    + """
import ctypes
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # as a keeper, it collects whatever loses its parent
def child(work, waits=True):
    pid = os.fork()
    if not pid:
        work()
        os._exit(0)
    if waits:
        os.waitpid(pid, 0)
def grandchild():
    child(lambda: burn(0.1))
    burn(0.1)
def daemon():  # its parent ends at once
    os.setsid()
    child(lambda: burn(0.15), waits=False)
burn(0.1)
child(lambda: burn(0.1))
child(grandchild)
child(daemon)
try:
    while os.waitpid(-1, 0):
        pass
except ChildProcessError:
    pass
ready, running = os.pipe(), os.pipe()
pid = os.fork()
if not pid:
    burn(0.1)
    os.write(running[1], json.dumps(time.process_time()).encode())
    os.read(ready[0], 1)
    os._exit(0)
own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
still = json.loads(os.read(running[0], 100))
said(sum(one.ru_utime + one.ru_stime for one in own) + still)
sys.stdin.read()
os.write(ready[1], b"x")
"""
)


BELOW_SHELL = ("sh", "-c", '"$@"; true', "sh")


@contextlib.contextmanager
def running(program, *arguments, below=()):
    process = subprocess.Popen(
        [*below, sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process, lambda: json.loads(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(60)


def test_cpu_of_a_tree_is_what_its_processes_used_ended_or_not():
    with running(PARENT) as (process, hear):
        truth = hear()
        assert truth >= 0.65
        # The kernel reports whole ticks for each process, running or ended.
        assert watch.cpu_s([process.pid]) == pytest.approx(truth, abs=8 * TICK_S)


def test_a_process_that_is_not_there_costs_nothing():
    with running("") as (process, _):
        pass
    assert watch.cpu_s([process.pid]) == 0
    assert watch.memory([process.pid]) == (0, 0)


def test_cpu_adds_up_while_processes_come_and_go():
    program = BURN + (
        "said(0)\n"
        "for _ in range(200):\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        burn(0.002)\n"
        "        os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "said(0); sys.stdin.read()\n"
    )
    with running(program) as (process, hear):
        hear()
        over = threading.Event()

        def listen():
            hear()
            over.set()

        listener = threading.Thread(target=listen)
        listener.start()
        seen = [0.0]
        while not over.is_set():
            seen.append(watch.cpu_s([process.pid]))
        listener.join()
        # Never less than before: what a child used is its parent's as soon as it has ended.
        drops = [before - after for before, after in itertools.pairwise(seen)]
        assert max(drops) <= 2 * TICK_S
        assert seen[-1] > 0.3


def test_the_tree_has_all_descendants_and_no_other_process():
    program = (
        "import json, os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'])\n"
        "print(json.dumps(child.pid), flush=True); child.wait()\n"
    )
    with running(program) as (process, hear):
        child = hear()
        assert set(watch.tree([process.pid])) == {process.pid, child}
        assert set(watch.tree([child])) == {child}
        assert os.getpid() in watch.tree([os.getpid()])


SHARING = """
import json, mmap, os, sys
size = int(sys.argv[1])
shared, own = mmap.mmap(-1, size), bytearray(int(sys.argv[2]))
shared.write(b"x" * size)
own[::4096] = b"x" * len(own[::4096])
ready, go = os.pipe(), os.pipe()
for _ in range(2):
    if not os.fork():
        sum(shared[::4096])
        os.write(ready[1], b"x")
        sys.stdin.read()
        os._exit(0)
for _ in range(2):
    os.read(ready[0], 1)
print(json.dumps(1), flush=True)
sys.stdin.read()
"""


def test_memory_that_processes_share_counts_once():
    # As for a keeper, all descendants of the root count.
    with running(SHARING, 64 * MIB, MIB, below=BELOW_SHELL) as (shell, hear):
        hear()
        found, without_files = watch.memory([shell.pid])
        (shared,) = psutil.Process(shell.pid).children()
        below = [shared, *shared.children()]
        assert sum(one.memory_info().rss for one in below) >= 3 * 64 * MIB
        assert 64 * MIB < found < (64 + 3 * 20) * MIB
        assert 64 * MIB < without_files <= found
        # Two of the three that share it.
        found, _ = watch.memory([shared.pid])
        assert 2 / 3 * 64 * MIB < found < 2 / 3 * 64 * MIB + 2 * 20 * MIB


def test_memory_of_files_is_told_apart(tmp_path):
    path = tmp_path / "shard"
    path.write_bytes(b"x" * (32 * MIB))
    program = (
        "import mmap, sys\n"
        "with open(sys.argv[1], 'rb') as file:\n"
        "    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "sum(mapped[::4096]); print(1, flush=True); sys.stdin.read()\n"
    )
    with running(program, path, below=BELOW_SHELL) as (shell, hear):
        hear()
        found, without_files = watch.memory([shell.pid])
        assert 32 * MIB <= found - without_files < 64 * MIB


class Looking:
    """Looks that take as long as a test says, and an event after some of them."""

    def __init__(self, enough, takes_s=0.0):
        self.over, self._left, self._takes_s = threading.Event(), enough, takes_s
        self.roots = []

    def __call__(self, roots):
        threading.Event().wait(self._takes_s)
        self.roots.append(roots)
        if len(self.roots) == self._left:
            self.over.set()
        return 2, 1


def test_the_watch_takes_samples_of_all_that_it_watches_until_it_is_closed():
    looking = Looking(3)
    watching = watch.MemoryWatch(looking)
    watching.watch(1)
    watching.watch(2)
    watching.forget(1)
    assert looking.over.wait(30)
    watching.close()
    watching.close()
    moments = [at for at, _, _ in watching.seen]
    assert moments == sorted(moments)
    assert looking.roots[-1] == (2,)
    assert {sample[1:] for sample in watching.seen} == {(2, 1)}
    assert min(b - a for a, b in itertools.pairwise(moments)) >= watch.SAMPLE_S - 0.01


def test_a_watch_without_processes_can_be_closed():
    watch.MemoryWatch().close()


SPIN = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"


@pytest.mark.parametrize("own_s", [10.0, 20.0])
def test_the_load_of_others_is_never_negative(own_s):
    before, after = CpuSample(0.0, 0.0, 0.0, 0.0), CpuSample(20.0, 10.0, 0.0, own_s)
    assert load_between(before, after)["others"] == 0.0
    assert load_between(before, before) == {}


def test_cpu_of_our_descendants_counts_as_ours_even_after_they_end():
    before, before_of_nobody = cpu_sample(), cpu_sample(own=())
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    after, after_of_nobody = cpu_sample(), cpu_sample(own=())
    assert after.own_s - before.own_s >= 0.29  # ticks of 10 ms
    assert before_of_nobody.own_s == after_of_nobody.own_s == 0.0
    assert after.busy_s - before.busy_s >= 0.25
    assert before.total_s < after.total_s


ASK = "import os; print(sorted(os.sched_getaffinity(0)))"


@pytest.mark.parametrize("count", [1, 2, 7])
def test_few_cores_are_shared(count):
    division = divided(set(range(count)))
    assert division.loaders == division.server == set(range(count))
    assert not division.are_apart


@pytest.mark.parametrize(("count", "served"), [(8, 2), (16, 4), (96, 24)])
def test_a_server_among_many_cores_has_a_quarter_for_itself(count, served):
    cores = {3 * core for core in range(count)}
    division = divided(cores)
    assert division.are_apart
    assert len(division.server) == served
    assert division.all == cores


def test_what_is_started_while_confined_stays_there_and_nothing_else_is():
    before = os.sched_getaffinity(0)
    one = {min(before)}
    with confined(one):
        told = subprocess.run(
            [sys.executable, "-c", ASK], capture_output=True, text=True, check=True
        )
    assert told.stdout.strip() == str(sorted(one))
    assert os.sched_getaffinity(0) == before


SMALL = 0.001
SHORT_S = 0.02


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("bounds")


@pytest.mark.parametrize(
    "name",
    [
        name if name in {"tabular", "images"} else pytest.param(name, marks=pytest.mark.slow)
        for name in RECIPES
    ],
)
def test_every_bound_of_a_workload_is_measured_and_can_be(name, root):
    workload = generated(name, root, SMALL)
    names = bounds.names(workload, StorageKind.LOCAL)
    found = bounds.measure(names, workload, None, SHORT_S)
    assert tuple(found) == names
    for one, value in found.items():
        # No machine copies 1,000 GB/s on one core, and none decodes only one image a second.
        low, high = (0.01, 1000.0) if one.endswith("_gb_per_s") else (1.0, 1e9)
        assert low < value < high, one
    limits = bounds.bound_of(workload, StorageKind.LOCAL, found)
    assert limits == sorted(limits, key=lambda one: one[1])
    assert all(math.isfinite(limit) and limit > 0 for _, limit in limits)


def test_what_the_server_delivers_bounds_what_is_read_from_it(root):
    tokens = generated("tokens", root, SMALL)
    stored = sum(path.stat().st_size for path in tokens.source.iterdir()) / tokens.sample_count
    slow = bounds.bound_of(tokens, StorageKind.S3, {"gather_gb_per_s": 8.0, "s3_gb_per_s": 0.5})
    assert slow[0] == ("S3 server's own ceiling", pytest.approx(0.5e9 / stored))
    fast = bounds.bound_of(tokens, StorageKind.S3, {"gather_gb_per_s": 0.1, "s3_gb_per_s": 50.0})
    assert [name for name, _ in fast] == ["gather, one core", "S3 server's own ceiling"]


def test_the_server_is_measured(s3_server, root):
    workload = generated("text", root, SMALL)
    bucket = s3_server.bucket()
    s3_server.put(
        bucket, {f"source/{path.name}": path.read_bytes() for path in workload.source.iterdir()}
    )
    place = DatasetPlace(
        workload.source,
        f"s3://{bucket}/source",
        s3_server.endpoint,
        s3_server.access_key,
        s3_server.secret_key,
    )
    assert "s3_gb_per_s" in bounds.names(workload, StorageKind.S3)
    found = bounds.measure(["s3_gb_per_s"], workload, place, SHORT_S)
    assert 0 < found["s3_gb_per_s"] < 100


def test_what_a_user_may_have_is_measured_too(tmp_path):
    rows = {
        "flag": pa.array([True, False] * 50),
        "grid": pa.FixedSizeListArray.from_arrays(pa.array(range(600), pa.int16()), 6),
        "empty": pa.array([[]] * 100, pa.list_(pa.float32())),
        "text": pa.array(["é" * (i % 9) for i in range(100)]),
    }
    pq.write_table(pa.table(rows), tmp_path / "shard-00000.parquet")
    columns = (
        WorkloadColumn("flag", ColumnType.FIXED, "bool"),
        WorkloadColumn("grid", ColumnType.FIXED, "int16", (2, 3)),
        WorkloadColumn("empty", ColumnType.RAGGED, "float32"),
        WorkloadColumn("text", ColumnType.STRING),
    )
    mixed = Workload("text", columns, 25, 100, tmp_path, "own", 5.0)
    for workload in (mixed, dataclasses.replace(mixed, columns=columns[:2])):
        names = bounds.names(workload, StorageKind.LOCAL)
        found = bounds.measure(names, workload, None, SHORT_S)
        assert all(value > 0 for value in found.values())
        assert bounds.bound_of(workload, StorageKind.LOCAL, found)
    assert {"padded_lists_per_s", "string_rows_per_s"} <= set(
        bounds.names(mixed, StorageKind.LOCAL)
    )


def test_a_failed_measurement_is_reported(root):
    workload = dataclasses.replace(generated("text", root, SMALL), source=root / "gone")
    with pytest.raises(TrialFailed, match="bounds"):
        bounds.measure(["page_cache_gb_per_s"], workload, None, SHORT_S)


def test_the_best_pass_counts():
    passes = []
    assert best_rate(lambda: passes.append(1), 1.0, SHORT_S) > 1000
    assert len(passes) > 3
