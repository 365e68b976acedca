"""Runs trials: starts their processes, says when they open, begin and stop, and adds up results.

Nothing waits without a deadline, and nothing of a trial outlives it, whatever happens: each
process has a keeper (keeper.py) that kills what is below it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dataplane.settings import OTHER_VARIABLES, SETTINGS
from dataplane_bench import machine, processes
from dataplane_bench.model import (
    BenchCase,
    DatasetPlace,
    Mode,
    Settings,
    TrialTask,
    Workload,
    json_line,
)
from dataplane_bench.peers import base
from dataplane_bench.trial import watch
from dataplane_bench.trial.keeper import SIGNALLED, TEMPORARY

COMMAND = ("-P", "-m", "dataplane_bench.trial.keeper")
EXIT_TIMEOUT_S = 10.0
"""How long a process may take to end by itself once its loader is closed."""
KILL_TIMEOUT_S = 10.0

# Libraries read these variables of launchers and schedulers.
_FOREIGN_PREFIXES = ("AWS_", "PYTHON", "VIRTUAL_ENV", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC_")
_FOREIGN = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"}
    | {"MASTER_ADDR", "MASTER_PORT"}
)


class TrialFailed(Exception):
    """A loader failed, or did not answer in time; the message has its last words."""


def executed(
    python: str, folder: Path, environ: Mapping[str, str], log: IO[bytes]
) -> subprocess.Popen[str]:
    """A keeper, in this folder."""
    return subprocess.Popen(
        [python, *COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        cwd=folder,
        env=dict(environ),
        text=True,
        errors="replace",
        start_new_session=True,
    )


@dataclass(slots=True, eq=False)
class TrialProcess:
    """A process of a trial, with its unread messages."""

    name: str
    process: subprocess.Popen[str]
    said: deque[dict[str, Any]] = field(default_factory=deque)
    is_silent: bool = False
    listener: threading.Thread | None = None

    def send(self, words: str) -> None:
        """Send; if the process is dead, the wait for its answer raises."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(words + "\n")
            self.process.stdin.flush()


class Members:
    """All processes of a trial; their log is one file."""

    def __init__(self, python: str, log: Path, timeout_s: float) -> None:
        self._python, self._log, self._timeout_s = python, log, timeout_s
        self._members: list[TrialProcess] = []
        self._watch = watch.MemoryWatch()
        self._heard = threading.Condition()

    def start(
        self, name: str, order: str, task: TrialTask, environ: Mapping[str, str]
    ) -> TrialProcess:
        """Start one with its order, and do not wait for it."""
        with self._log.open("ab") as log:
            process = executed(self._python, task.cache, environ, log)
        member = TrialProcess(name, process)
        self._members.append(member)
        self._watch.watch(process.pid)
        member.listener = threading.Thread(target=self._listen, args=(member,), name="trial")
        member.listener.daemon = True
        member.listener.start()
        member.send(json_line({"do": order, "task": task}).strip())
        return member

    def hear(self, members: Sequence[TrialProcess]) -> list[dict[str, Any]]:
        """The next answer of each.   Raises:  TrialFailed: one fails, or all take too long."""
        if not self.await_words(members, self._timeout_s):
            late = next(member for member in members if not member.said)
            raise self._failed(late, f"no answer within {self._timeout_s:g} s")
        return [member.said.popleft() for member in members]

    def await_words(self, members: Sequence[TrialProcess], timeout_s: float) -> bool:
        """Whether all had something to say before the time was over.   Raises:  TrialFailed."""
        with self._heard:
            return self._heard.wait_for(lambda: self._all_spoke(members), timeout_s)

    def _all_spoke(self, members: Sequence[TrialProcess]) -> bool:
        for member in members:
            if member.said and "error" in member.said[0]:
                raise self._failed(member, member.said[0]["error"])
        for member in members:
            if not member.said and member.is_silent:
                raise self._failed(member, f"its process ended ({self._how(member)})")
        return all(member.said for member in members)

    def end(self, members: Sequence[TrialProcess]) -> None:
        """Have them close what they opened, and leave.   Raises:  TrialFailed: they cannot."""
        for member in members:
            member.send("end")
        self.hear(members)
        # Ranks may share what one of them has started, so all close before the first one leaves.
        for member in members:
            member.send("leave")
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        for member in members:
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(max(deadline - time.monotonic(), 0))
        self.kill(members)

    def close(self) -> None:
        """Kill what is left. May be called twice."""
        self._watch.close()
        self.kill(tuple(self._members))

    def kill(self, members: Sequence[TrialProcess]) -> None:
        """Kill them and all their descendants. May be called twice."""
        for member in members:
            if member.process.poll() is None:
                member.process.send_signal(signal.SIGTERM)
        for member in members:
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(KILL_TIMEOUT_S)
            processes.kill_family(member.process)
            self._watch.forget(member.process.pid)
            if member.listener is not None:
                member.listener.join(KILL_TIMEOUT_S)
            for pipe in (member.process.stdin, member.process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()
            if member in self._members:
                self._members.remove(member)

    def cpu_s(self) -> float:
        """CPU seconds that all running members have used so far."""
        return watch.cpu_s([member.process.pid for member in self._members])

    def memory(self) -> list[list[float]]:
        """With a look at what is there now.

        Shapes:  result: [s since the start, bytes, bytes without files] of every sample.
        """
        self._watch.sample()
        seen = sorted(self._watch.seen)
        start = seen[0][0] if seen else 0.0
        return [[round(at - start, 2), total, own] for at, total, own in seen]

    def _listen(self, member: TrialProcess) -> None:
        assert member.process.stdout is not None
        for line in member.process.stdout:
            with self._heard:
                member.said.append(json.loads(line))
                self._heard.notify_all()
        with self._heard:
            member.is_silent = True
            self._heard.notify_all()

    def _how(self, member: TrialProcess) -> str:
        try:
            status = member.process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "its children did not"
        if status <= SIGNALLED:
            return f"exit status {status}"
        with contextlib.suppress(ValueError):
            return signal.Signals(status - SIGNALLED).name
        return f"exit status {status}"

    def _failed(self, member: TrialProcess, what: str) -> TrialFailed:
        last = processes.tail(self._log)
        if len(self._members) > 1:
            what = f"{member.name}: {what}"
        return TrialFailed(f"{what}; its last words:\n{last}" if last else what)


def environment(
    place: DatasetPlace, temporary: Path, kept: Path, modules: Path | None
) -> dict[str, str]:
    """For a trial's processes: nobody's settings or credentials but the benchmark's. `temporary`
    is a folder with a short path, `kept` where caches lie, `modules` the folder of an adapter that
    is none of ours.
    """
    ours = {setting.variable for setting in SETTINGS} | OTHER_VARIABLES | _FOREIGN
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith(_FOREIGN_PREFIXES)
    }
    own = {
        "XDG_CACHE_HOME": str(kept),
        "XDG_STATE_HOME": str(temporary),
        "TMPDIR": str(temporary),
        "HF_HOME": str(kept / "hf"),
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
    if modules is not None:
        own["PYTHONPATH"] = str(modules)
    if place.endpoint:
        own |= {
            "AWS_ENDPOINT_URL": place.endpoint,
            "S3_ENDPOINT_URL": place.endpoint,
            "AWS_ACCESS_KEY_ID": place.access_key,
            "AWS_SECRET_ACCESS_KEY": place.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        } | place.trust()
    return inherited | own


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
        if case.served and hasattr(base.adapter(who.system), "serve"):
            trial.serve()
        trial.start()
        match case.mode:
            case Mode.STEADY:
                result = _steady(trial, case, workload, timing)
            case Mode.RESUME:
                trial.open()
                trial.hear()
                trial.end()
                trial.start()
                trial.open()
                result = together(trial.hear())
            case Mode.RESTART:
                trial.open()
                trial.hear()
                processes.pause(case.pause_s)
                before = trial.spent()
                trial.send("again")
                result = together(trial.hear())
                result |= _cost(result, before, trial.spent())
            case Mode.VERIFY:
                trial.open()
                result = _added(trial.hear())
            case Mode.FIRST | Mode.EPOCH:
                result = _pass(trial, case, timing)
        result["memory"] = trial.members.memory()
        result["memory_peak"] = max(point[1] for point in result["memory"])
        trial.end()
        return result


def run_order(
    order: str, who: Contestant, case: BenchCase, workload: Workload, folder: Path, timeout_s: float
) -> dict[str, Any]:
    """One order to one process: "prepare".   Raises:  TrialFailed."""
    timing, case = Timing(timeout_s=timeout_s), dataclasses.replace(case, cold=True)
    with _started(who, case, workload, timing, folder) as trial:
        trial.start(order, count=1)
        answer = trial.hear()[0]
        trial.end()
        return answer


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
        seconds = {"cpu_s": self.members.cpu_s()}
        if self.server_cpu_s is not None:
            seconds["server_cpu_s"] = self.server_cpu_s()
        return seconds

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
        self.send("open")

    def stop_after(self, seconds: float) -> None:
        """Tell all to stop, unless each of them has answered within this time."""
        if not self.members.await_words(self._ranks, seconds):
            self.send("stop")

    def send(self, words: str) -> None:
        for member in self._ranks:
            member.send(words)

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
    environ = environment(who.place, temporary, kept, base.folder_of(who.system))
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
    result = _window(trial, case.step_ms, timing.settle_s, timing.window_s)
    result |= {"first_batch_s": first, "step_ms": case.step_ms, "stall_share": result["wait_share"]}
    if not case.step_ms and timing.stall_window_s:
        stalled = _window(trial, workload.step_ms, timing.settle_s / 2, timing.stall_window_s)
        result |= {"step_ms": workload.step_ms, "stall_share": stalled["wait_share"]}
    return result


def _pass(trial: _Trial, case: BenchCase, timing: Timing) -> dict[str, Any]:
    """The first batch; or an epoch, after those before it."""
    if case.cold and case.mode is Mode.EPOCH:
        machine.provide_memory()
    before, first = trial.spent(), {}
    trial.open()
    if case.epoch:
        first = {"first_batch_s": max(said["first_batch_s"] for said in trial.hear())}
        before = trial.spent()
        trial.send("go")
    if case.mode is Mode.EPOCH:
        trial.stop_after(timing.epoch_s)
    result = together(trial.hear()) | first
    return result | _cost(result, before, trial.spent())


def _window(trial: _Trial, step_ms: float, settle_s: float, window_s: float) -> dict[str, Any]:
    trial.send(f"go {step_ms}")
    processes.pause(settle_s)
    before, start = trial.spent(), time.monotonic()
    processes.pause(window_s)
    end, after = time.monotonic(), trial.spent()
    trial.send(f"stop {start!r} {end!r}")
    result = together(trial.hear())
    return result | _cost(result, before, after)


def together(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge what several processes saw at the same time: counts and rates are sums, shares means,
    waits are those of the process that waited longest, the time is from the first start to the
    last end.
    """
    total = dict(answers[0])
    for name in ("sample_count", "batch_count"):
        if name in total:
            total[name] = sum(answer[name] for answer in answers)
    for name in ("first_batch_s", "wait_p50_ms", "wait_p99_ms"):
        if name in total:
            total[name] = max(answer[name] for answer in answers)
    for name in ("wait_share", "trainer_cpu_share"):
        if name in total:
            total[name] = sum(answer[name] for answer in answers) / len(answers)
    if "timeline" in total:
        rows = itertools.zip_longest(*(answer["timeline"] for answer in answers))
        points = [[point for point in row if point is not None] for row in rows]
        total["timeline"] = [
            [max(at for at, _ in row), round(sum(rate for _, rate in row), 1)] for row in points
        ]
    if "seconds" in total:
        total["start"] = min(answer["start"] for answer in answers)
        total["seconds"] = (
            max(answer["start"] + answer["seconds"] for answer in answers) - total["start"]
        )
        total["samples_per_s"] = total["sample_count"] / total["seconds"]
    return total


def _added(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge what several processes read of one epoch."""
    return {
        "digest": f"{sum(int(answer['digest'], 16) for answer in answers) % (1 << 64):016x}",
        "sample_count": sum(answer["sample_count"] for answer in answers),
        "byte_count": sum(answer["byte_count"] for answer in answers),
        "facts": answers[0]["facts"],
    }


def _cost(
    result: Mapping[str, Any], before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, Any]:
    """The cost between two readings, and the same for a million samples."""
    cost = {name: after[name] - before[name] for name in after}
    samples = result.get("sample_count")
    if samples:
        cost |= {f"{name}_per_million": spent / samples * 1e6 for name, spent in cost.items()}
    return cost
