"""A child process of a node and its socket: forked, heard, killed, and collected without waiting.

A killed process may stay alive for a while: one blocked in the kernel, in a read from an
unreachable file server, dies only when the kernel wakes it. So nothing here blocks the event loop.

Invariants:
1. Messages arrive in the order in which they were sent. Those that the socket has no room for wait,
   with descriptors of their own.
2. `lost` is called at most once; no message is heard after it, or after `end` or `kill`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Self, TypeVar

from dataplane.base.machine import Pulse
from dataplane.base.trace import Trace
from dataplane.model.errors import DataplaneError, PeerLost
from dataplane.rpc import local
from dataplane.worker.death import WORDS_BYTES_MAX
from dataplane.worker.forking import ForkedProcess, fork_server

MEMORY_BYTES = 1 << 30
"""Default limit on a worker's private memory."""
HUNG_S = 15.0
_PIECE_BYTES = 4096
_MESSAGES_A_TURN = 32
_CLOSE_S = 5.0
_PIECES_LEFT_MAX = 16
"""Pieces that are read from a pipe before it is closed: together the capacity of a pipe."""


T = TypeVar("T")


class WorkerProcess:
    """A worker, fetcher or lender of this node, our end of its socket, and the last lines of its
    stderr, which is passed on.
    """

    def __init__(
        self,
        role: str,
        process: ForkedProcess,
        sock: socket.socket,
        stderr: StderrCopy,
        hung_s: float,
    ) -> None:
        self.is_ending = False
        """Whether the process is being ended, and its exit status was not collected yet."""
        self.role, self._sock = role, sock
        self._process = process
        self._stderr = stderr
        self._loop = asyncio.get_running_loop()
        self._pulse = Pulse(sock, hung_s)
        self._unsent: deque[tuple[object, tuple[int, ...]]] = deque()

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
        return cls(role, process, ours, stderr, hung_s)

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

    def listen(self, cls: type[T], hear: Callable[[T], object], lost: Callable[[], object]) -> None:
        """Call `hear` with each message of the process, and `lost` if it has closed its connection
        or sent an invalid message. Descriptors that come with a message are closed.
        """
        self._loop.add_reader(self._sock.fileno(), self._receive, cls, hear, lost)

    def send(self, message: object, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message without waiting; the descriptors stay the caller's. If the process is
        gone, `lost` reports it.

        Raises:  ConfigError: the message is too large.
        """
        if self.is_ending or (not self._unsent and self._send(message, descriptors)):
            return
        self._unsent.append((message, tuple(map(os.dup, descriptors))))
        if len(self._unsent) == 1:
            self._loop.add_writer(self._sock.fileno(), self._flush)

    def is_hung(self, now: float, probe: object, trace: Trace) -> bool:
        """Whether the process must be replaced, by `Pulse.is_lost`, since it does not read `probe`;
        if so, log it. Call this about twice a second.
        """
        if self.is_ending or not self._process.has_started:
            return False
        is_hung = self._pulse.is_lost(self._process.pid, now, lambda: self.send(probe))
        if is_hung:
            why = "it reads no messages: it is stopped, or stuck in a system call"
            trace.failed(f"{self.role} hung", pid=self._process.pid, why=why)
        return is_hung

    def end(self, ended: Callable[[int], None]) -> None:
        """Kill the process and ignore what it still sends. `ended` gets the exit status when the
        process is gone, with every thread that could still write into our memory. Does nothing if
        the process is being ended.
        """
        if self.is_ending:
            return
        self._hear_no_more()
        self._process.kill()
        self._process.on_end(partial(self._tell_end, ended))

    def kill(self) -> None:
        """Close the connection and kill the process, without waiting for its end. May be called
        twice.
        """
        self._hear_no_more()
        self._process.kill()
        self._sock.close()
        self._stderr.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process is gone; return False after the timeout. Blocks, so use it only
        when the node exits.
        """
        return self._process.wait(timeout_s)

    def _send(self, message: object, descriptors: tuple[int, ...]) -> bool:
        """Send a message; return False if the socket has no room."""
        try:
            local.send(self._sock, message, descriptors)
        except BlockingIOError:
            return False
        except PeerLost:
            pass  # the next receive fails, too
        return True

    def _flush(self) -> None:
        while self._unsent:
            if not self._send(*self._unsent[0]):
                return
            self._drop_first()
        self._loop.remove_writer(self._sock.fileno())

    def _drop_first(self) -> None:
        for fd in self._unsent.popleft()[1]:
            os.close(fd)

    def _receive(
        self, cls: type[T], hear: Callable[[T], object], lost: Callable[[], object]
    ) -> None:
        for _ in range(_MESSAGES_A_TURN):
            try:
                message, descriptors = local.receive(self._sock, cls)
            except BlockingIOError:
                return
            except DataplaneError:  # the process is gone, or sent an invalid message
                self._loop.remove_reader(self._sock.fileno())
                lost()
                return
            for fd in descriptors:
                os.close(fd)
            hear(message)
            if self.is_ending:
                return

    def _hear_no_more(self) -> None:
        self.is_ending = True
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
        while self._unsent:
            self._drop_first()

    def _tell_end(self, ended: Callable[[int], None], status: int) -> None:
        """Report the end; called in the thread that learns of it."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed: the node has ended
            self._loop.call_soon_threadsafe(self._collected, ended, status)

    def _collected(self, ended: Callable[[int], None], status: int) -> None:
        self._sock.close()
        self._stderr.close()
        ended(status)


def kill_all(processes: Iterable[WorkerProcess], trace: Trace) -> None:
    """Kill these processes and wait a few seconds for their end. Log which of them are still there:
    the kernel holds them. Blocks, so use it only when the node exits.
    """
    killed = list(processes)
    for process in killed:
        process.kill()
    deadline = time.monotonic() + _CLOSE_S
    for process in killed:
        if not process.wait(max(0.0, deadline - time.monotonic())):
            trace.failed(f"end of {process.role}", pid=process.pid, why="stuck in kernel")


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
