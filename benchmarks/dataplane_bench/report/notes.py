"""The sentences of a report: what a case is, which systems were not measured, notes, and the
summary.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from dataplane.commands.output import counted
from dataplane_bench.model import BatchKind, BenchCase, Mode, StorageKind, Workload
from dataplane_bench.report.cells import number, off, rate, settings_text, share, size, times, title
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
    printable = "".join(
        character if character.isprintable() or character == "\n" else " " for character in text
    )
    lines = [" ".join(line.split()) for line in printable.splitlines() if line.strip()]
    if not lines:
        return ""
    gist = lines[0].removesuffix("; its last words:")
    if len(lines) > 1 and lines[-1] != gist:
        gist = f"{gist} - {lines[-1]}"
    return gist if len(gist) <= _REASON_LENGTH else gist[: _REASON_LENGTH - 1] + "…"


def about(case: CaseFigures) -> str:
    """Describes a case: what is loaded, how, and what the hardware allows."""
    parts = [_mode(case.case)]
    if case.workload is not None:
        parts.append(_samples(case.workload))
    if case.bounds:
        limits = (f"{rate(limit.median)} samples/s ({name})" for name, limit in case.bounds)
        parts.append(f"bound: {', '.join(limits)}")
    steps = [step for system in case.measured if (step := system.middle("step_ms"))]
    if steps and not case.case.step_ms:
        parts.append(f"stall of a trainer with steps of {max(steps):g} ms")
    return "; ".join(parts)


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
    text = f"{what}, from {where}{kept}{served}"
    if case.ranks > 1:
        text += f", {case.ranks} ranks"
    if case.jobs > 1:
        text += f", {case.jobs} jobs"
        text += " that share one order" if case.shared else ""
    return text + (f", a step computes for {case.step_ms:g} ms" if case.step_ms else "")


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
        (
            system.result.title,
            f"{word.get(system.standing, 'not measured')}: {one_line(system.reason)}",
        )
        for system in case.absent
    ]


def notes(case: CaseFigures) -> list[str]:
    """Reservations about a case that a reader should know."""
    sentences = []
    differing = [
        system.result.title for system in case.measured if not is_comparable(system.result)
    ]
    if differing:
        sentences.append(
            f"samples differ! {', '.join(differing)}: not the source's, so not compared"
        )
    unknown = [
        system.result.title
        for system in case.measured
        if system.result.same_samples is None and not system.is_harness
    ]
    if unknown:
        sentences.append(f"not checked whether the samples are the source's: {', '.join(unknown)}")
    sentences += _made(case)
    sentences += _short(case)
    noisy = [
        f"{system.result.title} {off(system.main)}" for system in case.measured if system.is_noisy
    ]
    if noisy:
        sentences.append(f"noisy, a round more than {NOISY:.0%} off the median: {', '.join(noisy)}")
    if case.is_busy:
        sentences.append(f"the machine was busy: {_load(case.load)}")
    headroom = case.harness_headroom
    if headroom is not None and headroom < HEADROOM:
        sentences.append(
            f"the harness alone is only {times(headroom)} as fast as the fastest system: it may "
            "limit the figures"
        )
    if case.ours is None:
        sentences.append("Dataplane was not measured here, so there are no ratios")
    return sentences


def _short(case: CaseFigures) -> list[str]:
    """How much larger samples must be, so that the rate of the fastest system is not its start's,
    and caches of a share of them are such as hosts have.
    """
    sentences = []
    seconds = next((system.seconds for system in case.measured if not system.is_harness), None)
    if seconds and seconds < RATE_S:
        more = f"with {number(RATE_S / seconds, 2)} times as large a --scale it reads for longer"
        sentences.append(f"the fastest system was done after {number(seconds, 2)} s: {more}")
    if case.case.cache_share and case.sample_bytes and case.workload is not None:
        kept = case.case.cache_share * case.sample_bytes * case.workload.sample_count
        if kept < CACHE_BYTES_MIN:
            more = f"{number(CACHE_BYTES_MIN / kept, 2)} times as large a --scale"
            sentences.append(
                f"caches of about {size(kept)} are smaller than a host's: choose {more}"
            )
    return sentences


def _made(case: CaseFigures) -> list[str]:
    """How well packs were filled, and how exact a mixture was."""
    facts = [(system.result.title, system.result.facts) for system in case.measured]
    waste = [f"{name} {of['waste']:.2%}" for name, of in facts if "waste" in of]
    weights = {part.name: part.weight for part in case.workload.parts} if case.workload else {}
    errors = []
    for name, of in facts:
        if "shares" in of:
            worst = max(abs(of["shares"][part] - weight) for part, weight in weights.items())
            errors.append(f"{name} {worst:.2%}")
    sentences = [f"padding in an epoch's packs: {', '.join(waste)}"] if waste else []
    if errors:
        sentences.append(f"a source's share of an epoch is off by, at most: {', '.join(errors)}")
    return sentences


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
    ordered = sorted(against, key=lambda entry: entry[2].median)
    middle = statistics.median(ratio.median for _, _, ratio in against)

    def described(case: CaseFigures, peer: SystemFigures, ratio: Spread) -> str:
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
        return [first, f"The ratio is {described(*ordered[0])}."]
    ends = f"{described(*ordered[0])} to {described(*ordered[-1])}"
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
    parts = [f"other processes took {up_to}{share(others)}"] if others > OTHERS else []
    parts += [f"the hypervisor took {up_to}{share(steal)}"] if steal > STEAL else []
    return f"{' and '.join(parts)} of its CPU time"


def machine(report: BenchReport) -> str:
    """When and where, in a line."""
    facts = report.machine
    parts = [f"{report.created[:16].replace('T', ' ')} UTC" if report.created else ""]
    parts += [str(facts[name]) for name in ("cpu",) if facts.get(name)]
    cores, memory = known(facts.get("cores")), known(facts.get("memory_bytes"))
    parts.append(counted(int(cores), "core") + _server_cores(facts) if cores else "")
    parts.append(size(memory) if memory else "")
    parts += [
        f"{name} {facts[name]}" for name in ("kernel", "python", "storage") if facts.get(name)
    ]
    parts.append(f"{seconds / 60:.0f} min" if (seconds := known(report.seconds)) else "")
    return ", ".join(part for part in parts if part)


def _server_cores(facts: Mapping[str, object]) -> str:
    apart = known(facts.get("server_cores"))
    if apart is None:
        return ""
    return f" ({apart:.0f} of them the S3 server's)" if apart else " (shared with the S3 server)"


def machine_bounds(report: BenchReport) -> list[tuple[str, str]]:
    """The machine's bounds: a name, and the median of its rounds with their spread."""
    return [
        (name, f"{figure} {off(limit)}".strip())
        for key, values in report.bounds.items()
        if (limit := spread(values)) is not None
        for name, figure in (_machine_bound(key, limit.median),)
    ]


def _machine_bound(name: str, value: float) -> tuple[str, str]:
    """("gather_gb_per_s", 5) -> ("gather of random rows", "5.00 GB/s")"""
    are_bytes = name.endswith("_gb_per_s")
    what = name.removesuffix("_gb_per_s").removesuffix("_per_s")
    figure = f"{number(value)} GB/s" if are_bytes else f"{rate(value)}/s"
    if what.startswith("s3_"):
        return f"S3 server, {what.removeprefix('s3_').replace('_', ' ')}", figure
    return _BOUNDS.get(what, what.replace("_", " ")), figure


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
    by_system: dict[str, dict[str, list[CaseFigures]]] = {}
    for case in cases:
        for system in case.systems:
            choice = _sweep(system.result)
            if choice:
                by_system.setdefault(_who(system.result), {}).setdefault(choice, []).append(case)
    return [
        (system, [(_titles(of, by_choice.values()), choice) for choice, of in by_choice.items()])
        for system, by_choice in by_system.items()
    ]


def _titles(cases: Sequence[CaseFigures], every: Iterable[Sequence[CaseFigures]]) -> str:
    """The cases' titles; a scenario's name alone means all of its cases."""
    known_of = [case for of in every for case in of]
    titles = []
    for case in cases:
        siblings = [sibling for sibling in known_of if sibling.scenario == case.scenario]
        is_whole = len(siblings) > 1 and all(sibling in cases for sibling in siblings)
        titles.append(case.scenario if is_whole else title(case))
    return ", ".join(dict.fromkeys(titles))


def _who(result: SystemResult) -> str:
    return f"{result.title} {result.version}".strip()


def _sweep(result: SystemResult) -> str:
    choice = _choice(result)
    return (
        f"{result.describes}; {choice}"
        if result.describes and choice
        else choice or result.describes
    )


def _choice(result: SystemResult) -> str:
    if not result.sweep and not result.settings:
        return ""
    chosen = [attempt for attempt in result.sweep if attempt.settings == result.settings]
    text = settings_text(result.settings)
    if len(result.sweep) < 2:
        return text
    text += f" ({_tried(chosen[0])})" if chosen else ""
    others = [attempt for attempt in result.sweep if attempt not in chosen]
    tried = "; ".join(
        f"{settings_text(attempt.settings)} ({_tried(attempt)})" for attempt in others
    )
    return f"{text}; tried: {tried}" if tried else text


def _tried(attempt: Tried) -> str:
    return (
        f"failed: {one_line(attempt.error)}"
        if attempt.error
        else f"{rate(attempt.samples_per_s)}/s"
    )


def plain(value: object) -> str:
    """A value of an option, as people write it."""
    if isinstance(value, list | tuple):
        return ", ".join(str(part) for part in value) or "none"
    return "none" if value is None else str(value)
