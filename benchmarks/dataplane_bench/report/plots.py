"""The plots of a page, as Plotly's JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    log_axis,
    names,
    shortened,
)
from dataplane_bench.report.bars import CPU, FIRST, MEMORY, STALL, THROUGHPUT, bars
from dataplane_bench.report.figures import CaseFigures, SystemFigures, known
from dataplane_bench.report.marks import Marks

_TIME_HEIGHT = 260


def overview(cases: Sequence[CaseFigures], marks: Marks) -> Plot | None:
    """The ratio to each peer in each case, in one picture."""
    rows = [case for case in cases if any(one.ratio for one in case.measured)]
    if not rows:
        return None
    peers = {
        one.result.name: one.result.title for case in rows for one in case.measured if one.ratio
    }
    lines: list[dict[str, Any]] = []
    for name, title in peers.items():
        found = [
            (len(rows) - 1 - place, one.ratio, case)
            for place, case in enumerate(rows)
            for one in case.measured
            if one.result.name == name and one.ratio is not None
        ]
        lines.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": escaped(title),
                "meta": name,
                "x": [shortened(ratio.median) for _, ratio, _ in found],
                "y": [row for row, _, _ in found],
                "customdata": [
                    escaped(f"{cells.title(case)}, {title}: {cells.span(ratio, cells.times)}")
                    for _, ratio, case in found
                ],
                "hovertemplate": "%{customdata}<extra></extra>",
                "marker": {
                    "color": marks[name].colour,
                    "symbol": marks[name].symbol,
                    "size": 11,
                    "line": {"color": "--paper", "width": 1.5},
                },
            }
        )
    ratios = [each for drawn in lines for each in drawn["x"]]
    across = log_axis("times the peer's speed", [*ratios, 1.0], "x")
    made = layout(across, names([cells.title(case) for case in rows])) | {
        "shapes": [line(1.0, "--ours", "solid")],
    }
    told = f"Ratios of Dataplane to {len(peers)} peers in {len(rows)} cases."
    height = height_of(len(rows))
    return Plot("overview", "", told, height, {"data": lines, "layout": made})


def of_case(case: CaseFigures, marks: Marks) -> list[Plot]:
    """All plots of a case for which it has figures."""
    drawn = [one for one in case.measured if not one.is_harness]
    if not drawn:
        return []
    if case.is_start:
        found = [bars(FIRST, case, drawn, marks)]
    else:
        found = [
            *(bars(each, case, drawn, marks) for each in (THROUGHPUT, CPU, MEMORY)),
            _waits(drawn, marks),
            *(bars(each, case, drawn, marks) for each in (STALL, FIRST)),
            _over_time(drawn, marks, "rates", "throughput over time", "samples/s", _rates),
            _over_time(drawn, marks, "memories", "memory over time", "GiB", _memories),
        ]
    return [plot for plot in found if plot is not None]


def _waits(drawn: Sequence[SystemFigures], marks: Marks) -> Plot | None:
    """From the median wait to the 99th percentile, on a logarithmic axis."""
    rows = [
        (one, one.wait_p50_ms, one.wait_p99_ms)
        for one in drawn
        if one.wait_p50_ms is not None and one.wait_p99_ms is not None and one.wait_p99_ms > 0
    ]
    if not rows:
        return None
    # A logarithmic axis has no 0: waits below a microsecond are drawn as one microsecond.
    ends = [(max(p50, 0.001), max(p99, 0.001)) for _, p50, p99 in rows]
    places = [len(rows) - 1 - place for place in range(len(rows))]
    colours = [marks[one.result.name].colour for one, _, _ in rows]
    told = [
        escaped(f"{one.result.title}: p50 {cells.number(p50)} ms, p99 {cells.number(p99)} ms")
        for one, p50, p99 in rows
    ]
    bar = {
        "type": "scatter",
        "mode": "lines",
        "x": [each for p50, p99 in ends for each in (shortened(p50), shortened(p99), None)],
        "y": [each for place in places for each in (place, place, None)],
        "line": {"color": "--line", "width": 3},
        "hoverinfo": "skip",
    }
    dots = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [shortened(pair[end]) for pair in ends],
            "y": places,
            "customdata": told,
            "hovertemplate": "%{customdata}<extra></extra>",
            "marker": {
                "color": colours,
                "size": 10,
                "symbol": ("circle", "circle-open")[end],
                "line": {"width": 2},
            },
        }
        for end in (0, 1)
    ]
    labels = [f"{cells.number(p50, 2)} / {cells.number(p99, 2)}" for _, p50, p99 in rows]
    across = log_axis("ms (filled: p50, open: p99)", [each for pair in ends for each in pair])
    made = layout(across, names([cells.label(one) for one, _, _ in rows]), labels)
    about = f"wait for a batch, p50 and p99, of {len(rows)} systems, ms"
    height = height_of(len(rows))
    heading = "wait for a batch"
    return Plot("waits", heading, about, height, {"data": [bar, *dots, anchor()], "layout": made})


Points = list[tuple[float, float]]


def _over_time(
    drawn: Sequence[SystemFigures],
    marks: Marks,
    kind: str,
    heading: str,
    unit: str,
    points_of: Callable[[Mapping[str, Any]], Points],
) -> Plot | None:
    """One line per system, for the round with the median speed."""
    lines = []
    # Dataplane is drawn last, so that it lies above the others.
    for one in sorted(drawn, key=lambda one: one.is_ours):
        points = points_of(one.typical or {})
        mark = marks[one.result.name]
        if points:
            lines.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": escaped(one.result.title),
                    "meta": one.result.name,
                    "x": [shortened(at) for at, _ in points],
                    "y": [shortened(value) for _, value in points],
                    "line": {"color": mark.colour, "dash": mark.dash, "width": mark.width},
                    "hovertemplate": "%{fullData.name}: %{y:.3s}<extra></extra>",
                }
            )
    if not lines:
        return None
    up = axis(unit)
    made = layout(axis("s"), up) | {"hovermode": "closest"}
    about = f"{heading} of {len(lines)} systems, {unit}"
    return Plot(
        kind, heading, about, _TIME_HEIGHT, {"data": lines, "layout": made}, is_over_time=True
    )


def _rates(trial: Mapping[str, Any]) -> Points:
    return _points(trial.get("timeline"), 1.0)


def _memories(trial: Mapping[str, Any]) -> Points:
    return _points(trial.get("memory"), 2**30)


def _points(told: object, unit: float) -> Points:
    """The first two numbers of each entry, as far as they are numbers."""
    found = []
    for entry in told if isinstance(told, Sequence) else ():
        if isinstance(entry, Sequence) and len(entry) >= 2:
            at, value = known(entry[0]), known(entry[1])
            if at is not None and value is not None:
                found.append((at, value / unit))
    return found
