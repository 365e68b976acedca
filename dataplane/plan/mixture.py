"""The plan of one epoch of a mixture: when each source is read, and how much of it. Pure.

An epoch is a sequence of segments with constant shares, possibly followed by a tail. docs/order.md
specifies it.

1. The plan depends only on the user's options and the numbers of samples, never on ranks or hosts.
2. An epoch contains the next `counts[i]` samples of source i, each once, beginning where the epoch
   before ended.
3. Planning takes time and memory in proportion to sources and segments, not to samples.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.model.errors import ConfigError
from dataplane.model.records import Exhausted, ShareChange
from dataplane.plan.counting import SLOTS_MAX, CountingTree
from dataplane.plan.order import SAMPLE_COUNT_MAX

Int64 = NDArray[np.int64]
Shares = tuple[int, ...]

ROUND_STEPS = 1024
# The number of cached plans, since planning an epoch of a schedule plans all earlier epochs again.
# Plans of more than `_CHANGES_MAX` changes are not cached: each change adds a segment.
_PLANS_KEPT, _CHANGES_MAX = 2048, 16


class Mixed(Struct, frozen=True):
    """The facts from which an epoch is planned. `counts` are the samples of each source.
    `passes_max` is how often a source may be read in one epoch; 0 means no limit, which only
    Exhausted.CYCLE allows. `length` is the length of an epoch in samples; 0 means that it follows
    from `exhausted`. Each run of `batch` consecutive samples of a lane comes from one source.
    """

    counts: tuple[int, ...]
    shares: Shares
    passes_max: tuple[int, ...]
    lanes: int = 1
    exhausted: Exhausted = Exhausted.STOP
    length: int = 0
    batch: int = 1
    round_steps: int = ROUND_STEPS

    @property
    def limits(self) -> Int64:
        """The most samples of each source that an epoch may have; SLOTS_MAX means no limit."""
        pairs = zip(self.counts, self.passes_max, strict=True)
        most = [count * passes or SLOTS_MAX for count, passes in pairs]
        return np.array([min(limit, SLOTS_MAX) for limit in most], np.int64)


class MixSegment(Struct, frozen=True):
    """A part of an epoch with constant shares. Each of its `lanes` has `steps` slots of `batch`
    samples, in rounds of `round_steps`, of which only the last may be shorter. `base` counts the
    samples of each source that were read before the segment, in all epochs.

    Shapes:  base: int64[sources].
    """

    start: int
    lanes: int
    batch: int
    steps: int
    round_steps: int
    first_round: int
    shares: Shares
    base: Int64

    @property
    def stop(self) -> int:
        """The position after the segment's last one."""
        return self.start + self.steps * self.lanes * self.batch


class Tail(Struct, frozen=True):
    """The samples left over from the sources at the end of an epoch, dealt in turns: one sample of
    each source, then another of each source that has one left, and so on. Sources with more samples
    left come first.

    Shapes:  base, left, order, ends: int64[sources].   order: the sources, by samples left.
    ends: the place in the tail of the last sample of order[-1], of order[-2], …
    """

    start: int
    base: Int64
    left: Int64
    order: Int64
    ends: Int64

    @classmethod
    def of(cls, start: int, base: Int64, left: Int64) -> Tail:
        """Create the tail for the samples left in each source."""
        order = np.lexsort((np.arange(len(left)), -left))
        rising = left[order][::-1]
        steps = np.diff(rising, prepend=0) * np.arange(len(left), 0, -1)
        return cls(start, base, left, order, np.cumsum(steps))

    @property
    def sample_count(self) -> int:
        """The number of samples in the tail."""
        return int(self.ends[-1])

    def locate(self, places: Int64) -> tuple[Int64, Int64]:
        """Return the source of each place of the tail, and the number of its sample there.

        Shapes:  places: int64[n], from 0.   result: int64[n], int64[n].
        """
        gone = self.ends.searchsorted(places, side="right")
        before = np.concatenate([[0], self.ends])[gone]
        rising = np.concatenate([[0], self.left[self.order][::-1]])
        turn, which = np.divmod(places - before, len(self.left) - gone)
        sources = self.order[which]
        return sources, self.base[sources] + rising[gone] + turn

    def place_of(self, sources: Int64, samples: Int64) -> Int64:
        """Invert `locate`."""
        turn = samples - self.base[sources]
        rising = np.concatenate([[0], self.left[self.order][::-1]])
        gone = rising[1:].searchsorted(turn, side="right")
        rank = np.empty_like(self.order)
        rank[self.order] = np.arange(len(self.order))
        before: Int64 = np.concatenate([[0], self.ends])[gone]
        before += (turn - rising[gone]) * (len(self.left) - gone)
        return before + rank[sources]


class EpochPlan(Struct, frozen=True):
    """One epoch. `base` counts the samples of each source that earlier epochs read, `counts` the
    samples that this epoch reads. `changed` lists the places where shares changed, with the new
    shares, in order. `shares` are the shares at the epoch's end.

    Shapes:  base, counts: int64[sources].
    """

    epoch: int
    segments: tuple[MixSegment, ...]
    tail: Tail | None
    sample_count: int
    base: Int64
    counts: Int64
    shares: Shares
    round_count: int
    changed: tuple[tuple[int, Shares], ...] = ()


class EpochStart(Struct, frozen=True):
    """The state at the start of an epoch: the shares in force, the samples read of each source, and
    the number of rounds so far.

    Shapes:  base: int64[sources].
    """

    epoch: int
    shares: Shares
    base: Int64
    rounds: int = 0

    @classmethod
    def of(cls, mixed: Mixed) -> EpochStart:
        """Return the start of the first epoch."""
        return cls(0, mixed.shares, np.zeros(len(mixed.counts), np.int64))

    def plan(self, mixed: Mixed, changes: Sequence[ShareChange] = ()) -> EpochPlan:
        """Plan the epoch with these changes, which are in order.

        Raises:  ConfigError: the epoch would have no samples, or fewer than its length.
        """
        given = mixed, self.shares, self.base, self.rounds, self.epoch, tuple(changes)
        if len(changes) > _CHANGES_MAX:
            return _Planner(*given).plan()
        return _kept_plan(*given[:2], self.base.tobytes(), *given[3:])

    def reached(
        self, mixed: Mixed, changes: Sequence[ShareChange], asked_from: int, step: int
    ) -> int:
        """Return how many of the changes take effect in this epoch. From position `asked_from` on,
        changes are at the positions where they were requested. Such a change takes effect if the
        epoch, without this and later changes, has `step` more positions after its position.
        """
        given = mixed, self.shares, self.base, self.rounds, self.epoch, changes
        return _Planner(*given, asked_from, step).reached()

    def after(self, plan: EpochPlan, count: int = 1) -> EpochStart:
        """Return the start of the next epoch, after `count` epochs with the counts of this plan,
        which is that of the first of them.

        Raises:  ConfigError: more samples were read than numbers can count.
        """
        if int(self.base.max()) + int(plan.counts.max()) * count > SAMPLE_COUNT_MAX:
            raise ConfigError(
                f"epoch {count} is beyond 2**62 samples of one source: choose a smaller epoch",
                field="epoch",
            )
        return EpochStart(
            self.epoch + count,
            plan.shares,
            self.base + plan.counts * count,
            self.rounds + plan.round_count * count,
        )


class EpochRun(Struct, frozen=True):
    """Consecutive epochs with equal counts: `count` of them, or None for all later ones. `plan` is
    that of the first epoch, which begins at `start`.
    """

    start: EpochStart
    count: int | None
    plan: EpochPlan

    @property
    def first(self) -> int:
        """The run's first epoch."""
        return self.start.epoch


def plan_of(mixed: Mixed, epoch: int, changes: Sequence[ShareChange] = ()) -> EpochPlan:
    """Plan an epoch, after these changes of the shares, which are in order.

    Raises:  ConfigError: an epoch would have no samples, or fewer than its length.
    """
    for run in runs_of(mixed, changes):
        if run.count is None or epoch < run.first + run.count:
            break
    ahead = epoch - run.first
    return run.start.after(run.plan, ahead).plan(mixed) if ahead else run.plan


def runs_of(mixed: Mixed, changes: Sequence[ShareChange] = ()) -> Iterator[EpochRun]:
    """Yield all epochs, after these changes of the shares, which are in order.

    Raises:  ConfigError: as `plan_of`.
    """
    start = EpochStart.of(mixed)
    for epoch, mine in itertools.groupby(changes, lambda change: change.epoch):
        if start.epoch < epoch:
            # All epochs from `start` up to this one have the counts of the first of them.
            run = EpochRun(start, epoch - start.epoch, start.plan(mixed))
            yield run
            start = start.after(run.plan, epoch - start.epoch)
        run = EpochRun(start, 1, start.plan(mixed, tuple(mine)))
        yield run
        start = start.after(run.plan)
    yield EpochRun(start, None, start.plan(mixed))


@functools.lru_cache(_PLANS_KEPT)
def _kept_plan(
    mixed: Mixed,
    shares: Shares,
    base: bytes,
    first_round: int,
    epoch: int,
    changes: tuple[ShareChange, ...],
) -> EpochPlan:
    of_sources = np.frombuffer(base, np.int64)
    return _Planner(mixed, shares, of_sources, first_round, epoch, changes).plan()


class _Planner:
    """Plans one epoch, a segment at a time."""

    def __init__(
        self,
        mixed: Mixed,
        shares: Shares,
        base: Int64,
        first_round: int,
        epoch: int,
        changes: Sequence[ShareChange],
        asked_from: int = 0,
        step: int = 0,
    ) -> None:
        self._mixed, self._shares, self._epoch = mixed, shares, epoch
        self._asked_from, self._step, self._sure, self._left_out = asked_from, step, 0, 0
        self._base, self._limits = base, mixed.limits
        self._changes = deque(changes)
        self._used = np.zeros_like(base)
        self._segments: list[MixSegment] = []
        self._changed: list[tuple[int, Shares]] = []
        self._position, self._first_round, self._rounds = 0, first_round, 0

    def plan(self) -> EpochPlan:
        mixed = self._mixed
        while self._changes and not self._changes[0].position:
            self._have(self._changes.popleft().shares)
        tail = self._to_end(mixed.lanes)
        self._check()
        if self._changes:  # the rest of the changes are at positions beyond the epoch
            self._shares = self._changes[-1].shares
        return EpochPlan(
            self._epoch, tuple(self._segments), tail, self._position, self._base, self._used,
            self._shares, self._rounds, tuple(self._changed),
        )  # fmt: skip

    def reached(self) -> int:
        """Return how many of the changes take effect in the epoch."""
        count = len(self._changes)
        while self._changes and not self._changes[0].position:
            self._have(self._changes.popleft().shares)
        self._to_end(self._mixed.lanes)
        late = sum(change.position + self._step > self._position for change in self._changes)
        return count - self._left_out - late

    def _to_end(self, lanes: int) -> Tail | None:
        """Plan the rest of the epoch, which begins with segments of this many lanes."""
        mixed, tail = self._mixed, None
        self._run(lanes)
        deals = mixed.exhausted is Exhausted.RENORMALISE and not mixed.length
        if mixed.batch == 1 and not deals:
            self._run(1)
        elif mixed.batch == 1:
            left = np.where(np.array(self._shares) > 0, self._limits - self._used, 0)
            if left.any():
                tail = Tail.of(self._position, self._base + self._used, left)
                self._used = self._used + left
                self._position += tail.sample_count
        return tail

    def _run(self, lanes: int) -> None:
        """Add segments of this many lanes until a source is exhausted or the length is reached."""
        mixed, unit = self._mixed, lanes * self._mixed.batch
        while True:
            room = (self._limits - self._used) // unit
            active = (np.array(self._shares) > 0) & (room > 0)
            has_lost = bool(((np.array(self._shares) > 0) & ~active).any())
            if not active.any() or (has_lost and mixed.exhausted is Exhausted.STOP):
                return
            shares = tuple(np.where(active, self._shares, 0).tolist())
            tree = CountingTree(shares)
            some = np.flatnonzero(active)
            steps = int(tree.slots_for(some, room[some] + 1).min()) - 1
            end = self._steps_to_end(tree, some, unit)
            changed = self._steps_to_change(unit)
            self._sure = self._position + min(steps, end) * unit
            steps = min(steps, end, changed)
            self._add(tree, shares, lanes, steps)
            if steps == changed:
                self._change(lanes)
            elif steps == end:
                return

    def _change(self, lanes: int) -> None:
        """Apply the changes of shares that are due; of several, the last one counts."""
        shares = self._shares
        while self._changes and self._changes[0].position <= self._position:
            if not self._comes_to(self._changes[0], shares, lanes):
                self._left_out = len(self._changes)
                self._changes.clear()
                break
            shares = self._changes.popleft().shares
        self._have(shares)

    def _have(self, shares: Shares) -> None:
        if shares != self._shares:
            self._shares = shares
            self._changed.append((self._position, shares))

    def _comes_to(self, change: ShareChange, shares: Shares, lanes: int) -> bool:
        """Return whether the epoch would have the position of a change if it continued with these
        shares and without the change.
        """
        needed = change.position + self._step
        sure = self._sure if shares == self._shares else self._position
        if not self._step or change.position < self._asked_from or needed <= sure:
            return True
        return self._end_with(shares, lanes) >= needed

    def _end_with(self, shares: Shares, lanes: int) -> int:
        """Return the position where the epoch ends if it continues with these shares."""
        kept = self.__dict__.copy()
        self._shares, self._changes = shares, deque()
        self._segments, self._changed = [], []
        self._to_end(lanes)
        end = self._position
        self.__dict__ = kept
        return end

    def _steps_to_end(self, tree: CountingTree, some: Int64, unit: int) -> int:
        """Return after how many steps the epoch ends if no source is exhausted before."""
        mixed = self._mixed
        if mixed.length:
            return (mixed.length - self._position) // unit
        if mixed.exhausted is not Exhausted.CYCLE:
            return SLOTS_MAX
        wanted = np.minimum(np.array(mixed.counts), self._limits)[some] - self._used[some]
        return int(tree.slots_for(some, -(-wanted // unit)).max())

    def _steps_to_change(self, unit: int) -> int:
        """Return after how many steps other shares apply. Of several changes due there, the last
        one counts.
        """
        rounds, shares = 0, self._shares
        round_length = unit * self._mixed.round_steps
        for change in self._changes:
            due = max(-(-(change.position - self._position) // round_length), 0)
            if due > rounds and shares != self._shares:
                break
            rounds, shares = due, change.shares
        return SLOTS_MAX if shares == self._shares else rounds * self._mixed.round_steps

    def _add(self, tree: CountingTree, shares: Shares, lanes: int, steps: int) -> None:
        if not steps:
            return
        batch = self._mixed.batch
        self._segments.append(
            MixSegment(
                self._position, lanes, batch, steps, self._mixed.round_steps,
                self._first_round + self._rounds, shares, self._base + self._used,
            )
        )  # fmt: skip
        self._used = self._used + tree.counts(np.array([steps]))[0] * (lanes * batch)
        self._position += steps * lanes * batch
        self._rounds += -(-steps // self._mixed.round_steps)

    def _check(self) -> None:
        mixed = self._mixed
        if not self._position:
            raise ConfigError(
                f"an epoch of this mixture has no samples: its sources have {list(mixed.counts)},"
                f" and one ends before it has a sample in each of {mixed.lanes} lanes. Choose fewer"
                " lanes, exhausted='renormalise', or more max_passes",
                field="lanes",
            )
        if self._position > SAMPLE_COUNT_MAX:
            raise ConfigError(
                f"an epoch of this mixture has {self._position} samples, more than 2**62: set its"
                " length",
                field="length",
            )
        if self._position < mixed.length:
            raise ConfigError(
                f"an epoch of {mixed.length} samples was asked for, but the sources have only"
                f" {self._position} with these weights, limits of passes and"
                f" exhausted={mixed.exhausted.value!r}: choose a smaller length, more max_passes,"
                " or exhausted='cycle'",
                field="length",
            )
