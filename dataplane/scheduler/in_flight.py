"""Decides how many reads from object stores are in flight. Pure.

A store that is far away, or gives each connection little, needs many reads in flight; one that is
near needs few, and more of them only wait for each other. The needed number is the bandwidth times
the time of a read. While reads share a link, the time of a read cannot be told from the time that
reads wait for each other, and both change. So the number is found by trial: it is doubled as long
as twice as many reads bring more bytes per second.

At first the trials follow the reads, as TCP's slow start does: a round is the time in which as many
reads end as were in flight at its start, so a store that answers in 50 ms gets 16 times as many
reads within half a second. Rounds are short, and what they measure is rough. So once more reads
bring nothing, the fewest that brought nearly as much are kept, and later trials take seconds.

Invariants:
1. The number is never less than at first, and never more than `most`.
2. The number is doubled only while a trainer waits and reads are held back. If that does not bring
   more bytes per second, the previous number is restored; the next attempt comes after a delay that
   grows each time.
3. Small reads are mostly latency: up to SMALL_FETCHES times as many are in flight, as long as all
   of them together have fewer bytes than the allowed number of reads of FETCH_BYTES_MIN.
4. Blocks that are read in one request count as one read, until all of them have ended.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

RANGE_BYTES = 8 << 20
"""A block is read in ranges of at most this length, each over a connection of its own."""
FETCH_BYTES_MIN = 2 << 20
SMALL_FETCHES = 4
GROWTH_MAX = 16
HUNGRY_LOOKS = 2
TRIAL_LOOKS = 4
"""Looks that a trial takes at least. Reads begun before it end during the first half."""
TRIAL_LOOKS_MAX = 40
_GAIN_MIN = 1.2
_ENDED_MIN = 16
_PAUSE_LOOKS = 60
_PAUSE_LOOKS_MAX = 3840
_ROUND_S = 0.04
"""The least time of a round: which reads end in less time depends on chance."""


class ReadLook(Struct, frozen=True):
    """Measurements since the last call: bytes read per second, how many reads ended, and whether a
    trainer waits while reads were held back. Calls come at the end of each round while the number
    is `starting`, and about twice a second later.
    """

    bytes_per_s: float
    ended: int
    is_short: bool


class ReadsInFlight(Struct, frozen=True):
    """The `limit` of reads, and the results of the last calls. While `trial` is not 0, a trial
    compares the rate of `limit` reads with `rate_before`, the rate of half as many; `trial` counts
    the calls of this trial. While `is_starting`, `rates` are those of 1, 2, 4, ... times the
    initial number of reads; `is_mixed`: some reads of this round began under a lower limit.
    """

    limit: int
    most: int
    is_starting: bool = True
    is_mixed: bool = True
    rates: tuple[float, ...] = ()
    ended: int = 0
    trial: int = 0
    rate_before: float = 0.0
    pause: int = 0
    pause_next: int = _PAUSE_LOOKS

    @classmethod
    def at_first(cls, count: int) -> ReadsInFlight:
        """Start with this many reads, and allow GROWTH_MAX times as many at most."""
        return cls(count, GROWTH_MAX * count)

    def after(self, look: ReadLook) -> ReadsInFlight:
        """Return the number after this measurement."""
        if self.is_starting:
            return self._started(look)
        if self.trial:
            return self._tried(look)
        pause = max(self.pause - 1, 0)
        if not look.is_short or pause or self.limit == self.most:
            return replace(self, rates=(), ended=0, pause=pause)
        rates, ended = (*self.rates, look.bytes_per_s), self.ended + look.ended
        # Go on measuring until enough reads have ended: if reads are slow, few end between two
        # looks.
        if len(rates) < HUNGRY_LOOKS or ended < _ENDED_MIN:
            return replace(self, rates=rates[-TRIAL_LOOKS_MAX:], ended=ended, pause=pause)
        return replace(
            self,
            limit=min(2 * self.limit, self.most),
            rates=(),
            ended=0,
            trial=1,
            rate_before=sum(rates) / len(rates),
        )

    def _started(self, look: ReadLook) -> ReadsInFlight:
        if not look.is_short:  # the trainer limits the rate, not the reads
            return self
        if self.is_mixed:
            return replace(self, is_mixed=False)
        rates = (*self.rates, look.bytes_per_s)
        is_better = len(rates) == 1 or rates[-1] >= _GAIN_MIN * rates[-2]
        if is_better and self.limit < self.most:
            limit = min(2 * self.limit, self.most)
            return replace(self, limit=limit, is_mixed=True, rates=rates)
        doublings = next(n for n, rate in enumerate(rates) if rate * _GAIN_MIN >= max(rates))
        first = -(-self.most // GROWTH_MAX)
        limit = min(first << doublings, self.most)
        return replace(self, limit=limit, is_starting=False, rates=())

    def _tried(self, look: ReadLook) -> ReadsInFlight:
        if not look.is_short:  # the trainer no longer waits: this many reads are enough
            return replace(self, rates=(), ended=0, trial=0, pause_next=_PAUSE_LOOKS)
        seen = replace(
            self,
            rates=(*self.rates, look.bytes_per_s),
            ended=self.ended + look.ended,
            trial=self.trial + 1,
        )
        is_long = len(seen.rates) >= TRIAL_LOOKS and seen.ended >= 2 * self.limit
        if not is_long and len(seen.rates) < TRIAL_LOOKS_MAX:
            return seen
        later = seen.rates[len(seen.rates) // 2 :]
        if sum(later) / len(later) >= _GAIN_MIN * self.rate_before:
            return replace(seen, rates=(), ended=0, trial=0, pause_next=_PAUSE_LOOKS)
        return replace(
            seen,
            limit=-(-self.limit // 2),
            rates=(),
            ended=0,
            trial=0,
            pause=self.pause_next,
            pause_next=min(2 * self.pause_next, _PAUSE_LOOKS_MAX),
        )


class _Request(Struct, eq=False):
    """The reads that fetch some blocks together, and how many of these have not ended."""

    reads: int
    blocks: int = 1


class FetchesInFlight:
    """The fetches of blocks that are in flight, each with a key; `count` reads are allowed at
    first.
    """

    def __init__(self, count: int) -> None:
        self._allowed = ReadsInFlight.at_first(count)
        self._requests: dict[int, _Request] = {}
        self._reads = 0
        self._bytes = 0
        self._ended_reads = 0
        self._ended_bytes = 0
        self._was_held_back = False
        self._was_short = False
        """Whether a trainer waited while reads were held back, in this round."""
        self._round_reads = 0
        self._looked: float | None = None

    @property
    def limit(self) -> int:
        """How many large reads may be in flight."""
        return self._allowed.limit

    def may_begin(self) -> bool:
        """Whether one more fetch may begin; the caller has one to begin."""
        may = self._has_room()
        self._was_held_back = self._was_held_back or not may
        return may

    def began(
        self, key: int, length: int, read_count: int = 1, joined_to: int | None = None
    ) -> None:
        """Note that the fetch of a block of this length has begun. The fetch takes `read_count`
        reads, or more if the block is too long for these. If `joined_to` is given, the first read
        is shared with the block of that key.
        """
        reads = max(read_count, -(-length // RANGE_BYTES))
        if joined_to is None:
            request = _Request(reads)
        else:
            request, reads = self._requests[joined_to], reads - 1
            request.reads, request.blocks = request.reads + reads, request.blocks + 1
        self._requests[key] = request
        self._reads += reads
        self._bytes += length

    def ended(self, key: int, length: int) -> None:
        """Note that the fetch of a block of this length has ended."""
        request = self._requests.pop(key)
        request.blocks -= 1
        if not request.blocks:
            self._reads -= request.reads
            self._ended_reads += request.reads
        self._bytes -= length
        self._ended_bytes += length

    def ticked(self, now: float, *, is_awaited: bool) -> None:
        """Note that about half a second has passed; `is_awaited`: a trainer waits."""
        if not self._allowed.is_starting or self._looked is None:
            self._look(now, is_short=is_awaited and self._was_held_back)

    def settled(self, now: float, *, is_awaited: bool) -> None:
        """Note that all reads that may begin have begun. Cheap, unless a round is over."""
        if not self._allowed.is_starting:
            return
        # Remember that the trainer waited in this round: at the end of the round, the trainer may
        # just have got a slab.
        self._was_short = self._was_short or (is_awaited and self._was_held_back)
        if not self._reads and not self._ended_reads:
            self._looked = None  # nothing was read: a round begins with the next read
        elif self._looked is None or (
            self._ended_reads >= self._round_reads and now >= self._looked + _ROUND_S
        ):
            self._look(now, is_short=self._was_short)

    def _look(self, now: float, *, is_short: bool) -> None:
        seconds = max(now - (self._looked if self._looked is not None else now), 1e-3)
        look = ReadLook(self._ended_bytes / seconds, self._ended_reads, is_short)
        if self._looked is not None:
            self._allowed = self._allowed.after(look)
        self._looked = now
        self._round_reads = max(self._reads, _ENDED_MIN)
        self._ended_reads = self._ended_bytes = 0
        self._was_held_back = self._was_short = False

    def _has_room(self) -> bool:
        limit = self._allowed.limit
        return self._reads < limit or (
            self._reads < SMALL_FETCHES * limit and self._bytes < limit * FETCH_BYTES_MIN
        )
