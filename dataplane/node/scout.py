"""Lists the dataset of the first loader in a process of its own, while the node still imports, and
reads what indexing reads first of its first shards.

A node spends half a second on imports before it can index, and a store takes that long for a few
round trips. The scout is forked as soon as there is what it takes to ask a store: the other
processor has nothing to do yet. What it has not found after a moment, the node asks for itself.

Invariants:
1. It is forked from a process with one thread, before anything is imported that starts others.
2. It only asks: what it has found is used as if the store had answered the node, and an error that
   it gets is nobody's.
3. It does not outlive its deadline, or the node.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from concurrent.futures import ThreadPoolExecutor

import msgspec

from dataplane import machine
from dataplane.errors import DataplaneError
from dataplane.formats.first_reads import first_reads
from dataplane.model import ObjectInfo
from dataplane.store.ahead import AskedAhead, EarlyAnswers
from dataplane.store.base import Store
from dataplane.store.connect import open_store
from dataplane.store.expand import expand
from dataplane.store.urls import base_of, local_path, normalise

DEADLINE_S = 10
_READS_AT_ONCE = 16
_SHARDS_MAX = 32
"""Whose first bytes are read: there may be a million."""
_TIMEOUT_S = 5.0


class Scout:
    """A running scout, and the file in which it leaves what it has found."""

    def __init__(self, pid: int, found_fd: int) -> None:
        self._pid, self._found_fd = pid, found_fd

    def answers(self, patience_s: float) -> EarlyAnswers | None:
        """What it has found, once it has ended; None if it does not end within this time, or has
        failed. Called once.
        """
        try:
            if not self._has_succeeded(patience_s):
                return None
            with open(self._found_fd, "rb", closefd=False) as found:
                found.seek(0)  # the scout has moved it
                return msgspec.msgpack.decode(found.read(), type=EarlyAnswers)
        except (OSError, msgspec.DecodeError):
            return None
        finally:
            os.close(self._found_fd)

    def _has_succeeded(self, patience_s: float) -> bool:
        pidfd = os.pidfd_open(self._pid)
        try:
            if not select.select([pidfd], [], [], patience_s)[0]:
                os.kill(self._pid, signal.SIGKILL)
        finally:
            os.close(pidfd)
        return os.waitpid(self._pid, 0)[1] == 0


def scout(urls: tuple[str, ...]) -> Scout | None:
    """Send a scout for the dataset of these urls; None if they are not remote."""
    try:
        if any(local_path(normalise(url)) is not None for url in urls):
            return None
    except DataplaneError:
        return None  # the node says what is wrong
    found_fd = os.memfd_create("dataplane-scout", os.MFD_CLOEXEC)
    pid = os.fork()
    if pid:
        return Scout(pid, found_fd)
    status = 1
    try:
        machine.set_process("dp-scout", dies_with_parent=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.alarm(DEADLINE_S)
        content = msgspec.msgpack.encode(_asked(urls))
        with open(found_fd, "r+b", closefd=False) as found:
            found.write(content)
        status = 0
    except BaseException:  # noqa: BLE001, S110 - the node asks again, and says what is wrong
        pass
    finally:
        os._exit(status)
    return None


def _asked(urls: tuple[str, ...]) -> EarlyAnswers:
    answers = EarlyAnswers()
    stores: dict[str, Store] = {}

    def connect(url: str) -> Store:
        base = base_of(url)
        if base not in stores:
            stores[base] = AskedAhead(open_store(base, _TIMEOUT_S), answers)
        return stores[base]

    shards = expand(urls, connect)[:_SHARDS_MAX]
    reads = [
        (shard, place)
        for shard in shards
        for place in first_reads(shard.url, shard.size_bytes)
        if place.length
    ]
    with ThreadPoolExecutor(_READS_AT_ONCE) as threads:
        asked = [
            threads.submit(_read, connect(shard.url), shard, place.offset, place.length)
            for shard, place in reads
        ]
        for each in asked:
            with contextlib.suppress(DataplaneError):
                each.result()
    return answers


def _read(store: Store, shard: ObjectInfo, offset: int, length: int) -> None:
    store.read(shard.url, offset, length, shard.etag)
