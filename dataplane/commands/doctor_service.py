"""`dataplane doctor --join`: find what is wrong with a service that runs.

Two statuses of the coordinator, some seconds apart, are compared; no node is disturbed.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from dataplane.commands.doctor_checks import Check
from dataplane.page.figures import by_wait
from dataplane.rpc.calls import CoordinatorClient
from dataplane.rpc.membership import (
    JobStatus,
    MemberStatus,
    NodeStatus,
    StatusRequest,
    StatusResponse,
)
from dataplane.security.security import Security

_WAIT_MIN = 0.1
_GONE_S = 10.0
_WAIT_ADVICE = {
    "storage": "read more at once (fetch_count), keep blocks on disk (cache_bytes), let nodes lend "
    "each other (data_listen); `dataplane doctor URL` measures the store",
    "decode": "more worker_count or a faster map=; see `dataplane doctor URL`",
    "assemble": "more worker_count, smaller images, a faster collate=",
    "workers": "more worker_count, or fewer jobs at this node",
    "room": "the trainer keeps batches: release them, or raise delivery_bytes_per_rank",
    "node": "look into the node's log: it was replaced, or its event loop is held",
}


async def checks(address: str, security: Security, span_s: float) -> list[Check]:
    """Compare two statuses.

    Raises:  DataplaneError: the coordinator does not answer, or refuses.
    """
    client = CoordinatorClient(address, security)
    try:
        before = await client.status(StatusRequest(""))
        await asyncio.sleep(span_s)
        return compared(before, await client.status(StatusRequest("")), span_s)
    finally:
        await client.close()


def compared(before: StatusResponse, now: StatusResponse, span_s: float) -> list[Check]:
    """Return what two statuses say, `span_s` seconds apart."""
    jobs = {job.job_id: job for job in before.jobs}
    checks = [check for node in now.nodes for check in _node(node)]
    nodes = {node.node_id: node for node in before.nodes}
    silent = {
        node.node_id
        for node in now.nodes
        if node.node_id in nodes
        and not node.stores_away
        and node.reads.read_bytes == nodes[node.node_id].reads.read_bytes
    }
    for job in now.jobs:
        if job.state == "idle":
            continue
        if job.missing_count:
            ranks = ", ".join(map(str, job.missing_dp_ranks[:8]))
            advice = "look at their processes: each says what it waits for"
            checks.append(Check(f"job {job.job_id}", f"waits for ranks {ranks}", advice))
        if job.job_id in jobs:
            checks += _waits(jobs[job.job_id], job, silent, span_s)
    return checks


def _node(node: NodeStatus) -> list[Check]:
    name, checks = f"node {node.node_id}", list[Check]()
    if node.last_seen_s > _GONE_S:
        where = f"on host {node.host}, process {node.pid}"
        checks.append(
            Check(name, f"was last seen {node.last_seen_s:.0f} s ago, {where}",
                  "look whether it runs: its supervisor starts it again")
        )  # fmt: skip
    for store in node.stores_away[:4]:
        shown = f"{store.store} has not answered for {store.away_s:.0f} s: {store.error}"
        checks.append(Check(name, shown, "see the store's status, DNS, proxy and credentials"))
    return checks or [Check(name, f"answers, {node.version}")]


def _waits(before: JobStatus, now: JobStatus, silent: set[str], span_s: float) -> list[Check]:
    """Say for what the ranks of a job have waited, by stage."""
    waited = {member.member_id: member for member in before.members}
    by_stage: defaultdict[str, list[tuple[float, MemberStatus]]] = defaultdict(list)
    for member in by_wait(now):
        former = waited.get(member.member_id)
        if former is None or not member.bound:
            continue
        # Waits are counted by epoch: a new one begins at 0.
        since_s = former.stall_s if former.epoch == member.epoch else 0.0
        share = min(max(member.stall_s - since_s, 0.0) / span_s, 1.0)
        if share >= _WAIT_MIN and member.bound in _WAIT_ADVICE:
            by_stage[member.bound].append((share, member))
    checks = []
    for stage, ranks in by_stage.items():
        share, worst = max(ranks, key=lambda pair: pair[0])
        shown = (
            f"{len(ranks)} of {now.member_count} ranks wait for {stage}, rank "
            f"{worst.topology.rank} {share:.0%} of the time"
        )
        advice = _WAIT_ADVICE[stage]
        if stage == "storage" and worst.node_id in silent:
            shown += ", and no byte came"
            advice = "look for `fetcher hung` or `fetcher ended` in the node's log"
        checks.append(Check(f"job {now.job_id}", shown, advice))
    moves = (before.epoch, before.cursor) != (now.epoch, now.cursor)
    speed = "goes on, and does not wait for data" if moves else "takes no batch: see its trainers"
    return checks or [Check(f"job {now.job_id}", speed)]
