"""A job over two hosts for a chosen time, with metrics on, while its service is upgraded and restored.

    python tests/soak.py [--minutes 40] [--before HEAD~1] [--keep FOLDER]

Hosts, network, store and job are those of tests/hosts.py. Coordinator and nodes start as the commit
`--before`. In the first half of the time, a node, the coordinator and the other node are replaced by
those of this tree, one by one, and the coordinator's database is lost and restored from a copy.
Exits with 1 if a sample was lost or repeated, a trainer ended, metrics were not to be had, or a
process grew in memory or file descriptors over the second half.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import hosts_namespaces
import hosts_network
import numpy as np
import psutil
import scrapes
from hosts_faults import Faults
from hosts_origin import Plan
from hosts_service import TOKEN, URL, Failed, Job, Node, Service, Shape, started

ROOT = Path(__file__).resolve().parents[1]
PORT = 9400
STEP_S = 0.1
DRAIN_S = 15.0
SAMPLE_S = 5.0
MIB = 64
SAMPLES_MIN = 4
GROWTH, GROWTH_BYTES, GROWTH_FDS = 1.05, 8 << 20, 4
"""How much larger a process may be at the end of the second half than at its start."""
DATABASE = "coordinator.sqlite"

_pause = threading.Event()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--before", default="HEAD~1", help="the commit that is upgraded")
    parser.add_argument("--keep", type=Path, help="copy logs to this folder")
    given = parser.parse_args()
    if reason := hosts_namespaces.why_not():
        sys.exit(f"soak.py: not on this machine: {reason}")
    hosts_namespaces.live_inside()
    shape = Shape(2, 1, 512, 4, 512, 1, 10.0, "24MiB")
    names = ["coordinator", "store", "host-0", "host-1"]
    with (
        hosts_namespaces.scratch("4096m") as folder,
        hosts_network.network("auto", names, 0.001, 0.001) as (network, hosts),
        contextlib.ExitStack() as stack,
    ):
        if given.keep:
            stack.callback(_keep, folder, given.keep)
        environ = _commit(given.before, folder / "before")
        environ["DATAPLANE_METRICS_LISTEN"] = f"0.0.0.0:{PORT}"
        try:
            with started(folder, hosts, shape, MIB, environ) as service:
                _soak(service, network, given.minutes * 60)
        except Failed as failure:
            _say(f"FAILED: {failure}")
            return 1
    return 0


def _soak(service: Service, network: hosts_network.Network, lasts_s: float) -> None:
    """Raises:  Failed: something that was promised did not hold."""
    job = service.launch("soak", service.hosts[2:], service.shape.ranks, STEP_S)
    faults = Faults(service, network, job, STEP_S, {})
    faults.settle()
    began, sizes = time.monotonic(), Sizes(service, job)
    coordinator, copy = service.control[0], service.folder / "copy.sqlite"
    events: list[tuple[str, Callable[[], None]]] = [
        ("upgrade of host-0", lambda: _restart(service.nodes[0], _upgraded)),
        ("upgrade of the coordinator", lambda: _restart(coordinator, _upgraded)),
        ("upgrade of host-1", lambda: _restart(service.nodes[1], _upgraded)),
        ("copy of the database", lambda: _restart(coordinator, lambda at: _copy(at, copy))),
        ("loss of the database", lambda: _restart(coordinator, lambda at: _restore(at, copy))),
    ]
    for number, (name, act) in enumerate(events):
        sizes.watch_until(began + lasts_s / 2 * (number + 1) / (len(events) + 1))
        started_at = time.monotonic()
        act()
        faults.settle()
        gaps = [
            np.diff(t[t >= started_at - 1]).max() for t in (r.steps()["time"] for r in job.ranks)
        ]
        _say(f"{name}: no rank waited longer than {max(gaps):.2f} s for a batch")
    sizes.watch_until(began + lasts_s / 2)
    middle = len(sizes.at_s)
    sizes.watch_until(began + lasts_s)
    job.end_after(max(int(rank.steps()["epoch"][-1]) for rank in job.ranks) + 2)
    job.wait()
    plan, epochs = Plan(URL, service.shape), job.epochs(service.row_count)
    for number, epoch in enumerate(epochs):
        if wrong := np.flatnonzero(epoch != plan.epoch(number)).size:
            raise Failed(f"epoch {number} differs from the plan at {wrong} of {len(epoch)} places")
    count = sum(map(len, epochs))
    _say(f"{len(epochs)} epochs, {count} samples: each once an epoch, in the planned order")
    _say(f"{sizes.scrapes} scrapes; {[one.starts for one in (coordinator, *service.nodes)]} starts")
    sizes.check(middle)


@dataclass
class Sizes:
    """Memory and file descriptors of each process of the service and of each trainer, as time passes.

    A node counts with its children: it starts and ends them as it needs them.
    """

    service: Service
    job: Job
    at_s: list[float] = field(default_factory=list)
    scrapes: int = 0
    _seen: list[dict[str, tuple[int, int]]] = field(default_factory=list)

    def watch_until(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            self.job.check_alive()
            self.at_s.append(time.monotonic())
            self._seen.append({name: _size(family) for name, family in self._families()})
            self._scrape()
            _pause.wait(max(0.0, min(self.at_s[-1] + SAMPLE_S, deadline) - time.monotonic()))

    def _families(self) -> Iterator[tuple[str, list[psutil.Process]]]:
        for node in (*self.service.control, *self.service.nodes):
            yield node.host.name, node.family()
        for number, rank in enumerate(self.job.ranks):
            yield f"rank {number}", [psutil.Process(rank.process.pid)]

    def _scrape(self) -> None:
        tls = {
            name: self.service.environ[f"DATAPLANE_TLS_{name}"] for name in ("CA", "CERT", "KEY")
        }
        context = ssl.create_default_context(cafile=tls["CA"])
        context.check_hostname = False  # all hosts have the coordinator's certificate
        context.load_cert_chain(tls["CERT"], tls["KEY"])
        for node in (*self.service.control, *self.service.nodes):
            try:
                text = scrapes.page(f"{node.host.address}:{PORT}", TOKEN, context)
            except OSError as error:
                raise Failed(f"{node.host.name} shows no metrics: {error}") from error
            if "dataplane_process_memory_bytes" not in text and node in self.service.nodes:
                raise Failed(f"{node.host.name} shows no memory: {text[:400]}")
            self.scrapes += 1

    def check(self, middle: int) -> None:
        """Raises:  Failed: a process grew over the second half."""
        quarter, grown = (len(self._seen) - middle) // 4, []
        if quarter < SAMPLES_MIN:
            _say("too short for a comparison of sizes")
            return
        for name in self._seen[-1]:
            sizes = np.array([seen[name] for seen in self._seen[middle:]])
            first, last = np.median(sizes[:quarter], 0), np.median(sizes[-quarter:], 0)
            _say(
                f"{name:<12} {first[0] / 1e6:7.1f} -> {last[0] / 1e6:7.1f} MB   "
                f"{first[1]:4.0f} -> {last[1]:4.0f} file descriptors"
            )
            allowed = first[0] * GROWTH + GROWTH_BYTES, first[1] + GROWTH_FDS
            grown += [name] if (last > allowed).any() else []
        if grown:
            raise Failed(f"grew over the second half: {', '.join(grown)}")


def _size(family: list[psutil.Process]) -> tuple[int, int]:
    """Memory that a family has for itself, without arenas and files, and its descriptors."""
    memory, fds = 0, 0
    for process in family:
        with contextlib.suppress(psutil.Error):
            size = process.memory_info()
            memory, fds = memory + size.rss - size.shared, fds + process.num_fds()
    return memory, fds


def _restart(process: Node, change: Callable[[Node], None]) -> None:
    """Stop a process as systemd does; its supervisor starts it again after the change."""
    starts = process.starts
    family = process.family()
    process.before_start = lambda: change(process)
    family[0].terminate()
    _, left = psutil.wait_procs(family[:1], DRAIN_S)
    for one in family if left else ():
        with contextlib.suppress(psutil.Error):
            one.kill()
    while process.starts == starts:
        _pause.wait(0.05)
    process.before_start = lambda: None
    deadline = time.monotonic() + 60
    while process.log.read_text(encoding="utf-8").count("ready: ") <= starts:
        if time.monotonic() > deadline:
            raise Failed(f"{process.host.name} is not ready: {process.log.read_text()[-2000:]}")
        _pause.wait(0.05)


def _upgraded(process: Node) -> None:
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
        process.environ.pop(name, None)


def _copy(coordinator: Node, copy: Path) -> None:
    shutil.copy(coordinator.folder / DATABASE, copy)


def _restore(coordinator: Node, copy: Path) -> None:
    for file in coordinator.folder.glob(f"{DATABASE}*"):
        file.unlink()
    shutil.copy(copy, coordinator.folder / DATABASE)


def _commit(revision: str, folder: Path) -> dict[str, str]:
    """Put a commit's code into a folder; what makes Python import it from there."""
    folder.mkdir()
    archive = subprocess.run(
        ["git", "archive", revision, "dataplane", "loaders"],
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    environ = {"PYTHONPATH": f"{folder}:{folder / 'loaders'}", "PYTHONSAFEPATH": "1"}
    build = [sys.executable, "-m", "dataplane.base.build_kernels"]
    subprocess.run(build, check=True, env=os.environ | environ)
    return environ


def _keep(folder: Path, to: Path) -> None:
    ignored = shutil.ignore_patterns("s3-*", "*.sock", "*.key", "*.sqlite*", "before")
    shutil.copytree(folder, to, ignore=ignored, dirs_exist_ok=True)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
