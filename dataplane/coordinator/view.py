"""The coordinator's memory as shown to people."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping

from msgspec.structs import replace

from dataplane.coordinator.records import Member, NodeRecord, Phase
from dataplane.coordinator.roster import Roster
from dataplane.errors import ConfigError
from dataplane.rpc.membership import (
    JobNodes,
    JobStatus,
    LedgerResponse,
    MemberStatus,
    NodeStatus,
    StatusResponse,
)

_SHOWN_MAX = 10
_NODES_MAX = 1024


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
    """One job (or all jobs, sorted by name, for "") and the nodes that were heard of last.

    Raises:  ConfigError: no job has that name.
    """
    chosen = [named(job_id, rosters)] if job_id else [rosters[name] for name in sorted(rosters)]
    last = heapq.nlargest(_NODES_MAX, nodes, key=lambda node: node.seen_at)
    return StatusResponse(
        version=version,
        coordinator_id=coordinator_id,
        jobs=tuple(_job(roster, nodes_of(roster), clock) for roster in chosen),
        nodes=tuple(
            _node(node, now) for node in sorted(last, key=lambda node: node.request.node_id)
        ),
        node_count=len(nodes),
    )


def ledger(job_id: str, rosters: Mapping[str, Roster]) -> LedgerResponse:
    """A job's ledger.

    Raises:  ConfigError: no job has that name.
    """
    roster = named(job_id, rosters)
    job = roster.job
    return LedgerResponse(
        job.job_id, job.urls, job.format, job.present_spec, job.sample_count, job.dp_size,
        job.epoch, job.cursor, job.identity, tuple(roster.ledger.entries),
    )  # fmt: skip


def named(job_id: str, rosters: Mapping[str, Roster]) -> Roster:
    """The job of this name.

    Raises:  ConfigError: there is none.
    """
    if job_id not in rosters:
        known = ", ".join(sorted(rosters)[:_SHOWN_MAX]) or "none"
        more = f" and {len(rosters) - _SHOWN_MAX} more" if len(rosters) > _SHOWN_MAX else ""
        raise ConfigError(f"no job is called {job_id!r}; there are: {known}{more}", job=job_id)
    return rosters[job_id]


def _job(roster: Roster, told: JobNodes | None, clock: float) -> JobStatus:
    job = roster.job
    members = sorted(roster.members.values(), key=lambda one: (one.topology.rank, one.order))
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
        members=tuple(_member(member, clock) for member in members),
        epoch=job.epoch,
        cursor=job.cursor,
        nodes=() if told is None else told.nodes,
        nodes_version=0 if told is None else told.version,
    )


def _state(roster: Roster) -> str:
    if roster.is_idle:
        return "idle"
    return "running" if roster.is_complete else "forming"


def _member(member: Member, clock: float) -> MemberStatus:
    joined = member.phase is Phase.JOINED
    return MemberStatus(
        member_id=member.member_id,
        topology=member.topology,
        node_id=member.node_id,
        state=member.phase.value,
        epoch=member.epoch,
        cursor=member.cursor,
        samples_per_s=member.samples_per_s,
        stall_s=member.stall_s,
        lease_left_s=max(0.0, member.deadline - clock) if joined else 0.0,
        bound=member.bound if joined else "",
    )


def _node(node: NodeRecord, now: float) -> NodeStatus:
    asked, silent_s = node.request, max(0.0, now - node.seen_at)
    away = tuple(replace(one, away_s=one.away_s + silent_s) for one in node.stores_away)
    return NodeStatus(
        asked.node_id, asked.host, asked.pid, asked.version, silent_s, away,
        node.loop_holds, node.longest_hold_s, node.reads, asked.data_address, node.known,
        asked.worker_count, node.is_short, node.held, node.work,
    )  # fmt: skip
