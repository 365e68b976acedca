"""A clock that advances only by waits."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from dataplane.store.faults import Clock


@dataclass
class Time:
    """Every random draw returns `chance`; `waited` records all waits."""

    now: float = 1000.0
    chance: float = 1.0
    waited: list[float] = field(default_factory=list)

    def wait(self, _condition: threading.Condition, seconds: float) -> None:
        assert seconds >= 0
        self.waited.append(seconds)
        self.now += seconds

    def clock(self) -> Clock:
        return Clock(lambda: self.now, self.wait, lambda: self.chance, lambda: self.now)
