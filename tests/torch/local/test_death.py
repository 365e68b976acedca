"""When a trainer or worker dies, nothing is left behind and no process hangs."""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from dataplane_torch import DataLoader
from local_datasets import LONG, Samples, Talks
from warm import WarmProcess, WarmPython

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

# A trainer that prints the pids of its workers, then loads until it is killed.
_TRAINER = """
import os, sys, threading, warnings; warnings.simplefilter("ignore")
import torch
from dataplane_torch import DataLoader
from local_datasets import Samples
context, persistent, hangs = sys.argv[1], sys.argv[2] == "yes", sys.argv[3]
told, tells = os.pipe()  # a worker that was forked says that it hangs

class Hanging(Samples):
    def __getitem__(self, i):
        if hangs == "worker" and i >= 8:
            os.write(tells, b"!")
            threading.Event().wait()
        return super().__getitem__(i)

if __name__ == "__main__":
    dataset = Samples("long", 1_000_000_000) if hangs == "no" else Hanging("long", 100)
    loader = DataLoader(dataset, 2, num_workers=2, persistent_workers=persistent,
                        multiprocessing_context=context)
    iterator = iter(loader)
    next(iterator)
    print(*(process.pid for process in iterator._workers), flush=True)
    if hangs == "no":
        for batch in iterator:
            pass
    elif hangs == "worker":
        os.read(told, 1)
        iterator.close()
"""


@pytest.fixture
def trainer(warm_torch: WarmPython, tmp_path: Path) -> Callable[..., Any]:
    """Starts a process that runs `code`, as a context; its errors are in the test's folder."""

    @contextlib.contextmanager
    def start(*arguments: str, code: str = _TRAINER) -> Iterator[WarmProcess]:
        script = tmp_path / "trainer.py"
        script.write_text(f"import sys; sys.path[:] = {sys.path!r}\n{code}")
        with (tmp_path / "errors").open("wb") as errors:
            process = warm_torch.run([str(script), *arguments], os.environ, errors.fileno())
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
            # The folder of a fork server's socket, which multiprocessing removes when it ends in
            # peace.
            for left in Path(tempfile.gettempdir()).glob("pymp-*"):
                shutil.rmtree(left)

    return start


def workers_of(process: WarmProcess) -> list[psutil.Process]:
    """Return the workers whose pids it printed, and that are still there."""
    line = process.stdout.readline()
    assert line, "see the file of its errors"
    found = []
    for pid in line.split():
        with contextlib.suppress(psutil.NoSuchProcess):  # those of a trainer that exits at once
            found.append(psutil.Process(int(pid)))
    return found


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


def test_workers_do_not_outlive_a_trainer_that_is_killed(trainer) -> None:
    chance = random.Random(0)
    with trainer("fork", "yes", "no") as process:
        workers = workers_of(process)
        threading.Event().wait(chance.random() / 5)
        process.kill()
        assert_gone(workers)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_workers_do_not_outlive_a_killed_trainer_however_they_were_started(
    trainer, context
) -> None:
    chance = random.Random(context)
    for _ in range(5):
        with trainer(context, "no", "no") as process:
            workers = workers_of(process)
            family = psutil.Process(process.pid).children(recursive=True)
            threading.Event().wait(chance.random())
            process.kill()
            assert_gone([*workers, *family])


def test_workers_do_not_outlive_a_trainer_that_is_killed_while_it_waits_for_them(trainer) -> None:
    with trainer("fork", "no", "worker") as process:
        workers = workers_of(process)
        threading.Event().wait(0.3)
        assert process.poll() is None
        process.kill()
        assert_gone(workers)


def test_a_trainer_that_exits_in_the_middle_of_a_pass_is_quick_and_silent(
    trainer, tmp_path
) -> None:
    with trainer("fork", "yes", "trainer") as process:
        workers = workers_of(process)
        assert process.wait(60) == 0
        assert (tmp_path / "errors").read_text() == ""
        assert_gone(workers)


_INTERRUPTED = _TRAINER.replace(
    "        for batch in iterator:\n            pass\n",
    "        try:\n            print('in here', flush=True)\n"
    "            while True: next(iterator)\n"
    "        except KeyboardInterrupt:\n"
    "            del iterator, loader\n            print('bye', flush=True)\n",
)


def test_only_the_trainer_handles_an_interrupt(trainer) -> None:
    with trainer("fork", "no", "no", code=_INTERRUPTED) as process:
        workers = workers_of(process)
        assert process.stdout.readline() == "in here\n"
        os.kill(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "bye\n"
        assert process.wait(60) == 0
        assert_gone(workers)


class Deadly(Samples):
    """Sample 4 ends the worker."""

    def __init__(self, end: Callable[[], Any]) -> None:
        super().__init__("", 100)
        self.end = end

    def __getitem__(self, i: int) -> Any:
        if i == 4:
            self.end()
        return torch.full((LONG,), i, dtype=torch.int16)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leave() -> None:
    os._exit(3)


@pytest.mark.parametrize(
    ("end", "persistent"),
    [(kill, False), (kill, True), (segfault, False), (leave, True), (sys.exit, False)],
)
def test_a_worker_that_dies_raises_in_the_trainer(end, persistent) -> None:
    with DataLoader(
        Deadly(end), 2, num_workers=2, prefetch_factor=1, persistent_workers=persistent
    ) as loader:
        iterator = iter(loader)
        pids = [str(process.pid) for process in iterator._workers]
        held = []
        with pytest.raises(RuntimeError, match=rf"pid.*({'|'.join(pids)})"):
            held.extend(iterator)
        assert len(held) <= 2
        for step, batch in enumerate(held):
            assert batch[:, -1].tolist() == [2 * step, 2 * step + 1]
        if persistent:
            with pytest.raises(RuntimeError, match="pid"):
                list(loader)


def test_once_a_death_has_raised_another_raises_nowhere_else() -> None:
    with DataLoader(Samples("long", 100), 2, num_workers=2) as loader:
        iterator = iter(loader)
        first, second = iterator._workers
        before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        first.kill()
        first.join()
        signal.signal(signal.SIGCHLD, before)
        with pytest.raises(RuntimeError, match=f"pid {first.pid}"):
            list(iterator)
        second.kill()
        os.waitid(os.P_PID, second.pid, os.WEXITED | os.WNOWAIT)
        signal.raise_signal(signal.SIGCHLD)
        with pytest.raises(RuntimeError, match=r"interrupted|pid"):
            list(iterator)


def test_a_worker_that_is_killed_in_the_middle_of_a_frame() -> None:
    with DataLoader(Talks(), None, num_workers=1) as loader:
        iterator = iter(loader)
        worker = iterator._workers[0]
        poll = select.poll()
        poll.register(iterator._crew._connections[0].fileno(), select.POLLIN)
        assert poll.poll(10_000)
        with pytest.raises(RuntimeError, match=f"pid.*{worker.pid}"):
            killed(worker, iterator)


def killed(worker: Any, iterator: Iterator[Any]) -> None:
    """Kill a worker, and go on. The signal of its death may raise at any line of these."""
    worker.kill()
    list(iterator)


def test_a_worker_that_waits_to_send_a_batch_ends_at_once() -> None:
    loader = DataLoader(Samples("long text", 100), None, num_workers=1, prefetch_factor=16)
    short = DataLoader(Texts(), None, num_workers=1, prefetch_factor=16)
    for each in (loader, short):
        iterator = iter(each)
        next(iterator)
        worker = iterator._workers[0]
        threading.Event().wait(0.3)
        each.close()
        assert worker.exitcode == 0


class Texts(Samples):
    """A dataset of as much text as travels with a pickle."""

    def __init__(self) -> None:
        super().__init__("", 100)

    def __getitem__(self, i: int) -> str:
        return "x" * 60_000


class Hangs(Samples):
    """Sample 1 comes late."""

    def __getitem__(self, i: int) -> int:
        if i == 1:
            threading.Event().wait(4)
        return i


def test_a_timeout_is_respected() -> None:
    loader = DataLoader(Hangs("", 3), None, num_workers=1, timeout=2.5)
    iterator = iter(loader)
    assert next(iterator) == 0
    with pytest.raises(RuntimeError, match=r"timed out after 2.5 seconds"):
        next(iterator)
    loader.close()


def test_a_loader_may_run_in_any_thread() -> None:
    seen: list[Any] = []

    def load() -> None:
        seen.extend(DataLoader(Samples("int", 6), 2, num_workers=2))

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(batch.tolist() for batch in seen) == 2 * [[0, 1]] + 2 * [[2, 3]] + 2 * [[4, 5]]


class Nested(Samples):
    """A dataset that uses another loader."""

    def __init__(self, kind: type, num_workers: int) -> None:
        super().__init__("", 2)
        self.loader, self.num_workers = kind, num_workers

    def __getitem__(self, i: int) -> Any:
        return next(iter(self.loader(Samples("int", 3), 3, num_workers=self.num_workers)))


def test_loaders_in_workers_are_as_torchs() -> None:
    assert [batch.tolist() for batch in DataLoader(Nested(DataLoader, 0), None, num_workers=1)] == [
        [0, 1, 2],
        [0, 1, 2],
    ]
    for kind in (torch.utils.data.DataLoader, DataLoader):
        with pytest.raises(AssertionError, match="daemonic processes"):
            list(kind(Nested(kind, 1), None, num_workers=1))
