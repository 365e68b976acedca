"""The frames of a data connection. Pure: bytes in, values out.

A frame is a head (`DPn5` and the length of the message) and one message of the codec. After the
handshake, the asker sends one request at a time:

    asker   Request                  the requested block or slab (rpc/lending.py)
    lender  Answer                   GIVEN: `length` bytes of payload follow, outside any frame
                                     REFUSED: nothing follows
    asker   Receipt                  after GIVEN: the whole payload has arrived

The receipt ends the lender's claim on the memory that it sends from. `sendfile` does not copy: the
kernel refers to the pages of the arena until the bytes have left, and on one host (loopback, veth)
the receiving socket refers to the very same pages until its process has read them, long after TCP
has acknowledged them and SIOCOUTQ is 0. Only the receiver knows when the pages may change.

Any other bytes end the connection.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from typing import TypeVar

from dataplane.model.errors import ConfigError
from dataplane.model.records import BlockForm, Unsigned
from dataplane.rpc.codec import Message, decode, encode
from dataplane.rpc.lending import NO_DATASET, Request

T = TypeVar("T", bound=Message)

LENGTH_MAX = 1 << 40
"""The largest payload that can be requested, so that sums of lengths stay within 64 bits."""
BODY_BYTES_MAX = 1 << 20
NOTE_BYTES_MAX = 4 << 20
"""The most bytes of a note. A note has 5 to 15 bytes for the place of each column, so this is
enough for 280,000 columns.
"""
SMALL_BYTES_MAX = 4 << 10
"""The most bytes of a frame, without the body of a request and the note of an answer."""

RUN_BLOCKS_MAX = 128
"""The most blocks in one request."""
RUN_BYTES_MAX = 2 << 20
"""The most bytes in one request for several blocks, which are all sent together."""
GIVEN_WHOLE, NOT_GIVEN = 0, (1 << 64) - 1
"""Values of `ends` for a block that was given, and for a block that was not. Any other value is the
length of the decoded block: the lender has only the decoded form.
"""

_HEAD = struct.Struct("<4sI")
MAGIC = b"DPn5"
HEAD_BYTES = _HEAD.size


class WrongFrameError(Exception):
    """The received bytes are not the expected frame; the message says why."""


class Outcome(enum.IntEnum):
    """The outcome of a request."""

    GIVEN = 1
    REFUSED = 2


class Answer(Message, frozen=True):
    """The lender's answer. GIVEN: `length` bytes of payload follow. `crc32c` is the checksum of the
    note, which only slabs have, and of the payload. `ends` has a value for each requested block.
    """

    number: Unsigned
    outcome: Outcome
    length: Unsigned = 0
    crc32c: Unsigned = 0
    note: bytes = b""
    ends: tuple[Unsigned, ...] = ()


class Receipt(Message, frozen=True):
    """The whole payload has arrived."""

    number: Unsigned


def pack(message: Message) -> bytes:
    """Return the frame of a message."""
    body = encode(message)
    return _HEAD.pack(MAGIC, len(body)) + body


def frame_bytes(received: bytes | bytearray, most: int) -> int:
    """Return the length of the frame that begins with these bytes; 0 while its head is incomplete.

    Raises:  WrongFrameError: the bytes are not a frame, or its message has more than `most` bytes.
    """
    if len(received) < HEAD_BYTES:
        return 0
    magic, length = _HEAD.unpack_from(received)
    if magic != MAGIC:
        raise WrongFrameError(f"{magic!r} where a frame begins, not {MAGIC!r}")
    if length > most:
        raise WrongFrameError(f"a frame of {length} bytes, not {most} at most")
    return HEAD_BYTES + int(length)


def unpack(cls: type[T], frame: bytes) -> T:
    """Return the message of a complete frame.

    Raises:  WrongFrameError: the frame has another message.
    """
    try:
        return decode(cls, frame[HEAD_BYTES:])
    except ConfigError as error:
        raise WrongFrameError(str(error)) from None


def unpack_request(frame: bytes) -> Request:
    """Return the request of a frame, after checking it.   Raises:  WrongFrameError."""
    request = unpack(Request, frame)
    length, count = request.length, request.count
    if not 0 < length <= LENGTH_MAX or request.offset > LENGTH_MAX or len(request.dataset) != 16:
        raise WrongFrameError(f"a request for {length} bytes at {request.offset}")
    if request.form is BlockForm.SLAB:
        is_wrong = (request.dataset, request.block, request.offset, count) != (NO_DATASET, 0, 0, 1)
        if is_wrong or not 0 < len(request.slab) <= BODY_BYTES_MAX:
            raise WrongFrameError(f"a request for a slab, with {len(request.slab)} bytes about it")
        return request
    is_run = count > 1 and not request.offset and request.form is BlockForm.RAW
    if is_run and count <= RUN_BLOCKS_MAX and length <= RUN_BYTES_MAX and not request.slab:
        return request
    if count != 1 or request.slab:
        raise WrongFrameError(f"a request for {length} bytes of {count} blocks")
    return request


def unpack_answer(frame: bytes, request: Request) -> Answer:
    """Return the answer to this request.   Raises:  WrongFrameError."""
    answer = unpack(Answer, frame)
    if answer.number != request.number:
        raise WrongFrameError(f"an answer to request {answer.number}, not {request.number}")
    if not _is_answer(request, answer):
        name, note = answer.outcome.name, len(answer.note)
        raise WrongFrameError(f"an answer {name} of {answer.length} and {note} bytes")
    return answer


def _is_answer(request: Request, answer: Answer) -> bool:
    length, note, ends = answer.length, answer.note, answer.ends
    if answer.outcome is Outcome.REFUSED:
        return not (length or note or ends)
    return fits(request, length, note, ends)


def fits(request: Request, length: int, note: bytes, ends: tuple[int, ...]) -> bool:
    """Whether a payload of this length may be the answer: that of a slab has a note and no ends,
    that of blocks has ends and no note, and the whole length if all are given.
    """
    if length > request.length:
        return False
    if request.form is BlockForm.SLAB:
        return not ends and len(note) <= NOTE_BYTES_MAX
    is_whole = length == request.length
    return not note and len(ends) == request.count and (any(ends) or is_whole)


def check_receipt(frame: bytes, number: int) -> None:
    """Check a receipt.   Raises:  WrongFrameError: it is not the receipt of this request."""
    receipt = unpack(Receipt, frame)
    if receipt.number != number:
        raise WrongFrameError(f"a receipt of request {receipt.number}, not {number}")


# -- handshake -------------------------------------------------------------------------------------
#
# The handshake of a data connection: both sides prove that they have the key of the job's
# generation, without sending the key. Pure.
#
# asker   Opening    the ids of asker and lender, the job and its generation, and a nonce
# lender  Challenge  a nonce, and HMAC-SHA256(key, "lender", all of the opening, nonce)
# asker   Proof      HMAC-SHA256(key, "asker", all of the opening, nonce)
#
# Each proof covers both nonces, so a recorded proof is worthless, and the role, so a proof cannot
# be sent back to the side that made it. Each generation has a new key.
#
# Later messages are not signed. If somebody could change packets on the way, use TLS (line_tls.py).


NONCE_BYTES = 32
KEY_BYTES = 32
HANDSHAKE_S = 2.0
"""The maximum duration of a handshake, from its first byte to its last."""
ONE_SIDE = "peer_tls is set on one side only"
TLS_HELLO = 0x16
"""The first byte that the asker sends on a connection with TLS."""
TLS_ALERT = bytes.fromhex("1503030002020a")
"""The plain-text TLS alert "unexpected message". A side that expects TLS and gets other bytes, or
the other way round, sends this alert, so that both sides can report the mismatch.
"""


class Opening(Message, frozen=True):
    """The first message of a connection."""

    job_id: str
    generation: Unsigned
    asker_id: str
    lender_id: str
    nonce: bytes


class Challenge(Message, frozen=True):
    """The lender's answer to an opening."""

    nonce: bytes
    proof: bytes


class Proof(Message, frozen=True):
    """The asker's answer to a challenge."""

    proof: bytes


def check_plain(first: bytes | bytearray) -> None:
    """Check that a peer does not use TLS.

    Raises:  WrongFrameError: these are the first bytes of a TLS connection.
    """
    if first[0] in {TLS_HELLO, TLS_ALERT[0]}:
        raise WrongFrameError(ONE_SIDE)


def unpack_opening(frame: bytes) -> Opening:
    """Return the opening of a frame.   Raises:  WrongFrameError."""
    opening = unpack(Opening, frame)
    if len(opening.nonce) != NONCE_BYTES:
        raise WrongFrameError(f"an opening with a nonce of {len(opening.nonce)} bytes")
    return opening


def pack_challenge(key: bytes, opening: bytes, nonce: bytes) -> bytes:
    """Return the lender's answer to this opening."""
    return pack(Challenge(nonce, _proof(key, b"lender", opening, nonce)))


def answer_challenge(key: bytes, opening: bytes, frame: bytes) -> bytes:
    """Return the asker's answer to this challenge.

    Raises:  WrongFrameError: the lender does not have the key.
    """
    challenge = unpack(Challenge, frame)
    nonce = challenge.nonce
    is_proof = hmac.compare_digest(challenge.proof, _proof(key, b"lender", opening, nonce))
    if len(nonce) != NONCE_BYTES or not is_proof:
        raise WrongFrameError("it does not have the key of this generation")
    return pack(Proof(_proof(key, b"asker", opening, nonce)))


def check_proof(key: bytes, opening: bytes, nonce: bytes, frame: bytes) -> None:
    """Check the asker's proof.

    Raises:  WrongFrameError: the asker does not have the key.
    """
    if not hmac.compare_digest(unpack(Proof, frame).proof, _proof(key, b"asker", opening, nonce)):
        raise WrongFrameError("it does not have the key of this generation")


def _proof(key: bytes, role: bytes, opening: bytes, nonce: bytes) -> bytes:
    # The parts may be joined without separators: the opening begins with its length, a nonce has a
    # fixed length, and no role is a prefix of another role.
    return hmac.digest(key, role + b"\0" + opening + nonce, hashlib.sha256)
