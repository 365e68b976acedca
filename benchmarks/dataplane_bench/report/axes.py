"""The parts of plots, in Plotly's format: axes, lines, notes, and the marks of systems.

All text is escaped, since Plotly interprets some HTML in labels. Colours are names of variables of
page.css, which page.js looks up: each is there for a light page and for a dark one.

Hues are from the palette of Okabe and Ito, made darker or lighter for bars if needed; people with
any colour vision can distinguish them, and a test checks this. Dataplane has a hue of its own.
There are more peers than hues, so two peers share one, and the second is dashed and hatched.

Source: M. Okabe, K. Ito, Color Universal Design, 2008.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataplane_bench.peers.base import HARNESS, OURS, PEERS

_ROW, _FRAME = 27, 66
_TICK = 4
_TICKS_MIN, _TICKS_MAX = 3, 8
_STEPS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8))
"""Possible ticks of a logarithmic axis within each decade, from few to many."""
_NAME_WIDTH = 24


@dataclass(frozen=True, slots=True)
class Plot:
    """`about` is a description for screen readers. `kind` names its place on the page."""

    kind: str
    heading: str
    about: str
    height: int
    drawing: Mapping[str, Any]
    is_over_time: bool = False


def height_of(rows: int) -> int:
    """Height in pixels of a plot with this many systems below each other."""
    return _FRAME + _ROW * rows


def note(text: str, x: float | None = None, row: int = 0) -> dict[str, Any]:
    at_edge = {"xref": "paper", "x": 1.0} if x is None else {"x": shortened(x)}
    return at_edge | {
        "text": escaped(text),
        "xanchor": "right",
        "yref": "paper",
        "y": 1,
        "yanchor": "bottom",
        "yshift": 15 * row,
        "showarrow": False,
        "font": {"size": 11, "color": "--muted"},
    }


def line(x: float, colour: str, dash: str) -> dict[str, Any]:
    ends = {"x0": shortened(x), "x1": shortened(x), "yref": "paper", "y0": 0, "y1": 1}
    return {"type": "line", **ends, "line": {"color": colour, "dash": dash, "width": 1.4}}


def layout(
    across: dict[str, Any], up: dict[str, Any], labels: Sequence[str] = ()
) -> dict[str, Any]:
    made: dict[str, Any] = {
        "autosize": True,
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "--ink"},
        "showlegend": False,
        "dragmode": False,
        "bargap": 0.3,
        "hoverlabel": {
            "bgcolor": "--card",
            "bordercolor": "--line",
            "font": {"color": "--ink", "size": 12},
        },
        "xaxis": across,
        "yaxis": up,
    }
    if labels:
        # The figures are in a separate column at the right, so that no whisker crosses them.
        same = {
            "overlaying": "y",
            "side": "right",
            "matches": "y",
            "ticktext": [*map(escaped, labels)],
        }
        made["yaxis2"] = up | same
    return made


def anchor() -> dict[str, Any]:
    """Plotly draws an axis only where a trace refers to it."""
    return {"type": "scatter", "x": [None], "y": [None], "yaxis": "y2", "hoverinfo": "skip"}


def axis(title: str) -> dict[str, Any]:
    """An axis that starts at 0."""
    return {
        "title": {"text": escaped(title), "standoff": 6, "font": {"size": 11, "color": "--muted"}},
        "gridcolor": "--grid",
        "zerolinecolor": "--line",
        "tickfont": {"color": "--muted", "size": 11},
        "fixedrange": True,
        "automargin": True,
        "nticks": 6,
        "ticks": "outside",
        "ticklen": _TICK,
        "tickcolor": "--muted",
        # 20k, but 0.5 and not 500m.
        "tickformat": "~s" if title == "samples/s" else "~r",
        "rangemode": "tozero",
    }


def log_axis(title: str, values: Sequence[float], unit: str = "") -> dict[str, Any]:
    """From the lowest value to the highest, with three to eight ticks at round numbers."""
    low, high = math.log10(min(values)), math.log10(max(values))
    room = max(0.04 * (high - low), 0.05)
    low, high = low - room, high + room
    ticks = _ticks(10**low, 10**high)
    return axis(title) | {
        "type": "log",
        "range": [shortened(low), shortened(high)],
        "tickvals": ticks,
        "tickangle": 0,
        "ticktext": [f"{tick:g}{unit}" for tick in ticks],
    }


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers of a logarithmic axis from `low` to `high`. Where even many of a decade are too
    few, the axis is short enough for even steps.
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in _STEPS:
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        shown = [tick for tick in ticks if low <= tick <= high]
        if len(shown) >= _TICKS_MIN:
            # Over many decades, every second or third of them.
            return shown[:: -(-len(shown) // _TICKS_MAX)]
    power = 10.0 ** math.floor(math.log10((high - low) / _TICKS_MIN))
    for step in (5 * power, 2 * power, power):
        ticks = [shortened(at * step) for at in range(math.ceil(low / step), int(high / step) + 1)]
        if len(ticks) >= _TICKS_MIN:
            break
    return ticks


def names(titles: Sequence[str]) -> dict[str, Any]:
    return {
        "tickvals": [len(titles) - 1 - place for place in range(len(titles))],
        "ticktext": [_folded(title) for title in titles],
        "range": [-0.6, len(titles) - 0.4],
        "showgrid": False,
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 5,
        "tickcolor": "rgba(0,0,0,0)",
        "tickfont": {"color": "--ink", "size": 12},
        "fixedrange": True,
        "automargin": True,
    }


def _folded(title: str) -> str:
    """A long name in two lines."""
    lines = textwrap.wrap(title, _NAME_WIDTH, break_long_words=False, max_lines=2)
    return "<br>".join(map(escaped, lines))


def escaped(text: str) -> str:
    return html.escape(
        "".join(character if character.isprintable() else " " for character in text), quote=False
    )


def shortened(value: float) -> float:
    """Five digits are more than a picture shows."""
    return float(f"{value:.5g}")


HUES = ("--blue", "--green", "--pink", "--olive", "--sky", "--slate")
_STYLES = (
    *(("solid", "", "circle"), ("dash", "/", "diamond")),
    *(("dashdot", "\\", "square"), ("longdash", "+", "star")),
)


@dataclass(frozen=True, slots=True)
class Mark:
    """`dash` is of lines, `pattern` of bars, `symbol` of dots, in Plotly's words."""

    colour: str
    dash: str = "solid"
    pattern: str = ""
    symbol: str = "circle"
    width: float = 1.8


Marks = Mapping[str, Mark]


def marks(names: Iterable[str]) -> Marks:
    """A mark for each system. A known system has the same mark in every report; unknown ones come
    after."""
    strangers = sorted(set(names) - {OURS, HARNESS, *PEERS})
    by_name = {name: _mark(place) for place, name in enumerate((*PEERS, *strangers))}
    by_name[OURS] = Mark("--ours", width=3.2)
    by_name[HARNESS] = Mark("--muted", "dot", ".", "x")
    return by_name


def _mark(place: int) -> Mark:
    more, place = divmod(place, 2 * len(HUES))
    dash, pattern, symbol = _STYLES[(2 * more + place % 2) % len(_STYLES)]
    return Mark(HUES[place // 2], dash, pattern, symbol)
