"""Decide when the next plans of a stream are made: several at once, as its slabs and the loading of
their blocks need them.
"""

from __future__ import annotations

from collections.abc import Callable

from dataplane.scheduler.events import AllPlanned, Effect, Planned, PlanSteps
from dataplane.scheduler.passes import Passes
from dataplane.scheduler.records import StreamState
from dataplane.scheduler.slab_tasks import SlabTasks
from dataplane.scheduler.streams import StreamTable

PLANS_TOGETHER = 8


class Planning:
    """The planning of all streams of a node. `do` emits an effect."""

    def __init__(
        self,
        streams: StreamTable,
        tasks: SlabTasks,
        passes: Passes,
        do: Callable[[Effect], None],
    ) -> None:
        self._streams, self._tasks, self._passes, self._do = streams, tasks, passes, do

    def plan_more(self, stream: StreamState) -> None:
        """Request plans, if the stream needs some."""
        room = self._passes.plans_ahead(stream) - len(stream.tasks)
        room += stream.delivery.ahead
        if stream.planning or stream.planned_all or not stream.walk.waiting_count:
            return
        # Several plans per call, since each call wakes two threads; the first plans one by one, so
        # that the first batch is early.
        count = min(max(len(stream.tasks), 1), PLANS_TOGETHER, stream.walk.waiting_count)
        if room >= count:
            stream.planning = count
            stream.walk.begin(count)
            self._do(PlanSteps(stream.stream_id, stream.walk, count))

    def planned(self, event: Planned) -> None:
        """Handle plans that were made, or could not be made."""
        stream = self._streams.find(event.stream_id)
        if stream is None:
            return
        asked, stream.planning = stream.planning, 0
        stream.error = event.error
        is_end = len(event.plans) < asked and not stream.walk.is_fed
        stream.planned_all = event.error is not None or is_end
        for plan in event.plans:
            self._tasks.add(stream, plan)
        stream.planned_to = stream.walk.position
        if stream.planned_all:
            self._do(AllPlanned(stream.stream_id, has_failed=event.error is not None))
