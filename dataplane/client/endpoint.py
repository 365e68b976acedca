"""How a process reaches the node of its host: one that it starts itself, or one that serves.

No network connection is opened here or anywhere in a trainer: only abstract Unix sockets.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Protocol

from dataplane.client.launch import NodeProcess, node_command, start_node
from dataplane.client.wire import Wire
from dataplane.config import PROTOCOL_VERSION, VERSION
from dataplane.errors import ConfigError, PeerLost, VersionMismatch
from dataplane.rpc import local, names
from dataplane.rpc.messages import Hello, Welcome

START_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0
_PAUSE_S = 0.1


class Endpoint(Protocol):
    """Where a node is to be found; a value that may be pickled and sent to DataLoader workers."""

    def reach(self, deadline: float | None) -> tuple[Wire, str]:
        """A connection whose node has welcomed us, and the node's id. `deadline`: how long to try
        again where that may help; None: as for a first connection.
        """
        ...


@dataclass(frozen=True, slots=True)
class Embedded:
    """The node that the ranks of this host start and share. Whoever comes first starts it."""

    name: str
    command: tuple[str, ...] = field(default_factory=node_command)

    def reach(self, deadline: float | None) -> tuple[Wire, str]:
        """Connect, or take the name and start a node on it.

        Raises:  PeerLost: the node ended while starting, with its last words; or it stays silent.
        """
        if deadline is None:
            deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                sock = local.connect(self.name, _left(deadline))
                return _welcomed(sock, deadline, self.name)
            except PeerLost as error:  # nobody there, or just leaving
                last_error = str(error)
            with contextlib.suppress(FileExistsError):
                return self._start(deadline)
            # Taken, but it hung up: between bind() and listen(), or leaving, or failing to start.
            if time.monotonic() > deadline - _PAUSE_S:
                raise PeerLost(
                    f"the node that another process of this run started is of no use: {last_error}",
                    peer=f"@{self.name}",
                )
            _pause(_PAUSE_S)

    def _start(self, deadline: float) -> tuple[Wire, str]:
        listener = local.listen(self.name)
        try:
            # Before the exec: the kernel then ends this call when the child ends, however it does.
            sock = local.connect(self.name, _left(deadline))
            try:
                node = start_node(listener, self.command)
            except BaseException:
                sock.close()
                raise
        finally:
            listener.close()
        try:
            return self._first_words(node, sock, deadline)
        finally:
            node.close()

    def _first_words(
        self, node: NodeProcess, sock: socket.socket, deadline: float
    ) -> tuple[Wire, str]:
        try:
            reached = _welcomed(sock, deadline, self.name)
        except PeerLost as error:
            raise node.failure() from error
        node.started()
        return reached


@dataclass(frozen=True, slots=True)
class Served:
    """The node of this host that `dataplane serve` runs for the coordinator at `address`."""

    address: str
    name: str

    def reach(self, deadline: float | None) -> tuple[Wire, str]:
        """Connect, trying again with full jitter until the deadline.

        Raises:  PeerLost: nobody serves here.
        """
        until = time.monotonic() + CONNECT_TIMEOUT_S if deadline is None else deadline
        pause_s = _PAUSE_S
        while True:
            try:
                sock = local.connect(self.name, max(0.001, until - time.monotonic()))
                return _welcomed(sock, until, self.name)
            except PeerLost as error:
                if time.monotonic() + pause_s > until:
                    raise PeerLost(
                        f"no node of service {self.address} answers on this host ({error}): start "
                        f"`dataplane serve` here, or `dataplane serve --node --join {self.address}`"
                        " where the coordinator is on another host, as this same user",
                        peer=self.address,
                    ) from error
            _pause(random.uniform(0, pause_s))  # noqa: S311 - jitter is no secret
            pause_s = min(2 * pause_s, 2.0)


def find_endpoint(service: str | None, run: str) -> Endpoint:
    """The node of `service`, or without one the node of this run.

    Raises:  ConfigError: `service` is no address.
    """
    if service:
        return Served(service, names.served_name(os.getuid(), service))
    return Embedded(names.embedded_name(os.getuid(), VERSION, run))


def _welcomed(sock: socket.socket, deadline: float, name: str) -> tuple[Wire, str]:
    wire = Wire(sock)
    try:
        _, uid, _ = local.peer_credentials(sock)
        if uid != os.getuid():
            raise ConfigError(
                f"what listens at @{name} belongs to user {uid}, not to user {os.getuid()}: it is "
                "none of our nodes"
            )
        answer, _ = wire.call(Hello(VERSION, PROTOCOL_VERSION, os.getpid()), deadline)
        if not isinstance(answer, Welcome):
            raise ConfigError(f"what listens at @{name} is no node")
        if (answer.protocol, answer.version) != (PROTOCOL_VERSION, VERSION):
            raise VersionMismatch(
                f"the node at @{name} is dataplane {answer.version}, and this process "
                f"has {VERSION}: install one version on this host, and restart the node",
                expected=VERSION,
                found=answer.version,
            )
    except TimeoutError as error:
        wire.close()
        raise PeerLost(f"the node at @{name} does not answer", peer=f"@{name}") from error
    except BaseException:
        wire.close()
        raise
    return wire, answer.node_id


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)
