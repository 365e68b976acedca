"""The report as one self-contained page: no network, no other file.

The template escapes all values; plots are JSON that cannot contain the start of a tag. The page's
policy allows only its two scripts, by their hashes, and no loading of anything else.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.model.errors import ConfigError
from dataplane_bench.report import cells, notes, plots
from dataplane_bench.report.axes import Marks, Plot, marks
from dataplane_bench.report.figures import CaseFigures, SystemFigures, case_figures
from dataplane_bench.report.results import BenchReport, ScenarioResult

_DASHES = {"solid": "", "dash": "7 4", "dot": "2 4"}


def write(report: BenchReport, path: Path) -> None:
    """Raises:  ConfigError: the file cannot be written."""
    text = render(report)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class _Placed:
    """A plot, and the id of its place on the page. Keys of `group` show and hide its systems."""

    id: str
    plot: Plot
    group: str = ""


@dataclass(frozen=True, slots=True)
class _Key:
    """A system in a legend: a dot if it has a `symbol`, else a line."""

    name: str
    title: str
    colour: str
    dashes: str
    width: float
    symbol: str = ""


@dataclass(frozen=True, slots=True)
class _Row:
    """A system in a case's table."""

    label: str
    kind: str
    colour: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Case:
    """The template's values for a case."""

    id: str
    title: str
    about: str
    headings: tuple[cells.Heading, ...]
    rows: tuple[_Row, ...]
    absent: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    plots: tuple[_Placed, ...]
    is_odd: bool
    over_time: tuple[_Placed, ...]
    keys: tuple[_Key, ...]


@dataclass(frozen=True, slots=True)
class _Scenario:
    """The template's values for a scenario."""

    id: str
    name: str
    question: str
    bound: str
    are_starts: bool
    cases: tuple[_Case, ...]


def render(report: BenchReport) -> str:
    """The page of a report."""
    import jinja2
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    cases = case_figures(report)
    looks = marks(system.result.name for case in cases for system in case.systems)
    scenarios = _scenarios(report, cases, looks)
    overview = plots.overview(cases, looks)
    placed = [_Placed("overview", overview, "overview")] if overview else []
    every = placed + [
        plot
        for scenario in scenarios
        for case in scenario.cases
        for plot in (*case.plots, *case.over_time)
    ]
    scripts = [get_plotlyjs(), _part("page.js")]
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_part("page.html")).render(
        report=report,
        style=_part("page.css"),
        scripts=scripts,
        hashes=[_hash(script) for script in scripts],
        drawings=_drawings(every),
        overview=placed,
        overview_keys=_overview_keys(cases, looks),
        gist=notes.gist(cases),
        busy=notes.busy(report),
        has_spread=any(system.has_spread for case in cases for system in case.measured),
        summary_headings=cells.SUMMARY,
        summary=[(f"case-{place}", row) for place, row in enumerate(cells.summary(cases))],
        scenarios=scenarios,
        sweeps=notes.sweeps(cases),
        failures=_failures(cases),
        machine=notes.machine(report),
        bounds=notes.machine_bounds(report),
        versions=notes.versions(report),
        options=[f"{name}: {notes.plain(value)}" for name, value in report.options.items()],
    )


def _scenarios(report: BenchReport, cases: Sequence[CaseFigures], looks: Marks) -> list[_Scenario]:
    made = []
    place = 0
    for number, scenario in enumerate(report.scenarios):
        own = cases[place : place + len(scenario.cases)]
        made.append(_scenario(number, scenario, own, place, looks))
        place += len(scenario.cases)
    return made


def _scenario(
    number: int,
    scenario: ScenarioResult,
    cases: Sequence[CaseFigures],
    first: int,
    looks: Marks,
) -> _Scenario:
    return _Scenario(
        f"scenario-{number}",
        scenario.name,
        scenario.question,
        scenario.bound,
        all(case.is_start for case in cases),
        tuple(_case(f"case-{first + place}", case, looks) for place, case in enumerate(cases)),
    )


def _case(name: str, case: CaseFigures, looks: Marks) -> _Case:
    placed = [
        _Placed(f"{name}-{plot.kind}", plot, name if plot.is_over_time else "")
        for plot in plots.of_case(case, looks)
    ]
    plain = tuple(place for place in placed if not place.plot.is_over_time)
    over_time = tuple(place for place in placed if place.plot.is_over_time)
    headings = cells.headings(case, are_wide=True)
    drawn = [system for system in case.measured if not system.is_harness] if over_time else []
    return _Case(
        id=name,
        title=cells.title(case),
        about=notes.about(case),
        headings=headings,
        rows=tuple(_row(system, headings, looks) for system in case.measured),
        absent=tuple(notes.absent(case)),
        notes=tuple(notes.notes(case)),
        plots=plain,
        is_odd=len(plain) % 2 == 1,
        over_time=over_time,
        keys=tuple(_key(system, looks) for system in drawn),
    )


def _row(system: SystemFigures, headings: Sequence[cells.Heading], looks: Marks) -> _Row:
    kind = "ours" if system.is_ours else "harness" if system.is_harness else ""
    return _Row(
        cells.label(system),
        kind,
        looks[system.result.name].colour,
        tuple(heading.cell(system) for heading in headings),
    )


def _key(system: SystemFigures, looks: Marks) -> _Key:
    mark = looks[system.result.name]
    name, title = system.result.name, system.result.title
    return _Key(name, title, mark.colour, _DASHES[mark.dash], mark.width)


def _overview_keys(cases: Sequence[CaseFigures], looks: Marks) -> list[_Key]:
    titles = {
        system.result.name: system.result.title
        for case in cases
        for system in case.measured
        if system.ratio
    }
    return [
        _Key(name, title, looks[name].colour, "", 0.0, looks[name].symbol)
        for name, title in titles.items()
    ]


def _failures(cases: Sequence[CaseFigures]) -> list[tuple[str, str]]:
    """Whole errors, including the loader's last output."""
    return [
        (f"{cells.title(case)}, {system.result.title}", system.result.error)
        for case in cases
        for system in case.systems
        if system.result.error
    ]


def _drawings(placed: Sequence[_Placed]) -> str:
    """JSON that is safe in a script element: nothing in it can end the element."""
    drawings: list[dict[str, Any]] = [
        {"id": plot_placed.id, "group": plot_placed.group, **plot_placed.plot.drawing}
        for plot_placed in placed
    ]
    text = json.dumps(drawings, separators=(",", ":"), allow_nan=False)
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def _part(name: str) -> str:
    folder = importlib.resources.files("dataplane_bench.report") / "web"
    return (folder / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """The hash of a script, as a page's policy writes it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
