"""Decide when a maker has been silent for so long that others should make its slab. Pure."""

from __future__ import annotations

from msgspec import Struct

from dataplane.scheduler.records import KnownMaker, SlabTask

SILENT_S = 3.0
"""A slab from time to time is late, and is hedged long before."""
FIRST_S = 20.0
"""For a slab while it is not known how long slabs take: the first one may wait for many blocks."""
_SILENT_FACTOR = 4.0
"""How many times what a slab takes."""


class GiveUpSlab(Struct, frozen=True):
    """End a MakeElsewhere soon, with NeighbourGone unless the slab is here by then."""

    number: int


def is_silent(maker: KnownMaker, task: SlabTask, usual_s: float, now: float) -> bool:
    """Whether a maker has finished no slab since it got the request for this one, or for those
    before, for much longer than a slab takes. Other makers take `usual_s` for a batch, 0 if
    unknown.
    """
    slab_s = (maker.seconds or usual_s) * len(task.plan.batches)
    limit_s = max(SILENT_S, _SILENT_FACTOR * slab_s) if slab_s else FIRST_S
    return now - max(maker.since, task.stamps.slotted) >= limit_s
