"""The report in a terminal, and as Markdown.

Every column fits into a terminal of 80 columns: headings are wrapped, and names if necessary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dataplane.commands import output
from dataplane_bench.report import cells, notes
from dataplane_bench.report.figures import CaseFigures, SystemFigures, case_figures
from dataplane_bench.report.results import BenchReport

NARROW = 110
_NAME_WIDTH_MIN, _NAME_WIDTH_MAX = 12, 30
_HANGING = 22


def show(report: BenchReport, console: Console | None = None) -> None:
    """Print it."""
    console = console or output.stdout()
    console.print(render(report, console.width))


def render(report: BenchReport, width: int) -> RenderableType:
    """Every case, the settings and how they were chosen, systems that did not take part, and the
    summary."""
    cases = case_figures(report)
    gap = 1 if width < NARROW else 2
    widths = _widths(cases, width, gap)
    parts: list[RenderableType] = [_machine_line(report)]
    question = ""
    for case in cases:
        if case.question != question:
            question = case.question
            parts += [Text(), said(f"{case.scenario}: {question}", "bold")]
        parts += [Text(), *_case(case, widths, gap)]
    parts += [*_sweeps(cases), Text(), *_legend(cases)]
    if report.missing:
        parts += [Text(), said("took no part", "bold")]
        parts += [_hanging(name, why) for name, why in report.missing.items()]
    parts += [Text(), *_bounds(report), Text(), *_summary(report, cases, gap)]
    return Group(*parts)


def said(text: str, style: str = "") -> Text:
    """Text without markup and without terminal control characters."""
    return Text(
        "".join(
            character if character.isprintable() or character == "\n" else " " for character in text
        ),
        style,
    )


def _machine_line(report: BenchReport) -> Text:
    return said(notes.machine(report), "dim")


def _widths(cases: Sequence[CaseFigures], width: int, gap: int) -> dict[str, int]:
    """One width per column over all cases, so that the columns align."""
    widths: dict[str, int] = {}
    for case in cases:
        for column in cells.headings(case):
            heading = max(len(word) for word in column.short.split())
            texts = (len(column.cell(system)) for system in case.measured)
            widths[column.long] = max(heading, *texts, widths.get(column.long, 0))
    titles = [len(cells.label(column)) for case in cases for column in case.measured]
    most = max(
        (
            sum(widths[column.long] + gap for column in cells.headings(case))
            for case in cases
            if case.measured
        ),
        default=0,
    )
    name = min(max(titles, default=1), _NAME_WIDTH_MAX, width - most)
    return widths | {"": max(name, _NAME_WIDTH_MIN)}


def _case(case: CaseFigures, widths: dict[str, int], gap: int) -> Iterator[RenderableType]:
    yield said(cells.title(case), "bold cyan") + said("  " + notes.about(case), "dim")
    if case.measured:
        yield _systems(case, widths, gap)
    for name, why in notes.absent(case):
        yield _hanging(name, why)
    for note in notes.notes(case):
        yield said(f"! {note}", "yellow")


def _systems(case: CaseFigures, widths: dict[str, int], gap: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    table.add_column("", width=widths[""], overflow="fold")
    columns = cells.headings(case)
    for column in columns:
        heading = column.short.replace(" ", "\n")
        table.add_column(heading, width=widths[column.long], justify="right", no_wrap=True)
    for system in case.measured:
        style = "bold" if system.is_ours else "dim" if system.is_harness else ""
        row = [_coloured(system, column.long, column.cell(system)) for column in columns]
        table.add_row(said(cells.label(system)), *row, style=style)
    return table


def _coloured(system: SystemFigures, column: str, cell: str) -> Text:
    if column == "±" and system.is_noisy:
        return said(cell, "yellow")
    if column == "Dataplane is" and system.ratio is not None:
        clear = "green" if system.ratio.low > 1 else "red" if system.ratio.high < 1 else ""
        return said(cell, clear)
    return said(cell)


def _hanging(name: str, text: str | Text) -> Table:
    """A line whose second part wraps with a hanging indent."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(width=_HANGING, overflow="fold")
    table.add_column(overflow="fold", style="dim")
    table.add_row(said(name), said(text) if isinstance(text, str) else text)
    return table


def _sweeps(cases: Sequence[CaseFigures]) -> Iterator[RenderableType]:
    """Settings chosen and tried; systems without a choice are left out."""
    sweeps = notes.sweeps(cases)
    if sweeps:
        yield said("\nsettings: those that gave the most samples/s in a short sweep", "bold")
    for system, choices in sweeps:
        for index, (of, choice) in enumerate(choices):
            yield _hanging("" if index else system, said(f"{of}: ", "dim cyan") + said(choice))


def _legend(cases: Sequence[CaseFigures]) -> Iterator[RenderableType]:
    yield said("how to read it", "bold")
    seen: dict[str, str] = {}
    for case in cases:
        seen |= {column.short: column.meaning for column in cells.headings(case)}
    for name, meaning in seen.items():
        yield _hanging(name, meaning)


def _bounds(report: BenchReport) -> Iterator[RenderableType]:
    if report.bounds:
        yield said("what one core, or the server, can do, measured in the same rounds", "bold")
        for name, figure in notes.machine_bounds(report):
            yield _hanging(name, figure)


def _summary(
    report: BenchReport, cases: Sequence[CaseFigures], gap: int
) -> Iterator[RenderableType]:
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    for heading in cells.SUMMARY:
        is_text = heading in ("case", "best peer")
        table.add_column(
            heading.replace(" ", "\n"),
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=not is_text,
        )
    for row in cells.summary(cases):
        table.add_row(*(said(text) for text in row))
    yield said("summary", "bold")
    yield table
    yield Text()
    for sentence in notes.gist(cases):
        yield said(sentence)
    if warning := notes.busy(report):
        yield said(f"! {warning}", "yellow")


def markdown(report: BenchReport) -> str:
    """The same as Markdown, for a document."""
    cases = case_figures(report)
    lines = [f"{notes.machine(report)}.", "", *notes.gist(cases), ""]
    if warning := notes.busy(report):
        lines += [f"**{_plain(warning)}**", ""]
    lines += [*_markdown_rows(cells.SUMMARY, cells.summary(cases)), ""]
    question = ""
    for case in cases:
        if case.question != question:
            question = case.question
            lines += [f"### {_plain(case.scenario)}", "", _plain(question), ""]
        lines += _markdown_case(case)
    if sweeps := list(_markdown_sweeps(cases)):
        lines += ["### Settings", "", *sweeps, ""]
    if report.missing:
        absent = (f"- {_plain(name)}: {_plain(why)}" for name, why in report.missing.items())
        lines += ["### Took no part", "", *absent, ""]
    limits = (f"{name}: {figure}" for name, figure in notes.machine_bounds(report))
    facts = [*limits, *notes.versions(report)]
    lines += ["### Machine and versions", "", *(f"- {_plain(fact)}" for fact in facts)]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_case(case: CaseFigures) -> list[str]:
    columns = cells.headings(case, are_wide=True)
    rows = []
    for system in case.measured:
        row = [
            _plain(text)
            for text in (cells.label(system), *(column.cell(system) for column in columns))
        ]
        rows.append([f"**{text}**" if system.is_ours and text else text for text in row])
    remarks = [f"{name}: {why}" for name, why in notes.absent(case)] + notes.notes(case)
    return [
        f"**{_plain(cells.title(case))}**: {_plain(notes.about(case))}.",
        "",
        *_markdown_rows(("system", *(column.long for column in columns)), rows, are_plain=True),
        "",
        *(f"- {_plain(column)}" for column in remarks),
        *([""] if remarks else []),
    ]


def _markdown_rows(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, are_plain: bool = False
) -> list[str]:
    if not rows:
        return []
    made = [row if are_plain else [_plain(text) for text in row] for row in rows]
    rule = ["---", *("--:" for _ in headings[1:])]
    return [f"| {' | '.join(row)} |" for row in (list(headings), rule, *map(list, made))]


def _markdown_sweeps(cases: Sequence[CaseFigures]) -> Iterator[str]:
    for system, choices in notes.sweeps(cases):
        yield f"- **{_plain(system)}**"
        yield from (f"  - {_plain(of)}: {_plain(choice)}" for of, choice in choices)


def _plain(text: str) -> str:
    """Text in which nothing is interpreted as markup."""
    for mark in "\\`*_[]<>|#":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
