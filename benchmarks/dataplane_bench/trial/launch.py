"""Runs trials: starts their processes, gives the words, keeps the time, counts the cost.

Nothing waits without a deadline, and nothing of a trial outlives it, whatever happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.settings import CONFIG_VARIABLE, SETTINGS
from dataplane_bench import processes
from dataplane_bench.model import Case, Mode, Place, Settings, Task, Workload
from dataplane_bench.peers.registry import adapter
from dataplane_bench.trial import watch, wire

COMMAND = ("-m", "dataplane_bench.trial.process")
_CLOSE_TIMEOUT_S = 30.0


class TrialFailed(Exception):
    """A loader failed, or did not answer in time; the message has its last words."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a trial takes, seconds. An epoch that is not over after `epoch_s` ends there; `settle_s` passes between "go" and the window: buffers warm up,
    and what was fetched ahead while nobody took it does not count.
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
    place: Place
    settings: Settings


def run_trial(
    who: Contestant, case: Case, workload: Workload, timing: Timing, folder: Path
) -> dict[str, Any]:
    """One trial: what its processes told, added up, and what they cost.

    The result is JSON; `report.results` says what its fields mean.
    Raises:  TrialFailed.
    """
    with contextlib.ExitStack() as stack:
        trial = stack.enter_context(_started(who, case, workload, timing, folder))
        match case.mode:
            case Mode.STEADY:
                found = _steady(trial, case, workload, timing)
            case Mode.RESUME:
                trial.start()
                trial.hear_all()
                trial.finish()
                trial.start()
                found = _together(trial.hear_all())
            case Mode.VERIFY:
                trial.start()
                found = _added(trial.hear_all())
            case Mode.FIRST | Mode.EPOCH:
                cpu = trial.cpu_s()
                trial.start()
                if case.mode is Mode.EPOCH:
                    trial.wait(timing.epoch_s)
                    trial.tell_all("stop")
                found = _together(trial.hear_all())
                found |= _cost(found, trial.cpu_s() - cpu)
        trial.finish()
        found["memory"] = trial.memory()
        found["memory_peak"] = max((point[1] for point in found["memory"]), default=0)
        return found


def run_order(
    order: str, who: Contestant, case: Case, workload: Workload, folder: Path, timeout_s: float
) -> dict[str, Any]:
    """One order to one process: "prepare".   Raises:  TrialFailed."""
    timing = Timing(timeout_s=timeout_s)
    with _started(who, case, workload, timing, folder) as trial:
        trial.start(order, count=1)
        return trial.hear_all()[0]


def environment(place: Place, cache: Path) -> dict[str, str]:
    """For a trial's processes: nobody's settings or credentials but the benchmark's."""
    ours = {setting.variable for setting in SETTINGS} | {CONFIG_VARIABLE}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith(("AWS_", "PYTHON", "VIRTUAL_ENV"))
    }
    own = {
        "XDG_CACHE_HOME": str(cache),
        "XDG_STATE_HOME": str(cache),
        "TMPDIR": str(cache),
        "HF_HOME": str(cache / "hf"),
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
    if place.endpoint:
        own |= {
            "AWS_ENDPOINT_URL": place.endpoint,
            "S3_ENDPOINT_URL": place.endpoint,
            "AWS_ACCESS_KEY_ID": place.access_key,
            "AWS_SECRET_ACCESS_KEY": place.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    return kept | own


@dataclass(slots=True)
class _Member:
    """A process of a trial: what it says, as it says it."""

    process: subprocess.Popen[str]
    said: queue.Queue[dict[str, Any]]

    def tell(self, words: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(words + "\n")
            self.process.stdin.flush()


class _Trial:
    """The processes of one trial."""

    def __init__(
        self, tasks: Callable[[str], Sequence[Task]], python: str, timeout_s: float
    ) -> None:
        self._tasks, self._python, self._timeout_s = tasks, python, timeout_s
        self._members: list[_Member] = []
        self._daemons: list[_Member] = []
        self._watch = watch.MemoryWatch()
        self._service = ""
        self.log = tasks("")[0].cache / "log"

    def serve(self) -> None:
        """Start the system's daemon."""
        self._daemons = [self._launch("serve", self._tasks("")[0])]
        self._service = self._hear(self._daemons[0])["service"]

    def start(self, order: str = "run", count: int | None = None) -> None:
        """Start all processes, each with its task."""
        tasks = self._tasks(self._service)[:count]
        self._members = [self._launch(order, task) for task in tasks]

    def hear_all(self) -> list[dict[str, Any]]:
        """The next answer of each."""
        return [self._hear(member) for member in self._members]

    def wait(self, seconds: float) -> None:
        """Until all have something to say, or the time is over."""
        deadline = time.monotonic() + seconds
        while any(member.said.empty() for member in self._members) and time.monotonic() < deadline:
            processes.pause(processes.POLL_S)

    def tell_all(self, words: str) -> None:
        for member in self._members:
            member.tell(words)

    def cpu_s(self) -> float:
        return watch.cpu_s([one.process.pid for one in (*self._members, *self._daemons)])

    def memory(self) -> list[list[float]]:
        """Shapes:  result: [s since the start, bytes, bytes without files] of every sample."""
        start = self._watch.seen[0][0] if self._watch.seen else 0.0
        return [[round(at - start, 2), total, own] for at, total, own in self._watch.seen]

    def finish(self) -> None:
        """End the members, and wait until they have."""
        self._end(self._members)
        self._members = []

    def close(self) -> None:
        """Whatever is left is killed."""
        self._watch.close()
        for member in (*self._members, *self._daemons):
            member.tell("end")
        for member in (*self._members, *self._daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(0.0 if member in self._members else _CLOSE_TIMEOUT_S)
            processes.kill_family(member.process)
            for pipe in (member.process.stdin, member.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def _end(self, members: Sequence[_Member]) -> None:
        for member in members:
            member.tell("end")
        for member in members:
            while "ended" not in self._hear(member):
                pass
            try:
                member.process.wait(_CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise self._failed(f"did not end within {_CLOSE_TIMEOUT_S:g} s") from None
            finally:
                processes.kill_family(member.process)

    def _launch(self, order: str, task: Task) -> _Member:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [*processes.dies_with_us(), self._python, *COMMAND],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=task.cache,
                env=environment(task.place, task.cache),
                text=True,
                start_new_session=True,
            )
        member = _Member(process, queue.Queue())
        threading.Thread(target=_listen, args=(member,), daemon=True, name="trial").start()
        member.tell(wire.line({"do": order, "task": task}).strip())
        self._watch.watch([process.pid])
        return member

    def _hear(self, member: _Member) -> dict[str, Any]:
        try:
            said = member.said.get(timeout=self._timeout_s)
        except queue.Empty:
            raise self._failed(f"no answer within {self._timeout_s:g} s") from None
        if "error" in said:
            raise self._failed(said["error"])
        return said

    def _failed(self, what: str) -> TrialFailed:
        return TrialFailed(f"{what}; its last words:\n{processes.tail(self.log)}")


def _listen(member: _Member) -> None:
    assert member.process.stdout is not None
    with contextlib.suppress(ValueError, OSError):
        for line in member.process.stdout:
            member.said.put(json.loads(line))
    member.said.put({"error": f"the process ended ({member.process.poll()})"})


@contextlib.contextmanager
def _started(
    who: Contestant, case: Case, workload: Workload, timing: Timing, folder: Path
) -> Iterator[_Trial]:
    folder.mkdir(parents=True, exist_ok=True)
    cache = Path(tempfile.mkdtemp(prefix="trial-", dir=folder))
    token = secrets.token_hex(8)

    def tasks(service: str) -> list[Task]:
        return [
            Task(
                *(who.system, case, workload, who.place, who.settings, cache),
                *(f"{token}-{job}", rank, case.ranks, job + 1, service),
            )
            for job in range(case.jobs)
            for rank in range(case.ranks)
        ]

    trial = _Trial(tasks, who.python, timing.timeout_s)
    try:
        if case.served and hasattr(adapter(who.system), "serve"):
            trial.serve()
        yield trial
    finally:
        trial.close()
        shutil.rmtree(cache, ignore_errors=True)


def _steady(trial: _Trial, case: Case, workload: Workload, timing: Timing) -> dict[str, Any]:
    trial.start()
    first = max(said["first_batch_s"] for said in trial.hear_all())
    found = _window(trial, case.step_ms, timing.settle_s, timing.window_s)
    found |= {"first_batch_s": first, "step_ms": case.step_ms, "stall_share": found["wait_share"]}
    if not case.step_ms:
        stalled = _window(trial, workload.step_ms, timing.settle_s / 2, timing.stall_window_s)
        found |= {"step_ms": workload.step_ms, "stall_share": stalled["wait_share"]}
    return found


def _window(trial: _Trial, step_ms: float, settle_s: float, window_s: float) -> dict[str, Any]:
    trial.tell_all(f"go {step_ms}")
    processes.pause(settle_s)
    cpu, start = trial.cpu_s(), time.monotonic()
    processes.pause(window_s)
    end, cpu = time.monotonic(), trial.cpu_s() - cpu
    trial.tell_all(f"stop {start!r} {end!r}")
    found = _together(trial.hear_all())
    return found | _cost(found, cpu)


def _together(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What several processes saw at the same time."""
    found = dict(told[0])
    for name in ("sample_count", "batch_count", "trainer_cpu_share"):
        if name in found:
            found[name] = sum(one[name] for one in told)
    for name in ("first_batch_s", "seconds", "wait_p50_ms", "wait_p99_ms"):
        if name in found:
            found[name] = max(one[name] for one in told)
    if "wait_share" in found:
        found["wait_share"] = sum(one["wait_share"] for one in told) / len(told)
    if "timeline" in found:
        points = zip(*(one["timeline"] for one in told), strict=False)
        found["timeline"] = [[at[0][0], sum(one[1] for one in at)] for at in points]
    if "sample_count" in found and "seconds" in found:
        found["samples_per_s"] = found["sample_count"] / found["seconds"]
    return found


def _added(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What several processes read of one epoch."""
    return {
        "digest": f"{sum(int(one['digest'], 16) for one in told) % (1 << 64):016x}",
        "sample_count": sum(one["sample_count"] for one in told),
        "byte_count": sum(one["byte_count"] for one in told),
    }


def _cost(found: Mapping[str, Any], cpu_s: float) -> dict[str, Any]:
    if not found.get("sample_count"):
        return {"cpu_s": cpu_s}
    return {"cpu_s": cpu_s, "cpu_s_per_million": cpu_s / found["sample_count"] * 1e6}
