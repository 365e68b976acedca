"""One process of a trial, in the environment of the loader under test; its keeper starts it.

It says that it is ready when what every trainer has (torch) is imported, and opens its loader when
all others are ready too. Then it does what its case's mode says, says what it saw, and waits to be
told to close the loader: another rank may still need what this one has started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import threading
import time
import traceback
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataplane_bench.model import BatchKind, Mode, TrialTask, Workload, from_plain, json_line
from dataplane_bench.peers.base import REFERENCE, adapter
from dataplane_bench.trial.checksum import MixtureSum, PackSum, Sum, check

BIN_S = 0.1
"""Width of a point of the timeline."""
WARM_S = 10.0
"""How long a loader whose steady rate is measured first reads, unless an epoch is over before."""


class NoBatch(Exception):
    """An epoch has no batch at all."""


class Loop:
    """One pass after another over a loader, and what was seen of it.

    It looks at nothing but a batch's length: two clock readings and three appends a batch, which
    `noop` measures.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._forget()

    def _forget(self) -> None:
        self._ends, self._waits, self._counts = array("d"), array("d"), array("q")

    def run(self, stop: threading.Event, step_s: float) -> float:
        """Take batches until `stop`, sleeping after each as a host does whose device computes. The
        last one arrives after `stop`.

        The result is the share of a core that the loading thread used.
        """
        self._forget()
        ends, waits, counts = self._ends.append, self._waits.append, self._counts.append
        clock, is_over, batches = time.monotonic, stop.is_set, self._batches
        began, cpu = clock(), time.thread_time()
        before = began
        while True:
            batch = next(batches)
            now = clock()
            ends(now)
            waits(now - before)
            counts(len(next(iter(batch.values()))))
            if is_over():
                return (time.thread_time() - cpu) / max(now - began, 1e-9)
            if step_s:
                time.sleep(step_s)
                before = clock()
            else:
                before = now

    def whole(self, began: float, stop: threading.Event) -> dict[str, Any]:
        """Take all batches, or those until `stop`; `began` is when the loader was opened.

        Raises:  NoBatch.
        """
        self._forget()
        before = began
        for batch in self._batches:
            now = time.monotonic()
            self._ends.append(now)
            self._waits.append(now - before)
            self._counts.append(len(next(iter(batch.values()))))
            before = now
            if stop.is_set():
                break
        if not self._ends:
            raise NoBatch("the epoch has no batch")
        return self.window(began, self._ends[-1]) | {"first_batch_s": self._ends[0] - began}

    def window(self, start: float, end: float) -> dict[str, Any]:
        """Figures of the time between two moments. A batch on its way at an edge counts in part.

        Shapes:  timeline: [s since start, samples/s] of every BIN_S; the last one may be longer or
        shorter by half of that.
        """
        ends = np.array(self._ends)
        waits, counts = np.array(self._waits), np.array(self._counts)
        edges = _edges(start, end)
        at_edges = _taken(edges, ends, waits, counts)
        inside = (ends > start) & (ends <= end)
        seen = waits[inside] if inside.any() else waits
        overlaps = np.minimum(ends, end) - np.maximum(ends - waits, start)
        rates = np.diff(at_edges) / np.diff(edges)
        return {
            "sample_count": float(at_edges[-1] - at_edges[0]),
            "batch_count": int(inside.sum()),
            "seconds": end - start,
            "start": start,
            "wait_share": float(np.clip(overlaps, 0, None).sum() / (end - start)),
            "wait_p50_ms": float(np.percentile(seen, 50) * 1000) if len(seen) else 0.0,
            "wait_p99_ms": float(np.percentile(seen, 99) * 1000) if len(seen) else 0.0,
            "timeline": [
                [round(float(at - start), 3), round(float(rate), 1)]
                for at, rate in zip(edges[1:], rates, strict=True)
            ],
        }


Floats = NDArray[np.float64]


def _edges(start: float, end: float) -> Floats:
    whole = start + BIN_S * np.arange(max(round((end - start) / BIN_S), 1))
    return np.append(whole, end)


def _taken(at: Floats, ends: Floats, waits: Floats, counts: NDArray[np.int64]) -> Floats:
    """How many samples had been taken at these moments; a batch arrives evenly from the one before
    it on. Before the first we know only when the wait for it began.

    Shapes:  at: [n].   ends, waits, counts: one a batch.   result: [n].
    """
    if not len(ends):
        return np.zeros(len(at))
    times = np.concatenate([[ends[0] - waits[0]], ends])
    return np.asarray(np.interp(at, times, np.concatenate([[0], np.cumsum(counts)])))


Say = Callable[[object], None]


class Ear:
    """Reads the harness' commands while the loop runs. Without one every command is "leave"."""

    def __init__(self, words: Iterator[str]) -> None:
        self.stop = threading.Event()
        self._heard: deque[list[str]] = deque()
        self._is_over = False
        self._changed = threading.Condition()
        threading.Thread(target=self._listen, args=(words,), daemon=True, name="ear").start()

    def next(self) -> list[str]:
        """The next command with its arguments."""
        with self._changed:
            self._changed.wait_for(lambda: self._heard or self._is_over)
            return self._heard.popleft() if self._heard else ["leave"]

    def wait_for(self, word: str) -> None:
        """Wait until the harness sends it; skip other commands."""
        while self.next()[0] not in (word, "leave"):
            pass

    def _listen(self, words: Iterator[str]) -> None:
        for line in words:
            word = line.split()
            if word[0] == "stop":
                self.stop.set()
            with self._changed:
                self._heard.append(word)
                self._changed.notify_all()
        self.stop.set()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


def run(task: TrialTask, say: Say, ear: Ear) -> None:
    """Do what the task's mode says, and say what was seen."""
    if task.system != REFERENCE:
        import torch  # noqa: F401 - every trainer has it; its import is no part of anybody's time

        # The import makes 170,000 objects. The garbage collector is then due to examine all of
        # them, which takes 0.1 s, and would do so while the loader is timed.
        gc.collect()
    peer = adapter(task.system)
    say({"ready": True})
    ear.wait_for("open")
    began = time.monotonic()
    loader = peer.open(task)
    if task.case.mode is Mode.RESTART:
        _restart(peer, task, loader, say, ear)
        return
    with contextlib.closing(loader):
        match task.case.mode:
            case Mode.STEADY:
                _steady(task, loader, began, say, ear)
            case Mode.VERIFY:
                say(_sum(task.workload, loader))
            case Mode.FIRST:
                batch = _first(loader.epoch(0))
                say({"first_batch_s": time.monotonic() - began})
                check(batch, task.workload)
            case Mode.EPOCH:
                _epoch(task, loader, began, say, ear)
            case Mode.RESUME:
                _resume(task, loader, began, say)
        if task.case.mode is not Mode.STEADY:
            ear.wait_for("end")


def _steady(task: TrialTask, loader: Any, began: float, say: Say, ear: Ear) -> None:
    workload, size = task.workload, task.size
    batches = _endless(loader)
    batch = next(batches)
    first_batch_s = time.monotonic() - began
    check(batch, workload)
    # Rates are those of later epochs: in the first, memory is touched and files are mapped.
    left, end = workload.sample_count // size - len(next(iter(batch.values()))), began + WARM_S
    del batch
    while left > 0 and time.monotonic() < end:
        left -= len(next(iter(next(batches).values())))
    say({"first_batch_s": first_batch_s})
    loop = Loop(batches)
    while (word := ear.next())[0] not in ("end", "leave"):
        if word[0] == "go":
            cpu = loop.run(ear.stop, float(word[1]) / 1000)
            stopped = ear.next()
            if stopped[0] != "stop":
                return
            ear.stop.clear()
            seen = loop.window(float(stopped[1]), float(stopped[2]))
            say(seen | {"trainer_cpu_share": cpu})


def _epoch(task: TrialTask, loader: Any, began: float, say: Say, ear: Ear) -> None:
    """The epoch that the case asks for; those before it are read to their ends as well."""
    never = threading.Event()
    for number in range(task.case.epoch):
        batches = _checked(loader.epoch(number), task.workload)
        seen = Loop(batches).whole(time.monotonic() if number else began, never)
        if number == 0:
            first = seen["first_batch_s"]
    if task.case.epoch:
        say({"first_batch_s": first})
        ear.wait_for("go")
        began = time.monotonic()
    batches = _checked(loader.epoch(task.case.epoch), task.workload)
    say(Loop(batches).whole(began, ear.stop))


def _restart(peer: Any, task: TrialTask, loader: Any, say: Say, ear: Ear) -> None:
    """Close the loader after a batch, and open it again when all have closed theirs."""
    with contextlib.closing(loader):
        _first(loader.epoch(0))
    say({"closed": True})
    ear.wait_for("again")
    size = max(1, task.size - 1)
    if task.rank >= size:
        say({"first_batch_s": 0.0})
    else:
        began = time.monotonic()
        again = peer.open(dataclasses.replace(task, size=size))
        with contextlib.closing(again):
            batch = _first(again.epoch(0))
            say({"first_batch_s": time.monotonic() - began})
            check(batch, task.workload)
            ear.wait_for("end")
            return
    ear.wait_for("end")


def _sum(workload: Workload, loader: Any) -> dict[str, Any]:
    total = _total(workload)
    for batch in loader.epoch(0):
        total.add(batch)
    if not total.sample_count:
        raise NoBatch("the epoch has no batch")
    return {
        "digest": total.digest,
        "sample_count": total.sample_count,
        "byte_count": total.byte_count,
        "facts": total.facts(),
    }


def _total(workload: Workload) -> Sum | PackSum | MixtureSum:
    match workload.delivery:
        case BatchKind.PACKED:
            return PackSum(workload)
        case BatchKind.MIXED:
            return MixtureSum(workload)
        case _:
            return Sum(workload)


def _first(batches: Iterator[Any]) -> Any:
    for batch in batches:
        return batch
    raise NoBatch("the epoch has no batch")


def _checked(batches: Iterator[Any], workload: Workload) -> Iterator[Any]:
    """The same batches; checks the first one."""
    batch = _first(batches)
    check(batch, workload)
    yield batch
    del batch  # memory that the loader may want to use again
    yield from batches


def _endless(loader: Any) -> Iterator[Any]:
    number = 0
    while True:
        batch = None
        for batch in loader.epoch(number):
            yield batch
        if batch is None:
            raise NoBatch(f"epoch {number} has no batch")
        number += 1


def _resume(task: TrialTask, loader: Any, began: float, say: Say) -> None:
    """The first process of a case saves, the second goes on. A loader without a state reads its
    way to the place once more, which is what its users do.
    """
    import torch

    path = task.cache / f"state-{task.rank}.pt"
    ready = task.cache / f"ready-{task.rank}"
    enough = task.workload.sample_count * task.case.fraction / task.size
    has_state = hasattr(loader, "state")
    if ready.exists() and has_state:
        batch = _first(loader.resume(torch.load(path, weights_only=False)))
        say({"first_batch_s": time.monotonic() - began, "by": "state"})
        check(batch, task.workload)
        return
    batches = _checked(loader.epoch(0), task.workload)
    count = 0
    while count < enough:
        count += len(next(iter(_first(batches).values())))
    if ready.exists():
        _first(batches)
        say({"first_batch_s": time.monotonic() - began, "by": "replay"})
        return
    if has_state:
        torch.save(loader.state(), path)
    ready.touch()
    say({"saved": True})


def main() -> int:
    """Exit status 1: it failed; the reason was said."""
    # What a loader starts inherits neither pipe, and what it prints goes to the log.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    words = os.fdopen(os.dup(0))
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - the shortest way to a descriptor
        os.dup2(nothing.fileno(), 0)

    def say(value: object) -> None:
        answers.write(json_line(value))

    try:
        order = json.loads(words.readline())
        task = from_plain(TrialTask, order["task"])
        ear = Ear(words)
        _obey(order["do"], task, say, ear)
        say({"ended": True})
        ear.wait_for("leave")
    except Exception as error:  # noqa: BLE001 - whatever a loader raises is told, not lost
        traceback.print_exc()
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        say({"error": said})
        return 1
    return 0


def _obey(order: str, task: TrialTask, say: Say, ear: Ear) -> None:
    match order:
        case "run":
            run(task, say, ear)
        case "prepare":
            adapter(task.system).prepare(task.workload, task.place.folder)
            say({"prepared": True})
            ear.wait_for("end")
        case "serve":
            service, daemon = adapter(task.system).serve(task)
            with contextlib.closing(daemon):
                say({"service": service})
                ear.wait_for("end")
