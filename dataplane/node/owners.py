"""Determine which neighbour owns a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct

from dataplane.node.dataset import Dataset
from dataplane.plan.cluster import Owners, Weighed
from dataplane.rpc.fetches import Neighbour
from dataplane.rpc.membership import JobNodes, NeighbourNode

JobsOf = Callable[[Dataset], Iterable[str]]
"""The jobs that read a dataset here."""
NodesOf = Callable[[str], JobNodes | None]
"""The nodes of a job, as the coordinator last named them."""


class _Known(Struct, frozen=True):
    """The `nodes` that own blocks; `owners` is None if there are fewer than two."""

    nodes: JobNodes
    lenders: tuple[NeighbourNode, ...]
    owners: Owners | None

    @classmethod
    def of(cls, nodes: JobNodes) -> _Known:
        """Select the owners: a node without memory for blocks owns none."""
        lenders = tuple(one for one in nodes.nodes if one.arena_bytes)
        names = [one.disk_id or one.node_id for one in lenders]
        if len({*names}) < len(names):  # a folder was copied from one host to another
            names = [one.node_id for one in lenders]
        weighed = [Weighed(n, one.arena_bytes) for n, one in zip(names, lenders, strict=True)]
        return cls(nodes, lenders, Owners(weighed) if len(lenders) > 1 else None)


class BlockOwners:
    """The owners of all blocks of the jobs on this node, whose id is `own_id`."""

    def __init__(self, own_id: str, jobs_of: JobsOf, nodes_of: NodesOf) -> None:
        self._own_id, self._jobs_of, self._nodes_of = own_id, jobs_of, nodes_of
        self._known: dict[str, _Known] = {}

    def neighbour(self, dataset: Dataset, block: int) -> Neighbour | None:
        """Return the node from which to request a block; None if this node owns it, or knows no
        neighbours.
        """
        for job_id in self._jobs_of(dataset):
            nodes = self._nodes_of(job_id)
            if nodes is None:
                self._known.pop(job_id, None)
                continue
            known = self._known.get(job_id)
            if known is None or known.nodes is not nodes:
                known = self._known[job_id] = _Known.of(nodes)
            if known.owners is not None:
                return self._asked(known, known.owners, dataset, block)
        return None

    def _asked(
        self, known: _Known, owners: Owners, dataset: Dataset, block: int
    ) -> Neighbour | None:
        manifest = dataset.manifest
        shard, offset = manifest.block_shard.item(block), manifest.block_offset.item(block)
        owner = known.lenders[owners.of(dataset.digest, shard, offset)]
        if owner.node_id == self._own_id:
            return None
        return Neighbour(
            owner.address,
            known.nodes.job_id,
            known.nodes.generation,
            known.nodes.key,
            self._own_id,
            owner.node_id,
            dataset.digest,
            block,
            offset=0,
        )
