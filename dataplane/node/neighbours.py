"""The nodes of each job that this node serves, or makes slabs for, as the coordinator has told
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dataplane.rpc.membership import JobNodes, KnownNodes


def _nobody_listens(_: object) -> None:
    pass


class JobTables:
    """By job, what the coordinator has told last. `on_nodes` is called with what has changed, and
    `on_nodes_gone` with the id of a job with which this node has nothing to do any more.
    """

    def __init__(
        self,
        on_nodes: Callable[[JobNodes], None] = _nobody_listens,
        on_nodes_gone: Callable[[str], None] = _nobody_listens,
    ) -> None:
        self._on_nodes, self._on_nodes_gone = on_nodes, on_nodes_gone
        self._by_job: dict[str, JobNodes] = {}

    def get(self, job_id: str) -> JobNodes | None:
        """The nodes of a job; None if they were not told."""
        return self._by_job.get(job_id)

    def known(self) -> tuple[KnownNodes, ...]:
        """What the coordinator need not tell again."""
        return tuple(KnownNodes(one.job_id, one.version) for one in self._by_job.values())

    def joined(self, nodes: JobNodes | None) -> None:
        """A join was answered. Answers may overtake each other: the newer generation stays, and of
        one generation the next heartbeat tells again what differs.
        """
        if nodes is not None and nodes.generation >= self._generation(nodes.job_id):
            self._learn(nodes)

    def told(self, nodes: JobNodes, known: Mapping[str, int]) -> None:
        """A heartbeat was answered that said that these versions are known. It decides, also if the
        generation goes back, since the coordinator has lost its state; but not if a join has told
        of a newer one since the heartbeat was sent.
        """
        held = self._by_job.get(nodes.job_id)
        is_the_same = held is None or held.version == known.get(nodes.job_id)
        if is_the_same or nodes.generation >= self._generation(nodes.job_id):
            self._learn(nodes)

    def left(self, job_id: str, known: Mapping[str, int]) -> None:
        """A heartbeat was answered that said that these versions are known: this node is no maker
        of this job any more. But a join may have told of the job since the heartbeat was sent.
        """
        held = self._by_job.get(job_id)
        if held is not None and held.version == known.get(job_id):
            self.forget(job_id)

    def forget(self, job_id: str) -> None:
        """The node has no members of this job any more, and makes no slabs for it."""
        if self._by_job.pop(job_id, None) is not None:
            self._on_nodes_gone(job_id)

    def _generation(self, job_id: str) -> int:
        held = self._by_job.get(job_id)
        return -1 if held is None else held.generation

    def _learn(self, nodes: JobNodes) -> None:
        if nodes != self._by_job.get(nodes.job_id):
            self._by_job[nodes.job_id] = nodes
            self._on_nodes(nodes)
