"""Runs of several trainer processes over a real node or service, moved step by step.

Nothing here waits for time to pass: trainers take a step when a test says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
from warm import WarmProcess, WarmPython

TRAINER = Path(__file__).parent / "chaos" / "trainer.py"
DATAPLANE = (sys.executable, "-m", "dataplane")
ANSWER_S = 120
"""On a busy machine, a run takes a minute to start."""
WARM: list[WarmPython] = []
"""The process that trainers are forked from, if there is one."""
WARM_SERVICES: list[WarmPython] = []
"""The process that services and nodes are forked from, if there is one."""

Rows = list[list[Any]]


@dataclass(frozen=True, slots=True)
class Log:
    """A log file of processes: their own lines, and those of a node that they started."""

    path: Path

    def read(self) -> str:
        return self.path.read_text(encoding="utf-8") if self.path.exists() else ""

    def wait_for(self, words: str, count: int = 1) -> list[str]:
        """Wait until this many lines have these words."""
        deadline = time.monotonic() + ANSWER_S
        while len(found := [line for line in self.read().splitlines() if words in line]) < count:
            assert time.monotonic() < deadline, f"no {words!r} in: {self.read()}"
            threading.Event().wait(0.02)
        return found


@dataclass(slots=True)
class Trainer:
    """One rank."""

    process: subprocess.Popen[str] | WarmProcess
    out: Path
    log: Log
    told: dict[str, Any] = field(default_factory=dict)

    def order(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the trainer died with status {self.process.wait(60)}: {self.log.read()}"
        self.told = json.loads(line)
        return self.told

    def batches(self) -> list[Rows]:
        # A killed process may have left a partial line.
        whole, _, _ = self.out.read_text(encoding="utf-8").rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]


class Run:
    """All ranks of one launch, as a context manager that kills remaining ranks at the end."""

    def __init__(
        self,
        folder: Path,
        url: str,
        size: int,
        options: Mapping[str, Any],
        state: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        """`within` is a command that runs each rank's command, such as `nsenter …`."""
        folder.mkdir(parents=True)
        self.size, self.within = size, within
        self.log = Log(folder / "stderr.log")
        self.launch = f"{folder.name}-{os.getpid()}"
        self.trainers = [
            self._trainer(folder, rank, url, options, state, environ) for rank in range(size)
        ]

    def _trainer(
        self,
        folder: Path,
        rank: int,
        url: str,
        options: Mapping[str, Any],
        state: Mapping[str, Any] | None,
        environ: Mapping[str, str] | None,
    ) -> Trainer:
        out = folder / f"rank-{rank}.jsonl"
        told = {
            "url": url, "rank": rank, "size": self.size, "options": dict(options),
            "state": state, "out": str(out),
        }  # fmt: skip
        launched = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.size),
            "TORCHELASTIC_RUN_ID": self.launch,
            "OMP_NUM_THREADS": "1",
        }
        script = [str(TRAINER), json.dumps(told)]
        given = {**os.environ, **launched, **(environ or {})}
        process: subprocess.Popen[str] | WarmProcess
        with self.log.path.open("ab") as stderr:
            if WARM and not self.within:
                process = WARM[0].run(script, given, stderr.fileno())
            else:
                process = subprocess.Popen(
                    [*self.within, sys.executable, *script],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                    env=given,
                )
        return Trainer(process, out, self.log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def go(self, steps: int) -> list[dict[str, Any]]:
        """Let every rank take this many steps."""
        return self._all(f"go {steps}")

    def finish(self) -> list[dict[str, Any]]:
        """Let every rank continue to the end of the epoch."""
        return self._all("end")

    def order(self, line: str) -> None:
        """Send an order to every rank, without waiting."""
        for trainer in self.trainers:
            trainer.order(line)

    def answers(self) -> list[dict[str, Any]]:
        return [trainer.answer() for trainer in self.trainers]

    def _all(self, line: str) -> list[dict[str, Any]]:
        self.order(line)
        return self.answers()

    def kill(self) -> None:
        """SIGKILL all remaining ranks."""
        for trainer in self.trainers:
            trainer.process.kill()
        for trainer in self.trainers:
            trainer.process.wait()
            assert trainer.process.stdin is not None
            assert trainer.process.stdout is not None
            trainer.process.stdin.close()
            trainer.process.stdout.close()

    def stream(self, first_position: int = 0) -> Rows:
        """The rows of all ranks in the order of the plan: rank r owns positions t % size == r."""
        return interleaved(
            [[row for batch in t.batches() for row in batch] for t in self.trainers],
            first_position,
        )

    def stream_until(self, first_position: int, count: int) -> Rows:
        """The first `count` rows of the stream: what a checkpoint covers."""
        shares: list[Rows] = [[] for _ in self.trainers]
        batches = [[row for batch in t.batches() for row in batch] for t in self.trainers]
        for position in range(first_position, first_position + count):
            rank = position % self.size
            shares[rank].append(batches[rank][len(shares[rank])])
        return interleaved(shares, first_position)


def interleaved(ranks: Sequence[Rows], first_position: int) -> Rows:
    """Join the rows of all ranks into one stream, from `first_position` on."""
    size, rows = len(ranks), []
    taken = [0] * size
    position = first_position
    while True:
        rank = position % size
        if taken[rank] == len(ranks[rank]):
            break
        rows.append(ranks[rank][taken[rank]])
        taken[rank] += 1
        position += 1
    assert taken == [len(rank) for rank in ranks], "ranks have uneven shares"
    return rows


def node_processes(launch: str) -> list[psutil.Process]:
    """The embedded nodes of one launch."""
    found = {}
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("TORCHELASTIC_RUN_ID") == launch
            if ours and "--listener-fd" in process.cmdline():
                found[process.pid] = (process, process.ppid())
        except psutil.Error:
            continue
    # Processes that are forked, and not started by exec, have the node's command line.
    return [process for process, parent in found.values() if parent not in found]


def own_nodes() -> list[psutil.Process]:
    """The live nodes that loaders of this process have started, by exec or as forks."""
    below = [*psutil.Process().children()]
    for python in WARM_SERVICES:
        below += psutil.Process(python.pid).children(recursive=True)
    found = []
    for process in below:
        with contextlib.suppress(psutil.Error):
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            if is_alive and "--listener-fd" in process.cmdline():
                found.append((process, process.ppid()))
    pids = {process.pid for process, _ in found}
    return [process for process, parent in found if parent not in pids]


def worker_processes(node: psutil.Process) -> list[psutil.Process]:
    """The workers of a node."""
    found = []
    for child in node.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "dp-worker":
                found.append(child)
    return found


def kill_workers(node: psutil.Process, count: int | None = None) -> None:
    """Kill the workers of a node, or so many; one may end by itself meanwhile."""
    for worker in worker_processes(node)[:count]:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()


def free_address() -> str:
    """A port that stays free: no other process uses this host of 127.0.0.0/8."""
    host = ".".join(map(str, (127, *os.urandom(2), 1)))
    with socket.socket() as sock:
        sock.bind((host, 0))
        return f"{host}:{sock.getsockname()[1]}"


class Service:
    """`dataplane serve` as a process, or a part of it. Use as a context."""

    def __init__(
        self,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        log: Path | None = None,
        awaited: bool = True,
        within: Sequence[str] = (),
    ) -> None:
        """`log` gets its stderr. Not `awaited`: `wait_ready` is for the caller to call. `within` is
        a command that runs its command, such as `sh -c …`.
        """
        self.arguments, self.within = arguments, within
        self.environ = {**os.environ, **(environ or {})}
        self.ready: list[str] = []
        self.log = None if log is None else Log(log)
        self.launch()
        if awaited:
            self.wait_ready()

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Run it."""
        with contextlib.ExitStack() as stack:
            stderr = None if self.log is None else stack.enter_context(self.log.path.open("ab"))
            self.process: subprocess.Popen[str] | WarmProcess
            if not self.within and WARM_SERVICES and WARM_SERVICES[0].fits(self.environ):
                self.process = WARM_SERVICES[0].run_module(
                    "dataplane", "serve", *self.arguments,
                    environ=self.environ, stderr=2 if stderr is None else stderr.fileno(),
                )  # fmt: skip
            else:
                self.process = subprocess.Popen(
                    [*self.within, *DATAPLANE, "serve", *self.arguments],
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                    env=self.environ,
                )

    def wait_ready(self) -> None:
        """Wait until it says that it is ready."""
        assert self.process.stdout is not None
        expected = 1 if {"--coordinator", "--node"} & set(self.arguments) else 2
        self.ready = []
        while len(self.ready) < expected:
            line = self.process.stdout.readline()
            assert line, f"`dataplane serve` ended with status {self.process.wait(60)}"
            self.ready.append(line.strip())

    @property
    def address(self) -> str:
        """Where the coordinator listens."""
        return self.ready[0].split()[-1]

    def kill(self) -> None:
        """SIGKILL."""
        self._signal(signal.SIGKILL)

    def restart(self) -> None:
        """SIGKILL, then the same command again."""
        self.kill()
        self.start()

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        return self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> int:
        self.process.send_signal(number)
        status = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


def wait_until(is_so: Callable[[], object]) -> None:
    """Wait for other threads and processes, with a deadline that only ends a hang."""
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline, "it never came to this"
        threading.Event().wait(0.01)
