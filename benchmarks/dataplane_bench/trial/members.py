"""The processes of one trial: started, spoken to, listened to, ended.

Nothing waits without a deadline, and nothing of a trial outlives it, whatever happens: each
process has a keeper (keeper.py) that kills what is below it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dataplane.settings import OTHER_VARIABLES, SETTINGS
from dataplane_bench import processes
from dataplane_bench.model import DatasetPlace, TrialTask
from dataplane_bench.trial import watch, wire
from dataplane_bench.trial.keeper import SIGNALLED

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

    def tell(self, words: str) -> None:
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
        member.tell(wire.line({"do": order, "task": task}).strip())
        return member

    def hear(self, members: Sequence[TrialProcess]) -> list[dict[str, Any]]:
        """The next answer of each.   Raises:  TrialFailed: one fails, or all take too long."""
        if not self.await_words(members, self._timeout_s):
            late = next(one for one in members if not one.said)
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
            member.tell("end")
        self.hear(members)
        # Ranks may share what one of them has started, so all close before the first one leaves.
        for member in members:
            member.tell("leave")
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
        """What all that run have used so far."""
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
