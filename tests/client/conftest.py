"""Sessions with fake nodes."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import fake_node
import pytest
from fake_node import FakeNode, Script, open_job, serving

from dataplane.client.endpoint import Embedded, Served
from dataplane.client.session import Session
from dataplane.rpc.messages import OpenJob


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def fake(name: str) -> Iterator[Callable[..., FakeNode]]:
    """Start a fake node in a thread, under `name`."""
    with contextlib.ExitStack() as stack:
        yield lambda **script: stack.enter_context(serving(Script(**script), name))


@pytest.fixture
def session(name: str) -> Iterator[Callable[..., Session]]:
    """A session with the node in the thread."""
    with contextlib.ExitStack() as stack:

        def make(job: OpenJob | None = None, **given: Any) -> Session:
            made = Session(Served("host:1", name), job or open_job(), **given)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def embedded(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Session]]:
    """A session that starts a fake node as a child process."""
    with contextlib.ExitStack() as stack:

        def make(**script: Any) -> Session:
            monkeypatch.setenv("FAKE_NODE", fake_node.environment(Script(**script)))
            made = Session(Embedded(name, fake_node.COMMAND), open_job())
            stack.callback(made.close)
            return made

        yield make
