"""Blocks as files of a node's disk: one file a block, written aside and renamed.

A file is named by the dataset's digest and the block's number, `<digest>/<number >> 10>/<number>`,
so no folder has more than 1,024 of them. A file begins with a header of HEADER_BYTES; the block's
pieces follow, as they were read from the shard, without the shard's preamble.

Invariants:
1. What `read` returns without an error has the length and the checksum of the header, which names
   the dataset and the block: a file that was cut off, changed, renamed or made by others is removed
   and counts as missing.
2. A file has its final name only after all of it was written. No file is trusted because of that:
   after a power failure, the checksum decides.
3. No symbolic link is followed below the folder.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import google_crc32c
import numpy as np

from dataplane.rpc.fetches import KeptFound, KeptName

HEADER_BYTES = 64
SLICE_BYTES = 1 << 20
"""Bytes that are read or written at a time: few enough to be still in the processor's cache when
their checksum is computed."""
_HEADER = struct.Struct("<8sI16sQQI12x")
_CHECKED_HEADER = struct.Struct("<60sI")
_MAGIC, _VERSION = b"dpblock\n", 1
_DIGEST_BYTES = 16
_FOLDER_BITS = 10
_FOUND_TOGETHER = 1000
_PART = ".part"
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW


class BadFileError(Exception):
    """The file is not the block that it is named after."""


class KeptFiles:
    """The files below one folder, which exists."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def path(self, dataset: bytes, block: int) -> Path:
        """Return the path of a block."""
        return self._folder / dataset.hex() / f"{block >> _FOLDER_BITS:x}" / str(block)

    def read(
        self, name: KeptName, into: memoryview, place: Callable[[memoryview, int], None]
    ) -> None:
        """Read a block as long as `into`: `place` gets each slice and its offset, and copies it.

        Raises:  FileNotFoundError: the file is missing, or was wrong and therefore removed.
        OSError: the disk fails.  What `place` raises.
        """
        path = self.path(name.dataset, name.block)
        fd = os.open(path, _READ)
        try:
            _read(fd, name, len(into), place)
        except BadFileError as fault:
            path.unlink(missing_ok=True)
            raise FileNotFoundError(str(fault)) from fault
        finally:
            os.close(fd)

    def write(
        self,
        name: KeptName,
        body: memoryview,
        number: int,
        check: Callable[[], None],
        commit: Callable[[], None],
    ) -> None:
        """Write a block. `number` is part of the file's name until all of it was written. `check`
        is called now and then, and `commit` once all of `body` was read and the file is about to
        get its name.

        Raises:  OSError: the disk fails, and the file is gone.  What `check` and `commit` raise.
        """
        path = self.path(name.dataset, name.block)
        part = path.with_name(f"{path.name}.{number}{_PART}")
        try:
            fd = os.open(part, _WRITE, 0o600)
        except FileNotFoundError:
            for folder in (path.parent.parent, path.parent):
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(0o700)
            fd = os.open(part, _WRITE, 0o600)
        try:
            try:
                _write(fd, name, body, check)
            finally:
                os.close(fd)
            commit()
            part.rename(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise

    def remove(self, names: Sequence[KeptName]) -> None:
        """Remove blocks, if they exist.   Raises:  OSError."""
        for name in names:
            self.path(name.dataset, name.block).unlink(missing_ok=True)

    def scan(self) -> Iterator[KeptFound]:
        """Yield all blocks, dataset by dataset; the datasets that were written last come last.
        Removes the leftovers of a crash. Files and folders that vanish meanwhile are left out.
        Raises:  OSError.
        """
        with os.scandir(self._folder) as entries:
            datasets = [each for each in entries if _is_folder(each) and _digest(each.name)]
        datasets.sort(key=_written_at)
        for dataset in datasets:
            for folder in filter(_is_folder, _entries(dataset.path)):
                yield from _scanned(_digest(dataset.name), folder.path)
                with contextlib.suppress(OSError):  # the folder is not empty
                    Path(folder.path).rmdir()
            with contextlib.suppress(OSError):
                Path(dataset.path).rmdir()


def _read(fd: int, name: KeptName, length: int, place: Callable[[memoryview, int], None]) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != HEADER_BYTES + length:
        raise BadFileError("it has another length")
    expected = _checksum(os.pread(fd, HEADER_BYTES, 0), name, length)
    body, at, crc32c = bytearray(min(length, SLICE_BYTES)), 0, 0
    view = memoryview(body)
    while at < length:
        count = os.preadv(fd, [view[: length - at]], HEADER_BYTES + at)
        if not count:
            raise BadFileError("it was cut off")
        crc32c = google_crc32c.extend(crc32c, np.frombuffer(body, np.uint8, count))
        place(view[:count], at)
        at += count
    if crc32c != expected:
        raise BadFileError("its bytes have another checksum")


def _write(fd: int, name: KeptName, body: memoryview, check: Callable[[], None]) -> None:
    at, crc32c = 0, 0
    while at < len(body):
        check()
        part = body[at : at + SLICE_BYTES]
        crc32c = google_crc32c.extend(crc32c, np.frombuffer(part, np.uint8))
        _write_all(fd, part, HEADER_BYTES + at)
        at += len(part)
    _write_all(fd, memoryview(_header(name, len(body), crc32c)), 0)


def _write_all(fd: int, body: memoryview, at: int) -> None:
    while body:
        count = os.pwrite(fd, body, at)
        body, at = body[count:], at + count


def _header(name: KeptName, length: int, crc32c: int) -> bytes:
    fields = _HEADER.pack(_MAGIC, _VERSION, name.dataset, name.block, length, crc32c)
    return _CHECKED_HEADER.pack(fields, google_crc32c.value(fields))


def _checksum(header: bytes, name: KeptName, length: int) -> int:
    """Return the checksum that a header states for these bytes.   Raises:  BadFileError."""
    fields = header[: _HEADER.size]
    if len(fields) == _HEADER.size:
        crc32c: int = _HEADER.unpack(fields)[-1]
        if header == _header(name, length, crc32c):
            return crc32c
    raise BadFileError("its header is not of this block")


def _scanned(dataset: bytes, folder: str) -> Iterator[KeptFound]:
    blocks: list[int] = []
    sizes: list[int] = []
    for entry in _entries(folder):
        # Skip files that vanish: a read may remove a damaged one meanwhile, and users may remove
        # any.
        with contextlib.suppress(FileNotFoundError):
            if entry.name.isdecimal() and entry.is_file(follow_symlinks=False):
                size = entry.stat(follow_symlinks=False).st_size
                blocks.append(int(entry.name))
                sizes.append(size)
            elif entry.name.endswith(_PART):
                Path(entry.path).unlink()
    for at in range(0, len(blocks), _FOUND_TOGETHER):
        end = at + _FOUND_TOGETHER
        yield KeptFound(dataset, tuple(blocks[at:end]), tuple(sizes[at:end]))


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Return the content of a folder; nothing if it is gone."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _written_at(folder: os.DirEntry[str]) -> float:
    """Return when a folder was last changed; 0 if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        return folder.stat(follow_symlinks=False).st_mtime
    return 0.0


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _digest(name: str) -> bytes:
    """Return the digest for which a folder is named; empty if the name is no digest."""
    try:
        digest = bytes.fromhex(name)
    except ValueError:
        return b""
    return digest if len(digest) == _DIGEST_BYTES and digest.hex() == name else b""
