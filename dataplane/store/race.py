"""Let two requests race for one read. The first request writes into the destination; it is ended
early if the second, which reads into its own memory, is faster.

Invariants:
1. Exactly one of the two wins. The loser never writes into the destination after that.
2. A store writes into a destination that may be raced for only between `hold` and `claim`, or
   after `claim`; and in either case only after `sent`, or through a `Sink`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from typing_extensions import Buffer


class EndedEarlyError(Exception):
    """Another request has read these bytes: this read is over, and has no result."""


class Sink(Protocol):
    """Memory that is no part of a mapping yet: a part of the file `fd`, which is filled from its
    start. The next byte belongs at `offset`. Raises what `Race.sent` may raise.
    """

    fd: int
    offset: int

    def write(self, body: Buffer) -> int:
        """Write these bytes, and return how many were written."""

    def moved(self, count: int, error: int = 0) -> None:
        """Note that the kernel has put this many bytes there, and the error that ended it."""


class Race:
    """The first request of a read. Thread-safe. `meanwhile` is done, once, while its answer is on
    its way: it makes the destination ready. That is not needed for what goes through `sink`, which
    gives a Sink for a part of the destination, or None if there is none.
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
        """Note that the first request was sent, or that its answer is here already: make the
        destination ready. May be called again.

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
        """A new Sink for this part of the destination, if there is one."""
        return None if self._sink is None else self._sink(into)

    def release(self) -> None:
        """Note that the first request is over, whatever its outcome, and writes no more."""
        with self._changed:
            self._sock = None
            self._changed.notify_all()

    def claim(self) -> None:
        """Let the first request win, which has all bytes or has failed, if it was not ended early.
        May be called twice.

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
        no more, False if it has won.

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
        """Whether the first request has been ended early."""
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
        # Not the method of a TLS socket, which is not meant for another thread.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


_local = threading.local()


@contextlib.contextmanager
def raced(race: Race) -> Iterator[None]:
    """Make this race that of the thread's reads within the block, as its first request."""
    _local.race = race
    try:
        yield
    finally:
        _local.race = None


def current_race() -> Race:
    """Return the race of this thread's read; if there is none, a race without a second request."""
    return getattr(_local, "race", None) or Race()
