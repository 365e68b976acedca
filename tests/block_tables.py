"""A block table with all that it needs, and nothing around it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dataplane.arena.allocator import Allocator
from dataplane.model.config import JobSpec
from dataplane.model.records import Region
from dataplane.node.dataset import dataset_of
from dataplane.plan.manifest import Manifest
from dataplane.plan.shards import Shard
from dataplane.scheduler.blocks import BlockTable
from dataplane.scheduler.dataset import DatasetBlocks
from dataplane.scheduler.disk import DiskTier
from dataplane.scheduler.events import Effect
from dataplane.scheduler.holdings import Holdings, WaitingTasks
from dataplane.scheduler.records import Moment
from dataplane.scheduler.streams import SharedSlabs, StreamTable


class TableParts:
    """The parts of a block table, and the effects that it wants."""

    def __init__(self, arena_bytes: int, fetches: int, streams: StreamTable | None = None) -> None:
        self.allocator, self.moment = Allocator(arena_bytes), Moment()
        self.streams = StreamTable() if streams is None else streams
        self.shared = SharedSlabs(self.allocator, self.streams, self.moment)
        self.waiting = WaitingTasks(self.moment, Holdings(self.allocator.size_bytes))
        self.effects: list[Effect] = []
        self.blocks = BlockTable(
            self.allocator, fetches, self.shared, self.waiting,
            DiskTier(0, 0, self.shared.readings), self.effects.append, self.moment,
        )  # fmt: skip


def mapped_blocks(
    sizes: Sequence[int], url: str = "s3:///shard", column: pa.DataType | None = None, **limits: int
) -> DatasetBlocks:
    """Blocks of one row and so many bytes, one after the other in a shard of Arrow."""
    lengths = np.array(sizes, np.int64)
    manifest = Manifest(
        ("all",),
        "arrow",
        pa.schema([("x", column or pa.int32())]).serialize().to_pybytes(),
        (Shard(url, 1 << 40, "tag", len(lengths), Region(0, 0), zero_copy=True),),
        np.zeros(len(lengths), np.int32),
        np.ones(len(lengths), np.int64),
        np.cumsum(lengths) - lengths,
        lengths,
        lengths,
    )
    return dataset_of(1, manifest, JobSpec(manifest.fingerprint), **limits).blocks
