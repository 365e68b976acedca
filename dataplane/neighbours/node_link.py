"""Send messages from a lender to its node, without waiting for it."""

from __future__ import annotations

import select
import socket
from collections import deque

from dataplane.model import BlockForm
from dataplane.neighbours.limits import BodyBytes
from dataplane.rpc import lending, local


class NodeLink:
    """The messages that the node has not read yet, in order."""

    def __init__(self, sock: socket.socket, epoll: select.epoll, bodies: BodyBytes) -> None:
        self._sock = sock
        self._epoll = epoll
        self._bodies = bodies
        self._unsent: deque[lending.FromLenderBody] = deque()
        self._is_full = False
        sock.setblocking(False)
        epoll.register(sock.fileno(), select.EPOLLIN)

    def tell(self, body: lending.FromLenderBody) -> None:
        """Send this with the next `flush`."""
        self._unsent.append(body)

    def flush(self) -> None:
        """Send what the socket has room for; the epoll reports when there is more.

        Raises:  PeerLost.
        """
        try:
            while self._unsent:
                local.send(self._sock, lending.FromLender(self._unsent[0]))
                sent = self._unsent.popleft()
                if isinstance(sent, lending.Asked) and sent.form is BlockForm.SLAB:
                    self._bodies.release(sent.node_id, len(sent.slab))
        except BlockingIOError:
            pass
        if self._is_full != bool(self._unsent):
            self._is_full = bool(self._unsent)
            wanted = select.EPOLLIN | (select.EPOLLOUT if self._unsent else 0)
            self._epoll.modify(self._sock.fileno(), wanted)
