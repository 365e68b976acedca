"""The pauses that stores have asked for, kept by all who send requests from this host.

A store that is asked too much limits what a host may ask, not what one process may. So each process
knows some others, which tell it of pauses, and are told.

Invariants:
1. Everybody who has joined is told of each pause, in the thread that tells of it, except the one it
   comes from. So nobody who is told may wait.
2. Who joins is told of the pauses that last.
"""

from __future__ import annotations

import threading

from msgspec.structs import replace

from dataplane.model import StorePause
from dataplane.store.gate import Clock, Share


class Pauses:
    """What one process knows of them. Thread-safe."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._lock = threading.Lock()
        self._joined: tuple[Share, ...] = ()
        self._known: dict[str, tuple[StorePause, float]] = {}

    def join(self, told: Share) -> None:
        """Tell this of each pause, beginning with those that last."""
        with self._lock:
            self._joined += (told,)
        for pause in self.now():
            told(pause)

    def leave(self, told: Share) -> None:
        """Tell this no more. It may have left before."""
        with self._lock:
            self._joined = tuple(one for one in self._joined if one != told)

    def tell(self, pause: StorePause, source: Share | None = None) -> None:
        """A store has asked for this, or `source`, which has joined, has heard of it."""
        with self._lock:
            self._known[pause.store] = (pause, self._clock.now() + pause.left_s)
            joined = self._joined
        for told in joined:
            if told != source:
                told(pause)

    def now(self) -> list[StorePause]:
        """Those that last: of each store the last one it has asked for."""
        with self._lock:
            now = self._clock.now()
            self._known = {store: one for store, one in self._known.items() if one[1] > now}
            return [replace(pause, left_s=until - now) for pause, until in self._known.values()]
