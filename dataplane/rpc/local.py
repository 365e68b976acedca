"""Unix SOCK_SEQPACKET sockets: one message a packet, file descriptors beside it.

Used between trainer and node and between node and worker. No gRPC here: a training process links
this module.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from typing import TypeVar

from dataplane.errors import ConfigError, DataplaneError, PeerLost
from dataplane.rpc.convert import decode, encode

T = TypeVar("T")

PACKET_BYTES_MAX = 192 * 1024
_DESCRIPTORS_MAX = 4
_CREDENTIALS = struct.Struct("3i")


def listen(name: str, backlog: int = 128) -> socket.socket:
    """A listening socket in the abstract namespace; it leaves no file behind.

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
    """A connection to the node that listens under this name.

    Raises:  PeerLost: nobody listens there.
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


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, for a process and its child."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _widen(left)
    _widen(right)
    return left, right


def _widen(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * PACKET_BYTES_MAX)


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the other side, as the kernel knows them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def send(sock: socket.socket, value: object, descriptors: tuple[int, ...] = ()) -> None:
    """One message, with the file descriptors that belong to it.

    Raises:  PeerLost: the other side is gone.  ConfigError: the message is too large.
    BlockingIOError: the socket does not wait and has no room.
    """
    wire = encode(value)
    if len(wire) > PACKET_BYTES_MAX:
        raise ConfigError(
            f"a message of {len(wire)} bytes is over the limit of {PACKET_BYTES_MAX}: "
            "name fewer urls (a prefix, a glob or a manifest) or fewer columns"
        )
    ancillary = []
    if descriptors:
        fds = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
    try:
        sock.sendmsg([wire], ancillary)
    except (BlockingIOError, TimeoutError):
        raise
    except OSError as error:
        raise PeerLost(f"the other side is gone: {error}", peer="") from error


def receive(sock: socket.socket, cls: type[T]) -> tuple[T, tuple[int, ...]]:
    """The next message and its file descriptors, which the caller owns.

    Raises:  PeerLost: the other side is gone.  TimeoutError: the socket's timeout passed.
    BlockingIOError: the socket does not wait and has nothing.
    """
    room = socket.CMSG_SPACE(_DESCRIPTORS_MAX * 4)
    try:
        wire, ancillary, flags, _ = sock.recvmsg(PACKET_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC)
    except (BlockingIOError, TimeoutError):
        raise
    except OSError as error:
        raise PeerLost(f"the other side is gone: {error}", peer="") from error
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    try:
        if not wire:
            raise PeerLost("the other side closed the connection", peer="")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ConfigError("a packet was cut off: the other side speaks another protocol")
        return decode(cls, wire), tuple(fds)
    except DataplaneError:
        for fd in fds:
            os.close(fd)
        raise
