"""Tensors that are held never change, and memory that is not held is reused."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import weakref
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dataplane_torch import DataLoader
from forked import forking
from local_datasets import LONG, Samples, as_is
from torch.utils.data import default_collate

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Blocks(Samples):
    """Long tensors, the same number in all of each."""

    def __init__(self, count: int = 100, length: int = LONG) -> None:
        super().__init__("", count)
        self.length = length

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((self.length,), i, dtype=torch.int16)


def mapped_bytes(pid: int | str = "self") -> int:
    """The bytes of workers' memory that a process has mapped."""
    total = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:dataplane-worker" in line:
            start, end = line.split(maxsplit=1)[0].split("-")
            total += int(end, 16) - int(start, 16)
    return total


def fd_count() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.parametrize("end", ["closed", "collected", "over", "killed"])
def test_batches_that_are_held_do_not_change(end) -> None:
    chance = random.Random(7)
    held: list[tuple[Any, bytes]] = []
    loader = DataLoader(Blocks(), 2, num_workers=2)
    iterator = iter(loader)
    for step, batch in enumerate(iterator):
        assert batch[:, 0].tolist() == [2 * step, 2 * step + 1]
        view = chance.choice([batch, batch[1, 5:], batch.numpy()[:, ::3], batch.view(-1), None])
        if view is not None:
            view[...] += 1  # trainers write too
            held.append((view, raw(view)))
        if len(held) > 20:
            held.pop(chance.randrange(len(held)))
        if end == "killed" and step == 40:
            break
    if end == "closed":
        loader.close()
    elif end == "killed":
        with pytest.raises(RuntimeError, match=r"pid.*\d+"):
            killed(iterator)
    del loader, iterator, batch
    gc.collect()
    assert len(held) > 10
    for view, before in held:
        assert raw(view) == before
        view[...] = 0


def killed(iterator: Any) -> None:
    """Kill all workers, and go on, without the signals of their death, each of which may raise at
    any line of this test.
    """
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in iterator._workers:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    signal.signal(signal.SIGCHLD, before)
    list(iterator)


def raw(view: Any) -> bytes:
    return np.ascontiguousarray(view).tobytes()


def test_what_a_worker_keeps_does_not_change_either() -> None:
    with DataLoader(Blocks(60), 2, num_workers=1, collate_fn=Keeps()) as loader:
        for step, (batch, kept) in enumerate(loader):
            assert batch[:, 0].tolist() == [2 * step, 2 * step + 1]
            assert kept == list(range(max(0, 2 * step - 8), 2 * step, 2))
            batch.zero_()


class Keeps:
    """A collate function that checks the batches it made before."""

    def __init__(self) -> None:
        self.batches: list[torch.Tensor] = []

    def __call__(self, samples: list[torch.Tensor]) -> Any:
        batch = default_collate(samples)
        before = [int(kept[0, -1]) for kept in self.batches]
        self.batches = [*self.batches[-3:], batch]
        return batch, before


def test_a_batch_and_its_views_are_one_memory() -> None:
    held = []
    for step, (whole, same, view, text) in enumerate(
        DataLoader(Blocks(40), 2, num_workers=1, collate_fn=with_views)
    ):
        same[0, 0] = -1
        assert whole[0, 0] == view[0] == -1
        assert text == "x" * (80 << 10)
        held.append((step, whole, view))
        held = held[-3:]
        for before, one, other in held:
            assert bool((one[1] == 2 * before + 1).all())
            assert other[-1] == 2 * before + 1


def with_views(samples: list[torch.Tensor]) -> Any:
    """A collate function that returns its batch three times, and much text."""
    batch = default_collate(samples)
    return batch, batch.detach(), batch.view(-1), "x" * (80 << 10)


def test_threads_of_a_dataset_may_collate() -> None:
    with DataLoader(Threaded(12), None, num_workers=1, collate_fn=as_is) as loader:
        for i, batches in enumerate(loader):
            for k, batch in enumerate(batches):
                assert bool((batch == 100 * i + k).all())


class Threaded(Blocks):
    """Makes every sample of batches that its threads collated."""

    def __getitem__(self, i: int) -> Any:
        from concurrent.futures import ThreadPoolExecutor

        def batch(k: int) -> Any:
            return default_collate([torch.full((LONG,), 100 * i + k)] * 2)

        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(batch, range(8)))


def test_memory_comes_back_and_stays_bounded() -> None:
    loader = DataLoader(Blocks(100), 2, num_workers=1, persistent_workers=True)
    held = list(loader)
    needed = 100 * LONG * 2
    assert mapped_bytes() >= needed
    assert [int(batch[0, 0]) for batch in held] == list(range(0, 100, 2))
    del held
    for _ in range(6):
        for _batch in loader:
            pass
    assert mapped_bytes() <= needed // 2
    worker = loader._iterator._workers[0].pid
    assert mapped_bytes(worker) <= needed // 2
    fds, mapped = fd_count(), mapped_bytes()
    for _ in range(50):
        for _batch in loader:
            pass
    assert fd_count() <= fds
    assert mapped_bytes() <= mapped
    loader.close()
    del _batch, loader
    gc.collect()
    assert mapped_bytes() == 0


def test_what_a_dataset_collates_for_itself_is_free_when_it_is_dropped() -> None:
    with DataLoader(Collates(6), None, num_workers=1) as loader:
        for i, (first, kept) in enumerate(loader):
            assert first.tolist() == [100 * i + k for k in range(20)]
            assert kept.unique().tolist() == [100 * i + 19]
            # One that is dropped and one that is returned, in several passes.
            assert mapped_bytes() <= 10 * _COLLATED_BYTES


_COLLATED_BYTES = 1 << 20


class Collates(Blocks):
    """Makes every sample of many batches, of which it returns the last."""

    def __getitem__(self, i: int) -> Any:
        first = []
        for k in range(20):
            part = torch.full((_COLLATED_BYTES // 4,), 100 * i + k, dtype=torch.int16)
            batch = default_collate([part, part])
            first.append(int(batch[0, 0]))
        return torch.tensor(first), batch


@pytest.mark.parametrize("given", [{}, {"shuffle": True}, {"num_workers": 1}])
def test_a_dataset_is_free_as_soon_as_its_loader_is_dropped(given) -> None:
    dataset = Samples("int", 4)
    alive = weakref.ref(dataset)
    loader = DataLoader(dataset, 2, **given)
    assert len(list(loader)) == 2
    gc.collect()
    gc.disable()  # what is in a cycle stays
    try:
        del dataset, loader
        assert alive() is None
    finally:
        gc.enable()


def test_expanded_tensors_take_only_their_own_memory() -> None:
    for loader in (
        DataLoader(Expanded(6), None, num_workers=1),
        DataLoader(Blocks(6, LONG), 1, num_workers=1, collate_fn=expanded),
    ):
        for i, batch in enumerate(loader):
            assert batch.stride(0) == 0
            assert batch.shape[0] == 500
            assert bool((batch[::100] == i).all())
            assert mapped_bytes() <= 2 << 20
        loader.close()
        del batch


class Expanded(Blocks):
    """One row, many times."""

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((1, LONG), i, dtype=torch.int16).expand(500, -1)


def expanded(samples: list[torch.Tensor]) -> torch.Tensor:
    """A collate function that repeats its sample."""
    return samples[0].expand(500, -1)


def test_memory_of_a_batch_that_cannot_be_sent_is_free_again() -> None:
    with DataLoader(Blocks(40, 1 << 18), 1, num_workers=1, collate_fn=unsent) as loader:
        iterator = iter(loader)
        for _ in range(40):
            with pytest.raises(AttributeError):
                next(iterator)
        assert mapped_bytes() <= 4 << 20


def unsent(samples: list[torch.Tensor]) -> Any:
    """A collate function whose batch no pickle can hold."""
    return default_collate(samples), lambda: None


# Everything a loader can be given, with no shared memory at all to put it in.
_WITHOUT_SHARED_MEMORY = """
import warnings; warnings.simplefilter("ignore")
import torch
from dataplane_torch import DataLoader
from local_datasets import ANYTHING, Flow, Samples, as_is
from torch.utils.data._utils.collate import collate, default_collate_fn_map

own_map = dict(default_collate_fn_map)

def own_collate(samples):
    return collate(samples, collate_fn_map=own_map)

class All(Samples):
    def __getitem__(self, i):
        return {kind: make(i) for kind, make in ANYTHING.items()}

class Tensors:
    def __iter__(self):
        return iter(torch.randperm(4))

assert len(list(DataLoader(All("", 4), 2, num_workers=2, collate_fn=as_is))) == 2
assert len(list(DataLoader(Flow("sparse", 6), None, num_workers=2, collate_fn=as_is))) == 6
for batch in DataLoader(Samples("long", 8), 4, num_workers=1, collate_fn=own_collate):
    assert batch.shape == (4, 3 << 14)
list(DataLoader(Samples("int", 4), 2, sampler=Tensors(), num_workers=1))
print("done")
"""


def test_no_shared_memory_is_needed() -> None:
    mount = 'mount -t tmpfs -o size=4k,mode=1777 none /dev/shm && exec "$0" -c "$1"'
    isolated = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    try:
        subprocess.run([*isolated, mount, "/bin/true", ""], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no namespaces here")
    run = subprocess.run(
        [*isolated, mount, sys.executable, _WITHOUT_SHARED_MEMORY],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr


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
    """The work of a process."""
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
