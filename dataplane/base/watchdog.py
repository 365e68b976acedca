"""Logs what has blocked the node's event loop, and for how long.

While one callback runs, no other work is done: no slab is handed over, no block is requested. The
loop waits for events in `select()`; the work between two such waits is a *turn*. A turn longer than
HOLD_S is a *hold* of the loop.

1. The length of a turn is the processor time of the loop's thread (`ran`) plus the time that the
   thread waited (`waited`) in a blocking call or for the interpreter lock.
2. Time for which the machine had no processor for the loop, or none for the thread that had the
   lock, does not count: a busy machine is not a defect of the node. If the kernel does not report
   how long a thread waits for a processor, only `ran` counts.
3. While the loop waits for events, another thread may hold the interpreter lock, and new events
   have to wait too. The watching thread is then late as well; that counts as `waited`.
4. It costs the loop some 0.6 us a turn. A separate thread checks the loop every LOOK_S while it is
   busy, and records where it is if the turn is late; it sleeps while the loop is idle.
5. At most one line every LINE_S, with the longest hold since the previous line. People hear of it
   only if a batch may have been late for it: if the loop's own code ran for LATE_RAN_S (more if
   nobody saw where: then another virtual machine may have had the processor), or if it took
   LATE_S in all. Other holds are for developers.

Source:  Documentation/scheduler/sched-stats.rst (schedstat of a thread)
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from msgspec import Struct

from dataplane.base.machine import ProcessorWaits
from dataplane.base.trace import Trace

HOLD_S = 0.02
LOOK_S = 0.01
LINE_S = 10.0
LATE_RAN_S, LATE_UNKNOWN_S, LATE_S = 0.05, 0.25, 0.5
_STILL_S = 0.001
"""A thread that used less CPU than this between two looks was idle."""
_FRESH_S = 0.001
"""Maximum age of the reading of the thread's processor time when a turn begins."""
_OTHERS_MAX = 3
_UNKNOWN = "unknown"
_SLOW = (
    "a step of this node took long, and batches may have been late: harmless if rare; if often,"
    " please report this line"
)
_WAITING = frozenset({"concurrent.futures.thread", "queue", "selectors", "threading", __name__})
"""Modules in which idle threads wait."""


class Hold(Struct, frozen=True):
    """One turn that held the loop: how long its thread ran and waited, in seconds, where it was,
    and what other threads did if it waited.
    """

    ran_s: float
    waited_s: float
    at: str
    others: str = ""

    @property
    def held_s(self) -> float:
        """The sum of both, in seconds."""
        return self.ran_s + self.waited_s

    @property
    def matters(self) -> bool:
        """Whether a batch may have been late for it."""
        late_ran_s = LATE_UNKNOWN_S if self.at == _UNKNOWN else LATE_RAN_S
        return self.ran_s >= late_ran_s or self.held_s >= LATE_S


class LoopHolds(Struct, frozen=True):
    """How often the loop was held since the watch began, and the longest hold, in seconds."""

    count: int = 0
    longest_s: float = 0.0


class _Look(Struct, frozen=True):
    """Readings at one moment: the turn, the processor time of the loop's thread and of all other
    threads, and how long the loop's thread has waited for a processor, all in seconds.
    """

    turn: int
    at: float
    own_s: float
    others_s: float
    queued_s: float


class Watchdog:
    """Watches the event loop of the thread that starts it, until it is closed."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._restore: Callable[[], None] = lambda: None
        self._is_closed = self._is_resting = False
        self._turn, self._began = 0, 0.0
        self._ran_s = self._ran_at = 0.0
        self._ident = self._own_clock = 0
        self._waits: ProcessorWaits | None = None
        self._last = self._before = _Look(0, 0.0, 0.0, 0.0, 0.0)
        self._places: Counter[str] = Counter()
        self._others = ""
        self._blocked_s = 0.0
        self._seen = LoopHolds()
        self._untold: list[Hold] = []

    def start(self) -> None:
        """Start watching the running loop. Loops without a selector are not watched."""
        selector = getattr(asyncio.get_running_loop(), "_selector", None)
        if selector is None or self._thread is not None:
            return
        self._ident = threading.get_ident()
        self._own_clock = time.pthread_getcpuclockid(self._ident)
        self._waits = ProcessorWaits(threading.get_native_id())
        self._last = self._before = self._read(self._waits)
        inner = selector.select
        selector.select = self._timed(inner)
        self._restore = lambda: setattr(selector, "select", inner)
        self._thread = threading.Thread(
            target=self._watch, args=(self._waits,), name="dataplane-watchdog", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Log what was not logged yet, and stop watching. May be called twice."""
        self._is_closed = True
        if self._thread is None or self._waits is None:
            return
        self._restore()
        self._wake.set()
        self._thread.join()
        self._waits.close()
        self._thread = None

    def statistics(self) -> LoopHolds:
        """The holds so far."""
        with self._lock:
            return self._seen

    # -- on the loop -----------------------------------------------------------------------------

    def _timed(self, select: Callable[[float | None], Any]) -> Callable[[float | None], Any]:
        now, own = time.monotonic, time.thread_time

        def timed(timeout: float | None = None) -> Any:
            if self._began and (took_s := now() - self._began) > HOLD_S:
                self._end(took_s, min(own() - self._ran_s, took_s))
            self._began = 0.0
            found = select(timeout)
            self._turn += 1
            self._began = began = now()
            if began - self._ran_at > _FRESH_S:  # a reading costs 1.5 us
                self._ran_s, self._ran_at = own(), began
            if self._is_resting:
                self._is_resting = False
                self._wake.set()
            return found

        return timed

    def _end(self, took_s: float, ran_s: float) -> None:
        """A turn has ended."""
        with self._lock:
            is_looked_at = self._last.turn == self._turn
            waited_s = self._waited_s(took_s, ran_s, is_looked_at=is_looked_at)
            if ran_s + waited_s <= HOLD_S:
                return
            is_known = is_looked_at and bool(self._places)
            hold = Hold(
                ran_s,
                waited_s,
                at=self._places.most_common(1)[0][0] if is_known else _UNKNOWN,
                others=self._others if is_known and waited_s > ran_s else "",
            )
            self._keep(hold)
            self._wake.set()

    def _keep(self, hold: Hold) -> None:
        seen = self._seen
        self._seen = LoopHolds(seen.count + 1, max(seen.longest_s, hold.held_s))
        self._untold.append(hold)

    def _waited_s(self, took_s: float, ran_s: float, *, is_looked_at: bool) -> float:
        if self._waits is None or not self._waits.is_known:
            return 0.0
        before = self._before if is_looked_at else self._last
        now = self._read(self._waits)
        waited_s = took_s - ran_s - (now.queued_s - before.queued_s)
        # The thread with the lock has used a processor; if no thread did, other processes had the
        # processors.
        others_s = now.others_s - before.others_s
        blocked_s = self._blocked_s if is_looked_at else 0.0
        return max(min(waited_s, max(others_s, blocked_s)), 0.0)

    # -- beside it -------------------------------------------------------------------------------

    def _watch(self, waits: ProcessorWaits) -> None:
        own = ProcessorWaits(threading.get_native_id())
        try:
            self._look_until_closed(waits, own)
        finally:
            own.close()
        self._tell()

    def _look_until_closed(self, waits: ProcessorWaits, own: ProcessorWaits) -> None:
        told = -LINE_S
        while not self._is_closed:
            turn, queued_s, due = self._turn, own.seconds(), time.monotonic() + LOOK_S
            self._wake.wait(LOOK_S)
            self._wake.clear()
            late_s = time.monotonic() - due
            with self._lock:
                before, began = self._last, self._began
                self._look(waits)
                if own.is_known and late_s > HOLD_S and not 0.0 < began < due:
                    self._was_late(late_s - own.seconds() + queued_s, before)
            if self._untold and time.monotonic() - told >= LINE_S:
                told = time.monotonic()
                self._tell()
            if turn == self._turn and not self._began and not self._untold:
                self._rest()

    def _was_late(self, late_s: float, before: _Look) -> None:
        """The watching thread could not run for this long, although a processor was free."""
        waited_s = min(late_s, self._last.others_s - before.others_s)
        if waited_s > HOLD_S:
            frames = sys._current_frames()  # noqa: SLF001 - as in _look
            del frames[threading.get_ident()]
            self._keep(Hold(0.0, waited_s, "interpreter lock", _doing(frames)))

    def _rest(self) -> None:
        """Sleep until the loop's next turn, which checks, after it has begun, whether this thread
        sleeps.
        """
        self._is_resting = True
        if not self._began and not self._is_closed:
            self._wake.wait()

    def _look(self, waits: ProcessorWaits) -> None:
        last, began = self._last, self._began
        now = self._last = self._read(waits)
        if last.turn != now.turn:
            self._before, self._blocked_s = last, 0.0
            self._places.clear()
        if not began or now.at - began <= LOOK_S:
            return
        if last.turn == now.turn and now.own_s - last.own_s < _STILL_S:
            # No longer than this thread has slept: other threads had to wait as long as it did.
            self._blocked_s += min(now.at - last.at, LOOK_S)
        frames = sys._current_frames()  # noqa: SLF001 - nothing else tells where another thread is
        frame = frames.pop(self._ident, None)
        if frame is not None and _module(frame) != __name__ and now.turn == self._turn:
            self._places[_place(frame)] += 1
            self._others = _doing(frames)

    def _read(self, waits: ProcessorWaits) -> _Look:
        own_s, all_s = time.clock_gettime(self._own_clock), time.process_time()
        return _Look(self._turn, time.monotonic(), own_s, all_s - own_s, waits.seconds())

    def _tell(self) -> None:
        with self._lock:
            holds, self._untold = self._untold, []
        if not holds:
            return
        longest = max(holds, key=lambda hold: hold.held_s)
        facts: dict[str, object] = {
            "took_ms": round(longest.held_s * 1e3, 1),
            "ran_ms": round(longest.ran_s * 1e3, 1),
            "waited_ms": round(longest.waited_s * 1e3, 1),
            "at": longest.at,
        }
        if longest.others:
            facts["others"] = longest.others
        if len(holds) > 1:
            facts["count"] = len(holds)
        if longest.matters:
            self._trace.failed(_SLOW, **facts)
        else:
            self._trace.started("event loop held", **facts)


def _place(frame: FrameType) -> str:
    """The innermost function of ours, and the foreign function that it has called, if any."""
    inner = ours = frame
    while not _module(ours).startswith("dataplane"):
        if ours.f_back is None:
            return _name(inner)
        ours = ours.f_back
    return _name(ours) if ours is inner else f"{_name(ours)} > {_name(inner)}"


def _doing(frames: Mapping[int, FrameType]) -> str:
    """Describe the work of the threads that are not idle, as far as known."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    busy = [
        f"{names.get(ident, ident)} {_place(frame)}"
        for ident, frame in frames.items()
        if _module(frame) not in _WAITING
    ]
    return ", ".join(busy[:_OTHERS_MAX])


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))


def _name(frame: FrameType) -> str:
    return f"{_module(frame)}:{frame.f_code.co_name}:{frame.f_lineno}"
