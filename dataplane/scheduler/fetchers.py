"""Decides how many fetchers a node has, from their activity since the last look. Pure.

Invariants:
1. Never fewer than one, never more than `most`.
2. Fetchers are added while reads are under way and the fetchers use most of a processor each, or
   while reads wait because each fetcher has as many as it may have.
3. They are removed only if they were not needed for `CALM_LOOKS` looks.
"""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

BUSY_SHARE = 0.7
"""Share of a processor above which a fetcher is the limit: its threads wait for each other."""
BUSY_LOOKS = 2
CALM_LOOKS = 120


class FetchLook(Struct, frozen=True):
    """Since the last look: how many processors the fetchers used on average, how many reads are
    under way, and how many wait for a fetcher.
    """

    processors: float
    reading: int
    waiting: int


class FetcherCount(Struct, frozen=True):
    """`count` fetchers, and what the last looks showed: for how many looks all were busy, for how
    many their number has not changed, and how many were needed in these.
    """

    most: int
    count: int = 1
    busy: int = 0
    calm: int = 0
    needed: int = 1

    def after(self, look: FetchLook) -> FetcherCount:
        """The number after this look."""
        is_busy = look.reading > 0 and look.processors >= BUSY_SHARE * self.count
        is_short = is_busy or look.waiting > 0
        needed = math.ceil(look.processors / BUSY_SHARE)
        seen = replace(
            self,
            busy=self.busy + 1 if is_short else 0,
            calm=self.calm + 1,
            needed=max(self.needed, self.count if look.waiting else needed),
        )
        if seen.busy >= BUSY_LOOKS and self.count < self.most:
            return FetcherCount(self.most, min(self.count + max(self.count // 2, 1), self.most))
        if seen.calm >= CALM_LOOKS:
            return FetcherCount(self.most, max(1, min(seen.needed, self.count)))
        return seen
