"""The members of this node at the coordinator: their places, and the changes that they follow.

Places are requested from the coordinator, and given back.

Leaves are sent in the background, and a join waits for the leaves of its job: a trainer may close a
loader and at once open another one of the same job with another spec. If the join overtook the
leave, it would be refused, since the old member would still have its place.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from dataplane.base import background
from dataplane.base.trace import Trace
from dataplane.index.indexing import work_on
from dataplane.model.changes import MIX, TOMBSTONE, EpochSteps, changes_of, mix_of_entry
from dataplane.model.config import NodeConfig
from dataplane.model.errors import (
    ConfigError,
    DataplaneError,
    DataStallError,
    NotWrittenError,
    PeerLost,
    SpecMismatch,
)
from dataplane.model.ledger import LedgerEntry, LedgerPosition
from dataplane.model.records import TakenMidway
from dataplane.node.delivery import Send
from dataplane.rpc import messages
from dataplane.rpc.base import Coordination
from dataplane.rpc.membership import (
    JoinRequest,
    JoinResponse,
    LeaveRequest,
    MemberProgress,
    MemberVerdict,
    MixPromise,
    MixProposal,
)
from dataplane.rpc.messages import FromNodeBody, Slab, WeightsAsked

# -- calls until the coordinator answers ----------------------------------------------------------
#
# Wait for a coordinator that does not answer yet, since it may start later than its nodes; and for
# other ranks, if a trainer has closed a loader and opens another one of the same job.

T = TypeVar("T")

_PAUSE_S_MAX = 1.0
_REOPENING_S = 60.0
_STAGE_S = 1500.0
"""How long a rank that begins a later stage waits for ranks that are still in the stage before, for
example since they save a checkpoint: longer than the ranks wait for one another."""


async def pause() -> None:
    """Pause between two attempts. It is short, since each attempt itself waits for an answer."""
    await asyncio.sleep(random.uniform(0, _PAUSE_S_MAX))  # noqa: S311 - jitter is no secret


async def patiently(
    ask: Callable[[], Awaitable[T]],
    timeout_s: float,
    *,
    job: str,
    coordinator: str,
    node: str,
    reopening_s: float = 0.0,
) -> T:
    """Return the answer of `ask`, which is called again until the coordinator answers, and for
    `reopening_s` while other ranks have not left a job that is reopened with other arguments.

    Raises:  DataStallError: not within `timeout_s`.  DataplaneError: as `ask`.
    """
    began = time.monotonic()
    while True:
        try:
            return await ask()
        except PeerLost as error:
            waited_s = time.monotonic() - began
            if waited_s >= timeout_s:
                raise unanswered(waited_s, error, job, coordinator, node) from error
        except SpecMismatch as error:
            if not error.reopened or time.monotonic() - began >= reopening_s:
                raise
        await pause()


def unanswered(
    waited_s: float, last: PeerLost | None, job: str, coordinator: str, node: str
) -> DataStallError:
    """Return the error for a rank that waits for the coordinator; `last` ended the last attempt."""
    why = "" if last is None else f" ({last})"
    sentence = (
        f"the coordinator at {coordinator} has not answered node {node} for {waited_s:.0f} s{why}. "
        "Start it (`dataplane serve --coordinator`), or correct the node's --join"
    )
    if isinstance(last, NotWrittenError):
        sentence = f"for {waited_s:.0f} s, {last}"
    return DataStallError(
        f"job {job!r} cannot be joined: {sentence}",
        stage="join",
        job=job,
        coordinator=coordinator,
        node=node,
        last_error="" if last is None else str(last),
    )


# -- places ----------------------------------------------------------------------------------------

_trace = Trace("node")

_LEAVES_S_MAX = 15.0
"""The longest wait for leaves; the client of the coordinator gives up a leave earlier."""


class NodePlaces:
    """Joins and leaves of one node."""

    def __init__(self, config: NodeConfig, coordination: Coordination, node_id: str) -> None:
        self._config, self._coordination, self._node_id = config, coordination, node_id
        self._leaving: dict[str, set[asyncio.Task[None]]] = {}
        self._refused = Counter[str]()
        self._closed = False

    def refused_count(self, member_id: str) -> int:
        """Return how often a member that waits for other ranks to leave its job was refused."""
        return self._refused[member_id]

    def progress_on(self, request: messages.OpenJob) -> messages.Working | None:
        """Return the progress on the datasets of a job that is being opened and of its later
        stages, or that the job waits for ranks of its former stage; None if there is none.
        """
        if refused_count := self.refused_count(request.member_id):
            what = "waiting for ranks that are in the former stage"
            return messages.Working(what, refused_count, unit="attempts")
        urls = set[str]()
        for of_stage in (request, *(later for _, later in request.ahead)):
            sources = () if of_stage.mixture is None else of_stage.mixture.sources
            urls.update(of_stage.source.urls, *(source.source.urls for source in sources))
        work = work_on(urls)
        if work is None:
            return None
        return messages.Working(work.what, work.done, work.total, work.unit, work.left_s)

    async def join(self, request: JoinRequest) -> JoinResponse:
        """Take a place, once the coordinator has answered the leaves of this job.

        Raises:  DataStallError: it does not answer within the stall timeout.  As
        `Coordination.join`.
        """
        timeout_s = self._config.stall_timeout_s
        is_later = bool(request.spec.stages)
        reopening_s = _STAGE_S if is_later else min(timeout_s / 2, _REOPENING_S)
        if leaving := self._leaving.get(request.job_id):
            await asyncio.wait(set(leaving), timeout=min(timeout_s, _LEAVES_S_MAX))
        try:
            return await patiently(
                partial(self._join_once, request),
                timeout_s,
                job=request.job_id,
                coordinator=self._config.coordinator,
                node=self._node_id,
                reopening_s=reopening_s,
            )
        except asyncio.CancelledError:  # the trainer went away, and may have its place already
            self.leave(request.job_id, request.member_id, lost=True)
            raise
        finally:
            del self._refused[request.member_id]

    async def _join_once(self, request: JoinRequest) -> JoinResponse:
        try:
            return await self._coordination.join(request)
        except SpecMismatch as error:
            self._refused[request.member_id] += bool(error.reopened)
            raise

    async def rejoin(self, request: JoinRequest) -> JoinResponse:
        """Take a place again after a lease ran out: one attempt. Raises as `Coordination.join`."""
        return await self._coordination.join(request)

    def leave(
        self,
        job_id: str,
        member_id: str,
        *,
        lost: bool,
        progress: MemberProgress | None = None,
    ) -> None:
        """Give a place back, in the background. If the coordinator does not answer now, the lease
        ends by itself.
        """
        if self._closed:
            return
        telling = self._tell(LeaveRequest(job_id, member_id, lost, progress, self._node_id))
        task = background.start("leave", telling)
        self._leaving.setdefault(job_id, set()).add(task)
        task.add_done_callback(partial(self._told, job_id))

    async def close(self) -> None:
        """Wait for all leaves, which end by themselves. When a node stops, its other
        members keep their places, and rejoin through another node.
        """
        self._closed = True
        tasks = [task for tasks in self._leaving.values() for task in tasks]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tell(self, leaving: LeaveRequest) -> None:
        try:
            await self._coordination.leave(leaving)
        except PeerLost:
            return
        except DataplaneError as error:  # such as a full disk
            _trace.failed("leave", job=leaving.job_id, error=error)

    def _told(self, job_id: str, task: asyncio.Task[None]) -> None:
        self._leaving[job_id].discard(task)
        if not self._leaving[job_id]:
            del self._leaving[job_id]


# -- changes that a rank follows ------------------------------------------------------------------
#
# Weights of a mixture, and rows to leave out.
#
# People may change the weights of a mixture, or take rows out, while a member reads. This section
# decides how far the member's trainer may read, and which changes it must know before it reads on.
# No clock, no I/O.
#
# Invariants:
# 1. A slab with positions after a change is sent only to streams that know the change.
# 2. From a promise until its outcome is known, no slab with positions after the promised place
#    is sent. Such slabs wait; later they are sent or released. No error ends the promise.


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
