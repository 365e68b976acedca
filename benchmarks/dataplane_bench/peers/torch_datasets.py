"""Datasets and samplers for torch.utils.data.DataLoader and those that follow it.

Imported where torch is; the files are those of memmaps.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataplane_bench.model import BatchKind, StorageKind, TrialTask, Workload, WorkloadPart
from dataplane_bench.peers import memmaps
from dataplane_bench.peers.base import Batch
from dataplane_bench.peers.memmaps import MappedRows, Packed
from dataplane_bench.peers.rows import worker_index
from dataplane_bench.peers.tokenising import set_threads, tokenised, tokenising

State = dict[str, Any]


class BatchSampler:
    """A sampler of whole batches: a permutation of each epoch, every `size`-th of it for a rank.

    That is DistributedSampler without the samples that it repeats at the end.
    Shapes:  each yielded array: int64[batch_size], the last one shorter.
    """

    def __init__(self, task: TrialTask, count: int | None = None) -> None:
        """`count` is how many samples there are, where they are not the workload's own."""
        self.count, self.batch_size = task.workload.sample_count, task.workload.batch_size
        self.parts = task.workload.parts
        if count is not None:
            self.count, self.parts = count, ()
        self.rank, self.size, self.seed = task.rank, task.size, task.seed
        self.in_order = task.case.in_order
        self.epoch = 0

    def __iter__(self) -> Position:
        return Position(self)

    def __len__(self) -> int:
        mine = len(range(self.rank, self.count, self.size))
        return math.ceil(mine / self.batch_size)

    def ids(self, epoch: int) -> NDArray[np.int64]:
        """This rank's samples of an epoch."""
        if self.parts:
            return mixed(self.parts, self.seed + epoch)[self.rank :: self.size]
        if self.in_order:
            order = torch.arange(self.count)
        else:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(self.count, generator=generator)
        result: NDArray[np.int64] = order[self.rank :: self.size].contiguous().numpy()
        return result


def mixed(parts: Sequence[WorkloadPart], seed: int) -> NDArray[np.int64]:
    """Samples of a mixture until its first source is exhausted: each of an independently drawn
    source, and in each source in random order.
    """
    random = np.random.default_rng(seed)
    sizes = [part.sample_count for part in parts]
    weights = [part.weight for part in parts]
    drawn = random.choice(len(parts), sum(sizes), p=weights)
    ids = np.zeros(len(drawn), np.int64)
    end, first = len(drawn), 0
    for index, size in enumerate(sizes):
        places = np.flatnonzero(drawn == index)
        end = min(end, int(places[size])) if len(places) > size else end
        ids[places[:size]] = first + random.permutation(size)[: len(places)]
        first += size
    return ids[:end]


class Position:
    """A place in an order; StatefulDataLoader asks it for its state."""

    def __init__(self, order: BatchSampler) -> None:
        self._order, self._epoch, self._done = order, order.epoch, 0
        self._ids = order.ids(order.epoch)

    def __iter__(self) -> Position:
        return self

    def __next__(self) -> NDArray[np.int64]:
        ids = self._ids[self._done : self._done + self._order.batch_size]
        if not len(ids):
            raise StopIteration
        self._done += len(ids)
        return ids

    def state_dict(self) -> State:
        return {"epoch": self._epoch, "done": self._done}

    def load_state_dict(self, state: State) -> None:
        if state["epoch"] != self._epoch:
            self._ids = self._order.ids(state["epoch"])
        self._epoch, self._done = state["epoch"], state["done"]


class Mapped:
    """A map-style dataset over mapped files: a sample by its id, or a batch by an array of ids.

    Each process maps the files when it first needs them: a mapping does not travel.
    """

    def __init__(self, task: TrialTask) -> None:
        self._workload, self._folder, self._seed = task.workload, task.place.folder, task.seed
        self._rows: MappedRows | None = None

    def __len__(self) -> int:
        return self._workload.sample_count

    def __getitem__(self, ids: Any) -> Packed:
        if self._rows is None:
            random = np.random.default_rng((self._seed, worker_index()))
            self._rows = memmaps.mapped(self._workload, self._folder, random)
        if isinstance(ids, np.ndarray):
            return self._rows.gather(ids)
        return self._rows.sample(int(ids))


def as_it_is(batch: Packed) -> Packed:
    """Collates samples that already form a batch."""
    return batch


class TokenisedCollate:
    """Collates texts that already form a batch, into tokens."""

    def __init__(self, workload: Workload) -> None:
        self._tokenise = tokenising(workload)

    def __call__(self, batch: Packed) -> Packed:
        return tokenised(self._tokenise, batch)


class SampleCollate:
    """Collates samples that were fetched one by one."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def __call__(self, samples: Sequence[dict[str, Any]]) -> Packed:
        packed: Packed = {}
        for dense in memmaps.dense_files(self._workload):
            rows = [sample[dense.file] for sample in samples]
            packed[dense.file] = torch.utils.data.default_collate(rows)
        for column in memmaps.listed(self._workload):
            packed |= memmaps.collated(column, [sample[column.name] for sample in samples])
        return packed


class TorchPeer:
    """A DataLoader set up for a task: torch's own, or one that takes the same arguments."""

    def __init__(self, kind: Callable[..., Any], task: TrialTask) -> None:
        choice = dict(task.settings)
        fetch = choice.pop("fetch", "batch")
        choice.pop("client", None)
        self._workers = choice["num_workers"]
        if self._workers:
            choice["persistent_workers"] = True
        torch.set_num_threads(choice.pop("threads", 1))
        self._matrices = [dense for dense in memmaps.dense_files(task.workload) if dense.is_matrix]
        self._iterator: Any = None
        self._order: Any
        if task.case.store is StorageKind.S3:
            # Import here rather than in each worker, since the clients' imports are slow.
            from dataplane_bench.peers.torch_streams import Streamed

            self._order = Streamed(task)
            self.loader = kind(self._order, batch_size=None, collate_fn=as_it_is, **choice)
        elif fetch == "batch":
            self._order = BatchSampler(task)
            collate: Any = as_it_is
            if task.workload.delivery is BatchKind.TOKENISED:
                set_threads(self._workers)
                collate = TokenisedCollate(task.workload)
            self.loader = kind(
                Mapped(task), batch_size=None, sampler=self._order, collate_fn=collate, **choice
            )
        else:
            self._order = BatchSampler(task)
            collate = SampleCollate(task.workload)
            self.loader = kind(
                Mapped(task), batch_sampler=self._order, collate_fn=collate, **choice
            )

    def epoch(self, number: int) -> Iterator[Batch]:
        self._order.epoch = number
        return self.rest()

    def rest(self) -> Iterator[Batch]:
        """The pass that the loader is at."""
        self._iterator = iter(self.loader)
        for packed in self._iterator:
            yield memmaps.unpacked(self._matrices, packed)

    def close(self) -> None:
        if self._workers and self._iterator is not None:
            # No public way ends workers before the interpreter finds them unreachable.
            self._iterator._shutdown_workers()  # noqa: SLF001
        self._iterator = None
