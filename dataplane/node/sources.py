"""Describe blocks and excerpts to workers: where their rows are, and their names in errors."""

from __future__ import annotations

from collections.abc import Callable

from dataplane.node.dataset import Dataset
from dataplane.rpc import tasks
from dataplane.scheduler.dataset import BlockName
from dataplane.scheduler.records import CachedBlock, Excerpt
from dataplane.worker.death import WorkerPlace


class BlockSources:
    """The ready blocks and excerpts of a node, by key. `find` names a block or excerpt,
    `dataset_of` a dataset by its number.
    """

    def __init__(
        self, find: Callable[[int], CachedBlock | Excerpt], dataset_of: Callable[[int], Dataset]
    ) -> None:
        self._find, self._dataset_of = find, dataset_of
        self._sources: dict[int, tasks.BlockSource] = {}
        self._without_restart_indexes: set[int] = set()

    def leave_out_restart_indexes(self, key: int) -> None:
        """Drop this block's restart indexes, for which the machine had no memory."""
        self._without_restart_indexes.add(key)

    def forget(self, key: int) -> None:
        """Forget a key whose memory is about to be reused."""
        self._sources.pop(key, None)
        self._without_restart_indexes.discard(key)

    def source(self, key: int) -> tasks.BlockSource:
        """Return the facts that a worker needs to gather from a block."""
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
        """Return the description of its dataset's columns."""
        return self._dataset_of(self._find(key).dataset.dataset_id).message

    def place_of(self, key: int) -> WorkerPlace:
        """Return the block's place for error messages."""
        block = self._find(key)
        return self.place(BlockName(block.dataset.dataset_id, block.index))

    def place(self, first: BlockName | None) -> WorkerPlace:
        """Return the place of a block given by name; None for a batch without rows."""
        if first is None:
            return WorkerPlace("a batch without rows")
        return self._dataset_of(first.dataset_id).place(first.block)
