"""A job over several hosts, which are network namespaces of this machine, while hosts fail.

    python tests/hosts.py [--quick] [--rounds 30] [--hosts 4] [--ranks 2] [--epochs 3] [--json]

A real S3 server, a coordinator with TLS and a token, and on each host a node with its trainers, over
a network that delays packets and loses some. First a job without faults reads its epochs: every
sample once, in the order of the plan, which is that of a job on one host. Then a job reads while
nodes are killed and stopped, and hosts cut off, in turn; a table tells how long trainers waited.
Exits with 1 if a sample was lost or repeated, or a trainer ended. Needs root, or namespaces of
users, and /dev/net/tun; leaves nothing behind, however it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hosts_namespaces
import hosts_network
import numpy as np
from hosts_faults import KINDS, Faults, Round
from hosts_origin import Plan, epoch_reads, later_reads
from hosts_service import READS, ROW_BYTES, URL, Failed, Job, Service, Shape, started

QUICK: dict[str, Any] = {
    "rounds": 3, "hosts": 2, "mib": 24, "arena": "8MiB", "window": 512, "lanes": 4, "stop_s": 5.0,
    "lease_s": 3.0, "step_ms": 20, "epochs": 2,
}  # fmt: skip


def main() -> int:
    given = _given(sys.argv[1:])
    if reason := hosts_namespaces.why_not():
        sys.exit(f"hosts.py: not on this machine: {reason}")
    hosts_namespaces.live_inside()
    shape = Shape(
        given.ranks, given.workers, given.batch, given.lanes, given.window, given.seed,
        given.lease_s, _arena(given),
    )  # fmt: skip
    names = ["coordinator", "store", *(f"host-{i}" for i in range(given.hosts))]
    delay_s = given.delay_ms / 1e3
    with (
        hosts_namespaces.scratch(f"{4 * given.mib + 512}m") as folder,
        _kept(folder, given.keep),
        hosts_network.network(given.network, names, delay_s, given.loss) as (network, hosts),
    ):
        tell = _Tell(as_json=given.json)
        tell("network", network.description, network.description)
        tell("load", os.getloadavg(), f"load before: {os.getloadavg()[0]:.2f}")
        try:
            with started(folder, hosts, shape, given.mib) as service:
                plan = Plan(URL, shape)
                _without_faults(service, plan, given, tell)
                _with_faults(service, network, plan, given, tell)
        except Failed as failure:
            tell("failed", str(failure), f"FAILED: {failure}")
        tell("load_after", os.getloadavg(), f"load after: {os.getloadavg()[0]:.2f}")
        return tell.end()


class _Tell:
    """Lines for people as they come, or one JSON object at the end."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json, self._told = as_json, dict[str, Any]()

    def __call__(self, key: str, value: Any, line: str) -> None:
        self._told[key] = value
        if not self._as_json:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    def end(self) -> int:
        if self._as_json:
            sys.stdout.write(json.dumps(self._told) + "\n")
        return int("failed" in self._told)


def _check(name: str, plan: Plan, found: Sequence[np.ndarray]) -> None:
    """Raises:  Failed: these epochs are not the planned ones."""
    for number, epoch in enumerate(found):
        planned = plan.epoch(number)
        wrong = np.flatnonzero(epoch != planned)
        if len(wrong):
            raise Failed(
                f"{name}: epoch {number} differs from the plan at {len(wrong)} of {len(epoch)} "
                f"positions, first at {wrong[0]}; it has {len(np.unique(epoch))} different samples"
            )


def _without_faults(service: Service, plan: Plan, given: argparse.Namespace, tell: _Tell) -> None:
    took_s, found = {}, {}
    for name, hosts, per_host in (
        ("all-hosts", service.hosts[2:], given.ranks),
        ("one-host", service.hosts[2:3], 1),
    ):
        began = time.monotonic()
        job = service.launch(name, hosts, per_host, 0.0)
        job.end_after(given.epochs)
        job.wait()
        took_s[name] = round(time.monotonic() - began, 1)
        found[name] = job.epochs(service.row_count)
        if name == "all-hosts":
            _tell_reads(service, plan, job, tell)
        if len(found[name]) != given.epochs:
            raise Failed(f"{name}: {len(found[name])} epochs, not {given.epochs}")
        _check(name, plan, found[name])
    equal = all(map(np.array_equal, found["all-hosts"], found["one-host"]))
    if not equal:
        raise Failed("the global batches of all hosts differ from those of one host")
    size = service.row_count * ROW_BYTES / 1e6
    tell("without_faults_s", took_s, (
        f"{given.epochs} epochs of {service.row_count} samples ({size:.0f} MB): each sample once an "
        f"epoch, in the same order on {given.hosts} hosts with {given.hosts * given.ranks} ranks "
        f"({took_s['all-hosts']} s with their start) as on one with one rank ({took_s['one-host']} s)"
    ))  # fmt: skip


def _tell_reads(service: Service, plan: Plan, job: Job, tell: _Tell) -> None:
    """Where the bytes of the first job came from."""
    reads = epoch_reads(service.folder / READS, plan, job)
    lines = [
        f"epoch {one.epoch}: {one.origin_bytes / 1e6:.1f} MB from the store, of which "
        f"{one.again_bytes / 1e6:.1f} MB again and {one.ahead_bytes / 1e6:.1f} MB for the next "
        f"epoch; without these, {one.share:.3f} x dataset"
        for one in reads
    ]
    tell("origin", [asdict(one) for one in reads], "\n".join(lines))
    hosts = len({rank.host.address for rank in job.ranks})
    later = later_reads(plan, reads, len(job.ranks), hosts)
    tell("eviction", asdict(later), (
        f"epochs after the first read {later.measured_bytes / 1e6:.1f} MB from the store; LRU with "
        f"the same memory would read {later.least_recent_bytes / 1e6:.1f} MB, "
        f"{later.better:.2f} times as much"
    ))  # fmt: skip
    counts = service.reads()
    told = ", ".join(
        f"{name} {count / 1e6:.1f} MB" for name, count in counts.items() if name.endswith("_bytes")
    )
    tell("reads", counts, f"as the nodes count: {told}")


def _with_faults(
    service: Service,
    network: hosts_network.Network,
    plan: Plan,
    given: argparse.Namespace,
    tell: _Tell,
) -> None:
    if not given.rounds:
        return
    partition_s = given.lease_s * 1.5 + 1
    lasts_s = dict.fromkeys(KINDS, partition_s) | {
        "kill": 0.0, "stop": given.stop_s, "freeze": given.stop_s,
    }  # fmt: skip
    job = service.launch("faults", service.hosts[2:], given.ranks, given.step_ms / 1e3)
    faults = Faults(service, network, job, given.step_ms / 1e3, lasts_s)
    rounds: list[Round] = []
    tell("kinds", given.faults, _HEAD)
    try:
        faults.settle()
        for one in faults.run(given.faults, given.rounds, given.seed):
            rounds.append(one)
            tell("rounds", [asdict(each) for each in rounds], _row(one))
    finally:
        tell("starts", [node.starts for node in service.nodes], _totals(rounds))
    # Nobody has begun this epoch, nor will have when the order arrives.
    job.end_after(max(int(rank.steps()["epoch"][-1]) for rank in job.ranks) + 2)
    job.wait()
    found = job.epochs(service.row_count)
    _check("with faults", plan, found)
    tell("epochs_with_faults", len(found), (
        f"{len(found)} epochs with {len(rounds)} faults: each sample once an epoch, in the planned "
        f"order; no trainer ended"
    ))  # fmt: skip


_HEAD = (
    f"{'':>3} {'fault':<15} {'host':<8} {'lasts s':>8} {'longest gap s':>14} "
    f"{'on others s':>12} {'back after s':>13}"
)


def _row(one: Round) -> str:
    return (
        f"{one.number:>3} {one.fault:<15} {one.host:<8} {one.fault_s:>8.2f} {one.gap_s:>14.2f} "
        f"{one.others_gap_s:>12.2f} {one.back_s:>13.2f}"
    )


def _totals(rounds: Sequence[Round]) -> str:
    lines = []
    for kind in dict.fromkeys(one.fault for one in rounds):
        those = [one for one in rounds if one.fault == kind]
        lines.append(
            f"{kind}: {len(those)} rounds, gap at most {max(r.gap_s for r in those):.2f} s (others "
            f"{max(r.others_gap_s for r in those):.2f} s), back {max(r.back_s for r in those):.2f} s "
            f"after its end: {KINDS[kind]}"
        )
    return "\n".join(lines)


def _arena(given: argparse.Namespace) -> str:
    """A quarter of the dataset is that of all nodes together."""
    return f"{given.mib // given.hosts // 4}MiB" if given.arena == "quarter" else given.arena


@contextlib.contextmanager
def _kept(folder: Path, keep: Path | None) -> Iterator[None]:
    """Copy logs and what ranks wrote at the end."""
    try:
        yield
    finally:
        if keep is not None:
            ignored = shutil.ignore_patterns("s3-*", "*.sock", "*.key", "*.sqlite*")
            shutil.copytree(folder, keep, ignore=ignored, dirs_exist_ok=True)


def _given(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="small and short")
    parser.add_argument("--rounds", type=int, default=30, help="how many faults")
    parser.add_argument("--faults", type=str, default=",".join(KINDS), help="which, in turn")
    parser.add_argument("--epochs", type=int, default=3, help="of the jobs without faults")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--workers", type=int, default=1, help="of each node")
    parser.add_argument("--mib", type=int, default=128, help="size of the dataset")
    parser.add_argument("--arena", default="24MiB", help="for blocks, of each node, or quarter")
    parser.add_argument("--batch", type=int, default=512, help="samples of a global batch")
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--step-ms", type=float, default=50, help="a rank's pace, with faults")
    parser.add_argument("--stop-s", type=float, default=20.0, help="how long nodes are stopped")
    parser.add_argument("--lease-s", type=float, default=10.0)
    parser.add_argument("--network", choices=hosts_network.KINDS, default="auto")
    parser.add_argument("--delay-ms", type=float, default=1.0, help="each way")
    parser.add_argument("--loss", type=float, default=0.001, help="share of packets")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="copy logs to this folder")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end")
    if "--quick" in arguments:
        parser.set_defaults(**QUICK)
    given = parser.parse_args(arguments)
    given.faults = given.faults.split(",")
    if unknown := set(given.faults) - set(KINDS):
        parser.error(f"unknown faults: {', '.join(sorted(unknown))}; known: {', '.join(KINDS)}")
    return given


if __name__ == "__main__":
    sys.exit(main())
