"""A coordinator in this process: the state machine, its journal, and the clock that drives them.

This module decides nothing: every call becomes an event, and every decision becomes an answer and a
write. The gRPC server calls it, and so does a node that is its own coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from dataplane.base import background
from dataplane.base.trace import Trace, tell_suppressed
from dataplane.coordinator.manifests import ManifestTurns
from dataplane.coordinator.records import Answer, Event, Key, Record, Tick, Write, key_of
from dataplane.coordinator.state import CoordinatorState
from dataplane.coordinator.store import MEMORY, JobStore
from dataplane.metrics.table import Reading
from dataplane.model.config import PROTOCOL_VERSION
from dataplane.model.errors import ClosedError, ConfigError, DataplaneError
from dataplane.rpc.membership import (
    ChangeRequest,
    ChangeResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    JobNodes,
    JoinRequest,
    JoinResponse,
    LeaveRequest,
    LeaveResponse,
    LedgerRequest,
    LedgerResponse,
    RegisterNodeRequest,
    RegisterNodeResponse,
    StatusRequest,
    StatusResponse,
)
from dataplane.rpc.sharing import ShareManifestRequest, ShareManifestResponse

if TYPE_CHECKING:
    from dataplane.security.node_identity import NeighbourKeys


_trace, _audit = Trace("coordinator"), Trace("security")

# -- journal -----------------------------------------------------------------------------------
#
# Pending writes to the store, merged by record and committed in groups by one thread.
#
# Invariants:
# 1. Records reach the disk in the order of the decisions, and a decision's records together.
# 2. When `commit()` returns, everything that was added before the call is on disk.
# 3. A failed commit loses nothing: its writes wait for the next one.
# 4. The number of pending writes is bounded by the number of records.


class Journal:
    """The store, as used from the event loop. Joins that arrive together share one fsync."""

    def __init__(self, path: str) -> None:
        self._path = path
        # SQLite's connection is made, used and closed by this one thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="coordinator-store")
        self._store: JobStore | None = None
        self._waiting: dict[Key, Write] = {}
        self._added = 0
        self._committed = 0
        self._commit: asyncio.Task[None] | None = None
        self._fails_since: float | None = None

    async def open(self) -> list[Record]:
        """Open the store and read it.

        Raises:  ConfigError: as `JobStore`.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._open)
        except BaseException:
            self._thread.shutdown(wait=False)
            raise

    def _open(self) -> list[Record]:
        store = JobStore(self._path)
        try:
            records = store.load()
        except BaseException:
            store.close()
            raise
        self._store = store
        return records

    def add(self, writes: Iterable[Write]) -> None:
        """Add a decision's writes to the next commit."""
        for write in writes:
            self._waiting[key_of(write)] = write
            self._added += 1

    async def commit(self) -> None:
        """Return when everything added so far is on disk.

        Raises:  NotWrittenError: the disk is full or failed; the writes wait for the next commit.
        """
        wanted = self._added
        while self._committed < wanted:
            if self._commit is None or self._commit.done():
                self._commit = asyncio.create_task(self._commit_waiting())
                # Retrieve a failure here, too: if all waiting callers were cancelled, asyncio
                # would log it as never retrieved.
                self._commit.add_done_callback(lambda done: done.cancelled() or done.exception())
            # A cancelled caller must not cancel the commit that others wait for.
            await asyncio.shield(self._commit)

    async def _commit_waiting(self) -> None:
        writes, self._waiting = self._waiting, {}
        target = self._added
        store = self._store
        assert store is not None, "commit() comes after open()"
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, store.write, tuple(writes.values()))
        except BaseException as error:
            self._waiting = writes | self._waiting
            if isinstance(error, DataplaneError) and self._fails_since is None:
                self._fails_since = time.monotonic()
                _trace.failed("jobs that open wait for the database", error=error)
            raise
        self._committed = target
        if self._fails_since is not None:
            away_s, self._fails_since = time.monotonic() - self._fails_since, None
            _trace.failed("the database is written again", after_s=round(away_s, 1))

    async def close(self) -> None:
        """Close the store; may be called twice. Pending writes are dropped."""
        if self._commit is not None and not self._commit.done():
            await asyncio.wait([self._commit])
        if self._store is not None:
            store, self._store = self._store, None
            await asyncio.get_running_loop().run_in_executor(self._thread, store.close)
        self._thread.shutdown(wait=False)


# -- keyed -------------------------------------------------------------------------------------
#
# Add the key of a job to the list of its nodes before the list is sent to a node.

_JOBS_MAX = 64


class KeyedNodes:
    """Adds keys to the lists of jobs' nodes. The same list always gives the same keyed object, so
    that the object is serialized once for all receivers. Without `keys`, this process makes a
    secret of its own when the first key is needed, so that an embedded coordinator, whose node has
    no neighbours, need not import the module of keys.
    """

    def __init__(self, keys: NeighbourKeys | None) -> None:
        self._keys = keys
        self._made: OrderedDict[str, tuple[JobNodes, JobNodes]] = OrderedDict()

    def of(self, nodes: JobNodes) -> JobNodes:
        """Return the list with its key; unchanged if it has no nodes."""
        if not nodes.nodes:
            return nodes
        before = self._made.get(nodes.job_id)
        if before is not None and before[0] is nodes:
            return before[1]
        key = self.key(nodes.job_id, nodes.generation, nodes.only_under)
        keyed = replace(nodes, key=key)
        self._made[nodes.job_id] = (nodes, keyed)
        self._made.move_to_end(nodes.job_id)
        if len(self._made) > _JOBS_MAX:
            self._made.popitem(last=False)
        return keyed

    def key(self, job_id: str, generation: int, only_under: tuple[str, ...] = ()) -> bytes:
        """Return the key; see `NeighbourKeys.key`."""
        if self._keys is None:
            from dataplane.security.node_identity import own_keys

            self._keys = own_keys()
        return self._keys.key(job_id, generation, only_under)


T = TypeVar("T")
LEASE_S_MIN = 0.1


class CoordinatorConfig(Struct, frozen=True):
    """The settings of a coordinator. A crash may lose progress younger than `progress_flush_s`,
    which the next heartbeat restores; joins and leaves are never lost. `key_file` stores the secret
    for neighbours' keys, and is created if it does not exist; with "", the secret ends with this
    process.
    """

    version: str
    database: str = MEMORY
    lease_s: float = 30.0
    progress_flush_s: float = 5.0
    protocol: int = PROTOCOL_VERSION
    key_file: str = ""


def steady_wall_clock() -> Callable[[], float]:
    """Return a clock that starts at the current seconds since 1970 and then runs evenly, even if
    the wall clock is set.
    """
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


class Coordinator:
    """An implementation of `Coordination` in this process. Call `await start()`, use it, then call
    `await close()`.
    """

    def __init__(self, config: CoordinatorConfig, clock: Callable[[], float] | None = None) -> None:
        if config.lease_s < LEASE_S_MIN:
            raise ConfigError(
                f"lease_s is {config.lease_s:g}: choose at least {LEASE_S_MIN:g} s",
                field="lease_s",
            )
        self.config = config
        self.coordinator_id = uuid.uuid4().hex
        self._clock = clock or steady_wall_clock()
        self._journal = Journal(config.database)
        self._state: CoordinatorState | None = None
        self._keyed: KeyedNodes | None = None
        self._manifests = ManifestTurns(config.lease_s)
        self._ticking: asyncio.Task[None] | None = None
        self._flushed_at = 0.0

    async def start(self) -> None:
        """Read the store. Every member with a place gets a full lease from now on.

        Raises:  ConfigError: the store is locked, damaged, or of a newer version; the secret of
        the keys cannot be read, or others can read it.
        """
        keys = None
        if self.config.key_file:
            from dataplane.security.node_identity import keys_in

            keys = await asyncio.to_thread(keys_in, Path(self.config.key_file))
        self._keyed = KeyedNodes(keys)
        records = await self._journal.open()
        self._state = CoordinatorState(
            coordinator_id=self.coordinator_id,
            version=self.config.version,
            protocol=self.config.protocol,
            lease_s=self.config.lease_s,
            now=self._clock(),
            records=records,
            # The id of this process serves as salt if the secret lasts only as long as the process.
            salt=keys.salt if keys is not None else self.coordinator_id.encode(),
        )
        self._ticking = background.start("coordinator's clock", self._keep_ticking())

    async def close(self) -> None:
        """Write pending records and close the store; may be called twice."""
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking
            self._ticking = None
        if self._state is not None:
            self._state = None
            with contextlib.suppress(DataplaneError):
                await self._journal.commit()
        await self._journal.close()

    async def register_node(self, request: RegisterNodeRequest) -> RegisterNodeResponse:
        """Implement `Coordination.register_node`."""
        return await self._ask(request, RegisterNodeResponse)

    async def join(self, request: JoinRequest) -> JoinResponse:
        """Implement `Coordination.join`."""
        answer = await self._ask(request, JoinResponse)
        return replace(answer, nodes=self._with_key(answer.nodes)) if answer.nodes else answer

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        """Implement `Coordination.heartbeat`."""
        answer = await self._ask(request, HeartbeatResponse)
        return (
            replace(answer, jobs=tuple(map(self._with_key, answer.jobs))) if answer.jobs else answer
        )

    async def leave(self, request: LeaveRequest) -> LeaveResponse:
        """Implement `Coordination.leave`."""
        return await self._ask(request, LeaveResponse)

    async def share_manifest(self, request: ShareManifestRequest) -> ShareManifestResponse:
        """Implement `Coordination.share_manifest`."""
        if self._keyed is None:
            raise ClosedError("the coordinator is not running: call start() first")
        answer = self._manifests.decide(request, self._clock())
        if not answer.line:
            return answer
        return replace(answer, key=self._keyed.key(answer.line, answer.generation))

    async def status(self, request: StatusRequest) -> StatusResponse:
        """Implement `Coordination.status`."""
        return await self._ask(request, StatusResponse)

    async def ledger(self, request: LedgerRequest) -> LedgerResponse:
        """Implement `Coordination.ledger`."""
        return await self._ask(request, LedgerResponse)

    async def change(self, request: ChangeRequest) -> ChangeResponse:
        """Implement `Coordination.change`."""
        answer = await self._ask(request, ChangeResponse)
        if answer.entry is not None:
            made, job = answer.entry, request.job_id
            _audit.noted("job changed", job=job, by=made.by, kind=made.kind, entry=made.seq)
        return answer

    def readings(self) -> Iterator[Reading]:
        """Yield the coordinator's metrics; nothing while it is not running."""
        return iter(()) if self._state is None else self._state.readings()

    async def tick(self) -> None:
        """End expired leases, and write progress that has waited long enough."""
        self._decide(Tick())
        now = self._clock()
        if now - self._flushed_at >= self.config.progress_flush_s:
            self._flushed_at = now
            await self._journal.commit()

    async def _ask(self, event: Event, expected: type[T]) -> T:
        answer, durable = self._decide(event)
        if durable:
            # Commit even if this event wrote nothing: it may repeat an event whose write failed.
            await self._journal.commit()
        if isinstance(answer, DataplaneError):
            raise answer
        assert isinstance(answer, expected)
        return answer

    def _with_key(self, nodes: JobNodes) -> JobNodes:
        assert self._keyed is not None, "it has started"
        return self._keyed.of(nodes)

    def _decide(self, event: Event) -> tuple[Answer, bool]:
        if self._state is None:
            raise ClosedError("the coordinator is not running: call start() first")
        decision = self._state.decide(event, self._clock())
        self._journal.add(decision.writes)
        for claim in decision.claims:
            by, member = claim.node_id, claim.member
            _audit.refused(
                "member refused",
                by=by,
                node=by,
                job=member.job_id,
                member=member.member_id,
                why=f"it has joined through the node {member.node_id} last",
            )
        return decision.answer, decision.durable

    async def _keep_ticking(self) -> None:
        period_s = min(1.0, self.config.lease_s / 10)
        while True:
            await asyncio.sleep(period_s)
            tell_suppressed()
            with contextlib.suppress(DataplaneError):
                await self.tick()
