"""Find the slab tasks that wait for a block.

Invariants:
1. `missing` has exactly the blocks of a waiting task that are not ready and of which it has no
   excerpt; those that are not being loaded are also in `idle`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from dataplane.errors import DataplaneError
from dataplane.scheduler.block import BlockChange, BlockOutcome
from dataplane.scheduler.dataset import DatasetBlocks
from dataplane.scheduler.holdings import Holdings
from dataplane.scheduler.records import Moment, SlabTask


class WaitingTasks:
    """Every slab task that waits for blocks or a slot."""

    def __init__(self, time: Moment, holdings: Holdings) -> None:
        self._time, self._holdings = time, holdings
        self._waiting: defaultdict[int, set[SlabTask]] = defaultdict(set)

    def of_block(self, dataset: DatasetBlocks, index: int) -> list[SlabTask]:
        """The tasks that need rows of a block and have no excerpt of it."""
        found = []
        for task in self._waiting.get(dataset.dataset_id, ()):
            number = task.datasets.number(dataset, index)
            if task.needs(number) and number not in task.excerpts:
                found.append(task)
        return found

    def is_lacked(self, dataset: DatasetBlocks, index: int) -> bool:
        """Whether a task waits for a block to be loaded. Takes a step for each task."""
        return any(
            task.datasets.number(dataset, index) in task.idle
            for task in self._waiting.get(dataset.dataset_id, ())
        )

    def block_changed(
        self, changed: BlockChange, fail: Callable[[SlabTask, DataplaneError], None]
    ) -> None:
        """Update the tasks that wait for this block; `fail` those that cannot be made."""
        for task in list(self._waiting.get(changed.dataset.dataset_id, ())):
            number = task.datasets.number(changed.dataset, changed.index)
            if changed.change is BlockOutcome.READY:
                self._block_ready(task, number)
            elif not task.needs(number) or number in task.excerpts:
                continue
            elif changed.error is not None:
                fail(task, changed.error)
            else:
                task.missing.add(number)
                task.idle.add(number)

    def _block_ready(self, task: SlabTask, number: int) -> None:
        if number in task.missing:
            task.missing.discard(number)
            task.idle.discard(number)
            self._stamp(task)

    def add(self, task: SlabTask) -> None:
        """Let the task wait for this plan from now on."""
        datasets, blocks = task.datasets, task.plan.blocks
        for dataset, some in datasets.parts(blocks):
            self._waiting[dataset.dataset_id].add(task)
            self._holdings.want(dataset, some)
        task.blocks = None
        task.missing = set(blocks[task.keys == 0].tolist())
        task.idle = set(task.missing)
        self._stamp(task)

    def _stamp(self, task: SlabTask) -> None:
        if not task.missing:
            task.stamps.gathered_from = self._time.now
            task.stamps.fetched = max(
                (
                    float(dataset.marks.fetched[blocks].max())
                    for dataset, blocks in task.datasets.parts(task.plan.blocks)
                ),
                default=0.0,
            )

    def remove(self, task: SlabTask) -> None:
        """Remove a task that no longer waits."""
        for dataset, some in task.datasets.parts(task.plan.blocks):
            waiting = self._waiting.get(dataset.dataset_id)
            if waiting is not None and task in waiting:
                waiting.remove(task)
                self._holdings.want_no_more(dataset, some)
                if not waiting:
                    del self._waiting[dataset.dataset_id]
        task.missing.clear()
        task.idle.clear()
