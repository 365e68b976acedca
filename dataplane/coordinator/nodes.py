"""The nodes that the coordinator knows, and what it sends each of them about the others. Pure; the
state machine owns them.

Invariants:
1. A node gets news only about jobs whose members it has just renewed, or for which it is a maker.
2. For a lease after a restart, the list of a job's nodes is sent only once all nodes with members
   have sent a heartbeat; until then, nodes keep the list that they have. If the job wants makers
   and had members before the restart, the list is sent no sooner than a third of a lease after the
   restart, since every node sends a heartbeat within that time. Otherwise makers would disappear
   from the list, and come back one by one.
3. There are at most `_COUNT_MAX` nodes, and at most `_OF_JOB_MAX` whose tokens are for the same
   job. A new node takes the place of one that was silent for a lease, or is refused.
4. For a lease after a restart, no node is told that it has left a job, since the coordinator does
   not know yet which jobs want makers.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping

from dataplane.coordinator.makers import Makers
from dataplane.coordinator.records import NodeRecord
from dataplane.coordinator.roster import Roster
from dataplane.model.errors import ConfigError
from dataplane.rpc.membership import HeartbeatRequest, JobNodes

NODE_KEPT_S = 24 * 3600.0
# An answer to a heartbeat contains tables of further jobs until it has this many nodes; a maker of
# many jobs gets the rest with its next heartbeats.
_TOLD_MAX = 16384
_COUNT_MAX, _OF_JOB_MAX = 16384, 4096


class Nodes:
    """The nodes of all jobs. Times are lease time, except for `now`."""

    def __init__(
        self, rosters: Mapping[str, Roster], makers: Makers, salt: bytes, lease_s: float
    ) -> None:
        """Create the table. `rosters` are the jobs of the store; the table keeps this mapping
        itself, in which jobs come and go.
        """
        self.records: dict[str, NodeRecord] = {}
        # Node ids by the one job that their tokens allow ("" if they allow any). Each group is in
        # order of the last heartbeat.
        self._of_token: defaultdict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)
        self._rosters, self._makers = rosters, makers
        self._salt, self._lease_s = salt, lease_s
        self._restored = {
            name: roster.job.generation for name, roster in rosters.items() if not roster.is_idle
        }

    def heard(self, node: NodeRecord, clock: float) -> None:
        """Note that a node has registered, or sent a heartbeat.

        Raises:  ConfigError: there are too many nodes.
        """
        node_id, only_job = node.request.node_id, node.request.only_job
        before = self.records.get(node_id)
        if before is None:
            self._make_room(only_job, node.seen_at)
        elif before.request.only_job != only_job:
            del self._of_token[before.request.only_job][node_id]
        self.records[node_id] = node
        self._of_token[only_job][node_id] = None
        self._of_token[only_job].move_to_end(node_id)
        self._makers.heard(node.request, clock)
        if before is None or _reached(before) != _reached(node):
            self._changed(node_id)

    def forget_silent(self, now: float) -> None:
        """Forget nodes whose last heartbeat is a day old."""
        for node_id, node in list(self.records.items()):
            if now - node.seen_at > NODE_KEPT_S:
                self._forget(node_id)

    def _make_room(self, only_job: str, now: float) -> None:
        """Make room for another node, whose token is for this job."""
        of_job = self._of_token[only_job]
        if only_job and len(of_job) >= _OF_JOB_MAX:
            self._replace(of_job, now, f"with tokens for the job {only_job!r} ({_OF_JOB_MAX})")
        elif len(self.records) >= _COUNT_MAX:
            fullest = max(self._of_token.values(), key=len)
            self._replace(fullest, now, f"of this coordinator ({_COUNT_MAX})")

    def _replace(self, those: OrderedDict[str, None], now: float, whose: str) -> None:
        silent = next(iter(those))
        if now - self.records[silent].seen_at <= self._lease_s:
            raise ConfigError(f"all places for nodes {whose} are taken", field="node_id")
        self._forget(silent)

    def _forget(self, node_id: str) -> None:
        only_job = self.records.pop(node_id).request.only_job
        del self._of_token[only_job][node_id]
        if not self._of_token[only_job]:
            del self._of_token[only_job]
        self._changed(node_id)

    def host_of(self, node_id: str) -> str:
        """Return a node's host, or its id if the host is unknown."""
        node = self.records.get(node_id)
        return node.request.host or node_id if node is not None else node_id

    def want_makers(self, node_id: str, job_ids: Collection[str], clock: float) -> None:
        """Note that a node has members of these jobs; they want makers if the node is short of
        workers.
        """
        node = self.records.get(node_id)
        if node is not None and node.is_short:
            for job_id in job_ids:
                self._makers.wanted(job_id, clock)

    def of(self, roster: Roster, clock: float) -> JobNodes | None:
        """Return the nodes of this job in the form that is sent, without their key; None if it is
        too early after a restart.
        """
        job, neighbours = roster.job, roster.neighbours
        makers = self._makers.of(job.job_id)
        told = neighbours.told(job, self.records, makers, self._salt)
        if clock >= self._lease_s:
            return told
        is_restored = self._restored.get(job.job_id) == job.generation
        awaits_makers = (
            is_restored and clock < self._lease_s / 3 and self._makers.is_wanted_by(job.job_id)
        )
        return None if neighbours.lacks_some or awaits_makers else told

    def news(
        self, request: HeartbeatRequest, renewed: Collection[str], clock: float
    ) -> tuple[tuple[JobNodes, ...], tuple[str, ...]]:
        """Return the news for a node that has renewed members of these jobs: the nodes of its jobs
        if they differ from the list that the node has, and the jobs that the node knows but has
        left.
        """
        node_id = request.node.node_id
        known = {one.job_id: one.version for one in request.known}
        made_for = self._makers.jobs_of(node_id)
        told: list[JobNodes] = []
        room = _TOLD_MAX
        for job_id in (*renewed, *made_for):
            roster = self._rosters.get(job_id)
            nodes = self.of(roster, clock) if roster is not None else None
            if roster is None or nodes is None or known.get(job_id) == nodes.version:
                continue
            if job_id not in renewed:
                if not roster.neighbours.has_maker(node_id):
                    continue
                if told and len(nodes.nodes) > room:
                    break
            told.append(nodes)
            room -= len(nodes.nodes)
        if clock < self._lease_s:
            return tuple(told), ()
        left = (one for one in known if one not in renewed and one not in made_for)
        return tuple(told), tuple(left)

    def _changed(self, node_id: str) -> None:
        for roster in self._rosters.values():
            roster.neighbours.changed(node_id)


def _reached(node: NodeRecord) -> tuple[str, int, tuple[str, ...]]:
    return (node.request.data_address, node.request.arena_bytes, node.request.only_under)
