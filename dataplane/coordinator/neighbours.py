"""The nodes of a job that lend each other blocks, and its makers, as the coordinator sends them to
nodes. Pure; a roster owns one.

Invariants:
1. The list has the nodes with a data address and joined members of the present generation, and
   after them the job's makers while it has joined members. Only a member's node renews it, so a
   node without a lease has no joined members.
2. The version is a hash of the generation, of the nodes with their addresses and weights, of the
   urls whose blocks they lend, and of a salt that stands for the secret of their keys. It changes
   exactly when one of these does, and differs from those of another start of a coordinator.
3. The list is built again only after such a change: a heartbeat only compares the version.
4. A node that may read only some urls is listed only if these contain the job's dataset, as it was
   declared when the generation began. If there is such a node, nodes lend only blocks under the
   urls of the dataset, until the generation ends.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping

import msgspec
from msgspec.structs import replace

from dataplane.coordinator.makers import Makers
from dataplane.coordinator.records import Job, NodeRecord
from dataplane.rpc.membership import JobNodes, NeighbourNode

_VERSION_BYTES = 8
_LOOPBACK = ("127.", "[::1]:")


class JobNeighbours:
    """The number of joined members on each node, and the neighbours that follow from it. `makers`
    is notified of nodes that get their first member or lose their last.
    """

    def __init__(self, makers: Makers) -> None:
        self._everywhere = makers
        self._members: Counter[str] = Counter()
        self._told: JobNodes | None = None
        self._only_under: tuple[str, ...] = ()
        self._makers: tuple[NeighbourNode, ...] = ()
        self._maker_ids: frozenset[str] = frozenset()
        self.lacks_some = False
        """Whether a node with joined members was not known when `told` was asked last."""

    def add(self, node_id: str) -> None:
        """Add a joined member of this node."""
        self._members[node_id] += 1
        if self._members[node_id] == 1:
            self._told = None
            self._everywhere.arrived(node_id)

    def remove(self, node_id: str) -> None:
        """Remove a joined member of this node."""
        self._members[node_id] -= 1
        if not self._members[node_id]:
            del self._members[node_id]
            self._told = None
            self._everywhere.departed(node_id)

    def clear(self) -> None:
        """Remove all members."""
        for node_id in self._members:
            self._everywhere.departed(node_id)
        self._members.clear()
        self._told = None
        self._only_under = ()

    def changed(self, node_id: str) -> None:
        """Note that a node is new, or has another address or weight."""
        if node_id in self._members:
            self._told = None

    def has_one_of(self, node_id: str) -> bool:
        """Whether this node has exactly one joined member."""
        return self._members[node_id] == 1

    def has_maker(self, node_id: str) -> bool:
        """Whether this node was a maker at the last call of `told`."""
        return node_id in self._maker_ids

    def told(
        self,
        job: Job,
        known: Mapping[str, NodeRecord],
        makers: tuple[NeighbourNode, ...],
        salt: bytes,
    ) -> JobNodes:
        """Return the nodes of this job; the same object until something changes, or `makers` is
        another object.
        """
        if self._told is None or makers is not self._makers:
            self._makers = makers
            self._told = self._made(job, known, salt)
        return self._told

    def _made(self, job: Job, known: Mapping[str, NodeRecord], salt: bytes) -> JobNodes:
        registered = [known[name].request for name in sorted(self._members) if name in known]
        self.lacks_some = len(registered) < len(self._members)
        fitting = {(), *self._limits_that_fit(job, {one.only_under for one in registered})}
        nodes = [
            NeighbourNode(one.node_id, one.data_address, one.arena_bytes, disk_id=one.disk_id)
            for one in registered
            if one.data_address and one.only_under in fitting
        ]
        if self._members:
            nodes += [one for one in self._makers if one.node_id not in self._members]
        # Nobody on another host reaches these; on a single host there are no others.
        beyond = [one for one in nodes if not one.address.startswith(_LOOPBACK)]
        nodes = beyond or nodes
        self._maker_ids = frozenset(one.node_id for one in nodes if one.worker_count)
        hashed = msgspec.msgpack.encode((job.generation, nodes, self._only_under))
        digest = hashlib.blake2b(hashed, digest_size=_VERSION_BYTES, key=salt).digest()
        version = int.from_bytes(digest, "little") or 1
        told = JobNodes(job.job_id, job.generation, version, nodes=tuple(nodes))
        return replace(told, only_under=self._only_under)

    def _limits_that_fit(
        self, job: Job, limits: Collection[tuple[str, ...]]
    ) -> Collection[tuple[str, ...]]:
        """Select the prefixes of nodes that contain the job's dataset."""
        if not any(limits):
            return ()
        from dataplane.security.urls import are_under, roots  # not for a single host

        urls = roots(job.urls)
        found = [prefixes for prefixes in limits if are_under(urls, prefixes)]
        if found:
            self._only_under = urls
        return found
