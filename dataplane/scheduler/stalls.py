"""Requests that have waited too long, and what for."""

from __future__ import annotations

from collections.abc import Iterator

from dataplane.scheduler.elsewhere import Elsewhere
from dataplane.scheduler.events import Stalled
from dataplane.scheduler.records import SlabPhase, SlabTask, StreamState
from dataplane.scheduler.shared import SharedSlabs

_NO_ROOM = "waiting for room in the delivery arena"


def stalled(
    stream: StreamState, shared: SharedSlabs, elsewhere: Elsewhere, now: float, timeout_s: float
) -> Iterator[Stalled]:
    """The answers to requests of a stream that have waited for too long; they wait no longer."""
    while stream.requests and now - stream.requests[0][1] > timeout_s:
        request_id, since = stream.requests.popleft()
        task = stream.tasks[0] if stream.tasks else None
        stage, missing = ("plan", []) if task is None else _stage(task, shared, elsewhere)
        names = [stream.delivery.datasets.name(number) for number in missing]
        yield Stalled(stream.stream_id, request_id, now - since, stage, names)


def _stage(task: SlabTask, shared: SharedSlabs, elsewhere: Elsewhere) -> tuple[str, list[int]]:
    """What a task waits for, and which blocks."""
    if why := elsewhere.why_none(task):
        return why, []
    slab = shared.find(task)
    if task.phase is not SlabPhase.WAITING or (task.missing and slab is None):
        return task.phase.value, sorted(task.missing)
    is_made_now = slab is not None and slab.made is None
    return "being made for another job of its group" if is_made_now else _NO_ROOM, []
