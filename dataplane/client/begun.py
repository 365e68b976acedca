"""A node that was started when a loader was made, before its first use.

A node takes a while to start, to list a dataset and to index it, and a training script has other
things to do before its first batch. Nothing here imports messages: the node is started first.

Invariants:
1. The connection that is held here, or the node's other trainers, keep the node alive.
2. A forked child has no part in the node.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import weakref
from typing import TYPE_CHECKING

from dataplane.client.launch import NodeProcess
from dataplane.errors import DataplaneError, PeerLost

if TYPE_CHECKING:
    from dataplane.client.waiting import Notice
    from dataplane.client.wire import Wire
    from dataplane.rpc.messages import Welcome

_GREET_S = 5.0


class BegunNode:
    """A started node, and the first connection with it. Used by one thread at a time."""

    def __init__(self, sock: socket.socket, node: NodeProcess, name: str) -> None:
        self._sock: socket.socket | None = sock
        self._node, self._name = node, name
        self._wire: Wire | None = None
        self._hello = 0
        self._pid = os.getpid()
        _all.add(self)

    def greet(self) -> None:
        """Send Hello, so that the node knows of a trainer; does not wait for its answer."""
        from dataplane.client import greeting

        sock, self._sock = self._sock, None
        assert sock is not None
        self._wire = greeting.wire_of(sock, self._name)
        with contextlib.suppress(DataplaneError, TimeoutError):  # `welcomed` tells
            self._hello = greeting.hello(self._wire, time.monotonic() + _GREET_S)

    def welcomed(self, deadline: float, notice: Notice) -> tuple[Wire, Welcome]:
        """Return the connection, once the node has answered. Works once; nothing is held here after
        that.

        Raises:  PeerLost: the node ended during its start, with its last output, or does not
        answer.  ConfigError: its settings are wrong.  VersionMismatch.
        """
        from dataplane.client import greeting

        if self._wire is None:
            self.greet()
        wire, self._wire = self._wire, None
        assert wire is not None
        try:
            try:
                welcome = greeting.welcomed(wire, self._hello, self._name, deadline, notice)
            except PeerLost:
                raise self._node.failure() from None
            self._node.started()
            return wire, welcome
        finally:
            self._node.close()

    def close(self) -> None:
        """End the node, which nobody needs. May be called twice."""
        if os.getpid() != self._pid:
            return
        wire, self._wire = self._wire, None
        sock, self._sock = self._sock, None
        if wire is not None:
            wire.close()
        if sock is not None:
            sock.close()
        if wire is not None or sock is not None:
            self._node.close()

    def abandon(self) -> None:
        """Drop the connection in a forked child: it is the parent's."""
        if self._wire is not None:
            self._wire.abandon()
        if self._sock is not None:
            self._sock.close()
        if self._wire is not None or self._sock is not None:
            self._node.close()
        self._wire = self._sock = None


_all: weakref.WeakSet[BegunNode] = weakref.WeakSet()


def _abandon_all() -> None:
    for each in list(_all):
        each.abandon()
    _all.clear()


os.register_at_fork(after_in_child=_abandon_all)
