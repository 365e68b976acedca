"""The lender: a process that sends a node's blocks to the neighbours of its jobs, and slabs that
the node has made for them.

The lender has one thread, which never waits for a neighbour: thousands of neighbours may have a
connection, and a neighbour that stops reading delays no other neighbour. The node makes all
decisions about blocks and slabs; the lender asks it over a socket.

Invariants:
1. Before the handshake of a connection has ended, nothing but the handshake is parsed. A handshake
   ends within `handshake_s`, and each refused connection is one line of the log.
2. For every Give of the node, the lender sends exactly one Given: when the neighbour's receipt has
   come, or after the connection was closed. A connection is closed with a reset, so that the kernel
   drops bytes that it has not sent.
3. If a stage of a connection takes longer than its deadline, the connection is closed, or its
   request is refused.
4. Keys are kept only in memory, and only the newest key of each job.
5. The lender exits when the node's socket closes.
6. Bodies of requests for slabs take no more memory than the limits allow.
"""

from __future__ import annotations

import faulthandler
import heapq
import itertools
import math
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator

from dataplane.arena.memfd import BorrowedArenas
from dataplane.base.machine import collect_rarely, raise_descriptor_limit
from dataplane.base.trace import configure, tell_suppressed
from dataplane.model.errors import ClosedError, PeerLost
from dataplane.model.records import BlockForm
from dataplane.neighbours import entrance, wire
from dataplane.neighbours.connection import (
    BodyBytes,
    Connection,
    InFlight,
    Limits,
    LoanStage,
    SentPayload,
    fits,
)
from dataplane.neighbours.entrance import Entrance, Keys, LeftJobError
from dataplane.neighbours.line_tls import LineTls
from dataplane.neighbours.wire import ONE_SIDE, TLS_ALERT
from dataplane.rpc import lending, local, tasks
from dataplane.security.admission import Admission, Reason

_MESSAGES_A_TURN = 64

_Turn = tuple[Connection, lending.Request, int]
_Answered = lending.Give | lending.Refuse


class NodeLink:
    """Messages to the node, sent without waiting for it: those that it has not read yet, in
    order.
    """

    def __init__(self, sock: socket.socket, epoll: select.epoll, bodies: BodyBytes) -> None:
        self._sock = sock
        self._epoll = epoll
        self._bodies = bodies
        self._unsent: deque[lending.FromLenderBody] = deque()
        self._is_full = False
        sock.setblocking(False)
        epoll.register(sock.fileno(), select.EPOLLIN)

    def tell(self, body: lending.FromLenderBody) -> None:
        """Send this message with the next `flush`."""
        self._unsent.append(body)

    def flush(self) -> None:
        """Send as many messages as the socket has room for. The epoll reports when there is room
        for more.

        Raises:  PeerLost.
        """
        try:
            while self._unsent:
                local.send(self._sock, lending.FromLender(self._unsent[0]))
                sent = self._unsent.popleft()
                if isinstance(sent, lending.Asked) and sent.request.slab:
                    self._bodies.release(sent.node_id, len(sent.request.slab))
        except BlockingIOError:
            pass
        if self._is_full != bool(self._unsent):
            self._is_full = bool(self._unsent)
            wanted = select.EPOLLIN | (select.EPOLLOUT if self._unsent else 0)
            self._epoll.modify(self._sock.fileno(), wanted)


class Lender:
    """Serve one listening socket. `sock` is the connection with the node. `arena_fd` is the node's
    block arena, a descriptor that the lender owns from now on.

    Raises:  ClosedError: `arena_fd` is not an arena.
    """

    def __init__(
        self,
        sock: socket.socket,
        arena_fd: int,
        listener: socket.socket,
        start: lending.StartLending,
        limits: Limits,
    ) -> None:
        self._sock = sock
        self._arenas = BorrowedArenas()
        block_arena = self._arenas.attach(tasks.BLOCK_ARENA, arena_fd)
        self._next_number = start.first_number
        self._limits = limits
        self._keys = Keys(start.node_id)
        for key in start.keys:
            self._keys.learn(key)
        self._connections: dict[int, Connection] = {}
        self._admission: Admission[Connection] = Admission(limits.admission)
        self._due: list[tuple[float, int, Connection]] = []
        """A heap of the times at which the deadlines of connections are checked."""
        self._order = itertools.count()
        self._in_flight: InFlight[_Turn] = InFlight(block_arena.size_bytes)
        self._asked: dict[int, Connection | None] = {}
        self._checking: deque[Connection] = deque()
        self._bodies = BodyBytes(limits)
        self._epoll = select.epoll()
        self._node = NodeLink(sock, self._epoll, self._bodies)
        tls = None if start.tls is None else LineTls(start.tls)
        self._entrance = Entrance(listener, self._epoll, limits.handshake_s, tls)

    def serve(self) -> None:
        """Serve until the node is gone.   Raises:  PeerLost."""
        while True:
            self.turn(self._wait_s())

    def turn(self, wait_s: float | None) -> None:
        """Wait for events for at most `wait_s`, and handle them.   Raises:  PeerLost."""
        for fd, event in self._epoll.poll(wait_s):
            if fd == self._sock.fileno():
                if event & ~select.EPOLLOUT:
                    self._hear_node()
            elif fd == self._entrance.fileno():
                self._accept()
            elif (connection := self._connections.get(fd)) is not None:
                self._serve(connection, event)
        for _ in range(len(self._checking)):
            self._send(self._checking.popleft())
        now = time.monotonic()
        for connection in self._overdue(now):
            self._late(connection)
        self._entrance.resume(now)
        self._node.flush()
        entrance.trace.tell_suppressed()

    def close(self) -> None:
        """Close all connections with neighbours. The caller closes the connection with the node."""
        self._epoll.close()
        for connection in self._connections.values():
            connection.sock.close()
        self._arenas.close()

    def _wait_s(self) -> float | None:
        if self._checking:
            return 0.0
        next_deadline = self._due[0][0] if self._due else None
        due = [next_deadline, self._entrance.open_at, entrance.trace.due_at]
        at = min(moment for moment in due if moment is not None)
        return max(0.0, at - time.monotonic()) if at < math.inf else None

    def _accept(self) -> None:
        for connection in self._entrance.accept():
            self._connections[connection.fd] = connection
            self._watch(connection)
            self._epoll.register(connection.fd, select.EPOLLIN)
            now = time.monotonic()
            self._admission.came(connection, connection.host, now)
            for older, _, reason in self._admission.makes_way(now):
                whose = "of its host " if reason is Reason.SILENT_OF_SOURCE else ""
                self._refuse(older, f"too many others {whose}came without a proof")

    def _serve(self, connection: Connection, event: int) -> None:
        if event & select.EPOLLOUT and connection.stage is LoanStage.SENDING:
            self._epoll.modify(connection.fd, select.EPOLLIN)
            self._send(connection)
        if connection.stage is LoanStage.TLS:
            self._secure(connection)
        elif event & ~select.EPOLLOUT and connection.stage is not LoanStage.CLOSED:
            self._receive(connection)

    def _secure(self, connection: Connection) -> None:
        try:
            self._entrance.secure(connection)
        except wire.WrongFrameError as error:
            self._refuse(connection, str(error))
        except OSError:
            self._close(connection)

    def _receive(self, connection: Connection) -> None:
        try:
            if not connection.receive():
                self._lost(connection)
                return
        except BlockingIOError:
            return
        try:
            while self._parse(connection):
                pass
        except wire.WrongFrameError as error:
            self._refuse(connection, str(error), is_late=isinstance(error, LeftJobError))

    def _parse(self, connection: Connection) -> bool:
        """Act on the next frame, if it is complete. Return whether to call this again.

        Raises:  WrongFrameError.
        """
        if connection.stage is LoanStage.CLOSED or not connection.received:
            return False
        frame = connection.next_frame()
        if not frame:
            if connection.stage is LoanStage.READY:
                self._expect(connection)
            return False
        if connection.stage is LoanStage.OPENING:
            self._say(connection, self._keys.challenge(connection, frame))
        elif connection.stage is LoanStage.PROOF:
            self._keys.check(connection, frame)
            if not self._admission.greeted(connection, connection.node_id):
                raise wire.WrongFrameError("this node has too many connections")
            self._set(connection, LoanStage.READY, self._limits.idle_s)
        elif connection.stage in {LoanStage.READY, LoanStage.BODY}:
            self._release_body(connection)
            self._begin(connection, wire.unpack_request(frame))
        else:
            self._received(connection, frame)
        return True

    def _expect(self, connection: Connection) -> None:
        """Set the deadline of a request that has begun to arrive, and reserve memory for a large
        request.
        """
        length = connection.frame_bytes()
        if length > wire.SMALL_BYTES_MAX:
            self._reserve(connection, length)
            connection.body_bytes, connection.stage = length, LoanStage.BODY
        # Take the earlier deadline: later bytes of the request must not extend the deadline.
        due = time.monotonic() + self._limits.frame_s
        connection.deadline = min(connection.deadline, due)
        self._watch(connection)

    def _reserve(self, connection: Connection, length: int) -> None:
        """Reserve memory for the body of a request.

        Raises:  WrongFrameError: there is too little memory.
        """
        if not self._bodies.reserve(connection.node_id, length):
            raise wire.WrongFrameError("requests for slabs take too much memory")

    def _release_body(self, connection: Connection) -> None:
        length, connection.body_bytes = connection.body_bytes, 0
        if length:
            self._bodies.release(connection.node_id, length)

    def _begin(self, connection: Connection, request: lending.Request) -> None:
        if request.slab:
            self._reserve(connection, len(request.slab))  # `NodeLink` releases this
        connection.request = request
        if request.slab:
            self._ask_node(connection)
            return
        self._set(connection, LoanStage.WAITING, self._limits.turn_s)
        self._take_turn(connection, request, request.length)

    def _take_turn(self, connection: Connection, request: lending.Request, length: int) -> None:
        self._in_flight.ask(connection.node_id, length, (connection, request, length))
        self._next_turns()

    def _next_turns(self) -> None:
        while (turn := self._in_flight.next()) is not None:
            connection, request, length = turn
            is_given = connection.stage is LoanStage.TURN
            if connection.request is not request or not (
                is_given or connection.stage is LoanStage.WAITING
            ):
                # The connection was closed, or the request was refused, before its turn came.
                self._in_flight.ended(connection.node_id, length)
                continue
            connection.bytes_in_flight = length
            if is_given:
                self._set(connection, LoanStage.SENDING, self._limits.payload_s(length))
                self._checking.append(connection)
            else:
                self._ask_node(connection)

    def _ask_node(self, connection: Connection) -> None:
        connection.number = self._next_number
        self._next_number += connection.block_count
        self._asked[connection.number] = connection
        self._set(connection, LoanStage.ASKED, self._limits.answer_s)
        self._node.tell(connection.asked())

    def _hear_node(self) -> None:
        for _ in range(_MESSAGES_A_TURN):
            try:
                said, descriptors = local.receive(self._sock, lending.ToLender)
            except BlockingIOError:
                return
            body = said.body
            if isinstance(body, lending.LendingKeys):
                self._learn(body)
            elif isinstance(body, tasks.AttachArena):
                self._attach(body.arena_id, *descriptors)
            elif isinstance(body, tasks.DetachArena):
                self._arenas.detach(body.arena_id)
            elif not isinstance(body, lending.StartLending):
                self._answer(body)

    def _attach(self, arena_id: int, fd: int) -> None:
        try:
            self._arenas.attach(arena_id, fd)
        except ClosedError as error:
            entrance.trace.failed("no arena to lend", why=str(error))

    def _learn(self, key: lending.LendingKeys) -> None:
        self._keys.learn(key)
        for connection in [*self._connections.values()]:
            opening, is_silent = connection.opening, connection.nonce
            if opening is None or is_silent or opening.job_id != key.job_id:
                continue
            if not self._keys.are_of(opening):
                self._close(connection)

    def _answer(self, body: _Answered) -> None:
        connection = self._asked.pop(body.number, None)
        if connection is None:  # the connection was closed while the node prepared its answer
            if isinstance(body, lending.Give):
                self._node.tell(lending.Given(body.number))
            return
        request = connection.request
        assert request is not None
        if isinstance(body, lending.Give):
            self._give(connection, request, body)
        else:
            self._end_request(connection, wire.Answer(request.number, wire.Outcome.REFUSED))

    def _give(self, connection: Connection, request: lending.Request, body: lending.Give) -> None:
        borrowed = self._arenas.use(body.arena_id)
        if borrowed is None or not fits(request, body, borrowed.arena.size_bytes):
            if borrowed is not None:
                self._arenas.done(borrowed)
            entrance.trace.failed(
                "wrong region to lend", length=body.region.length, arena=body.arena_id
            )
            self._node.tell(lending.Given(body.number))
            self._end_request(connection, wire.Answer(request.number, wire.Outcome.REFUSED))
            return
        sending = connection.sending = SentPayload(borrowed, body, request)
        if request.form is BlockForm.SLAB:
            connection.stage = LoanStage.TURN  # the deadline of the stage ASKED still applies
            self._take_turn(connection, request, max(sending.length, 1))
            return
        self._set(connection, LoanStage.SENDING, self._limits.payload_s(request.length))
        self._checking.append(connection)

    def _send(self, connection: Connection) -> None:
        """Send more of a payload, without waiting."""
        sending = connection.sending
        if sending is None or connection.stage is not LoanStage.SENDING:
            return
        try:
            if not sending.is_checked:
                sending.check()
            is_on = sending.is_checked
            while is_on and not sending.is_sent:
                is_on = sending.send(connection.sock)
        except BlockingIOError:
            self._epoll.modify(connection.fd, select.EPOLLIN | select.EPOLLOUT)
            return
        except OSError:
            self._close(connection)
            return
        if sending.is_sent:
            connection.stage = LoanStage.RECEIPT  # the deadline of the stage SENDING still applies
        else:
            self._checking.append(connection)

    def _received(self, connection: Connection, frame: bytes) -> None:
        request = connection.request
        assert request is not None
        wire.check_receipt(frame, request.number)
        assert connection.sending is not None
        self._node.tell(lending.Given(connection.number, connection.sending.length))
        self._end_request(connection)

    def _end_request(self, connection: Connection, answer: wire.Answer | None = None) -> None:
        """End a request with this answer. The neighbour may then send another request."""
        connection.request, connection.number = None, 0
        self._drop_payload(connection)
        self._set(connection, LoanStage.READY, self._limits.idle_s)
        if answer is not None:
            self._say(connection, wire.pack(answer))
        self._leave_flight(connection)

    def _drop_payload(self, connection: Connection) -> None:
        sending, connection.sending = connection.sending, None
        if sending is not None:
            self._arenas.done(sending.borrowed)

    def _leave_flight(self, connection: Connection) -> None:
        length, connection.bytes_in_flight = connection.bytes_in_flight, 0
        if length:
            self._in_flight.ended(connection.node_id, length)
            self._next_turns()

    def _say(self, connection: Connection, frame: bytes) -> None:
        """Send a small frame, for which an idle socket has room."""
        if not connection.say(frame):
            self._close(connection)

    def _set(self, connection: Connection, stage: LoanStage, due_in_s: float) -> None:
        connection.stage = stage
        connection.deadline = time.monotonic() + due_in_s
        self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Note that the deadline of a connection has changed."""
        if connection.deadline < connection.looked_at:
            connection.looked_at = connection.deadline
            heapq.heappush(self._due, (connection.deadline, next(self._order), connection))

    def _overdue(self, now: float) -> Iterator[Connection]:
        """Yield the connections whose deadline has passed."""
        while self._due and self._due[0][0] <= now:
            looked_at, _, connection = heapq.heappop(self._due)
            if connection.stage is LoanStage.CLOSED or connection.looked_at != looked_at:
                continue
            connection.looked_at = math.inf
            if connection.deadline <= now:
                yield connection
            else:
                self._watch(connection)

    def _late(self, connection: Connection) -> None:
        stage = connection.stage
        if stage is LoanStage.WAITING:
            assert connection.request is not None
            refusal = wire.Answer(connection.request.number, wire.Outcome.REFUSED)
            self._end_request(connection, refusal)
        elif connection.why_late:
            self._refuse(connection, connection.why_late)
        else:
            if stage in {LoanStage.SENDING, LoanStage.RECEIPT}:
                why = "it does not read what it asked for"
                entrance.trace.failed("neighbour cut off", **connection.about, why=why)
            self._close(connection)

    def _lost(self, connection: Connection) -> None:
        """Handle a connection that the other side has closed."""
        if connection.stage is LoanStage.PROOF or (
            connection.stage is LoanStage.OPENING and connection.received
        ):
            self._refuse(connection, "it closed the connection during the handshake")
        else:
            self._close(connection)

    def _refuse(self, connection: Connection, why: str, *, is_late: bool = False) -> None:
        entrance.refused(connection, why, is_late=is_late)
        if why == ONE_SIDE:
            connection.say(TLS_ALERT)
        self._close(connection)

    def _close(self, connection: Connection) -> None:
        """Close a connection and end its request: its region is no longer read after this."""
        stage = connection.stage
        if stage is LoanStage.CLOSED:
            return
        del self._connections[connection.fd]
        self._admission.left(connection)
        connection.sock.close()
        connection.stage = LoanStage.CLOSED
        self._drop_payload(connection)
        self._release_body(connection)
        if stage is LoanStage.ASKED:
            self._asked[connection.number] = None
        elif stage in {LoanStage.TURN, LoanStage.SENDING, LoanStage.RECEIPT}:
            self._node.tell(lending.Given(connection.number))
        self._leave_flight(connection)


def run(sock: socket.socket) -> None:
    """Lend until the node goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    collect_rarely()
    raise_descriptor_limit()
    try:
        first, descriptors = local.receive(sock, lending.ToLender)
        start = first.body
        assert isinstance(start, lending.StartLending)
        configure(start.log_level, start.log_format)
        arena_fd, listener_fd = descriptors
        with socket.socket(fileno=listener_fd) as listener:
            Lender(sock, arena_fd, listener, start, Limits()).serve()
    except PeerLost:
        tell_suppressed(is_last=True)


def main(descriptor: int, _memory_bytes: int) -> None:
    """Run the lender process, whose connection with the node is an inherited descriptor."""
    with socket.socket(fileno=descriptor) as sock:
        run(sock)
    os._exit(0)
