"""The results of a benchmark run: frozen values, written to and read from one JSON file.

A trial's figures are a mapping with these keys (those that its mode gives):

samples_per_s, sample_count, seconds   of the window, or of the epoch
cpu_s, cpu_s_per_million               CPU seconds of all its processes; the same per 10^6 samples
server_cpu_s, server_cpu_s_per_million the same of the S3 server and the delay before it
first_batch_s                          from opening the loader to its first batch
stall_share, step_ms                   share of the time that a trainer with such a step waits
wait_share, wait_p50_ms, wait_p99_ms   of the window: waiting for batches
trainer_cpu_share                      share of a core that the trainer's loading thread used
timeline                               [[s, samples/s], ...]
memory, memory_peak                    [[s, PSS bytes, of which not pages of files], ...]; bytes
round                                  which, from 0: figures are compared within a round
by                                     of a resume: "state", or "replay" where there is no state
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dataplane.model.errors import ConfigError
from dataplane_bench.model import BenchCase, Settings, Workload, from_plain, json_line

VERSION = 1

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tried:
    """One choice of settings in the sweep: its rate, or why it failed."""

    settings: Settings
    samples_per_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class SystemResult:
    """One system in one case. `refused`: why it does not take part. `error`: why it failed.

    `trials` has one entry per round. `same_samples` is None if it was not checked (the harness).
    `facts` are of the epoch that was checked: "shares" of a mixture's sources, "waste" of packs.
    """

    name: str
    title: str
    version: str = ""
    describes: str = ""
    settings: Settings = field(default_factory=dict)
    sweep: tuple[Tried, ...] = ()
    digest: str = ""
    same_samples: bool | None = None
    facts: Figures = field(default_factory=dict)
    trials: tuple[Figures, ...] = ()
    refused: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class HardwareBound:
    """A limit of the hardware in a case, measured in the same run: one figure per round."""

    name: str
    samples_per_s: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """All systems in one case. `load` is other load during its rounds, as shares of the time of all
    cores: "others" (processes outside this run), "steal" (the hypervisor).
    """

    case: BenchCase
    systems: tuple[SystemResult, ...]
    bounds: tuple[HardwareBound, ...] = ()
    load: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """All cases of one scenario."""

    name: str
    question: str
    bound: str
    cases: tuple[CaseResult, ...]


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A whole run.

    `machine`: cpu, cores, memory_bytes, kernel, python, storage. `versions`: of every package that
    took part, by system. `sample_bytes`: delivered bytes of a sample, by workload.
    `bounds`: what the machine can do ("memcpy_gb_per_s", ...), one figure a round. `missing`:
    systems that did not take part, and why ("not installed: dataplane bench --install-peer ray").
    """

    created: str
    command: str
    machine: Mapping[str, Any]
    versions: Mapping[str, Mapping[str, str]]
    options: Mapping[str, Any]
    workloads: tuple[Workload, ...]
    sample_bytes: Mapping[str, float | None]
    bounds: Mapping[str, tuple[float | None, ...]]
    scenarios: tuple[ScenarioResult, ...]
    missing: Mapping[str, str]
    seconds: float | None
    version: int = VERSION


def write(report: BenchReport, path: Path) -> None:
    """Write it as JSON.   Raises:  ConfigError: the file cannot be written."""
    try:
        path.write_text(to_json(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def to_json(report: BenchReport) -> str:
    """JSON. Numbers that it cannot express (NaN, infinity) become null."""
    return json.dumps(json.loads(json_line(report), parse_constant=lambda _: None), indent=1)


def read(path: Path) -> BenchReport:
    """Raises:  ConfigError: no such file, not a report, or of another version."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a report of `dataplane bench`: {error}") from error
    return from_json(plain, str(path))


def from_json(plain: object, name: str) -> BenchReport:
    """A report from the JSON that `to_json` wrote; `name` names it in errors.

    Raises:  ConfigError: it is not a report, or has another version.
    """
    version = plain.get("version") if isinstance(plain, dict) else None
    if isinstance(version, int) and version != VERSION:
        raise ConfigError(
            f"{name} is a report of version {version}, but this release reads version {VERSION}"
        )
    try:
        return from_plain(BenchReport, plain)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name} is not a report of `dataplane bench`: {error}") from error
