"""When other shares of a mixture's sources take effect. Pure.

Changes are in order, each where it takes effect: at the start of a round, or of an epoch. So they
may be planned again, also with others behind them, and stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from dataplane.errors import ConfigError
from dataplane.model import End
from dataplane.plan.mixture import EpochPlan, Mixed, Shares, plan_of, runs_of
from dataplane.plan.slices import steps_of
from dataplane.weights import ScheduledShares, ShareChange

Changes = tuple[ShareChange, ...]
Place = tuple[int, int]
"""An epoch, and a position of it."""


def in_effect(mixed: Mixed, asked: Sequence[ShareChange]) -> Changes:
    """Changes that were asked for at these places, in order, where they take effect: at the first
    round that begins there or later, or at the start of the next epoch. Those that change nothing
    are left out; of several that take effect at one place, the last one counts.

    Raises:  ConfigError: as `plan_of`, for any epoch.
    """
    found: list[ShareChange] = []
    for run in runs_of(mixed, asked):
        if run.count is None:
            break
        found += [ShareChange(run.first, *change) for change in run.plan.changed]
        if run.plan.shares != (found[-1].shares if found else mixed.shares):
            found.append(ShareChange(run.first + 1, 0, run.plan.shares))
    last = {change.place: change for change in found}
    before = (mixed.shares, *(change.shares for change in last.values()))
    pairs = zip(last.values(), before, strict=False)
    kept = tuple(change for change, shares in pairs if change.shares != shares)
    # Without those that are left out, sources may be exhausted elsewhere.
    return kept if len(kept) == len(found) else in_effect(mixed, kept)


def next_boundary(mixed: Mixed, changes: Changes, place: Place) -> Place:
    """The first place, from this one on, at which shares can change. `changes` are before it.

    Raises:  ConfigError: as `in_effect`.
    """
    shares = list(changes[-1].shares if changes else mixed.shares)
    largest = shares.index(max(shares))
    shares[largest] -= 1  # any others
    return in_effect(mixed, (*changes, ShareChange(*place, tuple(shares))))[-1].place


def changed(mixed: Mixed, changes: Changes, place: Place, shares: Shares) -> tuple[Changes, Place]:
    """All changes, if others shares are asked for at this place, and where these take effect. Later
    changes stay.

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
    """The changes before a place, and those of a schedule from there on. Its steps count from that
    place on: each takes effect at the first round that begins in it or later.

    Raises:  ConfigError: as `in_effect`, and as `check_steps`.
    """
    epoch, position = place
    found = tuple(change for change in changes if change.place < place)
    left, gone = list(schedule), 0
    while left:
        asked = [
            ShareChange(epoch, position + (one.step - gone) * global_batch, one.shares)
            for one in left
        ]
        plan = plan_of(mixed, epoch, (*found, *asked))
        steps = steps_of(plan.sample_count - position, global_batch, end)
        if not position:
            _check_step(plan, global_batch, end)
        mine = [each for each, one in zip(asked, left, strict=True) if one.step - gone < steps]
        if mine:
            found = in_effect(mixed, (*found, *mine))
        left, gone = left[len(mine) :], gone + steps
        epoch, position = epoch + 1, 0
        if left:
            plan = plan_of(mixed, epoch, found)
            _check_step(plan, global_batch, end)
            each = steps_of(plan.sample_count, global_batch, end)
            passed = (left[0].step - gone) // each
            epoch, gone = epoch + passed, gone + passed * each
    check_steps(mixed, found, global_batch, end)
    return found


def check_steps(mixed: Mixed, changes: Changes, global_batch: int, end: End) -> None:
    """Check that all epochs have steps.

    Raises:  ConfigError: one is shorter than a global batch, and incomplete ones are dropped.
    """
    for run in runs_of(mixed, changes):
        _check_step(run.plan, global_batch, end)


def _check_step(plan: EpochPlan, global_batch: int, end: End) -> None:
    if not steps_of(plan.sample_count, global_batch, end):
        raise ConfigError(
            f"with these weights, epoch {plan.epoch} of the mixture has {plan.sample_count}"
            f" samples, less than a global batch of {global_batch}, and incomplete batches are"
            " dropped: no step is left. Choose other weights, a smaller batch, or keep the last"
            " batch (drop_last=False)",
            field="weight",
        )


def steps_before(mixed: Mixed, changes: Changes, place: Place, global_batch: int, end: End) -> int:
    """How many steps a job has made before this place."""
    epoch, position = place
    steps = -(-position // global_batch)
    for run in runs_of(mixed, changes):
        last = epoch if run.count is None else min(run.first + run.count, epoch)
        each = steps_of(run.plan.sample_count, global_batch, end)
        steps += max(last - run.first, 0) * each
    return steps
