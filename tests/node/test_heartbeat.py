"""The node's reaction to the verdicts of a heartbeat."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dataplane.coordinator.front import Coordinator, CoordinatorConfig
from dataplane.errors import LeaseFenced
from dataplane.node.heartbeat import Heartbeat
from dataplane.node.watchdog import Watchdog
from dataplane.rpc.membership import NodeReads
from dataplane.settings import default_node_config
from dataplane.store.outage import Outages
from dataplane.trace import Trace


def test_a_fenced_member_may_have_left_before_it_is_notified() -> None:
    """Sending finds that the trainer is gone, which closes all of its streams."""
    coordinator = Coordinator(CoordinatorConfig(""))
    jobs: Any = SimpleNamespace(members={})
    streams: dict[int, Any] = {0: "first", 1: "second"}
    told = []

    def gone(stream: object, error: Exception) -> None:
        told.append((stream, error))
        streams.clear()

    engine: Any = SimpleNamespace(refuse_stream=gone)
    config = default_node_config()
    trace = Trace("test")
    beat = Heartbeat(
        config, coordinator, jobs, engine, "node", trace, Outages(), Watchdog(trace), NodeReads
    )
    member: Any = SimpleNamespace(streams=streams, error=None)
    error = LeaseFenced("a newer launch runs")
    beat._end(member, error)
    assert member.error is error
    assert told[0] == ("first", error)
