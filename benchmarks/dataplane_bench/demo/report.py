"""The demo's output: sections, commands, live progress while it trains, and a table of proofs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from dataplane_bench.demo.journal import Run, Step
from dataplane_bench.demo.launch import OnStep, rates
from dataplane_bench.demo.proof import Proof

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
            table.add_row(mark, f"{escape(check.claim)}\n[dim]{escape(check.found)}[/]")
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
