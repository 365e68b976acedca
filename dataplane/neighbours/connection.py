"""One connection of a lender, as a value: its stage and what belongs to it."""

from __future__ import annotations

import enum
import math
import socket
import ssl

from msgspec import Struct, field

from dataplane.neighbours import handshake, wire
from dataplane.neighbours.handshake import Opening
from dataplane.neighbours.payload import SentPayload
from dataplane.rpc.lending import Asked, Request


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
            handshake.check_plain(self.received)
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
