"""Text of figures: cells and headings of every table, in a terminal or on a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dataplane.commands.output import approximate_bytes
from dataplane_bench.model import Settings
from dataplane_bench.report.figures import CaseFigures, Spread, SystemFigures, is_comparable

NOTHING = "-"


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits: 0.0123, 1.23, 12.3, 1,234."""
    if value is None:
        return NOTHING
    if not value:
        return "0"
    if abs(value) < 0.00095:
        return f"{value:.1g}"
    value = round(value, digits - 1 - math.floor(math.log10(abs(value))) + (3 - digits))
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(places, 0), 4)}f}"


def rate(value: float | None) -> str:
    """A figure a second: 412, 41.2k, 1.23M."""
    if value is None:
        return NOTHING
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999,600 is 1.00M, not 1,000k.
        if abs(value) >= size * 0.9995:
            return number(value / size) + unit
    return number(value)


def share(value: float | None) -> str:
    """0.034 -> "3%"; below one percent, one more digit."""
    if value is None:
        return NOTHING
    return f"{value * 100:.1f}%" if 0 < value < 0.0095 else f"{value * 100:.0f}%"


def times(value: float | None) -> str:
    """A ratio: "0.85x"."""
    return NOTHING if value is None else f"{number(value, 3 if value >= 0.995 else 2)}x"


def off(spread: Spread | None) -> str:
    """The largest distance of a round from the median: "±3%"; "" for one round."""
    relative = spread.relative if spread else None
    return "" if relative is None else f"±{share(relative)}"


def size(value: float | None) -> str:
    """Bytes: "1.2 GiB"."""
    return NOTHING if value is None else approximate_bytes(value)


def gibibytes(value: float | None) -> str:
    """Bytes as a number of GiB."""
    return NOTHING if value is None else number(value / 2**30, 2)


def median(spread: Spread | None) -> float | None:
    """The median of a spread that may be unknown."""
    return spread.median if spread else None


def span(spread: Spread | None, word: Callable[[float | None], str]) -> str:
    """Median and range: "3.1x (2.9x to 3.4x)"."""
    if spread is None:
        return NOTHING
    if len(spread.values) < 2:
        return word(spread.median)
    return f"{word(spread.median)} ({word(spread.low)} to {word(spread.high)})"


def settings_text(settings: Settings) -> str:
    """{"num_workers": 2} -> "num_workers 2"."""
    text = ", ".join(f"{name} {value}" for name, value in settings.items())
    return text or "its defaults"


@dataclass(frozen=True, slots=True)
class Heading:
    """A column of a case's table. `short` may be wrapped at its spaces in a terminal."""

    short: str
    long: str
    meaning: str
    cell: Callable[[SystemFigures], str]


def _ratio(system: SystemFigures) -> str:
    return times(median(system.ratio)) if system.is_peer else ""


_RATIO = Heading(
    "ratio",
    "Dataplane is",
    "Dataplane's rate divided by this system's, in the same round; below 1, Dataplane was slower",
    _ratio,
)
_OFF = Heading(
    "±",
    "±",
    "largest distance of a round from the median",
    lambda system: off(system.main),
)
RATES = (
    Heading(
        "samples /s",
        "samples/s",
        "median of the rounds, all ranks and jobs together",
        lambda system: rate(median(system.samples_per_s)),
    ),
    _OFF,
    Heading(
        "GB/s",
        "GB/s",
        "the same in bytes that the trainer receives, after decoding",
        lambda system: number(system.gb_per_s, 2),
    ),
    Heading(
        "x of bound",
        "x of the bound",
        "samples/s divided by what the hardware allows, measured in the same rounds",
        lambda system: number(system.of_bound, 2),
    ),
    Heading(
        "CPU s /M",
        "CPU-s per M samples",
        "CPU seconds per million samples, of all its processes, including daemons and workers",
        lambda system: number(system.middle("cpu_s_per_million")),
    ),
    Heading(
        "server CPU s /M",
        "S3 server's CPU-s per M samples",
        "CPU seconds of the S3 server and the delay before it, per million samples; they count to "
        "no loader",
        lambda system: number(system.middle("server_cpu_s_per_million")),
    ),
    Heading(
        "peak GiB",
        "peak memory, GiB",
        "PSS summed over all its processes: what they share counts once",
        lambda system: gibibytes(system.middle("memory_peak")),
    ),
    Heading(
        "first s",
        "first batch, s",
        "from opening the loader to its first batch",
        lambda system: number(median(system.first_batch_s), 2),
    ),
    Heading(
        "ran s",
        "ran for, s",
        "how long it read, its start included",
        lambda system: number(system.seconds, 2),
    ),
    Heading(
        "stall",
        "stall share",
        "share of its time that a trainer waits, if its step takes as long as given in the line "
        "above",
        lambda system: share(system.middle("stall_share")),
    ),
    Heading(
        "p99 ms",
        "p99 wait, ms",
        "wait for a batch that one batch in a hundred exceeds",
        lambda system: number(system.middle("wait_p99_ms"), 2),
    ),
    _RATIO,
)
TRAINER = Heading(
    "loop CPU",
    "trainer's own thread",
    "share of a core that the trainer's loading thread used, of all ranks and jobs together",
    lambda system: share(system.middle("trainer_cpu_share")),
)
"""Shown only if there is room for it."""
STARTS = (
    Heading(
        "first s",
        "first batch, s",
        "from opening the loader to its first batch, median of the rounds",
        lambda system: number(median(system.first_batch_s), 2),
    ),
    _OFF,
    Heading(
        "by",
        "by",
        "how it resumed: from its state, or by a replay of all batches before",
        lambda system: system.by or NOTHING,
    ),
    Heading(
        "CPU s",
        "CPU s",
        "CPU seconds of all its processes until the first batch",
        lambda system: number(system.middle("cpu_s")),
    ),
    Heading(
        "peak GiB",
        "peak memory, GiB",
        "PSS summed over all its processes: what they share counts once",
        lambda system: gibibytes(system.middle("memory_peak")),
    ),
    _RATIO,
)


def headings(case: CaseFigures, *, are_wide: bool = False) -> tuple[Heading, ...]:
    """The columns that have figures in this case, after the system's name."""
    columns = STARTS if case.is_start else RATES
    if are_wide:
        columns = (*columns[:-1], TRAINER, columns[-1])
    always = (columns[0], _RATIO)
    return tuple(
        heading
        for heading in columns
        if heading in always
        or any(heading.cell(system) not in (NOTHING, "") for system in case.measured)
    )


def title(case: CaseFigures) -> str:
    """ "tokens · local" """
    return f"{case.scenario} · {case.case.label}"


def label(system: SystemFigures) -> str:
    """A system's name in a table; "!" marks systems whose samples differ from the source's."""
    return system.result.title if is_comparable(system.result) else f"{system.result.title} !"


def figure(case: CaseFigures, system: SystemFigures | None) -> str:
    """A system's first figure in a case, with its unit: "412k/s", "0.31 s"."""
    if system is None:
        return NOTHING
    if case.is_start:
        return f"{number(median(system.first_batch_s))} s"
    return f"{rate(median(system.samples_per_s))}/s"


SUMMARY = ("case", "Dataplane", "best peer", "its", "Dataplane is", "range", "x of bound")


def summary(cases: Iterable[CaseFigures]) -> list[tuple[str, ...]]:
    """One line per case: Dataplane, the best peer, and their ratio."""
    return [_summary(case) for case in cases]


def _summary(case: CaseFigures) -> tuple[str, ...]:
    ours, peer = case.ours, case.best_peer
    ratio = peer.ratio if peer else None
    spans = ratio is not None and len(ratio.values) > 1
    return (
        title(case),
        figure(case, ours),
        peer.result.title if peer else NOTHING,
        figure(case, peer),
        times(median(ratio)),
        f"{times(ratio.low)}-{times(ratio.high)}" if ratio and spans else NOTHING,
        number(ours.of_bound, 2) if ours else NOTHING,
    )
