"""Starts the demo's trainer with torchrun, follows its steps, watches and kills it."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from dataplane_bench import processes
from dataplane_bench.demo.journal import JournalReader, Run, Step
from dataplane_bench.processes import ProcessEnded

FOLLOW_POLL_S = 0.05
LOOK_PERIOD_S = 0.5
STALL_S = 90.0

OnStep = Callable[[Step], None]


@dataclass(slots=True)
class Watch:
    """Looks at the trainers' connections and environment from outside, now and then."""

    ports: Mapping[int, str]
    looks: int = 0
    offences: list[str] = field(default_factory=list)
    _next_s: float = 0.0

    def look(self, pid: int) -> None:
        """Look at the children of torchrun, unless we just did."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + LOOK_PERIOD_S
        with contextlib.suppress(psutil.Error):
            for rank in psutil.Process(pid).children():
                self._look_at(rank)

    def _look_at(self, rank: psutil.Process) -> None:
        secrets = [name for name in rank.environ() if name.startswith("AWS_")]
        if secrets:
            self.offences.append(f"a trainer has {', '.join(secrets)} in its environment")
        for connection in rank.net_connections("inet"):
            if connection.raddr and connection.raddr.port in self.ports:
                self.offences.append(f"a trainer talks to {self.ports[connection.raddr.port]}")
        self.looks += 1


@dataclass(frozen=True, slots=True)
class TorchrunLaunch:
    """One torchrun and its ranks."""

    run: Run
    ranks: int
    process: subprocess.Popen[bytes]
    log: Path
    journals: tuple[JournalReader, ...]
    steps: tuple[list[Step], ...]

    def follow(self, watch: Watch, on_step: OnStep, until: int | None = None) -> None:
        """Report every step of rank 0 until all ranks have done step `until`, or to the end.

        Raises:  ProcessEnded: torchrun failed, ended before `until`, or made no step for too long.
        """
        heard = time.monotonic()
        while True:
            status = self.process.poll()
            new = self.catch_up()
            for step in new:
                on_step(step)
            if new:
                heard = time.monotonic()
            if until is not None and all(steps and steps[-1].step >= until for steps in self.steps):
                return
            if status is not None:
                if status or until is not None:
                    words = processes.tail(self.log)
                    raise ProcessEnded(f"torchrun ended, exit status {status}:\n{words}")
                return
            if time.monotonic() - heard > STALL_S:
                raise ProcessEnded(f"no step for {STALL_S:g} s:\n{processes.tail(self.log)}")
            watch.look(self.process.pid)
            processes.pause(FOLLOW_POLL_S)

    def catch_up(self) -> list[Step]:
        """Read the journals of all ranks; return the new steps of rank 0."""
        new = [journal.new() for journal in self.journals]
        for steps, fresh in zip(self.steps, new, strict=True):
            steps.extend(fresh)
        return new[0]

    def kill(self) -> list[int]:
        """SIGKILL torchrun and all ranks at once; return their process ids."""
        killed = processes.kill_family(self.process)
        self.catch_up()
        return killed


def command(ranks: int, settings: str) -> list[str]:
    """The command as a user would type it. Ranks meet on loopback, whatever the host's name is."""
    return [
        *("torchrun", f"--nproc-per-node={ranks}", "--rdzv-id=demo", "--rdzv-backend=c10d"),
        *("--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
        *("-m", "dataplane_bench.demo.train", settings),
    ]


@contextlib.contextmanager
def launched(run: Run, ranks: int, environment: Mapping[str, str]) -> Iterator[TorchrunLaunch]:
    """Start the trainer on `ranks` ranks with one thread each; all processes end with the block."""
    settings = Path(run.folder, f"{run.launch}.json")
    settings.write_text(run.to_json(), encoding="utf-8")
    log = settings.with_suffix(".log")
    program, *arguments = command(ranks, settings.name)
    full = [processes.tool(program), *arguments]
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with processes.running(full, {**environment, **ours}, log) as process:
        journals = tuple(JournalReader(run.journal(rank)) for rank in range(ranks))
        yield TorchrunLaunch(run, ranks, process, log, journals, tuple([] for _ in range(ranks)))


def resumed(run: Run, launch: str) -> Run:
    """The settings of a launch that continues from the checkpoint."""
    return dataclasses.replace(run, launch=launch, resume=True)


def rates(steps: Sequence[Step], run: Run, ranks: int) -> tuple[float, float, float]:
    """Samples/s and bytes/s of all ranks, and the share of time that rank 0 waited for batches."""
    seconds = sum(step.step_s for step in steps) or 1e-9
    samples = sum(
        min(run.global_batch, run.sample_count - (step.step - 1) * run.global_batch)
        for step in steps
    )
    byte_count = sum(step.batch_bytes for step in steps) * ranks
    return samples / seconds, byte_count / seconds, sum(step.wait_s for step in steps) / seconds
