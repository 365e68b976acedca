"""Grain's packing: documents in random order, put into the first or the best of some open packs.

Source: the docstrings of FirstFitPackIterDataset and BestFitPackIterDataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataplane_bench.model import Mode, Settings, TrialTask
from dataplane_bench.peers import memmaps
from dataplane_bench.peers.base import Batch
from dataplane_bench.peers.documents import pieces

DESCRIBES = (
    "arrays in mapped files, shuffled over the whole epoch; packs of Grain's own first fit or best"
    " fit; packs are emitted when a document fits into none of the open ones"
)
_BINS = 64
"""Packs that are open at the same time: as two batches hold."""
_BUFFERED = 2


def choices(workers: int) -> tuple[Settings, ...]:
    """The settings worth trying."""
    return (
        {"fit": "first", "workers": workers},
        {"fit": "best", "workers": workers},
        {"fit": "first", "workers": 0},
    )


class GrainPacks:
    """A new iterator for an epoch that is checked. Otherwise epochs follow each other in one, in
    which a pack may hold documents of both: worker processes take seconds to start.
    """

    def __init__(self, task: TrialTask) -> None:
        import torch

        torch.set_num_threads(1)
        self._task = task
        self._iterator: Any = None

    def epoch(self, number: int) -> Iterator[Batch]:
        import torch

        self.close()
        self._iterator = iter(_batches(self._task, number))
        names = {
            "tokens": "tokens",
            "tokens_positions": "position_ids",
            "tokens_segment_ids": "document_ids",
        }
        for batch in self._iterator:
            yield {names[name]: torch.from_numpy(array) for name, array in batch.items()}

    def close(self) -> None:
        if self._iterator is not None:
            self._iterator.close()
        self._iterator = None


def _batches(task: TrialTask, number: int) -> Any:
    import grain

    workload, workers = task.workload, task.settings["workers"]
    documents = _Pieces(task)
    kinds = {
        "first": grain.experimental.FirstFitPackIterDataset,
        "best": grain.experimental.BestFitPackIterDataset,
    }
    source = grain.MapDataset.source(documents).seed(task.seed + number).shuffle()
    if task.case.mode is not Mode.VERIFY:
        source = source.repeat()
    packs = kinds[task.settings["fit"]](
        source.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=1)),
        length_struct={"tokens": workload.length},
        num_packing_bins=_BINS,
        seed=task.seed,
    )
    batches = packs.batch(workload.batch_size, batch_fn=_stacked)
    if workers:
        buffers = grain.MultiprocessingOptions(workers, per_worker_buffer_size=_BUFFERED)
        batches = batches.mp_prefetch(buffers)
    return batches


def _stacked(packs: Sequence[dict[str, NDArray[np.int32]]]) -> dict[str, NDArray[np.int32]]:
    return {name: np.stack([pack[name] for pack in packs]) for name in packs[0]}


class _Pieces:
    """The pieces of documents, by number. Each process maps the files when it first needs them."""

    def __init__(self, task: TrialTask) -> None:
        self._workload, self._folder = task.workload, task.place.folder
        offsets = np.fromfile(self._folder / "tokens.offsets", np.int64)
        self._starts, self._ends = pieces(offsets, task.workload.length)
        self._values: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int32]]:
        if self._values is None:
            rows = memmaps.mapped(self._workload, self._folder, np.random.default_rng())
            self._values = rows.lists["tokens"][0]
        return {"tokens": self._values[self._starts[index] : self._ends[index]]}
