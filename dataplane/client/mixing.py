"""The weights of a mixture while a job runs: those so far and to come, and what follows from them.

A trainer plans nothing: its node answers, from the job, the weights and the place alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

from dataplane.client.describe import answer_of
from dataplane.client.digest import RowsDigest
from dataplane.client.mount import Mount
from dataplane.client.session import Session
from dataplane.client.state import RunState
from dataplane.errors import PeerLost
from dataplane.rpc.messages import ChangeWeights, DescribeEpoch, EpochDescribed, WeightsChanged
from dataplane.weights import MixHistory

_COUNTS_MAX = 64


def sample_count(session: Session, epoch: int) -> int:
    """How many samples an epoch has. The node is asked only if weights change in the job.

    Raises:  DataplaneError: as the node says.
    """
    job, mix = session.job, session.mix
    if mix is None or (mix == _own(session) and len(mix.changes) == 1):
        return job.sample_count
    counts, at = session.epoch_samples, (epoch, mix)
    if at not in counts:
        if len(counts) >= _COUNTS_MAX:
            del counts[next(iter(counts))]
        counts[at] = answer_of(session, partial(_sample_count, epoch, mix))
    return counts[at]


def state_at(session: Session, epoch: int, cursor: int) -> RunState:
    """The state of the job at this place."""
    return session.state(epoch, cursor, sample_count(session, epoch))


def changed(session: Session, epoch: int, cursor: int, weights: Sequence[float]) -> WeightsChanged:
    """What the weights of the job are if these come into force at this place or later; without any,
    those that the job was opened with. Changes nothing.

    Raises:  ConfigError: the job is no mixture, or cannot be planned with them.  DataplaneError: as
    the node says.
    """
    mix = session.mix or MixHistory(())
    ask = partial(_changed, epoch, cursor, mix, tuple(weights))
    return answer_of(session, ask)


def rows_order(session: Session, epoch: int, position: int) -> str:
    """16 hex digits over what decides which rows stand at this place."""
    job = session.job
    rows = session.changes.rows_digest(job.spec.rows_digest(job.dataset.layout))
    if session.mix is None:
        return rows
    text = f"{rows}:{session.mix.digest_at(epoch, position)}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def rows_reached(session: Session, digest: RowsDigest, cursor: int) -> RowsDigest:
    """The digest when everything up to this cursor of its epoch is consumed."""
    epoch = digest.epoch
    changes = () if session.mix is None else session.mix.between(epoch, digest.end, cursor)
    for position in changes:
        order = rows_order(session, epoch, position)
        digest = digest.reached(position).continued(order, epoch, position)
    return digest.reached(cursor, session.changes.gaps(epoch))


def _own(session: Session) -> MixHistory | None:
    mixture = session.job.spec.mixture
    return None if mixture is None else mixture.history


def _sample_count(epoch: int, mix: MixHistory, mount: Mount, deadline: float) -> int:
    body, _ = mount.wire.call(DescribeEpoch(mount.job_id, epoch, mix), deadline)
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
    body, _ = mount.wire.call(ChangeWeights(mount.job_id, epoch, cursor, mix, weights), deadline)
    if not isinstance(body, WeightsChanged):
        raise PeerLost(f"the node answered with {body!r:.200}", peer=mount.node_id)
    return body
