"""The handshake of a data connection: both sides prove that they have the key of the job's
generation, without sending the key. Pure.

    asker   Opening    the ids of asker and lender, the job and its generation, and a nonce
    lender  Challenge  a nonce, and HMAC-SHA256(key, "lender", all of the opening, nonce)
    asker   Proof      HMAC-SHA256(key, "asker", all of the opening, nonce)

Each proof covers both nonces, so a recorded proof is worthless, and the role, so a proof cannot be
sent back to the side that made it. Each generation has a new key.

Later messages are not signed. If somebody could change packets on the way, use TLS (line_tls.py).
"""

from __future__ import annotations

import hashlib
import hmac

from dataplane.model.records import Unsigned
from dataplane.neighbours.wire import WrongFrameError, pack, unpack
from dataplane.rpc.codec import Message

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
