"""Files of this machine, including mounted file systems.

Uses os.preadv instead of obstore's LocalStore for two reasons: LocalStore's etag (inode, mtime in
microseconds and size) cannot be computed from an fstat elsewhere, and it runs every system call
through a thread pool of its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from typing_extensions import Buffer

from dataplane.model.errors import ShardNotFound, StoreDenied, StoreError, StoreUnavailable
from dataplane.model.records import ObjectInfo
from dataplane.store.faults import passes
from dataplane.store.reads import check_etag, in_pieces, short_read
from dataplane.store.urls import FILE_PREFIX, local_path

_NOT_THERE = (FileNotFoundError, NotADirectoryError)
_BROKEN = "link to "
SPECIAL = "a pipe, a socket or a device"
"""The target of what is neither a file nor a folder."""


def local_etag(status: os.stat_result) -> str:
    """Return the etag of a local file: its mtime in nanoseconds and its size.

    A file that is rewritten with the same size within one tick of the file system's clock (4 ms on
    usual kernels) keeps its etag.
    """
    return f"{status.st_mtime_ns:x}-{status.st_size:x}"


class LocalStore:
    """The file system, with urls "file:///absolute/path". Paths are raw: nothing is quoted."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Implement `Store.list`. A broken symbolic link, or what is no regular file, is listed as
        an object without bytes; `target_of` recognizes it.
        """
        start = _path(prefix)
        folder = start if prefix.endswith("/") else start.parent
        return iter(sorted(_walk(folder, prefix, set()), key=lambda found: found.url))

    def head(self, url: str) -> ObjectInfo:
        with _mapped(url):
            return _described(url, _path(url).stat())

    def read(self, url: str, offset: int, length: int, etag: str) -> Buffer:
        with _mapped(url):
            fd = os.open(_path(url), os.O_RDONLY | os.O_CLOEXEC)
            try:
                check_etag(_described(url, os.fstat(fd)), etag)
                body = bytearray(length)
                filled = _fill(fd, memoryview(body), offset)
                # Check again, since a writer may have changed the file during the read.
                check_etag(_described(url, os.fstat(fd)), etag)
            finally:
                os.close(fd)
        if filled != length:
            raise short_read(url, offset, length, filled)
        return body

    def stream(self, url: str, etag: str) -> Iterator[Buffer]:
        return in_pieces(self, url, etag)


def target_of(info: ObjectInfo) -> str:
    """Return the target of a listed symbolic link that is broken or circular; otherwise ""."""
    is_broken = not info.size_bytes and info.etag.startswith(_BROKEN)
    return info.etag.removeprefix(_BROKEN) if is_broken else ""


def same_files(infos: Iterable[ObjectInfo]) -> tuple[ObjectInfo, ObjectInfo] | None:
    """Return two local files that are the same by a symbolic or a hard link, if there are any."""
    files = [info for info in infos if info.url.startswith(FILE_PREFIX) and info.size_bytes]
    counts = Counter(info.etag for info in files)
    by_place: dict[tuple[int, int], ObjectInfo] = {}
    for info in files if len(counts) < len(files) else ():
        if counts[info.etag] == 1:  # no other file has this etag
            continue
        with contextlib.suppress(OSError):
            status = _path(info.url).stat()
            other = by_place.setdefault((status.st_dev, status.st_ino), info)
            if other is not info and status.st_ino:
                return other, info
    return None


def _fill(fd: int, into: memoryview, offset: int) -> int:
    filled = 0
    while filled < len(into):
        count = os.preadv(fd, [into[filled:]], offset + filled)
        if count == 0:
            break
        filled += count
    return filled


def _walk(folder: Path, prefix: str, entered: set[tuple[int, int]]) -> Iterator[ObjectInfo]:
    """Yield every file below a folder. Links are followed, but a loop of links only once."""
    with _mapped(f"file://{folder}"):
        try:
            status = folder.stat()
            entries = list(os.scandir(folder))
        except _NOT_THERE:
            return
    place = (status.st_dev, status.st_ino)
    if place in entered:
        return
    for entry in entries:
        url = f"file://{entry.path}"
        if not (url.startswith(prefix) or prefix.startswith(f"{url}/")):
            continue
        with _mapped(url):
            try:
                status_of_entry = entry.stat()
            except OSError as cause:
                if not (isinstance(cause, _NOT_THERE) or cause.errno == errno.ELOOP):
                    raise
                if entry.is_symlink():
                    yield ObjectInfo(url, 0, f"{_BROKEN}{Path(entry.path).readlink()}")
                continue  # a broken link, or a file that was deleted meanwhile
        if stat.S_ISDIR(status_of_entry.st_mode):
            yield from _walk(Path(entry.path), prefix, entered | {place})
        elif stat.S_ISREG(status_of_entry.st_mode):
            yield ObjectInfo(url, status_of_entry.st_size, local_etag(status_of_entry))
        else:
            yield ObjectInfo(url, 0, f"{_BROKEN}{SPECIAL}")


def _described(url: str, status: os.stat_result) -> ObjectInfo:
    if stat.S_ISDIR(status.st_mode):
        raise ShardNotFound(f"{url} is a folder, not a file", shard=url)
    if not stat.S_ISREG(status.st_mode):
        raise ShardNotFound(f"{url} is not a regular file", shard=url)
    return ObjectInfo(url, status.st_size, local_etag(status))


def _path(url: str) -> Path:
    path = local_path(url)
    if path is None:
        raise StoreError(f"{url} is not the url of a local file", shard=url)
    return path


@contextlib.contextmanager
def _mapped(url: str) -> Iterator[None]:
    try:
        yield
    except _NOT_THERE as cause:
        raise ShardNotFound(f"there is no file {url}{_where(url)}", shard=url) from cause
    except PermissionError as cause:
        raise StoreDenied(
            f"user {os.geteuid()} may not read {url}: check its mode, and that of its folders",
            shard=url,
        ) from cause
    except OSError as cause:
        fault = StoreUnavailable if passes(cause) else StoreError
        raise fault(f"{url} cannot be read: {cause}", shard=url) from cause


def _where(url: str) -> str:
    """Return the first missing folder of the path, if a folder is missing."""
    for folder in reversed(_path(url).parents):
        if not folder.is_dir():
            return f": {folder} is not a folder"
    return ""
