"""Arenas that another process has passed to this one, until it takes them back.

Invariant: an arena is closed once it was taken back and nobody uses it any more. So nobody reads or
writes through a descriptor whose number was reused.
"""

from __future__ import annotations

import os
import threading

from msgspec import Struct

from dataplane.arena.memfd import Arena


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

        Raises:  ClosedError: it is no sealed arena.
        """
        arena = Arena.attach(fd, os.fstat(fd).st_size)
        self.detach(arena_id)
        with self._lock:
            self._borrowed[arena_id] = BorrowedArena(arena)
        return arena

    def detach(self, arena_id: int) -> None:
        """Close this arena, at once or when its last user is done; nothing if there is none."""
        with self._lock:
            found = self._borrowed.pop(arena_id, None)
            if found is not None:
                found.is_over = True
                _close_unused(found)

    def use(self, arena_id: int) -> BorrowedArena | None:
        """The arena of this number, which stays open until `done`."""
        with self._lock:
            found = self._borrowed.get(arena_id)
            if found is not None:
                found.users += 1
            return found

    def done(self, borrowed: BorrowedArena) -> None:
        """End one use of an arena."""
        with self._lock:
            borrowed.users -= 1
            _close_unused(borrowed)

    def close(self) -> None:
        """Detach all of them."""
        for arena_id in [*self._borrowed]:
            self.detach(arena_id)


def _close_unused(borrowed: BorrowedArena) -> None:
    if borrowed.is_over and not borrowed.users:
        borrowed.arena.close()
