"""The weights of a mixture while a job runs: past, present and future weights, and their effects.

A trainer plans nothing: its node computes each answer from only the job, the weights and the place.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from functools import partial

from msgspec import structs

from dataplane.client.describe import answer_of
from dataplane.client.mount import Mount
from dataplane.client.session import Session
from dataplane.client.state import RowsDigest, RunState
from dataplane.model.changes import EpochSteps, MixAt
from dataplane.model.errors import ConfigError, PeerLost
from dataplane.model.ledger import LedgerPosition
from dataplane.model.records import MixHistory
from dataplane.rpc.messages import ChangeWeights, DescribeEpoch, EpochDescribed, WeightsChanged

_COUNTS_MAX = 64


def sample_count(session: Session, epoch: int) -> int:
    """Return the number of samples of an epoch. Request it from the node only if weights change in
    the job, or for the first epoch of a stage with change="unread".

    Raises:  DataplaneError: the node's error.
    """
    spec = session.job.spec
    is_reduced = epoch == spec.first_epoch and any(stage.unread for stage in spec.stages[-1:])
    if is_reduced:
        session.change(spec.stages, epoch)  # it may be open for later epochs alone
    job, mix = session.job, session.mix
    if not is_reduced and (mix is None or (mix == _own(session) and len(mix.changes) == 1)):
        return job.sample_count
    counts, at = session.epoch_samples, (epoch, mix)
    if at not in counts:
        if len(counts) >= _COUNTS_MAX:
            del counts[next(iter(counts))]
        counts[at] = answer_of(session, partial(_sample_count, epoch, mix))
    return counts[at]


def epoch_steps(session: Session, epoch: int, cursor: int = 0) -> EpochSteps:
    """Return the steps of an epoch from a cursor on, with the weights that are known now.

    Raises:  DataplaneError: the node's error.
    """
    return EpochSteps.of(
        session.job.spec, sample_count(session, epoch), epoch, cursor=cursor,
        dp_size=session.request.topology.dp_size, gaps=session.changes.gaps(epoch),
        mix=session.mix,
    )  # fmt: skip


def state_at(session: Session, epoch: int, cursor: int) -> RunState:
    """Return the state of the job at this place."""
    return session.state(epoch, cursor, sample_count(session, epoch))


def place_of(session: Session, state: RunState) -> tuple[int, int]:
    """Return the epoch and cursor from which a pass continues. After a state that was taken in the
    last step of an epoch, the first pass has no batches, and the next pass reads the next epoch.
    """
    if state.ended is None:
        return state.epoch, state.cursor
    return state.ended, sample_count(session, state.ended)


def changed(session: Session, epoch: int, cursor: int, weights: Sequence[float]) -> WeightsChanged:
    """Return all weights of the job if `weights` take effect at this place or later; without
    `weights`, the weights with which the job was opened take effect. The job is not changed.

    Raises:  ConfigError: the job is not a mixture, or cannot be planned with these weights.
    DataplaneError: the node's error.
    """
    mix = session.mix or MixHistory(())
    ask = partial(_changed, epoch, cursor, mix, tuple(weights))
    return answer_of(session, ask)


def asked_of(session: Session, epoch: int, cursor: int) -> list[MixAt]:
    """Return the weights that people requested and that take effect in a pass that begins here,
    each with its place in this epoch. A request beyond the last step of an epoch belongs to the
    next epoch.
    """
    found = []
    for one in session.mixes_asked:
        at = one.position
        if not cursor and at.epoch == epoch - 1:
            after = state_at(session, at.epoch, min(at.cursor, sample_count(session, at.epoch)))
            at = LedgerPosition(after.epoch, after.cursor)
        if at.epoch == epoch and at.cursor >= cursor and one.seq not in session.mixes_applied:
            found.append(structs.replace(one, position=at))
    return found


def follow(session: Session, asked: MixAt, reached: int) -> WeightsChanged | None:
    """Apply weights that people requested, on a rank that has reached this cursor of the epoch.
    Return None, after a warning, if the epoch cannot be planned with these weights: they are then
    ignored, on this rank and on all others.

    Raises:  ConfigError: the rank has passed the place where the weights take effect.
    """
    at = asked.position
    if at.cursor < reached:
        raise ConfigError(
            f"the weights of job {session.request.job_id!r} were changed at sample {at.cursor} of"
            f" epoch {at.epoch} (`dataplane ledger show`) while the node of this rank could not"
            f" reach the coordinator, and it has read up to sample {reached}: stop this launch, and"
            " resume the job from its checkpoint",
            job=session.request.job_id,
        )
    weights, mixture = dict(asked.weights), session.request.mixture
    assert mixture is not None, "others have no weights"
    given = tuple(weights.get(source.name, 0.0) for source in mixture.sources)
    try:
        found = changed(session, at.epoch, at.cursor, given)
    except ConfigError as error:
        session.mixes_applied.add(asked.seq)
        warnings.warn(
            f"entry {asked.seq} of the ledger of job {session.request.job_id!r} is ignored:"
            f" from sample {at.cursor} of epoch {at.epoch} on, the mixture cannot be read with the"
            f" weights {weights}: {error}",
            stacklevel=2,
        )
        return None
    session.mix = found.mix
    session.mixes_applied.add(asked.seq)
    return found


def catch_up(session: Session, epoch: int, start: int, cursor: int) -> None:
    """Apply the weights with which another process's pass has come from `start` to `cursor`."""
    for one in asked_of(session, epoch, start):
        if one.position.cursor < cursor:
            follow(session, one, 0)


def rows_reached(
    session: Session, before: RowsDigest, epoch: int, begin: int, cursor: int
) -> RowsDigest:
    """Return the digest after a pass that began at this place has consumed everything up to the
    cursor. The order is computed now, since facts that decide the pass's rows may have become known
    after it began.
    """
    digest = before.continued(_rows_order(session, epoch, begin), epoch, begin)
    changes = () if session.mix is None else session.mix.between(epoch, begin, cursor)
    gaps = session.changes.gaps(epoch)
    for position in sorted({*changes, *session.taken_between(epoch, begin, cursor)}):
        order = _rows_order(session, epoch, position)
        digest = digest.reached(position, gaps).continued(order, epoch, position)
    return digest.reached(cursor, gaps)


def _rows_order(session: Session, epoch: int, position: int) -> str:
    """Return 16 hex digits over everything that decides which rows are at this place."""
    job = session.job
    own, place = job.spec.rows_digest(job.dataset.layout), LedgerPosition(epoch, position)
    rows = session.rows_digest(own, place)
    if session.mix is None:
        return rows
    text = f"{rows}:{session.mix.digest_at(epoch, position)}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _own(session: Session) -> MixHistory | None:
    mixture = session.job.spec.mixture
    return None if mixture is None else mixture.history


def _sample_count(epoch: int, mix: MixHistory | None, mount: Mount, deadline: float) -> int:
    body, _ = mount.call(DescribeEpoch(mount.job_id, epoch, mix), deadline)
    if not isinstance(body, EpochDescribed):
        raise PeerLost(f"the node answered with {body!r:.200}", peer=mount.node_id)
    return body.sample_count


def _changed(
    epoch: int,
    cursor: int,
    mix: MixHistory,
    weights: tuple[float, ...],
    mount: Mount,
    deadline: float,
) -> WeightsChanged:
    body, _ = mount.call(ChangeWeights(mount.job_id, epoch, cursor, mix, weights), deadline)
    if not isinstance(body, WeightsChanged):
        raise PeerLost(f"the node answered with {body!r:.200}", peer=mount.node_id)
    return body
