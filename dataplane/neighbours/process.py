"""The process of a lender, as the fork server starts it."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket

from dataplane.errors import PeerLost
from dataplane.machine import collect_rarely, raise_descriptor_limit
from dataplane.neighbours.lender import Lender
from dataplane.neighbours.limits import Limits
from dataplane.rpc import lending, local
from dataplane.trace import configure, tell_suppressed


def run(sock: socket.socket) -> None:
    """Lend until the node goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    collect_rarely()
    raise_descriptor_limit()
    try:
        first, descriptors = local.receive(sock, lending.ToLender)
        start = first.body
        assert isinstance(start, lending.StartLending)
        configure(start.log_level, start.log_format)
        arena_fd, listener_fd = descriptors
        with socket.socket(fileno=listener_fd) as listener:
            Lender(sock, arena_fd, listener, start, Limits()).serve()
    except PeerLost:
        tell_suppressed(is_last=True)


def main(descriptor: int, _memory_bytes: int) -> None:
    """The process: its socket is an inherited descriptor."""
    with socket.socket(fileno=descriptor) as sock:
        run(sock)
    os._exit(0)
