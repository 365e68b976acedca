"""Decides how many fetchers a node has, from their activity since the last look. Pure.

Invariants:
1. Never fewer than one, never more than `most`.
2. As many fetchers as there are are added while reads are under way and they use most of a
   processor each, or while reads wait because each fetcher has as many as it may have: a link of
   which one fetcher reads a fourth is full a second after the first look. One that is not needed
   costs a fork, of some milliseconds.
3. They are removed only if they were not needed for `CALM_LOOKS` looks.
"""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

BUSY_SHARE = 0.7
"""Share of a processor above which a fetcher is the limit: its threads wait for each other."""
CALM_LOOKS = 120


class FetchLook(Struct, frozen=True):
    """Measurements since the last tick: how many processors the fetchers used on average, how many
    reads are in progress, and how many wait for a fetcher.
    """

    processors: float
    reading: int
    waiting: int


class FetcherCount(Struct, frozen=True):
    """The number of fetchers, `count`, and the results of the last ticks: for how many ticks the
    number has not changed, and how many fetchers were needed in these.
    """

    most: int
    count: int = 1
    calm: int = 0
    needed: int = 1

    def after(self, look: FetchLook) -> FetcherCount:
        """Return the number after this measurement."""
        is_busy = look.reading > 0 and look.processors >= BUSY_SHARE * self.count
        if (is_busy or look.waiting > 0) and self.count < self.most:
            return FetcherCount(self.most, min(2 * self.count, self.most))
        needed = self.count if look.waiting else math.ceil(look.processors / BUSY_SHARE)
        seen = replace(self, calm=self.calm + 1, needed=max(self.needed, needed))
        if seen.calm >= CALM_LOOKS:
            return FetcherCount(self.most, max(1, min(seen.needed, self.count)))
        return seen
