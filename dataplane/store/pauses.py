"""Pauses requested by stores, kept by all processes of this host that send requests.

An overloaded store limits the whole host, not one process. So processes tell each other of pauses.

Invariants:
1. Each pause is passed to every member except its source, in the thread that reports it. So no
   member may block.
2. A new member gets the pauses that still last.
"""

from __future__ import annotations

import threading

from msgspec.structs import replace

from dataplane.model import StorePause
from dataplane.store.gate import Clock, Share


class Pauses:
    """The pauses that one process knows. Thread-safe."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._lock = threading.Lock()
        self._joined: tuple[Share, ...] = ()
        self._known: dict[str, tuple[StorePause, float]] = {}

    def join(self, told: Share) -> None:
        """Call this function with each pause, beginning with those that still last."""
        with self._lock:
            self._joined += (told,)
        for pause in self.now():
            told(pause)

    def leave(self, told: Share) -> None:
        """Stop calling this function. May be called twice."""
        with self._lock:
            self._joined = tuple(one for one in self._joined if one != told)

    def tell(self, pause: StorePause, source: Share | None = None) -> None:
        """Pass on a pause that a store has requested, or that `source`, a member, has reported."""
        with self._lock:
            self._known[pause.store] = (pause, self._clock.now() + pause.left_s)
            joined = self._joined
        for told in joined:
            if told != source:
                told(pause)

    def now(self) -> list[StorePause]:
        """Return the pauses that still last: the latest of each store."""
        with self._lock:
            now = self._clock.now()
            self._known = {store: one for store, one in self._known.items() if one[1] > now}
            return [replace(pause, left_s=until - now) for pause, until in self._known.values()]
