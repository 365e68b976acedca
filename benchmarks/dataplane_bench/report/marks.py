"""The appearance of each system in all plots: its colour, dash and pattern.

Hues are from the palette of Okabe and Ito, made darker or lighter for bars if needed; people with
any colour vision can distinguish them, and a test checks this. Dataplane has a hue of its own.
There are more peers than hues, so two peers share one, and the second is dashed and hatched.
Colours are names of variables of page.css, which has each twice: for a light page and for a dark
one.

Source: M. Okabe, K. Ito, Color Universal Design, 2008.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dataplane_bench.peers.registry import HARNESS, OURS, PEERS

HUES = ("--blue", "--green", "--pink", "--olive", "--sky", "--slate")


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
    found = {name: _mark(place) for place, name in enumerate((*PEERS, *strangers))}
    found[OURS] = Mark("--ours", width=3.2)
    found[HARNESS] = Mark("--muted", "dot", ".", "x")
    return found


def _mark(place: int) -> Mark:
    hue = HUES[place // 2 % len(HUES)]
    return Mark(hue, "dash", "/", "diamond") if place % 2 else Mark(hue)
