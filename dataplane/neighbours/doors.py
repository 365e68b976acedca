"""The connections of a lender: how many there may be, whose they are, and when they are due.

Invariants:
1. The number of connections never exceeds the limits. A connection without a proof gives way to a
   newer one of its host, so a host that opens many harms only itself.
2. Every deadline is checked when it is due; until then it costs nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator

from dataplane.neighbours.connection import Connection, LoanStage
from dataplane.neighbours.limits import Limits


class Doors:
    """All connections. Closing them is left to the caller."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._all: dict[int, Connection] = {}
        self._opening: dict[Connection, None] = {}
        self._opening_of: dict[str, dict[Connection, None]] = {}
        self._open_of: dict[str, int] = {}
        self._of_job: dict[str, set[Connection]] = {}
        self._due: list[tuple[float, int, Connection]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._all.values())

    def by_descriptor(self, fd: int) -> Connection | None:
        """The connection with this descriptor."""
        return self._all.get(fd)

    def in_the_way(self, host: str) -> tuple[Connection | None, str]:
        """Return the connection that must be closed before this host gets another one, and why."""
        of_host = self._opening_of.get(host, {})
        if len(of_host) >= self._limits.opening_of_host:
            return next(iter(of_host)), f"{len(of_host)} others of its host came without a proof"
        if len(self._opening) >= self._limits.opening:
            return next(iter(self._opening)), f"{len(self._opening)} others came without a proof"
        return None, ""

    def is_full(self) -> bool:
        """Whether there are as many connections as there may be."""
        return len(self._all) >= self._limits.connections

    def add(self, connection: Connection) -> None:
        """Add an accepted connection."""
        self._all[connection.fd] = connection
        self._opening[connection] = None
        self._opening_of.setdefault(connection.host, {})[connection] = None
        self.due(connection)

    def opened(self, connection: Connection) -> bool:
        """Note that its neighbour has shown that it has the key; return False if that neighbour has
        too many connections.
        """
        self._leave_opening(connection)
        assert connection.opening is not None
        count = self._open_of[connection.node_id] = self._open_of.get(connection.node_id, 0) + 1
        self._of_job.setdefault(connection.opening.job_id, set()).add(connection)
        return count <= self._limits.connections_of_neighbour

    def remove(self, connection: Connection) -> None:
        """Remove a connection that is about to be closed."""
        del self._all[connection.fd]
        if connection in self._opening:
            self._leave_opening(connection)
            return
        assert connection.opening is not None
        self._open_of[connection.node_id] -= 1
        if not self._open_of[connection.node_id]:
            del self._open_of[connection.node_id]
        job_id = connection.opening.job_id
        self._of_job[job_id].discard(connection)
        if not self._of_job[job_id]:
            del self._of_job[job_id]

    def of_job(self, job_id: str) -> list[Connection]:
        """Return the connections that were opened with a key of this job."""
        return list(self._of_job.get(job_id, ()))

    def due(self, connection: Connection) -> None:
        """Note that the deadline of a connection has changed."""
        if connection.deadline < connection.looked_at:
            connection.looked_at = connection.deadline
            heapq.heappush(self._due, (connection.deadline, next(self._numbers), connection))

    def late(self, now: float) -> Iterator[Connection]:
        """Yield the connections whose deadline has passed."""
        while self._due and self._due[0][0] <= now:
            looked_at, _, connection = heapq.heappop(self._due)
            if connection.stage is LoanStage.CLOSED or connection.looked_at != looked_at:
                continue
            connection.looked_at = math.inf
            if connection.deadline <= now:
                yield connection
            else:
                self.due(connection)

    def next_deadline(self) -> float | None:
        """When to look again."""
        return self._due[0][0] if self._due else None

    def _leave_opening(self, connection: Connection) -> None:
        del self._opening[connection]
        of_host = self._opening_of[connection.host]
        del of_host[connection]
        if not of_host:
            del self._opening_of[connection.host]
