"""One run of the benchmark: chooses cases, systems and samples, and returns a report."""

from __future__ import annotations

import compileall
import contextlib
import dataclasses
import datetime as dt
import functools
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.model.errors import ConfigError
from dataplane_bench.contest import Contest, Entry, Prepared, Show, not_installed
from dataplane_bench.environments import environment, held
from dataplane_bench.machine import Division, confined, divided, machine_facts
from dataplane_bench.model import BenchCase, Mode, StorageKind, Workload
from dataplane_bench.peers.base import HARNESS, OURS, PEERS
from dataplane_bench.report.results import BenchReport, CaseResult, ScenarioResult
from dataplane_bench.s3 import s3_storage
from dataplane_bench.scenarios import MADE, OTHERS, SCENARIOS, WORKLOADS, Scale, Scenario
from dataplane_bench.trial.launch import Timing
from dataplane_bench.workloads.generate import RECIPES, generated
from dataplane_bench.workloads.own import own

QUICK_PEERS = ("torch",)
"""The peers that need nothing but torch."""

ALL = "all"
_RUN = "run-"


@dataclass(frozen=True, slots=True)
class Options:
    """The user's choices. `scenarios` are "name" or "name/case"; none means every workload from
    local disk. Scenarios about ranks, jobs, starts and steps load `workload`. Cases that read from
    S3 run once for each of `s3_delay_ms`, and with `s3_tls` once more over TLS. Without a `scale`,
    samples are as many as `scale_of` says.
    """

    urls: tuple[str, ...] = ()
    peers: tuple[str, ...] = QUICK_PEERS
    scenarios: tuple[str, ...] = ()
    workload: str = "tokens"
    ranks: int = 4
    rounds: int = 3
    window_s: float = 1.5
    scale: float | None = None
    batch_size: int | None = None
    byte_limit: int = 1 << 30
    s3_delay_ms: tuple[float, ...] = (20.0,)
    s3_tls: bool = False


Chosen = tuple[Scenario, tuple[BenchCase, ...]]


def chosen(options: Options, workload: str) -> list[Chosen]:
    """The chosen scenarios, each with its chosen cases. For a user's own samples, `workload` is
    the name of the workload whose shape they have; otherwise it is "".

    Raises:  ConfigError: there is no such scenario or case.
    """
    names = options.scenarios
    if names == (ALL,):
        names = tuple(SCENARIOS)
    elif not names:
        names = tuple(f"{scenario.name}/local" for scenario in WORKLOADS)
    cases_by_name: dict[str, tuple[BenchCase, ...]] = {}
    for entry in names:
        name, _, label = entry.partition("/")
        cases = _cases(name, options, workload)
        wanted = tuple(case for case in cases if label in ("", case.label))
        if not wanted:
            labels = ", ".join(f"{name}/{case.label}" for case in cases)
            raise ConfigError(f"scenario {entry!r}: there are {labels}", field="scenario")
        wanted = tuple(line for case in wanted for line in _lines(case, options))
        cases_by_name[name] = tuple(dict.fromkeys((*cases_by_name.get(name, ()), *wanted)))
    if workload:
        shapes = {scenario.name for scenario in (*WORKLOADS, *MADE)} - {workload}
        cases_by_name = {name: cases for name, cases in cases_by_name.items() if name not in shapes}
    if not cases_by_name:
        raise ConfigError(
            f"these samples are {workload}: ask for that scenario, or one of "
            + ", ".join(scenario.name for scenario in OTHERS),
            field="scenario",
        )
    return [(SCENARIOS[name], cases) for name, cases in cases_by_name.items()]


def _possible(plan: Sequence[Chosen], systems: Sequence[Entry], show: Show) -> list[Chosen]:
    """The plan without the cases whose files belong to a peer that takes no part.

    Raises:  ConfigError: no case is left.
    """
    names = {"", *(entry.name for entry in systems)}
    missing = [case.files for _, cases in plan for case in cases if case.files not in names]
    possible = [
        (scenario, tuple(case for case in cases if case.files in names)) for scenario, cases in plan
    ]
    if missing:
        text = f"the files of a peer need it: --peers {','.join(dict.fromkeys(missing))}"
        if not any(cases for _, cases in possible):
            raise ConfigError(text, field="peers")
        show.note(text)
    return [(scenario, cases) for scenario, cases in possible if cases]


def _lines(case: BenchCase, options: Options) -> tuple[BenchCase, ...]:
    """The case at the end of each line to the S3 server; a case without the server as it is."""
    if case.store is StorageKind.LOCAL:
        return (case,)
    return tuple(
        dataclasses.replace(
            case,
            label=f"{case.label} {delay_ms:g} ms{' TLS' if over_tls else ''}",
            delay_ms=delay_ms,
            over_tls=over_tls,
        )
        for over_tls in ((False, True) if options.s3_tls else (False,))
        for delay_ms in dict.fromkeys(options.s3_delay_ms)
    )


def _cases(name: str, options: Options, workload: str) -> tuple[BenchCase, ...]:
    if name not in SCENARIOS:
        raise ConfigError(
            f"there is no scenario {name!r}; there are {', '.join(SCENARIOS)} and {ALL}",
            field="scenario",
        )
    scenario = SCENARIOS[name]
    default = name if scenario in (*WORKLOADS, *MADE) else options.workload
    return scenario.cases(Scale(workload or default, options.ranks))


def entries(names: Sequence[str]) -> tuple[list[Entry], dict[str, str]]:
    """The systems that take part, and the peers that do not, with the reason.

    Raises:  ConfigError: a requested peer is unknown or not installed.
    """
    unknown = [name for name in names if name not in (*PEERS, ALL) and ":" not in name]
    if unknown:
        raise ConfigError(
            f"there is no peer {unknown[0]!r}; there are {', '.join(PEERS)}", field="peers"
        )
    named = [name for name in names if name != ALL]
    missing: dict[str, str] = {}
    systems = []
    for name in (OURS, *dict.fromkeys((*named, *(PEERS if ALL in names else ()))), HARNESS):
        python = environment(name).python
        if python is None:
            missing[name] = not_installed(name)
            if name in named:
                raise ConfigError(f"{name} is {missing[name]}", field="peers")
            continue
        systems.append(Entry(name, python, environment(name).versions()))
    for name in PEERS:
        if name not in missing and all(entry.name != name for entry in systems):
            installed = environment(name).python is not None
            missing[name] = "not asked for: --peers all" if installed else not_installed(name)
    return systems, missing


def run(options: Options, root: Path, command: str, show: Show) -> BenchReport:
    """Run the whole benchmark. If interrupted, report the cases that are complete.

    Raises:  ConfigError, and the errors that a user's own samples may cause.
    """
    began = time.monotonic()
    created = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    systems, missing = entries(options.peers)
    _compile()
    mine = _own(options, root, show) if options.urls else None
    plan = _possible(chosen(options, mine.shape if mine else ""), systems, show)
    workloads = _workloads(options, plan, mine, root, show)
    reads_s3 = any(case.store is StorageKind.S3 for _, cases in plan for case in cases)
    usable = os.sched_getaffinity(0)
    division = divided(usable) if reads_s3 else Division(usable, usable)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(_scratch(root)))
        stack.enter_context(confined(division.loaders))
        server = s3_storage(folder, division.server, has_tls=options.s3_tls)
        storage = functools.cache(lambda: stack.enter_context(server))
        prepared = Prepared(root / "prepared", folder, storage, show.note)
        timing = Timing(settle_s=0.7, window_s=options.window_s, stall_window_s=0.7)
        rounds = options.rounds
        contest = Contest(systems, prepared, folder, timing, rounds, show, division.all)
        results: list[ScenarioResult] = []
        interrupted = False
        try:
            for scenario, cases in plan:
                done: list[CaseResult] = []
                results.append(_result(scenario, done))
                for case in cases:
                    done.append(contest.run(case, workloads[case.workload]))
                    results[-1] = _result(scenario, done)
        except KeyboardInterrupt:
            interrupted = True
            show.note("interrupted: what is complete is reported")
    return BenchReport(
        created=created,
        command=command,
        machine=machine_facts(root) | _server_facts(division, reads_s3=reads_s3),
        versions={entry.name: entry.versions for entry in systems},
        options={**_plain(options), "interrupted": interrupted},
        workloads=tuple(workloads.values()),
        sample_bytes=contest.sample_bytes,
        bounds={name: tuple(values) for name, values in contest.measured.items()},
        scenarios=tuple(result for result in results if result.cases),
        missing=missing,
        seconds=round(time.monotonic() - began, 1),
    )


def _compile() -> None:
    """Compile our modules, as an installation of a wheel does: from a checkout where Python may not
    write them, each of our processes would do so at its start.
    """
    for package in ("dataplane", "dataplane_torch"):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            compileall.compile_dir(folder, quiet=2)


def _result(scenario: Scenario, cases: Sequence[CaseResult]) -> ScenarioResult:
    return ScenarioResult(scenario.name, scenario.question, scenario.bound, tuple(cases))


def _own(options: Options, root: Path, show: Show) -> Workload:
    show.note(f"reading {', '.join(options.urls)}")
    workload, left_out = own(
        options.urls, root / "own", batch_size=options.batch_size, byte_limit=options.byte_limit
    )
    for note in left_out:
        show.note(note)
    return workload


def scale_of(name: str, options: Options, plan: Sequence[Chosen]) -> float:
    """How many times the samples of a recipe its workload has. By default once; more if all chosen
    cases read it from S3: a second of data measures starts, and a quarter of it is not the memory
    of any host.
    """
    if options.scale is not None:
        return options.scale
    cases = [case for _, cases in plan for case in cases if case.workload == name]
    is_long = all((case.store, case.mode) == (StorageKind.S3, Mode.EPOCH) for case in cases)
    return RECIPES[name].s3_scale if is_long else 1.0


def _workloads(
    options: Options, plan: Sequence[Chosen], mine: Workload | None, root: Path, show: Show
) -> dict[str, Workload]:
    workloads = {}
    for name in dict.fromkeys(case.workload for _, cases in plan for case in cases):
        scale = scale_of(name, options, plan)
        if mine is None:
            show.note(f"{name}: samples, --scale {scale:g}")
        workloads[name] = mine or generated(name, root / "source", scale)
    return workloads


@contextlib.contextmanager
def _scratch(root: Path) -> Iterator[str]:
    """A folder for this run. Also removes folders of killed runs, whose locks nobody holds."""
    root.mkdir(parents=True, exist_ok=True)
    for old in root.glob(f"{_RUN}*"):
        with contextlib.suppress(OSError), held(old):
            shutil.rmtree(old, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=_RUN, dir=root)
    try:
        with held(Path(folder)):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _server_facts(division: Division, *, reads_s3: bool) -> dict[str, Any]:
    """Whether loaders and S3 server share cores, for readers of figures."""
    if not reads_s3:
        return {}
    return {"server_cores": len(division.server) if division.are_apart else 0}


def _plain(options: Options) -> Mapping[str, Any]:
    return {name: getattr(options, name) for name in Options.__slots__}
