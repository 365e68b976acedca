"""Unix SOCK_SEQPACKET sockets: one message per packet, with its file descriptors.

Used between trainer and node and between node and worker. This module does not use gRPC, since
training processes import it.

A message too large for a packet (very wide tables have such messages) is sent in a sealed memfd:
the packet gives its size, and carries the memfd after the message's own descriptors. Such a packet
starts with a byte that no message starts with.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import math
import os
import select
import socket
import struct
from collections.abc import Iterator
from typing import TypeVar

from dataplane.model.errors import ConfigError, DataplaneError, PeerLost
from dataplane.rpc.bounds import check_values
from dataplane.rpc.codec import decode, encode

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


T = TypeVar("T")

MESSAGE_BYTES_MAX = 64 << 20
_DESCRIPTORS_MAX = 4
_LAST_MESSAGES_MAX = 1024
_LARGE = 0
_LARGE_PACKET = struct.Struct("<BQ")
_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_SEALS = 0x0001 | 0x0002 | 0x0004 | 0x0008  # SEAL, SHRINK, GROW, WRITE


def send(sock: socket.socket, value: object, descriptors: tuple[int, ...] = ()) -> None:
    """Send one message, with the file descriptors that belong to it.

    Raises:  PeerLost: the other side is gone.  ConfigError: the message is too large.
    BlockingIOError: the socket is non-blocking and has no room.
    """
    send_encoded(sock, encode(value), descriptors)


def send_encoded(sock: socket.socket, wire: bytes, descriptors: tuple[int, ...] = ()) -> None:
    """Send a message that is already encoded: see `send`."""
    if len(wire) <= PACKET_BYTES_MAX:
        _send_packet(sock, wire, descriptors)
        return
    if len(wire) > MESSAGE_BYTES_MAX:
        raise ConfigError(
            f"a message of {len(wire)} bytes is over the limit of {MESSAGE_BYTES_MAX}: "
            "name fewer urls (a prefix, a glob or a manifest) or fewer columns"
        )
    fd = _sealed(wire)
    try:
        _send_packet(sock, _LARGE_PACKET.pack(_LARGE, len(wire)), (*descriptors, fd))
    finally:
        os.close(fd)


def _send_packet(sock: socket.socket, wire: bytes, descriptors: tuple[int, ...]) -> None:
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


def _sealed(wire: bytes) -> int:
    """Return a sealed memfd with this content."""
    try:
        fd = os.memfd_create("dataplane-message", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise ConfigError(f"no memory for a message of {len(wire)} bytes: {error}") from error
    try:
        view = memoryview(wire)
        while view:
            view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"no memory for a message of {len(wire)} bytes: {error}") from error
    return fd


class Packet:
    """A received packet, and the descriptors that came with it. `close` closes the descriptors,
    unless `read` has handed them to the caller.
    """

    def __init__(self, wire: bytes, fds: array.array[int]) -> None:
        self._wire, self._fds = wire, fds

    def is_longer(self, length: int) -> bool:
        """Return whether the packet's message may have more bytes than `length`."""
        return len(self._wire) > length or self._wire[0] == _LARGE

    def read(self, cls: type[T], values_max: float = math.inf) -> tuple[T, tuple[int, ...]]:
        """Return the message and its descriptors, which the caller owns.

        Raises:  DataplaneError: the packet is not such a message, or its lists are too long.
        """
        fds, self._fds = self._fds, array.array("i")
        try:
            wire = _large(self._wire, fds) if self._wire[0] == _LARGE else self._wire
            check_values(cls.__name__, wire, values_max)
            return decode(cls, wire), tuple(fds)
        except DataplaneError:
            for fd in fds:
                os.close(fd)
            raise

    def close(self) -> None:
        """Drop the packet, and close its descriptors. May be called twice."""
        while self._fds:
            os.close(self._fds.pop())


def receive_packet(sock: socket.socket) -> Packet:
    """Receive the next packet.

    Raises:  PeerLost: the other side is gone.  TimeoutError: the socket's timeout passed.
    BlockingIOError: the socket is non-blocking and empty.  ConfigError: the packet is cut off.
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
    packet = Packet(wire, fds)
    if not wire:
        packet.close()
        raise PeerLost("the other side closed the connection", peer="")
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        packet.close()
        raise ConfigError("a packet was cut off: the other side speaks another protocol")
    return packet


def receive(sock: socket.socket, cls: type[T]) -> tuple[T, tuple[int, ...]]:
    """Receive the next message and its file descriptors, which the caller owns.

    Raises:  as `receive_packet`, and ConfigError: the packet is not such a message.
    """
    return receive_packet(sock).read(cls)


def has_packet(descriptor: int) -> bool:
    """Return whether a packet of this socket, or its end, was not received yet."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def last_messages(sock: socket.socket, cls: type[T], bytes_max: int) -> Iterator[T]:
    """Yield the messages left in the socket of a peer that is gone. File descriptors are closed,
    and messages of more than `bytes_max` bytes are dropped.

    The kernel may report the end of the connection before these messages: a send fails at once, and
    so does the first receive if the peer left something unread.
    """
    ends = 0
    for _ in range(_LAST_MESSAGES_MAX):
        try:
            packet = receive_packet(sock)
            if packet.is_longer(bytes_max):
                packet.close()
                continue
            message, descriptors = packet.read(cls)
        except (BlockingIOError, DataplaneError):
            ends += 1
            if ends > 1:  # only the second error means that no messages are left
                return
            continue
        for fd in descriptors:
            os.close(fd)
        yield message


def _large(packet: bytes, fds: array.array[int]) -> bytes:
    """Return the message in the memfd of the last descriptor, which is removed from `fds`.

    Raises:  ConfigError: the descriptor is not a sealed memfd of the size that the packet gives.
    Other files are refused, since only a sealed memfd never blocks a read and never changes.
    """
    if len(packet) != _LARGE_PACKET.size or not fds:
        raise ConfigError("a large message came without its memory")
    fd, size = fds.pop(), _LARGE_PACKET.unpack(packet)[1]
    try:
        seals = 0
        with contextlib.suppress(OSError):  # the descriptor is not a memfd
            seals = fcntl.fcntl(fd, _F_GET_SEALS)
        if seals & _SEALS != _SEALS or os.fstat(fd).st_size != size or size > MESSAGE_BYTES_MAX:
            raise ConfigError(
                f"a large message must come in a sealed memfd of exactly {size} bytes, and of "
                f"{MESSAGE_BYTES_MAX} at most"
            )
        with os.fdopen(os.dup(fd), "rb", buffering=0) as file:
            file.seek(0)
            return file.read()
    finally:
        os.close(fd)
