"""Which faults do a room's fast tests find? `python tests/mutation.py scheduler --sample 150`.

Each mutant is one small change of the room's source, in a copy of the tree: a sample of all changes
by rules (mutants_by_rule.py). First all tests run once, to record which lines each reaches.
Then, for each mutant, a process that has done the slow imports is forked and runs the tests that
reach the mutant, the fastest first, until one fails. A test that takes far more CPU time than usual
is stopped, and counts as failed.

Prints the share of found mutants by module, and a diff of each mutant that was not found, which
shows whether it is a fault. Exit status 1: the tests fail without any change."""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import Phase, settings
from mutants_by_rule import mutants_of

HISTORIES = "tests/scheduler/test_histories.py::"


@dataclass(slots=True)
class Reached:
    """The lines that one test ran, as (file, line), and its CPU seconds."""

    lines: set[tuple[str, int]] = field(default_factory=set)
    cpu_s: float = 0.0


class Reach:
    """Records the lines that each test reaches. Lines run by other processes are not seen."""

    def __init__(self, tree: Path, room: str) -> None:
        self._tree = f"{tree}/"
        self._room = f"{tree}/dataplane/{room}/"
        self.tests: dict[str, Reached] = {}
        self._lines: set[tuple[str, int]] = set()
        self._names: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Trace only one history, since all reach the same lines."""
        histories = [each for each in items if each.nodeid.startswith(HISTORIES)]
        items[:] = [each for each in items if each not in histories[1:]]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Trace one test, with its fixtures."""
        reached = self.tests[nodeid] = Reached(cpu_s=-time.process_time())
        self._lines = reached.lines
        threading.settrace(self._call)
        sys.settrace(self._call)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Stop tracing."""
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        self.tests[nodeid].cpu_s += time.process_time()

    def _call(self, frame: FrameType, _event: str, _value: object) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(self._room):
            return None
        name = self._names.setdefault(path, path.removeprefix(self._tree))
        self._lines.add((name, frame.f_lineno))

        def line(frame: FrameType, _event: str, _value: object) -> Any:
            self._lines.add((name, frame.f_lineno))
            return line

        return line


class Chosen:
    """Runs these tests, in this order, and ends the process where one takes far longer than
    usual. What fails is not made smaller first.
    """

    def __init__(self, limits: dict[str, float]) -> None:
        self._limits = limits
        self.lacking: Sequence[str] = ()

    def pytest_configure(self) -> None:
        """After the settings of conftest.py were loaded."""
        settings.register_profile(
            "mutants", settings(), phases=[Phase.explicit, Phase.reuse, Phase.generate]
        )
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the others."""
        found = {each.nodeid: each for each in items}
        self.lacking = [name for name in self._limits if name not in found]
        items[:] = [found[name] for name in self._limits if name in found]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Let SIGPROF end the process, as by default."""
        signal.setitimer(signal.ITIMER_PROF, self._limits[nodeid])

    def pytest_runtest_logfinish(self) -> None:
        """Stop the timer of a test that has ended in time."""
        signal.setitimer(signal.ITIMER_PROF, 0.0)


ROOT = Path(__file__).resolve().parents[1]
TESTS = {
    "scheduler": ("tests/scheduler",),
    "plan": ("tests/plan",),
    "coordinator": ("tests/coordinator", "tests/simulation"),
    "formats": ("tests/formats", "tests/conformance/test_format.py"),
    "transforms": ("tests/transforms",),
    "store": ("tests/store", "tests/conformance/test_store.py"),
    "client": ("tests/client",),
}
_COPIED = (
    "dataplane",
    "loaders",
    "benchmarks",
    "tests",
    "proto",
    "docs",
    "pyproject.toml",
    "README.md",
)
_SLOW_TO_IMPORT = (
    "numpy", "pyarrow", "pyarrow.parquet", "hypothesis", "hypothesis.stateful", "_pytest.python",
    "xdist.plugin", "anyio.pytest_plugin", "boto3", "botocore.session", "botocore.client",
    "fsspec", "obstore", "psutil",
)  # fmt: skip
_PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "--hypothesis-seed=0")
_USUAL_TIMES = 2  # of what a test takes while it is traced, which is several times as long
_CPU_S_MIN = 4.0
_WALL_S = 300.0
_HISTORY_COUNT = 300
_HISTORIES_CPU_S = 40.0


@dataclass(frozen=True, slots=True)
class Mutant:
    """One file with one change. Without `lines`, the tests that could find it are unknown."""

    name: str
    path: str
    text: str
    lines: frozenset[int] = frozenset()

    @property
    def diff(self) -> str:
        before = source(self.path).splitlines(keepends=True)
        after = self.text.splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, after, self.path, self.name, n=1))


@functools.cache
def source(path: str) -> str:
    """A file's content, read once, since it may be edited meanwhile."""
    return (ROOT / path).read_text()


def by_rule(room: str) -> list[Mutant]:
    """All mutants of a room by rules."""
    mutants = []
    for file in sorted((ROOT / "dataplane" / room).rglob("*.py")):
        path = str(file.relative_to(ROOT))
        mutants += [
            Mutant(f"{path}:{change.line} {change.how}", path, change.text, change.lines)
            for change in mutants_of(source(path))
        ]
    return mutants


def copied(into: Path) -> Path:
    """The tree, without what belongs to no test of a room."""
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
            shutil.copytree(source, into / name, ignore=ignored)
        elif source.exists():
            shutil.copy(source, into / name)
    return into


def _run_histories() -> None:
    """Simulations, which find most faults of a scheduler before pytest has even started."""
    signal.setitimer(signal.ITIMER_PROF, _HISTORIES_CPU_S)
    failure = importlib.import_module("scheduler_histories").failure
    assert not any(map(failure, range(_HISTORY_COUNT)))
    signal.setitimer(signal.ITIMER_PROF, 0.0)


def _in_tree(tree: Path, act: Callable[[], int]) -> None:
    """Run in a forked process and end it."""
    os.setsid()
    os.chdir(tree)
    out = os.open("out.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.path[:0] = [str(tree), str(tree / "tests")]
    importlib.invalidate_caches()
    sys.dont_write_bytecode = True
    status = 3
    try:
        status = act()
    except BaseException:  # noqa: BLE001 - whatever it is, the tests have not passed
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run_tests(limits: dict[str, float]) -> int:
    """Run these tests in this order, each limited to its CPU seconds."""
    if any(name.startswith(HISTORIES) for name in limits):
        _run_histories()
    limits = {name: s for name, s in limits.items() if not name.startswith(HISTORIES)}
    if not limits:
        return 0
    chosen = Chosen(limits)
    files = list(dict.fromkeys(name.partition("::")[0] for name in limits))
    return int(pytest.main([*_PYTEST, *files], plugins=[chosen])) or bool(chosen.lacking)


def _run_all(tree: Path, room: str) -> int:
    reach = Reach(tree, room)
    status = int(pytest.main([*_PYTEST, "-o", "timeout=0", *TESTS[room]], plugins=[reach]))
    (tree / "reached").write_text(repr({n: (r.lines, r.cpu_s) for n, r in reach.tests.items()}))
    return status


def reached(tree: Path, room: str) -> dict[str, Reached]:
    """Return the lines that each test of the room reaches.

    Raises:  SystemExit: one of them fails.
    """
    pid = os.fork()
    if not pid:
        _in_tree(tree, lambda: _run_all(tree, room))
    _, status = os.waitpid(pid, 0)
    if status:
        out = (tree / "out.txt").read_text()
        raise SystemExit(f"{out}\nthe tests of {room} fail without any change")
    found = ast.literal_eval((tree / "reached").read_text())
    return {name: Reached(*each) for name, each in found.items()}


def limits_of(mutant: Mutant, tests: dict[str, Reached]) -> dict[str, float]:
    """The tests that reach a mutant, the fastest first, and the CPU seconds of each. If no test
    reaches it in this process, it may be reached in another.
    """
    lines = {(mutant.path, line) for line in mutant.lines}
    near = {name: test for name, test in tests.items() if not lines.isdisjoint(test.lines)} or tests
    ordered = sorted(near.items(), key=lambda each: each[1].cpu_s)
    return {name: _USUAL_TIMES * test.cpu_s + _CPU_S_MIN for name, test in ordered}


class Bench:
    """Copies of the tree, in each of which one mutant is tested at a time."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self._free = [copied(folder / str(i)) for i in range(jobs)]
        self._running: dict[int, tuple[Mutant, Path, float]] = {}

    @property
    def is_busy(self) -> bool:
        return not self._free

    @property
    def is_idle(self) -> bool:
        return not self._running

    @property
    def tree(self) -> Path:
        """One that is free."""
        return self._free[-1]

    def start(self, mutant: Mutant, limits: dict[str, float]) -> None:
        tree = self._free.pop()
        (tree / mutant.path).write_text(mutant.text)
        pid = os.fork()
        if not pid:
            _in_tree(tree, lambda: _run_tests(limits))
        self._running[pid] = mutant, tree, time.monotonic() + _WALL_S

    def next_end(self) -> tuple[Mutant, bool]:
        """The next one that has ended, and whether all tests passed."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                break
            for running, (_, _, deadline) in self._running.items():
                if time.monotonic() > deadline:
                    os.killpg(running, signal.SIGKILL)
            signal.sigtimedwait([signal.SIGCHLD], 0.2)
        mutant, tree, _ = self._running.pop(pid)
        (tree / mutant.path).write_text(source(mutant.path))
        self._free.append(tree)
        return mutant, status == 0


def examine(
    room: str, mutants: list[Mutant], jobs: int, budget_s: float
) -> list[tuple[Mutant, bool]]:
    """Each mutant that was tested before the time was over, and whether it was found.

    Raises:  SystemExit: the tests fail without any change.
    """
    begin, found = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        bench = Bench(Path(folder), jobs)
        tests = reached(bench.tree, room)
        sys.stderr.write(f"{len(tests)} tests\n")
        waiting = mutants[::-1]
        while True:
            is_over = time.monotonic() - begin > budget_s
            while waiting and not bench.is_busy and not is_over:
                bench.start(waiting[-1], limits_of(waiting.pop(), tests))
            if bench.is_idle:
                return found
            mutant, is_passed = bench.next_end()
            found.append((mutant, not is_passed))
            sys.stderr.write(
                f"{len(found)}/{len(mutants)} {'' if not is_passed else 'SURVIVED '}{mutant.name}\n"
            )


def report(found: list[tuple[Mutant, bool]]) -> None:
    modules: dict[str, Counter[bool]] = {}
    for mutant, is_found in found:
        modules.setdefault(mutant.path, Counter())[is_found] += 1
        if not is_found:
            sys.stdout.write(f"{mutant.diff}\n")
    for path, count in sorted(modules.items()):
        sys.stdout.write(f"{count[True]:4} of {count.total():4}  {path}\n")
    count = sum(modules.values(), Counter())
    share = 100 * count[True] / max(count.total(), 1)
    sys.stdout.write(f"{count[True]} of {count.total()} found ({share:.0f} %)\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("room", choices=sorted(TESTS))
    parser.add_argument("--sample", type=int, default=100, help="how many of them")
    parser.add_argument("--seed", type=int, default=0, help="which of them")
    parser.add_argument("--like", default="", help="only those of which this is in the name")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no more after so long")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    for name in _SLOW_TO_IMPORT:
        importlib.import_module(name)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    every = [mutant for mutant in by_rule(args.room) if args.like in mutant.name]
    drawn = random.Random(args.seed).sample(every, min(args.sample, len(every)))
    sys.stderr.write(f"{len(drawn)} of {len(every)} mutants\n")
    report(examine(args.room, drawn, args.jobs, 60 * args.minutes))


if __name__ == "__main__":
    main()
