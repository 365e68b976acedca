"""One worker or fetcher process and its socket: forked, killed, and collected without waiting.

A killed process may stay alive for a while: one blocked in the kernel, in a read from an
unreachable file server, dies only when the kernel wakes it. So nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Self

from dataplane.base.machine import Pulse
from dataplane.rpc import local
from dataplane.worker.forking import ForkedProcess, fork_server

MEMORY_BYTES = 1 << 30
"""Default limit on a worker's private memory."""
HUNG_S = 15.0
WORDS_BYTES_MAX = 4096
"""The bytes at the end of a process's stderr that are kept, to report how the process ended."""
_PIECE_BYTES = 4096
_CLOSE_S = 5.0
_PIECES_LEFT_MAX = 16
"""Pieces that are read from a pipe before it is closed: together the capacity of a pipe."""


class WorkerProcess:
    """A worker or fetcher process of this node, our end of its socket, and the last lines of its
    stderr, which is passed on.
    """

    def __init__(
        self, process: ForkedProcess, sock: socket.socket, stderr: StderrCopy, hung_s: float
    ) -> None:
        self.sock = sock
        self._process = process
        self._stderr = stderr
        self._loop = asyncio.get_running_loop()
        self._pulse = Pulse(sock, hung_s)

    @classmethod
    def start(
        cls,
        stderr_fd: int | None,
        memory_bytes: int = MEMORY_BYTES,
        role: str = "worker",
        hung_s: float = HUNG_S,
    ) -> Self:
        """Start a process of this role with this memory limit; its stderr goes to ours, or to the
        given one. The caller holds the fork server. The process counts as hung if it reads nothing
        for `hung_s` of its own time.
        """
        ours, theirs = local.pair()
        ours.setblocking(False)
        said, says = os.pipe()
        try:
            with theirs:
                process = fork_server.start(role, theirs, says, memory_bytes)
        except BaseException:
            ours.close()
            os.close(said)
            raise
        finally:
            os.close(says)
        stderr = StderrCopy(said, 2 if stderr_fd is None else stderr_fd)
        return cls(process, ours, stderr, hung_s)

    @property
    def has_started(self) -> bool:
        """Whether the process id is known, or the process could not be started."""
        return self._process.has_started

    @property
    def pid(self) -> int:
        """The process id; waits until it is known."""
        return self._process.pid

    @property
    def last_words(self) -> str:
        """The last few lines that the process wrote to its stderr."""
        return self._stderr.tail.decode(errors="replace")

    def is_hung(self, now: float, probe: Callable[[], object]) -> bool:
        """Whether the process must be replaced, by `Pulse.is_lost`; call this about twice
        a second.
        """
        if not self._process.has_started or self.sock.fileno() < 0:
            return False
        return self._pulse.is_lost(self._process.pid, now, probe)

    def on_readable(self, call: Callable[[], None]) -> None:
        """Call this whenever the worker has sent something or closed its connection."""
        self._loop.add_reader(self.sock.fileno(), call)

    def end(self, ended: Callable[[int], None]) -> None:
        """Kill the process and ignore what it still sends. `ended` gets the exit status when the
        process is gone, with every thread that could still write into our memory.
        """
        self._hear_no_more()
        self._process.kill()
        self._process.on_end(partial(self._tell_end, ended))

    def kill(self) -> None:
        """Close the connection and kill the process, without waiting for its end. May be called
        twice.
        """
        self._hear_no_more()
        self._process.kill()
        self.sock.close()
        self._stderr.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process is gone; return False after the timeout. Blocks, so use it only
        when the node exits.
        """
        return self._process.wait(timeout_s)

    def _hear_no_more(self) -> None:
        if self.sock.fileno() >= 0:
            self._loop.remove_reader(self.sock.fileno())

    def _tell_end(self, ended: Callable[[int], None], status: int) -> None:
        """Report the end; called in the thread that learns of it."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed: the node has ended
            self._loop.call_soon_threadsafe(self._collected, ended, status)

    def _collected(self, ended: Callable[[int], None], status: int) -> None:
        self.sock.close()
        self._stderr.close()
        ended(status)


def kill_all(processes: Iterable[WorkerProcess]) -> list[WorkerProcess]:
    """Kill these processes and wait a few seconds for their end. Return the processes that are
    still there: the kernel holds them. Blocks, so use it only when the node exits.
    """
    killed = list(processes)
    for process in killed:
        process.kill()
    deadline = time.monotonic() + _CLOSE_S
    return [one for one in killed if not one.wait(max(0.0, deadline - time.monotonic()))]


class StderrCopy:
    """Passes on the output of a pipe, and keeps the end of it."""

    def __init__(self, source_fd: int, target_fd: int) -> None:
        self.tail = b""
        self._source_fd: int | None = source_fd
        self._target_fd = target_fd
        self._loop = asyncio.get_running_loop()
        os.set_blocking(source_fd, False)
        self._loop.add_reader(source_fd, self._copy)

    def close(self) -> None:
        """Read what is left in the pipe, and close it. May be called twice."""
        for _ in range(_PIECES_LEFT_MAX):
            if not self._copy():
                break
        if self._source_fd is not None:
            self._loop.remove_reader(self._source_fd)
            os.close(self._source_fd)
            self._source_fd = None

    def _copy(self) -> bool:
        """Pass a piece of output on; False if there is none now."""
        if self._source_fd is None:
            return False
        try:
            piece = os.read(self._source_fd, _PIECE_BYTES)
        except BlockingIOError:
            return False
        if not piece:  # the process has closed its end
            self._loop.remove_reader(self._source_fd)
            os.close(self._source_fd)
            self._source_fd = None
            return False
        self.tail = (self.tail + piece)[-WORDS_BYTES_MAX:]
        self._pass_on(piece)
        return True

    def _pass_on(self, piece: bytes) -> None:
        """Write a piece of output; drop it if nobody reads, rather than block the event loop."""
        poll = select.poll()
        poll.register(self._target_fd, select.POLLOUT)
        if any(event & select.POLLOUT for _, event in poll.poll(0)):
            with contextlib.suppress(OSError):
                os.write(self._target_fd, piece)
