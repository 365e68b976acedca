"""One process of a trial, in the environment of the loader under test.

    python -m dataplane_bench.trial.process      (its order comes on stdin: see wire.py)

It becomes the reaper of all that it starts, so that the harness finds every process of a loader,
daemons included, below it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, TextIO

from dataplane_bench.model import Mode, Task
from dataplane_bench.peers.registry import adapter
from dataplane_bench.trial import wire
from dataplane_bench.trial.checksum import Sum
from dataplane_bench.trial.loop import Loop

_PR_SET_CHILD_SUBREAPER = 36


class Ear:
    """Reads the harness' words while the loop runs. End of file is "end"."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._words: list[list[str]] = []
        self._heard = threading.Condition()
        threading.Thread(target=self._listen, daemon=True, name="ear").start()

    def next(self) -> list[str]:
        """The next word with its arguments."""
        with self._heard:
            self._heard.wait_for(lambda: self._words)
            return self._words.pop(0)

    def _listen(self) -> None:
        while True:
            line = sys.stdin.readline()
            word = line.split() if line else ["stop", "end"]
            if word[:1] == ["stop"]:
                self.stop.set()
            with self._heard:
                self._words.append(word if line else ["end"])
                self._heard.notify_all()
            if not line:
                return


def run(task: Task, say: Any, ear: Ear) -> None:
    """Do what the task's mode says, and say what was seen."""
    import torch  # noqa: F401 - every trainer has it; its import is no part of anybody's time

    peer = adapter(task.system)
    began = time.monotonic()
    loader = peer.open(task)
    with contextlib.closing(loader):
        match task.case.mode:
            case Mode.STEADY:
                _steady(task, loader, began, say, ear)
            case Mode.VERIFY:
                total = Sum(task.workload)
                for batch in loader.epoch(0):
                    total.add(batch)
                say(
                    {
                        "digest": total.digest,
                        "sample_count": total.sample_count,
                        "byte_count": total.byte_count,
                    }
                )
            case Mode.FIRST:
                next(loader.epoch(0))
                say({"first_batch_s": time.monotonic() - began})
            case Mode.EPOCH:
                say(Loop(loader.epoch(0)).whole(began, ear.stop))
            case Mode.RESUME:
                _resume(task, loader, began, say)


def _steady(task: Task, loader: Any, began: float, say: Any, ear: Ear) -> None:
    loop = Loop(_endless(loader))
    loop.first()
    say({"first_batch_s": time.monotonic() - began})
    while (word := ear.next())[0] != "end":
        if word[0] == "go":
            cpu = loop.run(ear.stop, float(word[1]) / 1000)
            _, start, end = ear.next()  # the "stop" that ended it
            ear.stop.clear()
            say(loop.window(float(start), float(end)) | {"trainer_cpu_share": cpu})


def _endless(loader: Any) -> Iterator[Any]:
    number = 0
    while True:
        is_empty = True
        for batch in loader.epoch(number):
            is_empty = False
            yield batch
        if is_empty:
            raise RuntimeError(f"epoch {number} has no batch")
        number += 1


def _resume(task: Task, loader: Any, began: float, say: Any) -> None:
    """The first process of a case saves, the second goes on. A loader without a state reads its
    way to the place once more, which is what its users do.
    """
    import torch

    path = task.cache / f"state-{task.rank}.pt"
    ready = task.cache / f"ready-{task.rank}"
    enough = task.workload.sample_count * task.case.fraction / task.size
    has_state = hasattr(loader, "state")
    if ready.exists() and has_state:
        next(loader.resume(torch.load(path, weights_only=False)))
        say({"first_batch_s": time.monotonic() - began, "by": "state"})
        return
    batches = loader.epoch(0)
    count = 0
    while count < enough:
        count += len(next(iter(next(batches).values())))
    if ready.exists():
        next(batches)
        say({"first_batch_s": time.monotonic() - began, "by": "replay"})
        return
    if has_state:
        torch.save(loader.state(), path)
    ready.touch()
    say({"saved": True})


def main() -> int:
    """Exit status 1: it failed; the reason was said."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    answers: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a loader prints goes to the log

    def say(value: dict[str, Any]) -> None:
        answers.write(wire.line(value))

    order = json.loads(sys.stdin.readline())
    task = wire.task_of(order["task"])
    try:
        match order["do"]:
            case "run":
                run(task, say, Ear())
            case "prepare":
                adapter(task.system).prepare(task.workload, task.place.folder)
                say({"prepared": True})
            case "serve":
                ear = Ear()
                service, daemon = adapter(task.system).serve(task)
                with contextlib.closing(daemon):
                    say({"service": service})
                    while ear.next()[0] != "end":
                        pass
    except Exception as error:  # noqa: BLE001 - whatever a loader raises is told, not lost
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"})
        return 1
    say({"ended": True})
    return 0


if __name__ == "__main__":
    sys.exit(main())
