"""The asking side of data connections: reads bytes of a neighbour's block, or a slab that the
neighbour makes, straight into memory.

Invariants:
1. A connection is used again only after a whole answer was read from it, and only for the same
   node, job and generation. A connection that was idle for `_IDLE_S` is closed when a new one is
   opened.
2. Every wait has a deadline: connecting and the handshake together, the answer, and the payload,
   which must arrive at a minimum rate.
3. Either the memory is filled with bytes that have the checksum of the answer, or the call fails.
   No more bytes are received than the memory has room for, whatever the answer says.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import google_crc32c
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from dataplane.model.errors import ConfigError, NeighbourGone
from dataplane.model.records import BlockForm
from dataplane.neighbours import wire
from dataplane.neighbours.line_tls import LINE_BYTES_MAX, LineTls, why_refused
from dataplane.neighbours.wire import HANDSHAKE_S, Answer, Outcome, Receipt
from dataplane.rpc.address import TcpAddress, parse
from dataplane.rpc.bounds import check_data_address
from dataplane.rpc.fetches import Neighbour, Peer, ReadSlab
from dataplane.rpc.lending import NO_DATASET, Request

# -- receiving -------------------------------------------------------------------------------------
#
# Sending and receiving on the asking side of a connection. Every call has a deadline, in seconds of
# the monotonic clock. The checksum of a payload is computed while the payload arrives.


_PAYLOAD_S = 5.0
_SLOWEST_BYTES = 8 << 20
"""The minimum rate of a payload after the first _PAYLOAD_S, in bytes a second."""
_CLOSED = "it closed the connection"
_SLICE_BYTES = 512 << 10
"""How many bytes to receive at a time: they should still be in the processor's cache when they are
added to the checksum.
"""


class Arriving:
    """The payload of this answer, received in parts."""

    def __init__(self, sock: socket.socket, answer: Answer) -> None:
        self._sock, self._answer, self._left = sock, answer, answer.length
        self._deadline = time.monotonic() + _PAYLOAD_S + answer.length / _SLOWEST_BYTES
        self._crc32c, self._lowest = google_crc32c.value(answer.note), 1
        self._is_plain = not isinstance(sock, ssl.SSLSocket)

    def fill(self, into: memoryview) -> None:
        """Receive the next part, and add it to the checksum.   Raises:  OSError."""
        body, at = np.frombuffer(into, np.uint8), 0
        while at < len(into):
            piece = into[at : at + _SLICE_BYTES]
            if self._is_plain:
                # Wait for a whole slice, so that this thread wakes up less often. TLS cannot wait
                # for a slice, since its records have 16 KiB.
                self._wait_for(min(_SLICE_BYTES, self._left))
                count = _received(self._sock, piece, self._deadline)
            else:
                count = _fill(self._sock, piece, self._deadline)
            self._crc32c = google_crc32c.extend(self._crc32c, body[at : at + count])
            at += count
            self._left -= count

    def end(self) -> None:
        """Compare the checksum, and send the receipt.   Raises:  OSError, WrongFrameError."""
        self._wait_for(1)
        if self._crc32c != self._answer.crc32c:
            raise wire.WrongFrameError("its bytes do not have the checksum that it told")
        send(self._sock, wire.pack(Receipt(self._answer.number)), self._deadline)

    def _wait_for(self, lowest: int) -> None:
        if self._is_plain and self._lowest != lowest:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, lowest)
            self._lowest = lowest


def receive(sock: socket.socket, length: int, deadline: float) -> bytes:
    """Receive this many bytes.   Raises:  OSError."""
    received = bytearray(length)
    _fill(sock, memoryview(received), deadline)
    return bytes(received)


def receive_frame(sock: socket.socket, most: int, deadline: float, first: bytes = b"") -> bytes:
    """Receive a frame with a message of at most `most` bytes, after its `first` bytes.

    Raises:  OSError, WrongFrameError.
    """
    head = first + receive(sock, wire.HEAD_BYTES - len(first), deadline)
    return head + receive(sock, wire.frame_bytes(head, most) - len(head), deadline)


def send(sock: socket.socket, frame: bytes, deadline: float) -> None:
    """Send the whole frame.   Raises:  OSError."""
    left = memoryview(frame)
    while left:  # not `sendall`: with TLS, its timeout would apply to each record
        sock.settimeout(left_s(deadline))
        try:
            left = left[sock.send(left) :]
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise ConnectionResetError(_CLOSED) from None


def _fill(sock: socket.socket, into: memoryview, deadline: float) -> int:
    """Fill the memory, and return its length.   Raises:  OSError."""
    at = 0
    while at < len(into):
        at += _received(sock, into[at:], deadline)
    return at


def _received(sock: socket.socket, into: memoryview, deadline: float) -> int:
    """Receive some bytes, and return their number.

    Raises:  OSError, including TimeoutError and ConnectionError.
    """
    sock.settimeout(left_s(deadline))
    count = sock.recv_into(into)
    if not count:
        raise ConnectionResetError(_CLOSED)
    return count


def left_s(deadline: float) -> float:
    """Return the time until the deadline.   Raises:  TimeoutError: it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


_IDLE_S = 30.0
_IDLE_MAX = 16
"""The maximum number of idle connections with one neighbour."""
_ANSWER_S = 10.0
"""How long to wait for an answer: the neighbour may have to read the block first."""
_SLAB_ANSWER_S = 30.0
"""How long to wait for a slab: the maker may have to read blocks, and has other slabs to make."""
OPENINGS_MAX = 4
"""How many connections with one address a process opens at the same time. A lender closes
connections of a host with more than 32 connections that have not sent a proof yet.
"""

Hold = Callable[[socket.socket], None]
"""Called with the socket before a request is sent over it. May raise."""
Claim = Callable[[], None]
"""Called when all bytes have arrived. May raise: then the call fails and the bytes are not used."""
_Parts = Callable[[Answer], Sequence[memoryview]]
"""The memory for a payload, part by part. May raise."""
Place = Callable[[int], memoryview]
"""Called with the length of a slab as soon as it is known; returns the slab's memory. May raise."""


class Openings:
    """The connections that one process is opening. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._of: Counter[str] = Counter()

    @contextlib.contextmanager
    def turn(self, address: str) -> Iterator[None]:
        """Wait until a connection with this address may be opened. Open the connection within the
        block.

        Raises:  TimeoutError: too many other connections are still being opened.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._of[address] < OPENINGS_MAX, HANDSHAKE_S):
                raise TimeoutError
            self._of[address] += 1
        try:
            yield
        finally:
            with self._changed:
                self._of[address] -= 1
                if not self._of[address]:
                    del self._of[address]
                self._changed.notify_all()


class _Line(Struct, eq=False):
    """A connection with the address `place`."""

    sock: socket.socket
    place: tuple[str, int]
    idle_since: float = 0.0
    number: int = 0
    received_bytes: int = 0
    is_new: bool = True
    is_whole: bool = False
    """Whether the last answer was read completely, so that the connection can be used again."""
    is_stale: bool = False

    def ask(self, request: Request, deadline: float) -> Answer | None:
        """Return the answer to a request. Return None if the neighbour has closed the connection
        while it was idle, which may happen at any moment.

        Raises:  OSError, WrongFrameError.  ConfigError: the request is too long to be sent.
        """
        if len(request.slab) > wire.BODY_BYTES_MAX:
            raise ConfigError(
                f"a request of {len(request.slab)} bytes is over the limit of "
                f"{wire.BODY_BYTES_MAX}: name fewer urls (a prefix, a glob or a manifest) "
                "or fewer columns"
            )
        self.number += 1
        numbered = replace(request, number=self.number)
        most = wire.SMALL_BYTES_MAX + (wire.NOTE_BYTES_MAX if request.slab else 0)
        try:
            send(self.sock, wire.pack(numbered), deadline)
            return wire.unpack_answer(receive_frame(self.sock, most, deadline), numbered)
        except ConnectionError:
            if self.is_new:
                raise
            self.is_stale = True
            return None


class Lines:
    """Connections with neighbours, which are used again. They use TLS if `tls` is given.
    Thread-safe.
    """

    def __init__(self, tls: LineTls | None = None) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._idle: dict[Peer, list[_Line]] = {}
        self._busy: dict[str, set[_Line]] = {}
        self._openings = Openings()
        weakref.finalize(self, _close_all, self._idle).atexit = False

    def read(
        self,
        neighbour: Neighbour,
        into: Sequence[memoryview],
        hold: Hold = lambda _: None,
        claim: Claim = lambda: None,
    ) -> Answer:
        """Request bytes, and fill `into` if they are sent. One part: bytes of the block of
        `neighbour`. Several parts: consecutive whole blocks of the lengths of the parts, starting
        with the block of `neighbour`; `ends` of the answer says which blocks were sent. `claim` is
        called only if all bytes have arrived.

        Raises:  NeighbourGone, and what `hold` and `claim` raise.
        """
        length, count = sum(map(len, into)), len(into)

        def parts(answer: Answer) -> Sequence[memoryview]:
            ends = zip(into, answer.ends, strict=True)
            sent = [part for part, end in ends if end == wire.GIVEN_WHOLE]
            if sum(map(len, sent)) != answer.length:
                raise wire.WrongFrameError(f"{answer.length} bytes for {len(sent)} of the blocks")
            return sent

        of_block = neighbour.dataset, neighbour.block, neighbour.offset
        request = Request(0, *of_block, length, neighbour.form, count)
        return self._use(neighbour.peer, request, _ANSWER_S, parts, hold, claim)

    def read_slab(self, order: ReadSlab, place: Place, hold: Hold) -> Answer:
        """Request a slab, and read it into the memory of `place` if it is sent. The slab's note is
        in the answer.

        Raises:  NeighbourGone, and what `place` and `hold` raise.
        """

        def parts(answer: Answer) -> Sequence[memoryview]:
            return [place(answer.length)]

        length, body = order.into.length, order.request
        request = Request(0, NO_DATASET, 0, 0, length, BlockForm.SLAB, slab=body)
        return self._use(order.maker, request, _SLAB_ANSWER_S, parts, hold, lambda: None)

    def cut_off(self, address: str) -> None:
        """Close all connections with this address; the calls that use them fail."""
        with self._lock:
            busy = [*self._busy.get(address, ())]
            idle = [peer for peer in self._idle if peer.address == address]
            for peer in idle:
                for line in self._idle.pop(peer):
                    line.sock.close()
            for line in busy:
                _shut(line.sock)

    def close(self) -> None:
        """Close idle connections. May be called twice."""
        with self._lock:
            _close_all(self._idle)

    def _use(
        self,
        peer: Peer,
        request: Request,
        answer_s: float,
        parts: _Parts,
        hold: Hold,
        claim: Claim,
    ) -> Answer:
        """Send a request, and receive the payload of the answer.

        Raises:  NeighbourGone, and what `parts`, `hold` and `claim` raise.
        """
        deadline = time.monotonic() + answer_s
        try:
            while True:
                with self._held(peer, hold) as line:
                    answer = line.ask(request, deadline)
                    if answer is None:
                        continue
                    if answer.outcome is Outcome.GIVEN:
                        arriving = Arriving(line.sock, answer)
                        for part in parts(answer):
                            arriving.fill(part)
                        arriving.end()
                        if answer.length == request.length:
                            claim()
                    line.received_bytes += answer.length
                    line.is_whole = line.received_bytes < LINE_BYTES_MAX
                    return answer
        except TimeoutError as cause:
            raise _gone(peer, "it did not answer in time") from cause
        except ssl.SSLError as cause:
            raise _gone(peer, why_refused(cause)) from cause
        except OSError as cause:
            raise _gone(peer, cause.strerror or str(cause)) from cause
        except (wire.WrongFrameError, ConfigError) as cause:
            raise _gone(peer, str(cause)) from cause

    @contextlib.contextmanager
    def _held(self, peer: Peer, hold: Hold) -> Iterator[_Line]:
        """Open a connection, or take an idle one. After the block the connection is used again if
        it `is_whole`.

        Raises:  OSError, WrongFrameError, ConfigError, and what `hold` raises.
        """
        line, is_new = self._line(peer)
        line.is_new, line.is_whole = is_new, False
        try:
            if is_new:
                with self._openings.turn(peer.address):
                    hold(line.sock)
                    _open(line, peer, self._tls)
            else:
                hold(line.sock)
            yield line
        finally:
            self._give_back(peer, line, is_whole=line.is_whole)
            if line.is_stale:
                self._drop_idle(peer)

    def _line(self, peer: Peer) -> tuple[_Line, bool]:
        """Return an idle connection, or a new one that is not connected."""
        with self._lock:
            waiting = self._idle.get(peer)
            if not waiting or time.monotonic() - waiting[-1].idle_since >= _IDLE_S:
                self._drop_old()
            else:
                line = waiting.pop()
                self._busy.setdefault(peer.address, set()).add(line)
                return line, False
        at = _address(peer)
        sock = socket.socket(at.family) if self._tls is None else self._tls.of_asker(at.family)
        line = _Line(sock, (at.host, at.port))
        with self._lock:
            self._busy.setdefault(peer.address, set()).add(line)
        return line, True

    def _drop_old(self) -> None:
        """Close connections that were idle for `_IDLE_S`, including those of former generations."""
        oldest = time.monotonic() - _IDLE_S
        for peer, waiting in [*self._idle.items()]:
            kept = [line for line in waiting if line.idle_since > oldest]
            for line in waiting[: len(waiting) - len(kept)]:  # `waiting` is sorted by last use
                line.sock.close()
            if kept:
                self._idle[peer] = kept
            else:
                del self._idle[peer]

    def _drop_idle(self, peer: Peer) -> None:
        """Close the idle connections to a neighbour, after one of them was found dead."""
        with self._lock:
            for line in self._idle.pop(peer, ()):
                line.sock.close()

    def _give_back(self, peer: Peer, line: _Line, *, is_whole: bool) -> None:
        with self._lock:
            busy = self._busy[peer.address]
            busy.discard(line)
            if not busy:
                del self._busy[peer.address]
            if is_whole:
                waiting = self._idle.setdefault(peer, [])
                line.idle_since = time.monotonic()
                waiting.append(line)
                if len(waiting) <= _IDLE_MAX:
                    return
                line = waiting.pop(0)
            line.sock.close()


def _address(peer: Peer) -> TcpAddress:
    """Return the address at which a neighbour listens: an IP address, since the coordinator passes
    on no host names.

    Raises:  ConfigError: the address is not the IP address and port of a node.
    """
    check_data_address(peer.address)
    address = parse(peer.address)
    assert isinstance(address, TcpAddress)
    return address


def _open(line: _Line, peer: Peer, tls: LineTls | None) -> None:
    """Connect, and make the handshake, in which both sides prove that they have the key.

    Raises:  OSError, WrongFrameError.
    """
    sock, deadline = line.sock, time.monotonic() + wire.HANDSHAKE_S
    sock.settimeout(wire.HANDSHAKE_S)
    sock.connect(line.place)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is not None:
        assert isinstance(sock, ssl.SSLSocket)
        sock.settimeout(left_s(deadline))
        tls.shake_hands(sock)
    opening = wire.pack(
        wire.Opening(
            peer.job_id,
            peer.generation,
            peer.own_id,
            peer.node_id,
            secrets.token_bytes(wire.NONCE_BYTES),
        )
    )
    send(sock, opening, deadline)
    first = receive(sock, len(wire.TLS_ALERT), deadline)
    wire.check_plain(first)
    challenge = receive_frame(sock, wire.SMALL_BYTES_MAX, deadline, first)
    send(sock, wire.answer_challenge(peer.key, opening, challenge), deadline)


def _shut(sock: socket.socket) -> None:
    try:
        # Call the method of the plain socket: the method of a TLS socket must not be called from
        # another thread.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        return  # the socket is already closed


def _gone(peer: Peer, why: str) -> NeighbourGone:
    return NeighbourGone(
        f"the node {peer.node_id} at {peer.address} sent nothing: {why}", peer=peer.node_id
    )


def _close_all(idle: dict[Peer, list[_Line]]) -> None:
    for waiting in idle.values():
        for line in waiting:
            line.sock.close()
    idle.clear()
