"""Each test sees all lines of its own: a minute has only so many."""

from __future__ import annotations

import pytest

from dataplane.base.trace import Trace
from dataplane.coordinator import front
from dataplane.rpc import connections, receiving
from dataplane.store import url_policy


@pytest.fixture(autouse=True)
def fresh_minute(monkeypatch):
    for module in (connections, receiving, url_policy):
        monkeypatch.setattr(module, "_trace", Trace("security"))
    monkeypatch.setattr(front, "_audit", Trace("security"))
