"""Children that are forked in the middle of a test, and later report what they can read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Child:
    """A forked child that waits for a question."""

    pid: int
    asked: int

    def ask(self) -> int:
        """Ask it; return its answer, after which it has ended."""
        os.write(self.asked, b"!")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextlib.contextmanager
def forking(answer: Callable[[], int], *, closes_all: bool = False) -> Iterator[Child]:
    """Fork a child; when it is asked, it ends with the status that `answer` gives it. A child with
    `closes_all` is a daemon: it does not have the descriptors that it inherits, and forks again.
    """
    to_read, to_write = os.pipe()
    pid = os.fork()
    if not pid:
        status = 99
        with contextlib.suppress(BaseException):
            os.close(to_write)
            if closes_all:
                os.dup2(to_read, 0)
                os.closerange(3, 4096)
                to_read = 0
            if closes_all and (grandchild := os.fork()):
                status = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
            else:
                os.read(to_read, 1)
                status = answer()
        os._exit(status)
    os.close(to_read)
    try:
        yield Child(pid, to_write)
    finally:
        os.close(to_write)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
