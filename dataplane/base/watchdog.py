"""Log what has blocked a process's event loop, and for how long.

While one callback runs, no other work is done: no slab is handed over, no block is requested. The
loop waits for events in `select()`; the work between two such waits is a *turn*. A turn longer than
HOLD_S is a *hold* of the loop.

1. The length of a turn is the processor time of the loop's thread (`ran`) plus the time that the
   thread waited (`waited`) in a blocking call or for the interpreter lock. Time for which the
   machine had no processor for the thread does not count: a busy machine is no defect of the
   process. If the kernel does not report that time, only `ran` counts.
2. The sampling thread records every LOOK_S where a late turn is, and sleeps while the loop is idle.
3. At most one line every LINE_S, with the longest hold since the previous line. It is a warning if
   a batch may have been late: if the loop's own code ran for LATE_RAN_S, or if the hold took LATE_S
   in all. If no sample shows where the loop was, the code must have run for LATE_UNKNOWN_S, since
   another virtual machine may have had the processor. In a trainer's own node, the line is no
   warning unless the node's log level was set.

Source:  Documentation/scheduler/sched-stats.rst (schedstat of a thread)
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from msgspec import Struct, field

from dataplane.base.machine import ProcessorWaits
from dataplane.base.trace import Trace

HOLD_S = 0.02
LOOK_S = 0.01
LINE_S = 10.0
LATE_RAN_S, LATE_UNKNOWN_S, LATE_S = 0.05, 0.25, 0.5
_FRESH_S = 0.001
"""When a turn begins, the thread's processor time is read again only if the last reading is older
than this: a reading costs 1.5 us, and everything else that is measured in a turn 0.6 us."""
_STILL_S = 0.001
"""A thread that used less processor time than this between two samples was blocked."""
_UNKNOWN = "unknown"
_SLOW = (
    "a step of this node took long, and batches may have been late: harmless if rare; if often,"
    " please report this line"
)


class Hold(Struct, frozen=True):
    """One hold of the loop: how long its thread ran and waited, in seconds, and where it was."""

    ran_s: float
    waited_s: float
    at: str

    @property
    def held_s(self) -> float:
        """The time that the thread ran and waited, in seconds."""
        return self.ran_s + self.waited_s

    @property
    def matters(self) -> bool:
        """Whether the hold may have made a batch late."""
        late_ran_s = LATE_UNKNOWN_S if self.at == _UNKNOWN else LATE_RAN_S
        return self.ran_s >= late_ran_s or self.held_s >= LATE_S


class LoopHolds(Struct, frozen=True):
    """How often the loop was held since the watch began, and the longest hold, in seconds."""

    count: int = 0
    longest_s: float = 0.0


class _Samples(Struct, eq=False):
    """Samples of one turn of the loop's thread: for how long the thread had waited for a processor
    before the turn, and was blocked in the turn, in seconds, and the places where it was.
    """

    turn: int
    queued_s: float
    blocked_s: float = 0.0
    places: Counter[str] = field(default_factory=Counter)


class Watchdog:
    """Watches the event loop of the thread that starts it, until it is closed."""

    def __init__(self, trace: Trace, *, warns: bool = True) -> None:
        self._trace, self._warns = trace, warns
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._restore: Callable[[], None] = lambda: None
        self._is_closed = self._is_resting = False
        self._turn, self._began, self._ran_s, self._ran_at = 0, 0.0, 0.0, 0.0
        self._samples = _Samples(0, 0.0)
        self._seen = LoopHolds()
        self._unlogged: list[Hold] = []

    def start(self) -> None:
        """Start watching the running loop. Loops without a selector are not watched."""
        selector = getattr(asyncio.get_running_loop(), "_selector", None)
        if selector is None or self._thread is not None:
            return
        waits, inner = ProcessorWaits(threading.get_native_id()), selector.select
        selector.select = self._timed(inner, waits)
        self._restore = lambda: setattr(selector, "select", inner)
        watch = partial(self._watch, threading.get_ident(), waits)
        self._thread = threading.Thread(target=watch, name="dataplane-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Log what was not logged yet, and stop watching. May be called twice."""
        self._is_closed = True
        if self._thread is not None:
            self._restore()
            self._wake.set()
            self._thread.join()
            self._thread = None

    def statistics(self) -> LoopHolds:
        """Return how often the loop was held so far, and its longest hold."""
        return self._seen

    def _timed(
        self, select: Callable[[float | None], Any], waits: ProcessorWaits
    ) -> Callable[[float | None], Any]:
        now, own = time.monotonic, time.thread_time

        def timed(timeout: float | None = None) -> Any:
            if self._began and (took_s := now() - self._began) > HOLD_S:
                ran_s, samples = min(own() - self._ran_s, took_s), self._samples
                waited_s, at = 0.0, _UNKNOWN
                if samples.turn == self._turn:
                    queued_s = waits.seconds() - samples.queued_s if waits.is_known else took_s
                    waited_s = max(min(took_s - ran_s - queued_s, samples.blocked_s), 0.0)
                    places = dict(samples.places)  # one step, since the other thread may add places
                    at = max(places, key=places.__getitem__, default=at)
                self._keep(Hold(ran_s, waited_s, at))
            self._began = 0.0
            ready = select(timeout)
            self._turn += 1
            self._began = began = now()
            if began - self._ran_at > _FRESH_S:
                self._ran_s, self._ran_at = own(), began
            if self._is_resting:
                self._is_resting = False
                self._wake.set()
            return ready

        return timed

    def _keep(self, hold: Hold) -> None:
        if hold.held_s > HOLD_S:
            with self._lock:
                longest_s = max(self._seen.longest_s, hold.held_s)
                self._seen = LoopHolds(self._seen.count + 1, longest_s)
                self._unlogged.append(hold)
            self._wake.set()

    def _watch(self, loop: int, waits: ProcessorWaits) -> None:
        clock, logged = time.pthread_getcpuclockid(loop), -LINE_S
        before = now = (time.monotonic(), time.clock_gettime(clock), waits.seconds())
        while not self._is_closed:
            turn = self._turn
            self._wake.wait(LOOK_S)
            self._wake.clear()
            before, now = now, (time.monotonic(), time.clock_gettime(clock), waits.seconds())
            self._sample(loop, before[2], now[0] - before[0], now[1] - before[1])
            if self._unlogged and now[0] - logged >= LINE_S:
                logged = now[0]
                self._log()
            if turn == self._turn and not self._began and not self._unlogged:
                # Set the flag before checking `_began` again: the loop sets `_began` before it
                # checks the flag. So either this thread stays awake, or the loop wakes it.
                self._is_resting = True
                if not self._began and not self._is_closed:
                    self._wake.wait()
        waits.close()
        self._log()

    def _sample(self, loop: int, queued_s: float, took_s: float, ran_s: float) -> None:
        """Note where the loop is, `took_s` after the last sample, if its turn is late."""
        turn, began, samples = self._turn, self._began, self._samples
        if samples.turn != turn:
            self._samples = samples = _Samples(turn, queued_s)
        elif began and ran_s < _STILL_S:
            samples.blocked_s += min(took_s, LOOK_S)
        if began and time.monotonic() - began > LOOK_S:
            frame = sys._current_frames().get(loop)  # noqa: SLF001 - has no public equivalent
            if frame is not None and _module(frame) != __name__ and turn == self._turn:
                samples.places[_place(frame)] += 1

    def _log(self) -> None:
        with self._lock:
            holds, self._unlogged = self._unlogged, []
        if not holds:
            return
        longest = max(holds, key=lambda hold: hold.held_s)
        facts: dict[str, object] = {
            "took_ms": round(longest.held_s * 1e3, 1),
            "ran_ms": round(longest.ran_s * 1e3, 1),
            "waited_ms": round(longest.waited_s * 1e3, 1),
            "at": longest.at,
        }
        if len(holds) > 1:
            facts["count"] = len(holds)
        if longest.matters and self._warns:
            self._trace.failed(_SLOW, **facts)
        else:
            self._trace.started("event loop held", **facts)


def _place(frame: FrameType) -> str:
    """Return the innermost function of ours, and the foreign function running in it, if any."""
    inner = ours = frame
    while not _module(ours).startswith("dataplane"):
        if ours.f_back is None:
            return _name(inner)
        ours = ours.f_back
    return _name(ours) if ours is inner else f"{_name(ours)} > {_name(inner)}"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))


def _name(frame: FrameType) -> str:
    return f"{_module(frame)}:{frame.f_code.co_name}:{frame.f_lineno}"
