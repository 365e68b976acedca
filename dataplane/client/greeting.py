"""The first messages between a process and a node: they introduce both, and check that they fit
together.
"""

from __future__ import annotations

import os
import socket

from dataplane.client.waiting import Notice
from dataplane.client.wire import NoAnswer, Wire
from dataplane.config import PROTOCOL_VERSION, VERSION
from dataplane.errors import ConfigError, DataplaneError, PeerLost, VersionMismatch
from dataplane.rpc import sockets
from dataplane.rpc.messages import Hello, Welcome


def wire_of(sock: socket.socket, name: str) -> Wire:
    """Make a connection to the node of this name, over a socket that it then owns.

    Raises:  ConfigError: another user listens there.
    """
    wire = Wire(sock)
    _, uid, _ = sockets.peer_credentials(sock)
    if uid != os.getuid():
        wire.close()
        raise ConfigError(
            f"what listens at @{name} belongs to user {uid}, not to user {os.getuid()}: it is not "
            "our node"
        )
    return wire


def hello(wire: Wire, deadline: float) -> int:
    """Send Hello, and return the id of the answer.   Raises:  PeerLost, NoAnswer."""
    return wire.ask(Hello(VERSION, PROTOCOL_VERSION, os.getpid()), deadline)


def welcomed(wire: Wire, request_id: int, name: str, deadline: float, notice: Notice) -> Welcome:
    """Return the answer to a Hello; on an error, the connection is closed.

    Raises:  PeerLost: it does not answer, or is gone.  ConfigError: it is no node.
    VersionMismatch: it has another version.
    """
    try:
        answer = wire.answered(request_id, deadline, notice)[0]
        if isinstance(answer, DataplaneError):
            raise answer
        if not isinstance(answer, Welcome):
            raise ConfigError(f"the process that listens at @{name} is not a node")
        if (answer.protocol, answer.version) != (PROTOCOL_VERSION, VERSION):
            raise VersionMismatch(
                f"the node at @{name} is dataplane {answer.version}, and this process "
                f"has {VERSION}: install one version on this host, and restart the node",
                expected=VERSION,
                found=answer.version,
            )
    except NoAnswer:
        wire.close()
        raise PeerLost(f"the node at @{name} does not answer", peer=f"@{name}") from None
    except BaseException:
        wire.close()
        raise
    return answer
