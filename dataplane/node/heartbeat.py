"""The node's heartbeat to the coordinator, its reaction to the answers, and readings for metrics.

If the coordinator does not answer, data keeps flowing, and the next beat tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from dataplane.base.meters import FIRST_BATCH_STAGES, StoreMeters
from dataplane.base.trace import Trace
from dataplane.base.watchdog import Watchdog
from dataplane.index.indexing import all_work
from dataplane.metrics.table import Reading
from dataplane.model.config import PROTOCOL_VERSION, VERSION, NodeConfig
from dataplane.model.errors import ConfigError, DataplaneError, LeaseExpired, PeerLost
from dataplane.node.delivery import AT_ONCE, undecided
from dataplane.node.engine import Engine
from dataplane.node.fetchers import Fetchers
from dataplane.node.jobs import Jobs
from dataplane.node.member import ServedMember, progress_of, refusal_of
from dataplane.node.neighbours import reaches_other_hosts
from dataplane.node.places import pause, unanswered
from dataplane.node.pool import WorkerPool
from dataplane.rpc import membership
from dataplane.rpc.base import Coordination
from dataplane.rpc.membership import NodeReads
from dataplane.rpc.sharing import NodeWork
from dataplane.store.connect import Stores
from dataplane.store.outage import Outages
from dataplane.transforms.columns import shown

# A lease survives two lost beats.
_BEATS_A_LEASE = 3
# Report progress this often even if leases are long, since people watch it.
_BEAT_S_MAX = 2.0
_BEAT_S_MIN = 0.25
# While ranks of a job are missing, its nodes beat more often: all of them together at most
# _GATHERING_BEATS times a second, and for _GATHERING_S at most.
_GATHERING_BEATS = 200
_GATHERING_S = 60.0
# How long a rank's first batch waits for the ranks that have not joined.
_GATHERED_S = 5.0
# Limit on the outages of stores that a beat reports.
_OUTAGES_MAX = 16
_WAITING_S = 5.0
"""Requests that wait for longer are shown in status and metrics while they wait."""
_BOUNDS = {
    "fetch": "storage",
    "decode": "decode",
    "assemble": "assemble",
    "room": "delivery memory",
}
"""Stages of a slab in the words of client/statistics.py."""
_TEXT_MAX = 300
# How long a node that ends waits for the coordinator to confirm that the node leaves.
_LEAVE_S = 2.0


def beat_after_s(
    beat_s: float, verdicts: Sequence[membership.MemberVerdict], host_count: int
) -> float:
    """Return the time from one beat to the next, usually `beat_s`. While a job gathers its ranks,
    on `host_count` hosts, nodes beat faster to learn of new ranks soon: until then they read blocks
    that the new nodes own.
    """
    if not any(
        verdict.missing_dp_ranks and verdict.missing_for_s < _GATHERING_S for verdict in verdicts
    ):
        return beat_s
    return min(beat_s, max(_BEAT_S_MIN, host_count / _GATHERING_BEATS))


class Heartbeat:
    """One node's beat."""

    def __init__(
        self,
        config: NodeConfig,
        coordination: Coordination,
        jobs: Jobs,
        engine: Engine,
        node_id: str,
        trace: Trace,
        outages: Outages,
        watchdog: Watchdog,
        reads: Callable[[], membership.NodeReads],
        data_address: str = "",
        disk_id: str = "",
    ) -> None:
        self._coordination = coordination
        self._watchdog = watchdog
        self._reads = reads
        self._outages = outages
        self._jobs = jobs
        self._engine = engine
        self._trace = trace
        self._is_embedded = config.embedded
        self._has_neighbours = reaches_other_hosts(data_address)
        self._stall_timeout_s = config.stall_timeout_s
        self._join_timeout_s = config.stall_timeout_s / 2
        self._waits_s = config.task_timeout_s
        self._coordinator = config.coordinator
        self._registered = asyncio.Event()
        self._is_draining = False
        self._last_error: PeerLost | None = None
        self._beat_s = min(config.lease_s / _BEATS_A_LEASE, _BEAT_S_MAX)
        self._verdicts: Sequence[membership.MemberVerdict] = ()
        workers = config.worker_count_most
        self._node = membership.RegisterNodeRequest(
            node_id, socket.gethostname(), os.getpid(), VERSION, PROTOCOL_VERSION,
            data_address, config.block_arena_bytes if workers else 0, workers, disk_id=disk_id,
        )  # fmt: skip

    async def register(self) -> None:
        """Register the node as soon as the coordinator answers; it may start later than the node.

        Raises:  VersionMismatch.
        """
        while True:
            try:
                answer = await self._coordination.register_node(self._node)
            except PeerLost as error:
                self._last_error = error
                await pause()
            else:
                self._beat_s = min(answer.lease_s / _BEATS_A_LEASE, _BEAT_S_MAX)
                self._registered.set()
                return

    async def leave(self) -> None:
        """Report that this node lends and makes nothing any more, so that no node waits for its
        lease to end. If the coordinator does not answer, the lease ends by itself.
        """
        if self._is_embedded or not self._node.data_address:
            return
        gone = replace(self._node, data_address="", arena_bytes=0, worker_count=0)
        with contextlib.suppress(DataplaneError, TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self._coordination.register_node(gone)

    @property
    def awaited(self) -> str:
        """Return the process that jobs have to wait for; "" if none."""
        if self._registered.is_set() or self._is_embedded:
            return ""
        return f"the coordinator at {self._coordinator}"

    async def wait_registered(self, job: str) -> None:
        """Wait until this node is registered, on behalf of a rank that opens this job.

        Raises:  DataStallError: not within the stall timeout.
        """
        timeout_s = self._stall_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._registered.wait()
        except TimeoutError as error:
            node_id = self._node.node_id
            raise unanswered(
                timeout_s, self._last_error, job, self._coordinator, node_id
            ) from error

    async def wait_gathered(self, member: ServedMember) -> None:
        """Wait for a limited time until all ranks of a launch over several hosts have joined. No
        rank makes a step before that, and a node reads the blocks of nodes that it does not know
        yet.
        """
        if not self._has_neighbours or self._is_embedded or member.host_count < 2:
            return
        most_s = min(_GATHERED_S, self._join_timeout_s / 2)
        left_s = member.opened_at + most_s - time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(left_s, 0.0)):
                await member.gathered.wait()

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            await self._due()
            try:
                await self._beat()
            except PeerLost:
                continue  # the client of the coordinator has logged it
            except DataplaneError as error:
                self._trace.failed("heartbeat", error=error)

    def tick(self, *, is_draining: bool = False) -> None:
        """Fail requests that wait for the coordinator before their trainers give up; call this
        about twice a second.
        """
        self._is_draining = is_draining
        now, node_id = time.monotonic(), self._node.node_id
        for member in list(self._jobs.members.values()):  # a copy: sending may remove members
            if member.following is not None and member.following.is_overdue(now, self._waits_s):
                error = undecided(self._waits_s, member.job_id, self._coordinator, node_id)
                member.following.refuse(error)

    async def _due(self) -> None:
        """Wait until the next beat is due. After a join, a beat is due soon, but only one for the
        joins of a whole host; this beat also brings news to nodes that joined shortly before.
        """
        hosts = max((member.host_count for member in self._jobs.members.values()), default=0)
        is_alone = self._is_embedded or hosts < 2
        beat_s = beat_after_s(self._beat_s, () if is_alone else self._verdicts, hosts)
        least_s = min(beat_s, _BEAT_S_MIN)
        await asyncio.sleep(least_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(beat_s - least_s):
                await self._jobs.joined.wait()
        self._jobs.joined.clear()

    def _draining(self) -> Iterator[NodeWork]:
        """Yield the jobs whose loaders a draining node waits for, as work that it reports."""
        if self._is_draining:
            ranks = dict[str, list[int]]()
            for member in self._jobs.members.values():
                ranks.setdefault(member.job_id, []).append(member.request.topology.rank)
            for job_id, of_job in sorted(ranks.items())[:_OUTAGES_MAX]:
                what = f"draining until ranks {shown(map(str, sorted(of_job)))} close their loaders"
                yield NodeWork(what, f"job {job_id}", 0, 0, "")

    async def _beat(self) -> None:
        members = list(self._jobs.members.values())
        replaced, progress = self._engine.replaced, tuple(map(self._progress, members))
        away, holds = _away(self._outages), self._watchdog.statistics()
        known = self._jobs.tables.known()
        request = membership.HeartbeatRequest(
            self._node, progress, away, holds.count, holds.longest_s, self._reads(), known,
            self._engine.scheduler.is_short, self._engine.scheduler.held,
            (*self._draining(), *all_work()[:_OUTAGES_MAX]),
        )  # fmt: skip
        answer = await self._coordination.heartbeat(request)
        self._learn(answer, known)
        self._verdicts = answer.verdicts
        by_id = {at.member_id: (at, of.replaced) for at, of in zip(members, progress, strict=True)}
        for verdict in answer.verdicts:
            member, rows = by_id.get(verdict.member_id, (None, ()))
            if member is not None and not member.closed:  # others have left meanwhile
                if verdict.error is None:
                    replaced.reported(member.delivery, rows)
                replaced.heard(member.delivery, verdict.replaced_count)
                if not verdict.missing_dp_ranks:
                    member.gathered.set()
                await self._heed(member, verdict)

    def _progress(self, member: ServedMember) -> membership.MemberProgress:
        """Return the progress of a member. Its trainer reports a wait only when the wait has
        ended, so during a wait the node itself adds the time so far, and the stage.
        """
        rows = self._engine.replaced.unreported(member.delivery, AT_ONCE)
        progress = replace(progress_of(member), replaced=rows)
        waits = _wait_of(member, self._engine)
        if waits is None:
            return progress
        waited_s, stage = waits
        return replace(
            progress, stall_s=progress.stall_s + waited_s, bound=_BOUNDS.get(stage, "node")
        )

    def _learn(
        self,
        answer: membership.HeartbeatResponse,
        known: tuple[membership.KnownNodes, ...],
    ) -> None:
        """Apply the answer to a heartbeat. Members may have come and gone since it was sent: news
        of a job applies only if this node serves the job or makes slabs of it.
        """
        if not (answer.jobs or answer.left):
            return
        versions = {table.job_id: table.version for table in known}
        served = {member.job_id for member in self._jobs.members.values()}
        for nodes in answer.jobs:
            if nodes.job_id in served or self._is_maker(nodes):
                self._jobs.tables.told(nodes, versions)
        for job_id in answer.left:
            if job_id not in served:
                self._jobs.tables.left(job_id, versions)

    def _is_maker(self, nodes: membership.JobNodes) -> bool:
        own_id = self._node.node_id
        return any(node.node_id == own_id and node.worker_count for node in nodes.nodes)

    async def _heed(self, member: ServedMember, verdict: membership.MemberVerdict) -> None:
        if isinstance(verdict.error, LeaseExpired):
            self._trace.noted("rejoin", job=member.job_id, member=member.member_id)
            try:
                await self._jobs.rejoin(member)
            except PeerLost:
                return
            except DataplaneError as error:
                self._end(member, error)
        elif verdict.error is not None:
            self._end(member, verdict.error)
        elif await self._follow(member, verdict):
            self._jobs.joined.set()  # beat soon: other members wait for the promise
        elif self._sees_all_ranks(member) and verdict.missing_for_s > self._join_timeout_s:
            self._end(member, self._missing(member, verdict))

    async def _follow(self, member: ServedMember, verdict: membership.MemberVerdict) -> bool:
        """Handle a verdict that may change the job; return what `heard` returns, or False if the
        member was ended since it cannot follow any more.
        """
        following, refusal = member.following, ""
        if following is None:
            return False
        if verdict.proposal is not None and following.is_new(verdict.proposal):
            refusal = await asyncio.to_thread(refusal_of, member, verdict.proposal)
        per_s = member.rate * member.request.topology.dp_size
        try:
            return following.heard(verdict, member.place_reached, per_s, refusal)
        except ConfigError as error:
            following.refuse(error)
            self._end(member, error)
            return False

    def _missing(self, member: ServedMember, verdict: membership.MemberVerdict) -> ConfigError:
        ranks, place = ", ".join(map(str, verdict.missing_dp_ranks)), member.request.topology
        others = verdict.missing_count - len(verdict.missing_dp_ranks)
        ranks += f" and {others} others" if others > 0 else ""
        advice = "start them with the same job name and service"
        if self._is_embedded:
            advice = (
                "start all of them with one launcher or from one process, or set MASTER_ADDR and "
                "MASTER_PORT to the same values for all of them, or run `dataplane serve` and "
                "pass service="
            )
        return ConfigError(
            f"job {member.job_id!r}: dp ranks {ranks} of {place.dp_size} have not joined within "
            f"{verdict.missing_for_s:.0f} s: {advice}, or correct dp_size (this rank's place is "
            f"from {place.source or 'its own message'})",
            field="dp_size",
        )

    def _sees_all_ranks(self, member: ServedMember) -> bool:
        """Whether all ranks join here. An embedded node is its own coordinator, where ranks of
        other hosts never join.
        """
        place = member.request.topology
        return not self._is_embedded or place.world_size == place.local_world_size

    def _end(self, member: ServedMember, error: DataplaneError) -> None:
        """Answer the member's waiting requests, and its next one, with this error."""
        rank = member.request.topology.rank
        self._trace.failed("rank ended", job=member.job_id, rank=rank, error=error)
        member.error = error
        member.gathered.set()
        # A copy: sending may find that the trainer is gone, which closes its streams.
        for stream in list(member.streams.values()):
            self._engine.refuse_stream(stream, error)


def _away(outages: Outages) -> tuple[membership.StoreOutage, ...]:
    now = time.time()
    return tuple(
        membership.StoreOutage(
            outage.store[:_TEXT_MAX], max(0.0, now - outage.since), outage.error[:_TEXT_MAX]
        )
        for outage in outages.now(now)[:_OUTAGES_MAX]
    )


# -- readings of metrics ---------------------------------------------------------------------------
#
# A node's counts as readings of metrics: everything is counted elsewhere, and only read here, on
# the event loop, in time proportional to the number of readings.


_RSS_ANON = re.compile(r"^RssAnon:\s+(\d+) kB$", re.MULTILINE)


def readings_of_node(
    jobs: Jobs,
    engine: Engine,
    reads: NodeReads,
    pool: WorkerPool,
    fetchers: Fetchers,
    stores: Stores,
    outages: Outages,
    watchdog: Watchdog,
) -> Iterator[Reading]:
    """Yield all readings of a node."""
    yield from _of_ranks(jobs, engine)
    yield from _of_bytes(reads)
    yield from _of_memory(engine, jobs)
    yield from _of_stores(fetchers.stores, stores, outages)
    yield from _of_processes(pool, fetchers, watchdog)


def _of_ranks(jobs: Jobs, engine: Engine) -> Iterator[Reading]:
    """Yield the readings of the jobs and ranks that are served now."""
    members = jobs.members.values()
    for (job, rank), meter in {
        (member.job_id, str(member.request.topology.rank)): member.meter for member in members
    }.items():
        for stage, wait_us in meter.waits_us.items():
            yield Reading("dataplane_exposed_seconds_total", wait_us / 1e6, (job, rank, stage))
        for stage, took_s in zip(FIRST_BATCH_STAGES, meter.first_batch_s, strict=False):
            yield Reading("dataplane_first_batch_seconds", took_s, (job, rank, stage))
        yield Reading("dataplane_samples_total", meter.samples, (job, rank))
    ahead: dict[tuple[str, str], int] = {}
    for member in members:
        at = member.job_id, str(member.request.topology.rank)
        if waits := _wait_of(member, engine):
            yield Reading("dataplane_waiting_seconds", waits[0], (*at, waits[1]))
        steps = sum(map(engine.scheduler.steps_ahead, member.streams))
        ahead[at] = ahead.get(at, 0) + steps
    yield from (Reading("dataplane_steps_ahead", steps, at) for at, steps in ahead.items())
    for job, served in {member.job_id: member for member in members}.items():
        for stage, took in served.meter.job.stages.items():
            yield Reading("dataplane_stage_seconds", took, (job, stage))
        yield Reading("dataplane_replaced_rows_total", engine.replaced.count(job), (job,))
        yield from _of_sources(served)


def _wait_of(member: ServedMember, engine: Engine) -> tuple[float, str] | None:
    """Return the longest wait of a member's requests, and its stage; None if the wait is short."""
    waits = (engine.scheduler.waiting(stream) for stream in member.streams)
    longest = max(filter(None, waits), default=(0.0, ""))
    return longest if longest[0] > _WAITING_S else None


def _of_sources(member: ServedMember) -> Iterator[Reading]:
    """Yield readings of the packs, and of the sources of a mixture, of a member's job."""
    job, mixture = member.job_id, member.spec.mixture
    names = [""] if mixture is None else [source.name for source in mixture.sources]
    for name, opened in zip(names, member.opened.opened, strict=True):
        if opened.packing is not None:
            fill = 1 - opened.packing.padding
            yield Reading("dataplane_pack_fill_ratio", fill, (job, name))
    if mixture is not None and member.mix is not None:
        shares = member.mix.until(member.epoch, member.cursor)[-1].shares
        for name, share in zip(names, shares, strict=True):
            yield Reading("dataplane_mixture_asked_ratio", share / sum(shares), (job, name))
        for name, count in zip(names, member.meter.job.samples_by_source, strict=False):
            yield Reading("dataplane_mixture_samples_total", count, (job, name))


def _of_bytes(reads: NodeReads) -> Iterator[Reading]:
    """Yield how many bytes came from where, and how much was sent to other nodes."""
    for source, count in (
        ("origin", reads.read_bytes),
        ("neighbour", reads.neighbour_bytes),
        ("disk", reads.disk_bytes),
        ("memory", reads.memory_bytes),
    ):
        yield Reading("dataplane_read_bytes_total", count, (source,))
    yield Reading("dataplane_hedged_bytes_total", reads.hedged_bytes)
    yield Reading("dataplane_lent_bytes_total", reads.lent_bytes)
    yield Reading("dataplane_made_slabs_total", reads.made_slabs)


def _of_stores(meters: StoreMeters, own: Stores, outages: Outages) -> Iterator[Reading]:
    """Yield the requests of fetchers, and those of this process, which lists and indexes."""
    for store, counts in own.take_counts():
        meters.add(store, counts)
    for store, total in meters.by_store.items():
        yield Reading("dataplane_store_request_seconds", total.took, (store,))
        yield Reading("dataplane_store_retries_total", total.retries, (store,))
        for error, count in total.errors.items():
            yield Reading("dataplane_store_errors_total", count, (store, error))
    now = time.time()
    for outage in outages.now(now)[:_OUTAGES_MAX]:
        away_s = max(0.0, now - outage.since)
        yield Reading("dataplane_store_away_seconds", away_s, (outage.store,))


def _of_memory(engine: Engine, jobs: Jobs) -> Iterator[Reading]:
    """Yield how much of the node's memory each holder has, and how much was evicted."""
    scheduler, held = engine.scheduler, engine.scheduler.held
    slabs, excerpts = scheduler.kept_slab_bytes, scheduler.excerpt_bytes
    holders = {
        "blocks": held.memory_bytes - slabs - excerpts,
        "slabs": slabs,
        "excerpts": excerpts,
        "delivery": jobs.delivery_bytes,
    }
    for holder, size in holders.items():
        yield Reading("dataplane_arena_bytes", size, (holder,))
    yield Reading("dataplane_arena_limit_bytes", held.memory_limit_bytes)
    yield Reading("dataplane_disk_bytes", held.disk_bytes)
    evicted, needed = scheduler.evictions
    yield Reading("dataplane_evictions_total", evicted - needed, ("spent",))
    yield Reading("dataplane_evictions_total", needed, ("needed",))


def _of_processes(pool: WorkerPool, fetchers: Fetchers, watchdog: Watchdog) -> Iterator[Reading]:
    """Yield readings of the processes that a node has started."""
    for kind, processes in (("worker", pool), ("fetcher", fetchers)):
        pids, at = processes.pids, (kind,)
        yield Reading("dataplane_processes", len(pids), at)
        yield Reading("dataplane_process_starts_total", processes.start_count, at)
        yield Reading("dataplane_process_deaths_total", processes.death_count, at)
        yield Reading("dataplane_process_memory_bytes", partial(_own_bytes, pids), at)
    yield Reading("dataplane_loop_holds_total", watchdog.statistics().count)


def _own_bytes(pids: Sequence[int]) -> int:
    """Return the memory of these processes that they share with nobody; some may be gone."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
            size = _RSS_ANON.search(text)
            total += 0 if size is None else int(size[1]) * 1024
    return total
