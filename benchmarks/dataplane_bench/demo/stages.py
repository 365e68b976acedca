"""The demo's stages, in order. Each shows what it does, and is timed.

Trainers are started with torchrun, followed by their journals, watched from outside, and killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from dataplane.plan.manifest import Manifest
from dataplane_bench import processes
from dataplane_bench.demo.journal import (
    ROW_TOKENS,
    Corpus,
    JournalReader,
    Run,
    Step,
    corpus,
    parquet_shards,
    row_sums,
)
from dataplane_bench.demo.proof import Proof
from dataplane_bench.processes import ProcessEnded
from dataplane_bench.s3 import S3Server, s3_server

WIDTH = 100
_RECENT_STEPS = 20


class DemoReport:
    """Prints everything for people: to stdout, or to stderr if stdout is for JSON."""

    def __init__(self, *, to_stderr: bool) -> None:
        stream = sys.stderr if to_stderr else sys.stdout
        width = None if stream.isatty() else WIDTH
        self._console = Console(file=stream, width=width, highlight=False)
        self._sections = 0

    def title(self, text: str, about: str) -> None:
        self._console.print(f"\n[bold]{escape(text)}[/]\n{escape(about)}")

    def section(self, text: str) -> None:
        self._sections += 1
        self._console.print()
        self._console.rule(f"[bold]{self._sections}  {escape(text)}[/]", align="left", style="dim")

    def note(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)

    def command(self, words: Sequence[str]) -> None:
        self._console.print(f"[cyan]$ {escape(' '.join(words))}[/]", soft_wrap=True)

    def output(self, text: str) -> None:
        """Print what a command wrote."""
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        self._console.print(escape("\n".join(lines)), style="dim", soft_wrap=True)

    def event(self, text: str) -> None:
        self._console.print(f"[bold red]{escape(text)}[/]", soft_wrap=True)

    def error(self, text: str) -> None:
        self._console.print(f"[bold red]error:[/] {escape(text)}", soft_wrap=True)

    @contextlib.contextmanager
    def training(self, run: Run, ranks: int, step_count: int) -> Iterator[OnStep]:
        """Shows each step that it is called with: a live bar, and one line per checkpoint."""
        steps: list[Step] = []
        bar = Progress(
            TextColumn("step {task.completed:>3.0f}/{task.total:.0f}"),
            BarColumn(24),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        with bar:
            task = bar.add_task("", total=step_count, figures="torch is starting…")

            def on_step(step: Step) -> None:
                steps.append(step)
                figures = _figures(steps[-_RECENT_STEPS:], run, ranks)
                bar.update(task, completed=step.step, figures=figures)
                if step.saved or step.step == step_count:
                    what = "checkpoint" if step.saved else "end of the epoch"
                    bar.console.print(f"step {step.step:>3}  {figures}  {what}")

            yield on_step

    def proof(self, checks: Sequence[Proof]) -> None:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for check in checks:
            mark = "[bold green]✓[/]" if check.holds else "[bold red]✗[/]"
            table.add_row(mark, f"{escape(check.claim)}\n[dim]{escape(check.evidence)}[/]")
        self._console.print(table)

    def figures(self, rows: Mapping[str, str]) -> None:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        self._console.print()
        for name, value in rows.items():
            table.add_row(escape(name), escape(value))
        self._console.print(table)

    def verdict(self, *, holds: bool, text: str) -> None:
        style = "bold green" if holds else "bold red"
        self._console.print(f"\n[{style}]{escape(text)}[/]\n")


def _figures(steps: Sequence[Step], run: Run, ranks: int) -> str:
    samples_per_s, bytes_per_s, waited = rates(steps, run, ranks)
    return (
        f"loss {steps[-1].loss:5.3f}  {samples_per_s:6,.0f} samples/s  "
        f"{bytes_per_s / 1e6:5.2f} MB/s  waiting {waited:5.1%}"
    )


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

    def check(self, pid: int) -> None:
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
            watch.check(self.process.pid)
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


def torchrun(ranks: int, settings: str) -> list[str]:
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
    program, *arguments = torchrun(ranks, settings.name)
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


BUCKET = "demo"
PREFIX = "text/"
URL = f"s3://{BUCKET}/{PREFIX}"
MANIFEST = "text.manifest"
SEED = 7
EPOCH = 0
GLOBAL_BATCH = 16
SHARD_COUNT = 4
GROUPS_A_SHARD = 8
CONTEXT = 128
LEARNING_RATE = 3e-3
COMMAND_TIMEOUT_S = 60.0
START_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 15.0
# The last global batch is three samples short, so the ranks' local batches differ by one.
SHORT_OF_LAST_BATCH = 3


@dataclass(frozen=True, slots=True)
class DemoLength:
    """The demo's length. Trainers are killed after step `kill_after`, between two checkpoints."""

    steps: int
    ranks: int
    resume_ranks: int

    @property
    def sample_count(self) -> int:
        return self.steps * GLOBAL_BATCH - SHORT_OF_LAST_BATCH

    @property
    def checkpoint_every(self) -> int:
        return max(4, self.steps // 8)

    @property
    def kill_after(self) -> int:
        before = self.steps // 2 // self.checkpoint_every * self.checkpoint_every
        return before + self.checkpoint_every // 2


@dataclass(frozen=True, slots=True)
class RunningService:
    """A running `dataplane serve`. Trainers pass `address` as service=…."""

    process: subprocess.Popen[bytes]
    address: str


@dataclass(slots=True)
class Stages:
    """The stages, and what they share; `seconds` is how long each took."""

    length: DemoLength
    folder: Path
    environment: Mapping[str, str]
    report: DemoReport
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str, title: str) -> Iterator[None]:
        self.report.section(title)
        began = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - began, 2)

    def storage(self, stack: contextlib.ExitStack) -> S3Server:
        """Start a real S3 server, which ends with the stack."""
        with self.stage("s3", "A real S3 server"):
            server = stack.enter_context(s3_server(self.folder, self.environment))
            self.report.note(
                f"SeaweedFS listens at {server.endpoint}. It accepts one identity, whose secret "
                "was just generated."
            )
        return server

    def shards(self, server: S3Server) -> Corpus:
        """Cut text into samples and upload them as Parquet shards."""
        with self.stage("shards", "Shards made from real text"):
            text = corpus(self.length.sample_count)
            group_rows = -(-text.sample_count // (SHARD_COUNT * GROUPS_A_SHARD))
            objects = parquet_shards(text, SHARD_COUNT, group_rows)
            server.upload(BUCKET, {PREFIX + name: body for name, body in objects.items()})
            self.report.note(
                f"{text.sample_count:,} samples of {ROW_TOKENS} byte tokens (int32) and an id, "
                f"from {text.file_count} files of Python's standard library:\n"
                f"{len(objects)} Parquet shards with row groups of {group_rows} rows, "
                f"{sum(map(len, objects.values())) / 1e6:.2f} MB compressed, at {URL}"
            )
        return text

    def index(self, server: S3Server) -> Manifest:
        """Run `dataplane index` as a user would type it."""
        with self.stage("index", "Index them, once"):
            words = ["dataplane", "index", URL, "-o", MANIFEST]
            self.report.command(words)
            done = subprocess.run(
                [processes.tool(words[0]), *words[1:]],
                cwd=self.folder,
                env={**self.environment, **server.environment()},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )
            if done.returncode:
                raise ProcessEnded(f"dataplane index failed:\n{done.stderr.decode()}")
            self.report.output(done.stdout.decode())
        return Manifest.from_bytes((self.folder / MANIFEST).read_bytes())

    def serve(self, server: S3Server, stack: contextlib.ExitStack) -> RunningService:
        """Run `dataplane serve`, the only process here that has the credentials."""
        with self.stage("serve", "Serve them: coordinator and cache node"):
            words = ["dataplane", "serve", "--listen", "127.0.0.1:0"]
            self.report.command(words)
            log = self.folder / "serve.log"
            command = [processes.tool(words[0]), *words[1:]]
            environment = {**self.environment, **server.environment()}
            process = stack.enter_context(processes.running(command, environment, log))
            address = processes.wait_for_node(process, log, START_TIMEOUT_S)
            service = RunningService(process, address)
            self.report.output(processes.announcements(log))
            self.report.note(
                "The service has the S3 credentials. The trainers have none: they connect to the "
                "service and map its memory."
            )
        return service

    def run_of(self, service: RunningService) -> Run:
        """The settings of the first launch."""
        return Run(
            url=URL,
            service=service.address,
            folder=str(self.folder),
            launch="first",
            seed=SEED,
            global_batch=GLOBAL_BATCH,
            sample_count=self.length.sample_count,
            checkpoint_every=self.length.checkpoint_every,
            context=CONTEXT,
            learning_rate=LEARNING_RATE,
            resume=False,
        )

    def train_and_kill(self, run: Run, service: RunningService, watch: Watch) -> TorchrunLaunch:
        """Train until the middle of the epoch, then SIGKILL."""
        with self.stage("train", "Train, until the trainers are killed"):
            ranks = self.length.ranks
            self.report.note(
                "A byte-level transformer, DDP over gloo, one core per rank. Waiting is the share "
                "of time that\nrank 0 spends waiting for its next batch; the model takes the rest."
            )
            with self._launched(run, ranks) as launch:
                with self.report.training(run, ranks, self.length.steps) as on_step:
                    launch.follow(watch, on_step, until=self.length.kill_after)
                killed = launch.kill()
            at = launch.steps[0][-1].step
            self.report.event(
                f"step {at:>3}  SIGKILL to torchrun and its {len(killed) - 1} ranks "
                f"(pids {', '.join(map(str, killed))})"
            )
            if service.process.poll() is not None:
                raise ProcessEnded(
                    f"the service died:\n{processes.tail(self.folder / 'serve.log')}"
                )
            self.report.note(
                "The service keeps running, and has freed the memory that the ranks held. The "
                "checkpoint has the\nmodel, the optimizer, and the loader's state:"
            )
            self.report.output(json.dumps(saved_in(run)["loader"]))
        return launch

    def resume(self, run: Run, watch: Watch) -> TorchrunLaunch:
        """Run the same command again: it finds the checkpoint."""
        with self.stage("resume", "Resume, to the end of the epoch"):
            ranks = self.length.resume_ranks
            with (
                self._launched(resumed(run, "second"), ranks) as launch,
                self.report.training(run, ranks, self.length.steps) as on_step,
            ):
                launch.follow(watch, on_step)
        return launch

    def uninterrupted(self, run: Run) -> NDArray[np.int64]:
        """A whole pass of one rank, without training.

        Shapes:  result: int64[N, 2], id and checksum of each sample.
        """
        from dataplane_torch import DataLoader

        with self.stage("pass", "Once more without a model: one rank, no interruption"):
            loader = DataLoader(
                run.url,
                global_batch_size=run.global_batch,
                shuffle=True,
                seed=run.seed,
                columns=["id", "tokens"],
                service=run.service,
                name="uninterrupted",
                dp_rank=0,
                dp_size=1,
            )
            with loader:
                began = time.monotonic()
                batches = [(batch["id"].numpy(), batch["tokens"].numpy()) for batch in loader]
                seconds = time.monotonic() - began
                ids = np.concatenate([ids for ids, _ in batches])
                sums = np.concatenate([row_sums(tokens) for _, tokens in batches])
                size = sum(ids.nbytes + tokens.nbytes for ids, tokens in batches)
                del batches
            self.report.note(
                f"{len(ids):,} samples in {seconds:.2f} s: {len(ids) / seconds:,.0f} samples/s, "
                f"{size / seconds / 1e6:,.0f} MB/s; most of the time is the first read from S3"
            )
        return np.stack([ids, sums], axis=1)

    def drain(self, service: RunningService) -> int | None:
        """Send SIGTERM: the service ends by itself once the last trainer has left."""
        with self.stage("drain", "Stop"):
            status = processes.end(service.process, DRAIN_TIMEOUT_S)
            outcome = "did not end, and was killed" if status is None else f"exit status {status}"
            self.report.note(f"SIGTERM to the service: drained, {outcome}")
        return status

    @contextlib.contextmanager
    def _launched(self, run: Run, ranks: int) -> Iterator[TorchrunLaunch]:
        self.report.command(torchrun(ranks, f"{run.launch}.json"))
        with launched(run, ranks, self.environment) as launch:
            yield launch


def saved_in(run: Run) -> dict[str, Any]:
    """The current checkpoint."""
    import torch

    saved: dict[str, Any] = torch.load(run.checkpoint, weights_only=True)
    return saved
