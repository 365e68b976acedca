"""A short run of a job: a loop that takes batches of this dataset on this machine.

The loop is a trainer without a model: it maps the slabs and takes them batch by batch. Making
tensors would take about 10 us a batch more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dataplane.client.session import Session
from dataplane.client.statistics import Statistics
from dataplane.client.stream import SlabStream

WARM_SHARE = 0.3
"""Share of the run to leave out at its start, while buffers fill and slabs are small."""

_SLABS_MIN = 3
_LONGER = 8
"""Slabs that must be seen before and after, and how many times longer the run may take for that."""

Progress = Callable[[float, Statistics], None]
"""Called periodically with the share that is done, and the statistics so far."""

_TOLD_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class TrialLength:
    """When to stop a run: at the first of these limits, unless too few slabs were seen by then."""

    seconds: float
    steps: int | None


@dataclass(frozen=True, slots=True)
class Trial:
    """The results of a run. `found` leaves out the time before buffers were warm."""

    found: Statistics
    first_batch_s: float
    steps: int
    epochs: int
    is_short: bool
    """There were too few batches to leave out the first ones."""


class _Loop:
    """A trainer's loop without a model."""

    def __init__(
        self, session: Session, step_s: float, length: TrialLength, progress: Progress
    ) -> None:
        self._session, self._step_s = session, step_s
        self._length, self._progress = length, progress
        self._began = self._told = time.monotonic()
        self._steps = 0
        self._warm: Statistics | None = None
        self._pause = threading.Event()

    def run(self) -> Trial:
        """Run epoch after epoch, until a limit is reached."""
        epoch, first_batch_s = 0, 0.0
        while not self._is_done():
            stream = SlabStream(self._session, epoch, 0)
            try:
                step = 0
                while not self._is_done() and (slab := stream.batches_from(step)):
                    first_batch_s = first_batch_s or time.monotonic() - self._began
                    count = sum(len(batches.batches) for batches in slab)
                    step += count
                    self._consume(count)
                    del slab  # while it is not ours to keep
            finally:
                stream.close()
            epoch += step > 0
            if not step:
                break
        total = self._session.statistics()
        warm = self._warm or Statistics()
        is_short = total.samples == warm.samples or not self._warm
        found = total if is_short else total.since(warm)
        return Trial(found, first_batch_s, self._steps, epoch, is_short)

    def _consume(self, count: int) -> None:
        """Take this many batches of a slab, with one step each."""
        for _ in range(count):
            if self._step_s:
                self._pause.wait(self._step_s)
            self._steps += 1
            if self._is_done():
                break
        done = self._share_done()
        if self._warm is None and done >= WARM_SHARE:
            found = self._session.statistics()
            self._warm = found if found.slabs >= _SLABS_MIN else None
        now = time.monotonic()
        if now - self._told >= _TOLD_EVERY_S:
            self._told = now
            self._progress(done, self._session.statistics())

    def _share_done(self) -> float:
        by_steps = self._steps / self._length.steps if self._length.steps else 0.0
        return min(max(self._by_time(), by_steps), 1.0)

    def _by_time(self) -> float:
        return (time.monotonic() - self._began) / self._length.seconds

    def _is_done(self) -> bool:
        if self._share_done() < 1.0:
            return False
        seen = self._session.statistics().slabs - (self._warm.slabs if self._warm else 0)
        return (self._warm is not None and seen >= _SLABS_MIN) or self._by_time() >= _LONGER


def run(session: Session, step_s: float, length: TrialLength, progress: Progress) -> Trial:
    """Run the session's job for a while. The time to open the job does not count.

    Raises:  DataplaneError: the node reported it.
    """
    session.mount()
    return _Loop(session, step_s, length, progress).run()
