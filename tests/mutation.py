"""Which faults the fast tests of a room would find: `python tests/mutation.py scheduler --sample 150`.

Each mutant is one small change of the room's source, in a copy of the tree: those that were written
by hand (mutants_by_hand.py), and a sample of all that can be made by a rule (a comparison, a
boundary, a condition, an operator, a number, a statement left out). A process that has imported
what is slow to import is forked for each of them, and runs the room's tests until one fails. What
takes far more processor time than the tests usually do is stopped, and counts as found.

Prints the share that was found by module, and a diff of each mutant that was not. Exit status 1:
the tests fail without any change, a change by hand no longer applies, or one was not found.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutants_by_hand import BY_HAND
from mutants_by_rule import mutants_of

ROOT = Path(__file__).resolve().parents[1]
TESTS = {
    "scheduler": ("tests/scheduler",),
    "plan": ("tests/plan",),
    "coordinator": ("tests/coordinator/test_state.py", "tests/coordinator", "tests/simulation"),
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
_SLOW_TO_IMPORT = ("numpy", "pyarrow", "pyarrow.parquet", "pytest", "hypothesis", "_pytest.python")
_USUAL_TIMES = 4
_WALL_S = 240.0
_HISTORIES = 200


@dataclass(frozen=True, slots=True)
class Mutant:
    """One file with one change."""

    name: str
    path: str
    text: str
    is_by_hand: bool = False

    @property
    def diff(self) -> str:
        before = (ROOT / self.path).read_text().splitlines(keepends=True)
        after = self.text.splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, after, self.path, self.name, n=1))


def by_hand(room: str) -> Iterator[Mutant]:
    """Raises:  ValueError: a change no longer applies."""
    for name, path, old, new in BY_HAND:
        if path.startswith(f"dataplane/{room}/"):
            text = (ROOT / path).read_text()
            if text.count(old) != 1:
                raise ValueError(f"{name}: {text.count(old)} places for it in {path}, not one")
            yield Mutant(name, path, text.replace(old, new), is_by_hand=True)


def by_rule(room: str) -> list[Mutant]:
    """All that can be made of a room."""
    found = []
    for file in sorted((ROOT / "dataplane" / room).glob("*.py")):
        path, text = str(file.relative_to(ROOT)), file.read_text()
        found += [Mutant(f"{path}:{line} {how}", path, new) for line, how, new in mutants_of(text)]
    return found


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


def _run_histories(tests: Sequence[str]) -> None:
    """Some of them find most of what is wrong with a scheduler, before pytest has begun."""
    if "tests/scheduler" in tests:
        failure = importlib.import_module("scheduler_histories").failure
        assert not any(map(failure, range(_HISTORIES)))


def _run_tests(tree: Path, tests: Sequence[str], cpu_s: int) -> None:
    """In a process of its own, of which this is the end."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    os.chdir(tree)
    out = os.open("out.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.path[:0] = [str(tree), str(tree / "tests")]
    importlib.invalidate_caches()
    sys.dont_write_bytecode = True
    status = 3
    try:
        _run_histories(tests)
        args = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "--hypothesis-seed=0"]
        status = int(importlib.import_module("pytest").main([*args, *tests]))
    except BaseException:  # noqa: BLE001 - whatever it is, the tests have not passed
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Bench:
    """Copies of the tree, in each of which one mutant is tested at a time."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self._free = [copied(folder / str(i)) for i in range(jobs)]
        self._running: dict[int, tuple[Mutant | None, Path, float]] = {}

    @property
    def is_busy(self) -> bool:
        return not self._free

    @property
    def is_idle(self) -> bool:
        return not self._running

    def start(self, mutant: Mutant | None, tests: Sequence[str], cpu_s: int) -> None:
        tree = self._free.pop()
        if mutant is not None:
            (tree / mutant.path).write_text(mutant.text)
        pid = os.fork()
        if not pid:
            _run_tests(tree, tests, cpu_s)
        self._running[pid] = mutant, tree, time.monotonic() + _WALL_S

    def next_end(self) -> tuple[Mutant | None, bool, float]:
        """The next one that has ended, whether all tests passed, and its processor seconds."""
        while True:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid:
                break
            for running, (_, _, deadline) in self._running.items():
                if time.monotonic() > deadline:
                    os.killpg(running, signal.SIGKILL)
            signal.sigtimedwait([signal.SIGCHLD], 0.2)
        mutant, tree, _ = self._running.pop(pid)
        if mutant is not None:
            shutil.copy(ROOT / mutant.path, tree / mutant.path)
        self._free.append(tree)
        return mutant, status == 0, usage.ru_utime + usage.ru_stime


def examine(
    room: str, mutants: list[Mutant], jobs: int, budget_s: float
) -> list[tuple[Mutant, bool]]:
    """Each mutant that was tested before the time was over, and whether it was found.

    Raises:  SystemExit: the tests fail without any change.
    """
    tests = TESTS[room]
    begin, found = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        bench = Bench(Path(folder), jobs)
        bench.start(None, tests, 600)
        _, is_passed, usual_s = bench.next_end()
        if not is_passed:
            out = (Path(folder) / str(jobs - 1) / "out.txt").read_text()
            raise SystemExit(f"{out}\nthe tests of {room} fail without any change")
        waiting = mutants[::-1]
        while True:
            is_over = time.monotonic() - begin > budget_s
            while waiting and not bench.is_busy and not is_over:
                bench.start(waiting.pop(), tests, int(usual_s * _USUAL_TIMES) + 10)
            if bench.is_idle:
                return found
            mutant, is_passed, _ = bench.next_end()
            assert mutant is not None
            found.append((mutant, not is_passed))
            sys.stderr.write(
                f"{len(found)}/{len(mutants)} {'' if not is_passed else 'SURVIVED '}{mutant.name}\n"
            )


def report(found: list[tuple[Mutant, bool]]) -> bool:
    """Whether all of those by hand were found."""
    modules: dict[str, Counter[bool]] = {}
    for mutant, is_found in found:
        modules.setdefault(mutant.path, Counter())[is_found] += not mutant.is_by_hand
    for mutant, is_found in found:
        if not is_found:
            sys.stdout.write(f"{mutant.diff}\n")
    for path, count in sorted(modules.items()):
        if count.total():
            sys.stdout.write(f"{count[True]:4} of {count.total():4}  {path}\n")
    ruled = [is_found for mutant, is_found in found if not mutant.is_by_hand]
    hand = [is_found for mutant, is_found in found if mutant.is_by_hand]
    share = 100 * sum(ruled) / max(len(ruled), 1)
    sys.stdout.write(f"by rule: {sum(ruled)} of {len(ruled)} found ({share:.0f} %); ")
    sys.stdout.write(f"by hand: {sum(hand)} of {len(hand)}\n")
    return all(hand)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("room", choices=sorted(TESTS))
    parser.add_argument("--sample", type=int, default=100, help="how many of those by rule")
    parser.add_argument("--seed", type=int, default=0, help="which of them")
    parser.add_argument("--rules-only", action="store_true", help="none of those by hand")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no more after so long")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    for name in _SLOW_TO_IMPORT:
        importlib.import_module(name)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    every = by_rule(args.room)
    drawn = random.Random(args.seed).sample(every, min(args.sample, len(every)))
    sys.stderr.write(f"{len(drawn)} of {len(every)} mutants by rule\n")
    mutants = [*([] if args.rules_only else by_hand(args.room)), *drawn]
    return 0 if report(examine(args.room, mutants, args.jobs, 60 * args.minutes)) else 1


if __name__ == "__main__":
    sys.exit(main())
