"""Read an object: in pieces, into memory, and by two requests that race.

A request for a whole object would last as long as its consumer takes. It would exceed the timeouts
of clients and proxies, and could not be resumed. So every store streams an object in pieces, each
pinned to the object's etag.

Invariants:
1. Exactly one of two racing requests wins. After that, the loser never writes into the destination.
2. If there may be a race for a destination, a store writes into it only between `hold` and `claim`,
   or after `claim`; and in either case only after `sent`, or through a `Sink`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import cache, partial
from typing import Protocol

from typing_extensions import Buffer

from dataplane.model.errors import DatasetChangedError, StoreError, TruncatedRead
from dataplane.model.joined import Joined, head_of
from dataplane.model.records import ObjectInfo
from dataplane.store.base import Filling, Store
from dataplane.store.urls import FILE_PREFIX, base_of


class EndedEarlyError(Exception):
    """Another request has read these bytes: this read is over, and has no result."""


class Sink(Protocol):
    """Memory that is not mapped yet: a part of the file `fd`, which is filled from its beginning.
    The next byte belongs at `offset`. Methods raise the errors of `Race.sent`.
    """

    fd: int
    offset: int

    def write(self, body: Buffer) -> int:
        """Write these bytes, and return how many were written."""

    def moved(self, count: int, error: int = 0) -> None:
        """Note that the kernel has written this many bytes at `offset`, and the error that stopped
        the kernel; 0 for none.
        """


class Race:
    """The first request of a read, which a second request may overtake. Thread-safe.

    `meanwhile` prepares the destination; it is called once, while the answer is on its way. `sink`
    returns a Sink for a part of the destination, or None if there is none; bytes that are written
    through a Sink do not need the preparation.
    """

    def __init__(
        self,
        meanwhile: Callable[[], None] | None = None,
        sink: Callable[[memoryview], Sink | None] | None = None,
    ) -> None:
        self._meanwhile = meanwhile
        self._sink = sink
        self._changed = threading.Condition()
        self._sock: socket.socket | None = None
        self._is_won = False
        self._is_over = False
        self._is_cut_off = False

    def hold(self, sock: socket.socket) -> None:
        """Note that the first request is about to be sent over this socket, and its answer written
        into the destination.

        Raises:  EndedEarlyError.
        """
        with self._changed:
            self._check()
            self._sock = sock

    def sent(self) -> None:
        """Note that the first request was sent, or that its answer is already here, and prepare the
        destination. May be called again.

        Raises:  errors of `meanwhile`.
        """
        meanwhile = self._meanwhile
        if meanwhile is not None:
            meanwhile()
            self._meanwhile = None

    @property
    def has_sinks(self) -> bool:
        """Whether parts of the destination may have a Sink."""
        return self._sink is not None

    def sink(self, into: memoryview) -> Sink | None:
        """Return a new Sink for this part of the destination, if there is one."""
        return None if self._sink is None else self._sink(into)

    def release(self) -> None:
        """Note that the first request is over, whatever its outcome, and writes no more."""
        with self._changed:
            self._sock = None
            self._changed.notify_all()

    def claim(self) -> None:
        """Let the first request win, unless it was ended early. Called when the first request has
        all bytes, or has failed; may be called twice.

        Raises:  EndedEarlyError.
        """
        with self._changed:
            self._check()
            self._is_won = True

    def cut_off(self) -> None:
        """Make the first request fail in whatever it waits for."""
        with self._changed:
            self._is_cut_off = True
            if self._sock is not None:
                _shut(self._sock)

    def overtake(self, timeout_s: float) -> bool:
        """End the first request, since the second has all bytes. Return True once the first writes
        no more, or False if it has won.

        Raises:  TimeoutError: the first request does not end.
        """
        with self._changed:
            if self._is_won:
                return False
            self._is_over = True
            if self._sock is not None:
                _shut(self._sock)
            if not self._changed.wait_for(lambda: self._sock is None, timeout_s):
                raise TimeoutError
            return True

    @property
    def is_over(self) -> bool:
        """Whether the first request was ended early."""
        return self._is_over

    @property
    def is_cut_off(self) -> bool:
        """Whether the first request was made to fail."""
        return self._is_cut_off

    def _check(self) -> None:
        if self._is_over:
            raise EndedEarlyError


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # Call the method of the plain socket: a TLS socket's own must not be called from another
        # thread.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


_local = threading.local()


@contextlib.contextmanager
def raced(race: Race) -> Iterator[None]:
    """Make the thread's reads within the block the first request of this race."""
    _local.race = race
    try:
        yield
    finally:
        _local.race = None


def current_race() -> Race:
    """Return the race of this thread's read; without one, a race without a second request."""
    return getattr(_local, "race", None) or Race()


@contextlib.contextmanager
def first_request() -> Iterator[Race]:
    """Return the race of this thread's read, whose first request is made within the block.

    Raises:  EndedEarlyError: the request failed because it was ended early.
    """
    race = current_race()
    try:
        yield race
    except Exception:
        if race.is_over:
            raise EndedEarlyError from None
        raise
    finally:
        race.release()


# Whole objects as ranged reads, and the etags that pin them.

PIECE_BYTES = 8 << 20
NO_ETAG = "modified-"
"""The prefix of etags that are made here from time and size, for servers without etags."""
_WEAK = "W/"
_OF_NOTHING = hashlib.blake2b(b"", digest_size=8).hexdigest()


def etag_of_size(size_bytes: int) -> str:
    """Return the etag of an object of which the store knows only the size. Another object of the
    same size has the same etag.
    """
    return f"{_OF_NOTHING}-{size_bytes:x}"


def no_version(url: str) -> StoreError:
    """Return the error for an object whose changes could not be detected."""
    return StoreError(
        f"{url}: the server gives neither ETag nor Last-Modified, so a changed object could not be "
        "told from the one that was indexed. Use a server that gives one",
        shard=url,
    )


def in_pieces(store: Store, url: str, etag: str) -> Iterator[Buffer]:
    """Yield the object from its start. Every piece but the last has PIECE_BYTES.

    Raises:  DatasetChangedError.  Errors of the store's `read` and `head`.
    """
    info = store.head(url)
    check_etag(info, etag)
    for offset in range(0, info.size_bytes, PIECE_BYTES):
        yield store.read(url, offset, min(PIECE_BYTES, info.size_bytes - offset), etag)


def check_etag(info: ObjectInfo, etag: str) -> None:
    """Refuse an object that is not the pinned one.

    Raises:  DatasetChangedError: shard, expected, found.
    """
    if info.etag != etag:
        raise DatasetChangedError(
            f"{info.url} changed since it was indexed: its etag was {etag} and is now "
            f"{info.etag}. Index the dataset again, or restore the object",
            shard=info.url,
            expected=etag,
            found=info.etag,
        )


def short_read(url: str, offset: int, length: int, count: int, where: str = "") -> TruncatedRead:
    """Return the error for an answer of `count` bytes to a read of `length`. `where` says where the
    bytes begin, if not at `offset`.
    """
    return TruncatedRead(
        f"{url} gave {count} bytes{where} of the {length} requested at {offset}",
        shard=url,
        offset=offset,
        expected=length,
        found=count,
    )


def unmet(store: Store, url: str, etag: str) -> StoreError | DatasetChangedError:
    """Return the error for a read that was refused because the object has another etag (412); it
    names the present etag. Some servers and proxies refuse although the etag is the same.
    """
    try:
        check_etag(store.head(url), etag)
    except (StoreError, DatasetChangedError) as better:
        return better
    return StoreError(
        f"{url}: a read of the object with the etag {etag} is refused (HTTP 412), though it has "
        "this etag: the server, or a proxy before it, does not know If-Match. Use one that does",
        shard=url,
    )


def is_strong(etag: str) -> bool:
    """Return whether a server accepts this etag in a condition (If-Match). A weak etag never
    matches there, even if the object is unchanged.

    Source: RFC 9110, 13.1.1.
    """
    return not etag.startswith((NO_ETAG, _WEAK))


def copy_into(body: Buffer, *into: memoryview) -> None:
    """Copy the answer to a read into these buffers, one after the other, as the first request of
    this thread's race. The interpreter lock is released meanwhile.
    """
    import numpy as np  # a late import: a process that only lists a store needs no arrays

    race = current_race()
    race.sent()
    race.claim()
    source, at = np.frombuffer(memoryview(body), np.uint8), 0
    for part in into:
        np.copyto(np.frombuffer(part, np.uint8), source[at : at + len(part)])
        at += len(part)


def fill(store: Store, url: str, offset: int, etag: str, *into: memoryview) -> None:
    """Fill these buffers, one after the other, with bytes of an object, by the fastest method that
    the store has.

    Raises:  as `Store.read`.
    """
    if isinstance(store, Filling):
        store.read_into(url, offset, etag, *into)
    else:
        copy_into(store.read(url, offset, sum(map(len, into)), etag), *into)


# -- joined shards ---------------------------------------------------------------------------------
#
# Read shards that are joined from several objects (model/joined.py): many small reads at a time.
#
# Invariants:
# 1. Each member is read from its own store, pinned to its own etag, with that store's retries. The
#    error of a member names the member.
# 2. The members are read into memory of their own, and then copied: two racing requests for a shard
#    never write into the same memory.
# 3. A store that does not answer holds up the reads of no other store: the first stores each have
#    threads of their own. After a failure, members whose reads have not begun are not read.

_AT_ONCE, _STORES_MAX = 128, 16
"""The most reads of members of one store, and the most stores with threads of their own."""
_LOOK_S = 1.0
Connect = Callable[[str], Store]


def read_joined(connect: Connect, url: str, offset: int, length: int, etag: str) -> Buffer:
    """Implement `Store.read` for a joined shard; `connect` returns the store of a member."""
    head, body = head_of(etag), bytearray(length)
    start = head[offset : offset + length]
    body[: len(start)] = start
    joined, at, view = Joined.of(url, etag), len(start), memoryview(body)
    reads: dict[str, list[Callable[[], None]]] = {}
    for number, skipped, size in joined.parts(len(head), offset, length):
        member, into = joined.members[number], view[at : at + size]
        at += size
        read = partial(_read, connect, member, skipped, into)
        reads.setdefault(base_of(member.url), []).append(read)
    pools, ends = _pools(os.getpid()), list[Future[None]]()
    for base, own in reads.items():
        # Local files are read by one thread. It is another one than this, which may be in a race.
        groups = [own] if base.startswith(FILE_PREFIX) else [[read] for read in own]
        ends += [pools.of(base).submit(_run, group) for group in groups]
    _await(ends)
    return body


def _await(ends: Collection[Future[None]]) -> None:
    """Wait until all members are read, one has failed, or another request has read the shard. Then
    the others' reads do not begin.

    Raises:  EndedEarlyError.  The error of a member.
    """
    race, left = current_race(), set(ends)
    try:
        while left:
            ended, left = wait(left, _LOOK_S, FIRST_EXCEPTION)
            for end in ended:
                end.result()
            if race.is_over:
                raise EndedEarlyError
    finally:
        for end in left:
            end.cancel()


def stream_joined(connect: Connect, url: str, etag: str) -> Iterator[Buffer]:
    """Implement `Store.stream` for a joined shard."""
    joined = Joined.of(url, etag)
    size = len(head_of(etag)) + sum(member.size_bytes for member in joined.members)
    for offset in range(0, size, PIECE_BYTES):
        yield read_joined(connect, url, offset, min(PIECE_BYTES, size - offset), etag)


def _run(reads: Iterable[Callable[[], None]]) -> None:
    for read in reads:
        read()


def _read(connect: Connect, member: ObjectInfo, skipped: int, into: memoryview) -> None:
    fill(connect(member.url), member.url, skipped, member.etag, into)


class _Pools:
    """The threads that read members, by store; further stores share the last pool. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_store: dict[str, ThreadPoolExecutor] = {}

    def of(self, base: str) -> ThreadPoolExecutor:
        """Return the threads for the store with this beginning of urls."""
        with self._lock:
            name = base if base in self._by_store or len(self._by_store) < _STORES_MAX else ""
            if name not in self._by_store:
                self._by_store[name] = ThreadPoolExecutor(_AT_ONCE, "dataplane-member")
            return self._by_store[name]


@cache
def _pools(_process: int) -> _Pools:
    return _Pools()
