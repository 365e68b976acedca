"""Requests that wait: the progress of their slab, and whether they have waited too long.

Invariants:
1. A request waits too long if nothing was done for its slab for the whole timeout: no block of its
   datasets was read or decoded, no slab planned or made, and no worker was at work on any of these.
   Workers and reads have time limits of their own, so no request waits for ever.
2. A consumer gets a report of progress at least every few seconds, if there was any.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

from dataplane.scheduler.blocks import BlockTable
from dataplane.scheduler.elsewhere import Elsewhere
from dataplane.scheduler.events import Advanced, SlabProgress, Stalled
from dataplane.scheduler.records import BlockPhase, SlabPhase, SlabTask, StreamState
from dataplane.scheduler.streams import SharedSlabs

PLAN, NO_ROOM = "plan", "waiting for room in the delivery arena"
"""Stages of a slab other than its phases and the stages that name another node."""
_STAGES = {NO_ROOM: "room", SlabPhase.ASSEMBLING.value: "assemble"}
_EXAMINED_MAX = 64
"""The most missing blocks that are examined to tell what a slab waits for."""
_HEARD_S_MAX, _HEARD_SHARE = 5.0, 1 / 8


class Stalls:
    """Watches the requests of all streams of a node."""

    def __init__(
        self, blocks: BlockTable, shared: SharedSlabs, elsewhere: Elsewhere, timeout_s: float
    ) -> None:
        self._blocks, self._shared, self._elsewhere = blocks, shared, elsewhere
        self._timeout_s = timeout_s
        self._heard_s = min(_HEARD_S_MAX, timeout_s * _HEARD_SHARE)

    def of_stream(
        self, stream: StreamState, at_work: Collection[int], now: float
    ) -> Iterator[Advanced | Stalled]:
        """Yield the final answers to requests that have waited too long, or the progress of the
        slab for which the first request waits. `at_work` are the numbers of the datasets at which
        workers work.
        """
        if not stream.requests or now - stream.requests[0][1] <= self._heard_s:
            return  # return early: a mixture may have thousands of datasets to visit
        datasets = stream.datasets.datasets
        if at_work:
            for dataset in datasets:
                if dataset.dataset_id in at_work:
                    dataset.account.advanced(now)
        advanced = max(stream.advanced_at, *(each.account.advanced_at for each in datasets))
        while stream.requests and now - max(stream.requests[0][1], advanced) > self._timeout_s:
            request_id, since = stream.requests.popleft()
            progress = self._progress(stream)
            waits = progress.stage == SlabPhase.WAITING.value
            missing = sorted(stream.tasks[0].missing) if waits else []
            names = [stream.datasets.name(number) for number in missing]
            yield Stalled(stream.stream_id, request_id, now - since, progress, names)
        if not stream.requests or advanced <= stream.heard_at:
            return
        request_id, since = stream.requests[0]
        if now - max(since, stream.heard_at) > self._heard_s:
            stream.heard_at = now
            yield Advanced(stream.stream_id, request_id, self._progress(stream))

    def waiting(self, stream: StreamState, now: float) -> tuple[float, str] | None:
        """Return for how long a stream's oldest request has waited, and for which stage of a slab;
        None if no request waits.
        """
        if not stream.requests:
            return None
        progress = self._progress(stream)
        stage = _STAGES.get(progress.stage, "other")
        if progress.stage == SlabPhase.WAITING.value:
            stage = "decode" if progress.phase is BlockPhase.DECODING else "fetch"
        return now - stream.requests[0][1], stage

    def _progress(self, stream: StreamState) -> SlabProgress:
        """Return the progress of a stream's next slab."""
        if not stream.tasks:
            return SlabProgress(PLAN)
        task = stream.tasks[0]
        if why := self._elsewhere.why_none(task):
            return SlabProgress(why)
        total = len(task.plan.blocks)
        if task.phase is not SlabPhase.WAITING:
            return SlabProgress(task.phase.value, total, total)
        slab = self._shared.find(task)
        if slab is None and task.missing:
            done = total - len(task.missing)
            return SlabProgress(task.phase.value, done, total, self._phase(task))
        is_made_now = slab is not None and slab.made is None
        stage = "being made for another job of its group" if is_made_now else NO_ROOM
        return SlabProgress(stage, total, total)

    def _phase(self, task: SlabTask) -> BlockPhase | None:
        """Return the phase of a task's missing blocks: reading comes first, then decoding. None:
        they all wait for memory.
        """
        some = itertools.islice(task.missing, _EXAMINED_MAX)
        blocks = [self._blocks.find(*task.datasets.find(number)) for number in some]
        phases = {block.phase for block in blocks if block is not None}
        going = (BlockPhase.FETCHING, BlockPhase.DECODING)
        return next((phase for phase in going if phase in phases), None)
