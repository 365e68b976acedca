"""The fork server of a node: it imports the modules that workers need, and forks the children of
the node. Modules that only one of the other roles needs are imported at its first request, or
earlier while there are no requests.

Importing takes 0.4 s of CPU once; a fork takes a millisecond, and children share the memory of
imported modules.

Invariants:
1. The fork server has one thread, opens no connection and parses no data, so that each child is as
   clean as a new process.
2. The fork server is the parent of its children: it reports the end of each child once, and they
   die with it.
3. The fork server ends when its socket is closed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence

from dataplane.base import collector, machine
from dataplane.formats import registry
from dataplane.model.errors import PeerLost
from dataplane.rpc import local, tasks
from dataplane.rpc.codec import decode, encode
from dataplane.worker import worker
from dataplane.worker.death import NOT_STARTED

_Main = Callable[[int, int], None]


def _compute() -> None:
    import pyarrow.compute  # noqa: F401 - 30 to 50 ms of CPU


def _fetcher() -> _Main:
    # A late import: a node that reads local files needs no fetcher, and starts faster without it.
    from dataplane.fetcher import process

    return process.main


def _lender() -> _Main:
    # A late import, too: only nodes with neighbours have a lender.
    from dataplane.neighbours import lender

    return lender.main


_ROLES: dict[str, Callable[[], _Main]] = {
    "worker": lambda: worker.main,
    "fetcher": _fetcher,
    "lender": _lender,
}


def main(
    descriptor: int,
    *,
    is_remote: bool = False,
    has_format: bool = False,
    has_time: bool = False,
) -> None:
    """Run the process. `descriptor` is its socket, which it inherits. `is_remote`: the node will
    need fetchers at once. `has_format`: the format of its first dataset is imported. `has_time`:
    no trainer waits for its first children.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Ignore SIGTERM, which a service manager sends to every process of a service: the node drains,
    # and needs its workers meanwhile.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # sent by a terminal that is closed
    with socket.socket(fileno=descriptor) as sock, contextlib.suppress(PeerLost):
        if has_time:
            # Import the formats before the first workers are forked, which were requested already:
            # otherwise each of them would import the formats for its first task.
            registry.import_all()
        # Build the decoder once for all workers: it takes 4 ms of CPU.
        decode(tasks.Task, encode(tasks.Task(tasks.DetachArena(0))))
        ahead = [_fetcher] * is_remote + [registry.import_all] * (not has_format)
        _ForkServer(sock, ahead + [_compute] * has_time).run()


class _ForkServer:
    def __init__(self, sock: socket.socket, ahead: Sequence[Callable[[], object]]) -> None:
        self._sock = sock
        self._ahead = [*reversed(ahead)]
        self._numbers: dict[int, int] = {}  # of children, by process id
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)

    def run(self) -> None:
        """Serve requests until the node ends.   Raises:  PeerLost: the node has ended."""
        collector.settle()  # a collection in a child would copy every page of imported modules
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(0 if self._ahead else None)}
            if not ready:
                self._ahead.pop()()
                collector.settle()
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._collect()
            if self._sock.fileno() in ready:
                self._serve()

    def _serve(self) -> None:
        order, descriptors = local.receive(self._sock, tasks.ToForkServer)
        body = order.body
        try:
            if isinstance(body, tasks.KillChild):
                for pid, number in self._numbers.items():
                    if number == body.number:
                        os.kill(pid, signal.SIGKILL)
                return
            try:
                pid = self._fork(body, *descriptors)
            except (OSError, ImportError, KeyError) as error:
                words = f"{NOT_STARTED}{error}\n"
                os.write(descriptors[1], words.encode())
                self._tell(tasks.ChildEnded(body.number, 1))
            else:
                self._numbers[pid] = body.number
                self._tell(tasks.ChildStarted(body.number, pid))
        finally:
            for fd in descriptors:
                os.close(fd)

    def _collect(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            number = self._numbers.pop(pid)
            self._tell(tasks.ChildEnded(number, os.waitstatus_to_exitcode(status)))

    def _tell(self, body: tasks.FromForkServerBody) -> None:
        local.send(self._sock, tasks.FromForkServer(body))

    def _fork(self, order: tasks.StartChild, sock_fd: int, stderr_fd: int) -> int:
        main, parent = _ROLES[order.role](), os.getpid()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            machine.set_process(f"dp-{order.role}", dies_with_parent=True)
            os.dup2(stderr_fd, 2)
            os.close(stderr_fd)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            os.close(self._woken)
            os.close(self._wakes)
            self._sock.close()
            if os.getppid() == parent:
                main(sock_fd, order.memory_bytes)
            status = 0
        except BaseException:  # noqa: BLE001 - the child must not continue as a second fork server
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
