"""Lists the dataset of the first loader in a process of its own, while the node still imports, and
reads what indexing reads first of its first shards.

A node spends a while on imports before it can index, and a store takes that long for a few round
trips. The scout is forked as soon as there is what it takes to ask a store: the other processor has
nothing to do yet. What it has found is indexed ahead (node/index_ahead.py), too.

Invariants:
1. It is forked from a process with one thread, before anything is imported that starts others.
2. It only asks: what it has found is used as if the store had answered the node, and an error that
   it gets is nobody's.
3. It does not outlive its deadline, or the node.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
from concurrent.futures import ThreadPoolExecutor

import msgspec

from dataplane import machine, suffixes
from dataplane.errors import DataplaneError
from dataplane.formats.first_reads import first_reads
from dataplane.index.found import SHARDS_MAX, Scouted
from dataplane.store.base import Store
from dataplane.store.connect import open_store
from dataplane.store.expand import expand
from dataplane.store.urls import base_of, local_path, normalise

DEADLINE_S = 10
_READS_AT_ONCE = 16
_MANIFEST_BYTES_MAX = 64 << 20
_TIMEOUT_S = 5.0


class Scout:
    """A running scout, and the file in which it leaves what it has found."""

    def __init__(self, pid: int, found_fd: int) -> None:
        self._pid, self.found_fd = pid, found_fd

    def found(self, patience_s: float) -> Scouted | None:
        """What it has found, once it has ended; None if it does not end within this time, or has
        failed. Other children of the node may call it, too.
        """
        try:
            pidfd = os.pidfd_open(self._pid)
            try:
                if not select.select([pidfd], [], [], patience_s)[0]:
                    return None
            finally:
                os.close(pidfd)
            content = os.pread(self.found_fd, os.fstat(self.found_fd).st_size, 0)
            return msgspec.msgpack.decode(content, type=Scouted)
        except (OSError, msgspec.DecodeError):
            return None

    def end(self) -> None:
        """End it if it still runs. In the node itself, once."""
        os.close(self.found_fd)
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def scout(urls: tuple[str, ...]) -> Scout | None:
    """Send a scout for the dataset of these urls; None if they are not remote."""
    try:
        if any(local_path(normalise(url)) is not None for url in urls):
            return None
    except DataplaneError:
        return None  # the node says what is wrong
    found_fd = os.memfd_create("dataplane-scout", os.MFD_CLOEXEC)
    try:
        pid = os.fork()
    except OSError:  # the machine starts no process, which the node tells
        os.close(found_fd)
        return None
    if pid:
        return Scout(pid, found_fd)
    try:
        machine.set_process("dp-scout", dies_with_parent=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.alarm(DEADLINE_S)
        content = msgspec.msgpack.encode(_scouted(urls))
        with open(found_fd, "r+b", closefd=False) as found:
            found.write(content)
    except BaseException:  # noqa: BLE001, S110 - the node asks again, and says what is wrong
        pass
    finally:
        os._exit(0)
    return None


def _scouted(urls: tuple[str, ...]) -> Scouted:
    @functools.cache
    def store_of(base: str) -> Store:
        return open_store(base, _TIMEOUT_S)

    def connect(url: str) -> Store:
        return store_of(base_of(url))

    if len(urls) == 1 and urls[0].endswith(suffixes.MANIFEST):
        return Scouted([], [], _manifest(connect(normalise(urls[0])), normalise(urls[0])))
    listed = expand(urls, connect)
    places = [
        (at, place.offset, place.length)
        for at, shard in enumerate(listed[:SHARDS_MAX])
        for place in first_reads(shard.url, shard.size_bytes)
        if place.length
    ]

    def read(at: int, offset: int, length: int) -> tuple[int, int, bytes]:
        shard = listed[at]
        content = connect(shard.url).read(shard.url, offset, length, shard.etag)
        return at, offset, bytes(content)

    parts = []
    with ThreadPoolExecutor(_READS_AT_ONCE) as threads:
        for each in [threads.submit(read, *place) for place in places]:
            with contextlib.suppress(DataplaneError):
                parts.append(each.result())
    return Scouted([(one.url, one.size_bytes, one.etag) for one in listed], parts)


def _manifest(store: Store, url: str) -> bytes:
    """The content of a saved one.   Raises:  DataplaneError: it cannot be read, or is too long."""
    listed = store.head(url)
    if not 0 < listed.size_bytes <= _MANIFEST_BYTES_MAX:
        raise DataplaneError("the node reads it")
    return bytes(store.read(url, 0, listed.size_bytes, listed.etag))
