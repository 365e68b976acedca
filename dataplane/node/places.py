"""The places of this node's members: request them from the coordinator, and give them back.

Leaves are sent in the background, and a join waits for the leaves of its job: a trainer may close a
loader and at once open another one of the same job with another spec. If the join overtook the
leave, it would be refused, since the old member would still have its place.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from dataplane.base import background
from dataplane.base.trace import Trace
from dataplane.index.indexing import work_on
from dataplane.model.config import NodeConfig
from dataplane.model.errors import (
    DataplaneError,
    DataStallError,
    NotWrittenError,
    PeerLost,
    SpecMismatch,
)
from dataplane.rpc import messages
from dataplane.rpc.base import Coordination
from dataplane.rpc.membership import JoinRequest, JoinResponse, LeaveRequest, MemberProgress

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
