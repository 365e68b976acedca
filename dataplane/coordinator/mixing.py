"""Other weights of a mixture that somebody asks for while the job runs. Pure; the state machine is
its only user.

    asked ──> proposed to all members ──all have promised──> entry of the ledger ──> all are told
                       └─ a member cannot, or has passed the place, or time is up: refused

Invariants:
1. The weights come into force at the furthest place that a joined member has promised, and none
   hands over anything beyond its promise before it knows the entry, or that there is none. So no
   rank has read anything that would have to be of other weights.
2. A promise is that of one join: when a member joins again, all have to promise again, under
   another name of the proposal.
3. A proposal is no part of what is stored: after a restart it is as if nobody had asked. The entry
   is on disk before anybody hears of it. It ends with its launch, or when nobody is left to ask.
4. A heartbeat costs the same whether or not there is a proposal: who is awaited is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from dataplane.coordinator.records import Answer, Job, Member
from dataplane.errors import ConfigError
from dataplane.ledger import PLACE_MAX, LedgerPosition
from dataplane.rpc.bounds import check_name
from dataplane.rpc.membership import HeartbeatResponse, MixAsked, MixPromise, MixProposal
from dataplane.transforms.mixture_options import weights_of

PROPOSED_S = 60.0
_NAMED_MAX = 8
_SHOWN_MAX = 1000


class Proposed(Struct, eq=False):
    """One proposal, by whom, until when it lasts, what members have promised, and who has not."""

    asked: MixAsked
    by: str
    proposal: MixProposal
    until: float
    awaited: set[str]
    promises: dict[str, MixPromise]
    turn: int = 0
    refusal: ConfigError | None = None


class Mixing:
    """The proposal of a job, if there is one."""

    def __init__(self) -> None:
        self.proposed: Proposed | None = None

    @property
    def proposal(self) -> MixProposal | None:
        """What members are told."""
        now = self.proposed
        return None if now is None or now.refusal is not None else now.proposal

    def propose(
        self, job: Job, asked: MixAsked, by: str, members: Iterable[str], now: float
    ) -> None:
        """Ask these members, which are all, unless they are asked already.

        Raises:  ConfigError: it was refused; or another one is not decided yet.
        """
        known = self.proposed
        if known is not None and known.asked.request == asked.request:
            if known.refusal is not None:
                self.proposed = None
                raise known.refusal
            return
        if known is not None and known.refusal is None and now < known.until:
            raise ConfigError(
                f"{known.by} has just asked for other weights of job {job.job_id!r}, and its ranks"
                " are about to agree on the step: try again in a few seconds",
                job=job.job_id,
            )
        proposal = MixProposal(asked.request, asked_place(job, asked), asked.sources, asked.weights)
        self.proposed = Proposed(asked, by, proposal, now + PROPOSED_S, set(members), {})

    def heard(self, member_id: str, promise: MixPromise | None) -> None:
        """What a member has promised."""
        now = self.proposed
        if now is not None and promise is not None and promise.request == now.proposal.request:
            now.promises[member_id] = promise
            now.awaited.discard(member_id)

    def joined(self, member_id: str) -> None:
        """A member joins, maybe again: what it has promised before may still be on its way."""
        now = self.proposed
        if now is None:
            return
        if member_id in now.promises or member_id in now.awaited:
            now.turn += 1
            now.proposal = replace(now.proposal, request=f"{now.asked.request}#{now.turn}")
            now.awaited.update(now.promises)
            now.promises.clear()
        now.awaited.add(member_id)

    def left(self, member_id: str) -> None:
        """A member is gone."""
        if self.proposed is not None:
            self.proposed.promises.pop(member_id, None)
            self.proposed.awaited.discard(member_id)

    def decided(
        self, job: Job, members: Mapping[str, Member], now: float
    ) -> tuple[Proposed, LedgerPosition] | None:
        """The proposal and its place, if all members have promised; it is over then."""
        at = self.proposed
        if at is None or at.refusal is not None:
            return None
        if at.awaited:
            if now >= at.until:
                at.refusal = _unanswered(job, [members[name] for name in at.awaited])
            return None
        found = {members[name].topology.rank: one for name, one in at.promises.items()}
        at.refusal = _refusal(job, at, found)
        if at.refusal is not None or not found:
            return None
        self.proposed = None
        return at, max(promise.position for promise in found.values())

    def awaited_ranks(self, members: Mapping[str, Member]) -> tuple[int, ...]:
        """The ranks that have not promised."""
        awaited = () if self.proposed is None else self.proposed.awaited
        return tuple(sorted({members[name].topology.rank for name in awaited}))


def checked_weights(job: Job, asked: MixAsked) -> dict[str, float]:
    """The weights by name, in the order of the sources.

    Raises:  ConfigError: the job mixes nothing, or these are no weights for it.
    """
    check_name("request", asked.request)
    mixture = job.spec.mixture
    if mixture is None:
        raise ConfigError(
            f"job {job.job_id!r} reads one dataset: only a Mixture has weights", field="mix"
        )
    if len(asked.sources) != len(asked.weights) or len(set(asked.sources)) < len(asked.sources):
        raise ConfigError("give each source one weight: NAME=WEIGHT", field="mix")
    names = [source.name for source in mixture.sources]
    given = dict(zip(asked.sources, asked.weights, strict=True))
    weights = weights_of(names, given, f"job {job.job_id!r}")
    return dict(zip(names, weights, strict=True))


def asked_place(job: Job, asked: MixAsked) -> LedgerPosition | None:
    """The place that was asked for; None for the next possible one.

    Raises:  ConfigError: no job comes so far.
    """
    epoch = job.epoch if asked.epoch is None else asked.epoch
    if asked.step is None and asked.epoch is None:
        return None
    step = asked.step or 0
    cursor = step * job.spec.global_batch
    if not (0 <= epoch < PLACE_MAX and 0 <= cursor < PLACE_MAX):
        raise ConfigError(
            f"step {step} of epoch {epoch}: no job comes so far; give a step that this one has yet"
            " to read",
            field="at_step",
        )
    return LedgerPosition(epoch, cursor)


def tells_entries(answer: Answer) -> bool:
    """Whether members are told of other weights, which have to be on disk first."""
    told = answer.verdicts if isinstance(answer, HeartbeatResponse) else ()
    return any(one.entries for one in told)


def _refusal(job: Job, at: Proposed, found: dict[int, MixPromise]) -> ConfigError | None:
    unable = {rank: one.refusal for rank, one in found.items() if one.refusal}
    if unable:
        rank = min(unable)
        return ConfigError(
            f"rank {rank} of job {job.job_id!r} cannot read these weights:"
            f" {unable[rank][:_SHOWN_MAX]}",
            job=job.job_id,
            rank=rank,
        )
    if any(one.is_late for one in found.values()) and at.proposal.at is not None:
        least, batch = max(one.position for one in found.values()), job.spec.global_batch
        return ConfigError(
            f"job {job.job_id!r} has begun step {at.proposal.at.cursor // batch} of epoch"
            f" {at.proposal.at.epoch}, or its batches are made already: it can have other weights"
            f" from step {-(-least.cursor // batch)} of epoch {least.epoch} on, at the earliest;"
            " without --at-step it has them as soon as possible",
            field="at_step",
        )
    return None


def _unanswered(job: Job, awaited: Sequence[Member]) -> ConfigError:
    ranks = sorted({one.topology.rank for one in awaited})
    named = ", ".join(map(str, ranks[:_NAMED_MAX])) + (", …" if len(ranks) > _NAMED_MAX else "")
    return ConfigError(
        f"ranks {named} of job {job.job_id!r} have not agreed to other weights within"
        f" {PROPOSED_S:.0f} s, so that they stay as they are: either they have not begun to read,"
        f" or their nodes do not answer, which `dataplane status {job.job_id}` shows. Try again"
        " when they do",
        job=job.job_id,
    )
