"""Decide which reads are requested a second time, because they take much longer than others. Pure.

Stores answer a few requests in a hundred very late; a batch waits for the last of its blocks.

Invariants:
1. At most `HEDGED_SHARE` of all bytes are requested twice.
2. A read is late only in comparison with at least `READS_MIN` recent ones of its size.

Source: J. Dean and L. A. Barroso, "The Tail at Scale", CACM 56(2), 2013.
"""

from __future__ import annotations

import math
from collections import deque

HEDGED_SHARE = 0.02
READS_MIN = 50
LATE_FACTOR = 3.0
"""How many times the 95th percentile a late read takes. The 99th percentile would not do: where one
read in a hundred is late, it is the time of the late reads themselves."""
LATE_S_MIN = 0.05
_RECENT = 256


class Hedging:
    """The times of recent reads by size, and the budget."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._late_s: dict[int, float] = {}
        self._read_bytes = 0
        self._hedged_bytes = 0

    def ended(self, length: int, took_s: float) -> None:
        """Note the end of a read of this length."""
        self._read_bytes += length
        size = length.bit_length()
        self._recent.setdefault(size, deque(maxlen=_RECENT)).append(took_s)
        self._late_s.pop(size, None)

    def late_s(self, length: int) -> float:
        """Return the time after which a read of this length is late; infinite if unknown."""
        size = length.bit_length()
        late_s = self._late_s.get(size)
        if late_s is None:
            recent = sorted(self._recent.get(size, ()))
            is_known = len(recent) >= READS_MIN
            late_s = LATE_FACTOR * recent[len(recent) * 95 // 100] if is_known else math.inf
            late_s = self._late_s[size] = max(late_s, LATE_S_MIN)
        return late_s

    def spend(self, length: int) -> bool:
        """Whether this many bytes may be requested twice; if so, charge them to the budget."""
        if self._hedged_bytes + length > HEDGED_SHARE * self._read_bytes:
            return False
        self._hedged_bytes += length
        return True
