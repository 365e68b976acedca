"""Runs every system in every case, in turns, on the same samples.

In each case, every system first tries its settings briefly and keeps the best. One whole epoch of
each is then checksummed and compared with the source. Then come the rounds: in each, every system
has one turn, and the machine's bounds are measured again. If a system fails, the report says so,
and the others continue.

Each system's shards are converted once and kept for later runs. A folder of them is complete or
absent: it is written under another name and then renamed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dataplane.model.errors import ConfigError
from dataplane_bench import bounds, machine
from dataplane_bench.environments import environment
from dataplane_bench.machine import CoreIds
from dataplane_bench.model import (
    BatchKind,
    BenchCase,
    DatasetPlace,
    Mode,
    Settings,
    StorageKind,
    Workload,
)
from dataplane_bench.peers.base import HARNESS, OURS, REFERENCE, adapter
from dataplane_bench.report.cells import settings_text
from dataplane_bench.report.results import CaseResult, HardwareBound, SystemResult, Tried
from dataplane_bench.trial.launch import Contestant, Timing, TrialFailed, run_order, run_trial

PREPARE_TIMEOUT_S = 1800.0


class Prepared:
    """Places by system, workload and store. `storage` starts the S3 server when first called."""

    def __init__(
        self, root: Path, trials: Path, storage: Callable[[], Any], say: Callable[[str], None]
    ) -> None:
        self._root, self._trials = root, trials
        self._storage, self._say = storage, say
        self._uploaded: set[Path] = set()

    def place(self, system: str, python: str, workload: Workload, case: BenchCase) -> DatasetPlace:
        """The place of a system's shards in this case; converts and uploads them if necessary.

        Raises:  TrialFailed: the conversion failed.
        """
        if case.files:
            system, python = case.files, python_of(case.files)
        layout = adapter(system).layout(workload)
        folder = self._root / workload.fingerprint / layout
        if not folder.exists():
            self._convert(system, python, workload, folder)
        return self._at(folder, case)

    def source(self, workload: Workload, case: BenchCase) -> DatasetPlace:
        """The source shards in this case, for measurements of the server."""
        return self._at(workload.source, case)

    def server_cpu_s(self) -> float:
        """CPU seconds that the S3 server and the delay before it have used so far."""
        return float(self._storage().cpu_s())

    def _at(self, folder: Path, case: BenchCase) -> DatasetPlace:
        if case.store is StorageKind.LOCAL:
            return DatasetPlace(folder, str(folder))
        if folder not in self._uploaded:
            self._say(f"uploading {folder.name}")
            self._uploaded.add(folder)
        place: DatasetPlace = self._storage().place(folder, case)
        return place

    def _convert(self, system: str, python: str, workload: Workload, folder: Path) -> None:
        self._say(f"{workload.name}: writing {folder.name} for {system}")
        new = folder.with_name(f".{folder.name}-{os.getpid()}")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        try:
            case = BenchCase("prepare", workload.name)
            who = Contestant(system, python, DatasetPlace(new, str(new)), {})
            run_order("prepare", who, case, workload, self._trials, PREPARE_TIMEOUT_S)
            # If another run has made the folder meanwhile, use that one.
            with contextlib.suppress(OSError):
                new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def python_of(peer: str) -> str:
    """The interpreter of a peer's environment.   Raises:  ConfigError: it is not installed."""
    python = environment(peer).python
    if python is None:
        raise ConfigError(not_installed(peer), field="peers")
    return python


def not_installed(peer: str) -> str:
    return f"not installed: dataplane bench --install-peer {peer}"


SWEEP = Timing(settle_s=0.4, window_s=0.6, stall_window_s=0.0, epoch_s=4.0)
HARNESS_WINDOW_S = 0.5
"""The window of the loader that does nothing, whose rate does not vary."""


class Show(Protocol):
    """Shows the progress of a contest."""

    def planned(self, trials: int) -> None:
        """Add this many trials to those that are still to run."""

    def trial(self, what: str) -> None:
        """Say that the next trial begins."""

    def note(self, text: str) -> None:
        """Say something that a reader of the report should know."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A system that takes part, the interpreter of its environment, and the versions installed
    there, by distribution name.
    """

    name: str
    python: str
    versions: Mapping[str, str]


@dataclass(slots=True)
class _Runner:
    """One system in one case, and its results so far."""

    entry: Entry
    result: SystemResult
    settings: Settings = dataclasses.field(default_factory=dict)
    trials: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def runs(self) -> bool:
        return not self.result.error and not self.result.refused

    def now(self, **changes: Any) -> None:
        self.result = dataclasses.replace(self.result, **changes)


class Contest:
    """Runs cases. Reuses the results of sweeps and checksums between cases."""

    def __init__(
        self,
        entries: Sequence[Entry],
        prepared: Prepared,
        folder: Path,
        timing: Timing,
        rounds: int,
        show: Show,
        usable: CoreIds | None = None,
    ) -> None:
        """`usable` are the cores of loaders and server, if not only those of this thread."""
        self._entries, self._prepared, self._folder = entries, prepared, folder
        self._timing, self._rounds, self._show = timing, rounds, show
        self._usable, self._cores = usable, len(os.sched_getaffinity(0))
        self._sweeps: dict[tuple[object, ...], tuple[Tried, ...]] = {}
        self._digests: dict[tuple[object, ...], dict[str, Any]] = {}
        self.sample_bytes: dict[str, float] = {}
        self.measured: dict[str, list[float]] = {}

    def run(self, case: BenchCase, workload: Workload) -> CaseResult:
        """Run all systems in one case."""
        readers = (OURS, HARNESS, case.files)
        runners = [
            self._runner(entry, case, workload)
            for entry in self._entries
            if not case.files or entry.name in readers
        ]
        going = [runner for runner in runners if runner.runs]
        self._show.planned(sum(self._rounds_of(runner) for runner in going))
        for runner in going:
            with self._failing(runner):
                self._prepared.place(runner.entry.name, runner.entry.python, workload, case)
                self._choose(runner, case, workload)
                self._check(runner, case, workload)
        limits: dict[str, list[float]] = {}
        before = machine.cpu_sample(cores=self._usable)
        for round_index in range(self._rounds):
            self._bounds(case, workload, limits)
            for runner in runners:
                if runner.runs and round_index < self._rounds_of(runner):
                    with self._failing(runner):
                        self._take_turn(runner, case, workload, round_index)
        for runner in runners:
            runner.now(trials=tuple(runner.trials))
        measured = tuple(HardwareBound(name, tuple(values)) for name, values in limits.items())
        load = machine.load_between(before, machine.cpu_sample(cores=self._usable))
        return CaseResult(case, tuple(runner.result for runner in runners), measured, load)

    def _rounds_of(self, runner: _Runner) -> int:
        return 1 if runner.entry.name == HARNESS else self._rounds

    def _runner(self, entry: Entry, case: BenchCase, workload: Workload) -> _Runner:
        system = adapter(entry.name)
        refused = _lacks(system, workload)
        if not refused and hasattr(system, "refuses"):
            refused = system.refuses(workload, case)
        is_start = case.mode in (Mode.FIRST, Mode.RESTART)
        if not refused and is_start and case.served and not hasattr(system, "serve"):
            refused = "it has no daemon"
        description = "" if refused else system.describe(workload)
        if case.files:
            # Dataplane opens tables with the packages that wrote them.
            entry = dataclasses.replace(entry, python=python_of(case.files))
            if entry.name == OURS:
                description = f"the files of {adapter(case.files).title} as they are"
        return _Runner(
            entry,
            SystemResult(
                entry.name,
                system.title,
                entry.versions.get(system.distribution, ""),
                description,
                refused=refused,
            ),
        )

    @contextlib.contextmanager
    def _failing(self, runner: _Runner) -> Any:
        try:
            yield
        except TrialFailed as error:
            runner.now(error=str(error))
            self._show.note(f"{runner.result.title}: {str(error).splitlines()[0]}")

    def _choose(self, runner: _Runner, case: BenchCase, workload: Workload) -> None:
        """Choose the settings with the highest throughput."""
        # Cases about a start, a resume or a computing trainer use these settings, too.
        if case.mode in (Mode.FIRST, Mode.RESUME, Mode.RESTART) or case.step_ms:
            case = BenchCase(case.label, case.workload)
        if case.epoch:
            # The second epoch tells as much as a later one.
            case = dataclasses.replace(case, epoch=1)
        key = (
            *(runner.entry.name, workload.fingerprint, case.store, case.delay_ms, case.over_tls),
            *(case.ranks, case.jobs, case.served, case.shared, case.epoch),
            *(case.files, case.in_order),
        )
        if key not in self._sweeps:
            self._sweeps[key] = tuple(self._tried(runner.entry, case, workload))
        tried = self._sweeps[key]
        best = max(tried, key=lambda attempt: attempt.samples_per_s)
        if best.error:
            raise TrialFailed(best.error)
        runner.settings = best.settings
        runner.now(settings=best.settings, sweep=tried)

    def _tried(self, entry: Entry, case: BenchCase, workload: Workload) -> list[Tried]:
        choices = adapter(entry.name).settings(workload, case, self._cores)
        if len(choices) == 1:
            return [Tried(choices[0])]
        self._show.planned(len(choices))
        tried = []
        for settings in choices:
            self._show.trial(
                f"{_where(case, workload)}: {entry.name} with {settings_text(settings)}"
            )
            try:
                result = self._trial(entry, case, workload, settings, SWEEP)
                tried.append(Tried(settings, result["samples_per_s"]))
            except TrialFailed as error:
                tried.append(Tried(settings, error=str(error)))
        return tried

    def _check(self, runner: _Runner, case: BenchCase, workload: Workload) -> None:
        """Compare the checksum of one whole epoch with that of the source."""
        if runner.entry.name == HARNESS:
            return
        whole = BenchCase(
            *(case.label, case.workload, Mode.VERIFY, case.store, case.ranks),
            over_tls=case.over_tls,
            files=case.files,
            in_order=case.in_order,
        )
        truth = self.truth(workload)
        epoch = self._epoch(runner.entry, whole, workload, runner.settings)
        fault = _fault(epoch, truth, workload)
        if case.in_order and runner.entry.name == OURS and not fault:
            # Worker processes may deliver in turns: without them, the library has one order.
            alone = adapter(case.files).settings(workload, case, self._cores)[-1]
            owner = dataclasses.replace(runner.entry, name=case.files)
            if epoch["facts"] != self._epoch(owner, whole, workload, alone)["facts"]:
                fault = "in another order than the library's"
        runner.now(digest=epoch["digest"], same_samples=not fault, facts=epoch["facts"])
        if fault:
            where = _where(case, workload)
            self._show.note(f"{runner.result.title}: not the source's samples in {where} ({fault})")

    def _epoch(
        self, entry: Entry, case: BenchCase, workload: Workload, settings: Settings
    ) -> dict[str, Any]:
        """The checksum of one whole epoch."""
        key = (
            *(entry.name, workload.fingerprint, case.store, case.ranks, case.files, case.in_order),
            str(settings) if case.in_order else "",
        )
        if key not in self._digests:
            self._show.planned(1)
            self._show.trial(f"{_where(case, workload)}: {entry.name}, every byte of an epoch")
            self._digests[key] = self._trial(entry, case, workload, settings, self._timing)
        return self._digests[key]

    def truth(self, workload: Workload) -> dict[str, Any]:
        """The checksum of the source's samples, and the size of their batches."""
        key = (REFERENCE, workload.fingerprint)
        if key not in self._digests:
            self._show.planned(1)
            self._show.trial(f"{workload.name}: every byte of the source")
            entry = Entry(REFERENCE, sys.executable, {})
            case = BenchCase("source", workload.name, Mode.VERIFY)
            self._digests[key] = self._trial(entry, case, workload, {}, self._timing)
        epoch = self._digests[key]
        self.sample_bytes[workload.name] = epoch["byte_count"] / max(epoch["sample_count"], 1)
        return epoch

    def _take_turn(
        self, runner: _Runner, case: BenchCase, workload: Workload, round_index: int
    ) -> None:
        turn = f"round {round_index + 1} of {self._rounds}"
        self._show.trial(f"{_where(case, workload)}, {turn}: {runner.entry.name}")
        timing = self._timing
        if runner.entry.name == HARNESS:
            window_s = min(timing.window_s, HARNESS_WINDOW_S)
            timing = dataclasses.replace(timing, settle_s=window_s / 2, window_s=window_s)
        result = self._trial(runner.entry, case, workload, runner.settings, timing)
        runner.trials.append(result | {"round": round_index})

    def _trial(
        self, entry: Entry, case: BenchCase, workload: Workload, settings: Settings, timing: Timing
    ) -> dict[str, Any]:
        place = self._prepared.place(entry.name, entry.python, workload, case)
        who = Contestant(entry.name, entry.python, place, settings)
        server = self._prepared.server_cpu_s if case.store is StorageKind.S3 else None
        return run_trial(who, case, workload, timing, self._folder, server)

    def _bounds(self, case: BenchCase, workload: Workload, limits: dict[str, list[float]]) -> None:
        if case.mode not in (Mode.STEADY, Mode.EPOCH) or case.step_ms:
            return
        place: DatasetPlace | None = None
        if case.store is StorageKind.S3:
            place = self._prepared.source(workload, case)
        names = bounds.names(workload, case.store)
        try:
            rates = bounds.measure(names, workload, place)
        except TrialFailed as error:
            self._show.note(f"a bound was not measured: {str(error).splitlines()[0]}")
            return
        for name, value in rates.items():
            self.measured.setdefault(bounds.measured_name(name, case), []).append(value)
        for name, value in bounds.bound_of(workload, case.store, rates):
            limits.setdefault(name, []).append(value)


_LACKS = {
    BatchKind.MIXED: "it mixes no sources",
    BatchKind.PACKED: "it packs no documents",
    BatchKind.TOKENISED: "its adapter tokenises no texts",
}


def _lacks(system: Any, workload: Workload) -> str:
    """Why a system does not deliver what a trainer wants of these samples; "" if it does."""
    delivers = getattr(system, "delivers", (BatchKind.STORED,))
    return "" if workload.delivery in delivers else _LACKS[workload.delivery]


def _fault(epoch: Mapping[str, Any], truth: Mapping[str, Any], workload: Workload) -> str:
    """Why the samples of an epoch are not the source's; "" if they are."""
    if workload.delivery is BatchKind.MIXED:
        return str(epoch["facts"]["fault"])
    if epoch["digest"] == truth["digest"]:
        return ""
    if workload.delivery is BatchKind.PACKED:
        epoch, truth = epoch["facts"], truth["facts"]
        return f"{epoch['documents']:,} documents instead of {truth['documents']:,}"
    return f"{epoch['sample_count']:,} instead of {truth['sample_count']:,}"


def _where(case: BenchCase, workload: Workload) -> str:
    return f"{workload.name}, {case.label}"
