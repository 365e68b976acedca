"""When each block is needed next, computed from all positions of all streams: slow and simple."""

from __future__ import annotations

import numpy as np
from scheduler_numbers import number_of

from dataplane.plan.order import SampleOrder
from dataplane.scheduler.records import StreamState
from dataplane.scheduler.scheduler import Scheduler

NEVER = np.iinfo(np.int64).max


class ExactUses:
    """Of the blocks of one scheduler, none of whose streams can copy a kept slab."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._spans: dict[int, tuple[SampleOrder, list[int], list[int]]] = {}

    def use(self, dataset_id: int, block: int, *, is_guest: bool = False) -> int:
        """How far away the block is needed again, at the soonest: by a stream, or by the one that
        follows it, unless a neighbour keeps it for that. Slabs are handed over before anything is
        evicted.
        """
        soonest = NEVER
        for stream in self._scheduler._streams._streams.values():
            datasets = stream.delivery.datasets
            number = number_of(datasets, dataset_id, block)
            if number is None:
                continue
            before = stream.after
            away = _left(before) if before is not None and not before.closed else 0
            readings = [(stream.walk.order, stream.position - away)]
            if stream.next_order is not None and not is_guest:
                readings.append((stream.next_order, -_left(stream)))
            for order, position in readings:
                first, last = self._span(order, int(datasets.starts[-1]))
                if last[number] >= position:
                    soonest = min(soonest, max(first[number] - position, 0))
        return soonest

    def _span(self, order: SampleOrder, block_count: int) -> tuple[list[int], list[int]]:
        found = self._spans.get(id(order))
        if found is None:
            first, last = order.block_span(np.arange(block_count))
            found = self._spans[id(order)] = order, first.tolist(), last.tolist()
        return found[1:]


def _left(stream: StreamState) -> int:
    return max(0, stream.walk.order.sample_count - stream.position)
