"""Exceptions of signal handlers in the middle of next(), and threads that share a pass."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dataplane_torch import DataLoader
from local_datasets import LONG, Samples, as_is
from torch.utils.data import SequentialSampler

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COUNT = 12
EXPECTED = [[i, i + 1] for i in range(0, COUNT, 2)]


class TooLate(Exception):
    """The exception of a handler."""


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """SIGALRM raises."""

    def raises(*_: Any) -> None:
        raise TooLate

    before = signal.signal(signal.SIGALRM, raises)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


class Waits(Samples):
    """Sample 4 comes when there is a file."""

    def __init__(self, path: Path) -> None:
        super().__init__("int", COUNT)
        self.path = path

    def __getitem__(self, i: int) -> Any:
        while i == 4 and not self.path.exists():
            threading.Event().wait(0.01)
        return super().__getitem__(i)


def interrupt_while_it_waits(iterator: Any) -> None:
    """Send the signal when a call of next() has been waiting for a while."""
    looks = 0
    while looks < 20:
        is_called = not iterator._lock.acquire(blocking=False)
        if not is_called:
            iterator._lock.release()
        looks = looks + 1 if is_called and not iterator._is_torn else 0
        threading.Event().wait(0.01)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_interrupt_while_it_waits_changes_nothing(persistent, tmp_path) -> None:
    path = tmp_path / "go"
    loader = DataLoader(Waits(path), 2, num_workers=2, persistent_workers=persistent)
    with loader:
        iterator = iter(loader)
        seen = [next(iterator), next(iterator)]
        thread = threading.Thread(target=interrupt_while_it_waits, args=(iterator,))
        thread.start()
        with pytest.raises(TooLate):
            next(iterator)
        thread.join()
        path.touch()
        assert [batch.tolist() for batch in [*seen, *iterator]] == EXPECTED
        workers = iterator._workers
        assert [batch.tolist() for batch in loader] == EXPECTED
        if persistent:
            assert iterator._workers is workers


def made(i: int) -> int:
    """How a sample is unpickled; number 4 interrupts that, the first time."""
    if i == 4 and not made.__dict__:
        made.__dict__["once"] = True
        signal.raise_signal(signal.SIGALRM)
    return i


class Made:
    """See `made`."""

    def __init__(self, i: int) -> None:
        self.i = i

    def __reduce__(self) -> Any:
        return made, (self.i,)


class Interrupts(Samples):
    """Samples that are rebuilt where they are unpickled, with a long one beside them."""

    def __getitem__(self, i: int) -> Any:
        return Made(i), torch.full((LONG,), i)


def numbers(batch: Any) -> list[int]:
    assert all(bool((long == i).all()) for i, long in batch)
    return [i for i, _ in batch]


@pytest.mark.parametrize("persistent", [False, True])
def test_an_interrupt_while_a_batch_is_unpickled_changes_nothing(persistent) -> None:
    made.__dict__.clear()
    with DataLoader(
        Interrupts("", COUNT), 2, num_workers=2, collate_fn=as_is, persistent_workers=persistent
    ) as loader:
        iterator = iter(loader)
        seen = [numbers(next(iterator)), numbers(next(iterator))]
        with pytest.raises(TooLate):
            next(iterator)
        assert [*seen, *map(numbers, iterator)] == EXPECTED
        assert list(map(numbers, loader)) == EXPECTED


class Interrupted(SequentialSampler):
    """Is interrupted before its sixth batch, the first time."""

    def __iter__(self) -> Iterator[int]:
        for i in super().__iter__():
            if i == 10 and not made.__dict__:
                made.__dict__["once"] = True
                signal.raise_signal(signal.SIGALRM)
            yield i


@pytest.mark.parametrize("persistent", [False, True])
def test_an_interrupt_that_loses_a_batch_ends_the_pass_and_not_the_loader(persistent) -> None:
    made.__dict__.clear()
    dataset = Samples("int", COUNT)
    given = {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": persistent}
    with DataLoader(dataset, 2, sampler=Interrupted(dataset), **given) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(TooLate):
            next(iterator)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"is lost: begin another pass with iter"):
                next(iterator)
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == EXPECTED


def test_workers_that_an_interrupt_ended_are_replaced_for_the_next_pass() -> None:
    with DataLoader(Samples("int", 4), 2, num_workers=2, persistent_workers=True) as loader:
        assert len(list(loader)) == 2
        for process in loader._iterator._workers:
            os.kill(process.pid, signal.SIGINT)  # as a terminal does to all of its processes
            process.join()
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_workers_that_an_interrupt_ends_when_the_next_pass_has_begun_are_replaced_in_it() -> None:
    with DataLoader(Samples("int", 8), 2, num_workers=2, persistent_workers=True) as loader:
        next(iter(loader))
        first, _ = loader._iterator._workers
        os.kill(first.pid, signal.SIGSTOP)  # as on a busy machine
        os.kill(first.pid, signal.SIGINT)
        iterator = iter(loader)
        os.kill(first.pid, signal.SIGCONT)
        first.join()
        for batches in (iterator, loader, loader):
            assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_pass_whose_workers_an_interrupt_ended_raises_and_later_ones_do_not() -> None:
    with DataLoader(Samples("int", 400), 2, num_workers=2, persistent_workers=True) as loader:
        iterator = iter(loader)
        next(iterator)
        for process in loader._iterator._workers:
            os.kill(process.pid, signal.SIGINT)
            process.join()
        with pytest.raises(RuntimeError, match="exited unexpectedly with exit code 0"):
            list(iterator)
        for _ in range(2):
            assert len(list(loader)) == 200


@pytest.mark.parametrize("given", [{}, {"num_workers": 2}, {"num_workers": 2, "in_order": False}])
def test_threads_that_share_a_pass_get_each_batch_once(given) -> None:
    with DataLoader(Samples("int", 200), 2, **given) as loader:
        iterator = iter(loader)
        seen: list[list[int]] = []
        errors: list[BaseException] = []

        def take() -> None:
            try:
                seen.extend(batch.tolist() for batch in iterator)
            except BaseException as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert sorted(seen) == [[i, i + 1] for i in range(0, 200, 2)]
