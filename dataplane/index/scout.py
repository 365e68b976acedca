"""List the dataset of the first loader in a process of its own, while the node still imports, and
read the bytes that indexing reads first of its first shards.

A node needs a while for imports before it can index, and a store takes that long for a few round
trips. The scout is forked as soon as it has the modules to send requests to a store: the other
processor has nothing to do yet.

Invariants:
1. It is forked from a process with one thread, before any import that starts others.
2. Its results are used as if the store had answered the node, and its errors are not reported.
3. It parses nothing that it reads.
4. It does not outlive its deadline, the node, or the wait for its results.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec import Struct

from dataplane.base import machine, suffixes
from dataplane.formats.first_reads import first_reads
from dataplane.model.errors import DataplaneError
from dataplane.model.records import ObjectInfo, Region
from dataplane.model.typed import complete
from dataplane.store.base import Store
from dataplane.store.connect import open_store
from dataplane.store.expand import expand
from dataplane.store.urls import base_of, local_path, normalise

DEADLINE_S = 10
_READS_AT_ONCE = 32
_SHARDS_MAX = 32
"""Shards that are read ahead: there may be a million."""
_MANIFEST_BYTES_MAX = 64 << 20
_TIMEOUT_S = 5.0
_END_S = 1.0
_LENGTH_BYTES = 8

Connect = Callable[[str], Store]
Listed = tuple[str, int, str]
"""Url, size and etag of an object."""
Part = tuple[str, int, bytes]
"""A url, an offset, and the bytes that are there."""


class Scouted(Struct, frozen=True):
    """The results of a scout: the objects that a dataset's urls name, and the bytes that indexing
    reads first of them; or the content of a saved manifest.
    """

    listed: list[Listed]
    parts: list[Part]
    manifest: bytes = b""

    @property
    def objects(self) -> list[ObjectInfo]:
        """All objects, in order."""
        return [ObjectInfo(*facts) for facts in self.listed]


class Scout:
    """A running scout, and this end of its socket."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self._pid, self._sock = pid, sock

    def result(self, patience_s: float) -> Scouted | None:
        """Return its results, and end it; None if they do not come within this time, or it has
        failed. Call it once, in the process that has sent it.
        """
        try:
            return msgspec.msgpack.decode(_received(self._sock, patience_s), type=complete(Scouted))
        except (OSError, EOFError, msgspec.DecodeError):
            return None
        finally:
            self._sock.close()
            end_child(self._pid)


class Opening(Struct, frozen=True):
    """The dataset that a node opens first, and its scout if the dataset is remote."""

    urls: tuple[str, ...]
    format_name: str
    scout: Scout | None


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
    """Send the results.   Raises:  DataplaneError: errors of stores.  OSError: nobody waits."""

    @functools.cache
    def store_of(base: str) -> Store:
        return open_store(base, _TIMEOUT_S)

    with ThreadPoolExecutor(_READS_AT_ONCE) as threads:
        content = msgspec.msgpack.encode(
            _scouted(urls, lambda url: store_of(base_of(url)), threads)
        )
    sock.settimeout(DEADLINE_S)
    sock.sendall(len(content).to_bytes(_LENGTH_BYTES, "little"))
    sock.sendall(content)


def _scouted(urls: tuple[str, ...], connect: Connect, threads: ThreadPoolExecutor) -> Scouted:
    if len(urls) == 1 and urls[0].endswith(suffixes.MANIFEST):
        return Scouted([], [], _manifest(connect(normalise(urls[0])), normalise(urls[0])))

    def read(shard: ObjectInfo, place: Region) -> Part:
        content = connect(shard.url).read(shard.url, place.offset, place.length, shard.etag)
        return shard.url, place.offset, bytes(content)

    listed = expand(urls, connect)
    reads = [
        threads.submit(read, shard, place)
        for shard in listed[:_SHARDS_MAX]
        for place in first_reads(shard.url, shard.size_bytes)
        if place.length
    ]
    parts = []
    for ended in reads:
        with contextlib.suppress(DataplaneError):
            parts.append(ended.result())
    return Scouted([(info.url, info.size_bytes, info.etag) for info in listed], parts)


def _manifest(store: Store, url: str) -> bytes:
    """Return the content of a saved manifest.   Raises:  DataplaneError: it cannot be read, or is
    too long.
    """
    listed = store.head(url)
    if not 0 < listed.size_bytes <= _MANIFEST_BYTES_MAX:
        raise DataplaneError("the node reads it")
    return bytes(store.read(url, 0, listed.size_bytes, listed.etag))


def _received(sock: socket.socket, patience_s: float) -> bytes:
    """Return the bytes that the other side has sent.

    Raises:  EOFError: it is gone.  TimeoutError: it has not sent all of it within this time.
    """
    deadline = time.monotonic() + patience_s
    length = int.from_bytes(_exactly(sock, _LENGTH_BYTES, deadline), "little")
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
