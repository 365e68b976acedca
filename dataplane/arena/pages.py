"""Pages of memory by their address, as the kernel maps them.

Python's own mmap is not used for arenas, since it keeps a descriptor as long as the mapping lives:
a forked child would keep all memory of an arena alive, even memory that the child never reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import time
import weakref
from functools import cache
from pathlib import Path

PAGE_BYTES = mmap.PAGESIZE
HUGE_BYTES = 2 << 20
SHARED_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_SMALL_BYTES_FIRST = 32 << 20
_CPU_S_MAX = 0.3e-3
"""Huge pages are cheap if a MiB of them takes no longer: small ones take 0.3 to 0.8 ms."""
_TRIAL_CPU_S = 6e-6
"""The time that trials may take for each MiB of small pages between them."""
_PAUSE_BYTES = 256 << 20
_PAUSE_BYTES_MAX = 4 << 30

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_FAILED = ctypes.c_void_p(-1).value
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000


def map_shared(fd: int, size_bytes: int) -> int:
    """Map a file, shared and writable, and return the address. The kernel is advised to use huge
    pages.

    Raises:  OSError.
    """
    flags = mmap.PROT_READ | mmap.PROT_WRITE
    if size_bytes < HUGE_BYTES:
        return _map(None, size_bytes, flags, mmap.MAP_SHARED, fd)
    # A huge page of the file must begin at a multiple of its size in memory, too.
    size = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    spare = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    start = _map(None, size + HUGE_BYTES, _PROT_NONE, spare, -1)
    address = -(-start // HUGE_BYTES) * HUGE_BYTES
    try:
        _map(address, size_bytes, flags, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        unmap(start, size + HUGE_BYTES)
        raise
    if address > start:
        unmap(start, address - start)
    unmap(address + size, start + HUGE_BYTES - address)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        advise(address, size, _MADV_HUGEPAGE)
    return address


@cache
def shared_huge_pages() -> str:
    """Return when the kernel uses huge pages for shared memory: "always", "within_size", "advise",
    "never", "deny" or "force"; "never" if it has none.

    Source: Documentation/admin-guide/mm/transhuge.rst of Linux.
    """
    try:
        chosen = re.search(r"\[(\w+)\]", SHARED_HUGE_PAGES.read_text())
    except OSError:
        return "never"
    return chosen[1] if chosen else "never"


class HugePages:
    """Decides whether new shared memory of this process is made of huge pages, where the kernel
    gives none by itself but makes them on request: as long as they take less CPU time than small
    ones.

    Where the machine has huge pages ready, they take a tenth of that time. On a virtual machine
    whose host takes back free memory, they take several times as much, since the host must provide
    it again. So a huge page is tried after the first 32 MiB, and if it was slow, again after 256
    MiB of small pages, 512, ...; later if a trial took long, so that trials take a hundredth of the
    time that small pages take.
    """

    def __init__(self) -> None:
        self._small_bytes_left = _SMALL_BYTES_FIRST
        self._pause_bytes = _PAUSE_BYTES
        self._is_cheap = False

    def pass_by(self, size_bytes: int) -> bool:
        """Whether new memory of this size should get small pages, which the caller allocates."""
        if self._small_bytes_left <= 0:
            return False
        self._small_bytes_left -= size_bytes
        return True

    def fill(self, address: int, size_bytes: int) -> bool:
        """Allocate and map these units of HUGE_BYTES of a shared mapping, without changing their
        content. Return whether that was done.
        """
        if self.pass_by(size_bytes):
            return False
        # Unless huge pages were cheap last time, measure the cost with one of them.
        tried_bytes = size_bytes if self._is_cheap else HUGE_BYTES
        began, is_done = time.thread_time(), True
        try:
            for at in range(address, address + tried_bytes, HUGE_BYTES):
                advise(at, PAGE_BYTES, _MADV_POPULATE_WRITE)  # collapsing needs a page to fill up
            advise(address, tried_bytes, _MADV_COLLAPSE)
        except OSError:  # the kernel is too old, or no huge page is free
            is_done = False
        spent_s = time.thread_time() - began
        self._is_cheap = is_done and spent_s * (1 << 20) <= _CPU_S_MAX * tried_bytes
        if self._is_cheap:
            self._pause_bytes = _PAUSE_BYTES
            return tried_bytes == size_bytes or self.fill(address, size_bytes)
        worth_bytes = int(spent_s / _TRIAL_CPU_S * (1 << 20))
        self._small_bytes_left = max(self._pause_bytes, min(worth_bytes, _PAUSE_BYTES_MAX))
        self._pause_bytes = min(2 * self._pause_bytes, _PAUSE_BYTES_MAX)
        return is_done and tried_bytes == size_bytes


def unmap(address: int, size_bytes: int) -> None:
    """Unmap memory.

    Raises:  OSError.
    """
    _check(_libc.munmap(address, size_bytes))


def give_up(address: int, size_bytes: int) -> None:
    """Release whole pages of a mapping. Their addresses stay reserved, and cannot be read.

    Raises:  OSError: the kernel has no more mappings for this process.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
    _map(address, size_bytes, _PROT_NONE, flags, -1)


def advise(address: int, size_bytes: int, advice: int) -> None:
    """Call madvise(2). Raises:  OSError."""
    _check(_libc.madvise(address, size_bytes, advice))


def view_of(address: int, size_bytes: int) -> memoryview:
    """Return a mapping as a buffer of bytes. It is unmapped when the last view of it dies."""
    array = (ctypes.c_ubyte * size_bytes).from_address(address)
    weakref.finalize(array, _libc.munmap, address, size_bytes).atexit = False
    return memoryview(array).cast("B")


def _map(address: int | None, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    mapped: int | None = _libc.mmap(address, size_bytes, protection, flags, fd, 0)
    if mapped is None or mapped == _FAILED:
        raise OSError(number := ctypes.get_errno(), os.strerror(number))
    return mapped


def _check(status: int) -> None:
    if status:
        raise OSError(number := ctypes.get_errno(), os.strerror(number))
