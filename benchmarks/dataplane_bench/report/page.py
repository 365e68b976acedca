"""The report as one self-contained page: no network, no other file.

The template escapes all values; plots are JSON that cannot contain the start of a tag. The page's
policy allows only its two scripts, by their hashes, and no loading of anything else.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from dataplane.model.errors import ConfigError
from dataplane_bench.report import cells, notes, plots
from dataplane_bench.report.axes import Plot, marks
from dataplane_bench.report.figures import CaseFigures, case_figures
from dataplane_bench.report.results import BenchReport

_DASHES = {"solid": "", "dash": "7 4", "dot": "2 4", "dashdot": "7 3 2 3", "longdash": "11 4"}


def write(report: BenchReport, path: Path) -> None:
    """Raises:  ConfigError: the file cannot be written."""
    text = render(report)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def render(report: BenchReport) -> str:
    """The page of a report."""
    import jinja2
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    cases = case_figures(report)
    looks = marks(system.result.name for case in cases for system in case.systems)
    drawn = [(f"case-{at}", case, plots.of_case(case, looks)) for at, case in enumerate(cases)]
    measured = [system for case in cases for system in case.measured]
    overview = plots.overview(cases, looks)
    # The id of a plot's place, the legend whose keys show and hide its systems, and the plot.
    placed = [("overview", "overview", overview)] if overview else []
    for name, _, of_case in drawn:
        placed += [
            (f"{name}-{plot.kind}", name if plot.is_over_time else "", plot) for plot in of_case
        ]
    remaining = iter(drawn)
    scenarios = [
        (scenario, [*itertools.islice(remaining, len(scenario.cases))])
        for scenario in report.scenarios
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
        drawings=_drawings(placed),
        overview=overview,
        looks=looks,
        peers={system.result.name: system.result for system in measured if system.ratio}.values(),
        has_spread=any(system.has_spread for system in measured),
        cases=cases,
        scenarios=scenarios,
        failures=_failures(cases),
        cells=cells,
        notes=notes,
        dashes=_DASHES,
    )


def _failures(cases: Sequence[CaseFigures]) -> list[tuple[str, str]]:
    """Whole errors, including the loader's last output."""
    return [
        (f"{cells.title(case)}, {system.result.title}", system.result.error)
        for case in cases
        for system in case.systems
        if system.result.error
    ]


def _drawings(placed: Sequence[tuple[str, str, Plot]]) -> str:
    """JSON that is safe in a script element: nothing in it can end the element."""
    drawings = [{"id": place, "group": group, **plot.drawing} for place, group, plot in placed]
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
