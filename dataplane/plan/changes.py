"""Determine when changed shares of a mixture's sources take effect. Pure.

Changes are listed in order, each with the place where it takes effect: the start of a round, or of
an epoch. Therefore, computing these places again gives the same places, even with later changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs

from dataplane.model.changes import step_count
from dataplane.model.errors import ConfigError
from dataplane.model.records import End, ScheduledShares, ShareChange
from dataplane.plan.mixture import EpochPlan, EpochStart, Mixed, Shares, runs_of

_ENTRIES_AT_ONCE = 16

Changes = tuple[ShareChange, ...]
Place = tuple[int, int]
"""An epoch, and a position of it."""


def in_effect(mixed: Mixed, asked: Sequence[ShareChange]) -> Changes:
    """Return requested changes in order, moved to the place where each takes effect: the first
    round that begins at the requested place or later, or the start of the next epoch. Changes to
    equal shares are left out; of several changes at one place, the last one counts.

    Raises:  ConfigError: an epoch would have no samples, or fewer than its length.
    """
    found: list[ShareChange] = []
    for run in runs_of(mixed, asked):
        if run.count is not None:
            _add_changes(mixed, found, run.plan)
    return tuple(found)


def _add_changes(mixed: Mixed, found: list[ShareChange], plan: EpochPlan) -> None:
    """Add the changes of an epoch to those of earlier epochs."""
    changed = [ShareChange(plan.epoch, *change) for change in plan.changed]
    now = changed or found
    if plan.shares != (now[-1].shares if now else mixed.shares):
        changed.append(ShareChange(plan.epoch + 1, 0, plan.shares))
    for change in changed:
        if found and found[-1].place == change.place:
            del found[-1]
        if change.shares != (found[-1].shares if found else mixed.shares):
            found.append(change)


def next_boundary(mixed: Mixed, changes: Changes, place: Place) -> Place:
    """Return the first place, from this one on, at which shares can change. All `changes` must be
    before it.

    Raises:  ConfigError: as `in_effect`.
    """
    shares = list(changes[-1].shares if changes else mixed.shares)
    largest = shares.index(max(shares))
    shares[largest] -= 1  # the shares must differ from the last ones; how does not matter
    return in_effect(mixed, (*changes, ShareChange(*place, tuple(shares))))[-1].place


def changed(mixed: Mixed, changes: Changes, place: Place, shares: Shares) -> tuple[Changes, Place]:
    """Return all changes including new shares that are requested at this place, and the place where
    the new ones take effect. Later changes are kept.

    Raises:  ConfigError: as `in_effect`.
    """
    before = tuple(change for change in changes if change.place < place)
    at = next_boundary(mixed, before, place)
    after = tuple(change for change in changes if change.place > at)
    return in_effect(mixed, (*before, ShareChange(*at, shares), *after)), at


def scheduled(
    mixed: Mixed,
    changes: Changes,
    place: Place,
    schedule: Sequence[ScheduledShares],
    global_batch: int,
    end: End,
) -> Changes:
    """Return the changes before a place, followed by those of a schedule. The schedule's steps
    count from that place; each entry takes effect at the first round that begins in its step or
    later.

    Raises:  ConfigError: as `in_effect` and `check_steps`.
    """
    found: list[ShareChange] = []
    start, at, gone = EpochStart.of(mixed), 0, 0
    before = [change for change in changes if change.place < place]
    for run in runs_of(mixed, [change for change in before if change.epoch < place[0]]):
        start = run.start
        if run.count is not None:
            _add_changes(mixed, found, run.plan)
    start = start.after(start.plan(mixed), place[0] - start.epoch)
    own, position = tuple(change for change in before if change.epoch == place[0]), place[1]
    while at < len(schedule):
        part = _Part(mixed, start, own, position, gone, global_batch, end)
        if not own and not position:
            part = part.behind_epochs_before(schedule[at].step)
        count = part.reached(schedule, at)
        plan = part.plan(schedule[at : at + count])
        if not part.position:
            _check_step(plan, global_batch, end)
        _add_changes(mixed, found, plan)
        start, at, gone = part.start.after(plan), at + count, part.gone + part.steps(plan)
        own, position = (), 0
    check_steps(mixed, tuple(found), global_batch, end)
    return tuple(found)


class _Part(Struct, frozen=True):
    """An epoch from one of its positions on, which is step `gone` of a schedule. `own` are the
    changes that the epoch has before that position.
    """

    mixed: Mixed
    start: EpochStart
    own: Changes
    position: int
    gone: int
    global_batch: int
    end: End

    def behind_epochs_before(self, step: int) -> _Part:
        """Return the epoch of this step, assuming that earlier epochs have no changes."""
        plan = self.plan(())
        _check_step(plan, self.global_batch, self.end)
        passed, _ = divmod(step - self.gone, self.steps(plan))
        gone = self.gone + passed * self.steps(plan)
        return structs.replace(self, start=self.start.after(plan, passed), gone=gone)

    def plan(self, some: Sequence[ScheduledShares]) -> EpochPlan:
        """Plan the epoch with these entries of the schedule."""
        return self.start.plan(self.mixed, (*self.own, *map(self._asked, some)))

    def _asked(self, one: ScheduledShares) -> ShareChange:
        position = self.position + (one.step - self.gone) * self.global_batch
        return ShareChange(self.start.epoch, position, one.shares)

    def steps(self, plan: EpochPlan) -> int:
        """Return the number of steps of the epoch from the position on."""
        return step_count(plan.sample_count - self.position, self.global_batch, self.end)

    def reached(self, schedule: Sequence[ScheduledShares], at: int) -> int:
        """Return how many entries of the schedule, from index `at` on, fall into this epoch. An
        entry falls into it if the epoch, planned without this and later entries, has its step.
        """
        most, step = _ENTRIES_AT_ONCE, self.global_batch if self.end is End.DROP else 1
        while True:
            some = schedule[at : at + most]
            changes = (*self.own, *map(self._asked, some))
            reached = self.start.reached(self.mixed, changes, self.position, step)
            count = reached - len(self.own)
            if count < len(some) or at + most >= len(schedule):
                return count
            most *= 2


def check_steps(mixed: Mixed, changes: Changes, global_batch: int, end: End) -> None:
    """Check that every epoch has at least one step.

    Raises:  ConfigError: an epoch is shorter than a global batch, and incomplete ones are dropped.
    """
    for run in runs_of(mixed, changes):
        _check_step(run.plan, global_batch, end)


def _check_step(plan: EpochPlan, global_batch: int, end: End) -> None:
    if not step_count(plan.sample_count, global_batch, end):
        raise ConfigError(
            f"with these weights, epoch {plan.epoch} of the mixture has {plan.sample_count}"
            f" samples, less than a global batch of {global_batch}, and incomplete batches are"
            " dropped: no step is left. Choose other weights, a smaller batch, or keep the last"
            " batch (drop_last=False)",
            field="weight",
        )


def steps_before(mixed: Mixed, changes: Changes, place: Place, global_batch: int, end: End) -> int:
    """Return the number of steps that a job has made before this place."""
    epoch, position = place
    steps = -(-position // global_batch)
    for run in runs_of(mixed, changes):
        last = epoch if run.count is None else min(run.first + run.count, epoch)
        each = step_count(run.plan.sample_count, global_batch, end)
        steps += max(last - run.first, 0) * each
    return steps
