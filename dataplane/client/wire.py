"""One connection to a node: requests and their answers, from any number of threads.

Invariants:
1. One thread at a time receives for all threads; every answer goes to the slot of its request.
2. An answer whose request was forgotten is added to `strays`, whose reader returns its slab.
3. A thread waits with `poll`, and receives only what is already in the socket. So an interrupt
   (Ctrl-C) during the wait loses nothing. An interrupt in the short moment of receiving ends the
   connection, since an answer may be lost; the socket stays open as long as slabs from it are held.
4. `tell_nowait` and `forget` take no lock and never wait: finalizers may call them.
5. A waiting thread first sets `is_waiting` and then calls its `flush`. So data that another thread
   queues for the next message is sent either by that thread, which sees the flag, or by `flush`.
6. While the node reports that it works on a request, that request has no fixed deadline: each
   report starts its timeout again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from dataplane.client.waiting import Notice
from dataplane.model.config import PROTOCOL_VERSION, VERSION
from dataplane.model.errors import ConfigError, DataplaneError, PeerLost, VersionMismatch
from dataplane.rpc import local
from dataplane.rpc.messages import (
    FromNode,
    FromNodeBody,
    Hello,
    ToNode,
    ToNodeBody,
    Welcome,
    Working,
)

Descriptors = tuple[int, ...]
Answer = tuple[FromNodeBody, Descriptors]


class NoAnswer(TimeoutError):
    """A deadline has passed. This is a separate class, since a user's signal handler may raise
    TimeoutError.
    """


class Wire:
    """A connection to a node. `ask` sends a request at once; `wait` returns its answer."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.strays: deque[FromNodeBody] = deque()
        """Answers whose requests were forgotten, until `Mount.flush` takes them."""
        self._ids = itertools.count(1)
        self._turn = threading.Condition()
        self._slots: dict[int, Answer | None] = {}
        self._working: dict[int, tuple[float, Working]] = {}
        """The time and content of the node's last Working message for each request."""
        self._forgotten: set[int] = set()
        self._receiver: int | None = None
        self._waiters: set[int] = set()
        self._lost: str | None = (
            None  # a string, since an error's traceback would keep frames alive
        )
        self._closed = False
        self.peer_gone = False
        self.worked_at = 0.0
        """When the node last reported work on a request, in time.monotonic()."""

    @property
    def is_waiting(self) -> bool:
        """Whether some thread is waiting for an answer."""
        return bool(self._waiters)

    @property
    def is_lost(self) -> bool:
        """Whether requests can no longer be made."""
        return self._lost is not None

    def ask(self, body: ToNodeBody, deadline: float) -> int:
        """Send a request and return its id for `wait`. Deadlines are in time.monotonic().

        Raises:  PeerLost: the node is gone.  NoAnswer: the node does not read from the socket.
        """
        request_id = next(self._ids)
        self._slots[request_id] = None
        try:
            while self._lost is None:
                try:
                    local.send(self._sock, ToNode(request_id, body))
                except BlockingIOError:
                    self._poll(select.POLLOUT, deadline)
                else:
                    return request_id
        except PeerLost as error:
            self._lose(str(error))
            raise
        except NoAnswer:
            self.forget(request_id)
            raise
        raise self._loss()

    def wait(
        self,
        request_id: int,
        deadline: float,
        notice: Notice | None = None,
        flush: Callable[[], None] | None = None,
    ) -> Answer:
        """Return the answer to a request; call this once per request. An answer that is an error is
        returned, not raised. The node's reports of progress go to `notice`; `flush` sends queued
        messages.

        Raises:  PeerLost: no answer will come.  NoAnswer: no answer came in time.
        """
        me, patience_s = threading.get_ident(), deadline - time.monotonic()
        while True:
            mine = False
            if (said := self._working.pop(request_id, None)) is not None:
                deadline = max(deadline, said[0] + patience_s)
                if notice is not None:
                    notice.working(said[1])
            self._waiters.add(me)
            try:
                if flush is not None:
                    flush()
                with self._turn:
                    answer = self._slots.get(request_id)
                    if answer is not None:
                        del self._slots[request_id]
                        self._working.pop(request_id, None)
                        return answer
                    if request_id not in self._slots and self._lost is None:
                        # The slot is gone: an interrupt came after this answer was received and
                        # before the caller got it.
                        self._lost = "an answer of the node was lost because of an interrupt"
                    if self._lost is not None:
                        raise self._loss()
                    if self._receiver not in (None, me):
                        self._turn.wait(_left(deadline))
                        continue
                    mine, self._receiver = True, me
                self._receive(deadline)
            finally:
                self._waiters.discard(me)
                if mine:
                    self._hand_back_turn()

    def arrived(self, request_id: int) -> FromNodeBody | None:
        """Return the answer to a request if it has arrived, without waiting. `wait` still returns
        the answer.
        """
        me, mine = threading.get_ident(), False
        try:
            with self._turn:
                if self._receiver in (None, me):
                    mine, self._receiver = True, me
            while mine and self._slots.get(request_id) is None and self._has_some():
                self._receive_one()
        except PeerLost:
            pass  # waiting threads get the error
        finally:
            if mine:
                self._hand_back_turn()
        answer = self._slots.get(request_id)
        return None if answer is None else answer[0]

    def _hand_back_turn(self) -> None:
        """Let another thread receive."""
        with self._turn:
            self._receiver = None
            self._turn.notify_all()

    def call(
        self,
        body: ToNodeBody,
        deadline: float,
        notice: Notice | None = None,
        flush: Callable[[], None] | None = None,
    ) -> Answer:
        """Send a request, and return its answer. Log `notice` when it is due.

        Raises:  DataplaneError: the node's error.  PeerLost.  NoAnswer: no answer came in time.
        """
        answer = self.answered(self.ask(body, deadline), deadline, notice, flush)
        if isinstance(answer[0], DataplaneError):
            raise answer[0]
        return answer

    def answered(
        self,
        request_id: int,
        deadline: float,
        notice: Notice | None = None,
        flush: Callable[[], None] | None = None,
    ) -> Answer:
        """Return the answer to a request. Log `notice` when it is due, and forget the request if no
        answer comes.

        Raises:  PeerLost.  NoAnswer.
        """
        try:
            try:
                due = deadline if notice is None else notice.due(deadline)
                return self.wait(request_id, due, notice, flush)
            except NoAnswer:
                if notice is None:
                    raise
                notice.tell()
                return self.wait(request_id, deadline, notice, flush)
        except BaseException:
            self.forget(request_id)
            raise

    def forget(self, request_id: int) -> None:
        """Forget a request whose answer is no longer needed. The answer is added to `strays` when
        it comes, or now if it has already come.
        """
        if self._lost is None:
            self._forgotten.add(request_id)
        self._working.pop(request_id, None)
        answer = self._slots.pop(request_id, None)
        if answer is not None:
            self._dispose(answer)

    def tell_nowait(self, body: ToNodeBody) -> bool:
        """Send a message that has no answer; return False if the socket has no room now."""
        if self._closed:
            return True
        try:
            local.send(self._sock, ToNode(0, body))
        except BlockingIOError:
            return False
        except PeerLost as error:
            self._lose(str(error))
        return True

    def tell_last(self, body: ToNodeBody, seconds_max: float) -> None:
        """Send a message that has no answer at the end of a process, waiting briefly for room."""
        deadline = time.monotonic() + seconds_max
        with contextlib.suppress(NoAnswer, PeerLost):
            while not self.tell_nowait(body):
                self._poll(select.POLLOUT, deadline)

    def close(self) -> None:
        """Close the connection, and wake waiting threads. May be called twice."""
        self._closed = True
        if self._lost is None:
            self._lost = "this connection was closed"
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for request_id in list(self._slots):
            self.forget(request_id)

    def abandon(self) -> None:
        """Close the descriptor in this process, while another process keeps using the socket."""
        self._closed = True
        self._lost = "this connection belongs to the parent process"
        self._turn = (
            threading.Condition()
        )  # a new lock: the old one may be held by a thread that does not exist in this process
        self._sock.close()

    def leave_open(self) -> None:
        """Leave the socket open: the kernel closes it at the very end of the process."""
        self._closed = True
        self._sock.detach()

    def _poll(self, event: int, deadline: float) -> None:
        fd = self._sock.fileno()
        if fd < 0:
            raise self._loss()
        poll = select.poll()
        poll.register(fd, event)
        if not poll.poll(_left(deadline) * 1000):
            raise NoAnswer

    def _has_some(self) -> bool:
        fd = self._sock.fileno()
        return fd >= 0 and self._lost is None and local.has_packet(fd)

    def _receive(self, deadline: float) -> None:
        self._poll(select.POLLIN, deadline)
        self._receive_one()

    def _receive_one(self) -> None:
        try:
            message, descriptors = local.receive(self._sock, FromNode)
            self._dispatch(message.request_id, (message.body, descriptors))
        except BlockingIOError:
            return
        except PeerLost as error:
            self._lose(str(error))
            raise
        except DataplaneError as error:
            self._lost = str(error)
            raise self._loss() from error
        except BaseException:
            self._lost = "receiving was interrupted"
            raise

    def _dispatch(self, request_id: int, answer: Answer) -> None:
        if isinstance(answer[0], Working):
            self.worked_at = time.monotonic()
            if request_id in self._slots:
                self._working[request_id] = self.worked_at, answer[0]
            return
        if request_id not in self._slots:
            self._forgotten.discard(request_id)
            self._dispose(answer)
            return
        self._slots[request_id] = answer
        # `forget` takes no lock: it first adds to `_forgotten`, then pops from `_slots`. Do the
        # reverse here, first set the slot and then check `_forgotten`, so that one of the two
        # threads always finds the answer.
        if request_id in self._forgotten:
            self._forgotten.discard(request_id)
            late = self._slots.pop(request_id, None)
            if late is not None:
                self._dispose(late)

    def _dispose(self, answer: Answer) -> None:
        for fd in answer[1]:
            os.close(fd)
        self.strays.append(answer[0])

    def _lose(self, why: str) -> None:
        self.peer_gone = True
        self._lost = self._lost or why

    def _loss(self) -> PeerLost:
        return PeerLost(self._lost or "this connection was closed", peer="")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise NoAnswer
    return left


# -- greeting ----------------------------------------------------------------------------------
#
# The first messages between a process and a node, which identify both sides and their versions.


def wire_of(sock: socket.socket, name: str) -> Wire:
    """Make a connection to the node with this name out of a socket, which the connection then owns.

    Raises:  ConfigError: a process of another user listens there.
    """
    wire = Wire(sock)
    _, uid, _ = local.peer_credentials(sock)
    if uid != os.getuid():
        wire.close()
        raise ConfigError(
            f"the process that listens at @{name} belongs to user {uid}, not to {os.getuid()}: "
            "it is not a node of this user"
        )
    return wire


def hello(wire: Wire, deadline: float) -> int:
    """Send Hello, and return the id of the answer.   Raises:  PeerLost, NoAnswer."""
    return wire.ask(Hello(VERSION, PROTOCOL_VERSION, os.getpid()), deadline)


def welcomed(wire: Wire, request_id: int, name: str, deadline: float, notice: Notice) -> Welcome:
    """Return the answer to a Hello; close the connection on an error.

    Raises:  PeerLost: the node does not answer, or is gone.  ConfigError: the process that listens
    there is not a node.  VersionMismatch: the node uses another protocol.
    """
    try:
        answer = wire.answered(request_id, deadline, notice)[0]
        if isinstance(answer, DataplaneError):
            raise answer
        if not isinstance(answer, Welcome):
            raise ConfigError(f"the process that listens at @{name} is not a node")
        if answer.protocol != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"the node at @{name} is dataplane {answer.version} (protocol {answer.protocol}), "
                f"and this process has {VERSION} (protocol {PROTOCOL_VERSION}): install one "
                "version on this host, and restart the node",
                expected=PROTOCOL_VERSION,
                found=answer.protocol,
            )
    except NoAnswer:
        wire.close()
        raise PeerLost(f"the node at @{name} does not answer", peer=f"@{name}") from None
    except BaseException:
        wire.close()
        raise
    return answer
