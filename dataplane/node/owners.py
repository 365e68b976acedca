"""The neighbours of a node, as its engine knows them: who owns a block, who makes slabs, and how
to answer those who ask for a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from dataplane.model.records import Region
from dataplane.node.dataset import Dataset
from dataplane.node.lending import Lending
from dataplane.plan.cluster import Owners, Weighed
from dataplane.rpc.fetches import Neighbour, SlabMaker
from dataplane.rpc.membership import JobNodes, NeighbourNode


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


class KnownNeighbours:
    """The neighbours of the node with this id, by job. It lends blocks through `lending`, if it is
    reachable. Implements `lent.Neighbours`.
    """

    def __init__(self, own_id: str, lending: Lending | None) -> None:
        self._own_id, self._lending = own_id, lending
        self._known: dict[str, _Known] = {}

    def learn(self, nodes: JobNodes) -> None:
        """Note the nodes of a job, which the coordinator has just named."""
        self._known[nodes.job_id] = _Known.of(nodes)

    def forget(self, job_id: str) -> None:
        """Forget the nodes of a job with which this node has nothing to do any more."""
        self._known.pop(job_id, None)

    def owner_of(self, dataset: Dataset, block: int, jobs: Iterable[str]) -> Neighbour | None:
        """Implement `Neighbours.owner_of`."""
        for job_id in jobs:
            known = self._known.get(job_id)
            if known is not None and known.owners is not None:
                return self._owner(known, known.owners, dataset, block)
        return None

    def makers(self, job_id: str) -> Sequence[SlabMaker]:
        """Implement `Neighbours.makers`."""
        known = self._known.get(job_id)
        if known is None:
            return ()
        job = job_id, known.nodes.generation, known.nodes.key, self._own_id
        return [
            SlabMaker(node.address, *job, node.node_id)
            for node in known.nodes.nodes
            if node.worker_count and node.node_id != self._own_id
        ]

    def give(self, number: int, regions: Sequence[Region], ends: Sequence[int] = ()) -> None:
        """Implement `Neighbours.give`."""
        if self._lending is not None:
            first, *more = regions or [Region(0, 0)]
            self._lending.give(number, first, more=tuple(more), ends=tuple(ends))

    def only_decoded(self, number: int, length: int) -> None:
        """Implement `Neighbours.only_decoded`."""
        if self._lending is not None:
            self._lending.only_decoded(number, length)

    def refuse(self, number: int) -> None:
        """Implement `Neighbours.refuse`."""
        if self._lending is not None:
            self._lending.refuse(number)

    def _owner(
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
