"""Unix SOCK_SEQPACKET sockets between processes of one host: rpc/local.py sends messages over them.

This module does not import the messages, which would delay the start of a node by a trainer.
"""

from __future__ import annotations

import socket
import struct

from dataplane.model.errors import PeerLost

PACKET_BYTES_MAX = 192 * 1024
_HOLDER_TIMEOUT_S = 1.0
_CREDENTIALS = struct.Struct("3i")


def listen(name: str, backlog: int = 128) -> socket.socket:
    """Return a listening socket in the abstract namespace, which leaves no file behind.

    Raises:  FileExistsError: another process has that name.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind("\0" + name)
    except OSError as error:
        listener.close()
        raise FileExistsError(f"@{name} is taken") from error
    listener.listen(backlog)
    return listener


def connect(name: str, timeout_s: float) -> socket.socket:
    """Return a connection to the node that listens under this name.

    Raises:  PeerLost: no process listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _widen(sock)
    sock.settimeout(timeout_s)
    try:
        sock.connect("\0" + name)
    except OSError as error:
        sock.close()
        raise PeerLost(f"no node listens at @{name}: {error}", peer=f"@{name}") from error
    return sock


def holder_of(name: str) -> tuple[int, int] | None:
    """Return the (pid, uid) of the process that listens under this name; None if it does not accept
    a connection.
    """
    try:
        with connect(name, _HOLDER_TIMEOUT_S) as sock:
            return peer_credentials(sock)[:2]
    except PeerLost:
        return None


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets, for a process and its child."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _widen(left)
    _widen(right)
    return left, right


def _widen(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * PACKET_BYTES_MAX)


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Return the (pid, uid, gid) of the peer, from the kernel."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid
