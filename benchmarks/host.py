"""What does a loader make of a whole host? At most eight minutes, with or without a GPU.

    python benchmarks/host.py [--part NAME ...] [--json FILE] [--quick]

Each part runs in processes of its own, has a time limit, and fails alone:

    workers   images a second by the number of workers: 1, 2, 4, … and all cores
    scaling   a collate and a map that only wait, and a store that does (benchmarks/scaling.py)
    local     images and tokens from local disk, torch beside (`dataplane bench`)
    s3        the same from S3, 20 ms away, with the server on cores of its own if there are eight
    device    stalls of device= and pin_memory=; needs a GPU (benchmarks/device.py)
    training  ResNet-50 and a transformer, as shares of the GPU's rate; needs one (training.py)

One table says what each has measured; `--json` writes it with all that the parts have written.
`--quick` takes small samples and short turns, to see that everything runs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from dataplane_bench import processes
from dataplane_bench.folders import bench_folder
from dataplane_bench.machine import machine_facts
from dataplane_bench.report import results
from dataplane_bench.report.cells import median
from dataplane_bench.report.figures import case_figures

HERE = Path(__file__).parent
NO_GPU = "there is no CUDA device"
LARGE_HOST = 8
"""Cores from which on samples are large: a small host would need minutes to make them."""
GRACE_S = 15.0
_CROP = 224


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. `torch` is the same figure of torch, where it was measured."""

    part: str
    what: str
    figure: str
    torch: str = ""
    ratio: str = ""
    more: str = ""


@dataclass(frozen=True, slots=True)
class Given:
    """How a part is to run: where it may write, how long, and how much."""

    folder: Path
    limit_s: float
    is_quick: bool

    def json_of(self, command: list[str]) -> Any:
        """What a command writes to a file that is its last argument.

        Raises:  RuntimeError: it failed, or took too long; has the end of its output.
        """
        path = self.folder / "found.json"
        path.unlink(missing_ok=True)
        self._run([*command, str(path)])
        return json.loads(path.read_text())

    def output_of(self, command: list[str]) -> str:
        """What a command writes to stdout.   Raises:  RuntimeError: as `json_of`."""
        self._run(["sh", "-c", 'exec "$@" > "$0"', str(self.folder / "out"), *command])
        return (self.folder / "out").read_text()

    def _run(self, command: list[str]) -> None:
        log = self.folder / "log"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with processes.running(command, environment, log) as process:
            try:
                process.wait(self.limit_s)
            except subprocess.TimeoutExpired:
                # `dataplane bench` reports what is complete.
                os.killpg(process.pid, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
        if process.returncode and not self._is_written():
            why = f"exit status {process.returncode}"
            raise RuntimeError(f"{why} within {self.limit_s:.0f} s; {processes.tail(log)[-800:]}")

    def _is_written(self) -> bool:
        return any(
            path.exists() and path.stat().st_size
            for path in (self.folder / "found.json", self.folder / "out")
        )


Part = Callable[[Given], tuple[list[Row], Any]]


def workers(given: Given) -> tuple[list[Row], Any]:
    """Images a second by the number of workers."""
    cores = len(os.sched_getaffinity(0))
    powers = itertools.takewhile(lambda count: count < cores, (1 << n for n in range(12)))
    counts = [*powers, cores]
    url, found, rows = str(_images(given)), [], []
    deadline = time.monotonic() + given.limit_s
    for count in counts:
        seconds = 0.1 if given.is_quick else 3.0
        command = [sys.executable, __file__, "--read", url, str(count), str(seconds)]
        left = max(1.0, deadline - time.monotonic())
        each = Given(given.folder, left, given.is_quick).json_of(command)
        found.append(each)
        first = found[0]["rate"] / counts[0]
        rows.append(
            Row(
                *("workers", f"{count} workers", f"{each['rate']:,.0f} images/s"),
                ratio=f"{each['rate'] / first:.2f} x one",
                more=f"{each['cores']:.1f} of {cores} cores busy",
            )
        )
    return rows, found


def _images(given: Given) -> Path:
    from dataplane_bench.workloads.generate import generated

    return generated("images", bench_folder() / "source", _scale(given)).source


def _scale(given: Given) -> float:
    return 0.01 if given.is_quick else 1.0


def _read(url: str, worker_count: int, seconds: float, path: str) -> None:
    """Images a second of a loader that is warm, and how many cores were busy."""
    os.environ["DATAPLANE_WORKER_COUNT"] = str(worker_count)
    from dataplane_torch import DataLoader, RandomHorizontalFlip, RandomResizedCrop

    steps: list[Any] = [RandomResizedCrop(_CROP), RandomHorizontalFlip()]
    with DataLoader(url, 64, shuffle=True, seed=1, transforms={"image": steps}) as loader:
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        next(batches)
        began = time.perf_counter()
        while time.perf_counter() - began < seconds / 2:  # what was made ahead is used up
            next(batches)
        count, began, busy = 0, time.perf_counter(), _busy_s()
        while time.perf_counter() - began < seconds:
            count += len(next(batches)["image"])
        took = time.perf_counter() - began
        found = {"rate": count / took, "cores": (_busy_s() - busy) / took}
    Path(path).write_text(json.dumps({"workers": worker_count, **found}))


def _busy_s() -> float:
    """CPU seconds of this process and all below it."""
    total, process = 0.0, psutil.Process()
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            total += sum(each.cpu_times()[:2])
    return total


def scaling(given: Given) -> tuple[list[Row], Any]:
    """Functions that only wait, and a store that does."""
    command = [sys.executable, str(HERE / "scaling.py"), "--workers"]
    command += ["2", "--only", "collate", "--seconds", "0.5"] if given.is_quick else ["4", "16"]
    found = given.json_of([*command, "--json"])
    rows: list[Row] = []
    first: dict[str, float] = {}
    for each in found:
        kind = each["kind"]
        if kind == "store":
            first_s = each["under_way"][0]
            more = f"{first_s['mb']:.0f} MB asked for in the first {first_s['until_s']:g} s"
            rows.append(Row("scaling", "store", f"{each['gb_per_s']:.2f} GB/s", more=more))
            continue
        rate = each["calls_per_s"]
        ratio = f"{rate / max(first.setdefault(kind, rate), 1e-9):.2f} x"
        what, more = f"{kind}, {each['workers']} workers", f"{each['busy']:.1f} at once"
        rows.append(Row("scaling", what, f"{rate:.1f} calls/s", ratio=ratio, more=more))
    return rows, found


def local(given: Given) -> tuple[list[Row], Any]:
    """From local disk, torch beside."""
    return _bench(given, "local", ["images/local", "tokens/local"], _scale(given))


def s3(given: Given) -> tuple[list[Row], Any]:
    """From a server with cores of its own, where there are enough."""
    is_large = len(os.sched_getaffinity(0)) >= LARGE_HOST and not given.is_quick
    scenarios = ["tokens/s3-cold", "images/s3-cold"]
    return _bench(given, "s3", scenarios, 4.0 if is_large else _scale(given))


def _bench(given: Given, part: str, scenarios: list[str], scale: float) -> tuple[list[Row], Any]:
    command = [sys.executable, "-m", "dataplane", "bench", "--json", "--scale", str(scale)]
    command += ["--rounds", "1", "--peers", "none" if given.is_quick else "torch"]
    command += ["--window", "0.3" if given.is_quick else "3"]
    text = given.output_of([*command, *(f"--scenario={each}" for each in scenarios)])
    path = given.folder / "report.json"
    path.write_text(text)
    rows = []
    for case in case_figures(results.read(path)):
        ours, torch = case.ours, case.best_peer
        if ours is None or ours.samples_per_s is None:
            continue
        bound = "" if ours.of_bound is None else f"{ours.of_bound:.2f} of the bound, "
        cpu = f"{ours.cpu_s_per_million or 0.0:,.1f} CPU s a million"
        theirs = "" if torch is None else f"{_rate(torch)} samples/s"
        if torch is not None and torch.cpu_s_per_million:
            cpu += f" (torch {torch.cpu_s_per_million:,.1f})"
        ratio = "" if torch is None or torch.ratio is None else f"{torch.ratio.median:.2f} x torch"
        what = f"{case.scenario}, {case.case.label}"
        rows.append(Row(part, what, f"{_rate(ours)} samples/s", theirs, ratio, bound + cpu))
    return rows, json.loads(text)


def _rate(figures: Any) -> str:
    return f"{median(figures.samples_per_s) or 0.0:,.0f}"


def device(given: Given) -> tuple[list[Row], Any]:
    """Stalls of a step that reads its loss."""
    command = [sys.executable, str(HERE / "device.py"), "--json", "--seconds", "4"]
    found = json.loads(given.output_of(command))
    steps = found["steps"]["step_ms"]
    (_, bare), *others = steps.items()
    rows = [
        Row("device", way, f"{ms - bare:.1f} ms stall", more=f"a step of {bare:.0f} ms")
        for way, ms in others
    ]
    return rows, found


def training(given: Given) -> tuple[list[Row], Any]:
    """Models, as shares of the GPU's own rate."""
    found = given.json_of([sys.executable, str(HERE / "training.py"), "--seconds", "7", "--json"])
    rows = []
    for model, rates in found["samples_per_s"].items():
        own = next(iter(rates.values()))
        for way, value in rates.items():
            share = f"{value / own:.1%} of the GPU's"
            rows.append(Row("training", f"{model}, {way}", f"{value:,.0f} samples/s", ratio=share))
    return rows, found


PARTS: Mapping[str, tuple[Part, float]] = {
    "workers": (workers, 70.0),
    "scaling": (scaling, 70.0),
    "local": (local, 90.0),
    "s3": (s3, 120.0),
    "device": (device, 45.0),
    "training": (training, 85.0),
}
"""Each with its limit in seconds: eight minutes in all."""
NEEDS_GPU = ("device", "training")


def _measured(names: list[str], folder: Path, *, is_quick: bool) -> Iterator[tuple[str, Any]]:
    """Each part's name with its rows and its own output; or with the reason why it has none."""
    for name in names:
        part, limit_s = PARTS[name]
        own = folder / name
        own.mkdir()
        print(f"{name}, at most {limit_s:.0f} s", file=sys.stderr, flush=True)
        if name in NEEDS_GPU and not _has_gpu():
            yield name, NO_GPU
            continue
        try:
            yield name, part(Given(own, limit_s, is_quick))
        except Exception as error:  # noqa: BLE001 - a part that fails does not stop the others
            yield name, f"failed: {type(error).__name__}: {error}"


def _has_gpu() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or find_spec("torch") is None:
        return False  # without the two seconds that the import takes
    import torch

    return torch.cuda.is_available()


def main() -> int:
    """Exit status 1: a part failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--read", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        url, count, seconds, path = given.read
        _read(url, int(count), float(seconds), path)
        return 0
    began, rows, found, has_failed = time.monotonic(), [], {}, False
    with tempfile.TemporaryDirectory() as folder:
        for name, told in _measured(given.part, Path(folder), is_quick=given.quick):
            if isinstance(told, str):
                rows.append(Row(name, told, ""))
                has_failed = has_failed or told != NO_GPU
            else:
                rows += told[0]
                found[name] = told[1]
    facts = machine_facts(bench_folder())
    print(_table(rows, facts, time.monotonic() - began))
    if given.json:
        report = {"machine": facts, "rows": [asdict(row) for row in rows], "parts": found}
        given.json.write_text(json.dumps(report, indent=1))
    return 1 if has_failed else 0


def _table(rows: list[Row], facts: Mapping[str, Any], seconds: float) -> str:
    host = ", ".join((facts["cpu"], f"{facts['cores']} cores", f"Python {facts['python']}"))
    lines = [
        f"{host}, {seconds / 60:.1f} min",
        "",
        "| part | what | Dataplane | torch | ratio | |",
        "|---|---|--:|--:|--:|---|",
    ]
    for row in rows:
        cells = (row.part, row.what, row.figure, row.torch, row.ratio, row.more)
        lines.append("| " + " | ".join(" ".join(cell.split()) for cell in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
