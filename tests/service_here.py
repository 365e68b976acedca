"""A coordinator, and a node that has joined it over TCP, in a thread of the test's own process: real
gRPC, sockets and worker processes, without the seconds that two more processes take to start.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from msgspec import structs

from dataplane.coordinator.front import CoordinatorConfig
from dataplane.coordinator.server import CoordinatorServer
from dataplane.model.config import VERSION
from dataplane.node.server import run_node
from dataplane.rpc import local
from dataplane.rpc.address import served_name
from dataplane.rpc.calls import CoordinatorClient
from dataplane.rpc.membership import StatusRequest
from dataplane.security.node_identity import own_identity
from dataplane.security.security import Security
from dataplane.settings import default_node_config


class FileClock:
    """With this clock, files that change are looked at when a test says so, and only then."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def look(self) -> None:
        """Whoever uses them next sees what has changed."""
        self._now += 10.0


class ServiceHere:
    """Where trainers find it, and what the coordinator knows."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, address: str, server: CoordinatorServer
    ) -> None:
        self._loop, self.address, self._server = loop, address, server

    def member_states(self) -> list[str]:
        """The progress of all members of all jobs."""
        asked = self._server.coordinator.status(StatusRequest())
        found = asyncio.run_coroutine_threadsafe(asked, self._loop).result(60)
        return [member.state for job in found.jobs for member in job.members]


@contextmanager
def service_here(head: Security, node: Security, lease_s: float = 2.0) -> Iterator[ServiceHere]:
    """`head` is what the coordinator shows and asks for, `node` what the node does."""
    ready: Future[ServiceHere] = Future()
    stop: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def main() -> None:
        loop, ending = asyncio.get_running_loop(), asyncio.Event()
        stop.append((loop, ending))
        server = CoordinatorServer(CoordinatorConfig(VERSION, lease_s=lease_s), "127.0.0.1:0", head)
        address, identity = await server.start(), own_identity()
        client = CoordinatorClient(address, node, identity=identity)
        config = structs.replace(default_node_config(), coordinator=address)
        try:
            with local.listen(served_name(os.getuid(), address)) as listener:
                made = ServiceHere(loop, address, server)
                await run_node(
                    config, listener, client, identity.node_id, ending,
                    lambda: ready.set_result(made),
                )  # fmt: skip
        finally:
            await client.close()
            await server.stop(0.0)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    thread = threading.Thread(target=run, name="service")
    thread.start()
    try:
        yield ready.result(60)
    finally:
        loop, ending = stop[0]
        loop.call_soon_threadsafe(ending.set)
        thread.join(60)
