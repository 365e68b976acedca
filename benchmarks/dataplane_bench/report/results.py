"""What a run of the benchmark found: frozen values, written as one JSON file and read again.

A trial's figures are a mapping with these keys (those that its mode gives):

samples_per_s, sample_count, seconds   of the window, or of the epoch
cpu_s, cpu_s_per_million               CPU seconds of all its processes; the same per 10^6 samples
first_batch_s                          from opening the loader to its first batch
stall_share, step_ms                   share of the time that a trainer with such a step waits
wait_share, wait_p50_ms, wait_p99_ms   of the window: waiting for batches
trainer_cpu_share                      share of a core that the trainer's loading thread used
timeline                               [[s, samples/s], ...]
memory, memory_peak                    [[s, PSS bytes, of which not pages of files], ...]; bytes
by                                     of a resume: "state", or "replay" where there is no state
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataplane.errors import ConfigError
from dataplane_bench.model import Case, Settings, Workload
from dataplane_bench.trial import wire

VERSION = 1

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tried:
    """One choice of settings in the sweep: what it gave, or why it failed."""

    settings: Settings
    samples_per_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class SystemResult:
    """One system in one case. `refused`: it has no part in it, and why. `error`: it failed.

    `trials` has one entry a round. `same_samples` is None where nobody looked (the harness).
    """

    name: str
    title: str
    version: str = ""
    describes: str = ""
    settings: Settings = field(default_factory=dict)
    sweep: tuple[Tried, ...] = ()
    digest: str = ""
    same_samples: bool | None = None
    trials: tuple[Figures, ...] = ()
    refused: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Bound:
    """What the hardware allows in a case, measured in the same run: one figure a round."""

    name: str
    samples_per_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """All systems in one case."""

    case: Case
    systems: tuple[SystemResult, ...]
    bounds: tuple[Bound, ...] = ()


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """All cases of one question."""

    name: str
    question: str
    bound: str
    cases: tuple[CaseResult, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run.

    `machine`: cpu, cores, memory_bytes, kernel, python, storage. `versions`: of every package that
    took part, by system. `sample_bytes`: delivered bytes of a sample, by workload.
    `bounds`: what the machine can do ("memcpy_gb_per_s", ...), one figure a round. `missing`:
    systems that took no part, and why ("not installed: dataplane bench --install-peer ray").
    """

    created: str
    command: str
    machine: Mapping[str, Any]
    versions: Mapping[str, Mapping[str, str]]
    options: Mapping[str, Any]
    workloads: tuple[Workload, ...]
    sample_bytes: Mapping[str, float]
    bounds: Mapping[str, tuple[float, ...]]
    scenarios: tuple[ScenarioResult, ...]
    missing: Mapping[str, str]
    seconds: float
    version: int = VERSION


def write(report: Report, path: Path) -> None:
    """As JSON."""
    path.write_text(to_json(report))


def to_json(report: Report) -> str:
    return json.dumps(json.loads(wire.line(report)), indent=1)


def read(path: Path) -> Report:
    """Raises:  ConfigError: no such file, not a report, or of another version."""
    try:
        told = json.loads(path.read_text())
        version = told["version"]
        if version != VERSION:
            raise ConfigError(f"{path} is a report of version {version}, not {VERSION}")
        return _report(told)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a report of `dataplane bench`: {error!r}") from error


def _report(told: Mapping[str, Any]) -> Report:
    made = {
        "workloads": tuple(wire.workload_of(one) for one in told["workloads"]),
        "scenarios": tuple(_scenario(one) for one in told["scenarios"]),
        "bounds": {name: tuple(values) for name, values in told["bounds"].items()},
    }
    return Report(**{**told, **made})


def _scenario(told: Mapping[str, Any]) -> ScenarioResult:
    return ScenarioResult(**{**told, "cases": tuple(_case(one) for one in told["cases"])})


def _case(told: Mapping[str, Any]) -> CaseResult:
    return CaseResult(
        wire.case_of(told["case"]),
        tuple(_system(one) for one in told["systems"]),
        tuple(Bound(one["name"], tuple(one["samples_per_s"])) for one in told["bounds"]),
    )


def _system(told: Mapping[str, Any]) -> SystemResult:
    made = {
        "sweep": tuple(Tried(**one) for one in told["sweep"]),
        "trials": tuple(told["trials"]),
    }
    names = {one.name for one in dataclasses.fields(SystemResult)}
    return SystemResult(**{name: one for name, one in {**told, **made}.items() if name in names})
