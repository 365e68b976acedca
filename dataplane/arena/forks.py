"""Forked children of this process, and the memory that they can still read.

A fork copies all live tensors, and the child keeps reading them from the shared pages of the arena.
So memory that was alive at a fork must not be reused, even after it has died in this process,
before the child and all of its descendants have ended.

The kernel knows when they have ended. Before a fork, this process maps a page of a memfd that only
the child keeps afterwards; a memfd cannot be sealed against writing while any process has it
mapped. A pipe would also show the end of the child, but daemons close all descriptors that they
inherit.

Invariants:
1. Memory that was alive at a fork is not released while a descendant of that fork exists that has
   not called exec.
2. Nothing here waits for a child, and finalizers may call `died` and `Kept.add`.
3. A forked child starts with an empty state: inherited memory belongs to the parent.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import os
import threading
from collections import deque
from typing import Generic, TypeVar

from dataplane.arena.pages import PAGE_BYTES, map_shared, unmap

_F_ADD_SEALS = 1033
_F_SEAL_WRITE = 0x0008

_Dead = TypeVar("_Dead")


class Fork:
    """A fork, or several forks without a call of `born` in between. It concerns all objects with a
    number below its limit. If the kernel cannot tell whether it is over, it counts as lasting
    forever.
    """

    def __init__(self) -> None:
        self.limit = math.inf
        self._is_over = False
        self._page: int | None = None
        self._fds: list[int] = []
        with contextlib.suppress(OSError):  # too many descriptors
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            self._fds.append(os.memfd_create("dataplane-fork", flags))
            os.ftruncate(self._fds[0], PAGE_BYTES)

    def begin(self) -> bool:
        """Prepare for a fork; call this right before it. Return False if this record is over, or
        the kernel cannot tell.
        """
        self.limit = math.inf
        try:
            self._page = map_shared(self._fds[0], PAGE_BYTES)
        except (OSError, IndexError):
            return False
        return True

    def end(self, limit: int) -> None:
        """Finish after a fork; call this right after it, in the parent."""
        self.limit = limit
        page, self._page = self._page, None
        if page is not None:
            unmap(page, PAGE_BYTES)

    def is_over(self) -> bool:
        """Whether all children have ended."""
        if self._is_over:
            return True
        try:
            fcntl.fcntl(self._fds[0], _F_ADD_SEALS, _F_SEAL_WRITE)
        except (OSError, IndexError):
            return False
        self._is_over = True
        self.close()
        return True

    def close(self) -> None:
        """Give up the descriptor. May be called twice, by two threads at once."""
        with contextlib.suppress(IndexError):
            os.close(self._fds.pop())


class Kept(Generic[_Dead]):
    """Objects that have died here but may still be read by children."""

    def __init__(self) -> None:
        self._new: deque[tuple[tuple[Fork, ...], _Dead]] = deque()
        self._by_forks: dict[tuple[Fork, ...], list[_Dead]] = {}
        self._sorting = threading.Lock()

    def add(self, forks: tuple[Fork, ...], dead: _Dead) -> None:
        """Keep an object until these forks are over."""
        self._new.append((forks, dead))

    def let_go(self) -> list[_Dead]:
        """Return the objects that no process can read any more; each is returned once. The
        time that this takes depends on the number of forks, not of kept objects.
        """
        # A finalizer or another thread may enter here during the loop: the first caller does the
        # work.
        if not (self._new or self._by_forks) or not self._sorting.acquire(blocking=False):
            return []
        try:
            while self._new:
                forks, dead = self._new.popleft()
                self._by_forks.setdefault(forks, []).append(dead)
            over = [forks for forks in self._by_forks if all(fork.is_over() for fork in forks)]
            return [dead for forks in over for dead in self._by_forks.pop(forks)]
        finally:
            self._sorting.release()


_numbers = itertools.count()
_alive: dict[int, None] = {}
_forks: list[Fork] = []
_forking = threading.RLock()
_current: list[Fork] = []


def born() -> int:
    """Return a number for an object that was just created."""
    number = next(_numbers)
    _alive[number] = None
    return number


def died(number: int) -> tuple[Fork, ...]:
    """Note that an object has died here. Return the forks whose children may still read it; usually
    none.
    """
    _alive.pop(number, None)
    if not _forks:
        return ()
    return tuple(fork for fork in lasting_forks() if number < fork.limit)


def lasting_forks() -> list[Fork]:
    """Return the forks that are not over, and forget the others."""
    lasting = []
    for fork in list(_forks):
        if not fork.is_over():
            lasting.append(fork)
            continue
        with contextlib.suppress(ValueError):  # another thread was quicker
            _forks.remove(fork)
    return lasting


def _newest() -> int | None:
    """Return the number of the newest object that lives."""
    while True:
        with contextlib.suppress(RuntimeError):  # another thread has changed the dict meanwhile
            return next(reversed(_alive), None)


def _before_fork() -> None:
    _forking.acquire()
    lasting, newest = lasting_forks(), _newest()
    if newest is None:
        return
    if lasting and newest < lasting[-1].limit and lasting[-1].begin():
        _current.append(lasting[-1])
        return
    fork = Fork()
    if not fork.begin():
        fork.close()
    _forks.append(fork)
    _current.append(fork)


def _after_in_parent() -> None:
    if _current:
        _current.pop().end(next(_numbers))
    _forking.release()


def _after_in_child() -> None:
    global _forking  # noqa: PLW0603 - the old lock may be held by a thread that is not here
    _forking = threading.RLock()
    _current.clear()
    _alive.clear()
    for fork in _forks:
        fork.close()
    _forks.clear()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
