"""The sentences of a report: what a case is, which systems were not measured, notes, and the
summary.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from dataplane.commands.output import counted
from dataplane_bench.model import BatchKind, BenchCase, Mode, StorageKind, Workload
from dataplane_bench.report.cells import number, off, rate, settings_told, share, size, times, title
from dataplane_bench.report.figures import (
    HEADROOM,
    NOISY,
    OTHERS,
    STEAL,
    CaseFigures,
    Spread,
    Standing,
    SystemFigures,
    is_busy,
    is_comparable,
    known,
    spread,
)
from dataplane_bench.report.results import BenchReport, SystemResult, Tried

_REASON_LENGTH = 160
RATE_S = 10.0
"""A rate over less than this is much of a loader's start."""
CACHE_BYTES_MIN = 1 << 30
"""A loader on a real host may keep as much, even if its dataset is large."""
_BOUNDS = {
    "memcpy": "memory copy",
    "page_cache": "read from the page cache",
    "gather": "gather of random rows",
    "table_gather": "gather of whole rows",
    "parquet": "Parquet decode",
    "jpeg_decode": "JPEG decode",
    "jpeg_decode_resize": "JPEG decode and resize",
    "padded_lists": "lists padded",
    "string_rows": "strings made",
    "packs": "gather of packs",
    "tokenised_texts": "texts tokenised",
}


_WORDS = {BatchKind.PACKED: ("document", " packs"), BatchKind.TOKENISED: ("text", "")}
"""What the samples of a source are, and a batch's, where they are not the same samples."""


def one_line(text: str) -> str:
    """An error in short: its first line, and the last line of the loader's output."""
    printable = "".join(one if one.isprintable() or one == "\n" else " " for one in text)
    lines = [" ".join(line.split()) for line in printable.splitlines() if line.strip()]
    if not lines:
        return ""
    gist = lines[0].removesuffix("; its last words:")
    if len(lines) > 1 and lines[-1] != gist:
        gist = f"{gist} - {lines[-1]}"
    return gist if len(gist) <= _REASON_LENGTH else gist[: _REASON_LENGTH - 1] + "…"


def about(case: CaseFigures) -> str:
    """Describes a case: what is loaded, how, and what the hardware allows."""
    told = [_mode(case.case)]
    if case.workload is not None:
        told.append(_samples(case.workload))
    if case.bounds:
        limits = (f"{rate(limit.median)} samples/s ({name})" for name, limit in case.bounds)
        told.append(f"bound: {', '.join(limits)}")
    steps = {one.step_ms for one in case.measured if one.step_ms}
    if steps and not case.case.step_ms:
        told.append(f"stall of a trainer with steps of {max(steps):g} ms")
    return "; ".join(told)


def _mode(case: BenchCase) -> str:
    where = {StorageKind.LOCAL: "local disk", StorageKind.S3: _s3(case)}[case.store]
    served = ", with a running daemon" if case.served else ""
    number = f"epoch {case.epoch + 1}" if case.epoch else "an epoch"
    less = ", by a rank less" if case.ranks > 1 else ""
    later = f" {case.pause_s:g} s later" if case.pause_s else ""
    what = {
        Mode.STEADY: "steady rates",
        Mode.EPOCH: f"{number}, its first batch included",
        Mode.FIRST: "the first batch",
        Mode.RESUME: f"the first batch after a restart at {case.fraction:.0%} of an epoch",
        Mode.RESTART: f"the first batch of a loader opened again in its process{later}{less}",
        Mode.VERIFY: "every byte of an epoch",
    }[case.mode]
    kept = ", caches empty" if case.cold else ", warm"
    if case.epoch:
        kept = f", caches of {share(case.cache_share)} of the samples" if case.cache_share else ""
    told = f"{what}, from {where}{kept}{served}"
    if case.ranks > 1:
        told += f", {case.ranks} ranks"
    if case.jobs > 1:
        told += f", {case.jobs} jobs"
        told += " that share one order" if case.shared else ""
    return told + (f", a step computes for {case.step_ms:g} ms" if case.step_ms else "")


def _s3(case: BenchCase) -> str:
    return f"S3, {case.delay_ms:g} ms away{', over TLS' if case.over_tls else ''}"


def _samples(workload: Workload) -> str:
    own = f" of {', '.join(workload.urls)}" if workload.urls else f" of {workload.name}"
    what, packs = _WORDS.get(workload.delivery, ("sample", ""))
    count = counted(workload.sample_count, what)
    return f"{count}{own} in batches of {workload.batch_size:,}{packs}"


def absent(case: CaseFigures) -> list[tuple[str, str]]:
    """The systems that were not measured: a name, and the reason in one line."""
    word = {Standing.REFUSED: "no part in it", Standing.FAILED: "failed"}
    return [
        (one.result.title, f"{word.get(one.standing, 'not measured')}: {one_line(one.reason)}")
        for one in case.absent
    ]


def notes(case: CaseFigures) -> list[str]:
    """What a reader must know before trusting a case."""
    told = []
    differing = [one.result.title for one in case.measured if not is_comparable(one.result)]
    if differing:
        told.append(f"samples differ! {', '.join(differing)}: not the source's, so not compared")
    unknown = [
        one.result.title
        for one in case.measured
        if one.result.same_samples is None and not one.is_harness
    ]
    if unknown:
        told.append(f"not checked whether the samples are the source's: {', '.join(unknown)}")
    told += _made(case)
    told += _short(case)
    noisy = [f"{one.result.title} {off(one.main)}" for one in case.measured if one.is_noisy]
    if noisy:
        told.append(f"noisy, a round more than {NOISY:.0%} off the median: {', '.join(noisy)}")
    if case.is_busy:
        told.append(f"the machine was busy: {_load(case.load)}")
    headroom = case.harness_headroom
    if headroom is not None and headroom < HEADROOM:
        told.append(
            f"the harness alone is only {times(headroom)} as fast as the fastest system: it may "
            "limit the figures"
        )
    if case.ours is None:
        told.append("Dataplane was not measured here, so there are no ratios")
    return told


def _short(case: CaseFigures) -> list[str]:
    """How much larger samples must be, so that the rate of the fastest system is not its start's,
    and caches of a share of them are such as hosts have.
    """
    told = []
    seconds = next((one.seconds for one in case.measured if not one.is_harness), None)
    if seconds and seconds < RATE_S:
        more = f"with {number(RATE_S / seconds, 2)} times as large a --scale it reads for longer"
        told.append(f"the fastest system was done after {number(seconds, 2)} s: {more}")
    if case.case.cache_share and case.sample_bytes and case.workload is not None:
        kept = case.case.cache_share * case.sample_bytes * case.workload.sample_count
        if kept < CACHE_BYTES_MIN:
            more = f"{number(CACHE_BYTES_MIN / kept, 2)} times as large a --scale"
            told.append(f"caches of about {size(kept)} are smaller than a host's: choose {more}")
    return told


def _made(case: CaseFigures) -> list[str]:
    """How well packs were filled, and how exact a mixture was."""
    facts = [(one.result.title, one.result.facts) for one in case.measured]
    waste = [f"{name} {of['waste']:.2%}" for name, of in facts if "waste" in of]
    weights = {part.name: part.weight for part in case.workload.parts} if case.workload else {}
    errors = []
    for name, of in facts:
        if "shares" in of:
            worst = max(abs(of["shares"][part] - weight) for part, weight in weights.items())
            errors.append(f"{name} {worst:.2%}")
    told = [f"padding in an epoch's packs: {', '.join(waste)}"] if waste else []
    if errors:
        told.append(f"a source's share of an epoch is off by, at most: {', '.join(errors)}")
    return told


def gist(cases: Sequence[CaseFigures]) -> list[str]:
    """The report in two or three sentences."""
    against = [
        (case, peer, peer.ratio)
        for case in cases
        if (peer := case.best_peer) is not None and peer.ratio is not None
    ]
    if not against:
        return ["No peer was measured beside Dataplane."]
    has_spread = any(len(ratio.values) > 1 for _, _, ratio in against)
    faster = sum(ratio.low > 1 for _, _, ratio in against)
    slower = sum(ratio.high < 1 for _, _, ratio in against)
    level = len(against) - faster - slower
    ordered = sorted(against, key=lambda one: one[2].median)
    middle = statistics.median(ratio.median for _, _, ratio in against)

    def told(case: CaseFigures, peer: SystemFigures, ratio: Spread) -> str:
        return f"{times(ratio.median)} ({title(case)}, {peer.result.title})"

    cases_told = counted(len(against), "case")
    first = (
        f"Against the best peer of each case, Dataplane was faster in {faster}, slower in {slower}"
        f" and level, within the spread of the rounds, in {level} of {cases_told}."
        if has_spread
        else f"Against the best peer of each case, Dataplane was faster in {faster} and slower in"
        f" {slower} of {cases_told}. There was one round, so the spread is not known."
    )
    if len(against) == 1:
        return [first, f"The ratio is {told(*ordered[0])}."]
    ends = f"{told(*ordered[0])} to {told(*ordered[-1])}"
    return [first, f"The ratio's median is {times(middle)}; it goes from {ends}."]


def busy(report: BenchReport) -> str:
    """A warning if other processes used the machine during the run, else ""."""
    cases = [case for scenario in report.scenarios for case in scenario.cases]
    loads = [{name: known(value) or 0.0 for name, value in case.load.items()} for case in cases]
    heavy = [load for load in loads if is_busy(load)]
    if not heavy:
        return ""
    worst = max(heavy, key=lambda load: sum(load.values()))
    where = f"{len(heavy)} of {counted(len(cases), 'case')}"
    return (
        f"The machine had other load in {where}: {_load(worst, 'up to ')}. Figures are lower than "
        f"on an idle machine, and ratios less certain: measure again on an idle machine."
    )


def _load(load: Mapping[str, float], up_to: str = "") -> str:
    others, steal = (load.get(name, 0.0) for name in ("others", "steal"))
    told = [f"other processes took {up_to}{share(others)}"] if others > OTHERS else []
    told += [f"the hypervisor took {up_to}{share(steal)}"] if steal > STEAL else []
    return f"{' and '.join(told)} of its CPU time"


def machine(report: BenchReport) -> str:
    """When and where, in a line."""
    facts = report.machine
    told = [f"{report.created[:16].replace('T', ' ')} UTC" if report.created else ""]
    told += [str(facts[name]) for name in ("cpu",) if facts.get(name)]
    cores, memory = known(facts.get("cores")), known(facts.get("memory_bytes"))
    told.append(counted(int(cores), "core") + _server_cores(facts) if cores else "")
    told.append(size(memory) if memory else "")
    told += [f"{name} {facts[name]}" for name in ("kernel", "python", "storage") if facts.get(name)]
    told.append(f"{report.seconds / 60:.0f} min" if known(report.seconds) else "")
    return ", ".join(part for part in told if part)


def _server_cores(facts: Mapping[str, object]) -> str:
    apart = known(facts.get("server_cores"))
    if apart is None:
        return ""
    return f" ({apart:.0f} of them the S3 server's)" if apart else " (shared with the S3 server)"


def machine_bounds(report: BenchReport) -> list[tuple[str, str]]:
    """What the machine can do: a name, and the median of its rounds with their spread."""
    return [
        (name, f"{told} {off(limit)}".strip())
        for each, values in report.bounds.items()
        if (limit := spread(values)) is not None
        for name, told in (_machine_bound(each, limit.median),)
    ]


def _machine_bound(name: str, value: float) -> tuple[str, str]:
    """("gather_gb_per_s", 5) -> ("gather of random rows", "5.00 GB/s")"""
    are_bytes = name.endswith("_gb_per_s")
    what = name.removesuffix("_gb_per_s").removesuffix("_per_s")
    told = f"{number(value)} GB/s" if are_bytes else f"{rate(value)}/s"
    if what.startswith("s3_"):
        return f"S3 server, {what.removeprefix('s3_').replace('_', ' ')}", told
    return _BOUNDS.get(what, what.replace("_", " ")), told


def versions(report: BenchReport) -> list[str]:
    """A line a system: its packages."""
    return [
        f"{name}: " + ", ".join(f"{package} {version}" for package, version in packages.items())
        for name, packages in report.versions.items()
        if packages
    ]


def sweeps(cases: Sequence[CaseFigures]) -> list[tuple[str, list[tuple[str, str]]]]:
    """For each system: the cases, its format, the chosen settings, and the others that were
    tried."""
    found: dict[str, dict[str, list[CaseFigures]]] = {}
    for case in cases:
        for one in case.systems:
            told = _sweep(one.result)
            if told:
                found.setdefault(_who(one.result), {}).setdefault(told, []).append(case)
    return [
        (system, [(_titles(of, each.values()), told) for told, of in each.items()])
        for system, each in found.items()
    ]


def _titles(cases: Sequence[CaseFigures], every: Iterable[Sequence[CaseFigures]]) -> str:
    """The cases' titles; a scenario's name alone means all of its cases."""
    known_of = [case for of in every for case in of]
    told = []
    for case in cases:
        siblings = [one for one in known_of if one.scenario == case.scenario]
        is_whole = len(siblings) > 1 and all(one in cases for one in siblings)
        told.append(case.scenario if is_whole else title(case))
    return ", ".join(dict.fromkeys(told))


def _who(result: SystemResult) -> str:
    return f"{result.title} {result.version}".strip()


def _sweep(result: SystemResult) -> str:
    told = _choice(result)
    return f"{result.describes}; {told}" if result.describes and told else told or result.describes


def _choice(result: SystemResult) -> str:
    if not result.sweep and not result.settings:
        return ""
    chosen = [one for one in result.sweep if one.settings == result.settings]
    told = settings_told(result.settings)
    if len(result.sweep) < 2:
        return told
    told += f" ({_tried(chosen[0])})" if chosen else ""
    others = [one for one in result.sweep if one not in chosen]
    tried = "; ".join(f"{settings_told(one.settings)} ({_tried(one)})" for one in others)
    return f"{told}; tried: {tried}" if tried else told


def _tried(one: Tried) -> str:
    return f"failed: {one_line(one.error)}" if one.error else f"{rate(one.samples_per_s)}/s"


def plain(value: object) -> str:
    """A value of an option, as people write it."""
    if isinstance(value, list | tuple):
        return ", ".join(str(one) for one in value) or "none"
    return "none" if value is None else str(value)
