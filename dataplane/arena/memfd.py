"""The memory itself: sealed memfds, passed by descriptor, mapped once. Linux only, and only here.

Invariants:
1. An arena's size never changes: it is sealed against shrinking, growing and unsealing, so that no
   process can turn another's mapping into SIGBUS.
2. Memory is allocated (`reserve`) before it is written: a full machine answers with an error here,
   never with a signal at first touch.
3. Nothing is named: when the last process that holds the memfd dies, the kernel frees it.
4. A mapping lives as long as any view of it.
5. What is mapped stays mapped, and what was allocated stays allocated: to ask once is enough.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os

from dataplane.errors import BudgetTooSmall, ClosedError

_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_MADV_POPULATE_READ = 22
_SEALS = 0x0001 | 0x0002 | 0x0004  # SEAL, SHRINK, GROW
_PIECE_BYTES = 64 << 10
"""What is mapped is remembered in pieces of this size."""


def populate(mapping: mmap.mmap, offset: int, length: int) -> None:
    """Map the pages of bytes [offset, offset + length) for reading, as one piece, in place of a
    page fault for every few of them.
    """
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    with contextlib.suppress(OSError):  # Linux before 5.14 does not know how
        mapping.madvise(_MADV_POPULATE_READ, start, offset + length - start)


class Arena:
    """One memfd and this process's shared, writable mapping of it."""

    def __init__(self, fd: int, size_bytes: int, mapping: mmap.mmap) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self._mapping: mmap.mmap | None = mapping
        self._buffer: memoryview | None = memoryview(mapping)
        self._reserved = 0
        self._mapped = bytearray()

    @classmethod
    def create(cls, label: str, size_bytes: int) -> Arena:
        """A new arena; `label` shows in /proc/PID/maps. No memory is used until `reserve`.

        Raises:  BudgetTooSmall: the machine refuses that much address space.
        """
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED)
        except OSError as error:
            os.close(fd)
            raise BudgetTooSmall(
                f"cannot map an arena of {size_bytes} bytes: {error}; lower the memory budget",
                needed=size_bytes,
            ) from error
        return cls(fd, size_bytes, mapping)

    @classmethod
    def attach(cls, fd: int, size_bytes: int) -> Arena:
        """Map an arena that another process created; `fd` belongs to the result from now on.

        Raises:  ClosedError: the descriptor is not a sealed arena of that size.
        """
        try:
            seals = fcntl.fcntl(fd, _F_GET_SEALS)
            found = os.fstat(fd).st_size
            if seals & _SEALS != _SEALS or found != size_bytes:
                raise ClosedError(
                    f"expected a sealed arena of {size_bytes} bytes, found {found} bytes"
                )
            mapping = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED)
        except OSError as error:
            os.close(fd)
            raise ClosedError(f"cannot map the arena: {error}") from error
        except ClosedError:
            os.close(fd)
            raise
        return cls(fd, size_bytes, mapping)

    @property
    def buffer(self) -> memoryview:
        """The whole arena, writable: uint8[size_bytes]."""
        if self._buffer is None:
            raise ClosedError("this arena was closed")
        return self._buffer

    def view(self, offset: int, length: int) -> memoryview:
        """Bytes [offset, offset + length), writable."""
        if offset < 0 or length < 0 or offset + length > self.size_bytes:
            raise IndexError(f"[{offset}, {offset + length}) is outside of {self.size_bytes} bytes")
        return self.buffer[offset : offset + length]

    def populate_once(self, offset: int, length: int) -> None:
        """Map what is allocated of bytes [offset, offset + length) at once, unless that was done
        before. It takes a quarter of the time that a page fault for each page does.
        """
        if self._mapping is None:
            return
        first, end = -(-offset // _PIECE_BYTES), (offset + length) // _PIECE_BYTES
        if len(self._mapped) < end:
            self._mapped.extend(bytes(end - len(self._mapped)))
        if length and (first >= end or self._mapped.find(0, first, end) >= 0):
            # For reading costs half of what it costs for writing, and here it is the same: nobody
            # has to be told of what is written into a memfd.
            populate(self._mapping, offset, length)
            self._mapped[first:end] = b"\1" * max(end - first, 0)

    def reserve(self, end: int) -> None:
        """Allocate the memory of bytes [0, end), once; cheap when that was done before.

        Raises:  BudgetTooSmall: the machine, or this container, has no more memory.
        """
        if end <= self._reserved:
            return
        self.buffer  # noqa: B018 - raises when closed
        start = self._reserved
        try:
            os.posix_fallocate(self.fd, start, end - start)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.ENOMEM}:
                raise
            raise BudgetTooSmall(
                f"no memory for an arena of {end} bytes: {error}; lower the memory budget",
                needed=end,
            ) from error
        self._reserved = end

    def close(self) -> None:
        """Give up the descriptor and, once no view is left, the mapping. May be called twice."""
        if self._mapping is None or self._buffer is None:
            return
        os.close(self.fd)
        self._buffer.release()
        with contextlib.suppress(BufferError):  # views are alive: it goes with the last (4)
            self._mapping.close()
        self._mapping = self._buffer = None
