"""The node's listening socket: accepts the connections of trainers, until the node is stopped.

Invariants:
1. Connections never use up the descriptors that logs, imports, workers and shards need: there are
   at most `count_max`, and one process has at most half of them, and at most 512.
2. A connection that sends no Hello within `_HELLO_S` is closed. If there is no room for a new one,
   the one that has been silent longest is closed at once. So idle connections keep no trainer out.
3. If descriptors run short anyway, no connection is accepted for a second, so that the loop does
   not spin.
4. The end of a connection is seen at once, also while nothing is read from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from dataplane.base.machine import connections_max
from dataplane.base.trace import Trace, tell_suppressed
from dataplane.model.errors import ConfigError
from dataplane.rpc import local
from dataplane.security.admission import Admission, AdmissionRules

_HELLO_S = 15.0
_SILENT_MAX = 16
"""Silent connections allowed per process; a trainer says Hello at once."""
_OF_PROCESS_MAX = 512
_PAUSE_S = 1.0


class Visitor(Protocol):
    """An accepted connection. It reports its Hello and its end to the door."""

    def fileno(self) -> int:
        """Return the socket's descriptor."""

    def close(self) -> None:
        """Hang up."""

    def hung_up(self) -> None:
        """Close: the peer is gone."""


class Door:
    """Takes connections from `listener`, which belongs to it. `admit` makes a visitor of each."""

    def __init__(
        self,
        listener: socket.socket,
        admit: Callable[[socket.socket], Visitor],
        trace: Trace,
        count_max: int | None = None,
    ) -> None:
        listener.setblocking(False)
        self._listener, self._admit, self._trace = listener, admit, trace
        count_max = connections_max() if count_max is None else count_max
        self._admission: Admission[Visitor] = Admission(
            AdmissionRules(
                count_max,
                silent_of_source_max=_SILENT_MAX,
                peer_max=min(max(1, count_max // 2), _OF_PROCESS_MAX),
                greeting_s=_HELLO_S,
            )
        )
        self._pausing: asyncio.TimerHandle | None = None
        self._ends = select.epoll()
        """Watches all connections for nothing but their end, which the kernel always reports."""
        self._visitor_of: dict[int, Visitor] = {}

    def open(self) -> None:
        """Start accepting connections."""
        self._pausing = None
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener.fileno(), self._on_connection)
        loop.add_reader(self._ends.fileno(), self._on_end)

    def close(self) -> None:
        """Stop accepting connections. Open ones stay, but their ends are no longer reported. May be
        called twice.
        """
        if self._pausing is not None:
            self._pausing.cancel()
        loop = asyncio.get_running_loop()
        if self._listener.fileno() >= 0:
            loop.remove_reader(self._listener.fileno())
        self._listener.close()
        if not self._ends.closed:
            loop.remove_reader(self._ends.fileno())
        self._ends.close()

    def tick(self, now: float | None = None) -> None:
        """Close connections that have been silent for too long, and log how many lines were
        left out of the log, about refused connections and others.
        """
        tell_suppressed()
        for visitor in self._admission.late(time.monotonic() if now is None else now):
            self._close(visitor, self._admission.source_of(visitor), f"silent for {_HELLO_S:g} s")

    def greeted(self, visitor: Visitor) -> None:
        """Note that the visitor has said Hello.

        Raises:  ConfigError: its process has too many connections.
        """
        # For processes in other pid namespaces, the kernel reports pid 0.
        pid, most = self._admission.source_of(visitor), self._admission.rules.peer_max
        if not self._admission.greeted(visitor, pid):
            files = ", or allow the node more open files (ulimit -n, LimitNOFILE=)"
            more = files if most < _OF_PROCESS_MAX else ""
            raise ConfigError(
                f"process {pid} has {most} connections to this node, the most for one process: "
                f"close() loaders that are no longer used{more}",
                field="connections",
            )

    def left(self, visitor: Visitor) -> None:
        """Forget a visitor that is gone. Its socket must still be open."""
        self._admission.left(visitor)
        if self._visitor_of.pop(visitor.fileno(), None) is not None and not self._ends.closed:
            self._ends.unregister(visitor.fileno())

    def _on_connection(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            self._pause(error)
            return
        pid, uid, _ = local.peer_credentials(sock)
        why = "another user" if uid != os.getuid() else ""
        if not why and self._admission.has_enough_silent(pid):
            why = f"{_SILENT_MAX} other connections of this process have sent nothing yet"
        if why:
            by = f"process {pid}" if uid == os.getuid() else f"user {uid}"
            self._trace.refused("connection refused", by=by, pid=pid, uid=uid, why=why)
            sock.close()
            return
        sock.setblocking(False)
        visitor, now = self._admit(sock), time.monotonic()
        self._visitor_of[visitor.fileno()] = visitor
        self._ends.register(visitor.fileno(), 0)
        self._admission.came(visitor, pid, now)
        for older, source, _ in self._admission.makes_way(now):
            count = self._admission.rules.count_max
            self._close(older, source, f"there are {count}, as many as open files allow")

    def _on_end(self) -> None:
        """Close one connection that has ended; others later, since each may have many messages."""
        for fd, _ in self._ends.poll(0, 1):
            self._visitor_of[fd].hung_up()

    def _close(self, visitor: Visitor, pid: int | str, why: str) -> None:
        self._trace.refused("connection refused", by=f"process {pid}", pid=pid, why=why)
        visitor.close()

    def _pause(self, error: OSError) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        self._pausing = loop.call_later(_PAUSE_S, self.open)
        self._trace.failed("nobody is let in", error=error, connections=len(self._admission))
        for visitor in self._admission.late(float("inf")):
            visitor.close()


# -- stopping -------------------------------------------------------------------------------------
#
# Waits that end early when the process is told to stop.


_TICK_S = 0.5


async def wait_stop(stop: asyncio.Event, seconds: float, *, is_draining: bool) -> None:
    """Wait until `stop` is set or the time has passed; during a drain, wait the whole time."""
    if is_draining:
        await asyncio.sleep(seconds)
        return
    with contextlib.suppress(TimeoutError):
        # Not wait_for: in Python 3.11 it may swallow a cancellation.
        async with asyncio.timeout(seconds):
            await stop.wait()


async def done_before(
    stop: asyncio.Event, waiting: Coroutine[Any, Any, None], meanwhile: Callable[[], None]
) -> bool:
    """Run `waiting` until it ends or `stop` is set, and return whether it ended; otherwise it is
    cancelled. `meanwhile` is called periodically.

    Raises:  every error that `waiting` raises.
    """
    task = asyncio.create_task(waiting)
    stopping = asyncio.create_task(stop.wait())
    try:
        while not task.done() and not stop.is_set():
            meanwhile()
            await asyncio.wait({task, stopping}, timeout=_TICK_S, return_when=FIRST_COMPLETED)
        if not task.done():
            return False
        task.result()
        return True
    finally:
        task.cancel()
        stopping.cancel()
        await asyncio.wait({task, stopping})
