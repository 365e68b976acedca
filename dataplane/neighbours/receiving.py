"""Sending and receiving on the asking side of a connection. Every call has a deadline, in seconds
of the monotonic clock. The checksum of a payload is computed while the payload arrives.
"""

from __future__ import annotations

import socket
import ssl
import time

import google_crc32c
import numpy as np

from dataplane.neighbours import wire
from dataplane.neighbours.wire import Answer, Receipt

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
