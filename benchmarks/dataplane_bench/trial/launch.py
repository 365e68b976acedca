"""Runs trials: when their processes open, begin and stop; what they saw and cost, added up."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane_bench import processes
from dataplane_bench.model import BenchCase, DatasetPlace, Mode, Settings, TrialTask, Workload
from dataplane_bench.peers import registry
from dataplane_bench.trial.keeper import TEMPORARY
from dataplane_bench.trial.members import Members, TrialFailed, TrialProcess, environment

__all__ = ["Contestant", "Timing", "TrialFailed", "run_order", "run_trial"]


_SHORT_PATH = 50


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a trial takes, seconds. An epoch that is not over after `epoch_s` ends there.

    `settle_s` passes between "go" and the window: buffers warm up, and what was fetched ahead while
    nobody took it does not count. `timeout_s` is how long any answer may take.
    """

    settle_s: float = 1.0
    window_s: float = 2.0
    stall_window_s: float = 1.0
    epoch_s: float = 10.0
    timeout_s: float = 180.0


@dataclass(frozen=True, slots=True)
class Contestant:
    """A system as it takes part: its interpreter, its place on disk, one choice of settings."""

    system: str
    python: str
    place: DatasetPlace
    settings: Settings


def run_trial(
    who: Contestant,
    case: BenchCase,
    workload: Workload,
    timing: Timing,
    folder: Path,
    server_cpu_s: Callable[[], float] | None = None,
) -> dict[str, Any]:
    """One trial: what its processes told, added up, and what they cost. `server_cpu_s` gives the
    CPU seconds of the server that they read from, where there is one.

    The result is JSON; `report.results` says what its fields mean.
    Raises:  TrialFailed.
    """
    with _started(who, case, workload, timing, folder) as trial:
        trial.server_cpu_s = server_cpu_s
        if case.served and hasattr(registry.adapter(who.system), "serve"):
            trial.serve()
        trial.start()
        match case.mode:
            case Mode.STEADY:
                found = _steady(trial, case, workload, timing)
            case Mode.RESUME:
                trial.open()
                trial.hear()
                trial.end()
                trial.start()
                trial.open()
                found = together(trial.hear())
            case Mode.RESTART:
                trial.open()
                trial.hear()
                processes.pause(case.pause_s)
                before = trial.spent()
                trial.tell("again")
                found = together(trial.hear())
                found |= _cost(found, before, trial.spent())
            case Mode.VERIFY:
                trial.open()
                found = _added(trial.hear())
            case Mode.FIRST | Mode.EPOCH:
                found = _pass(trial, case, timing)
        found["memory"] = trial.members.memory()
        found["memory_peak"] = max(point[1] for point in found["memory"])
        trial.end()
        return found


def run_order(
    order: str, who: Contestant, case: BenchCase, workload: Workload, folder: Path, timeout_s: float
) -> dict[str, Any]:
    """One order to one process: "prepare".   Raises:  TrialFailed."""
    timing, case = Timing(timeout_s=timeout_s), dataclasses.replace(case, cold=True)
    with _started(who, case, workload, timing, folder) as trial:
        trial.start(order, count=1)
        found = trial.hear()[0]
        trial.end()
        return found


class _Trial:
    """One trial's processes: the ranks of each job, and the system's daemon."""

    def __init__(
        self,
        members: Members,
        tasks: Callable[[str], Sequence[TrialTask]],
        environ: Mapping[str, str],
    ) -> None:
        self.members = members
        self._tasks, self._environ = tasks, environ
        self._ranks: list[TrialProcess] = []
        self._daemons: list[TrialProcess] = []
        self._service = ""
        self.server_cpu_s: Callable[[], float] | None = None

    def spent(self) -> dict[str, float]:
        """CPU seconds so far: of the trial's processes, and of the server that they read from."""
        found = {"cpu_s": self.members.cpu_s()}
        if self.server_cpu_s is not None:
            found["server_cpu_s"] = self.server_cpu_s()
        return found

    def serve(self) -> None:
        """Start the system's daemon."""
        task = self._tasks("")[0]
        self._daemons = [self.members.start("the daemon", "serve", task, self._environ)]
        self._service = self.members.hear(self._daemons)[0]["service"]

    def start(self, order: str = "run", count: int | None = None) -> None:
        """Start all processes, each with its task, and wait until they are ready."""
        self._ranks = [
            self.members.start(_name(task), order, task, self._environ)
            for task in self._tasks(self._service)[:count]
        ]
        if order == "run":
            self.hear()

    def open(self) -> None:
        """Have all open their loaders, at the same time."""
        self.tell("open")

    def stop_after(self, seconds: float) -> None:
        """Tell all to stop, unless each of them has answered within this time."""
        if not self.members.await_words(self._ranks, seconds):
            self.tell("stop")

    def tell(self, words: str) -> None:
        for member in self._ranks:
            member.tell(words)

    def hear(self) -> list[dict[str, Any]]:
        """The next answer of each."""
        return self.members.hear(self._ranks)

    def end(self) -> None:
        """End them, ranks first."""
        for members in (self._ranks, self._daemons):
            self.members.end(members)
        self._ranks, self._daemons = [], []


def _name(task: TrialTask) -> str:
    job = int(task.run.rpartition("-")[2]) + 1
    return f"job {job}, rank {task.rank}"


@contextlib.contextmanager
def _started(
    who: Contestant, case: BenchCase, workload: Workload, timing: Timing, folder: Path
) -> Iterator[_Trial]:
    folder.mkdir(parents=True, exist_ok=True)
    cache = Path(tempfile.mkdtemp(prefix="trial-", dir=folder))
    token = secrets.token_hex(8)

    def tasks(service: str) -> list[TrialTask]:
        return [
            TrialTask(
                *(who.system, case, workload, who.place, who.settings, cache),
                *(f"{token}-{job}", rank, case.ranks, 1 if case.shared else job + 1, service),
                token if case.shared else "",
            )
            for job in range(case.jobs)
            for rank in range(case.ranks)
        ]

    kept = cache if case.cold else who.place.folder.with_name(f".cache-{who.system}")
    temporary = _short_folder()
    environ = environment(who.place, temporary, kept, registry.folder_of(who.system))
    members = Members(who.python, cache / "log", timing.timeout_s)
    try:
        yield _Trial(members, tasks, environ)
    finally:
        members.close()
        shutil.rmtree(cache, ignore_errors=True)
        shutil.rmtree(temporary, ignore_errors=True)


def _short_folder() -> Path:
    """A new folder for temporary files. Loaders bind Unix sockets below it, whose paths have 107
    characters at most: torch's workers hang without a word where one is longer.
    """
    usual = tempfile.gettempdir()
    short = usual if len(usual) <= _SHORT_PATH else "/tmp"
    return Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=short))


def _steady(trial: _Trial, case: BenchCase, workload: Workload, timing: Timing) -> dict[str, Any]:
    trial.open()
    first = max(said["first_batch_s"] for said in trial.hear())
    found = _window(trial, case.step_ms, timing.settle_s, timing.window_s)
    found |= {"first_batch_s": first, "step_ms": case.step_ms, "stall_share": found["wait_share"]}
    if not case.step_ms and timing.stall_window_s:
        stalled = _window(trial, workload.step_ms, timing.settle_s / 2, timing.stall_window_s)
        found |= {"step_ms": workload.step_ms, "stall_share": stalled["wait_share"]}
    return found


def _pass(trial: _Trial, case: BenchCase, timing: Timing) -> dict[str, Any]:
    """The first batch; or an epoch, after those before it."""
    before, first = trial.spent(), {}
    trial.open()
    if case.epoch:
        first = {"first_batch_s": max(said["first_batch_s"] for said in trial.hear())}
        before = trial.spent()
        trial.tell("go")
    if case.mode is Mode.EPOCH:
        trial.stop_after(timing.epoch_s)
    found = together(trial.hear()) | first
    return found | _cost(found, before, trial.spent())


def _window(trial: _Trial, step_ms: float, settle_s: float, window_s: float) -> dict[str, Any]:
    trial.tell(f"go {step_ms}")
    processes.pause(settle_s)
    before, start = trial.spent(), time.monotonic()
    processes.pause(window_s)
    end, after = time.monotonic(), trial.spent()
    trial.tell(f"stop {start!r} {end!r}")
    found = together(trial.hear())
    return found | _cost(found, before, after)


def together(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What several processes saw at the same time: counts and rates are sums, shares are means,
    waits are those of whoever waited longest, and the time is from the first start to the last end.
    """
    found = dict(told[0])
    for name in ("sample_count", "batch_count"):
        if name in found:
            found[name] = sum(one[name] for one in told)
    for name in ("first_batch_s", "wait_p50_ms", "wait_p99_ms"):
        if name in found:
            found[name] = max(one[name] for one in told)
    for name in ("wait_share", "trainer_cpu_share"):
        if name in found:
            found[name] = sum(one[name] for one in told) / len(told)
    if "timeline" in found:
        rows = itertools.zip_longest(*(one["timeline"] for one in told))
        points = [[point for point in row if point is not None] for row in rows]
        found["timeline"] = [
            [max(at for at, _ in row), round(sum(rate for _, rate in row), 1)] for row in points
        ]
    if "seconds" in found:
        found["start"] = min(one["start"] for one in told)
        found["seconds"] = max(one["start"] + one["seconds"] for one in told) - found["start"]
        found["samples_per_s"] = found["sample_count"] / found["seconds"]
    return found


def _added(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What several processes read of one epoch."""
    return {
        "digest": f"{sum(int(one['digest'], 16) for one in told) % (1 << 64):016x}",
        "sample_count": sum(one["sample_count"] for one in told),
        "byte_count": sum(one["byte_count"] for one in told),
        "facts": told[0]["facts"],
    }


def _cost(
    found: Mapping[str, Any], before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, Any]:
    """What each of them cost, and the same for a million samples."""
    cost = {name: after[name] - before[name] for name in after}
    samples = found.get("sample_count")
    if samples:
        cost |= {f"{name}_per_million": spent / samples * 1e6 for name, spent in cost.items()}
    return cost
