"""The demo: shards in S3 -> a daemon -> two DDP ranks -> SIGKILL in mid-epoch -> exact resume.

    python -m dataplane_bench.demo [--quick] [--json] [--keep]

Exit status: 0 if the proof holds, 1 if it does not, 2 if the demo itself failed. In any case,
Ctrl-C included, it leaves no process and no file behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from dataplane.model.errors import DataplaneError
from dataplane.settings import CONFIG_VARIABLE, SETTINGS
from dataplane_bench.demo import proof
from dataplane_bench.demo.proof import Proof
from dataplane_bench.demo.stages import (
    EPOCH,
    SEED,
    DemoLength,
    DemoReport,
    Stages,
    Watch,
    rates,
    saved_in,
)
from dataplane_bench.processes import ProcessEnded

STEPS, QUICK_STEPS, STEPS_MIN = 200, 16, 16
EXIT_FAILED = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """Raised when a signal asks the demo to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def demonstrate(stages: Stages, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Run all stages; return their results as plain values."""
    report, length = stages.report, stages.length
    server = stages.storage(stack)
    text = stages.shards(server)
    manifest = stages.index(server)
    service = stages.serve(server, stack)
    run = stages.run_of(service)
    ports = {server.port: "S3", int(service.address.rpartition(":")[2]): "the coordinator"}
    watch = Watch(ports)
    first = stages.train_and_kill(run, service, watch)
    second = stages.resume(run, watch)
    passed = stages.uninterrupted(run)
    drained = stages.drain(service)
    saved = saved_in(run)
    kept = saved["kept"].numpy()
    before, after = (proof.steps_of(launch.steps) for launch in (first, second))
    resumed_from = min(after) - 1
    planned = proof.planned_ids(manifest, SEED, EPOCH)
    checks = [
        proof.complete(kept[:, 0], manifest.sample_count),
        proof.as_planned(kept[:, 0], planned),
        proof.as_uninterrupted(kept, passed),
        proof.right_content(kept, text.sums()),
        proof.made_again(before, after, resumed_from),
        proof.kept_apart(watch.looks, watch.offences),
    ]
    samples_per_s, bytes_per_s, waited = rates(second.steps[0][1:], run, length.resume_ranks)
    losses = {
        "first": before[min(before)][1],
        "at_checkpoint": before[resumed_from][1],
        "before_kill": before[resumed_from + 1][1],
        "at_kill": before[max(before)][1],
        "after_resume": after[min(after)][1],
        "last": after[max(after)][1],
    }
    _show(report, checks, losses, (min(before), resumed_from, max(before), max(after)))
    return {
        "holds": all(check.holds for check in checks),
        "checks": {check.name: {"holds": check.holds, "found": check.evidence} for check in checks},
        "samples": manifest.sample_count,
        "steps": max(after),
        "killed_after_step": max(before),
        "resumed_from_step": resumed_from,
        "loader_state": saved["loader"],
        "losses": losses,
        "rates": {
            "samples_per_s": round(samples_per_s, 1),
            "bytes_per_s": round(bytes_per_s, 1),
            "waiting_share": round(waited, 4),
            "first_batch_s": round(first.steps[0][0].wait_s, 3),
        },
        "service_exit_status": drained,
    }


def _show(
    report: DemoReport, checks: Sequence[Proof], losses: dict[str, float], at: tuple[int, ...]
) -> None:
    began, resumed_from, killed, ended = at
    report.section("Proof")
    report.note(
        "The samples that the last checkpoint covers, from both launches, compared with the text, "
        "the plan and the uninterrupted pass.\n"
    )
    report.proof(checks)
    again = resumed_from + 1
    rows = (
        (f"step {began}, the first", "first"),
        (f"step {resumed_from}, the checkpoint used to resume", "at_checkpoint"),
        (f"step {again}, before the kill", "before_kill"),
        (f"step {killed}, the kill", "at_kill"),
        (f"step {again}, after the resume", "after_resume"),
        (f"step {ended}, the last", "last"),
    )
    report.figures({f"loss at {name}": f"{losses[key]:.3f}" for name, key in rows})


def _environment(folder: Path) -> dict[str, str]:
    """The environment of all processes of the demo, without the user's settings, credentials and
    folders.
    """
    ours = {setting.variable for setting in SETTINGS} | {CONFIG_VARIABLE}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith("AWS_")
    }
    folders = {
        variable: str(folder / name)
        for variable, name in (
            ("XDG_CACHE_HOME", "cache"),
            ("XDG_CONFIG_HOME", "config"),
            ("XDG_STATE_HOME", "state"),
        )
    }
    return kept | folders | {"TMPDIR": str(folder)}


def _stand_alone() -> None:
    """Drop inherited credentials and proxies: the demo uses only the loopback interface."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """The first signal raises Interrupted; later ones are ignored, so that cleanup can finish."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        for ignored in _SIGNALS:
            signal.signal(ignored, signal.SIG_IGN)
        raise Interrupted(number)

    for number in _SIGNALS:
        signal.signal(number, on_signal)
    yield
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _folder(report: DemoReport, *, keep: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="dataplane-demo-"))
    try:
        yield folder
    finally:
        if keep:
            report.note(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make demo", description="Shards in S3, two DDP ranks, SIGKILL, and an exact resume."
    )
    parser.add_argument("--steps", type=int, help=f"steps of the epoch (default {STEPS})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps")
    parser.add_argument("--ranks", type=int, default=2, help="ranks before the kill (default 2)")
    parser.add_argument("--resume-ranks", type=int, help="ranks after it (default: as many)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON to stdout")
    parser.add_argument("--keep", action="store_true", help="keep the folder with all files")
    arguments = parser.parse_args(given)
    arguments.steps = arguments.steps or (QUICK_STEPS if arguments.quick else STEPS)
    arguments.resume_ranks = arguments.resume_ranks or arguments.ranks
    if arguments.steps < STEPS_MIN:
        parser.error(
            f"--steps {arguments.steps}: pass {STEPS_MIN} or more, for a kill in the middle"
        )
    if not all(1 <= ranks <= 8 for ranks in (arguments.ranks, arguments.resume_ranks)):
        parser.error("--ranks and --resume-ranks: pass 1 to 8")
    return arguments


def main(given: Sequence[str]) -> int:
    """Run the demo; return its exit status."""
    arguments = _arguments(given)
    report = DemoReport(to_stderr=arguments.json)
    began = time.monotonic()
    _stand_alone()
    try:
        with (
            _interruptible(),
            _folder(report, keep=arguments.keep) as folder,
            contextlib.ExitStack() as stack,
        ):
            report.title(
                "Dataplane: shards in S3 -> a daemon -> DDP ranks -> SIGKILL -> exact resume",
                f"Everything runs on this machine, in {folder}",
            )
            length = DemoLength(arguments.steps, arguments.ranks, arguments.resume_ranks)
            stages = Stages(length, folder, _environment(folder), report)
            results = demonstrate(stages, stack)
    except Interrupted as stopped:
        report.note("\nstopped; nothing is left behind")
        return 128 + stopped.number
    except (ProcessEnded, DataplaneError, OSError, ValueError, subprocess.SubprocessError) as error:
        report.error(str(error))
        return EXIT_FAILED
    total_s = round(time.monotonic() - began, 1)
    outcome = "The proof holds" if results["holds"] else "THE PROOF DOES NOT HOLD"
    report.verdict(holds=results["holds"], text=f"{outcome}. {total_s:g} s.")
    if arguments.json:
        print(json.dumps(results | {"seconds": stages.seconds, "total_s": total_s}, indent=2))
    return 0 if results["holds"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
