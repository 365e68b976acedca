"""A trainer's connection with its node."""

from __future__ import annotations

import asyncio
import os
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dataplane.config import PROTOCOL_VERSION, VERSION
from dataplane.node.server import TrainerConnection
from dataplane.rpc import local, messages
from dataplane.trace import Trace

HELLO = messages.Hello(VERSION, PROTOCOL_VERSION, os.getpid())


def fake_server(closed: asyncio.Event) -> Any:
    return SimpleNamespace(
        door=SimpleNamespace(greeted=lambda _: None),
        heartbeat=SimpleNamespace(awaited=""),
        jobs=SimpleNamespace(),
        node_id="node-1",
        stopping=False,
        trace=Trace("node"),
        forget=lambda _: closed.set(),
    )


def test_a_trainer_that_asks_and_hangs_up_at_once_leaves_nothing_that_was_never_run(
    recwarn: pytest.WarningsRecorder,
) -> None:
    async def hung_up() -> None:
        closed = asyncio.Event()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        TrainerConnection(cast("Any", fake_server(closed)), ours)
        with theirs:
            local.send(theirs, messages.ToNode(1, HELLO))
            answer, _ = await asyncio.to_thread(local.receive, theirs, messages.FromNode)
            assert isinstance(answer.body, messages.Welcome)
            local.send(theirs, messages.ToNode(2, messages.OpenStream("job", 0, 0)))
        await closed.wait()

    asyncio.run(hung_up())
    assert not [str(one.message) for one in recwarn if "never awaited" in str(one.message)]
