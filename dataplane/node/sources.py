"""What workers are told of blocks and excerpts: where their rows are, and what errors call them."""

from __future__ import annotations

from collections.abc import Callable

from dataplane.node.dataset import Dataset
from dataplane.rpc import tasks
from dataplane.scheduler.block import CachedBlock, Excerpt
from dataplane.scheduler.dataset import BlockName
from dataplane.worker.death import WorkerPlace


class BlockSources:
    """Those of the ready blocks and excerpts of a node, by key. `find` names a block or excerpt,
    `dataset_of` a dataset by its number.
    """

    def __init__(
        self, find: Callable[[int], CachedBlock | Excerpt], dataset_of: Callable[[int], Dataset]
    ) -> None:
        self._find, self._dataset_of = find, dataset_of
        self._sources: dict[int, tasks.BlockSource] = {}
        self._without_restart_indexes: set[int] = set()

    def leave_out_restart_indexes(self, key: int) -> None:
        """The machine had no memory for those of this block."""
        self._without_restart_indexes.add(key)

    def forget(self, key: int) -> None:
        """The memory with this key is about to be reused."""
        self._sources.pop(key, None)
        self._without_restart_indexes.discard(key)

    def source(self, key: int) -> tasks.BlockSource:
        """What a worker needs to know to gather from it."""
        source = self._sources.get(key)
        if source is None:
            source = self._sources[key] = self._new(key)
        return source

    def _new(self, key: int) -> tasks.BlockSource:
        block = self._find(key)
        dataset = self._dataset_of(block.dataset.dataset_id)
        origin = dataset.origin(block.index)
        if isinstance(block, Excerpt):
            rows = block.row_count
            return tasks.BlockSource(key, decoded=block.decoded, origin=origin, row_count=rows)
        raw = dataset.raw_block(block.index, block.raw) if block.decoded is None else None
        noted = None if key in self._without_restart_indexes else block.restart_indexes
        return tasks.BlockSource(key, raw, block.decoded, origin, noted)

    def message_of(self, key: int) -> tasks.OpenDataset:
        """The columns of its dataset."""
        return self._dataset_of(self._find(key).dataset.dataset_id).message

    def place_of(self, key: int) -> WorkerPlace:
        """The block as errors name it."""
        block = self._find(key)
        return self.place(BlockName(block.dataset.dataset_id, block.index))

    def place(self, first: BlockName | None) -> WorkerPlace:
        """The same by name; None for a batch without rows."""
        if first is None:
            return WorkerPlace("a batch without rows")
        return self._dataset_of(first.dataset_id).place(first.block)
