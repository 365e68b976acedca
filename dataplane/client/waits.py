"""Divide the wait for a slab by stage."""

from __future__ import annotations

from dataplane.rpc.messages import StageTimes

Waits = tuple[int, int, int, int, int, int]
"""(fetch, decode, room, queue, assemble, other), in microseconds."""


def stages_waited_for(waited: int, times: StageTimes) -> Waits:
    """(fetch, decode, room, queue, assemble, other): the wait for this slab, divided by stage. If
    the slab was ready before it was requested, the wait was for the request itself, and counts as
    other.
    """
    stages = (times.assemble, times.queue, times.room, times.decode, times.fetch)
    ready = min(waited, times.ready)
    left, parts = waited - ready, []
    for stage in stages:
        parts.append(min(left, stage))
        left -= parts[-1]
    assemble, queue, room, decode, fetch = parts
    return fetch, decode, room, queue, assemble, ready + left
