"""Answer questions about changed weights of a mixture. Trainers hold the weights, and open streams
with them; the node keeps none.

1. An answer depends only on the job, its weights so far and the place. So all ranks get the same
   answer to the same question, from any node, at any time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dataplane.model.config import JobSpec, MixtureSpec
from dataplane.model.errors import ConfigError, DataplaneError
from dataplane.model.records import MixHistory, ScheduledShares, ShareChange
from dataplane.node.member import ServedMember
from dataplane.node.mixing import shares_of
from dataplane.plan.changes import (
    Changes,
    Place,
    changed,
    check_steps,
    next_boundary,
    scheduled,
    steps_before,
)
from dataplane.plan.counting import SHARES_SUM
from dataplane.plan.mixture import Mixed
from dataplane.plan.orders import mixed_of, sample_count_of, with_mix
from dataplane.rpc.membership import MixProposal
from dataplane.rpc.messages import ChangeWeights, DescribeEpoch, EpochDescribed, WeightsChanged


def mix_of(spec: JobSpec, asked: MixHistory | None) -> MixHistory | None:
    """Return the weights of a requested stream: those of the spec unless it names others. None
    without a mixture.

    Raises:  ConfigError: they are not weights of this mixture.
    """
    if spec.mixture is None or asked is None:
        return None if spec.mixture is None else spec.mixture.history
    _check(spec.mixture, asked)
    return asked


def epoch_described(member: ServedMember, asked: DescribeEpoch) -> EpochDescribed:
    """Return the length of an epoch.

    Raises:  ConfigError: these are not weights of this mixture, or the epoch cannot be planned.
    """
    spec = with_mix(member.spec, mix_of(member.spec, asked.mix))
    return EpochDescribed(sample_count_of(spec, member.opened.manifests, asked.epoch))


def weights_changed(member: ServedMember, asked: ChangeWeights) -> WeightsChanged:
    """Return all weights if these come into force, and their place.

    Raises:  ConfigError: the job is no mixture, these are no weights for it, or an epoch cannot be
    planned with them.
    """
    spec, request = member.spec, member.request.mixture
    if spec.mixture is None or request is None:
        raise ConfigError(
            "this job reads one dataset: only a Mixture has weights", field="set_weights"
        )
    mix_of(spec, asked.mix)
    counts = [one.sample_count for one in member.opened.manifests]
    mixed = mixed_of(with_mix(spec, asked.mix), counts)
    changes, place = asked.mix.changes[1:], (asked.epoch, asked.cursor)
    if asked.weights:
        shares = shares_of(request, asked.weights, member.opened.datasets)
        found, at = changed(mixed, changes, place, shares)
        check_steps(mixed, found, spec.global_batch, spec.end)
    else:
        found, at = _as_opened(spec, spec.mixture, mixed, changes, place)
    if not found or found[0].place != (0, 0):
        found = (ShareChange(0, 0, mixed.shares), *found)
    return WeightsChanged(MixHistory(found, asked.mix.length), *at)


def refusal_of(member: ServedMember, proposal: MixProposal) -> str:
    """Return why a member cannot read these weights from the requested place on, or from the one it
    has reached; "" if it can.
    """
    mixture, at = member.request.mixture, proposal.at or member.place_reached
    mix = mix_of(member.spec, member.mix)
    if mixture is None or mix is None or at is None:
        return ""
    given = dict(zip(proposal.sources, proposal.weights, strict=True))
    weights = tuple(given.get(source.name, 0.0) for source in mixture.sources)
    try:
        weights_changed(member, ChangeWeights(member.job_id, at.epoch, at.cursor, mix, weights))
    except DataplaneError as error:
        return str(error)
    return ""


def _as_opened(
    spec: JobSpec, mixture: MixtureSpec, mixed: Mixed, changes: Changes, place: Place
) -> tuple[Changes, Place]:
    """Restore the weights with which the job was opened from this place on: those that its schedule
    has for this step and for later ones.
    """
    before = tuple(change for change in changes if change.place < place)
    now = steps_before(mixed, before, place, spec.global_batch, spec.end)
    all_of_it = (ScheduledShares(0, mixture.shares), *mixture.schedule)
    past = [one for one in all_of_it if one.step <= now]
    coming = [ScheduledShares(one.step - now, one.shares) for one in all_of_it if one.step > now]
    schedule: Sequence[ScheduledShares] = (ScheduledShares(0, past[-1].shares), *coming)
    found = scheduled(mixed, before, place, schedule, spec.global_batch, spec.end)
    return found, next_boundary(mixed, before, place)


def _check(mixture: MixtureSpec, mix: MixHistory) -> None:
    places = [change.place for change in mix.changes]
    is_right = (
        bool(places)
        and places[0] == (0, 0)
        and all(before < after for before, after in itertools.pairwise(places))
        and all(len(change.shares) == len(mixture.sources) for change in mix.changes)
        and all(0 < sum(change.shares) <= SHARES_SUM for change in mix.changes)
    )
    if not is_right:
        raise ConfigError(
            f"these are not the weights of a mixture of {len(mixture.sources)} sources: its state"
            " is damaged",
            field="mix",
        )
