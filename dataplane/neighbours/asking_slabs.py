"""Request a slab from a maker over a connection."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from msgspec import Struct

from dataplane.errors import ConfigError
from dataplane.neighbours import wire
from dataplane.neighbours.receiving import payload_deadline, receive_frame, receive_payload, send
from dataplane.neighbours.wire import Answer, Outcome

ANSWER_S = 30.0
"""The maker may have to read blocks, and has other slabs to make."""

Place = Callable[[int], memoryview]
"""Called with the length of the slab, as soon as that is known: the memory for it. May raise."""


class SlabAsk(Struct, frozen=True):
    """Encoded MakeSlabs, without and with what it takes to open the job (b"" if there is none), and
    the room for the slab in bytes.
    """

    request: bytes
    opening: bytes
    room: int


class SlabExchange:
    """One requested slab; if a connection fails, it is requested again over another one."""

    def __init__(self, ask: SlabAsk, place: Place) -> None:
        self._ask = ask
        self._place = place
        self._deadline = time.monotonic() + ANSWER_S
        self.note = b""

    def ask(self, sock: socket.socket, next_number: Callable[[], int]) -> Answer:
        """Return the answer; the note and the slab follow if they are sent. A maker that does not
        know the job gets what it needs to open it.

        Raises:  OSError, WrongFrameError.  ConfigError: it is too long to be sent.
        """
        for body in filter(None, (self._ask.request, self._ask.opening)):
            if len(body) > wire.BODY_BYTES_MAX:
                raise ConfigError(
                    f"a request of {len(body)} bytes is over the limit of {wire.BODY_BYTES_MAX}: "
                    "name fewer urls (a prefix, a glob or a manifest) or fewer columns"
                )
            request = wire.slab_request(next_number(), self._ask.room, body)
            send(sock, wire.pack_request(request) + body, self._deadline)
            frame = receive_frame(sock, wire.ANSWER_BYTES, self._deadline)
            answer = wire.unpack_answer(frame, request)
            if answer.outcome is not Outcome.UNKNOWN:
                return answer
        return Answer(answer.number, Outcome.REFUSED)

    def take(self, sock: socket.socket, answer: Answer) -> None:
        """Receive what is given.   Raises:  OSError, WrongFrameError, and what `place` raises."""
        note, into = memoryview(bytearray(answer.note_bytes)), self._place(answer.length)
        receive_payload(sock, answer, payload_deadline(answer), note, into)
        self.note = bytes(note)
