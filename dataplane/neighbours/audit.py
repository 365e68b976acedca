"""The lines of a lender's log: who was refused, and who was cut off."""

from __future__ import annotations

from dataplane.neighbours.connection import Connection
from dataplane.rpc.address import network_of
from dataplane.trace import Trace

trace = Trace("security")


def refused(connection: Connection, why: str, *, is_late: bool = False) -> None:
    """One line. `is_late`: it is of a job that this node has just left, and no attack."""
    what, facts = "data connection refused", {**connection.about, "why": why}
    if is_late:
        trace.noted(what, **facts)
    else:
        trace.refused(what, by=network_of(connection.host), **facts)
