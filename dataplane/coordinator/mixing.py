"""Changes of a mixture's weights, and rows to leave out, that people request while the job runs.
Pure; only the state machine uses this module.

    requested ──> proposed to all members ──all promise──> entry of the ledger ──> sent to members
                       └─ a member cannot, or has passed the place, or time is up: refused;
                          rows are then left out from the next launch on

Invariants:
1. The change takes effect at the furthest place that a joined member has promised. No member hands
   over samples beyond its promise before it knows the entry, or knows that there will be none. So
   no rank has read samples that should have been others.
2. A promise is valid for one join: when a member joins again, all members promise again, under a
   new name of the proposal. While the nodes of all members have just died, weights are refused.
3. A proposal is not stored, so a restart forgets it. The entry is on disk before anybody learns of
   it. A proposal ends with its launch, or when no member is left to promise.
4. A heartbeat costs the same with and without a proposal, since the awaited members are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from dataplane.base.units import some_of
from dataplane.coordinator.records import Answer, Job, Member
from dataplane.model.errors import ConfigError
from dataplane.model.ledger import PLACE_MAX, LedgerPosition
from dataplane.rpc.bounds import check_name
from dataplane.rpc.membership import (
    HeartbeatResponse,
    MixAsked,
    MixPromise,
    MixProposal,
    RowsTaken,
)

PROPOSED_S = 60.0
_SHOWN_MAX = 1000


class Proposed(Struct, eq=False):
    """One proposal, of weights or of rows to leave out: who made it, when it ends, what members
    have promised, which members still have to promise, and which ever had to.
    """

    asked: MixAsked
    by: str
    proposal: MixProposal
    until: float
    awaited: set[str]
    promises: dict[str, MixPromise]
    known: set[str]
    rows: RowsTaken | None = None
    turn: int = 0
    refusal: ConfigError | None = None


class Mixing:
    """The proposal of a job, if there is one."""

    def __init__(self) -> None:
        self.proposed: Proposed | None = None

    @property
    def proposal(self) -> MixProposal | None:
        """The proposal in the form that members receive."""
        now = self.proposed
        return None if now is None or now.refusal is not None else now.proposal

    def propose(
        self, job: Job, request: MixAsked, by: str, members: Iterable[str], now: float,
        rows: RowsTaken | None = None,
    ) -> None:  # fmt: skip
        """Propose to these members, who are all members of the job, unless the same proposal
        exists. With `rows`, the request has no weights.

        Raises:  ConfigError: the proposal was refused, or another proposal is not decided yet.
        """
        known = self.proposed
        if known is not None and known.asked.request == request.request:
            if known.refusal is not None:
                self.proposed = None
                raise known.refusal
            return
        if known is not None and known.refusal is None and now < known.until:
            raise ConfigError(
                f"{known.by} has just requested other "
                f"{'weights' if known.rows is None else 'rows'} of job {job.job_id!r}, and its"
                " ranks are still agreeing on the step: try again in a few seconds",
                job=job.job_id,
            )
        proposal = MixProposal(
            request.request, asked_place(job, request), request.sources, request.weights
        )
        awaited, until = set(members), now + PROPOSED_S
        self.proposed = Proposed(request, by, proposal, until, awaited, {}, set(awaited), rows)

    def heard(self, member_id: str, promise: MixPromise | None) -> None:
        """Note a member's promise."""
        now = self.proposed
        if now is not None and promise is not None and promise.request == now.proposal.request:
            now.promises[member_id] = promise
            now.awaited.discard(member_id)

    def joined(self, member_id: str) -> None:
        """Await the promise of a member that has joined. If the member has joined before, collect
        all promises again under a new name, since its earlier promise may still arrive, even if it
        has left meanwhile.
        """
        now = self.proposed
        if now is None:
            return
        if member_id in now.known:
            now.turn += 1
            now.proposal = replace(now.proposal, request=f"{now.asked.request}#{now.turn}")
            now.awaited.update(now.promises)
            now.promises.clear()
        now.awaited.add(member_id)
        now.known.add(member_id)

    def left(self, member_id: str) -> None:
        """Forget a member that is gone."""
        if self.proposed is not None:
            self.proposed.promises.pop(member_id, None)
            self.proposed.awaited.discard(member_id)

    def decided(
        self, job: Job, members: Mapping[str, Member], now: float
    ) -> tuple[Proposed, LedgerPosition | None] | None:
        """Return the proposal and its place, and end it, if all members have promised. The place
        of rows is None if a member cannot leave them out yet.
        """
        at = self.proposed
        if at is None or at.refusal is not None:
            return None
        promises = {members[name].topology.rank: promise for name, promise in at.promises.items()}
        if not at.awaited:
            at.refusal = _refusal(job, at, promises)
        elif now >= at.until:
            at.refusal = _unanswered(job, [members[name] for name in at.awaited])
        is_decided = not at.awaited and promises and at.refusal is None
        if not is_decided and (at.rows is None or at.refusal is None):
            return None
        self.proposed = None
        place = max(promise.position for promise in promises.values()) if is_decided else None
        return at, place

    def awaited_ranks(self, members: Mapping[str, Member]) -> tuple[int, ...]:
        """Return the ranks that have not promised yet."""
        awaited = () if self.proposed is None else self.proposed.awaited
        return tuple(sorted({members[name].topology.rank for name in awaited}))


def checked_weights(job: Job, request: MixAsked) -> dict[str, float]:
    """Return the weights by name, in the order of the sources.

    Raises:  ConfigError: the job mixes nothing, or these weights do not suit it.
    """
    check_name("request", request.request)
    mixture = job.spec.mixture
    if mixture is None:
        raise ConfigError(
            f"job {job.job_id!r} reads one dataset: only a Mixture has weights", field="mix"
        )
    if len(request.sources) != len(request.weights) or len(set(request.sources)) < len(
        request.sources
    ):
        raise ConfigError("give each source one weight: NAME=WEIGHT", field="mix")
    from dataplane.transforms.mixture_options import weights_of

    names = [source.name for source in mixture.sources]
    given = dict(zip(request.sources, request.weights, strict=True))
    weights = weights_of(names, given, f"job {job.job_id!r}")
    return dict(zip(names, weights, strict=True))


def asked_place(job: Job, request: MixAsked) -> LedgerPosition | None:
    """Return the requested place; None for the next possible one.

    Raises:  ConfigError: the place is beyond the end of any epoch.
    """
    epoch = job.epoch if request.epoch is None else request.epoch
    if request.step is None and request.epoch is None:
        return None
    step = request.step or 0
    cursor = step * job.spec.global_batch
    if not (0 <= epoch < PLACE_MAX and 0 <= cursor < PLACE_MAX):
        raise ConfigError(
            f"step {step} of epoch {epoch} is beyond the end of any job: give a step that this one"
            " has yet to read",
            field="at_step",
        )
    return LedgerPosition(epoch, cursor)


def tells_entries(answer: Answer) -> bool:
    """Return whether this answer contains new weights, which must be on disk before it is sent."""
    verdicts = answer.verdicts if isinstance(answer, HeartbeatResponse) else ()
    return any(verdict.entries for verdict in verdicts)


def _refusal(job: Job, at: Proposed, promises: dict[int, MixPromise]) -> ConfigError | None:
    unable = {rank: promise.refusal for rank, promise in promises.items() if promise.refusal}
    if unable:
        rank = min(unable)
        return ConfigError(
            f"rank {rank} of job {job.job_id!r} cannot read these weights:"
            f" {unable[rank][:_SHOWN_MAX]}",
            job=job.job_id,
            rank=rank,
        )
    if any(promise.is_late for promise in promises.values()) and at.proposal.at is not None:
        least, batch = max(promise.position for promise in promises.values()), job.spec.global_batch
        return ConfigError(
            f"job {job.job_id!r} has begun step {at.proposal.at.cursor // batch} of epoch"
            f" {at.proposal.at.epoch}, or its batches are already made: the earliest step that can"
            f" have other weights is step {-(-least.cursor // batch)} of epoch {least.epoch};"
            " without --at-step they take effect as soon as possible",
            field="at_step",
        )
    return None


def _unanswered(job: Job, awaited: Sequence[Member]) -> ConfigError:
    ranks = sorted({member.topology.rank for member in awaited})
    named = some_of([*map(str, ranks)])
    return ConfigError(
        f"ranks {named} of job {job.job_id!r} have not agreed to other weights within"
        f" {PROPOSED_S:.0f} s, so the weights are unchanged: these ranks have not begun to read, or"
        f" their nodes do not answer, which `dataplane status {job.job_id}` shows. Try again when"
        " they do",
        job=job.job_id,
    )
