"""Compares a report with an older one: what became faster or slower, and what only seems so.

Machines drift: a figure may change because the machine was busier. So ratios to peers, which were
measured in the same rounds, are compared too. A change is marked if the rounds of the two reports
do not overlap. With a single round, no change can be marked.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dataplane.commands import output
from dataplane.commands.output import counted
from dataplane_bench.model import Workload
from dataplane_bench.report import cells, notes
from dataplane_bench.report.figures import CaseFigures, Spread, SystemFigures, case_figures
from dataplane_bench.report.results import BenchReport
from dataplane_bench.report.table import said

_CHOICES = ("peers", "scenarios", "urls")
"""Options that say what was measured, not how; the comparison sees these differences by itself."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A figure in the old and in the new report."""

    old: Spread | None
    new: Spread | None

    @property
    def change(self) -> float | None:
        """The new figure divided by the old one."""
        if self.old is None or self.new is None or not self.old.median:
            return None
        return self.new.median / self.old.median

    @property
    def is_beyond(self) -> bool:
        """Whether the change is larger than the spread of either report."""
        if self.old is None or self.new is None:
            return False
        if min(len(self.old.values), len(self.new.values)) < 2:
            return False
        return self.new.low > self.old.high or self.new.high < self.old.low


@dataclass(frozen=True, slots=True)
class CaseChange:
    """One system in one case. `main` is samples/s, or seconds to the first batch; `speed` is the
    compared figure, samples or starts a second; `ratio` is Dataplane's to this peer.
    """

    case: str
    system: str
    is_start: bool
    main: Pair
    speed: Pair
    ratio: Pair
    notes: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks shown to the reader."""
        marks = []
        if self.speed.is_beyond:
            marks.append("faster" if (self.speed.change or 0) > 1 else "slower")
        if self.ratio.is_beyond:
            marks.append("ratio up" if (self.ratio.change or 0) > 1 else "ratio down")
        return (*marks, *self.notes)


@dataclass(frozen=True, slots=True)
class Comparison:
    """`cautions` are differences of machine, versions and options; `uncompared` lists cases that
    only one report has, or that differ.
    """

    old: str
    new: str
    changes: tuple[CaseChange, ...]
    cautions: tuple[str, ...]
    uncompared: tuple[str, ...]

    @property
    def ratios(self) -> tuple[tuple[float, CaseChange], ...]:
        """The relative change of each ratio, the largest first."""
        moved = [
            (abs(change - 1), entry)
            for entry in self.changes
            if (change := entry.ratio.change) is not None
        ]
        return tuple(sorted(moved, key=lambda entry: -entry[0]))


def compare(old: BenchReport, new: BenchReport) -> Comparison:
    """Compare every system of every case that both reports have. Either may have more."""
    before = {_key(case): case for case in case_figures(old)}
    changes: list[CaseChange] = []
    uncompared: list[str] = []
    added: list[str] = []
    for case in case_figures(new):
        then = before.pop(_key(case), None)
        if then is None:
            added.append(cells.title(case))
        elif differs := _other_case(then, case):
            uncompared.append(f"{cells.title(case)}: {differs}")
        else:
            changes += _changes(then, case)
    for where, titles in (("new", added), ("old", list(map(cells.title, before.values())))):
        if titles:
            uncompared.append(f"only in the {where} report: {', '.join(titles)}")
    return Comparison(
        old.created, new.created, tuple(changes), tuple(_cautions(old, new)), tuple(uncompared)
    )


def _key(case: CaseFigures) -> tuple[str, str]:
    return case.scenario, case.case.label


def _other_case(old: CaseFigures, new: CaseFigures) -> str:
    """Why two cases of one name cannot be compared; "" if they can."""
    differences = [
        f"{name} {getattr(new.case, name)}, was {getattr(old.case, name)}"
        for name in (field.name for field in dataclasses.fields(new.case))
        if getattr(new.case, name) != getattr(old.case, name)
    ]
    if differences:
        return f"a different case: {'; '.join(differences)}"
    if _samples(old.workload) != _samples(new.workload):
        return "different samples, or different batches"
    return ""


def _samples(workload: Workload | None) -> tuple[object, ...]:
    if workload is None:
        return ()
    return workload.fingerprint, workload.sample_count, workload.batch_size


def _changes(old: CaseFigures, new: CaseFigures) -> Iterator[CaseChange]:
    before = {system.result.name: system for system in old.systems}
    for system in new.systems:
        yield from _change(new, before.pop(system.result.name, None), system)
    for gone in before.values():
        yield from _change(new, gone, None)


def _change(
    case: CaseFigures, old: SystemFigures | None, new: SystemFigures | None
) -> Iterator[CaseChange]:
    """The change of one system; None if neither report has a figure for it."""
    either = new or old
    speed = _pair(old, new, lambda figures: figures.speed)
    if either is None or (speed.old is None and speed.new is None):
        return
    remarks = []
    if old is None or new is None:
        remarks.append("only new" if old is None else "only old")
    elif old.standing is not new.standing:
        remarks.append(f"{new.standing}, was {old.standing}")
    elif old.result.settings != new.result.settings:
        remarks.append("other settings")
    yield CaseChange(
        cells.title(case),
        either.result.title,
        case.is_start,
        _pair(old, new, lambda figures: figures.main),
        speed,
        _pair(old, new, lambda figures: figures.ratio),
        tuple(remarks),
    )


def _pair(
    old: SystemFigures | None,
    new: SystemFigures | None,
    figure: Callable[[SystemFigures], Spread | None],
) -> Pair:
    return Pair(None if old is None else figure(old), None if new is None else figure(new))


def _cautions(old: BenchReport, new: BenchReport) -> Iterator[str]:
    yield from (f"machine, {difference}" for difference in _differences(old.machine, new.machine))
    for system in sorted({*old.versions, *new.versions}):
        then, now = old.versions.get(system), new.versions.get(system)
        if then is not None and now is not None:
            yield from (
                f"versions of {system}, {difference}" for difference in _differences(then, now)
            )
    then, now = (
        {name: value for name, value in report.options.items() if name not in _CHOICES}
        for report in (old, new)
    )
    yield from (f"option {difference}" for difference in _differences(then, now))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*old, *new}):
        then, now = old.get(name), new.get(name)
        if then != now:
            yield f"{name}: {notes.plain(now)}, was {notes.plain(then)}"


def show(old: BenchReport, new: BenchReport, console: Console | None = None) -> None:
    """Print it."""
    console = console or output.stdout()
    console.print(render(compare(old, new)))


def render(comparison: Comparison) -> RenderableType:
    """Cautions first, then a table per case, then a summary."""
    parts: list[RenderableType] = [
        Text(),
        said(f"compared with the report of {comparison.old}", "bold"),
        *(said(f"! {sentence}", "yellow") for sentence in comparison.cautions),
    ]
    for case, changes in itertools.groupby(comparison.changes, lambda change: change.case):
        parts += [Text(), said(case, "bold cyan"), _table(tuple(changes))]
    if comparison.uncompared:
        parts += [Text(), said("not compared", "bold"), *map(said, comparison.uncompared)]
    parts += [Text(), *(said(sentence) for sentence in gist(comparison))]
    return Group(*parts)


def _table(changes: Sequence[CaseChange]) -> Table:
    unit, word = ("s", cells.number) if changes[0].is_start else ("/s", cells.rate)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", overflow="fold", width=18)
    speeds, ratios = (
        (f"old\n{unit}", f"new\n{unit}", "\nspeed"),
        ("old\nratio", "new\nratio", "\nchange"),
    )
    for heading in (*speeds, *ratios):
        table.add_column(heading, justify="right", no_wrap=True, min_width=6)
    table.add_column("", overflow="fold")
    for change in changes:
        table.add_row(
            said(change.system),
            *(word(cells.median(spread)) for spread in (change.main.old, change.main.new)),
            cells.times(change.speed.change),
            *(cells.times(cells.median(spread)) for spread in (change.ratio.old, change.ratio.new)),
            cells.times(change.ratio.change),
            said(", ".join(change.marks), "yellow"),
        )
    return table


def gist(comparison: Comparison) -> list[str]:
    """The comparison in a few sentences."""
    if not comparison.changes:
        return ["The two reports have no case in common."]
    marked = [
        change for change in comparison.changes if change.speed.is_beyond or change.ratio.is_beyond
    ]
    of = f"{len(marked)} of {counted(len(comparison.changes), 'figure')}"
    sentences = [f"{of} changed by more than the spread of either report."]
    if ratios := comparison.ratios:
        middle = statistics.median(share for share, _ in ratios)
        farthest, change = ratios[0]
        sentences.append(
            f"{counted(len(ratios), 'ratio')} to peers changed by {cells.share(middle)} in "
            f"the median, by {cells.share(farthest)} at most ({change.case}, {change.system})."
        )
    return sentences
