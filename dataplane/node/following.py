"""Changes that a rank follows: weights of a mixture, and rows to leave out.

People may change the weights of a mixture, or take rows out, while a member reads. This section
decides how far the member's trainer may read, and which changes it must know before it reads on.
No clock, no I/O.

Invariants:
1. A slab with positions after a change is sent only to streams that know the change.
2. From a promise until its outcome is known, no slab with positions after the promised place
   is sent. Such slabs wait; later they are sent or released. No error ends the promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dataplane.model.changes import MIX, TOMBSTONE, EpochSteps, changes_of, mix_of_entry
from dataplane.model.errors import ConfigError, DataplaneError
from dataplane.model.ledger import LedgerEntry, LedgerPosition
from dataplane.model.records import TakenMidway
from dataplane.node.delivery import Send
from dataplane.rpc.membership import MemberVerdict, MixPromise, MixProposal
from dataplane.rpc.messages import FromNodeBody, Slab, WeightsAsked

AHEAD_S = 5.0
"""About how long it takes until all nodes have heard of a proposal, and of its outcome."""
_CURSOR_MAX = (1 << 63) - 1
_CANNOT = (
    "they do not change while it runs, since it is a ShardedIterableDataset, whose batches other"
    " processes make, or a pipeline stage without columns. Stop the job, and edit its Mixture"
)


class Following:
    """The promises of one member. `release` frees a slab."""

    def __init__(
        self,
        entries: Iterable[LedgerEntry],
        global_batch: int,
        release: Callable[[int], None],
        *,
        follows: bool,
    ) -> None:
        self.entries = sorted(entries, key=lambda entry: entry.seq)
        self.promise: MixPromise | None = None
        self._global_batch, self._release, self._follows = global_batch, release, follows
        self._handed = LedgerPosition(0, 0)
        self._waiting: list[tuple[Send, int, Slab]] = []
        self._waits_since: float | None = None

    @property
    def known_entry(self) -> int:
        """The number of the last ledger entry that this member knows; 0 if there is none."""
        return self.entries[-1].seq if self.entries else 0

    def sending(self, epoch: int, steps: EpochSteps, known_entry: int, send: Send) -> Send:
        """Wrap `send`, which answers the requests of a stream of these steps, to keep promises."""

        def answer(request_id: int, body: FromNodeBody) -> None:
            unknown = [entry for entry in self.entries if entry.seq > known_entry]
            if not isinstance(body, Slab):
                # An error may be that of a shard which the stream leaves out once it knows.
                is_error = isinstance(body, DataplaneError) and unknown and self._follows
                send(request_id, WeightsAsked(tuple(unknown)) if is_error else body)
                return
            end = LedgerPosition(epoch, steps.after(body.batches[-1].step + 1))
            if any(entry.position < end for entry in unknown) and self._follows:
                self._release(body.slab_id)
                send(request_id, WeightsAsked(tuple(unknown)))
            elif self.promise is not None and self.promise.position < end:
                self._waiting.append((answer, request_id, body))
            else:
                self._handed = max(self._handed, end)
                send(request_id, body)

        return answer

    def gone(self, known_entry: int) -> tuple[TakenMidway, ...]:
        """Return the rows that were removed since the launch began, up to this ledger entry."""
        return tuple(
            TakenMidway(
                entry.position.epoch, entry.position.cursor, changes_of((entry,)).tombstones
            )
            for entry in self.entries
            if entry.kind == TOMBSTONE and entry.seq <= known_entry
        )

    def is_new(self, proposal: MixProposal | None) -> bool:
        """Whether this proposal still needs an answer."""
        had = self.promise
        return proposal is not None and (had is None or had.request != proposal.request)

    def heard(
        self,
        verdict: MemberVerdict,
        reached: LedgerPosition | None,
        per_s: float,
        refusal: str = "",
    ) -> bool:
        """Handle the coordinator's verdict on a member that has reached this place, at a speed of
        `per_s` samples a second over all ranks. Return whether the member has made a promise, for
        which others wait. A member makes no promise before it has begun to read, since nobody here
        knows where it will begin. `refusal` says why the member cannot read the proposed weights.

        Raises:  ConfigError: the member has read on past rows that others have taken out.
        """
        self._learn(verdict.entries)
        proposal, had = verdict.proposal, self.promise
        if proposal is None:
            self.promise = None
        elif self.is_new(proposal):
            self.promise = None
            if not self._follows:
                self.promise = MixPromise(proposal.request, self._handed, refusal=_CANNOT)
            elif reached is not None:
                at = max(self._handed, reached)
                self.promise = self._promised(proposal, at, per_s, refusal)
        if self.promise is not had or verdict.entries:
            waiting, self._waiting = self._waiting, []
            for answer, request_id, slab in waiting:
                answer(request_id, slab)
        if not self._waiting:
            self._waits_since = None
        return self.promise is not None and self.promise is not had

    def _learn(self, entries: Sequence[LedgerEntry]) -> None:
        known = self.known_entry
        new = [entry for entry in entries if entry.seq > known]
        for entry in new:
            if entry.kind == TOMBSTONE and entry.position < self._handed:
                raise _passed(entry, self._handed)
        self.entries += new
        for entry in entries:  # so that a damaged entry fails here, not in a trainer's loop
            mix_of_entry(entry) if entry.kind == MIX else changes_of((entry,))

    def is_overdue(self, now: float, patience_s: float) -> bool:
        """Whether slabs have waited for `patience_s`, counted from the first call that saw them."""
        if not self._waiting:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now
        return self._waits_since is not None and now - self._waits_since >= patience_s

    def refuse(self, error: DataplaneError) -> None:
        """Answer waiting requests with this error."""
        waiting, self._waiting, self._waits_since = self._waiting, [], None
        for answer, request_id, slab in waiting:
            self._release(slab.slab_id)
            answer(request_id, error)

    def _promised(
        self, proposal: MixProposal, handed: LedgerPosition, per_s: float, refusal: str
    ) -> MixPromise:
        """Promise that nothing new is sent beyond the resulting place."""
        if refusal:
            return MixPromise(proposal.request, handed, refusal=refusal)
        if proposal.at is not None:
            return MixPromise(proposal.request, max(handed, proposal.at), handed > proposal.at)
        batch = self._global_batch  # counted from `handed`, which may not be a multiple of it
        ahead = handed.cursor + -(-int(per_s * AHEAD_S) // batch) * batch
        cursor = max(handed.cursor, min(ahead, _CURSOR_MAX))
        return MixPromise(proposal.request, LedgerPosition(handed.epoch, cursor))


def _passed(entry: LedgerEntry, handed: LedgerPosition) -> ConfigError:
    at = entry.position
    return ConfigError(
        f"rows were taken out of this job from sample {at.cursor} of epoch {at.epoch} on (entry"
        f" {entry.seq} of its ledger) while the node of this rank could not reach the coordinator,"
        f" and the rank was given samples up to {handed.cursor} of epoch {handed.epoch}: stop this"
        " launch, and resume the job from its checkpoint",
    )
