"""One payload on its way to a neighbour, from the pages of the arena.

The bytes are read once for their checksum and once by the kernel; they are never copied on this
side. Inside of TLS, they are read to be encrypted, and the result is copied to the kernel: what it
sends from a file itself (sendfile) is plain text.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl

import google_crc32c
import numpy as np

from dataplane.arena.borrowed import BorrowedArena
from dataplane.model import BlockForm, Region
from dataplane.neighbours.wire import NOTE_BYTES_MAX, Answer, Outcome, Request, pack_answer
from dataplane.rpc import tasks
from dataplane.rpc.lending import Give

_CHECK_BYTES = 4 << 20
"""That are checked at a time: half a millisecond."""
_SEND_BYTES = 4 << 20
_ENCRYPT_BYTES = 256 << 10
"""That are encrypted at a time: a quarter of a millisecond."""


def fits(request: Request, give: Give, arena_bytes: int) -> bool:
    """Whether this may be given for this request, from an arena of this size."""
    if give.region.offset + give.region.length > arena_bytes:
        return False
    if request.form is BlockForm.SLAB:
        return give.region.length <= request.length and len(give.note) <= NOTE_BYTES_MAX
    is_block = give.arena_id == tasks.BLOCK_ARENA and not give.note
    return is_block and give.region.length == request.length


class SentPayload:
    """The checksum, the answer, the note, and then the payload, without waiting."""

    def __init__(
        self, borrowed: BorrowedArena, region: Region, number: int, note: bytes = b""
    ) -> None:
        self.borrowed = borrowed
        self._arena = borrowed.arena
        self._region = region
        self._number = number
        self._note = note
        self._checked = 0
        self._crc32c: int = google_crc32c.value(note)
        self._head: memoryview | None = None
        self._sent = 0

    @property
    def length(self) -> int:
        """Of note and payload."""
        return len(self._note) + self._region.length

    @property
    def is_checked(self) -> bool:
        """Whether the checksum is complete."""
        return self._head is not None

    @property
    def is_sent(self) -> bool:
        """Whether the socket has all of it."""
        return self._head is not None and not self._head and self._sent == self._region.length

    def check(self) -> None:
        """Continue with the checksum."""
        count = min(_CHECK_BYTES, self._region.length - self._checked)
        if count:
            at = self._region.offset + self._checked
            self._arena.populate_once(at, count)
            piece = np.frombuffer(self._arena.view(at, count), np.uint8)
            self._crc32c = google_crc32c.extend(self._crc32c, piece)
            self._checked += count
        length = self._region.length
        if self._checked == length:
            answer = Answer(
                self._number, Outcome.GIVEN, length, self._crc32c, note_bytes=len(self._note)
            )
            self._head = memoryview(pack_answer(answer) + self._note)

    def send(self, sock: socket.socket) -> bool:
        """Continue to send, once it is checked; False if others should have a turn.

        Raises:  BlockingIOError: the socket has no room.  OSError: the connection broke.
        """
        left = self._region.length - self._sent
        if isinstance(sock, ssl.SSLSocket):
            self._send_encrypted(sock, left)
            return False
        if self._head:
            sent = sock.send(self._head, socket.MSG_MORE if left else 0)
            self._head = self._head[sent:]
            if self._head:
                raise BlockingIOError
        if not left:
            return True
        at = self._region.offset + self._sent
        count = os.sendfile(sock.fileno(), self._arena.fd, at, min(left, _SEND_BYTES))
        if not count:
            raise OSError(errno.EIO, "the arena is shorter than the region")
        self._sent += count
        return True

    def _send_encrypted(self, sock: ssl.SSLSocket, left: int) -> None:
        """Raises:  as `send`."""
        try:
            if self._head:
                self._head = self._head[sock.send(self._head) :]
            elif left:
                # The same bytes again if there was no room: part of them may be encrypted already.
                at, count = self._region.offset + self._sent, min(left, _ENCRYPT_BYTES)
                self._sent += sock.send(self._arena.view(at, count))
        except ssl.SSLWantWriteError:
            raise BlockingIOError from None
