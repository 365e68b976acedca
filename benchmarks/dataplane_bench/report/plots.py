"""The plots of a page, as Plotly's JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataplane_bench.report import cells
from dataplane_bench.report.axes import (
    Mark,
    Marks,
    Plot,
    anchor,
    axis,
    escaped,
    height_of,
    layout,
    line,
    log_axis,
    names,
    note,
    shortened,
)
from dataplane_bench.report.figures import CaseFigures, Spread, SystemFigures, known

BOUND_SHOWN = 4.0
"""A bound this many times beyond the fastest system is drawn as a line at the edge; at its true
place it would leave no room for the bars."""


def _times(figure: float | None, factor: float) -> float | None:
    return None if figure is None else figure * factor


@dataclass(frozen=True, slots=True)
class BarScale:
    """The quantity that bars show. `label` is the text beside a bar of that height."""

    kind: str
    heading: str
    unit: str
    figure: Callable[[SystemFigures], Spread | float | None]
    label: Callable[[SystemFigures, Spread], str] = lambda _, spread: cells.number(spread.median)


THROUGHPUT = BarScale(
    "throughput",
    "throughput",
    "samples/s",
    lambda system: system.samples_per_s,
    lambda _, spread: f"{cells.rate(spread.median)} {cells.off(spread)}".strip(),
)
FIRST = BarScale(
    "first",
    "time to the first batch",
    "s",
    lambda system: system.first_batch_s,
    lambda system, spread: f"{cells.number(spread.median)} {system.by}".strip(),
)
CPU = BarScale(
    "cpu",
    "CPU per million samples",
    "CPU seconds, all processes",
    lambda system: system.middle("cpu_s_per_million"),
)
MEMORY = BarScale(
    "memory",
    "peak memory",
    "GiB (PSS, all processes)",
    lambda system: _times(system.middle("memory_peak"), 2**-30),
)
STALL = BarScale(
    "stall",
    "stall of a trainer that computes",
    "% of its time",
    lambda system: _times(system.middle("stall_share"), 100),
)


def bars(
    measure: BarScale, case: CaseFigures, drawn: Sequence[SystemFigures], marks: Marks
) -> Plot | None:
    """One bar per system; if a figure is a spread, whiskers and one dot per round."""
    rows: list[tuple[SystemFigures, Spread]] = []
    for system in drawn:
        spread = measure.figure(system)
        if spread is not None:
            rows.append((system, spread if isinstance(spread, Spread) else Spread((spread,))))
    if not rows:
        return None
    traces = []
    for place, (system, spread) in enumerate(rows):
        text = f"{system.result.title}: {cells.span(spread, cells.number)} {measure.unit}"
        mark = marks[system.result.name]
        traces.append(_bar(system.result.name, text, len(rows) - 1 - place, spread, mark))
    dots = [_dots(len(rows) - 1 - place, spread) for place, (_, spread) in enumerate(rows)]
    labels = [measure.label(system, spread) for system, spread in rows]
    made = layout(axis(measure.unit), names([cells.label(system) for system, _ in rows]), labels)
    made["barmode"] = "overlay"
    if measure is THROUGHPUT:
        _add_bounds(made, case, max(spread.high for _, spread in rows))
    return Plot(
        measure.kind,
        measure.heading,
        f"{measure.heading} of {len(rows)} systems, {measure.unit}",
        height_of(len(rows)),
        {"data": [*traces, *filter(None, dots), anchor()], "layout": made},
    )


def _bar(name: str, text: str, place: int, spread: Spread, mark: Mark) -> dict[str, Any]:
    pattern = {"shape": mark.pattern, "fillmode": "overlay", "fgcolor": "--card", "solidity": 0.2}
    return {
        "type": "bar",
        "orientation": "h",
        "meta": name,
        "x": [shortened(spread.median)],
        "y": [place],
        "width": 0.66,
        "customdata": [escaped(text)],
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"color": mark.colour, "pattern": pattern},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [shortened(spread.high - spread.median)],
            "arrayminus": [shortened(spread.median - spread.low)],
            "color": "--ink",
            "thickness": 1.2,
            "width": 4,
            "visible": len(spread.values) > 1,
        },
    }


def _dots(place: int, spread: Spread) -> dict[str, Any] | None:
    if len(spread.values) < 2:
        return None
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [shortened(value) for value in spread.values],
        "y": [place] * len(spread.values),
        "hoverinfo": "skip",
        "marker": {"color": "--ink", "size": 5, "line": {"color": "--card", "width": 1}},
    }


def _add_bounds(made: dict[str, Any], case: CaseFigures, highest: float) -> None:
    """One line per bound; if all are far away, only the tightest one, at the edge."""
    shown = [bound for bound in case.bounds if bound[1].median <= BOUND_SHOWN * highest]
    made["shapes"] = [line(limit.median, "--ink", "dash") for _, limit in shown]
    made["annotations"] = [
        note(f"bound: {name} {cells.rate(limit.median)}", limit.median, row)
        for row, (name, limit) in enumerate(shown)
    ]
    if case.bounds and not shown:
        name, limit = case.bounds[0]
        times = f", {cells.times(limit.median / highest)} the fastest" if highest else ""
        text = f"bound: {name} {cells.rate(limit.median)}{times} →"
        made["annotations"] = [note(text)]
        made["shapes"] = [line(1.0, "--ink", "dot") | {"xref": "paper"}]
    most = max([highest, *(limit.median for _, limit in shown)])
    made["xaxis"]["range"] = [0, shortened(most * 1.06)]
    made["margin"]["t"] = 8 + 15 * len(made["annotations"])


_TIME_HEIGHT = 260


def overview(cases: Sequence[CaseFigures], marks: Marks) -> Plot | None:
    """The ratio to each peer in each case, in one picture."""
    rows = [case for case in cases if any(system.ratio for system in case.measured)]
    if not rows:
        return None
    peers = {
        system.result.name: system.result.title
        for case in rows
        for system in case.measured
        if system.ratio
    }
    lines: list[dict[str, Any]] = []
    for name, title in peers.items():
        dots = [
            (len(rows) - 1 - place, system.ratio, case)
            for place, case in enumerate(rows)
            for system in case.measured
            if system.result.name == name and system.ratio is not None
        ]
        lines.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": escaped(title),
                "meta": name,
                "x": [shortened(ratio.median) for _, ratio, _ in dots],
                "y": [row for row, _, _ in dots],
                "customdata": [
                    escaped(f"{cells.title(case)}, {title}: {cells.span(ratio, cells.times)}")
                    for _, ratio, case in dots
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
    ratios = [x for drawn in lines for x in drawn["x"]]
    across = log_axis("times the peer's speed", [*ratios, 1.0], "x")
    made = layout(across, names([cells.title(case) for case in rows])) | {
        "shapes": [line(1.0, "--ours", "solid")],
    }
    about = f"Ratios of Dataplane to {len(peers)} peers in {len(rows)} cases."
    height = height_of(len(rows))
    return Plot("overview", "", about, height, {"data": lines, "layout": made})


def of_case(case: CaseFigures, marks: Marks) -> list[Plot]:
    """All plots of a case for which it has figures."""
    drawn = [system for system in case.measured if not system.is_harness]
    if not drawn:
        return []
    if case.is_start:
        plots = [bars(FIRST, case, drawn, marks)]
    else:
        plots = [
            *(bars(scale, case, drawn, marks) for scale in (THROUGHPUT, CPU, MEMORY)),
            _waits(drawn, marks),
            *(bars(scale, case, drawn, marks) for scale in (STALL, FIRST)),
            _over_time(drawn, marks, "rates", "throughput over time", "samples/s", _rates),
            _over_time(drawn, marks, "memories", "memory over time", "GiB", _memories),
        ]
    return [plot for plot in plots if plot is not None]


def _waits(drawn: Sequence[SystemFigures], marks: Marks) -> Plot | None:
    """From the median wait to the 99th percentile, on a logarithmic axis."""
    rows = [
        (system, p50, p99)
        for system in drawn
        if (p50 := system.middle("wait_p50_ms")) is not None
        and (p99 := system.middle("wait_p99_ms"))
    ]
    if not rows:
        return None
    # A logarithmic axis has no 0: waits below a microsecond are drawn as one microsecond.
    ends = [(max(p50, 0.001), max(p99, 0.001)) for _, p50, p99 in rows]
    places = [len(rows) - 1 - place for place in range(len(rows))]
    colours = [marks[system.result.name].colour for system, _, _ in rows]
    texts = [
        escaped(f"{system.result.title}: p50 {cells.number(p50)} ms, p99 {cells.number(p99)} ms")
        for system, p50, p99 in rows
    ]
    bar = {
        "type": "scatter",
        "mode": "lines",
        "x": [x for p50, p99 in ends for x in (shortened(p50), shortened(p99), None)],
        "y": [y for place in places for y in (place, place, None)],
        "line": {"color": "--line", "width": 3},
        "hoverinfo": "skip",
    }
    dots = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [shortened(pair[end]) for pair in ends],
            "y": places,
            "customdata": texts,
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
    across = log_axis("ms (filled: p50, open: p99)", [wait_ms for pair in ends for wait_ms in pair])
    made = layout(across, names([cells.label(system) for system, _, _ in rows]), labels)
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
    for system in sorted(drawn, key=lambda system: system.is_ours):
        points = points_of(system.typical or {})
        mark = marks[system.result.name]
        if points:
            lines.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": escaped(system.result.title),
                    "meta": system.result.name,
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


def _points(entries: object, unit: float) -> Points:
    """The first two numbers of each entry, as far as they are numbers."""
    points = []
    for entry in entries if isinstance(entries, Sequence) else ():
        if isinstance(entry, Sequence) and len(entry) >= 2:
            at, value = known(entry[0]), known(entry[1])
            if at is not None and value is not None:
                points.append((at, value / unit))
    return points
