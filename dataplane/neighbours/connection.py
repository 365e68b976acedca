"""Connections of a lender: the stage and payload of each, and the limits for all."""

from __future__ import annotations

import enum
import errno
import math
import os
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

import google_crc32c
import numpy as np
from msgspec import Struct, field

from dataplane.arena.memfd import BorrowedArena
from dataplane.model.records import Region
from dataplane.neighbours import wire
from dataplane.neighbours.wire import HANDSHAKE_S, Answer, Opening, Outcome, pack
from dataplane.rpc import tasks
from dataplane.rpc.lending import NO_DATASET, Asked, Give, Request
from dataplane.security.admission import AdmissionRules

# -- payloads --------------------------------------------------------------------------------------
#
# One payload on its way to a neighbour, from the pages of the arena.
#
# Without TLS, the bytes are read once for their checksum and once by the kernel; they are never
# copied on this side. With TLS, this process reads the bytes to encrypt them and copies the result
# to the kernel. It cannot use sendfile, which sends the bytes of a file unencrypted.


_CHECK_BYTES = 4 << 20
"""How many bytes to add to the checksum at a time, which takes half a millisecond."""
_SEND_BYTES = 4 << 20
_ENCRYPT_BYTES = 256 << 10
"""How many bytes to encrypt at a time, which takes a quarter of a millisecond."""


def fits(request: Request, give: Give, arena_bytes: int) -> bool:
    """Return whether `give` is a valid answer to this request, from an arena of this size."""
    regions = (give.region, *give.more)
    if any(region.offset + region.length > arena_bytes for region in regions):
        return False
    if give.arena_id != tasks.BLOCK_ARENA and request.dataset != NO_DATASET:
        return False
    # A payload without some of the blocks is shorter than requested: the asker knows the length of
    # each block, and `ends` says which blocks are sent.
    length = sum(region.length for region in regions)
    return wire.fits(request, length, give.note, give.ends)


class SentPayload:
    """A payload being sent without waiting: first its checksum is computed; then the answer, with
    the checksum and the note, and the payload are sent.
    """

    def __init__(self, borrowed: BorrowedArena, give: Give, request: Request) -> None:
        self.borrowed = borrowed
        self._arena = borrowed.arena
        regions = (give.region, *give.more)
        self._bytes = sum(region.length for region in regions)
        self._number, self._give = request.number, give
        self._checked = _Progress(regions)
        self._crc32c: int = google_crc32c.value(give.note)
        self._head: memoryview | None = None
        self._sent = _Progress(regions)

    @property
    def length(self) -> int:
        """The length of the payload, and of a slab's note."""
        return self._bytes + len(self._give.note)

    @property
    def is_checked(self) -> bool:
        """Whether the checksum is complete."""
        return self._head is not None

    @property
    def is_sent(self) -> bool:
        """Whether the socket has taken the whole payload."""
        return self._head is not None and not self._head and self._sent.is_over

    def check(self) -> None:
        """Add more bytes to the checksum, and prepare the answer when it is complete."""
        left = _CHECK_BYTES
        while left and not self._checked.is_over:
            at, count = self._checked.next(left)
            self._arena.populate_once(at, count)
            piece = np.frombuffer(self._arena.view(at, count), np.uint8)
            self._crc32c = google_crc32c.extend(self._crc32c, piece)
            self._checked.advance(count)
            left -= count
        if self._checked.is_over:
            note, ends = self._give.note, self._give.ends
            self._head = memoryview(
                pack(Answer(self._number, Outcome.GIVEN, self._bytes, self._crc32c, note, ends))
            )

    def send(self, sock: socket.socket) -> bool:
        """Send more bytes, once the checksum is complete. Return False if other connections should
        have a turn.

        Raises:  BlockingIOError: the socket has no room.  OSError: the connection broke.
        """
        if isinstance(sock, ssl.SSLSocket):
            self._send_encrypted(sock)
            return False
        if self._head:
            sent = sock.send(self._head, 0 if self._sent.is_over else socket.MSG_MORE)
            self._head = self._head[sent:]
            if self._head:
                raise BlockingIOError
        if self._sent.is_over:
            return True
        at, count = self._sent.next(_SEND_BYTES)
        count = os.sendfile(sock.fileno(), self._arena.fd, at, count)
        if not count:
            raise OSError(errno.EIO, "the arena is shorter than the region")
        self._sent.advance(count)
        return True

    def _send_encrypted(self, sock: ssl.SSLSocket) -> None:
        """Encrypt and send more bytes.   Raises:  as `send`."""
        try:
            if self._head:
                self._head = self._head[sock.send(self._head) :]
            elif not self._sent.is_over:
                # If there is no room, the next call passes the same bytes again, as TLS requires:
                # part of them may already be encrypted.
                self._sent.advance(sock.send(self._arena.view(*self._sent.next(_ENCRYPT_BYTES))))
        except ssl.SSLWantWriteError:
            raise BlockingIOError from None


class _Progress:
    """The progress through regions, which are read one after the other."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._left = [region for region in reversed(regions) if region.length]

    @property
    def is_over(self) -> bool:
        return not self._left

    def next(self, most: int) -> tuple[int, int]:
        """Return the offset of the next bytes, and their number, at most `most`."""
        region = self._left[-1]
        return region.offset, min(region.length, most)

    def advance(self, count: int) -> None:
        """Note that this many bytes are done."""
        region = self._left.pop()
        if count < region.length:
            self._left.append(Region(region.offset + count, region.length - count))


class LoanStage(enum.Enum):
    """The next event that is expected on a connection.

    TLS             the asker continues the TLS handshake
    OPENING, PROOF  the asker sends this part of the handshake
    READY           the asker may send a request
    BODY            the asker sends the rest of a large request
    WAITING         the request gets its turn
    ASKED           the node answers
    TURN            the slab that the node has given gets its turn
    SENDING         the lender sends the payload
    RECEIPT         the asker confirms the payload
    CLOSED          nothing
    """

    TLS = "TLS"
    OPENING = "opening"
    PROOF = "proof"
    READY = "ready"
    BODY = "body"
    WAITING = "waiting"
    ASKED = "asked"
    TURN = "turn"
    SENDING = "sending"
    RECEIPT = "receipt"
    CLOSED = "closed"


_LARGE_BYTES_MAX = wire.BODY_BYTES_MAX + wire.SMALL_BYTES_MAX
_FRAME_BYTES_MAX = {
    LoanStage.OPENING: wire.SMALL_BYTES_MAX,
    LoanStage.PROOF: wire.SMALL_BYTES_MAX,
    LoanStage.READY: _LARGE_BYTES_MAX,
    LoanStage.BODY: _LARGE_BYTES_MAX,
    LoanStage.RECEIPT: wire.SMALL_BYTES_MAX,
}
_SHOWN_LENGTH = 80
_RECEIVE_BYTES, _RECEIVE_BODY_BYTES = 4096, 256 << 10


class Connection(Struct, eq=False):
    """A connection with a neighbour, or with a host that has not shown yet that it is one."""

    fd: int
    """The descriptor of the socket, kept after the socket was closed."""
    sock: socket.socket
    host: str
    peer: str
    deadline: float
    stage: LoanStage = LoanStage.OPENING
    looked_at: float = math.inf
    """When the lender checks the deadline, at the latest."""
    received: bytearray = field(default_factory=bytearray)
    frame: bytes = b""
    """The opening as it was received."""
    opening: Opening | None = None
    nonce: bytes = b""
    only_under: tuple[str, ...] = ()
    """The url prefixes that may be lent for the key with which the connection was opened."""
    request: Request | None = None
    number: int = 0
    """The number of the request between lender and node; 0 if the node has no request of this
    connection.
    """
    body_bytes: int = 0
    """The bytes reserved for a large request, while it arrives."""
    sending: SentPayload | None = None
    bytes_in_flight: int = 0
    """The bytes that count as in flight for this request; 0 until its turn."""

    def receive(self) -> bool:
        """Append received bytes to `received`; return False if the connection is gone.

        Raises:  BlockingIOError: nothing has come.
        """
        count = _RECEIVE_BODY_BYTES if self.stage is LoanStage.BODY else _RECEIVE_BYTES
        try:
            received = self.sock.recv(count)
            if isinstance(self.sock, ssl.SSLSocket) and (left := self.sock.pending()):
                # Read the rest of the TLS record now: epoll does not report bytes that the TLS
                # socket has already decrypted.
                received += self.sock.recv(left)
        except ssl.SSLWantReadError:
            raise BlockingIOError from None
        except BlockingIOError:
            raise
        except OSError:
            return False
        self.received += received
        return bool(received)

    def say(self, frame: bytes) -> bool:
        """Send a small frame, for which an idle socket has room. Return False if it could not be
        sent.
        """
        try:
            return self.sock.send(frame) == len(frame)
        except OSError:
            return False

    @property
    def why_late(self) -> str:
        """Return why the connection is refused if its deadline passes now; "" if it is not
        refused.
        """
        if self.stage in {LoanStage.TLS, LoanStage.OPENING, LoanStage.PROOF}:
            return "its handshake took too long"
        if self.stage is LoanStage.BODY or (self.stage is LoanStage.READY and self.received):
            return "a request took too long"
        return ""

    def frame_bytes(self) -> int:
        """Return the length of the arriving frame; 0 while the length is unknown.

        Raises:  WrongFrameError: the bytes are not a frame, or the stage does not expect the frame.
        """
        if self.stage is LoanStage.OPENING:
            wire.check_plain(self.received)
        if self.stage not in _FRAME_BYTES_MAX:
            raise wire.WrongFrameError("it sent more before it had its answer")
        return wire.frame_bytes(self.received, _FRAME_BYTES_MAX[self.stage])

    def next_frame(self) -> bytes:
        """Take the next frame off the received bytes. Return b"" if the frame is incomplete.

        Raises:  WrongFrameError.
        """
        length = self.frame_bytes()
        if not length or len(self.received) < length:
            return b""
        frame = bytes(self.received[:length])
        del self.received[:length]
        return frame

    def asked(self) -> Asked:
        """Return the request for the node."""
        opening, request = self.opening, self.request
        assert opening is not None
        assert request is not None
        return Asked(self.number, opening.job_id, self.node_id, request, self.only_under)

    @property
    def block_count(self) -> int:
        """The number of requested blocks. The blocks are numbered from `number` on."""
        return 1 if self.request is None else self.request.count

    @property
    def about(self) -> dict[str, str]:
        """The neighbour, for the log."""
        about = {"peer": self.peer}
        if self.opening is not None:
            about |= {"node": _short(self.node_id), "job": _short(self.opening.job_id)}
        return about

    @property
    def node_id(self) -> str:
        """The id of the neighbour, as the neighbour gave it."""
        return self.opening.asker_id if self.opening is not None else ""


def _short(name: str) -> str:
    return name if len(name) <= _SHOWN_LENGTH else f"{name[:_SHOWN_LENGTH]} …"


# -- limits ----------------------------------------------------------------------------------------
#
# The limits of a lender for its neighbours, and the order of their turns.
#
# Invariants of `InFlight`:
# 1. The bytes in flight stay within a limit, both in all and for each neighbour; but a single
#    request may exceed it. The bytes of a block count from the beginning of its request. The bytes
#    of a slab count once the node has given the slab, which takes no room of the arena before.
# 2. The requests of one neighbour begin in the order in which they arrived. Neighbours take turns.


T = TypeVar("T")

_SHARE_IN_FLIGHT = 8
_SHARE_OF_NEIGHBOUR = 4


class Limits(Struct, frozen=True):
    """The limits of one lender. Times are in seconds."""

    admission: AdmissionRules = AdmissionRules(
        4096, silent_max=1024, silent_of_source_max=32, peer_max=512
    )
    """Limits on connections. A connection is silent until its proof of the key has arrived."""
    body_bytes: int = 128 << 20
    """Bytes of the bodies of slab requests, which are in memory until the node has read them."""
    body_bytes_of_neighbour: int = 32 << 20
    handshake_s: float = HANDSHAKE_S
    frame_s: float = 2.0
    """The maximum time from the first byte of a request to its last."""
    idle_s: float = 60.0
    turn_s: float = 5.0
    """How long a request waits for its turn before it is refused."""
    answer_s: float = 60.0
    """How long a request waits for the node before its connection is closed."""
    send_s: float = 5.0
    """The time for a payload and its receipt, plus a second per `slowest_bytes` of payload."""
    slowest_bytes: int = 8 << 20

    def payload_s(self, length: int) -> float:
        """Return how long a neighbour may take to receive a payload of this length."""
        return self.send_s + length / self.slowest_bytes


class BodyBytes:
    """The memory that the bodies of requests take, in all and by neighbour."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bytes = 0
        self._bytes_of: dict[str, int] = {}

    def reserve(self, node_id: str, length: int) -> bool:
        """Reserve bytes for a neighbour until `release`. Return False if a limit forbids it."""
        used = self._bytes_of.get(node_id, 0)
        if self._bytes + length > self._limits.body_bytes:
            return False
        if used + length > self._limits.body_bytes_of_neighbour:
            return False
        self._bytes += length
        self._bytes_of[node_id] = used + length
        return True

    def release(self, node_id: str, length: int) -> None:
        """Release bytes that are no longer in memory."""
        self._bytes -= length
        self._bytes_of[node_id] -= length
        if not self._bytes_of[node_id]:
            del self._bytes_of[node_id]


class InFlight(Generic[T]):
    """The waiting requests, and the bytes of those in progress."""

    def __init__(self, arena_bytes: int) -> None:
        self._bytes_max = arena_bytes // _SHARE_IN_FLIGHT
        self._neighbour_bytes_max = self._bytes_max // _SHARE_OF_NEIGHBOUR
        self._bytes = 0
        self._bytes_of: dict[str, int] = {}
        self._waiting: dict[str, deque[tuple[int, T]]] = {}
        self._turns: deque[str] = deque()
        self._in_turn: set[str] = set()

    def ask(self, node_id: str, length: int, request: T) -> None:
        """Add a neighbour's request for this many bytes; `next` returns the request when it may
        begin.
        """
        self._waiting.setdefault(node_id, deque()).append((length, request))
        self._take_turn(node_id)

    def next(self) -> T | None:
        """Return the next request, and count its bytes; None if no request may begin now."""
        while self._turns:
            node_id = self._turns[0]
            waiting = self._waiting[node_id]
            length, request = waiting[0]
            used = self._bytes_of.get(node_id, 0)
            if used and used + length > self._neighbour_bytes_max:
                self._leave_turn()  # the neighbour returns when one of its requests ends
                continue
            if self._bytes and self._bytes + length > self._bytes_max:
                return None
            self._leave_turn()
            waiting.popleft()
            if waiting:
                self._take_turn(node_id)
            else:
                del self._waiting[node_id]
            self._bytes += length
            self._bytes_of[node_id] = used + length
            return request
        return None

    def ended(self, node_id: str, length: int) -> None:
        """Note that a request has ended, which `next` had returned."""
        self._bytes -= length
        self._bytes_of[node_id] -= length
        if not self._bytes_of[node_id]:
            del self._bytes_of[node_id]
        if node_id in self._waiting:
            self._take_turn(node_id)

    def _take_turn(self, node_id: str) -> None:
        if node_id not in self._in_turn:
            self._in_turn.add(node_id)
            self._turns.append(node_id)

    def _leave_turn(self) -> None:
        self._in_turn.remove(self._turns.popleft())
