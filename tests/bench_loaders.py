"""A loader that a test scripts in its settings: {"does": "hang in open"}."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

WIDTH = 4


class Loader:
    """An adapter as a user may write one; `prepare` and `open` may go wrong."""

    name = "awry"
    title = "Awry"
    requirements: tuple[str, ...] = ()
    distribution = "torch"

    def refuses(self, workload, case):
        return ""

    def layout(self, workload):
        return "awry"

    def describe(self, workload):
        return "whatever a test says"

    def settings(self, workload, case, cores):
        return ({},)

    def prepare(self, workload, folder):
        if workload.name == "unconvertible":
            raise ValueError("cannot convert")
        (folder / "shard").write_text(workload.fingerprint)

    def open(self, task):
        go_wrong(task, "open")
        return Opened(task)


class Daemon:
    """One that has a daemon."""

    def __getattr__(self, name):
        return getattr(Loader(), name)

    def serve(self, task):
        go_wrong(task, "serve")
        return f"daemon of {task.run}", Opened(task)


class Opened:
    """Batches of `id` and `x`: every sample of the rank once, in turns."""

    def __init__(self, task):
        self.task = task
        self.at = 0
        note(task, f"opened {task.rank} {task.service}")

    def epoch(self, number):
        note(self.task, f"epoch {number}")
        return self.batches(number, 0)

    def batches(self, number, start):
        import torch

        go_wrong(self.task, "epoch")
        does = self.task.settings.get("does")
        if does == "empty epoch" or (does == "empty second epoch" and number == 1):
            return
        size, count = self.task.workload.batch_size, self.task.workload.sample_count
        for first in range(start, count, size * self.task.size):
            ids = torch.arange(first, min(first + size * self.task.size, count))
            ids = ids[self.task.rank :: self.task.size]
            self.at = first + size * self.task.size
            if self.task.settings.get("pause_s") and self.task.rank == self.task.size - 1:
                threading.Event().wait(self.task.settings["pause_s"])
            if words := self.task.settings.get("awaits"):
                wait_noted(self.task, words)
            yield self.batch(ids)
            go_wrong(self.task, "second batch")

    def batch(self, ids):
        match self.task.settings.get("does"):
            case "too many":
                ids = ids.repeat(2)
            case "other type":
                return {"id": ids.int(), "x": ids[:, None].repeat(1, WIDTH).float()}
            case "no x":
                return {"id": ids}
        return {"id": ids, "x": ids[:, None].repeat(1, WIDTH).float()}

    def state(self):
        return {"at": self.at}

    def resume(self, state):
        note(self.task, f"resumed at {state['at']}")
        return self.batches(0, state["at"])

    def close(self):
        go_wrong(self.task, "close")
        note(self.task, f"closed {self.task.rank}")


class Stateless:
    """A loader without a state: it resumes by reading again."""

    def __getattr__(self, name):
        return getattr(Loader(), name)

    def open(self, task):
        opened = Loader().open(task)
        return Only(opened)


class Only:
    """The least that a loader has."""

    def __init__(self, opened):
        self.epoch, self.close = opened.epoch, opened.close


def note(task, words):
    """Write a word to a file for the test."""
    if "journal" in task.settings:
        with Path(task.settings["journal"]).open("a") as journal:
            journal.write(words + "\n")


def wait_noted(task, words):
    """Wait until another process has written this."""
    while words not in Path(task.settings["journal"]).read_text():
        threading.Event().wait(0.01)


def go_wrong(task, where):
    for does in task.settings.get("does", "").split("; "):
        if does.endswith(f" in {where}") and task.rank == task.settings.get("rank", task.rank):
            do(does.rpartition(" in ")[0], task)


def do(what, task):
    {
        "raise": _raise,
        "exit": lambda: sys.exit(7),
        "hang": _hang,
        "hang, hear no signal": _hang_deaf,
        "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "share memory and die": _share_and_die,
        "print": _print,
        "leave a daemon": lambda: _daemon(task),
        "tell the environment": lambda: note(task, json.dumps(dict(os.environ))),
        "read what the harness says": _read,
    }[what]()


def _raise():
    raise ValueError("not today")


def _hang():
    threading.Event().wait()


def _hang_deaf():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    child = [sys.executable, "-c", "import signal; signal.pause()"]
    subprocess.Popen(child, start_new_session=True)
    _hang()


def _share_and_die():
    from multiprocessing import shared_memory

    shared_memory.SharedMemory(create=True, size=1 << 20)
    os.kill(os.getpid(), signal.SIGKILL)


def _print():
    sys.stdout.write('{"ready": true}\nnot JSON at all\n')
    sys.stdout.flush()
    os.write(1, b"\xff\xfe garbage \x00\n" * 1000)
    subprocess.run(["echo", '{"error": "not ours"}'], check=True)


def _read():
    assert sys.stdin.readline() == ""
    assert subprocess.run(["cat"], capture_output=True, check=True).stdout == b""


def _daemon(task: Any):
    """A process in its own session, which no process waits for and which ignores all signals."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(task, f"daemon {os.getpid()}")
    if task.settings.get("burn_s"):
        import time

        wait_noted(task, "epoch")  # the measurement has begun
        while time.process_time() < task.settings["burn_s"]:
            pass
        note(task, "burnt")
    signal.pause()
