"""Faults of a host, and how long its trainers and those of others wait for a batch."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
from hosts_network import Network
from hosts_service import Failed, Job, Node, Service

RECOVER_S = 180.0
SLABS_AFTER = 3
LATE_S = 0.5
KINDS = {
    "kill": "SIGKILL of the node, which is started again a second later",
    "stop": "SIGSTOP of the node",
    "freeze": "SIGSTOP of all processes of the node",
    "no-coordinator": "packets between host and coordinator dropped, for longer than a lease",
    "no-store": "packets between host and store dropped",
    "no-hosts": "packets between host and other hosts dropped",
    "alone": "all packets of the host dropped, for longer than a lease",
}

_pause = threading.Event()


@dataclass(frozen=True, slots=True)
class Round:
    """One fault. Gaps are the longest times between two batches of one rank, in seconds; the pace
    of the ranks is part of them. `back_s`: from the fault's end to the last batch that came more
    than half a second late, of any rank; 0 if none came after it.
    """

    number: int
    fault: str
    host: str
    fault_s: float
    gap_s: float
    others_gap_s: float
    back_s: float


@dataclass(frozen=True, slots=True)
class Faults:
    """Does one thing after the other to a service. Each lasts `lasts_s` of its kind."""

    service: Service
    network: Network
    job: Job
    step_s: float
    lasts_s: dict[str, float]

    def run(self, kinds: Sequence[str], rounds: int, seed: int) -> Iterator[Round]:
        """Raises:  Failed: a trainer ended, or got no batch."""
        random_ = random.Random(seed)
        for number in range(rounds):
            kind, node = kinds[number % len(kinds)], random_.choice(self.service.nodes)
            yield dataclasses.replace(self._round(kind, node), number=number + 1)

    def settle(self) -> None:
        """Until each rank gets batches, from now on."""
        self._wait_for_batches(time.monotonic())

    def _round(self, kind: str, node: Node) -> Round:
        began = time.monotonic()
        with self._undone(kind, node):
            _pause.wait(self.lasts_s[kind])
        ended = time.monotonic()
        self._wait_for_batches(ended)
        gaps, back_s, now = {True: [0.0], False: [0.0]}, 0.0, time.monotonic()
        for rank in self.job.ranks:
            times = rank.steps()["time"]
            before = times[times < began][-1:].tolist()
            seen = [*before, *times[times >= began].tolist(), now]
            waited = np.diff(seen)
            gaps[rank.host is node.host].append(waited.max())
            late = np.flatnonzero(waited > LATE_S + self.step_s)
            back_s = max([back_s, *(seen[i + 1] - ended for i in late)])
        numbers = (ended - began, max(gaps[True]), max(gaps[False]), back_s)
        return Round(0, kind, node.host.name, *(round(float(number), 2) for number in numbers))

    @contextlib.contextmanager
    def _undone(self, kind: str, node: Node) -> Iterator[None]:
        """What is done by name, and undone at the end."""
        if kind == "kill":
            node.process.kill()
            yield
            return
        if kind in ("stop", "freeze"):
            family = node.family()[: None if kind == "freeze" else 1]
            _signal(family, signal.SIGSTOP)
            try:
                yield
            finally:
                _signal(family, signal.SIGCONT)
            return
        others = [one.host for one in self.service.nodes if one is not node]
        coordinator, store = self.service.coordinator, self.service.store
        unreachable = {
            "no-coordinator": [coordinator], "no-store": [store], "no-hosts": others,
            "alone": [coordinator, store, *others],
        }[kind]  # fmt: skip
        for host in unreachable:
            self.network.cut(node.host, host)
        try:
            yield
        finally:
            for host in unreachable:
                self.network.join(node.host, host)

    def _wait_for_batches(self, since: float) -> None:
        """Until each rank has more of them than it can have had in memory."""
        deadline = time.monotonic() + RECOVER_S
        enough = SLABS_AFTER * self.service.shape.batches_per_slab(len(self.job.ranks))
        while (counts := [int((r.steps()["time"] > since).sum()) for r in self.job.ranks]) and (
            min(counts) < enough
        ):
            self.job.check_alive()
            if time.monotonic() > deadline:
                raise Failed(f"not every rank got batches within {RECOVER_S:g} s: {counts}")
            _pause.wait(0.05)


def _signal(family: Sequence[psutil.Process], number: int) -> None:
    for process in family:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
