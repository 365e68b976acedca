"""Adds the key to the nodes of a job, before they are sent to a node."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dataplane.rpc.membership import JobNodes

if TYPE_CHECKING:
    from dataplane.security.neighbour_keys import NeighbourKeys

_JOBS_MAX = 64


class KeyedNodes:
    """Nodes of jobs with their keys. The same nodes give the same object, so that it is serialized
    once for all receivers. Without `keys`, a secret of this process is made when it is needed: an
    embedded coordinator, whose node has no neighbours, needs none and imports nothing for it.
    """

    def __init__(self, keys: NeighbourKeys | None) -> None:
        self._keys = keys
        self._made: OrderedDict[str, tuple[JobNodes, JobNodes]] = OrderedDict()

    def of(self, nodes: JobNodes) -> JobNodes:
        """Return the nodes with their key, if there are any."""
        if not nodes.nodes:
            return nodes
        before = self._made.get(nodes.job_id)
        if before is not None and before[0] is nodes:
            return before[1]
        key = self.key(nodes.job_id, nodes.generation, nodes.only_under)
        keyed = replace(nodes, key=key)
        self._made[nodes.job_id] = (nodes, keyed)
        self._made.move_to_end(nodes.job_id)
        if len(self._made) > _JOBS_MAX:
            self._made.popitem(last=False)
        return keyed

    def key(self, job_id: str, generation: int, only_under: tuple[str, ...] = ()) -> bytes:
        """Return the key; see `NeighbourKeys.key`."""
        if self._keys is None:
            from dataplane.security.neighbour_keys import own_keys

            self._keys = own_keys()
        return self._keys.key(job_id, generation, only_under)
