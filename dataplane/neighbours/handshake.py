"""How a data connection is opened: both sides show that they have the key of the job's generation,
which neither sends. Pure.

    asker   Opening    who asks whom, for which job and generation, and a nonce
    lender  Challenge  a nonce, and HMAC-SHA256(key, "lender", all of the opening, nonce)
    asker   Proof      HMAC-SHA256(key, "asker", all of the opening, nonce)

Each proof covers both nonces, so a recorded one is worth nothing, and the role, so a proof cannot
be sent back to the side that made it. A key is only as old as its generation.

What is sent later is not signed: against somebody who can change packets on the way, the network
must be trusted, or the connection be inside of TLS (line_tls.py).
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from msgspec import Struct

from dataplane.neighbours.wire import VERSION, WrongFrameError

NONCE_BYTES = 32
KEY_BYTES = 32
HANDSHAKE_S = 2.0
"""From the first byte to the last."""
NAME_BYTES_MAX = 1024
"""Bytes of an encoded job id or node id."""

ONE_SIDE = "peer_tls is set on one side only"
TLS_HELLO = 0x16
"""The first byte of a connection with TLS."""
TLS_ALERT = bytes.fromhex("1503030002020a")
"""The plain-text alert of TLS about an unexpected message, from a side that expects TLS and gets
something else, or the other way round, so that both know.
"""

_OPENING = struct.Struct("<4sHHHHQ32s")
_CHALLENGE = struct.Struct("<4s32s32s")
_PROOF = struct.Struct("<4s32s")
_OPENING_MAGIC, _CHALLENGE_MAGIC, _PROOF_MAGIC = b"DPno", b"DPnc", b"DPnp"
OPENING_HEAD_BYTES, CHALLENGE_BYTES, PROOF_BYTES = _OPENING.size, _CHALLENGE.size, _PROOF.size


class LineOpening(Struct, frozen=True):
    """The first message of a connection."""

    job_id: str
    generation: int
    asker_id: str
    lender_id: str
    nonce: bytes


def pack_opening(opening: LineOpening) -> bytes:
    """The opening as it is sent: the head, then at most NAME_BYTES_MAX bytes a name."""
    names = [name.encode() for name in (opening.job_id, opening.asker_id, opening.lender_id)]
    lengths = map(len, names)
    head = (_OPENING_MAGIC, VERSION, *lengths, opening.generation, opening.nonce)
    return _OPENING.pack(*head) + b"".join(names)


def opening_bytes(head: bytes | bytearray) -> int:
    """The length of an opening that begins with these OPENING_HEAD_BYTES.

    Raises:  WrongFrameError: it is none, or too long.
    """
    check_plain(head)
    magic, version, *lengths, _, _ = _OPENING.unpack(head)
    if magic != _OPENING_MAGIC:
        raise WrongFrameError(f"{magic!r} where an opening begins")
    if version != VERSION:
        raise WrongFrameError(f"an opening of version {version}, not {VERSION}")
    if max(lengths) > NAME_BYTES_MAX or not all(lengths):
        raise WrongFrameError(f"an opening with names of {lengths} bytes")
    return OPENING_HEAD_BYTES + int(sum(lengths))


def check_plain(first: bytes | bytearray) -> None:
    """Check that a peer does not use TLS.

    Raises:  WrongFrameError: these are the first bytes of a TLS connection.
    """
    if first[0] in {TLS_HELLO, TLS_ALERT[0]}:
        raise WrongFrameError(ONE_SIDE)


def is_opening(first: bytes) -> bool:
    """Whether an opening begins with this byte."""
    return _OPENING_MAGIC.startswith(first)


def unpack_opening(frame: bytes | bytearray) -> LineOpening:
    """Raises:  WrongFrameError."""
    if len(frame) < OPENING_HEAD_BYTES or opening_bytes(frame[:OPENING_HEAD_BYTES]) != len(frame):
        raise WrongFrameError(f"an opening of {len(frame)} bytes")
    _, _, job, asker, lender, generation, nonce = _OPENING.unpack(frame[:OPENING_HEAD_BYTES])
    at, names = OPENING_HEAD_BYTES, []
    for length in (job, asker, lender):
        try:
            names.append(bytes(frame[at : at + length]).decode())
        except UnicodeDecodeError:
            raise WrongFrameError("an opening with a name that is not UTF-8") from None
        at += length
    return LineOpening(names[0], generation, names[1], names[2], nonce)


def pack_challenge(key: bytes, opening: bytes, nonce: bytes) -> bytes:
    """Return the lender's answer to this opening: CHALLENGE_BYTES bytes."""
    return _CHALLENGE.pack(_CHALLENGE_MAGIC, nonce, _proof(key, b"lender", opening, nonce))


def answer_challenge(key: bytes, opening: bytes, frame: bytes) -> bytes:
    """Return the asker's answer to this challenge: PROOF_BYTES bytes.

    Raises:  WrongFrameError: the lender does not have the key.
    """
    magic, nonce, found = _CHALLENGE.unpack(frame)
    if magic != _CHALLENGE_MAGIC:
        raise WrongFrameError(f"{magic!r} where a challenge begins")
    if not hmac.compare_digest(found, _proof(key, b"lender", opening, nonce)):
        raise WrongFrameError("it does not have the key of this generation")
    return _PROOF.pack(_PROOF_MAGIC, _proof(key, b"asker", opening, nonce))


def check_proof(key: bytes, opening: bytes, nonce: bytes, frame: bytes | bytearray) -> None:
    """Check the asker's proof.

    Raises:  WrongFrameError: the asker does not have the key.
    """
    magic, found = _PROOF.unpack(frame)
    if magic != _PROOF_MAGIC:
        raise WrongFrameError(f"{magic!r} where a proof begins")
    if not hmac.compare_digest(found, _proof(key, b"asker", opening, nonce)):
        raise WrongFrameError("it does not have the key of this generation")


def _proof(key: bytes, role: bytes, opening: bytes, nonce: bytes) -> bytes:
    # Unambiguous: the opening has its own lengths, the nonce is fixed, and no role begins another.
    return hmac.digest(key, role + b"\0" + opening + nonce, hashlib.sha256)
