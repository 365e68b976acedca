"""The nodes of each job that this node serves, or makes slabs for, as reported by the
coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dataplane.rpc.membership import JobNodes, KnownNodes


def _nobody_listens(_: object) -> None:
    pass


class JobTables:
    """The coordinator's last report on each job. `on_nodes` is called with the changes, and
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
        """Return the nodes of a job; None if they were not reported."""
        return self._by_job.get(job_id)

    def known(self) -> tuple[KnownNodes, ...]:
        """Return the tables that the coordinator need not send again."""
        return tuple(KnownNodes(one.job_id, one.version) for one in self._by_job.values())

    def joined(self, nodes: JobNodes | None) -> None:
        """Apply the answer to a join. Answers may overtake each other: the newer generation stays,
        and within one generation the next heartbeat reports differences again.
        """
        if nodes is not None and nodes.generation >= self._generation(nodes.job_id):
            self._learn(nodes)

    def told(self, nodes: JobNodes, known: Mapping[str, int]) -> None:
        """Apply the answer to a heartbeat that named these versions as known. The answer counts,
        even if the generation goes back, since the coordinator has then lost its state; but not if
        a join has reported a newer generation since the heartbeat was sent.
        """
        held = self._by_job.get(nodes.job_id)
        is_the_same = held is None or held.version == known.get(nodes.job_id)
        if is_the_same or nodes.generation >= self._generation(nodes.job_id):
            self._learn(nodes)

    def left(self, job_id: str, known: Mapping[str, int]) -> None:
        """Handle a heartbeat's answer that this node is no maker of this job any more, unless a
        join has reported the job since the heartbeat, which named these versions, was sent.
        """
        held = self._by_job.get(job_id)
        if held is not None and held.version == known.get(job_id):
            self.forget(job_id)

    def forget(self, job_id: str) -> None:
        """Forget a job of which the node has no members any more, and for which it makes
        no slabs.
        """
        if self._by_job.pop(job_id, None) is not None:
            self._on_nodes_gone(job_id)

    def _generation(self, job_id: str) -> int:
        held = self._by_job.get(job_id)
        return -1 if held is None else held.generation

    def _learn(self, nodes: JobNodes) -> None:
        if nodes != self._by_job.get(nodes.job_id):
            self._by_job[nodes.job_id] = nodes
            self._on_nodes(nodes)
