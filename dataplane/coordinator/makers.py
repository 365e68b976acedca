"""The makers, which make slabs for other nodes, and the jobs that want them. Pure; the state
machine owns them.

Nothing is stored: makers follow from heartbeats, and may come or go at any time. Which maker makes
which slab is decided by the node that needs it, since only that node sees who answers late.

Invariants:
1. A maker has workers, a data address and no joined members of any job, and its last heartbeat is
   at most a lease old. If its token is for one job, it makes slabs only for that job. A node whose
   token is restricted to some urls is not a maker.
2. A job wants makers for a minute, or for a lease if that is longer, after one of its nodes was
   last short of workers. A node with joined members sends heartbeats within a lease, so a job with
   a short node always wants makers.
3. If there are many makers, they are assigned at most once a second, so that a thousand nodes that
   start together change the nodes of a job a few times instead of a thousand times. In between, the
   same objects are returned.
4. The cost of an event depends only on what it changes, except when makers are assigned.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from operator import attrgetter

from msgspec import Struct

from dataplane.rpc.membership import NeighbourNode, RegisterNodeRequest

KEPT_S = 60.0
NAMED_EVERY_S = 1.0
FEW = 16


class _Able(Struct, frozen=True):
    """A node with workers and a data address, and the time of its last heartbeat."""

    node: RegisterNodeRequest
    heard_at: float


class Makers:
    """The makers and the jobs that want them. Times are lease time. Events take effect at the next
    `settle`.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._kept_s = max(KEPT_S, lease_s)
        # For each node, the number of jobs that have joined members there.
        self._jobs_at: Counter[str] = Counter()
        # Nodes in the order of their last heartbeats; jobs in the order of the last time that they
        # wanted makers.
        self._able: OrderedDict[str, _Able] = OrderedDict()
        self._wanted_at: OrderedDict[str, float] = OrderedDict()
        self._for_all: tuple[NeighbourNode, ...] = ()
        self._for_one: dict[str, tuple[NeighbourNode, ...]] = {}
        self._is_stale = False
        self._named_at = 0.0

    def heard(self, node: RegisterNodeRequest, clock: float) -> None:
        """Note that a node has registered, or sent a heartbeat."""
        before = self._able.pop(node.node_id, None)
        if node.worker_count and node.data_address and not node.only_under:
            self._able[node.node_id] = _Able(node, clock)
            self._changed(node.node_id, is_other=before is None or before.node != node)
        else:
            self._changed(node.node_id, is_other=before is not None)

    def arrived(self, node_id: str) -> None:
        """Note that a node has got its first joined member of a job."""
        self._jobs_at[node_id] += 1
        self._is_stale |= self._jobs_at[node_id] == 1 and node_id in self._able

    def departed(self, node_id: str) -> None:
        """Note that the last joined member of a job on this node is gone."""
        self._jobs_at[node_id] -= 1
        if not self._jobs_at[node_id]:
            del self._jobs_at[node_id]
            self._is_stale |= node_id in self._able

    def wanted(self, job_id: str, clock: float) -> None:
        """Note that a node of this job is short of workers."""
        self._wanted_at[job_id] = clock
        self._wanted_at.move_to_end(job_id)

    def settle(self, clock: float) -> None:
        """Forget silent nodes, and jobs that no longer want makers; assign makers if it is time."""
        while self._able:
            node_id, able = next(iter(self._able.items()))
            if able.heard_at + self._lease_s > clock:
                break
            del self._able[node_id]
            self._changed(node_id, is_other=True)
        while self._wanted_at:
            job_id, wanted_at = next(iter(self._wanted_at.items()))
            if wanted_at + self._kept_s > clock:
                break
            del self._wanted_at[job_id]
        if self._is_stale and clock >= self._named_at:
            self._name(clock)

    def is_wanted_by(self, job_id: str) -> bool:
        """Return whether this job wants makers."""
        return job_id in self._wanted_at

    def of(self, job_id: str) -> tuple[NeighbourNode, ...]:
        """Return the makers of this job, by node_id, if it wants any. The object stays the same
        until they change.
        """
        if job_id not in self._wanted_at:
            return ()
        return self._for_one.get(job_id, self._for_all)

    def jobs_of(self, node_id: str) -> Collection[str]:
        """Return the jobs for which this node is a maker, or will be at the next assignment."""
        able = self._able.get(node_id)
        if able is None or node_id in self._jobs_at:
            return ()
        if not able.node.only_job:
            return self._wanted_at.keys()
        return (able.node.only_job,) if able.node.only_job in self._wanted_at else ()

    def _changed(self, node_id: str, *, is_other: bool) -> None:
        self._is_stale |= is_other and node_id not in self._jobs_at

    def _name(self, clock: float) -> None:
        free = [one.node for name, one in self._able.items() if name not in self._jobs_at]
        free.sort(key=attrgetter("node_id"))
        self._for_all = _named(node for node in free if not node.only_job)
        jobs = {node.only_job for node in free if node.only_job}
        self._for_one = {
            job_id: _named(node for node in free if node.only_job in ("", job_id))
            for job_id in jobs
        }
        self._is_stale = False
        self._named_at = clock + NAMED_EVERY_S if len(free) > FEW else clock


def _named(nodes: Iterable[RegisterNodeRequest]) -> tuple[NeighbourNode, ...]:
    return tuple(
        NeighbourNode(one.node_id, one.data_address, one.arena_bytes, one.worker_count, one.disk_id)
        for one in nodes
    )
