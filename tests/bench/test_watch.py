"""Costs of processes measured from outside match what they measure themselves."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading

import psutil
import pytest
from dataplane_bench.trial import watch

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


def test_cpu_of_several_trees_is_their_sum():
    program = BURN + "burn(float(sys.argv[1])); said(time.process_time()); sys.stdin.read()"
    with running(program, 0.1) as (first, hear), running(program, 0.2) as (second, hear_second):
        truth = hear() + hear_second()
        found = watch.cpu_s([first.pid, second.pid])
        assert found == pytest.approx(truth, abs=6 * TICK_S)
        assert watch.cpu_s([first.pid, second.pid, first.pid]) == pytest.approx(found, abs=TICK_S)


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


def test_what_takes_long_to_look_at_is_looked_at_less_often():
    looking = Looking(2, takes_s=0.05)
    watching = watch.MemoryWatch(looking)
    watching.watch(1)
    assert looking.over.wait(30)
    watching.close()
    first, second = (at for at, _, _ in watching.seen[:2])
    assert second - first >= 20 * 0.05 - 0.01


def test_a_watch_without_processes_can_be_closed():
    watch.MemoryWatch().close()
