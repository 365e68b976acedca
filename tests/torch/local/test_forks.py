"""Tensors in forked children keep their content, and children hold no other memory."""

from __future__ import annotations

import gc
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dataplane_torch import DataLoader
from forked import forking
from local_datasets import LONG, Samples

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Blocks(Samples):
    """Long tensors, the same number in all of each."""

    def __init__(self, count: int, length: int = LONG) -> None:
        super().__init__("", count)
        self.length = length

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((self.length,), i, dtype=torch.int16)


def mapped_bytes() -> int:
    """The bytes of workers' memory that this process has mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:dataplane-worker" in line:
            start, end = line.split(maxsplit=1)[0].split("-")
            total += int(end, 16) - int(start, 16)
    return total


@pytest.mark.parametrize("closes_all", [False, True])
def test_a_forked_child_reads_what_was_there(closes_all) -> None:
    with DataLoader(Blocks(60), 2, num_workers=1) as loader:
        iterator = iter(loader)
        next(iterator)
        batch = next(iterator)
        given = [batch.numpy()[:, ::7]]

        def looks() -> int:
            return int(not (np.unique(given[0]) == [2, 3]).all())

        with forking(looks, closes_all=closes_all) as child:
            del batch
            given.clear()
            for step, later in enumerate(iterator, 2):
                assert later[:, -1].tolist() == [2 * step, 2 * step + 1]
                later.zero_()  # it is written by us as well
                del later
            assert child.ask() == 0


def test_the_memory_of_children_that_ended_is_used_again() -> None:
    with DataLoader(Blocks(80), 2, num_workers=1) as loader:
        for batch in loader:
            with forking(lambda batch=batch: int(batch[0, 0] != batch[0, -1])) as child:
                del batch
                assert child.ask() == 0
        assert mapped_bytes() <= 80 * LONG


def test_a_child_has_what_was_alive_and_nothing_of_loaders_that_are_gone() -> None:
    loader = DataLoader(Blocks(64, 1 << 19), 2, num_workers=1)
    held = list(loader)
    kept = held[-1]
    del held
    gc.collect()
    assert mapped_bytes() >= 32 << 20

    def looks() -> int:
        is_right = kept[:, -1].tolist() == [62, 63]
        return int(mapped_bytes() > 4 << 20 or not is_right)

    with forking(looks) as child:
        assert child.ask() == 0
    assert looks() == 1


def test_a_pass_is_for_the_process_that_began_it() -> None:
    with DataLoader(Blocks(8), 2, num_workers=1, persistent_workers=True) as loader:
        iterator = iter(loader)
        first = next(iterator)

        def goes_on() -> int:
            with pytest.raises(RuntimeError, match=r"another process.*iter\(\)"):
                next(iterator)
            return int([int(batch[0, 0]) for batch in loader] != [0, 2, 4, 6])

        with forking(goes_on) as child:
            assert child.ask() == 0
        assert [int(batch[0, 0]) for batch in [first, *iterator]] == [0, 2, 4, 6]


def send(batch: torch.Tensor, queue: Any) -> None:
    """What a process is started for."""
    queue.put(batch.numpy()[:, 0].tolist())


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_batches_go_to_processes_and_through_queues(context) -> None:
    processes = torch.multiprocessing.get_context(context)
    there, back = processes.SimpleQueue(), processes.SimpleQueue()
    with DataLoader(Blocks(40), 2, num_workers=1) as loader:
        iterator = iter(loader)
        given = processes.Process(target=send, args=(next(iterator), back))
        given.start()
        there.put(next(iterator))
        for _ in iterator:
            pass
        assert there.get()[:, 0].tolist() == [2, 3]
        assert back.get() == [0, 1]
        given.join()
    resource_sharer.stop()  # its thread stays as long as this process
    for queue in (there, back):
        queue.close()
