"""The node's side of exchanges with others of its jobs: from which nodes it requests blocks, and
what it sends to them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from dataplane.arena.memfd import Arena
from dataplane.base.trace import Trace
from dataplane.model.config import NodeConfig
from dataplane.model.errors import ConfigError
from dataplane.model.records import BlockForm, Region
from dataplane.model.redact import unsigned
from dataplane.node.data_port import data_address
from dataplane.node.dataset import Dataset
from dataplane.node.engine import Engine
from dataplane.node.jobs import Jobs
from dataplane.node.lending import Lending
from dataplane.node.lent_manifests import LentManifests
from dataplane.node.making import Making
from dataplane.node.neighbours import JobTables
from dataplane.node.owners import BlockOwners
from dataplane.node.shared_manifests import SharedManifests
from dataplane.rpc.fetches import Neighbour, SlabMaker
from dataplane.rpc.lending import Asked
from dataplane.rpc.membership import JobNodes, NodeReads
from dataplane.store.urls import normalise

_trace = Trace("security")


class Neighbourhood:
    """The neighbours of a node, which reach it at this listening socket, if it has one; the socket
    is then owned. `own_reads` returns the node's reads. Call `meet` before anything happens.
    """

    def __init__(
        self,
        config: NodeConfig,
        node_id: str,
        arena: Arena,
        listener: socket.socket | None,
        own_reads: Callable[[], NodeReads],
    ) -> None:
        self._own_reads, self._node_id, self._config = own_reads, node_id, config
        self._lending: Lending | None = None
        self._making: Making | None = None
        self._manifests: LentManifests | None = None
        self._address = data_address(listener)
        if listener is not None:
            log = (config.log_level, config.log_format)
            self._lending = Lending(
                listener, node_id, arena, self._asked, self._given, Trace("node"), log,
                config.data_tls,
            )  # fmt: skip
        self.tables = JobTables(self._on_nodes, self._on_nodes_gone)
        self._owners = BlockOwners(node_id, self._jobs_of, self.tables.get)

    def meet(self, engine: Engine, jobs: Jobs) -> None:
        """Connect the engine and the jobs that it serves."""
        self._engine, self._jobs = engine, jobs
        if self._lending is not None:
            orders = jobs.streams.orders
            self._making = Making(self._config, engine, jobs.opener, orders, self._lending)
            self._manifests = LentManifests(self._lending, jobs.opener.numbers)
        jobs.opener.shared = SharedManifests(
            self._config, jobs.coordination, self._node_id, self._address, self._manifests
        )

    def owner_of(self, dataset: Dataset, block: int) -> Neighbour | None:
        """Implement `Neighbours.owner_of`."""
        return self._owners.neighbour(dataset, block)

    def makers(self, job_id: str) -> Sequence[SlabMaker]:
        """Implement `Neighbours.makers`."""
        nodes = self.tables.get(job_id)
        if nodes is None:
            return ()
        found = (one for one in nodes.nodes if one.worker_count and one.node_id != self._node_id)
        return [
            SlabMaker(one.address, job_id, nodes.generation, nodes.key, self._node_id, one.node_id)
            for one in found
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

    def look(self) -> None:
        """Implement `Lending.look`."""
        if self._lending is not None:
            self._lending.look()

    def reads(self) -> NodeReads:
        """Return what this node has read, found in memory, sent to neighbours, and made
        for them.
        """
        reads = replace(self._own_reads(), memory_bytes=self._engine.scheduler.found_bytes)
        lent, making = self._lending, self._making
        if lent is None or making is None:
            return reads
        return replace(
            reads,
            lent_bytes=lent.lent_bytes,
            made_slabs=making.slab_count,
            made_bytes=making.slab_bytes,
        )

    def close(self) -> None:
        """Send nothing any more. May be called twice."""
        if self._making is not None:
            self._making.close()
        if self._manifests is not None:
            self._manifests.close()
        if self._lending is not None:
            self._lending.close()

    def _on_nodes(self, nodes: JobNodes) -> None:
        if self._lending is not None:
            urls = tuple(map(_canonical, nodes.only_under))
            self._lending.keys(nodes.job_id, nodes.generation, nodes.key, urls)
        self._engine.delegating.nodes_changed(nodes.job_id)

    def _on_nodes_gone(self, job_id: str) -> None:
        if self._lending is not None:
            self._lending.keys(job_id, 0, b"")
        if self._making is not None:
            self._making.close_job(job_id)

    def _asked(self, ask: Asked) -> None:
        if self._manifests is not None and self._manifests.asked(ask):
            return
        if ask.request.form is BlockForm.SLAB and self._making is not None:
            self._making.asked(ask)
            return
        datasets = self._datasets_of(ask.job_id)
        dataset = next((d for d in datasets if d.digest == ask.request.dataset), None)
        if dataset is not None and not self._may_lend(ask, dataset):
            dataset = None
        self._engine.lent.asked(ask, dataset)

    def _may_lend(self, ask: Asked, dataset: Dataset) -> bool:
        """Whether nodes with this key may read the shard of the block."""
        block = ask.request.block
        if not ask.only_under or block >= dataset.manifest.block_count:
            return True
        from dataplane.security.urls import covers  # not for a single host

        url = unsigned(dataset.url(block))
        if covers(url, ask.only_under):
            return True
        why = f"{url} lies outside of {', '.join(ask.only_under)}, which tokens of this job allow"
        by, facts = ask.node_id, {"node": ask.node_id, "job": ask.job_id, "why": why}
        _trace.refused("data request refused", by=by, **facts)
        return False

    def _given(self, number: int) -> None:
        if self._manifests is not None and self._manifests.given(number):
            return
        if self._making is not None and self._making.given(number):
            return
        self._engine.lent.given(number)

    def _datasets_of(self, job_id: str) -> Iterator[Dataset]:
        return (dataset for name, dataset in self._open_datasets() if name == job_id)

    def _jobs_of(self, dataset: Dataset) -> Iterator[str]:
        return (name for name, each in self._open_datasets() if each is dataset)

    def _open_datasets(self) -> Iterator[tuple[str, Dataset]]:
        """Yield the id and a dataset of each job whose slabs are made here, for trainers
        or others.
        """
        for one in self._jobs.members.values():
            for dataset in one.opened.datasets:
                yield one.job_id, dataset
        if self._making is not None:
            yield from self._making.open_datasets()


def _canonical(prefix: str) -> str:
    """Normalise a prefix as shards are named. A text that cannot name a shard stays, and matches
    none.
    """
    try:
        return normalise(prefix)
    except ConfigError:
        return prefix
