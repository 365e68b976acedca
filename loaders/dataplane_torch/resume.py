"""Check a saved state before a loader over urls resumes from it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from msgspec import structs

from dataplane.client.mixing import asked_of, changed, sample_count, state_at
from dataplane.client.session import Session
from dataplane.client.stages import (
    FINISH,
    RESTART,
    Named,
    ahead,
    check_ahead,
    check_epoch,
    follows,
    has_begun,
    stages_with,
)
from dataplane.client.state import RowsDigest, RunState
from dataplane.model.errors import ConfigError
from dataplane.model.ledger import LedgerPosition
from dataplane.model.records import MixHistory
from dataplane.rpc.messages import JobOpened, OpenJob, WeightsChanged

REPLAY = "replay_first_slab"
"""The name of the option, and the only key in the state of a run with this option."""


def resumed(
    state_dict: Mapping[str, Any],
    session: Session,
    *,
    dataset_moved: bool,
    change: str | None = None,
    before: Named = (),
    lists: bool = False,
) -> tuple[RunState, str]:
    """Return the state, if the session's job may resume from it; an empty state means the start.
    Set the session's weights to those of the state; if the loader's own have changed since it was
    saved, these apply from the first round that begins at the state's position or later.

    With a `change`, accept a state of another recipe, whose datasets were at the urls `before`:
    return the start of the next stage, and a sentence about the change, which is "" if nothing has
    changed. With `lists`, weights that were set hold beyond the change.

    Warn on rank 0 of a ledger that is not that of the state's run or has weights that come too
    late, of images by other software, and if only `dataset_moved` made the state acceptable: it is
    meant for one resume, since it would also accept a later change that keeps all sizes.

    Raises:  SpecMismatch: the state is of another job.  VersionMismatch: a newer version saved the
    state.  ConfigError: the state is damaged, or of a run that replayed its first slab.
    """
    _refuse_replay(state_dict)
    session.mixes_applied.clear()
    session.return_to_own()
    if isinstance(state_dict, Mapping) and not state_dict:
        session.take_out(())
        session.change(())
        session.mix = None
        return state_at(session, 0, 0), ""
    state = RunState.from_dict(state_dict)
    resumes = None if change is not None or dataset_moved else state.ahead
    if resumes is not None:
        change, before = FINISH, resumes.before
    stages = state.stages if change is None else stages_with(state, change, before)
    session.take_out(state.gone)
    finishes = change == FINISH and has_begun(state)
    session.change(stages, state.epoch - state.in_last_step, finishes=finishes)
    if session.job.spec.stages != state.stages:
        session.mix = _weights_kept(state, session.job, is_new=True) if lists else None
        check_ahead(resumes, session.job.spec, session.job.dataset)
        begin, sentence = follows(state, session.job)
        return begin, "" if resumes else sentence
    session.settle()
    was_moved = state.check(session.job, dataset_moved=dataset_moved)
    _take_out_again(state, session)
    if session.request.topology.rank == 0:
        _warn(state, session, was_moved=was_moved)
    state = state.normalised(session.job.spec, session.changes.gaps(state.epoch))
    session.mix = state.mix
    _ignore_weights(state, session)
    if session.job.finishing is not None:
        session.asked_weights = state.asked_weights
        check_ahead(resumes, session.job.finishing.spec, session.job.finishing.dataset)
        return state, "" if resumes else ahead(state, session.job)
    if state.mix is not None and state.asked_weights != session.job.spec.asked_weights:
        session.mix = changed(session, state.epoch, state.cursor, ()).mix
    return state, ""


def _refuse_replay(state_dict: object) -> None:
    if isinstance(state_dict, Mapping) and REPLAY in state_dict:
        raise ConfigError(
            "this state is of a run with replay_first_slab=True, which read no real epoch: resume "
            "from a state of a run without it",
            field=REPLAY,
        )


def _take_out_again(state: RunState, session: Session) -> None:
    """Take out what the state's run took out of shards that have other urls now."""
    if len(session.job.gone) == len(state.gone):
        return
    known = {structs.replace(row, shard=None) for row in session.job.gone}
    session.take_out(
        tuple(
            row if structs.replace(row, shard=None) in known else row.numbered for row in state.gone
        )
    )


def turned(session: Session, before: RowsDigest, epoch: int, *, lists: bool) -> RowsDigest:
    """Begin the stage of the loader's own recipe at this epoch, since the epoch of the former stage
    is over; with `lists`, the shards are listed again. Return the digest of the new stage, given
    the digest `before` it.
    """
    former: Named = ()
    is_new = session.following is not None
    if session.following is not None:
        former = session.following.spec.stages[-1].before
        epoch = session.following.epoch + 1
    old = session.job.spec.mixture
    state = structs.replace(state_at(session, epoch, 0), digest=before)
    session.return_to_own()
    if lists:
        session.list_again(epoch)
    session.change(stages_with(state, RESTART, former), epoch)

    def weights(job: JobOpened) -> MixHistory | None:
        if not is_new and job.spec.stages == state.stages:
            return state.mix  # nothing has changed, and set_weights() still holds
        is_set = old is not None and state.mix != old.history
        return _weights_kept(state, job, is_new=is_new) if lists and (is_new or is_set) else None

    session.decide_mix(weights)
    return RowsDigest(epoch=epoch, base=before.value)


def entered(
    session: Session,
    before: RowsDigest,
    place: tuple[int, int],
    request: OpenJob,
    change: str,
    former: Named,
) -> RowsDigest:
    """Begin the next stage of a schedule, with the recipe of `request`, at the place where the
    stage before it ends, whose datasets were at the urls `former`. Return the digest of the new
    stage, given the digest `before` it.
    """
    state = structs.replace(state_at(session, *place), digest=before)
    stages = stages_with(state, change, former, planned=True)
    session.adopt(request)
    session.mixes_applied.clear()
    session.change(stages, stages[-1].next_epoch)
    return RowsDigest(epoch=stages[-1].next_epoch, base=before.value)


def _weights_kept(state: RunState, job: JobOpened, *, is_new: bool) -> MixHistory | None:
    """Return the weights that were set in a former stage, if they hold in this one, which has other
    shards; None if its loader, which `is_new`, was given others.
    """
    own, mix = job.spec.mixture, state.mix
    if own is None or mix is None or len(own.shares) != len(mix.changes[0].shares):
        return None
    is_other = job.spec.asked_weights != state.asked_weights or len(own.history.changes) > 1
    return None if is_new and is_other else structs.replace(mix, length=own.history.length)


def chosen(session: Session, epoch: int) -> int:
    """Return the cursor at which a pass of an epoch begins that the user chose: its end if the
    recipe was changed within it or directly after it, since a script that resumes there then goes
    on with the next epoch.

    Raises:  ConfigError: it is an epoch of a former stage of the run.
    """
    if not session.request.spec.stages:
        return 0
    spec = session.job.spec
    if not spec.stages or epoch > spec.first_epoch:
        return 0
    session.change(spec.stages, spec.first_epoch)  # the next pass reads that epoch, if not this one
    if epoch == spec.first_epoch:
        return 0
    ended = spec.stages[-1]
    if ended.cursor or epoch != ended.epoch - 1:
        check_epoch(epoch, ended)
    return sample_count(session, epoch)


def _warn(state: RunState, session: Session, *, was_moved: bool) -> None:
    """Warn of what may have changed since this state was saved."""
    if was_moved:
        warnings.warn(
            "dataset_moved=True: the dataset's ETags differ from those of the state; its names, "
            "sizes and blocks do not. Remove the argument when you have saved a checkpoint: "
            "new states belong to the dataset as it is now",
            stacklevel=5,
        )
    made = session.job.pixels
    if state.pixels and made and state.pixels != made:
        warnings.warn(
            f"the images before this state were made by {state.pixels}, and from here on they are "
            f"made by {made}: single pixels can differ. The sample order, crops and flips stay the "
            "same",
            stacklevel=5,
        )
    mark = state.mark
    if mark is not None and not mark.is_in(session.job.marks):
        warnings.warn(
            f"the ledger of job {session.request.job_id!r} is not the one of this state's run: it"
            f" does not have that one's entry {mark.seq} ({mark.hash}). Steps that were skipped,"
            " rows that were taken out and weights that were changed there are not known here. To"
            " go on with them, resume under the same name= at the same coordinator; after the next"
            " checkpoint this is not said again",
            stacklevel=5,
        )


def warn_of_replaced(was: WeightsChanged, session: Session, epoch: int, cursor: int) -> None:
    """Warn of weights that set_weights() had set before a state was loaded at this later place, if
    the state has others.
    """
    at, mix = (was.epoch, was.position), session.mix
    is_kept = mix is not None and mix.until(*at)[-1].shares == was.mix.until(*at)[-1].shares
    if session.request.topology.rank == 0 and not is_kept and at <= (epoch, cursor):
        warnings.warn(
            f"the weights that set_weights() had set from sample {was.position} of epoch"
            f" {was.epoch} on are replaced by those of the loaded state (sample {cursor} of epoch"
            f" {epoch}): if they are to apply from here on, call set_weights() after"
            " load_state_dict()",
            stacklevel=4,
        )


def _ignore_weights(state: RunState, session: Session) -> None:
    """Ignore the weights that people set at a place behind the state, if its run does not have
    them; warn of the last ones.
    """
    mark, at = state.mark, LedgerPosition(state.epoch, state.cursor)
    known = 0 if mark is None or not mark.is_in(session.job.marks) else mark.seq
    ahead = {entry.seq for entry in asked_of(session, state.epoch, state.cursor)}
    behind = [
        entry
        for entry in session.mixes_asked
        if entry.position < at and entry.seq > known and entry.seq not in ahead
    ]
    session.mixes_applied.update(entry.seq for entry in behind)
    if behind and session.request.topology.rank == 0:
        last, name = behind[-1], session.request.job_id
        weights = " ".join(f"{source}={weight:g}" for source, weight in last.weights)
        warnings.warn(
            f"entry {last.seq} of the ledger of job {name!r} is ignored: it sets the weights"
            f" {weights} from sample {last.position.cursor} of epoch {last.position.epoch} on,"
            f" which is before the loaded state (sample {at.cursor} of epoch {at.epoch}), and the"
            " state's run did not read with them. If they are to apply from here on, run"
            f" `dataplane mix {name} {weights}`",
            stacklevel=5,
        )
