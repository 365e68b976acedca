"""List the dataset of the first loader in a process of its own, while the node still imports, and
read the bytes that indexing reads of its first shards.

A node needs a while for imports before it can index, and a store takes that long for a few round
trips. The scout is forked as soon as it has the modules to send requests to a store: the other
processor has nothing to do yet. Its results are indexed ahead (node/index_ahead.py) by a process
that requests further bytes from the scout.

Invariants:
1. It is forked from a process with one thread, before any import that starts others.
2. Its results are used as if the store had answered the node, and its errors are not reported.
3. It parses nothing that it reads. Processes that parse can have it read a limited number of bytes
   of the shards that it has listed, and nothing else.
4. It does not outlive its deadline, the node, or the processes that may send it requests.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from dataplane import machine, suffixes
from dataplane.errors import DataplaneError
from dataplane.formats.first_reads import first_reads
from dataplane.index.found import PLACES_MAX, SHARDS_MAX, Part, Place, Scouted
from dataplane.store.base import Store
from dataplane.store.connect import open_store
from dataplane.store.expand import expand
from dataplane.store.urls import base_of, local_path, normalise
from dataplane.typed import complete

DEADLINE_S = 10
_READS_AT_ONCE = 32
_MANIFEST_BYTES_MAX = 64 << 20
_MORE_BYTES_MAX = 64 << 20
"""Bytes that are read for processes that ask."""
_TIMEOUT_S = 5.0
_END_S = 1.0
_LENGTH_BYTES = 8
_ASKED_BYTES_MAX = 32 * PLACES_MAX
"""Bytes of a message that asks for so many places."""

Connect = Callable[[str], Store]


class Scout:
    """A running scout. It serves the holders of this end of its socket; one of them at a time."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self._pid, self._sock = pid, sock

    @property
    def descriptor(self) -> int:
        """The descriptor of the socket, which other children of the node may keep."""
        return self._sock.fileno()

    def found(self, patience_s: float) -> Scouted | None:
        """Return its results; None if they do not come within this time, or it has failed. Call it
        once, before `read`.
        """
        try:
            return msgspec.msgpack.decode(_received(self._sock, patience_s), type=complete(Scouted))
        except (OSError, EOFError, msgspec.DecodeError):
            return None

    def read(self, places: list[Place]) -> list[Part]:
        """Return the parts that it could read, of these places in shards that it has listed;
        PLACES_MAX at most.
        """
        try:
            _send(self._sock, msgspec.msgpack.encode(places))
            return msgspec.msgpack.decode(
                _received(self._sock, DEADLINE_S), type=complete(list[Part])
            )
        except (OSError, EOFError, msgspec.DecodeError):
            return []

    def let_go(self) -> None:
        """Close this end, since another process sends requests. May be called twice."""
        self._sock.close()

    def end(self) -> None:
        """End the process if it still runs. Call it in the node itself, once."""
        self.let_go()
        end_child(self._pid)


def end_child(pid: int) -> None:
    """End this child of the process. If the kernel holds it, the wait is short."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
        pidfd = os.pidfd_open(pid)
        try:
            select.select([pidfd], [], [], _END_S)
        finally:
            os.close(pidfd)
        os.waitpid(pid, os.WNOHANG)


def scout(urls: tuple[str, ...]) -> Scout | None:
    """Send a scout for the dataset of these urls; None if they are not remote."""
    try:
        if any(local_path(normalise(url)) is not None for url in urls):
            return None
    except DataplaneError:
        return None  # the node says what is wrong
    ours, theirs = socket.socketpair()
    try:
        pid = os.fork()
    except OSError:  # the machine starts no process, which the node tells
        ours.close()
        theirs.close()
        return None
    if pid:
        theirs.close()
        return Scout(pid, ours)
    try:
        ours.close()
        machine.set_process("dp-scout", dies_with_parent=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.alarm(DEADLINE_S)
        _serve(urls, theirs)
    except BaseException:  # noqa: BLE001, S110 - the node asks again, and says what is wrong
        pass
    finally:
        os._exit(0)
    return None


def _serve(urls: tuple[str, ...], sock: socket.socket) -> None:
    """Send the results, and read further requested bytes, until nobody sends requests any more.

    Raises:  EOFError: nobody does, or they request too much.  Errors of stores.
    """

    @functools.cache
    def store_of(base: str) -> Store:
        return open_store(base, _TIMEOUT_S)

    def connect(url: str) -> Store:
        return store_of(base_of(url))

    with ThreadPoolExecutor(_READS_AT_ONCE) as threads:
        found = _scouted(urls, connect, threads)
        _send(sock, msgspec.msgpack.encode(found))
        left_bytes = _MORE_BYTES_MAX
        while True:
            asked = _received(sock, DEADLINE_S, _ASKED_BYTES_MAX)
            places = msgspec.msgpack.decode(asked, type=complete(list[Place]))
            left_bytes -= sum(max(length, 0) for *_, length in places)
            if len(places) > PLACES_MAX or left_bytes < 0:
                return
            parts = _read(found, connect, places, threads)
            _send(sock, msgspec.msgpack.encode(parts))


def _scouted(urls: tuple[str, ...], connect: Connect, threads: ThreadPoolExecutor) -> Scouted:
    if len(urls) == 1 and urls[0].endswith(suffixes.MANIFEST):
        return Scouted([], [], _manifest(connect(normalise(urls[0])), normalise(urls[0])))
    listed = expand(urls, connect)
    places = [
        (at, place.offset, place.length)
        for at, shard in enumerate(listed[:SHARDS_MAX])
        for place in first_reads(shard.url, shard.size_bytes)
        if place.length
    ]
    found = Scouted([(one.url, one.size_bytes, one.etag) for one in listed], [])
    found.parts.extend(_read(found, connect, places, threads))
    return found


def _read(
    found: Scouted, connect: Connect, places: Sequence[Place], threads: ThreadPoolExecutor
) -> list[Part]:
    """Return the parts that can be read."""

    def read(at: int, offset: int, length: int) -> Part:
        if not 0 <= at < len(found.listed):
            raise DataplaneError("no object")
        url, size_bytes, etag = found.listed[at]
        if not 0 <= offset < offset + length <= size_bytes:
            raise DataplaneError("outside of the object")
        return at, offset, bytes(connect(url).read(url, offset, length, etag))

    parts = []
    for each in [threads.submit(read, *place) for place in places]:
        with contextlib.suppress(DataplaneError):
            parts.append(each.result())
    return parts


def _manifest(store: Store, url: str) -> bytes:
    """Return the content of a saved manifest.   Raises:  DataplaneError: it cannot be read, or is
    too long.
    """
    listed = store.head(url)
    if not 0 < listed.size_bytes <= _MANIFEST_BYTES_MAX:
        raise DataplaneError("the node reads it")
    return bytes(store.read(url, 0, listed.size_bytes, listed.etag))


def _send(sock: socket.socket, content: bytes) -> None:
    sock.settimeout(DEADLINE_S)
    sock.sendall(len(content).to_bytes(_LENGTH_BYTES, "little"))
    sock.sendall(content)


def _received(sock: socket.socket, patience_s: float, bytes_max: int = sys.maxsize) -> bytes:
    """Return the bytes that the other side has sent.

    Raises:  EOFError: it is gone, or sends more than that.  TimeoutError: it has not sent all of it
    within this time.
    """
    deadline = time.monotonic() + patience_s
    length = int.from_bytes(_exactly(sock, _LENGTH_BYTES, deadline), "little")
    if length > bytes_max:
        raise EOFError
    return _exactly(sock, length, deadline)


def _exactly(sock: socket.socket, length: int, deadline: float) -> bytes:
    content = bytearray()
    while len(content) < length:
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        piece = sock.recv(min(length - len(content), 1 << 20))
        if not piece:
            raise EOFError
        content += piece
    return bytes(content)
