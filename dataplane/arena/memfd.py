"""The memory itself: sealed memfds, passed by descriptor, mapped once. Linux only, and only here.

Invariants:
1. An arena's size never changes: it is sealed against shrinking, growing and unsealing, so that no
   process can turn another's mapping into SIGBUS.
2. Memory is allocated (`reserve`) before it is touched, or by the kernel as it copies bytes there
   (`NewMemory`): if the machine is out of memory, this raises an error, instead of a signal.
3. A memfd has no name in a file system: when the last process that holds it dies, the kernel frees
   its memory.
4. A mapping lives as long as any view of it.
5. Mapped pages stay mapped, and allocated memory stays allocated until it is released, so one call
   is enough.
6. A forked child keeps only the pages that it can read (`keep_only`), and no descriptor.
7. An arena that another process has lent is closed once it was taken back and has no user. So
   nobody reads or writes through a descriptor whose number was reused.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Iterator

from msgspec import Struct
from typing_extensions import Buffer

from dataplane.arena import pages
from dataplane.base.units import ways_to_set
from dataplane.model.errors import BudgetTooSmall, ClosedError

_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_MADV_REMOVE = 9
_SEALS = 0x0001 | 0x0002 | 0x0004  # SEAL, SHRINK, GROW
PIECE_BYTES = 64 << 10
"""An arena records in pieces of this size which of its memory is allocated or mapped."""
_LESS = (
    "give this machine or container more memory, or lower block_arena_bytes or "
    f"delivery_bytes_per_rank ({ways_to_set('block_arena_bytes', 'SIZE')}; the other likewise)"
)
_HUGE_PIECES = pages.HUGE_BYTES // PIECE_BYTES
_huge_pages = pages.HugePages()
_GAP_COUNT_MAX = 1000
_GAP_BYTES_MIN = 64 << 10


def populate(mapping: mmap.mmap, offset: int, length: int) -> None:
    """Map the pages of bytes [offset, offset + length) for reading at once, instead of by many page
    faults.
    """
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    with contextlib.suppress(OSError):  # not supported before Linux 5.14
        mapping.madvise(_MADV_POPULATE_READ, start, offset + length - start)


class NewMemory:
    """Part of an arena that the kernel allocates as it copies bytes there, so that it is neither
    cleared nor mapped before. It is filled from its start; `offset` is that of the next byte.

    Raises:  BudgetTooSmall: the machine, or this container, has no more memory.
    """

    def __init__(self, arena: Arena, offset: int, length: int) -> None:
        self._arena, self._start, self._end = arena, offset, offset + length
        self.fd, self.offset = arena.fd, offset
        """The file of this memory, and the offset of the next byte."""

    def write(self, body: Buffer) -> int:
        """Write the first of these bytes, as far as there is room; return how many were written."""
        part = memoryview(body)[: self._end - self.offset]
        with self._arena.allocation(self.offset + len(part)):
            count = os.pwrite(self.fd, part, self.offset)
        self.moved(count)
        return count

    def moved(self, count: int, error: int = 0) -> None:
        """Note how many bytes the kernel has copied, and the error that stopped it, if any."""
        self.offset += count
        if error:
            with self._arena.allocation(self._end):
                raise OSError(error, os.strerror(error))
        if self.offset == self._end:
            self._arena.was_filled(self._start, self._end - self._start)


class Arena:
    """One memfd and this process's shared, writable mapping of it."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map the memfd.

        Raises:  OSError: it cannot be mapped.
        """
        self.fd = fd
        self.size_bytes = size_bytes
        self._address = pages.map_shared(fd, size_bytes)
        self._buffer: memoryview | None = pages.view_of(self._address, size_bytes)
        self._while_mapped = weakref.ref(self._buffer.obj)
        self._mapped = bytearray()
        self._allocated = bytearray()
        # Allocate in one thread at a time: in the kernel, the other threads would spin.
        self._allocating = threading.Lock()

    @classmethod
    def create(cls, label: str, size_bytes: int) -> Arena:
        """Create an arena; `label` shows in /proc/PID/maps. No memory is used until `reserve`.

        Raises:  BudgetTooSmall: the machine refuses that much address space.
        """
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
            return cls(fd, size_bytes)
        except OSError as error:
            os.close(fd)
            raise BudgetTooSmall(
                f"cannot map an arena of {size_bytes} bytes: {error}; {_LESS}",
                needed=size_bytes,
            ) from error

    @classmethod
    def attach(cls, fd: int, size_bytes: int) -> Arena:
        """Map an arena that another process created; `fd` then belongs to the result.

        Raises:  ClosedError: the descriptor is not a sealed arena of that size.
        """
        try:
            seals = fcntl.fcntl(fd, _F_GET_SEALS)
            size = os.fstat(fd).st_size
            if seals & _SEALS != _SEALS or size != size_bytes:
                raise ClosedError(
                    f"expected a sealed arena of {size_bytes} bytes, found {size} bytes"
                )
            return cls(fd, size_bytes)
        except BaseException as error:  # even if a signal handler raises
            os.close(fd)
            if isinstance(error, OSError):
                raise ClosedError(f"cannot map the arena: {error}") from error
            raise

    @property
    def buffer(self) -> memoryview:
        """The whole arena, writable: uint8[size_bytes]."""
        if self._buffer is None:
            raise ClosedError("this arena was closed")
        return self._buffer

    def view(self, offset: int, length: int) -> memoryview:
        """Return bytes [offset, offset + length), writable."""
        if offset < 0 or length < 0 or offset + length > self.size_bytes:
            raise IndexError(f"[{offset}, {offset + length}) is outside of {self.size_bytes} bytes")
        return self.buffer[offset : offset + length]

    def write(self, offset: int, body: memoryview) -> None:
        """Write bytes at this offset; their memory need be neither allocated nor mapped before.

        Raises:  BudgetTooSmall: the machine, or this container, has no more memory.
        """
        self.buffer  # noqa: B018 - raises when closed
        part = NewMemory(self, offset, len(body))
        while body:
            body = body[part.write(body) :]

    def populate_once(self, offset: int, length: int) -> None:
        """Map the allocated pages of bytes [offset, offset + length) at once, unless that was done
        before. It takes a quarter of the time of one page fault per page.
        """
        # Mapping for reading costs half as much as for writing, and is equivalent here: writes to a
        # memfd need no write-protection fault.
        self._populate(offset, length, _MADV_POPULATE_READ)

    def _populate(self, offset: int, length: int, advice: int) -> None:
        if self._buffer is None:
            return
        first, end = -(-offset // PIECE_BYTES), (offset + length) // PIECE_BYTES
        if len(self._mapped) < end:
            self._mapped.extend(bytes(end - len(self._mapped)))
        if length and (first >= end or self._mapped.find(0, first, end) >= 0):
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            with contextlib.suppress(OSError):  # not supported before Linux 5.14
                pages.advise(self._address + start, offset + length - start, advice)
            self._mapped[first:end] = b"\1" * max(end - first, 0)

    def reserve(self, offset: int, length: int) -> bool:
        """Allocate the memory of bytes [offset, offset + length), unless this process did so
        before. Allocating takes 0.1 to 0.3 ms a MiB, and a tenth of that if another process did so.
        Returns whether it allocated any memory that no process had written.

        Raises:  BudgetTooSmall: the machine, or this container, has no more memory.
        """
        self.buffer  # noqa: B018 - raises when closed
        first, end = self._pieces(offset, length)
        first = self._allocated.find(0, first, end)
        if first < 0:
            return False
        # If another thread has just allocated all of it, `rfind` returns -1.
        end = max(self._allocated.rfind(0, first, end), first) + 1
        start, stop = first * PIECE_BYTES, min(end * PIECE_BYTES, self.size_bytes)
        # Skip memory that other processes have written; to the kernel, all other memory is a hole.
        if os.lseek(self.fd, start, os.SEEK_HOLE) >= stop:
            self._allocated[first:end] = b"\1" * (end - first)
            return False
        if pages.shared_huge_pages() == "advise":
            # Touch the pages first: only page faults follow the advice, fallocate does not.
            with contextlib.suppress(OSError):
                pages.advise(self._address + start, stop - start, _MADV_POPULATE_WRITE)
        with self.allocation(stop):
            os.posix_fallocate(self.fd, start, stop - start)
        self._allocated[first:end] = b"\1" * (end - first)
        return True

    @contextlib.contextmanager
    def allocation(self, stop: int) -> Iterator[None]:
        """Within this block, allocate memory up to `stop`, alone in this process.

        Raises:  BudgetTooSmall.
        """
        try:
            with self._allocating:
                yield
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.ENOMEM}:
                raise
            raise BudgetTooSmall(
                f"no memory for an arena of {stop} bytes: {error}; {_LESS}", needed=stop
            ) from error

    def is_new(self, offset: int, length: int) -> bool:
        """Whether bytes [offset, offset + length) cost less if they are filled as NewMemory: this
        process has allocated none of them, and would get small pages.
        """
        first, end = self._inner_pieces(offset, length)
        if first >= end or self._allocated.find(1, first, end) >= 0:
            return False
        huge = pages.shared_huge_pages()
        return huge == "deny" or (huge == "never" and _huge_pages.pass_by(length))

    def new_memory(self, view: memoryview) -> NewMemory | None:
        """Return the memory behind a view of this arena, to be filled; None for other memory."""
        offset = ctypes.addressof(ctypes.c_char.from_buffer(view)) - self._address
        is_here = offset >= 0 and offset + len(view) <= self.size_bytes
        return NewMemory(self, offset, len(view)) if is_here else None

    def missing_bytes(self, offset: int, length: int) -> int:
        """Return how much memory `reserve` would allocate."""
        return self._allocated.count(0, *self._pieces(offset, length)) * PIECE_BYTES

    @property
    def reserved_bytes(self) -> int:
        """How much memory this process has allocated and not released."""
        return self._allocated.count(1) * PIECE_BYTES

    def _pieces(self, offset: int, length: int) -> tuple[int, int]:
        """Return the first piece with any of these bytes, and the one after the last."""
        first, end = offset // PIECE_BYTES, -(-(offset + length) // PIECE_BYTES)
        self._allocated.extend(bytes(max(end - len(self._allocated), 0)))
        return first, end

    def _inner_pieces(self, offset: int, length: int) -> tuple[int, int]:
        """Return the first piece that lies within these bytes, and the one after the last."""
        self._pieces(offset, length)
        return -(-offset // PIECE_BYTES), (offset + length) // PIECE_BYTES

    def was_filled(self, offset: int, length: int) -> None:
        """Note that all of these bytes were written, so their memory is allocated."""
        first, end = self._inner_pieces(offset, length)
        self._allocated[first:end] = b"\1" * max(end - first, 0)

    def prepare(self, offset: int, length: int) -> None:
        """Allocate and map the memory of bytes [offset, offset + length), which this process is
        about to write. Cheap if it did so before.

        Raises:  BudgetTooSmall: the machine, or this container, has no more memory.
        """
        if pages.shared_huge_pages() == "never":
            self._fill_with_huge_pages(offset, length)
        # Map new pages for writing: this clears them faster than mapping them for reading.
        is_new = self.reserve(offset, length)
        self._populate(offset, length, _MADV_POPULATE_WRITE if is_new else _MADV_POPULATE_READ)

    def _fill_with_huge_pages(self, offset: int, length: int) -> None:
        """Allocate and map the huge pages that have some of these bytes, where this process has
        allocated nothing yet, unless small pages cost less.
        """
        first, end = self._pieces(offset, length)
        new = self._allocated.find(0, first, end)
        if new < 0:
            return
        unit, stop = new // _HUGE_PIECES, self.size_bytes // pages.HUGE_BYTES
        stop = min(-(-end // _HUGE_PIECES), stop)
        self._pieces(0, stop * pages.HUGE_BYTES)
        if self._allocated.find(1, unit * _HUGE_PIECES, (unit + 1) * _HUGE_PIECES) >= 0:
            unit += 1
        first, end = unit * _HUGE_PIECES, stop * _HUGE_PIECES
        if (used := self._allocated.find(1, first, end)) >= 0:
            end = used // _HUGE_PIECES * _HUGE_PIECES
        size = (end - first) * PIECE_BYTES
        if size > 0 and _huge_pages.fill(self._address + first * PIECE_BYTES, size):
            self._mapped.extend(bytes(max(end - len(self._mapped), 0)))
            self._allocated[first:end] = self._mapped[first:end] = b"\1" * (end - first)

    def release(self, offset: int, length: int) -> None:
        """Return whole pages to the machine, in all processes that map them. They then read as
        zeros, and `reserve` allocates them again.
        """
        self.buffer  # noqa: B018 - raises when closed
        pages.advise(self._address + offset, length, _MADV_REMOVE)
        first, end = self._pieces(offset, length)
        self._allocated[first:end] = bytes(end - first)

    def keep_only(self, kept: Iterable[tuple[int, int]]) -> None:
        """In a forked child: release the descriptor and all memory except the ranges (offset,
        length) in `kept`, which stay readable as long as views of them exist. Nothing else may be
        read.
        """
        if self._while_mapped() is None:
            return
        gaps, start = [], 0
        for offset, length in sorted([*kept, (self.size_bytes, 0)]):
            end = offset // pages.PAGE_BYTES * pages.PAGE_BYTES
            if end - start >= _GAP_BYTES_MIN:
                gaps.append((end - start, start))
            start = max(start, -(-(offset + length) // pages.PAGE_BYTES) * pages.PAGE_BYTES)
        # A process may have 65,530 mappings: if many ranges are kept, small gaps stay mapped.
        for length, start in sorted(gaps, reverse=True)[:_GAP_COUNT_MAX]:
            with contextlib.suppress(OSError):
                pages.give_up(self._address + start, length)
        self.close()

    def close(self) -> None:
        """Close the descriptor and, once no view is left, the mapping. May be called twice."""
        if self._buffer is None:
            return
        os.close(self.fd)
        self._buffer.release()
        self._buffer = None


class BorrowedArena(Struct, eq=False):
    """One arena, and the number of its users."""

    arena: Arena
    users: int = 0
    is_over: bool = False


class BorrowedArenas:
    """Arenas by number. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._borrowed: dict[int, BorrowedArena] = {}

    def attach(self, arena_id: int, fd: int) -> Arena:
        """Map this arena, whose descriptor then belongs to it.

        Raises:  ClosedError: the descriptor is not a sealed arena.
        """
        arena = Arena.attach(fd, os.fstat(fd).st_size)
        self.detach(arena_id)
        with self._lock:
            self._borrowed[arena_id] = BorrowedArena(arena)
        return arena

    def detach(self, arena_id: int) -> None:
        """Close this arena, at once or when its last user is done, if there is such an arena."""
        with self._lock:
            borrowed = self._borrowed.pop(arena_id, None)
            if borrowed is not None:
                borrowed.is_over = True
                _close_unused(borrowed)

    def use(self, arena_id: int) -> BorrowedArena | None:
        """Return the arena of this number, which stays open until `done`."""
        with self._lock:
            borrowed = self._borrowed.get(arena_id)
            if borrowed is not None:
                borrowed.users += 1
            return borrowed

    def done(self, borrowed: BorrowedArena) -> None:
        """End one use of an arena."""
        with self._lock:
            borrowed.users -= 1
            _close_unused(borrowed)

    def close(self) -> None:
        """Detach all arenas."""
        for arena_id in [*self._borrowed]:
            self.detach(arena_id)


def _close_unused(borrowed: BorrowedArena) -> None:
    if borrowed.is_over and not borrowed.users:
        borrowed.arena.close()
