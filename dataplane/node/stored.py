"""Bytes of datasets that a node keeps: preambles in memory, and the folder of blocks on disk.

A preamble has the bytes that every block of a shard needs besides its own (a Parquet footer, Arrow
dictionaries). The preambles of shards that are being read lie in a separate arena that workers map,
so that they need not be copied for each block. A block refers to its preamble by number and place.

Invariants:
1. A preamble that is held for a block stays in place. The others are dropped when room is needed,
   the longest unheld first.
2. A number is never reused, so that a worker cannot take a new preamble for an old one.
3. If too many preambles are held and there is no room, a further preamble is not held here, and is
   read into the block's own region.
4. Preambles that indexing has read are not read again, as long as they are remembered. Those of the
   shards that were indexed last are remembered; successive equal ones take memory once.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import re
import secrets
import stat
import threading
import time
from asyncio import Future
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from dataplane.arena.allocator import Allocator
from dataplane.arena.memfd import Arena
from dataplane.base.trace import Trace
from dataplane.index.journal import cache_faults, publish
from dataplane.model.config import NodeConfig
from dataplane.model.errors import BudgetTooSmall, ConfigError, DataplaneError
from dataplane.model.records import Region
from dataplane.rpc import tasks
from dataplane.rpc.fetches import Outcome

BYTES_MIN = 64 << 20
_SHARE = 16
REMEMBERED_MAX = 4096
"""The most preambles that are remembered, of at most 64 KiB each."""
_REMEMBERED_BYTES_MAX = 64 << 10
_COPIED_BYTES_MAX = 256 << 10
"""The event loop copies a preamble of at most this many bytes itself."""

_ShardKey = tuple[str, str, int]


def preamble_bytes(block_arena_bytes: int) -> int:
    """Return the size of the preamble arena for a block arena of this size."""
    return max(BYTES_MIN, block_arena_bytes // _SHARE)


class KeptPreamble(Struct, eq=False):
    """One preamble: its place in the arena, its number, and for how many blocks it is held.
    `reading` gets the outcome of its read.
    """

    shard: _ShardKey
    number: int
    region: Region
    holders: int = 0
    reading: Future[Outcome] | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the read of the preamble failed."""
        reading = self.reading
        return reading is not None and reading.done() and reading.result() is not None


class _Remembered:
    """Bytes of preambles, by shard, until they are in the arena. Thread-safe."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._contents: OrderedDict[_ShardKey, bytes] = OrderedDict()
        self._last = b""

    def add(self, shard: _ShardKey, content: bytes) -> None:
        with self._changing:
            if content == self._last:  # shards often have equal preambles: keep one copy
                content = self._last
            self._last = self._contents[shard] = content
            if len(self._contents) > REMEMBERED_MAX:
                self._contents.popitem(last=False)

    def take(self, shard: _ShardKey) -> bytes | None:
        with self._changing:
            return self._contents.pop(shard, None)


class Preambles:
    """An arena of `size_bytes`. Call it only from the event loop, except `remember`."""

    def __init__(self, size_bytes: int) -> None:
        """Allocate the arena.

        Raises:  BudgetTooSmall: the machine refuses the arena.
        """
        self.arena = Arena.create("dataplane-preambles", size_bytes)
        self._allocator = Allocator(size_bytes)
        self._kept: dict[_ShardKey, KeptPreamble] = {}
        self._idle: OrderedDict[_ShardKey, KeptPreamble] = OrderedDict()
        """The preambles that are not held; the one released last is at the end."""
        self._held: dict[int, KeptPreamble] = {}
        self._numbers = itertools.count(1)
        self._remembered = _Remembered()

    def remember(self, url: str, etag: str, place: Region, content: bytes) -> None:
        """Keep the preamble of this shard, which was read and will be needed. Thread-safe."""
        if len(content) <= _REMEMBERED_BYTES_MAX:
            self._remembered.add((url, etag, place.offset), content)

    def fill(self, kept: KeptPreamble) -> bool:
        """Write the preamble from remembered bytes; return False if it must be read."""
        content = self._remembered.take(kept.shard)
        if content is None or len(content) != kept.region.length:
            return False
        self.arena.view(kept.region.offset, kept.region.length)[:] = content
        return True

    def hold(self, key: int, url: str, etag: str, place: Region) -> KeptPreamble | None:
        """Hold the preamble of this shard for the block with this key; None if there is no room."""
        shard = (url, etag, place.offset)
        kept = self._kept.get(shard)
        if kept is None:
            region = self._room(place.length)
            if region is None:
                return None
            kept = self._kept[shard] = KeptPreamble(shard, next(self._numbers), region)
        self._idle.pop(shard, None)
        kept.holders += 1
        self._held[key] = kept
        return kept

    def let_go(self, key: int) -> None:
        """Release the preamble that is held for this block, if there is one."""
        kept = self._held.pop(key, None)
        if kept is None:
            return
        kept.holders -= 1
        if not kept.holders:
            self._idle[kept.shard] = kept
            if kept.has_failed:
                self._drop(kept)

    def for_worker(
        self, key: int, raw: tasks.RawBlockRef
    ) -> tuple[tasks.RawBlockRef, tuple[tuple[int, int], ...]]:
        """Return where a worker finds the block, and the arenas that it needs for that:
        (id, fd).
        """
        kept = self._held.get(key)
        if kept is None:
            return raw, ()
        ref = replace(raw, kept_preamble=kept.region, preamble_number=kept.number)
        return ref, ((tasks.PREAMBLE_ARENA, self.arena.fd),)

    def copy(
        self,
        kept: KeptPreamble,
        arena: Arena,
        offset: int,
        report: Callable[[DataplaneError | None], None],
    ) -> None:
        """Copy a preamble to this place; `report` is called with the error: at once, or later for a
        long preamble, for which the event loop does not wait.
        """
        region = kept.region

        def copied() -> DataplaneError | None:
            try:
                arena.write(offset, self.arena.view(region.offset, region.length))
            except DataplaneError as error:
                return error
            return None

        if region.length <= _COPIED_BYTES_MAX:
            report(copied())
            return
        copying = asyncio.get_running_loop().run_in_executor(None, copied)
        copying.add_done_callback(lambda done: report(done.result()))

    def close(self) -> None:
        """Release the memory. May be called twice."""
        self.arena.close()

    def _room(self, length: int) -> Region | None:
        at = self._allocator.allocate(length)
        while at is None and self._idle:
            self._drop(next(iter(self._idle.values())))
            at = self._allocator.allocate(length)
        if at is None:
            return None
        try:
            self.arena.reserve(at, length)
        except BudgetTooSmall:
            self._allocator.free(at)
            return None
        return Region(at, length)

    def _drop(self, kept: KeptPreamble) -> None:
        del self._kept[kept.shard], self._idle[kept.shard]
        self._allocator.free(kept.region.offset)


# -- folder of blocks on disk ----------------------------------------------------------------------
#
# The folder of a node's blocks on disk, `blocks` in its `cache_dir`: one node uses it at a time.
#
# Invariants:
# 1. The folder belongs to this user, nobody else can read it or write to it, and it is no symbolic
#    link.
# 2. A node and its fetchers hold the lock on it. Another node gets the lock when the last of these
#    processes is gone, so no unknown process writes there.


_LOCK_S = 3.0
"""How long to wait for the lock: a killed node holds it until the kernel has cleaned up."""
_POLL_S = 0.02
_DISK_ID = re.compile("[0-9a-f]{16}")
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class FolderTakenError(ConfigError):
    """Another node uses this folder."""


class CacheFolder:
    """The locked folder, for this many bytes of blocks. `lock` is a descriptor; `disk_id` stays the
    same as long as the folder exists.
    """

    def __init__(self, path: Path, lock: int, cache_bytes: int, disk_id: str) -> None:
        self.path, self.lock, self.cache_bytes, self.disk_id = path, lock, cache_bytes, disk_id

    def close(self) -> None:
        """Release the lock. May be called twice."""
        if self.lock >= 0:
            # Unlock explicitly: closing alone would not release the lock while a forked process
            # still holds a copy of the descriptor.
            fcntl.flock(self.lock, fcntl.LOCK_UN)
            os.close(self.lock)
            self.lock = -1


def open_cache_folder(cache_dir: str, cache_bytes: int, patience_s: float = _LOCK_S) -> CacheFolder:
    """Open the folder below `cache_dir`, and create it if necessary. Waits up to `patience_s` for
    the lock.

    Raises:  ConfigError: the folder cannot be used.  FolderTakenError: another node uses it.
    """
    path = Path(cache_dir) / "blocks"
    with cache_faults(path):
        _check_link(Path(cache_dir))
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check(path)
        room = os.statvfs(path)
        if cache_bytes > room.f_blocks * room.f_frsize:
            raise ConfigError(
                f"cache_bytes is {cache_bytes}, and the disk with {path} has only "
                f"{room.f_blocks * room.f_frsize} bytes: lower cache_bytes, or choose another disk "
                "with cache_dir",
                field="cache_bytes",
            )
        fd = os.open(path / "lock", _LOCK_FLAGS, 0o600)
    try:
        with cache_faults(path):
            _take(fd, path, time.monotonic() + patience_s)
            return CacheFolder(path, fd, cache_bytes, _disk_id(path / "id"))
    except BaseException:
        os.close(fd)
        raise


def folder_of(config: NodeConfig, trace: Trace, patience_s: float = _LOCK_S) -> CacheFolder | None:
    """Open the folder of a node; None if it keeps no blocks on disk. An embedded node continues
    without the folder if another node has it, since two trainings of one user may have the same
    settings.

    Raises:  ConfigError: the folder cannot be used.
    """
    if not config.cache_bytes:
        return None
    try:
        return open_cache_folder(config.cache_dir, config.cache_bytes, patience_s)
    except FolderTakenError as error:
        if not config.embedded:
            raise
        trace.failed("no blocks are kept on disk", error=error)
        return None


def _check_link(folder: Path) -> None:
    """Refuse a link that neither this user nor root has made.   Raises:  ConfigError."""
    if folder.is_symlink() and folder.lstat().st_uid not in {os.geteuid(), 0}:
        raise ConfigError(
            f"cache_dir {folder} is a symbolic link of another user: choose a folder of your own",
            field="cache_dir",
        )


def _check(path: Path) -> None:
    """Check the owner and mode of the folder.   Raises:  ConfigError."""
    status = path.lstat()
    wrong = ""
    if not stat.S_ISDIR(status.st_mode):
        wrong = "is a symbolic link, and no folder"
    elif status.st_uid != os.geteuid():
        wrong = f"belongs to user {status.st_uid}"
    elif status.st_mode & 0o077:
        wrong = f"is open to other users (mode {stat.S_IMODE(status.st_mode):o})"
    if wrong:
        raise ConfigError(
            f"{path} {wrong}: blocks are kept only where no other user has access. Remove it, or "
            "choose another folder with cache_dir",
            field="cache_dir",
        )


def _take(fd: int, path: Path, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
            raise FolderTakenError(
                f"another node{_owner(fd)} keeps its blocks in {path}: give each node of a host a "
                "cache_dir of its own, or cache_bytes 0",
                field="cache_dir",
            ) from None
        with contextlib.suppress(OSError):  # only for messages: a full disk is no reason to fail
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        return


def _disk_id(file: Path) -> str:
    """Return the id of this folder, created at the first start."""
    disk_id = file.read_text("ascii", "replace") if file.exists() else ""
    if not _DISK_ID.fullmatch(disk_id):
        disk_id = secrets.token_hex(8)
        publish(file, disk_id.encode())
    return disk_id


def _owner(fd: int) -> str:
    pid = os.pread(fd, 20, 0).decode(errors="replace")
    return f" (process {pid})" if pid.isdecimal() else ""
