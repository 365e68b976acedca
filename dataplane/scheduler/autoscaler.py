"""Decides how many workers and fetchers a node has, from their activity since the last look. Pure.

Invariants of workers:
1. There are at least `least` workers, and at most `most`.
2. Workers are added only while all are busy and a trainer waits: then up to `most` at once, so that
   they help soon. Workers that did not help are removed again. If no added worker helped, the next
   attempt comes after a delay that grows each time.
3. Other workers are removed only if they were not needed for `CALM_LOOKS` looks.

Invariants of fetchers:
1. There is at least one fetcher, and there are at most `most`.
2. The number of fetchers is doubled while reads are under way and the fetchers use most of a
   processor each, or while reads wait because each fetcher has as many as it may have: a link of
   which one fetcher reads a fourth is full a second after the first look. A fetcher that is not
   needed costs a fork, of some milliseconds.
3. Fetchers are removed only if they were not needed for `CALM_LOOKS` looks.
"""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

HUNGRY_LOOKS = 2
"""Looks in which all workers are busy and a trainer waits before workers are added."""
TRIAL_LOOKS = 8
"""Looks after which a trial is judged; new workers may start during the first half of it."""
CALM_LOOKS = 120
_PAUSE_LOOKS = 60
_PAUSE_LOOKS_MAX = 3840
_RATE_LOOKS = 4
BUSY_SHARE = 0.7
"""Share of a processor above which a fetcher is the limit: its threads wait for each other."""
_AT_WORK = 0.9
_GAIN_MIN = 1.05
_BESIDE = 1.25
"""After a trial that helped, this many times as many workers stay as would suffice if each made as
much as before."""


class Utilization(Struct, frozen=True):
    """Measurements since the last tick: how many workers were busy on average, how much they made,
    and whether a trainer waits.
    """

    busy: float
    bytes_per_s: float
    is_awaited: bool


class Autoscaler(Struct, frozen=True):
    """The number of workers, `count`, and the results of the last ticks. While `trial` is not 0, a
    trial compares the rate of `count` workers with `rate_before`, the rate of the `former` number.
    """

    least: int
    most: int
    count: int
    hungry: int = 0
    calm: int = 0
    needed: float = 0.0
    rates: tuple[float, ...] = ()
    trial: int = 0
    former: int = 0
    rate_before: float = 0.0
    pause: int = 0
    pause_next: int = _PAUSE_LOOKS

    def after(self, look: Utilization) -> Autoscaler:
        """Return the autoscaler after this measurement."""
        is_hungry = look.is_awaited and look.busy >= _AT_WORK * self.count
        seen = replace(
            self,
            rates=(*self.rates, look.bytes_per_s)[-_RATE_LOOKS:],
            hungry=self.hungry + 1 if is_hungry else 0,
            needed=max(self.needed, look.busy),
            calm=self.calm + 1,
            pause=max(self.pause - 1, 0),
        )
        if seen.trial:
            return seen._tried()  # noqa: SLF001 - the same class
        if seen.hungry >= HUNGRY_LOOKS and not seen.pause and seen.count < seen.most:
            return seen._more()  # noqa: SLF001 - the same class
        return seen._fewer() if seen.calm >= CALM_LOOKS else seen  # noqa: SLF001 - the same class

    def _rate(self, looks: int) -> float:
        rates = self.rates[-looks:]
        return sum(rates) / len(rates)

    def _more(self) -> Autoscaler:
        return replace(
            self,
            count=self.most,
            former=self.count,
            rate_before=self._rate(HUNGRY_LOOKS),
            trial=TRIAL_LOOKS,
            calm=0,
            needed=0.0,
        )

    def _tried(self) -> Autoscaler:
        if self.trial > 1:
            return replace(self, trial=self.trial - 1)
        rate = self._rate(_RATE_LOOKS)
        if rate >= _GAIN_MIN * self.rate_before:
            count = self.count
            if self.rate_before:
                would_do = self.former * rate / self.rate_before
                count = min(count, math.ceil(_BESIDE * would_do))
            return replace(self, count=count, trial=0, pause_next=_PAUSE_LOOKS)
        return replace(
            self,
            count=self.former,
            trial=0,
            pause=self.pause_next,
            pause_next=min(2 * self.pause_next, _PAUSE_LOOKS_MAX),
            calm=0,
            needed=0.0,
        )

    def _fewer(self) -> Autoscaler:
        # Keep one worker more than were busy on average, so that the next slab finds an idle one.
        wanted = max(min(math.ceil(self.needed) + 1, self.count), self.least)
        return replace(self, count=wanted, calm=0, needed=0.0)


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
