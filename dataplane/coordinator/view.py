"""The coordinator's state, in the form that people see."""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from msgspec.structs import replace

from dataplane.base.units import some_of
from dataplane.coordinator.records import Member, NodeRecord, Phase
from dataplane.coordinator.roster import Roster
from dataplane.metrics.table import Reading
from dataplane.model.errors import ConfigError
from dataplane.model.records import Topology
from dataplane.rpc.membership import (
    JobNodes,
    JobStatus,
    LedgerResponse,
    MemberStatus,
    NodeStatus,
    StatusResponse,
)

_JOBS_MAX, _NODES_MAX = 1024, 1024
_OF_JOBS_MAX = 2048
"""How many members an answer has at most, over all jobs; also how many nodes of jobs."""
_SOURCE_LENGTH_MAX = 128


def status(
    job_id: str,
    *,
    version: str,
    coordinator_id: str,
    rosters: Mapping[str, Roster],
    nodes: Collection[NodeRecord],
    nodes_of: Callable[[Roster], JobNodes | None],
    clock: float,
    now: float,
) -> StatusResponse:
    """Return one job (or for "" the running and the most recently active ones, sorted by name) and
    the nodes with the most recent heartbeats.

    Raises:  ConfigError: no job has that name.
    """
    chosen = [named(job_id, rosters)] if job_id else _active(rosters)
    told = [nodes_of(roster) for roster in chosen]
    members = _shares([len(roster.members) for roster in chosen])
    neighbours = _shares([0 if one is None else len(one.nodes) for one in told])
    last = heapq.nlargest(_NODES_MAX, nodes, key=lambda node: node.seen_at)
    return StatusResponse(
        version=version,
        coordinator_id=coordinator_id,
        jobs=tuple(map(_job, chosen, told, members, neighbours, [clock] * len(chosen))),
        nodes=tuple(
            _node(node, now) for node in sorted(last, key=lambda node: node.request.node_id)
        ),
        node_count=len(nodes),
        job_count=1 if job_id else len(rosters),
    )


def readings(
    rosters: Mapping[str, Roster], nodes: Collection[NodeRecord], lease_s: float, now: float
) -> Iterator[Reading]:
    """Yield the metrics of jobs that are not idle, for at most as many jobs as a status shows."""
    active = [roster for roster in rosters.values() if not roster.is_idle]
    states = Counter(map(_state, active))
    for state in ("forming", "running"):
        yield Reading("dataplane_jobs", states[state], (state,))
    yield Reading("dataplane_nodes", sum(now - node.seen_at < lease_s for node in nodes))
    for roster in active[:_JOBS_MAX]:
        job, at = roster.job, (roster.job.job_id,)
        yield Reading("dataplane_job_generation", job.generation, at)
        yield Reading("dataplane_job_leases", roster.joined_count, at)
        yield Reading("dataplane_job_missing_ranks", roster.missing_count, at)
        yield Reading("dataplane_job_epoch", job.epoch, at)
        yield Reading("dataplane_job_consumed_samples", job.cursor, at)


def _active(rosters: Mapping[str, Roster]) -> list[Roster]:
    shown = heapq.nsmallest(
        _JOBS_MAX, rosters.values(), key=lambda roster: (roster.is_idle, -roster.job.active_at)
    )
    return sorted(shown, key=lambda roster: roster.job.job_id)


def _shares(counts: Sequence[int]) -> list[int]:
    """Return how many members, or nodes, of each job are shown. Small jobs leave their unused share
    to larger ones, so that no job hides another.
    """
    shares, left = [0] * len(counts), _OF_JOBS_MAX
    for place, at in enumerate(sorted(range(len(counts)), key=counts.__getitem__)):
        shares[at] = min(counts[at], left // (len(counts) - place))
        left -= shares[at]
    return shares


def ledger(job_id: str, rosters: Mapping[str, Roster]) -> LedgerResponse:
    """Return a job's ledger.

    Raises:  ConfigError: no job has that name.
    """
    roster = named(job_id, rosters)
    job = roster.job
    return LedgerResponse(
        job.job_id, job.urls, job.format, job.present_spec, job.sample_count, job.dp_size,
        job.epoch, job.cursor, job.identity, tuple(roster.ledger.entries),
    )  # fmt: skip


def named(job_id: str, rosters: Mapping[str, Roster]) -> Roster:
    """Return the job of this name.

    Raises:  ConfigError: no job has this name.
    """
    if job_id not in rosters:
        known = some_of(sorted(rosters)) or "none"
        raise ConfigError(f"no job is called {job_id!r}; there are: {known}", job=job_id)
    return rosters[job_id]


def _job(
    roster: Roster, told: JobNodes | None, members: int, nodes: int, clock: float
) -> JobStatus:
    job = roster.job
    return JobStatus(
        job_id=job.job_id,
        dataset=job.dataset,
        spec=job.spec,
        digest=job.spec.digest(),
        generation=job.generation,
        state=_state(roster),
        sample_count=job.sample_count,
        dp_size=job.dp_size,
        missing_dp_ranks=roster.missing_dp_ranks(),
        members=tuple(_member(member, clock) for member in roster.some(members)),
        epoch=job.epoch,
        cursor=job.cursor,
        nodes=() if told is None else told.nodes[:nodes],
        nodes_version=0 if told is None else told.version,
        missing_count=roster.missing_count,
        member_count=len(roster.members),
        node_count=0 if told is None else len(told.nodes),
        joined_dp_rank_count=roster.joined_dp_rank_count,
    )


def _state(roster: Roster) -> str:
    if roster.is_idle:
        return "idle"
    return "running" if roster.is_complete else "forming"


def _member(member: Member, clock: float) -> MemberStatus:
    joined = member.phase is Phase.JOINED
    return MemberStatus(
        member_id=member.member_id,
        topology=_place(member.topology),
        node_id=member.node_id,
        state=member.phase.value,
        epoch=member.epoch,
        cursor=member.cursor,
        samples_per_s=member.samples_per_s,
        stall_s=member.stall_s,
        lease_left_s=max(0.0, member.deadline - clock) if joined else 0.0,
        bound=member.bound if joined else "",
    )


def _place(topology: Topology) -> Topology:
    source = topology.source[:_SOURCE_LENGTH_MAX]
    return topology if source == topology.source else dataclasses.replace(topology, source=source)


def _node(node: NodeRecord, now: float) -> NodeStatus:
    asked, silent_s = node.request, max(0.0, now - node.seen_at)
    away = tuple(replace(one, away_s=one.away_s + silent_s) for one in node.stores_away)
    return NodeStatus(
        asked.node_id, asked.host, asked.pid, asked.version, silent_s, away,
        node.loop_holds, node.longest_hold_s, node.reads, asked.data_address, node.known,
        asked.worker_count, node.is_short, node.held, node.work,
    )  # fmt: skip
