"""Datasets whose maps draw anew in each epoch: each epoch has blocks of its own.

Invariants:
1. A block that a map made for one epoch is used in no other: it belongs to a dataset of the epoch.
2. The streams of one epoch share its dataset, which is forgotten when the last of them closes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from msgspec import Struct, field

from dataplane.node.dataset import Dataset
from dataplane.node.delivery import ServedStream
from dataplane.scheduler.dataset import DatasetLookup

_FIRST_ID = 1 << 40  # beyond the numbers of all other datasets


class _OfEpoch(Struct, eq=False):
    dataset: Dataset
    streams: set[int] = field(default_factory=set)


class EpochDatasets:
    """The datasets of epochs that streams read. `known` has all datasets by number; `forget` drops
    the blocks of one.
    """

    def __init__(self, known: dict[int, Dataset], forget: Callable[[Dataset], None]) -> None:
        self._known, self._forget = known, forget
        self._read: dict[tuple[int, int], _OfEpoch] = {}
        self._left: list[Dataset] = []
        """Datasets without streams that workers may still use."""
        self._numbers = itertools.count(_FIRST_ID)

    def of_stream(self, stream: ServedStream, datasets: Sequence[Dataset]) -> DatasetLookup | None:
        """Return what a new stream reads instead of these datasets; None if no map draws in each
        epoch.
        """
        if not any(dataset.message.view.per_epoch for dataset in datasets):
            return None
        self._drop_unused()
        epoch = stream.walk.stream.epoch
        return DatasetLookup(
            *(self._of_epoch(dataset, epoch, stream).blocks for dataset in datasets)
        )

    def _of_epoch(self, dataset: Dataset, epoch: int, stream: ServedStream) -> Dataset:
        if not dataset.message.view.per_epoch:
            return dataset
        key = dataset.dataset_id, epoch
        own = self._read.get(key)
        if own is None:
            own = self._read[key] = _OfEpoch(dataset.for_epoch(epoch, next(self._numbers)))
            self._known[own.dataset.dataset_id] = own.dataset
        own.streams.add(stream.stream_id)
        return own.dataset

    def is_read(self, stream: ServedStream) -> bool:
        """Whether the stream reads blocks that its next epoch does not have."""
        return any(stream.stream_id in own.streams for own in self._read.values())

    def close(self, stream: ServedStream) -> None:
        """Forget the datasets that only this stream has read."""
        for key, own in list(self._read.items()):
            own.streams.discard(stream.stream_id)
            if not own.streams:
                del self._read[key]
                self._left.append(own.dataset)
                self._forget(own.dataset)
        self._drop_unused()

    def _drop_unused(self) -> None:
        """Drop the datasets without streams whose blocks are no longer in use."""
        for dataset in [dataset for dataset in self._left if not dataset.blocks.marks.keys.any()]:
            self._left.remove(dataset)
            del self._known[dataset.dataset_id]
