"""Reports of a benchmark that never ran: a small one whose figures can be checked by hand, and a
large one with everything that a report can hold.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dataplane_bench.model import BenchCase, ColumnType, Mode, StorageKind, Workload, WorkloadColumn
from dataplane_bench.peers.base import HARNESS, OURS, PEERS
from dataplane_bench.report import results
from dataplane_bench.report.results import (
    BenchReport,
    CaseResult,
    HardwareBound,
    ScenarioResult,
    SystemResult,
    Tried,
)
from dataplane_bench.scenarios import SCENARIOS, Scale
from hypothesis import strategies as st

TITLES = {
    "dataplane": "Dataplane",
    "torch": "torch DataLoader",
    "stateful": "StatefulDataLoader",
    "webdataset": "WebDataset",
    "mosaic": "MosaicML Streaming",
    "litdata": "LitData",
    "huggingface": "Hugging Face datasets",
    "grain": "Grain",
    "spdl": "SPDL",
    "tf.data": "tf.data",
    "ray": "Ray Data",
    "ffcv": "FFCV",
    "megatron": "Megatron Core",
    "delta": "deltalake",
    "iceberg": "PyIceberg",
    "noop": "noop (harness)",
}
ALL = (OURS, *PEERS, HARNESS)
SAMPLE_BYTES = {
    "tokens": 4_104.0,
    "rows": 4_096.0,
    "images": 150_536.0,
    "tabular": 320.0,
    "text": 2_100.0,
}


def workload(name="tokens", **changes):
    column = WorkloadColumn("tokens", ColumnType.FIXED, "uint16", (2048,))
    made = Workload(
        name, (column,), 64, 131_072, Path("/samples") / name, f"{name}-0001", step_ms=5.0
    )
    return dataclasses.replace(made, **changes)


def trials(figure: str, values: Iterable[float | None], **others: object) -> tuple[dict, ...]:
    """One trial per round; a round whose value is None has no trial."""
    return tuple(
        {"round": at, figure: value, **others}
        for at, value in enumerate(values)
        if value is not None
    )


def system(name: str, rates: Sequence[float | None] = (), **changes: object) -> SystemResult:
    """A system whose rounds gave these samples/s."""
    same = None if name == HARNESS else True
    made = SystemResult(
        name,
        TITLES.get(name, name),
        "1.0",
        same_samples=same,
        trials=trials("samples_per_s", rates),
    )
    return dataclasses.replace(made, **changes)


def report(*scenarios: ScenarioResult, **changes: object) -> BenchReport:
    made = BenchReport(
        created="2026-02-03T04:05:06+00:00",
        command="dataplane bench --peers all",
        machine={
            "cpu": "Example CPU @ 2.0 GHz",
            "cores": 2,
            "memory_bytes": 25_769_803_776,
            "kernel": "6.1.0",
            "python": "3.11.2",
            "storage": "ext4",
        },
        versions={"dataplane": {"dataplane-loader": "0.1.0"}, "torch": {"torch": "2.13.0"}},
        options={"rounds": 3, "window_s": 1.5, "peers": ["all"]},
        workloads=(workload(),),
        sample_bytes={"tokens": 4_000.0},
        bounds={"memcpy_gb_per_s": (10.0, 11.0, 12.0)},
        scenarios=scenarios,
        missing={"ffcv": "not installed: dataplane bench --install-peer ffcv"},
        seconds=123.4,
    )
    return dataclasses.replace(made, **changes)


def scenario(*cases: CaseResult, name: str = "tokens") -> ScenarioResult:
    return ScenarioResult(name, f"How fast are {name}?", "memory", cases)


def small() -> BenchReport:
    """One case: known medians, ratios and bound; one of each way of not being measured."""
    return report(
        scenario(
            CaseResult(
                BenchCase("local", "tokens"),
                (
                    system("torch", (100.0, 120.0, 110.0)),
                    system("dataplane", (400.0, 360.0, 550.0)),
                    system("grain", (200.0, 400.0, 210.0)),
                    system("webdataset", (900.0, 900.0, 900.0), same_samples=False),
                    system("ray", refused="it has no part in this"),
                    system("litdata", error="RuntimeError: no; its last words:\nfoo\nToo bad\n"),
                    system("noop", (5000.0,)),
                ),
                (
                    HardwareBound("server", (5000.0, 5000.0, 5000.0)),
                    HardwareBound("gather", (800.0, 1200.0, 1000.0)),
                ),
            )
        )
    )


def starts() -> BenchReport:
    """One case about the first batch after a restart: seconds, by state and by replay."""
    seconds = trials("first_batch_s", (0.2, 0.25, 0.5), by="state", memory_peak=2**30)
    replayed = trials("first_batch_s", (2.0, 2.0, 2.0), by="replay")
    return report(
        scenario(
            CaseResult(
                BenchCase("50%", "tokens", Mode.RESUME, fraction=0.5),
                (system("torch", trials=replayed), system("dataplane", trials=seconds)),
            ),
            name="resume",
        )
    )


def full(seed: int = 1, rounds: int = 3) -> BenchReport:
    """Every scenario and every system, as a long run would give them."""
    dice = random.Random(seed)
    strength = {name: 0.2 + 0.75 * dice.random() for name in ALL} | {OURS: 1.3}
    found = []
    for each in SCENARIOS.values():
        default = each.name if each.name in SAMPLE_BYTES else "tokens"
        cases = [_full_case(case, dice, strength, rounds) for case in each.cases(Scale(default, 4))]
        found.append(ScenarioResult(each.name, each.question, each.bound, tuple(cases)))
    names = ("tokens", "rows", "images", "tabular", "text")
    return report(
        *found,
        workloads=tuple(workload(name) for name in names),
        sample_bytes=SAMPLE_BYTES,
        versions={name: {TITLES[name]: "1.2.3", "torch": "2.13.0"} for name in ALL},
        seconds=1812.0,
    )


_TOP = {
    "tokens": 400_000.0,
    "rows": 400_000.0,
    "images": 900.0,
    "tabular": 2_000_000.0,
    "text": 180_000.0,
}


def _full_case(case: BenchCase, dice: random.Random, strength: dict, rounds: int) -> CaseResult:
    top = _TOP[case.workload] * (0.3 if case.store is StorageKind.S3 else 1.0)
    systems = []
    for name in ALL:
        if name == HARNESS and (case.mode is not Mode.STEADY or case.step_ms):
            systems.append(system(name, refused="it reads nothing"))
        elif name == "ffcv" and case.workload != "images":
            systems.append(system(name, refused="it has a format for images only"))
        elif name == "ray" and case.store is StorageKind.S3:
            systems.append(system(name, error="TrialFailed: no answer within 180 s\nlog\nrefused"))
        else:
            systems.append(_full_system(name, case, dice, top * strength[name], rounds))
    bounds = ()
    if case.mode in (Mode.STEADY, Mode.EPOCH) and not case.step_ms:
        limits = tuple(top * 1.6 * dice.uniform(0.97, 1.03) for _ in range(rounds))
        bounds = (HardwareBound("gather, one core", limits),)
    return CaseResult(case, tuple(systems), bounds)


def _full_system(name, case, dice, strength, rounds) -> SystemResult:
    rate = 50 * _TOP[case.workload] if name == HARNESS else strength
    if case.step_ms:
        rate = min(rate, 64_000 / case.step_ms)
    count = 1 if name == HARNESS else rounds
    made = tuple(_trial(at, name, case, dice, rate) for at in range(count))
    choices = ({"num_workers": 2, "prefetch_factor": 4}, {"num_workers": 4}, {"num_workers": 0})
    known = random.Random(f"{name} {case.workload} {case.store} {case.ranks} {case.jobs}")
    sweep = tuple(Tried(one, _TOP[case.workload] * known.uniform(0.3, 1)) for one in choices)
    if name == "mosaic":
        sweep = (*sweep[:2], Tried(choices[2], error="ValueError: no\nwhere\nValueError: no"))
    return system(
        name,
        describes=f"{TITLES[name]}'s own shards, shuffled with a buffer",
        settings=choices[0],
        sweep=sweep,
        digest="120fc8a75e7b8247",
        trials=made,
        same_samples=None if name == HARNESS else name != "tf.data",
    )


def _trial(at: int, name: str, case: BenchCase, dice: random.Random, rate: float) -> dict:
    noise = 0.3 if name == "grain" else 0.03
    rate *= dice.uniform(1 - noise, 1 + noise)
    first = 0.4 + 4e5 * dice.uniform(0.2, 1) / max(rate, 1e5)
    peak = int(2**30 * dice.uniform(0.4, 1.6))
    memory = [
        [round(0.25 * step, 2), int(peak * min(1, 0.3 + step / 10)), int(peak * 0.3)]
        for step in range(14)
    ]
    found = {"round": at, "memory": memory, "memory_peak": peak, "first_batch_s": first}
    if case.mode is Mode.RESUME:
        replays = name in ("huggingface", "webdataset", "ffcv")
        late = first + (case.fraction * 12 if replays else 0)
        return found | {"first_batch_s": late, "by": "replay" if replays else "state"}
    if case.mode in (Mode.FIRST, Mode.RESTART):
        return found | {"cpu_s": first * 1.4}
    wait = 64 / rate * 1000
    found |= {
        "samples_per_s": rate,
        "sample_count": rate * 1.5,
        "seconds": 1.5,
        "cpu_s": 2.4,
        "cpu_s_per_million": 2.4e6 / (rate * 1.5),
        "wait_p50_ms": wait * 0.8,
        "wait_p99_ms": wait * dice.uniform(2, 30),
        "timeline": [
            [round(0.1 * step, 1), rate * dice.uniform(0.9, 1.1)] for step in range(1, 16)
        ],
        "trainer_cpu_share": dice.uniform(0.1, 1.0),
    }
    if case.mode is Mode.STEADY:
        found |= {"stall_share": min(1.0, wait / 5), "step_ms": case.step_ms or 5.0}
    return found


def damaged() -> st.SearchStrategy[object]:
    """The small report as JSON, with another value at one place."""
    told = json.loads(results.to_json(small()))
    wrong = st.sampled_from([None, 3, -1.5, "x", True, [], {}, [None]])
    return st.builds(_replaced, st.just(told), st.sampled_from(list(_places(told))), wrong)


def _replaced(told, path, value):
    if not path:
        return value
    if isinstance(told, dict):
        return {**told, path[0]: _replaced(told[path[0]], path[1:], value)}
    return [
        _replaced(one, path[1:], value) if at == path[0] else one for at, one in enumerate(told)
    ]


def _places(told, path=()) -> Iterator[tuple]:
    yield path
    inner = told if isinstance(told, list | dict) else ()
    for at, one in inner.items() if isinstance(inner, dict) else enumerate(inner):
        yield from _places(one, (*path, at))
