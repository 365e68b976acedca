"""Computes medians, spreads and ratios from the trials of a report. Pure; no text.

A figure of a system in a case is the median of its rounds. A ratio is computed within each round,
and its median is reported, so that load which slows a whole round slows both sides. A ratio above 1
means that Dataplane was faster. Unknown values are None: for a system that refused, failed or was
not measured, for a figure that the mode does not give, and for a ratio between systems that did not
deliver the same samples.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dataplane_bench.model import BenchCase, Mode, Workload
from dataplane_bench.peers.base import HARNESS, OURS
from dataplane_bench.report.results import (
    BenchReport,
    CaseResult,
    Figures,
    HardwareBound,
    SystemResult,
)

NOISY = 0.15
"""The report mentions rounds this far from the median, as a share of it."""
OTHERS = 0.1
"""The report mentions it if other processes took more than this share of the machine's cores."""
STEAL = 0.02
"""The same for the hypervisor (steal time)."""
HEADROOM = 3.0
"""The report mentions it if the harness alone is less than this many times as fast as the fastest
system."""

Rounds = Mapping[int, float]
"""One value for each round that has one."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the rounds, in their order."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    @property
    def relative(self) -> float | None:
        """The largest distance of a round from the median, as a share of it; None for one round."""
        if len(self.values) < 2 or not self.median:
            return None
        return max(self.high - self.median, self.median - self.low) / abs(self.median)


class Standing(enum.StrEnum):
    """The outcome of a system in a case."""

    MEASURED = "measured"
    REFUSED = "refused"
    FAILED = "failed"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class SystemFigures:
    """One system in one case. `reason` says why it was not measured, "" if it was.

    `seconds` is how long a trial read, in the mode EPOCH.
    Systems are sorted and compared by `speed`: samples a second, or starts a second. `typical` is
    the trial with the median speed, for plots over time.
    """

    result: SystemResult
    standing: Standing
    reason: str = ""
    speed: Spread | None = None
    samples_per_s: Spread | None = None
    first_batch_s: Spread | None = None
    seconds: float | None = None
    gb_per_s: float | None = None
    of_bound: float | None = None
    ratio: Spread | None = None
    by: str = ""
    typical: Figures | None = None

    def middle(self, name: str) -> float | None:
        """The median over the rounds of a figure of trials; results.py lists them."""
        return _middle(self.result, name)

    @property
    def main(self) -> Spread | None:
        """The main figure of its case: samples/s, or seconds to the first batch."""
        return self.samples_per_s or self.first_batch_s

    @property
    def is_ours(self) -> bool:
        return self.result.name == OURS

    @property
    def is_harness(self) -> bool:
        return self.result.name == HARNESS

    @property
    def is_peer(self) -> bool:
        return not (self.is_ours or self.is_harness)

    @property
    def has_spread(self) -> bool:
        """Whether there is more than one round."""
        return self.main is not None and len(self.main.values) > 1

    @property
    def is_noisy(self) -> bool:
        return self.main is not None and (self.main.relative or 0.0) > NOISY


@dataclass(frozen=True, slots=True)
class CaseFigures:
    """One case. `measured` is sorted by speed, the harness at the end; `absent` are the others.

    `bounds` has the tightest one first. `best_peer` is the fastest one with the same samples.
    """

    scenario: str
    question: str
    case: BenchCase
    workload: Workload | None
    measured: tuple[SystemFigures, ...]
    absent: tuple[SystemFigures, ...]
    bounds: tuple[tuple[str, Spread], ...]
    load: Mapping[str, float]
    sample_bytes: float | None = None

    @property
    def is_busy(self) -> bool:
        """Whether other processes used the machine while the case was measured."""
        return is_busy(self.load)

    @property
    def is_start(self) -> bool:
        """Whether the case measures seconds until a first batch instead of rates."""
        return is_start(self.case)

    @property
    def systems(self) -> tuple[SystemFigures, ...]:
        return self.measured + self.absent

    @property
    def ours(self) -> SystemFigures | None:
        return next((system for system in self.measured if system.is_ours), None)

    @property
    def harness(self) -> SystemFigures | None:
        return next((system for system in self.measured if system.is_harness), None)

    @property
    def best_peer(self) -> SystemFigures | None:
        peers = (
            system for system in self.measured if system.is_peer and is_comparable(system.result)
        )
        return next(peers, None)

    @property
    def harness_headroom(self) -> float | None:
        """The harness's rate alone, divided by the fastest system's; None if a trainer computes,
        since that limits the rate.
        """
        harness, fastest = self.harness, self.measured[:1]
        if self.case.step_ms or not fastest or fastest[0].is_harness:
            return None
        if harness is None or harness.speed is None or fastest[0].speed is None:
            return None
        return harness.speed.median / fastest[0].speed.median


def is_busy(load: Mapping[str, float]) -> bool:
    """Whether this load by other processes (see `CaseResult`) is worth a warning."""
    return load.get("others", 0.0) > OTHERS or load.get("steal", 0.0) > STEAL


def is_start(case: BenchCase) -> bool:
    """Whether its figure is the seconds until a first batch."""
    return case.mode in (Mode.FIRST, Mode.RESUME, Mode.RESTART)


def is_comparable(result: SystemResult) -> bool:
    """Whether its samples are not known to differ from the source's."""
    return result.same_samples is not False


def case_figures(report: BenchReport) -> tuple[CaseFigures, ...]:
    """Every case of the report, in its order."""
    workloads = {workload.name: workload for workload in report.workloads}
    return tuple(
        _case(
            *(scenario.name, scenario.question, case, workloads.get(case.case.workload)),
            known(report.sample_bytes.get(case.case.workload)),
        )
        for scenario in report.scenarios
        for case in scenario.cases
    )


def _case(
    scenario: str,
    question: str,
    result: CaseResult,
    workload: Workload | None,
    sample_bytes: float | None,
) -> CaseFigures:
    bounds = sorted(
        (bound for bound in result.bounds if spread(bound.samples_per_s)),
        key=lambda bound: statistics.median(_finite(bound.samples_per_s)),
    )
    ours = next((system for system in result.systems if system.name == OURS), None)
    systems = [
        _system(system, ours, result.case, bounds[0] if bounds else None, sample_bytes)
        for system in result.systems
    ]
    measured = [system for system in systems if system.speed is not None]
    measured.sort(
        key=lambda system: (system.is_harness, -system.speed.median if system.speed else 0.0)
    )
    return CaseFigures(
        scenario=scenario,
        question=question,
        case=result.case,
        workload=workload,
        measured=tuple(measured),
        absent=tuple(system for system in systems if system.speed is None),
        bounds=tuple((bound.name, Spread(_finite(bound.samples_per_s))) for bound in bounds),
        load={name: value for name, share in result.load.items() if (value := known(share))},
        sample_bytes=sample_bytes,
    )


def _system(
    result: SystemResult,
    ours: SystemResult | None,
    case: BenchCase,
    bound: HardwareBound | None,
    sample_bytes: float | None,
) -> SystemFigures:
    standing, reason = _standing(result)
    speeds = speeds_of(result, case)
    if standing is not Standing.MEASURED or not speeds:
        standing = standing if reason else Standing.NOT_MEASURED
        return SystemFigures(result, standing, reason or "no round was completed")
    rates = {} if is_start(case) else speeds
    limits = dict(enumerate(bound.samples_per_s)) if bound else {}
    rate = spread(rates.values())
    ratio = None
    if ours is not None and result.name not in (OURS, HARNESS):
        ratio = ratio_of(ours, result, case)
    return SystemFigures(
        result,
        standing,
        speed=spread(speeds.values()),
        samples_per_s=rate,
        first_batch_s=spread(_rounds(result, "first_batch_s").values()),
        seconds=_middle(result, "seconds") if case.mode is Mode.EPOCH else None,
        gb_per_s=rate.median * sample_bytes / 1e9 if rate and sample_bytes else None,
        of_bound=_median(_quotients(rates, limits).values()),
        ratio=ratio,
        by=next((str(trial["by"]) for trial in result.trials if trial.get("by")), ""),
        typical=_typical(result, speeds),
    )


def _standing(result: SystemResult) -> tuple[Standing, str]:
    if result.refused:
        return Standing.REFUSED, result.refused
    if result.error:
        return Standing.FAILED, result.error
    return Standing.MEASURED, ""


def speeds_of(result: SystemResult, case: BenchCase) -> Rounds:
    """Samples, or starts, a second in each round; none for a system that refused or failed."""
    if result.refused or result.error:
        return {}
    if is_start(case):
        seconds = _rounds(result, "first_batch_s")
        return {at: 1 / value for at, value in seconds.items() if value > 0}
    return _rounds(result, "samples_per_s")


def ratio_of(ours: SystemResult, other: SystemResult, case: BenchCase) -> Spread | None:
    """Our speed divided by `other`'s, in each round that both have."""
    if not (is_comparable(ours) and is_comparable(other)):
        return None
    return spread(_quotients(speeds_of(ours, case), speeds_of(other, case)).values())


def spread(values: Iterable[object]) -> Spread | None:
    """The spread of the values that are known."""
    known_values = _finite(values)
    return Spread(known_values) if known_values else None


def known(value: object) -> float | None:
    """A finite number, or None: a report may come from anywhere."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _finite(values: Iterable[object]) -> tuple[float, ...]:
    return tuple(number for value in values if (number := known(value)) is not None)


def _median(values: Iterable[object]) -> float | None:
    figure = spread(values)
    return figure.median if figure else None


def _middle(result: SystemResult, name: str) -> float | None:
    return _median(_rounds(result, name).values())


def _rounds(result: SystemResult, name: str) -> dict[int, float]:
    """The figure of each round that has it. A trial without a round number gets its index."""
    of_rounds = {}
    for place, trial in enumerate(result.trials):
        number = known(trial.get(name))
        if number is not None:
            of_rounds[_round_of(trial, place)] = number
    return of_rounds


def _round_of(trial: Mapping[str, Any], place: int) -> int:
    number = known(trial.get("round"))
    return place if number is None else int(number)


def _quotients(above: Rounds, below: Mapping[int, object]) -> dict[int, float]:
    quotients = {}
    for at, value in above.items():
        divisor = known(below.get(at))
        if divisor:
            quotients[at] = value / divisor
    return quotients


def _typical(result: SystemResult, speeds: Rounds) -> Figures:
    middle = statistics.median_low(speeds.values())
    return next(
        trial
        for place, trial in enumerate(result.trials)
        if speeds.get(_round_of(trial, place)) == middle
    )
