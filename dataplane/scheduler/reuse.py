"""How much of what streams needed was in memory, since another stream or epoch had it read."""

from __future__ import annotations

import numpy as np

from dataplane.scheduler.records import SlabTask


class Reuse:
    """Counts each remote block once for each stream that needs it. What a block was read for is no
    reuse: so everything that was read (and needed), and `found_bytes`, add up to what all streams
    needed, as it is stored.
    """

    def __init__(self) -> None:
        self.found_bytes = 0

    def gathered(self, task: SlabTask, now: float) -> None:
        """The rows of this task are about to be gathered from its blocks."""
        stream, blocks = task.stream, task.plan.blocks
        if stream.seen is None:
            stream.seen = np.zeros(int(task.datasets.starts[-1]), np.bool_)
        first = blocks[~stream.seen[blocks]]
        if not len(first):
            return
        stream.seen[first] = True
        for dataset, some in task.datasets.parts(first):
            marks = dataset.marks
            remote = some[marks.is_remote[some]]
            again = remote[marks.used[remote] >= marks.fetched[remote]]
            found = int(dataset.stored[again].sum())
            self.found_bytes += found
            dataset.account.memory_bytes += found
            marks.used[remote] = now
