"""Requests workers, fetchers and lenders from this process's fork server (node/fork_server.py).

The fork server runs in a new interpreter. In an embedded node that has just started, it is instead
a fork of the node, so that the modules that both need are imported only once.

Invariants:
1. A process has one fork server. The first holder starts it and the last one ends it. A fork server
   that died is started again for the next request.
2. The end of every requested process is recorded once: with its exit status, or as SIGKILL if the
   fork server died, since the children of a fork server die with it.
3. A fork server that is stopped or stuck, and so reads no messages, is killed, and 2 applies.
4. Only calls that need a process id or an exit status wait for the fork server.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial

from msgspec import Struct

from dataplane.base import machine
from dataplane.security.environment import forget_secrets, without_secrets

# Keep a new fork server small, and in one thread, since a process with a second thread must not
# fork: OpenBLAS and jemalloc would start threads even if they are not used. mimalloc would reserve
# a GiB in advance, which counts towards a memory limit.
ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "MIMALLOC_ARENA_EAGER_COMMIT": "0",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
_MODULE = "dataplane.node"
Main = Callable[[int], None]
_PAUSE_S, _PAUSE_S_MAX = 0.001, 0.5
_CLOSE_S = 5.0
_HUNG_S = 60.0
"""The time that imports from a slow file server may take."""
_LOOK_S = 1.0


class ForkedProcess:
    """One forked process. Thread-safe."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self._ask_to_kill = kill
        self._changing = threading.Lock()
        self._started, self._ended = threading.Event(), threading.Event()
        self._on_end: Callable[[int], None] | None = None
        self._pid, self._status = 0, 0

    @property
    def has_started(self) -> bool:
        """Whether the process id is known, or the process could not be started."""
        return self._started.is_set()

    @property
    def pid(self) -> int:
        """The process id, once it is known; 0 if the process could not be started."""
        self._started.wait()
        return self._pid

    def kill(self) -> None:
        """Send SIGKILL if the process is alive. May be called twice."""
        if not self._ended.is_set():
            self._ask_to_kill()

    def on_end(self, call: Callable[[int], None]) -> None:
        """Pass the exit status to `call` when the process ends, from another thread; at once if it
        has ended.
        """
        with self._changing:
            if not self._ended.is_set():
                self._on_end = call
                return
        call(self._status)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process has ended; False after the timeout."""
        return self._ended.wait(timeout_s)

    def status(self) -> int:
        """Return the exit status; waits for the end of the process."""
        self._ended.wait()
        return self._status

    def started(self, pid: int) -> None:
        """Record the process id that the fork server reports."""
        self._pid = pid
        self._started.set()

    def ended(self, status: int) -> None:
        """Record the exit status, and call the callback."""
        with self._changing:
            self._status, call = status, self._on_end
            self._ended.set()
        self._started.set()
        if call is not None:
            call(status)


class _Fork(Struct, frozen=True):
    """A child that was forked from this process, and not waited for yet."""

    pid: int

    def kill(self) -> None:
        """Send SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Return the exit status; waits for the end of the process."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


_Process = subprocess.Popen[bytes] | _Fork


class _Server:
    """One fork server, and the thread that receives its messages."""

    def __init__(self, stderr_fd: int | None, main: Main | None = None) -> None:
        self.is_lost = False
        self._changing = threading.Lock()
        self._processes: dict[int, ForkedProcess] = {}
        self._numbers = itertools.count(1)
        # Repeat rpc.local.pair() here, so that rpc is imported only while the fork server starts.
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process: _Process = (
                    _executed(theirs, stderr_fd)
                    if main is None or machine.thread_count() > 1
                    else _forked(theirs, stderr_fd, main)
                )
            except OSError as error:
                from dataplane.worker.death import not_started

                self._sock.close()
                raise not_started(str(error)) from error
            except BaseException:
                self._sock.close()
                raise
        self._pulse = machine.Pulse(self._sock, _HUNG_S)
        self._thread = threading.Thread(
            target=self._receive, name="dataplane-fork-server", daemon=True
        )
        self._thread.start()

    def start(
        self,
        role: str,
        sock: socket.socket,
        stderr_fd: int,
        memory_bytes: int,
    ) -> ForkedProcess:
        from dataplane.model.errors import PeerLost
        from dataplane.rpc import local, tasks

        number = next(self._numbers)
        process = ForkedProcess(lambda: self._kill(number))
        with self._changing:
            self._processes[number] = process
        order = tasks.ToForkServer(tasks.StartChild(number, role, memory_bytes))
        try:
            local.send(self._sock, order, (sock.fileno(), stderr_fd))
        except PeerLost:
            with self._changing:
                self._processes.pop(number, None)
            process.ended(-signal.SIGKILL)
        return process

    def close(self) -> None:
        """End the fork server and all its children."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(_CLOSE_S)

    def _kill(self, number: int) -> None:
        from dataplane.model.errors import PeerLost
        from dataplane.rpc import local, tasks

        with contextlib.suppress(PeerLost):  # the fork server is gone, and its children with it
            local.send(self._sock, tasks.ToForkServer(tasks.KillChild(number)))

    def _receive(self) -> None:
        from dataplane.model.errors import DataplaneError
        from dataplane.rpc import local, tasks

        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        try:
            while True:
                if not poll.poll(_LOOK_S * 1000):
                    self._check()
                    continue
                said, _ = local.receive(self._sock, tasks.FromForkServer)
                body = said.body
                with self._changing:
                    process = self._processes.get(body.number)
                    if isinstance(body, tasks.ChildEnded):
                        self._processes.pop(body.number, None)
                if process is None:
                    continue
                if isinstance(body, tasks.ChildStarted):
                    process.started(body.pid)
                else:
                    process.ended(body.status)
        except DataplaneError:  # the fork server died, or sent an invalid message
            pass
        finally:
            self._lose()

    def _check(self) -> None:
        """Kill the fork server if it hangs while somebody waits for it; runs in the receiving
        thread.
        """
        from dataplane.base.trace import Trace

        with self._changing:
            is_awaited = any(not one.has_started for one in self._processes.values())
        # The probe asks to kill child 0, which does not exist: it only tests whether messages are
        # read.
        probe = partial(self._kill, 0) if is_awaited else lambda: None
        if self._pulse.is_lost(self._process.pid, time.monotonic(), probe):
            why = "it reads no messages: it is stopped, or stuck in a system call"
            Trace("worker").failed("fork server hung", pid=self._process.pid, why=why)
            self._process.kill()

    def _lose(self) -> None:
        """Clean up after the fork server has died: wait until all of its children are gone."""
        self._process.kill()
        self._process.wait()
        with self._changing:
            self.is_lost = True
            left = list(self._processes.values())
            self._processes.clear()
        self._sock.close()
        for process in left:
            pid = process.pid if process.has_started else 0
            pause_s = _PAUSE_S
            while pid and not machine.has_ended(pid):
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)
            process.ended(-signal.SIGKILL)


def _executed(sock: socket.socket, stderr_fd: int | None) -> subprocess.Popen[bytes]:
    """Start a fork server in a new interpreter."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE, "--fork-server-fd", str(sock.fileno())],
        stdin=subprocess.DEVNULL,
        stderr=stderr_fd,
        pass_fds=(sock.fileno(),),
        env={**ENVIRONMENT, **without_secrets(os.environ)},
    )


def _forked(sock: socket.socket, stderr_fd: int | None, main: Main) -> _Fork:
    """Start a fork server in a fork of this process, which has one thread."""
    pid = os.fork()
    if pid:
        return _Fork(pid)
    status = 1
    try:
        machine.set_process("dp-fork-server")
        forget_secrets()
        if stderr_fd is not None:
            os.dup2(stderr_fd, 2)
        machine.close_descriptors(keep=(sock.fileno(),))
        main(sock.detach())
        status = 0
    except BaseException:  # noqa: BLE001 - the child must not continue as a second node
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


class _Shared:
    """The one fork server of this process, shared by all holders."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._holder_count = 0
        self._stderr_fd: int | None = None
        self._server: _Server | None = None

    def acquire(self, stderr_fd: int | None = None, main: Main | None = None) -> None:
        """Hold the fork server; the first holder starts it, with this stderr. If `main` is given,
        which runs a fork server on an inherited socket, and this process has only one thread, the
        fork server is forked from this process.

        Raises:  DataplaneError: it cannot be started, and is not held.
        """
        with self._changing:
            if self._server is None:
                self._stderr_fd = stderr_fd
                self._server = _Server(stderr_fd, main)
            self._holder_count += 1

    def release(self) -> None:
        """Release the fork server; the last holder ends it."""
        with self._changing:
            self._holder_count -= 1
            server = self._server
            if self._holder_count:
                return
            self._server = None
        if server is not None:
            server.close()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the fork server within a `with` block."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def start(
        self,
        role: str,
        sock: socket.socket,
        stderr_fd: int,
        memory_bytes: int,
    ) -> ForkedProcess:
        """Start a "worker", a "fetcher" or a "lender" without waiting for it. `sock` is the child's
        end of the socket, `memory_bytes` its limit of private memory (fetchers and lenders have
        none).
        """
        with self._changing:
            assert self._holder_count
            if self._server is None or self._server.is_lost:
                self._server = _Server(self._stderr_fd)
            return self._server.start(role, sock, stderr_fd, memory_bytes)


fork_server = _Shared()
