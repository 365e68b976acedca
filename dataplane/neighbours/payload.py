"""One payload on its way to a neighbour, from the pages of the arena.

Without TLS, the bytes are read once for their checksum and once by the kernel; they are never
copied on this side. With TLS, this process reads the bytes to encrypt them and copies the result to
the kernel. It cannot use sendfile, which sends the bytes of a file unencrypted.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Sequence

import google_crc32c
import numpy as np

from dataplane.arena.memfd import BorrowedArena
from dataplane.model.records import BlockForm, Region
from dataplane.neighbours.wire import NOTE_BYTES_MAX, Answer, Outcome, pack
from dataplane.rpc import tasks
from dataplane.rpc.lending import NO_DATASET, Give, Request

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
    if request.form is BlockForm.SLAB:
        is_one = not give.more and give.region.length <= request.length
        return is_one and len(give.note) <= NOTE_BYTES_MAX
    if give.arena_id != tasks.BLOCK_ARENA and request.dataset != NO_DATASET:
        return False
    length = sum(region.length for region in regions)
    if request.count > 1:
        # A payload without some of the blocks is shorter than requested: the asker knows the
        # length of each block, and `ends` says which blocks are sent.
        return length <= request.length and len(give.ends) == request.count
    return not (give.note or give.more or give.ends) and length == request.length


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
