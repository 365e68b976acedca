"""The node's side of exchanges with others of its jobs: from which nodes it requests blocks, and
what it sends to them.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from dataplane.base.trace import Trace
from dataplane.model.config import NodeConfig
from dataplane.model.errors import ConfigError
from dataplane.model.records import BlockForm
from dataplane.model.redact import unsigned
from dataplane.node.dataset import Dataset
from dataplane.node.engine import Engine
from dataplane.node.making import Making
from dataplane.node.neighbours import JobTables, KnownNeighbours, Lending
from dataplane.node.opener import DatasetOpener
from dataplane.node.shared_manifests import LentManifests
from dataplane.rpc.lending import Asked
from dataplane.rpc.membership import JobNodes, NodeReads
from dataplane.store.urls import normalise

_trace = Trace("security")


class Neighbourhood:
    """The exchanges of one node: with neighbours that reach it through `lending`, if there is one,
    which is then owned. `own_reads` returns the node's reads.
    """

    def __init__(
        self,
        config: NodeConfig,
        engine: Engine,
        opener: DatasetOpener,
        known: KnownNeighbours,
        lending: Lending | None,
        manifests: LentManifests | None,
        own_reads: Callable[[], NodeReads],
    ) -> None:
        self._engine, self._known, self._own_reads = engine, known, own_reads
        self._lending, self._manifests = lending, manifests
        self._making = None if lending is None else Making(config, engine, opener, lending)
        self.tables = JobTables(self._on_nodes, self._on_nodes_gone)

    def start(self) -> None:
        """Begin to answer neighbours."""
        if self._lending is not None:
            self._lending.serve(self._asked, self._given)

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
        self._known.learn(nodes)
        self._engine.delegating.nodes_changed(nodes.job_id)

    def _on_nodes_gone(self, job_id: str) -> None:
        self._known.forget(job_id)
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
        of_job = (each for name, each in self._engine.open_datasets() if name == ask.job_id)
        dataset = next((each for each in of_job if each.digest == ask.request.dataset), None)
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


def _canonical(prefix: str) -> str:
    """Normalise a prefix as shards are named. A text that cannot name a shard stays, and matches
    none.
    """
    try:
        return normalise(prefix)
    except ConfigError:
        return prefix
