"""The folder of a node's blocks on disk, `blocks` in its `cache_dir`: one node uses it at a time.

Invariants:
1. The folder belongs to this user, nobody else can read it or write to it, and it is no symbolic
   link.
2. A node and its fetchers hold the lock on it. Another node gets the lock when the last of them is
   gone, so no unknown process writes there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import time
from pathlib import Path

from dataplane.base.trace import Trace
from dataplane.index.journal import cache_faults, publish
from dataplane.model.config import NodeConfig
from dataplane.model.errors import ConfigError

_LOCK_S = 3.0
"""A node that was killed holds the lock until the kernel has cleaned up."""
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
            # Also for processes that were forked meanwhile and have the descriptor.
            fcntl.flock(self.lock, fcntl.LOCK_UN)
            os.close(self.lock)
            self.lock = -1


def open_cache_folder(cache_dir: str, cache_bytes: int, patience_s: float = _LOCK_S) -> CacheFolder:
    """Open the folder below `cache_dir`, and create it if necessary. Waits up to `patience_s` for
    the lock.

    Raises:  ConfigError: it cannot be used.  FolderTakenError: another node uses it.
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
    """Follow a link only if this user, or root, has made it.   Raises:  ConfigError."""
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
        with contextlib.suppress(OSError):  # only what errors say: a full disk is no reason to end
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        return


def _disk_id(file: Path) -> str:
    """Return the id of this folder, created at the first start."""
    found = file.read_text("ascii", "replace") if file.exists() else ""
    if not _DISK_ID.fullmatch(found):
        found = secrets.token_hex(8)
        publish(file, found.encode())
    return found


def _owner(fd: int) -> str:
    pid = os.pread(fd, 20, 0).decode(errors="replace")
    return f" (process {pid})" if pid.isdecimal() else ""
