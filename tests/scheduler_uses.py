"""When each block is needed next, computed from all positions of all streams: slow and simple."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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

    def use(
        self, dataset_id: int, block: int, guest_of: Sequence[SampleOrder] | None = None
    ) -> int:
        """How far away the block is needed again, at the soonest: by a stream, or by the one that
        follows it; if a neighbour owns it, by streams of the orders that it was read for. Slabs are
        handed over before anything is evicted.
        """
        soonest = NEVER
        for order, position, first, is_open in self._needs(dataset_id, block):
            if guest_of is None or (is_open and any(order is each for each in guest_of)):
                soonest = min(soonest, max(first - position, 0))
        return soonest

    def orders_now(self, dataset_id: int, block: int) -> list[SampleOrder]:
        """The orders that a neighbour's block is read for."""
        needs = [each for each in self._needs(dataset_id, block) if each[3]]
        now = [order for order, position, _, _ in needs if position >= 0]
        if now or not needs:
            return now
        return [min(needs, key=lambda each: each[2] - each[1])[0]]

    def _needs(self, dataset_id: int, block: int) -> Iterator[tuple[SampleOrder, int, int, bool]]:
        """Each order that needs the block, how far it has been read, where it is needed first, and
        whether a stream is open.
        """
        for stream in self._scheduler._streams._streams.values():
            datasets = stream.delivery.datasets
            number = number_of(datasets, dataset_id, block)
            if number is None:
                continue
            before = stream.after
            away = _left(before) if before is not None and not before.closed else 0
            readings = [(stream.walk.order, stream.position - away, True)]
            if stream.next_order is not None:
                readings.append((stream.next_order, -_left(stream), False))
            for order, position, is_open in readings:
                first, last = self._span(order, int(datasets.starts[-1]))
                if last[number] >= position:
                    yield order, position, first[number], is_open

    def _span(self, order: SampleOrder, block_count: int) -> tuple[list[int], list[int]]:
        found = self._spans.get(id(order))
        if found is None:
            first, last = order.block_span(np.arange(block_count))
            found = self._spans[id(order)] = order, first.tolist(), last.tolist()
        return found[1:]


def _left(stream: StreamState) -> int:
    return max(0, stream.walk.order.sample_count - stream.position)
