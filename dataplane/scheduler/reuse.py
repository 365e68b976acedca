"""Measure how much of the blocks that streams needed was in memory, because another stream or epoch
had caused the read.
"""

from __future__ import annotations

import numpy as np

from dataplane.scheduler.records import SlabTask


class Reuse:
    """Counts each remote block once for each stream that needs it. The stream that causes a read
    does not count as reuse. So all useful reads plus `found_bytes` add up to the stored size of
    everything that streams needed.
    """

    def __init__(self) -> None:
        self.found_bytes = 0

    def gathered(self, task: SlabTask, now: float) -> None:
        """Note that the rows of this task are about to be gathered from its blocks."""
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
