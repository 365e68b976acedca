"""A plot with a bar for each system, its spread, and the bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dataplane_bench.report import cells
from dataplane_bench.report.axes import (
    Plot,
    anchor,
    axis,
    escaped,
    height_of,
    layout,
    line,
    names,
    note,
    shortened,
)
from dataplane_bench.report.figures import CaseFigures, Spread, SystemFigures
from dataplane_bench.report.marks import Mark, Marks

BOUND_SHOWN = 4.0
"""A bound this many times beyond the fastest system is drawn as a line at the edge; at its true
place it would leave no room for the bars."""


@dataclass(frozen=True, slots=True)
class BarScale:
    """The quantity that bars show. `label` is the text beside a bar of that height."""

    kind: str
    heading: str
    unit: str
    figure: Callable[[SystemFigures], Spread | float | None]
    label: Callable[[SystemFigures, Spread], str] = lambda _, found: cells.number(found.median)


THROUGHPUT = BarScale(
    "throughput",
    "throughput",
    "samples/s",
    lambda one: one.samples_per_s,
    lambda _, found: f"{cells.rate(found.median)} {cells.off(found)}".strip(),
)
FIRST = BarScale(
    "first",
    "time to the first batch",
    "s",
    lambda one: one.first_batch_s,
    lambda one, found: f"{cells.number(found.median)} {one.by}".strip(),
)
CPU = BarScale(
    "cpu",
    "CPU per million samples",
    "CPU seconds, all processes",
    lambda one: one.cpu_s_per_million,
)
MEMORY = BarScale(
    "memory",
    "peak memory",
    "GiB (PSS, all processes)",
    lambda one: None if one.memory_peak is None else one.memory_peak / 2**30,
)
STALL = BarScale(
    "stall",
    "stall of a trainer that computes",
    "% of its time",
    lambda one: None if one.stall_share is None else one.stall_share * 100,
)


def bars(
    measure: BarScale, case: CaseFigures, drawn: Sequence[SystemFigures], marks: Marks
) -> Plot | None:
    """One bar per system; if a figure is a spread, whiskers and one dot per round."""
    rows: list[tuple[SystemFigures, Spread]] = []
    for one in drawn:
        found = measure.figure(one)
        if found is not None:
            rows.append((one, found if isinstance(found, Spread) else Spread((found,))))
    if not rows:
        return None
    traces = []
    for place, (one, found) in enumerate(rows):
        told = f"{one.result.title}: {cells.span(found, cells.number)} {measure.unit}"
        mark = marks[one.result.name]
        traces.append(_bar(one.result.name, told, len(rows) - 1 - place, found, mark))
    dots = [_dots(len(rows) - 1 - place, found) for place, (_, found) in enumerate(rows)]
    labels = [measure.label(one, found) for one, found in rows]
    made = layout(axis(measure.unit), names([cells.label(one) for one, _ in rows]), labels)
    made["barmode"] = "overlay"
    if measure is THROUGHPUT:
        _add_bounds(made, case, max(found.high for _, found in rows))
    return Plot(
        measure.kind,
        measure.heading,
        f"{measure.heading} of {len(rows)} systems, {measure.unit}",
        height_of(len(rows)),
        {"data": [*traces, *filter(None, dots), anchor()], "layout": made},
    )


def _bar(name: str, told: str, place: int, found: Spread, mark: Mark) -> dict[str, Any]:
    pattern = {"shape": mark.pattern, "fillmode": "overlay", "fgcolor": "--card", "solidity": 0.2}
    return {
        "type": "bar",
        "orientation": "h",
        "meta": name,
        "x": [shortened(found.median)],
        "y": [place],
        "width": 0.66,
        "customdata": [escaped(told)],
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"color": mark.colour, "pattern": pattern},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [shortened(found.high - found.median)],
            "arrayminus": [shortened(found.median - found.low)],
            "color": "--ink",
            "thickness": 1.2,
            "width": 4,
            "visible": len(found.values) > 1,
        },
    }


def _dots(place: int, found: Spread) -> dict[str, Any] | None:
    if len(found.values) < 2:
        return None
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [shortened(value) for value in found.values],
        "y": [place] * len(found.values),
        "hoverinfo": "skip",
        "marker": {"color": "--ink", "size": 5, "line": {"color": "--card", "width": 1}},
    }


def _add_bounds(made: dict[str, Any], case: CaseFigures, highest: float) -> None:
    """One line per bound; if all are far away, only the tightest one, at the edge."""
    shown = [one for one in case.bounds if one[1].median <= BOUND_SHOWN * highest]
    made["shapes"] = [line(limit.median, "--ink", "dash") for _, limit in shown]
    made["annotations"] = [
        note(f"bound: {name} {cells.rate(limit.median)}", limit.median, row)
        for row, (name, limit) in enumerate(shown)
    ]
    if case.bounds and not shown:
        name, limit = case.bounds[0]
        times = f", {cells.times(limit.median / highest)} the fastest" if highest else ""
        told = f"bound: {name} {cells.rate(limit.median)}{times} →"
        made["annotations"] = [note(told)]
        made["shapes"] = [line(1.0, "--ink", "dot") | {"xref": "paper"}]
    most = max([highest, *(limit.median for _, limit in shown)])
    made["xaxis"]["range"] = [0, shortened(most * 1.06)]
    made["margin"]["t"] = 8 + 15 * len(made["annotations"])
